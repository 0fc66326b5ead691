r"""Grammars as llama.cpp's users write them (GBNF), for `--grammar` and the field `grammar`.

A grammar is a list of rules `name ::= alternatives`. The texts of the rule `root` are accepted.

| syntax | stands for |
|---|---|
| `"text"` | the text; `\n \r \t \\ \" \[ \] \xHH \uHHHH \UHHHHHHHH` are characters |
| `[a-z_]`, `[^"]`, `.` | one character of a set, one that is not in it, any one |
| `name`, `( ... )` | a text of a rule; alternatives |
| `a b`, `a \| b` | one after another, one of them |
| `* + ? {m} {m,} {m,n}` | counts of what stands before |
| `# ...` | a comment, up to the end of the line |

A rule ends where its line ends. But a line's end inside parentheses, after `::=`, or before or after `|` does not
end it. A character is a code point, as in llama.cpp.

A grammar without recursion describes a regular language, and is compiled to an automaton in the graph
(`expression_of`). A recursive one needs a stack, which only the host has (`monograph.automata.on_host`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple, NoReturn

from monograph.automata.expression import (
    ANY,
    LAST_CODE_POINT,
    Alternation,
    Concatenation,
    Expression,
    Repetition,
    complement,
    single,
    union,
    utf8,
)
from monograph.automata.rules import (
    ROOT,
    AnyOf,
    InOrder,
    OneCharacter,
    Repeated,
    RuleText,
    Symbol,
)
from monograph.errors import InputRefused

MAX_GRAMMAR_LENGTH = 1 << 16  # characters
MAX_COUNT = 2_000  # the largest count of a repetition, as in llama.cpp
MAX_DEPTH = 50  # the largest number of parentheses inside each other
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_BLANK = re.compile(r"(?:[ \t]|#[^\n\r]*)*")
_BLANK_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\n\r]*)*")
_COUNTS = re.compile(r"\{[ \t]*([0-9]{1,9})[ \t]*(,?)[ \t]*([0-9]{0,9})[ \t]*\}")
_ESCAPES = {letter: ord(letter) for letter in '\\"[]'} | {"n": 10, "r": 13, "t": 9}
_HEX_LENGTHS = {"x": 2, "u": 4, "U": 8}


class GbnfGrammar(NamedTuple):
    """A grammar.

    Attributes:
        rules: the rules that `root` needs, by name. Each rule and each option in it accepts at least one
            text, so every beginning of a text that is allowed can be finished.
        is_recursive: whether a rule uses itself, directly or through other rules.
        where: the grammar's name in an error.
    """

    rules: Mapping[str, Symbol]
    is_recursive: bool
    where: str


def parse_grammar(text: str, where: str = "the grammar") -> GbnfGrammar:
    """Return a grammar.

    Args:
        text: the grammar in GBNF.
        where: its name in an error, such as a file.

    Raises:
        InputRefused: the text is not a grammar, or the grammar accepts no text. For a mistake in the
            syntax the message has the line, the column and what was expected.
    """
    if len(text) > MAX_GRAMMAR_LENGTH:
        raise InputRefused(
            f"{where}: {len(text):,} characters; at most {MAX_GRAMMAR_LENGTH:,} are read"
        )
    rules = _Parser(text, where).rules()
    if ROOT not in rules:
        raise InputRefused(f"{where}: expected a rule {ROOT} ::= ..., which accepts the whole text")
    productive = _productive(rules)
    if ROOT not in productive:
        raise InputRefused(
            f"{where}: the rule {ROOT} never comes to an end, so no text has its form"
        )
    pruned = {name: _pruned(rules[name], productive) for name in productive}
    reachable = _reachable(pruned)
    needed = {name: pruned[name] for name in rules if name in reachable}
    return GbnfGrammar(needed, _uses_itself(needed), where)


def expression_of(grammar: GbnfGrammar) -> Expression:
    """Return an expression for the texts of a grammar that is not recursive, over their bytes in UTF-8."""
    known: dict[str, Expression] = {}

    def convert(symbol: Symbol) -> Expression:
        match symbol:
            case OneCharacter(points):
                return utf8(points)
            case InOrder(parts):
                return Concatenation(tuple(map(convert, parts)))
            case AnyOf(options):
                return Alternation(tuple(map(convert, options)))
            case Repeated(part, least, most):
                return Repetition(convert(part), least, most)
            case RuleText(name):
                if name not in known:
                    known[name] = convert(grammar.rules[name])
                return known[name]
        raise TypeError(f"{symbol}: only the host can follow it")

    return convert(RuleText(ROOT))


class _Parser:
    """Reads rules from left to right.

    Attributes:
        text: the grammar.
        where: its name in an error.
        position: the index of the next character.
    """

    def __init__(self, text: str, where: str) -> None:
        self.text = text
        self.where = where
        self.position = 0
        # The place where each rule is used first, for an error if there is no such rule.
        self._uses: dict[str, int] = {}

    def refuse(self, fault: str, position: int | None = None) -> NoReturn:
        """Raise an error with the line and the column of a position; None: the next character's."""
        at = self.position if position is None else position
        line = self.text.count("\n", 0, at) + 1
        column = at - (self.text.rfind("\n", 0, at) + 1) + 1
        raise InputRefused(f"{self.where}: line {line}, column {column}: {fault}")

    def rules(self) -> dict[str, Symbol]:
        """Return all rules."""
        rules: dict[str, Symbol] = {}
        self.skip(_BLANK_AND_LINES)
        while self.position < len(self.text):
            start = self.position
            name = self.name()
            if name is None:
                self.refuse(f"expected the name of a rule, not {self.found()}")
            if name in rules:
                self.refuse(f"the rule {name} is there twice", start)
            self.skip(_BLANK)
            if not self.take("::="):
                self.refuse(f"expected ::= after the name {name}, not {self.found()}")
            self.skip(_BLANK_AND_LINES)
            rules[name] = self.choice(depth=0)
            self.skip(_BLANK)
            if self.position < len(self.text) and self.text[self.position] not in "\r\n":
                self.refuse(f"expected the end of the rule, or | or an element, not {self.found()}")
            self.skip(_BLANK_AND_LINES)
        for name, position in self._uses.items():
            if name not in rules:
                self.refuse(f"there is no rule {name}", position)
        return rules

    def choice(self, depth: int) -> Symbol:
        """Read alternatives; `depth` counts the open parentheses."""
        if depth > MAX_DEPTH:
            self.refuse(f"parentheses may be nested at most {MAX_DEPTH} deep")
        options = [self.sequence(depth)]
        while self.take_bar():
            self.skip(_BLANK_AND_LINES)
            options.append(self.sequence(depth))
        return options[0] if len(options) == 1 else AnyOf(tuple(options))

    def take_bar(self) -> bool:
        """Read a |, which may be on a later line; return whether there is one."""
        start = self.position
        self.skip(_BLANK_AND_LINES)
        if self.take("|"):
            return True
        self.position = start
        return False

    def sequence(self, depth: int) -> Symbol:
        """Read elements with their counts, one after another."""
        # Inside parentheses a line's end is a blank like others.
        blank = _BLANK_AND_LINES if depth else _BLANK
        parts: list[Symbol] = []
        self.skip(blank)
        while (element := self.element(depth)) is not None:
            self.skip(blank)
            parts.append(self.counted(element, blank))
        return parts[0] if len(parts) == 1 else InOrder(tuple(parts))

    def element(self, depth: int) -> Symbol | None:
        """Read an element without its count; None: there is none."""
        start = self.position
        if self.take('"'):
            return self.text_in_quotes(start)
        if self.take("["):
            return self.character_set(start)
        if self.take("."):
            return OneCharacter(ANY)
        if self.take("("):
            self.skip(_BLANK_AND_LINES)
            inner = self.choice(depth + 1)
            if not self.take(")"):
                self.refuse(f"expected ), not {self.found()}")
            return inner
        if self.text.startswith(("<", "!<"), self.position):
            self.refuse("tokens such as <think> are not supported: write the text")
        name = self.name()
        if name is None:
            return None
        self._uses.setdefault(name, start)
        return RuleText(name)

    def counted(self, part: Symbol, blank: re.Pattern[str]) -> Symbol:
        """Read the counts after an element, if there are any, and return the element with them."""
        if not self.text.startswith(("*", "+", "?", "{"), self.position):
            return part
        start = self.position
        least, most = self.counts()
        if max(least, most or 0) > MAX_COUNT:
            self.refuse(f"a count is at most {MAX_COUNT:,}", start)
        self.skip(blank)
        if self.text.startswith(("*", "+", "?", "{"), self.position):
            self.refuse("a count after a count: put the element and its first count in parentheses")
        return Repeated(part, least, most)

    def counts(self) -> tuple[int, int | None]:
        """Read `*`, `+`, `?` or counts in braces; return the smallest and the largest count."""
        for sign, bounds in {"*": (0, None), "+": (1, None), "?": (0, 1)}.items():
            if self.take(sign):
                return bounds
        found = _COUNTS.match(self.text, self.position)
        if found is None:
            self.refuse("expected {m}, {m,} or {m,n}")
        least_digits, comma, most_digits = found.groups()
        if not comma and most_digits:
            self.refuse("expected {m}, {m,} or {m,n}")
        least = int(least_digits)
        most: int | None = least
        if comma:
            most = int(most_digits) if most_digits else None
        if most is not None and most < least:
            self.refuse(f"the second count, {most}, is less than the first, {least}")
        self.position = found.end()
        return least, most

    def text_in_quotes(self, start: int) -> InOrder:
        """Read a text whose opening quote, at `start`, has been read."""
        characters: list[Symbol] = []
        while not self.take('"'):
            characters.append(OneCharacter(single(self.character(start, '"'))))
        return InOrder(tuple(characters))

    def character_set(self, start: int) -> OneCharacter:
        """Read a set of characters whose opening bracket, at `start`, has been read."""
        is_negated = self.take("^")
        ranges: list[tuple[int, int]] = []
        while not self.take("]"):
            at = self.position
            first = last = self.character(start, "]")
            # A hyphen before the closing bracket stands for itself.
            is_last = self.text.startswith("-]", self.position)
            if not is_last and self.take("-"):
                last = self.character(start, "]")
            if last < first:
                self.refuse("the range ends before it begins", at)
            ranges.append((first, last))
        points = union(ranges)
        return OneCharacter(complement(points) if is_negated else points)

    def character(self, start: int, end: str) -> int:
        """Read a character of a text or a set, and return its code point.

        Args:
            start: where the text or the set begins, for an error.
            end: the character that closes it.
        """
        if self.position >= len(self.text) or self.text[self.position] in "\r\n":
            self.refuse(f"expected {end} before the end of the line", start)
        letter = self.text[self.position]
        self.position += 1
        if letter != "\\":
            return ord(letter)
        letter = self.text[self.position : self.position + 1]
        if letter in _HEX_LENGTHS:
            start_of_digits = self.position + 1
            digits = self.text[start_of_digits : start_of_digits + _HEX_LENGTHS[letter]]
            if len(digits) < _HEX_LENGTHS[letter] or not re.fullmatch("[0-9A-Fa-f]+", digits):
                self.refuse(f"expected {_HEX_LENGTHS[letter]} hexadecimal digits after \\{letter}")
            point = int(digits, 16)
            if point > LAST_CODE_POINT or 0xD800 <= point <= 0xDFFF:
                self.refuse(f"there is no character \\{letter}{digits}")
            self.position += 1 + len(digits)
            return point
        if letter not in _ESCAPES:
            self.refuse('expected n, r, t, x, u, U, \\, ", [ or ] after a backslash')
        self.position += 1
        return _ESCAPES[letter]

    def name(self) -> str | None:
        """Read the name of a rule; None: there is none."""
        found = _NAME.match(self.text, self.position)
        if found is None:
            return None
        self.position = found.end()
        return found[0]

    def take(self, text: str) -> bool:
        """Read a text if it comes next; return whether it did."""
        if not self.text.startswith(text, self.position):
            return False
        self.position += len(text)
        return True

    def skip(self, blank: re.Pattern[str]) -> None:
        """Skip blanks; `blank` matches them, or nothing."""
        found = blank.match(self.text, self.position)
        assert found is not None
        self.position = found.end()

    def found(self) -> str:
        """Return what comes next, for an error."""
        if self.position >= len(self.text):
            return "the end of the grammar"
        return repr(self.text[self.position : self.position + 10].split("\n")[0] or "\n")


def references(symbol: Symbol) -> Iterator[str]:
    """Yield the names of the rules that a symbol uses."""
    match symbol:
        case RuleText(name):
            yield name
        case InOrder(inner) | AnyOf(inner):
            for part in inner:
                yield from references(part)
        case Repeated(part):
            yield from references(part)


def _productive(rules: Mapping[str, Symbol]) -> set[str]:
    """Return the names of the rules that accept at least one text.

    Symbols get numbers. A symbol waits until all of its parts, or one of its options, are known to accept a
    text, and then tells the symbol around it. So each symbol is visited once, and the time is linear in the
    length of the grammar.
    """
    productive = set[str]()
    waiting: dict[str, list[int]] = {name: [] for name in rules}  # the symbols that wait for a rule
    missing: list[int] = []  # for each symbol, how many parts it still waits for
    parents: list[int | str] = []  # for each symbol, the symbol around it, or the rule that it is
    ready: list[int] = []  # the symbols that wait for nothing more

    def add(symbol: Symbol, parent: int | str) -> None:
        number = len(missing)
        missing.append(1)
        parents.append(parent)
        match symbol:
            case RuleText(name):
                waiting[name].append(number)
            case InOrder(parts):
                missing[number] = len(parts)
                for part in parts:
                    add(part, number)
            case AnyOf(options):
                for option in options:
                    add(option, number)
            case Repeated(part, least) if least > 0:
                add(part, number)
            case OneCharacter(points) if not points:
                return  # It accepts no text, so it waits forever.
            case _:
                missing[number] = 0
        if missing[number] == 0:
            ready.append(number)

    for name, symbol in rules.items():
        add(symbol, name)
    while ready:
        parent = parents[ready.pop()]
        to_tell: list[int] = []
        if isinstance(parent, int):
            to_tell = [parent]
        elif parent not in productive:
            productive.add(parent)
            to_tell = waiting[parent]
        for number in to_tell:
            missing[number] -= 1
            if missing[number] == 0:
                ready.append(number)
    return productive


def _can_end(symbol: Symbol, productive: set[str]) -> bool:
    """Return whether a symbol accepts at least one text, given the rules that do."""
    match symbol:
        case OneCharacter(points):
            return bool(points)
        case InOrder(parts):
            return all(_can_end(part, productive) for part in parts)
        case AnyOf(options):
            return any(_can_end(option, productive) for option in options)
        case Repeated(part, least):
            return least == 0 or _can_end(part, productive)
        case RuleText(name):
            return name in productive
    return True


def _pruned(symbol: Symbol, productive: set[str]) -> Symbol:
    """Return a symbol without the options inside it that accept no text.

    Args:
        symbol: a symbol that accepts at least one text.
        productive: the names of the rules that accept at least one text.
    """
    match symbol:
        case InOrder(parts):
            return InOrder(tuple(_pruned(part, productive) for part in parts))
        case AnyOf(options):
            kept = [option for option in options if _can_end(option, productive)]
            return AnyOf(tuple(_pruned(option, productive) for option in kept))
        case Repeated(part, least, most):
            if not _can_end(part, productive):
                return InOrder(())  # The part may only be repeated 0 times.
            return Repeated(_pruned(part, productive), least, most)
    return symbol


def _reachable(rules: Mapping[str, Symbol]) -> set[str]:
    """Return the names of `root` and of the rules that it uses, directly or through other rules."""
    found = {ROOT}
    waiting = [ROOT]
    while waiting:
        new = set(references(rules[waiting.pop()])) - found
        found |= new
        waiting += new
    return found


def _uses_itself(rules: Mapping[str, Symbol]) -> bool:
    """Return whether one of the rules uses itself, directly or through other rules."""
    users: dict[str, list[str]] = {name: [] for name in rules}  # the rules that use each rule
    unread: dict[
        str, int
    ] = {}  # for each rule, how many of the rules that it uses are not read yet
    for name, symbol in rules.items():
        used = set(references(symbol))
        unread[name] = len(used)
        for other in used:
            users[other].append(name)
    # A rule is read when all rules that it uses have been read. A rule that uses itself is never read.
    ready = [name for name, count in unread.items() if count == 0]
    read_count = 0
    while ready:
        read_count += 1
        for name in users[ready.pop()]:
            unread[name] -= 1
            if unread[name] == 0:
                ready.append(name)
    return read_count < len(rules)
