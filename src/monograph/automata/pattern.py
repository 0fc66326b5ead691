"""Reads regular expressions as people write them into byte expressions; docs/constraints.md lists
the supported syntax.

Unsupported syntax is refused by name. It is not regular (backreferences), or changes which of
several matches is found and not whether there is one (lazy quantifiers), or depends on the
surroundings (lookaround, word boundaries).
"""

import string
from typing import NamedTuple, NoReturn

from monograph.automata.expression import (
    ANY,
    Alternation,
    CodePoints,
    Concatenation,
    Encoding,
    Expression,
    Repetition,
    complement,
    single,
    union,
    utf8,
)
from monograph.errors import InputRefused

# Parsing recurses for each group; this depth is far below Python's own limit.
MAX_LENGTH, MAX_DEPTH = 20_000, 30

# The sets are those of ECMA-262 (2024: 12.2 White Space, 12.3 Line Terminators, 22.2.2 Pattern
# Semantics, without the flags i and s), which JSON schemas name for their patterns. Each is given
# once, and the rest is its complement.
_DIGITS: CodePoints = ((0x30, 0x39),)
_WORD = union((ord(first), ord(last)) for first, last in ("09", "AZ", "az", "__"))
_LINE_ENDS: CodePoints = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
# Tab, vertical tab, form feed, U+FEFF, and the space separators of Unicode, of general category Zs.
_BLANKS = union(
    [(0x09, 0x09), (0x0B, 0x0C), (0xFEFF, 0xFEFF)]
    + [
        (0x20, 0x20),
        (0xA0, 0xA0),
        (0x1680, 0x1680),
        (0x2000, 0x200A),
        (0x202F, 0x202F),
        (0x205F, 0x205F),
    ]
    + [(0x3000, 0x3000)]
)
_SPACE = union([*_BLANKS, *_LINE_ENDS])
_SETS = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_SETS |= {name.upper(): complement(points) for name, points in _SETS.items()}
_CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "0": 0}
_HEXADECIMAL = {"x": 2, "u": 4, "U": 8}
# Named, so that a refusal says what the construct is, not only where it stands.
_GROUPS = {
    "=": "lookahead",
    "!": "lookahead",
    "<=": "lookbehind",
    "<!": "lookbehind",
    ">": "an atomic group",
    "P<": "a named group",
    "<": "a named group",
    "P=": "a backreference",
    "(": "a conditional group",
    "#": "a comment",
}
_ASSERTIONS = {
    "b": "a word boundary",
    "B": "a word boundary",
    "A": "an anchor other than ^ and $",
    "p": "a property",
}
_ASSERTIONS |= {
    "Z": _ASSERTIONS["A"],
    "z": _ASSERTIONS["A"],
    "P": "a property",
    "k": "a backreference",
}


class Branch(NamedTuple):
    """One alternative of a pattern.

    Attributes:
        body: the expression between the anchors.
        begins: whether ^ stands before the body.
        ends: whether $ stands after the body.
    """

    body: Expression
    begins: bool
    ends: bool


def whole(pattern: str, where: str, encoding: Encoding = utf8) -> Expression:
    r"""Return an expression for the texts that the pattern matches as a whole, as `re.fullmatch`
    does.

    The sets \d, \w and \s and the dot are those of ECMA-262.

    Args:
        pattern: the regular expression.
        where: the pattern's name in an error.
        encoding: returns the byte expression of one character of a set.

    Raises:
        InputRefused: the pattern is outside the subset; the message names the construct and its
            position.
    """
    return Alternation(tuple(branch.body for branch in branches(pattern, where, encoding)))


def found_in(pattern: str, where: str, encoding: Encoding = utf8) -> Expression:
    """Return an expression for the texts in which the pattern matches somewhere, as `re.search`
    does; see `whole`.
    """
    # As with `re.search`: only an anchor keeps other text from standing before or after the match.
    anything = Repetition(encoding(ANY), 0, None)
    return Alternation(
        tuple(
            Concatenation((*([] if begins else [anything]), body, *([] if ends else [anything])))
            for body, begins, ends in branches(pattern, where, encoding)
        )
    )


def branches(pattern: str, where: str, encoding: Encoding) -> list[Branch]:
    """Return the alternatives at the top level of a pattern; see `whole`."""
    if len(pattern) > MAX_LENGTH:
        raise InputRefused(
            f"{where} has {len(pattern):,} characters; at most {MAX_LENGTH:,} are read"
        )
    reader = _Reader(pattern, where, encoding)
    alternatives = [reader.branch()]
    while reader.take("|"):
        alternatives.append(reader.branch())
    if reader.at < len(pattern):
        reader.refuse("an unopened ')'", r"write \) for the character")
    return alternatives


class _Reader:
    """Parses a pattern by recursive descent: alternation, concatenation, repetition, atom."""

    def __init__(self, pattern: str, where: str, encoding: Encoding) -> None:
        self.pattern = pattern
        self.where = where
        self.encoding = encoding
        self.at, self.depth = 0, 0

    def refuse(self, what: str, advice: str, at: int | None = None) -> NoReturn:
        raise InputRefused(
            f"{self.where}: {what} at position {self.at if at is None else at}: {advice}"
        )

    def peek(self) -> str:
        return self.pattern[self.at : self.at + 1]

    def take(self, wanted: str) -> bool:
        taken = self.pattern.startswith(wanted, self.at)
        self.at += len(wanted) * taken
        return taken

    def branch(self) -> Branch:
        # Only at the ends of a whole alternative: `found_in` has to know which alternatives are
        # anchored.
        begins = self.take("^")
        body = self.concatenation()
        ends = self.take("$")
        if ends and self.peek() not in ("", "|"):
            self.refuse(
                "an anchor inside the pattern", "^ and $ may only stand at its ends", self.at - 1
            )
        return Branch(body, begins, ends)

    def alternation(self) -> Expression:
        options = [self.concatenation()]
        while self.take("|"):
            options.append(self.concatenation())
        return options[0] if len(options) == 1 else Alternation(tuple(options))

    def concatenation(self) -> Expression:
        parts: list[Expression] = []
        # A `$` in a group falls through to `atom`, which refuses it by name.
        while self.peek() not in ("", "|", ")") and not (self.peek() == "$" and self.depth == 0):
            parts.append(self.repetition())
        return parts[0] if len(parts) == 1 else Concatenation(tuple(parts))

    def repetition(self) -> Expression:
        part = self.atom()
        if (counts := self.counts()) is None:
            return part
        # Refused although a lazy quantifier matches the same whole texts: its author expects it to
        # change something.
        if self.peek() in ("?", "+"):
            kind = "a lazy quantifier" if self.peek() == "?" else "a possessive quantifier"
            self.refuse(kind, "the whole text is matched, so write the quantifier alone")
        if self.peek() in ("*", "{"):
            self.refuse("a quantifier of a quantifier", "put what it repeats into a group")
        return Repetition(part, *counts)

    def counts(self) -> tuple[int, int | None] | None:
        start = self.at
        for sign, counts in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self.take(sign):
                return counts
        if not self.take("{"):
            return None
        least = self.digits()
        comma = self.take(",")
        most = self.digits()
        # `re` reads a brace that begins no count as a character; a typo in a count would then pass
        # unseen.
        if not self.take("}") or not (least or most) or (most and not comma):
            self.refuse(
                "a '{' that begins no count",
                r"write {m}, {m,} or {m,n}, or \{ for the character",
                start,
            )
        # Python repeats up to n times there, and ECMA-262 reads the characters of the braces.
        if not least:
            self.refuse("a count without a lower bound", f"write {{0,{most}}}", start)
        most = most if comma else least
        if most and int(most) < int(least or 0):
            self.refuse("a count whose upper bound is below its lower one", "swap them", start)
        return int(least or 0), int(most) if most else None

    def digits(self) -> str:
        start = self.at
        while self.peek() and self.peek() in string.digits:
            self.at += 1
        # int() refuses thousands of digits with an error of its own.
        if self.at - start > 9:
            self.refuse(
                "a count of more than nine digits", "no automaton has that many states", start
            )
        return self.pattern[start : self.at]

    def atom(self) -> Expression:
        start = self.at
        sign = self.peek()
        if sign in ("*", "+", "?", "{"):
            self.refuse(f"a {sign!r} with nothing to repeat", f"write \\{sign} for the character")
        if sign in ("^", "$"):
            self.refuse("an anchor inside the pattern", "^ and $ may only stand at its ends")
        self.at += 1
        if sign == "(":
            return self.group(start)
        if sign == "[":
            return self.encoding(self.character_set(start))
        if sign == ".":
            return self.encoding(complement(_LINE_ENDS))
        return self.encoding(self.escape(start) if sign == "\\" else single(ord(sign)))

    def group(self, start: int) -> Expression:
        if self.take("?") and not self.take(":"):
            names = [self.pattern[self.at : self.at + length] for length in (2, 1)]
            name = next(
                (_GROUPS[name] for name in names if name in _GROUPS), "a flag or unknown group"
            )
            self.refuse(name, "groups are (...) and (?:...)", start)
        if self.depth == MAX_DEPTH:
            self.refuse("a group", f"at most {MAX_DEPTH} lie inside each other", start)
        self.depth += 1
        inner = self.alternation()
        self.depth -= 1
        if not self.take(")"):
            self.refuse("a '(' that is not closed", r"write \( for the character", start)
        return inner

    def escape(self, start: int) -> CodePoints:
        """Read the character or set after a backslash; the backslash at `start` has been read."""
        letter = self.peek()
        self.at += 1
        if letter in _SETS:
            return _SETS[letter]
        if letter in _ASSERTIONS or (letter.isdigit() and (letter != "0" or self.peek().isdigit())):
            name = _ASSERTIONS.get(letter, "a backreference or octal number")
            self.refuse(f"{name} (\\{letter})", "it is not part of the subset", start)
        if letter == "u" and self.peek() == "{":
            return single(self.braced(start))
        if letter in _HEXADECIMAL:
            number = self.pattern[self.at : self.at + _HEXADECIMAL[letter]]
            self.at += len(number)
            # Compared as a set of letters, because int() also takes signs, spaces and underscores.
            if len(number) < _HEXADECIMAL[letter] or not set(number) <= set(string.hexdigits):
                self.refuse(
                    f"\\{letter}", f"{_HEXADECIMAL[letter]} hexadecimal digits must follow", start
                )
            if int(number, 16) > ANY[0][1]:
                self.refuse(f"\\{letter}{number}", "there is no such character", start)
            return single(self.paired(int(number, 16)) if letter == "u" else int(number, 16))
        if letter in _CONTROLS:
            return single(_CONTROLS[letter])
        # Letters are reserved for escapes that `re` may have or get; any other character stands for
        # itself.
        if not letter or letter.isalnum():
            self.refuse(f"the escape \\{letter}", "it is not part of the subset", start)
        return single(ord(letter))

    def braced(self, start: int) -> int:
        r"""Read the braces of `\u{...}` and return the code point."""
        end = self.pattern.find("}", self.at)
        number = self.pattern[self.at + 1 : max(end, self.at)]
        if not number or not set(number) <= set(string.hexdigits):
            self.refuse(r"\u{", r"write the character's number as \u{1F600}", start)
        number = number.lstrip("0") or "0"
        if len(number) > 6 or int(number, 16) > ANY[0][1]:
            self.refuse(f"\\u{{{number[:12]}}}", "there is no such character", start)
        self.at = end + 1
        return int(number, 16)

    def paired(self, unit: int) -> int:
        r"""Return the character of a UTF-16 unit: with a second half as `\uXXXX` after a first one,
        that of both.
        """
        low = self.pattern[self.at + 2 : self.at + 6]
        follows = (
            self.pattern.startswith(r"\u", self.at)
            and len(low) == 4
            and set(low) <= set(string.hexdigits)
        )
        if not 0xD800 <= unit <= 0xDBFF or not follows or not 0xDC00 <= int(low, 16) <= 0xDFFF:
            return unit
        self.at += 6
        return 0x10000 + ((unit - 0xD800) << 10) + (int(low, 16) - 0xDC00)

    def character_set(self, start: int) -> CodePoints:
        """Read a set of characters; its `[` at `start` has been read."""
        negated = self.take("^")
        ranges: list[tuple[int, int]] = []
        # A bracket after the opening one is the character in Python and the end of an empty set in
        # JavaScript.
        if self.peek() == "]":
            self.refuse("a set that begins with ']'", r"write \] for the character", start)
        while not self.take("]"):
            if not self.peek():
                self.refuse("a '[' that is not closed", r"write \[ for the character", start)
            # POSIX names such as [:alpha:] would be read as a set of their letters.
            if self.pattern.startswith("[:", self.at):
                self.refuse("a named set", r"use \d, \w, \s or ranges")
            ranges.extend(self.character_range())
        points = union(ranges)
        return complement(points) if negated else points

    def character_range(self) -> CodePoints:
        r"""Read one member of a set: a character, a range of characters, or a class such as \d."""
        start = self.at
        first = self.member()
        # A hyphen before the closing bracket is the character.
        if self.peek() != "-" or self.pattern.startswith("-]", self.at):
            return first
        self.at += 1
        last = self.member() if self.peek() else ()
        if any(len(end) != 1 or end[0][0] != end[0][1] for end in (first, last)):
            self.refuse("a range", "it goes from one character to another", start)
        if last[0][0] < first[0][0]:
            self.refuse("a range whose end comes before its beginning", "swap them", start)
        return ((first[0][0], last[0][0]),)

    def member(self) -> CodePoints:
        start = self.at
        sign = self.peek()
        self.at += 1
        return self.escape(start) if sign == "\\" else single(ord(sign))
