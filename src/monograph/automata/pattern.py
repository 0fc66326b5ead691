"""Parse regular expressions, as users write them, to expressions over UTF-8 bytes.

The expressions are those of `monograph.automata.expression`. docs/constraints.md lists the supported
syntax. Other syntax is refused by name, for one of three reasons:

- It is not regular (backreferences).
- It changes which of several matches is found, and not whether there is a match (lazy quantifiers).
- It depends on the text around a match (lookaround, word boundaries).
"""

import string
from typing import NamedTuple, NoReturn

from monograph.automata.expression import (
    ANY,
    LAST_CODE_POINT,
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

MAX_PATTERN_LENGTH = 20_000  # characters
# The largest number of groups inside each other. Parsing recurses once for each group, and this depth
# is far below Python's own limit.
MAX_DEPTH = 30

# The sets of characters are those of ECMA-262 (2024: 12.2 White Space, 12.3 Line Terminators,
# 22.2.2 Pattern Semantics, without the flags i and s), because JSON schemas refer to ECMA-262 for
# their patterns.
_DIGITS: CodePoints = ((0x30, 0x39),)
_WORD = union([(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)])  # 0-9, A-Z, _, a-z
_LINE_ENDS: CodePoints = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
# Unicode's space separators (general category Zs).
_SPACE_SEPARATORS: CodePoints = (
    (0x20, 0x20),
    (0xA0, 0xA0),
    (0x1680, 0x1680),
    (0x2000, 0x200A),
    (0x202F, 0x202F),
    (0x205F, 0x205F),
    (0x3000, 0x3000),
)
# Tab, vertical tab and form feed, and U+FEFF.
_OTHER_BLANKS: CodePoints = ((0x09, 0x09), (0x0B, 0x0C), (0xFEFF, 0xFEFF))
_SPACE = union([*_SPACE_SEPARATORS, *_OTHER_BLANKS, *_LINE_ENDS])
_SETS = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_SETS |= {name.upper(): complement(points) for name, points in _SETS.items()}
# The code points of escapes such as \n.
_CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "0": 0}
# The number of hexadecimal digits after escapes such as \x.
_HEXADECIMAL_DIGITS = {"x": 2, "u": 4, "U": 8}
# The names of unsupported groups, for errors. Such a group begins with `(?` and the key's characters.
_UNSUPPORTED_GROUPS = {
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
# The names of unsupported escapes, for errors. Such an escape is a backslash and the key's letter.
_UNSUPPORTED_ESCAPES = {
    "b": "a word boundary",
    "B": "a word boundary",
    "A": "an anchor other than ^ and $",
    "Z": "an anchor other than ^ and $",
    "z": "an anchor other than ^ and $",
    "p": "a property",
    "P": "a property",
    "k": "a backreference",
}


class Branch(NamedTuple):
    """One alternative at the top level of a pattern.

    Attributes:
        body: the expression between the anchors.
        anchored_at_start: whether ^ is before the body.
        anchored_at_end: whether $ is after the body.
    """

    body: Expression
    anchored_at_start: bool
    anchored_at_end: bool


def fullmatch_expression(pattern: str, where: str, encoding: Encoding = utf8) -> Expression:
    r"""Return an expression for the texts that `re.fullmatch` accepts for a pattern.

    The sets \d, \w and \s and the dot are those of ECMA-262, not those of `re`.

    Args:
        pattern: the regular expression.
        where: the pattern's name in an error.
        encoding: returns an expression for one character of a set. It takes the set as code points, and the
            expression matches the bytes of the character.

    Raises:
        InputRefused: the pattern has unsupported syntax. The message names the construct and its
            position.
    """
    # Anchors are left out, because they change nothing if the whole text must match.
    return Alternation(tuple(branch.body for branch in branches(pattern, where, encoding)))


def search_expression(pattern: str, where: str, encoding: Encoding = utf8) -> Expression:
    """Return an expression for the texts in which `re.search` finds a match of a pattern.

    Arguments and errors are those of `fullmatch_expression`.
    """
    # Any text may be before and after the match, except where the pattern has an anchor.
    anything = Repetition(encoding(ANY), 0, None)
    options = list[Expression]()
    for branch in branches(pattern, where, encoding):
        parts = [branch.body]
        if not branch.anchored_at_start:
            parts.insert(0, anything)
        if not branch.anchored_at_end:
            parts.append(anything)
        options.append(Concatenation(tuple(parts)))
    return Alternation(tuple(options))


def branches(pattern: str, where: str, encoding: Encoding) -> list[Branch]:
    """Parse a pattern, and return the alternatives at its top level.

    Arguments and errors are those of `fullmatch_expression`.
    """
    if len(pattern) > MAX_PATTERN_LENGTH:
        raise InputRefused(
            f"{where} has {len(pattern):,} characters; at most {MAX_PATTERN_LENGTH:,} are read"
        )
    parser = _Parser(pattern, where, encoding)
    alternatives = [parser.branch()]
    while parser.take("|"):
        alternatives.append(parser.branch())
    # `branch` stops at the end of the pattern, at "|" or at ")". So if something is left, it begins with ")".
    if parser.position < len(pattern):
        parser.refuse("an unopened ')'", r"write \) for the character")
    return alternatives


class _Parser:
    """Parses a pattern by recursive descent.

    Each method is named for a part of the grammar. It reads this part, beginning at `position`, and returns
    what the part means: an expression, a set of code points, or numbers.

        branch         = ["^"] concatenation ["$"]
        alternation    = concatenation {"|" concatenation}
        concatenation  = {repetition}
        repetition     = atom [counts]
        atom           = group | character_set | "." | escape | character

    Attributes:
        pattern: the pattern.
        where: the pattern's name in an error.
        encoding: see `fullmatch_expression`.
        position: the index of the next character to read.
        depth: the number of open groups.
    """

    def __init__(self, pattern: str, where: str, encoding: Encoding) -> None:
        self.pattern = pattern
        self.where = where
        self.encoding = encoding
        self.position = 0
        self.depth = 0

    def refuse(self, construct: str, advice: str, position: int | None = None) -> NoReturn:
        """Refuse a construct at `position`; None: at the next character to read."""
        if position is None:
            position = self.position
        raise InputRefused(f"{self.where}: {construct} at position {position}: {advice}")

    def peek(self) -> str:
        """Return the next character, which stays unread; "" at the end."""
        return self.pattern[self.position : self.position + 1]

    def take(self, text: str) -> bool:
        """Read a text if the pattern continues with it, and return whether it does."""
        if not self.pattern.startswith(text, self.position):
            return False
        self.position += len(text)
        return True

    def branch(self) -> Branch:
        # Anchors are only allowed here, because `search_expression` has to know for each
        # alternative of the whole pattern whether it is anchored.
        anchored_at_start = self.take("^")
        body = self.concatenation()
        anchored_at_end = self.take("$")
        if anchored_at_end and self.peek() not in ("", "|"):
            self.refuse(
                "an anchor inside the pattern",
                "^ and $ may only stand at its ends",
                self.position - 1,
            )
        return Branch(body, anchored_at_start, anchored_at_end)

    def alternation(self) -> Expression:
        options = [self.concatenation()]
        while self.take("|"):
            options.append(self.concatenation())
        return options[0] if len(options) == 1 else Alternation(tuple(options))

    def concatenation(self) -> Expression:
        parts: list[Expression] = []
        while self.peek() not in ("", "|", ")"):
            # `branch` reads a "$" at the top level; `atom` refuses a "$" in a group.
            if self.peek() == "$" and self.depth == 0:
                break
            parts.append(self.repetition())
        return parts[0] if len(parts) == 1 else Concatenation(tuple(parts))

    def repetition(self) -> Expression:
        part = self.atom()
        counts = self.counts()
        if counts is None:
            return part
        # Only whether the whole text matches is of interest here. A lazy quantifier would not change that. It
        # is refused, because its author expects it to change something. A possessive quantifier, which never
        # gives back what it has read, would match fewer texts.
        if self.peek() in ("?", "+"):
            construct = "a lazy quantifier" if self.peek() == "?" else "a possessive quantifier"
            self.refuse(construct, "the whole text is matched, so write the quantifier alone")
        if self.peek() in ("*", "{"):
            self.refuse("a quantifier of a quantifier", "put what it repeats into a group")
        return Repetition(part, *counts)

    def counts(self) -> tuple[int, int | None] | None:
        """Read a quantifier.

        Returns:
            The smallest and the largest number of repetitions. The largest number is None if there is no
            limit. If there is no quantifier, the whole result is None.
        """
        start = self.position
        if self.take("*"):
            return 0, None
        if self.take("+"):
            return 1, None
        if self.take("?"):
            return 0, 1
        if not self.take("{"):
            return None
        minimum = self.digits()
        comma = self.take(",")
        maximum = self.digits()
        is_closed = self.take("}")
        # `re` reads a brace that does not begin a count as a character, so it does not notice a typo in
        # a count. Here such a brace is refused.
        if not is_closed or not (minimum or maximum):
            self.refuse(
                "a '{' that begins no count",
                r"write {m}, {m,} or {m,n}, or \{ for the character",
                start,
            )
        # {,n} is refused: in Python it means up to n times, and in ECMA-262 it matches the characters "{,n}".
        if not minimum:
            self.refuse("a count without a lower bound", f"write {{0,{maximum}}}", start)
        if not comma:
            return int(minimum), int(minimum)
        if not maximum:
            return int(minimum), None
        if int(maximum) < int(minimum):
            self.refuse("a count whose upper bound is below its lower bound", "swap them", start)
        return int(minimum), int(maximum)

    def digits(self) -> str:
        start = self.position
        while self.peek() and self.peek() in string.digits:
            self.position += 1
        # Long counts are refused here, because int() refuses thousands of digits with an error of
        # its own.
        if self.position - start > 9:
            self.refuse(
                "a count of more than nine digits", "no automaton has that many states", start
            )
        return self.pattern[start : self.position]

    def atom(self) -> Expression:
        start = self.position
        character = self.peek()
        if character in ("*", "+", "?", "{"):
            self.refuse(
                f"a {character!r} with nothing to repeat", f"write \\{character} for the character"
            )
        if character in ("^", "$"):
            self.refuse("an anchor inside the pattern", "^ and $ may only stand at its ends")
        self.position += 1
        if character == "(":
            return self.group(start)
        if character == "[":
            return self.encoding(self.character_set(start))
        if character == ".":
            return self.encoding(complement(_LINE_ENDS))
        if character == "\\":
            return self.encoding(self.escape(start))
        return self.encoding(single(ord(character)))

    def group(self, start: int) -> Expression:
        """Read a group; its `(` at `start` has been read."""
        if self.take("?") and not self.take(":"):
            construct = "a flag or unknown group"
            # Two characters are tried first, because "<=" (lookbehind) begins with "<" (a named
            # group).
            for length in (2, 1):
                name = self.pattern[self.position : self.position + length]
                if name in _UNSUPPORTED_GROUPS:
                    construct = _UNSUPPORTED_GROUPS[name]
                    break
            self.refuse(construct, "groups are (...) and (?:...)", start)
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
        self.position += 1
        if letter in _SETS:
            return _SETS[letter]
        # \0 without a digit after it is the character NUL.
        is_number = letter.isdigit() and (letter != "0" or self.peek().isdigit())
        if letter in _UNSUPPORTED_ESCAPES or is_number:
            name = _UNSUPPORTED_ESCAPES.get(letter, "a backreference or octal number")
            self.refuse(f"{name} (\\{letter})", "it is not part of the subset", start)
        if letter == "u" and self.peek() == "{":
            return single(self.code_point_in_braces(start))
        if letter in _HEXADECIMAL_DIGITS:
            return single(self.hexadecimal_escape(letter, start))
        if letter in _CONTROLS:
            return single(_CONTROLS[letter])
        # Other letters and digits are refused, because `re` has reserved them for new escapes. Any
        # other character stands for itself.
        if not letter or letter.isalnum():
            self.refuse(f"the escape \\{letter}", "it is not part of the subset", start)
        return single(ord(letter))

    def hexadecimal_escape(self, letter: str, start: int) -> int:
        r"""Read the digits after \x, \u or \U, and return the code point."""
        count = _HEXADECIMAL_DIGITS[letter]
        digits = self.pattern[self.position : self.position + count]
        self.position += len(digits)
        if len(digits) < count or not _are_hexadecimal(digits):
            self.refuse(f"\\{letter}", f"{count} hexadecimal digits must follow", start)
        number = int(digits, 16)
        if number > LAST_CODE_POINT:
            self.refuse(f"\\{letter}{digits}", "there is no such character", start)
        return self.join_surrogates(number) if letter == "u" else number

    def code_point_in_braces(self, start: int) -> int:
        r"""Read the braces of `\u{...}` and return the code point."""
        end = self.pattern.find("}", self.position)
        digits = self.pattern[self.position + 1 : end]
        if end < 0 or not digits or not _are_hexadecimal(digits):
            self.refuse(r"\u{", r"write the character's number as \u{1F600}", start)
        digits = digits.lstrip("0") or "0"
        # The length is checked first, so that thousands of digits are never converted.
        if len(digits) > 6 or int(digits, 16) > LAST_CODE_POINT:
            self.refuse(f"\\u{{{digits[:12]}}}", "there is no such character", start)
        self.position = end + 1
        return int(digits, 16)

    def join_surrogates(self, first: int) -> int:
        r"""Read the second `\uXXXX` of a UTF-16 pair, if there is one.

        Args:
            first: the number of the `\uXXXX` that has been read. It may begin a pair.

        Returns:
            The code point of the pair; `first` if there is no pair.
        """
        if not 0xD800 <= first <= 0xDBFF or not self.pattern.startswith(r"\u", self.position):
            return first
        digits = self.pattern[self.position + 2 : self.position + 6]
        if len(digits) < 4 or not _are_hexadecimal(digits):
            return first
        second = int(digits, 16)
        if not 0xDC00 <= second <= 0xDFFF:
            return first
        self.position += 6
        return 0x10000 + ((first - 0xD800) << 10) + (second - 0xDC00)

    def character_set(self, start: int) -> CodePoints:
        """Read a set of characters; its `[` at `start` has been read."""
        negated = self.take("^")
        ranges: list[tuple[int, int]] = []
        # This bracket is refused, because Python reads it as a character, and JavaScript reads it
        # as the end of an empty set.
        if self.peek() == "]":
            self.refuse("a set that begins with ']'", r"write \] for the character", start)
        while not self.take("]"):
            if not self.peek():
                self.refuse("a '[' that is not closed", r"write \[ for the character", start)
            # A POSIX name such as [:alpha:] is refused, because it would be read as a set of its
            # letters.
            if self.pattern.startswith("[:", self.position):
                self.refuse("a named set", r"use \d, \w, \s or ranges")
            ranges.extend(self.character_range())
        points = union(ranges)
        return complement(points) if negated else points

    def character_range(self) -> CodePoints:
        r"""Read a character, a range of characters, or a set such as \d, between brackets."""
        start = self.position
        first = self.member()
        # A hyphen before the closing bracket stands for itself.
        if self.peek() != "-" or self.pattern.startswith("-]", self.position):
            return first
        self.position += 1
        # At the end of the pattern there is no other end of the range. The empty set is then refused below.
        last = self.member() if self.peek() else ()
        first_point = _only_point(first)
        last_point = _only_point(last)
        if first_point is None or last_point is None:
            self.refuse("a range", "it goes from one character to another", start)
        if last_point < first_point:
            self.refuse("a range whose end comes before its beginning", "swap them", start)
        return ((first_point, last_point),)

    def member(self) -> CodePoints:
        r"""Read a character or a set such as \d, between brackets."""
        start = self.position
        character = self.peek()
        self.position += 1
        return self.escape(start) if character == "\\" else single(ord(character))


def _are_hexadecimal(digits: str) -> bool:
    # int() cannot decide this, because it also accepts signs, spaces and underscores.
    return set(digits) <= set(string.hexdigits)


def _only_point(points: CodePoints) -> int | None:
    """Return the code point of a set that has exactly one; None for other sets."""
    if len(points) != 1:
        return None
    first, last = points[0]
    return first if first == last else None
