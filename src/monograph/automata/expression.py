"""Regular expressions over bytes, as trees of dataclasses.

Patterns (`monograph.automata.pattern`) and schemas (`monograph.automata.schema`) are parsed into
these trees, and `monograph.automata.dfa` compiles a tree to an automaton. An expression matches a
text as a whole.

`utf8` and `in_json` return the expression for one character of a set: its bytes in UTF-8, or its
spellings inside a JSON string.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from monograph.automata.counting import CounterOperation


# With eq=False, an expression equals only itself. This makes large expressions cheap keys of a dict
# (`Positions.first_positions` in `monograph.automata.dfa`).
@dataclass(frozen=True, eq=False)
class ByteSet:
    """Matches one byte of a set; bit b of `mask` is 1 if byte b is in the set."""

    mask: int


@dataclass(frozen=True, eq=False)
class Concatenation:
    """Matches the parts one after another; without parts it matches the empty text."""

    parts: tuple[Expression, ...]


@dataclass(frozen=True, eq=False)
class Alternation:
    """Matches one of the options; without options it matches no text, not even the empty one."""

    options: tuple[Expression, ...]


@dataclass(frozen=True, eq=False)
class Repetition:
    """Matches the part `min_count` to `max_count` times; if `max_count` is None, without limit."""

    part: Expression
    min_count: int
    max_count: int | None


@dataclass(frozen=True, eq=False)
class Intersection:
    """Matches the texts that both sides match."""

    left: Expression
    right: Expression


@dataclass(frozen=True, eq=False)
class CounterMark:
    """Matches the empty text, and operates on a counter there (`monograph.automata.counting`)."""

    operation: CounterOperation


@dataclass(frozen=True, eq=False)
class WithSource:
    """Matches what its part matches; `source` names the part's keyword in error messages."""

    part: Expression
    source: str


@dataclass(frozen=True, eq=False)
class StateMachine:
    """Matches the texts that lead from state 0 of an automaton to an accepting state.

    Attributes:
        rows: for each state {class of bytes: next state}.
        accepting: whether a text may end in each state.
        symbols_of: a bit mask of the bytes of each class.
        ignored: operations on counters, which may be anywhere in the text.
    """

    rows: tuple[Mapping[int, int], ...]
    accepting: tuple[bool, ...]
    symbols_of: Mapping[int, int]
    ignored: tuple[CounterOperation, ...] = ()


Expression: TypeAlias = (
    ByteSet
    | Concatenation
    | Alternation
    | Repetition
    | Intersection
    | CounterMark
    | WithSource
    | StateMachine
)


def byte_range(first: int, last: int) -> ByteSet:
    """Return an expression for one byte from `first` to `last`, both included."""
    # Bits `first` to `last` are 1.
    return ByteSet((1 << (last + 1)) - (1 << first))


def literal(text: bytes) -> Concatenation:
    """Return an expression for exactly these bytes."""
    return Concatenation(tuple(ByteSet(1 << byte) for byte in text))


def concatenation(*parts: Expression) -> Concatenation:
    """Return an expression for the parts one after another."""
    return Concatenation(parts)


def optional(part: Expression) -> Repetition:
    """Return an expression for the part or the empty text."""
    return Repetition(part, 0, 1)


# A set of code points, as (first, last) ranges in ascending order. Both ends are included, and
# ranges neither overlap nor touch.
CodePoints: TypeAlias = tuple[tuple[int, int], ...]
# A function from a set of code points to an expression for the bytes of any one of them, such as
# `utf8`.
Encoding: TypeAlias = Callable[[CodePoints], Expression]

LAST_CODE_POINT = 0x10FFFF
# The halves of UTF-16 pairs are not characters and cannot be encoded in UTF-8.
_SURROGATES = (0xD800, 0xDFFF)
ANY: CodePoints = ((0, LAST_CODE_POINT),)
# The characters that JSON writes as a backslash and one letter (RFC 8259, section 7), and the
# letters. "/" is left out, because it needs no escape.
_SHORT_ESCAPES = {
    0x22: b'"',
    0x5C: b"\\",
    0x08: b"b",
    0x0C: b"f",
    0x0A: b"n",
    0x0D: b"r",
    0x09: b"t",
}
_PRINTABLE_ASCII: CodePoints = ((0x20, 0x7E),)
# The characters that need no escape in a JSON string: all except control characters, '"' and the
# backslash.
_PLAIN_IN_JSON: CodePoints = ((0x20, 0x21), (0x23, 0x5B), (0x5D, LAST_CODE_POINT))


def single(point: int) -> CodePoints:
    """Return the set of one code point."""
    return ((point, point),)


def union(ranges: Iterable[tuple[int, int]]) -> CodePoints:
    """Return the set of the code points in any of the ranges, which may overlap."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged_first, merged_last = merged[-1]
            merged[-1] = (merged_first, max(last, merged_last))
        else:
            merged.append((first, last))
    return tuple(merged)


def complement(points: CodePoints) -> CodePoints:
    """Return the set of all code points that are not in a set."""
    # The gaps before, between and after the ranges; the first and the last gap may be empty.
    gap_firsts = [0, *(last + 1 for _, last in points)]
    gap_lasts = [*(first - 1 for first, _ in points), LAST_CODE_POINT]
    gaps = zip(gap_firsts, gap_lasts, strict=True)
    return tuple((first, last) for first, last in gaps if first <= last)


def intersection(left: CodePoints, right: CodePoints) -> CodePoints:
    """Return the code points that are in both sets."""
    return complement(union([*complement(left), *complement(right)]))


@lru_cache(maxsize=256)
def utf8(points: CodePoints) -> Expression:
    """Return an expression for the UTF-8 bytes of one character of the set (RFC 3629)."""
    characters = intersection(points, complement((_SURROGATES,)))
    sequences: list[Expression] = []
    # The outer loop goes over the code points with 1, 2, 3 and 4 bytes. UTF-8 sequences of one length have the
    # order of their characters, so a range of characters becomes a few boxes of bytes (see `boxes`).
    for same_length in ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xFFFF), (0x10000, LAST_CODE_POINT)):
        for first, last in intersection(characters, (same_length,)):
            for box in boxes(chr(first).encode(), chr(last).encode(), 0x80, 0xBF):
                byte_sets = [byte_range(lowest, highest) for lowest, highest in box]
                sequences.append(Concatenation(tuple(byte_sets)))
    return Alternation(tuple(sequences))


@lru_cache(maxsize=256)
def in_json(points: CodePoints) -> Expression:
    r"""Return an expression for the spellings of one character of the set in a JSON string.

    | character                  | accepted spellings                               |
    |----------------------------|--------------------------------------------------|
    | printable ASCII            | itself; `\"` for a quote, `\\` for a backslash   |
    | below U+0020               | `\uXXXX`, and `\n` and the like where it exists  |
    | other, up to U+FFFF        | UTF-8, or `\uXXXX`                               |
    | other, beyond U+FFFF       | UTF-8, or the two `\uXXXX` of its UTF-16 pair    |

    This accepts the output of serialisers, whether or not they escape all characters outside ASCII.
    It does not accept `\/` and other escapes of printable ASCII, such as `\u0061`.
    """
    short_escapes = [
        literal(b"\\" + letter)
        for point, letter in _SHORT_ESCAPES.items()
        if intersection(points, single(point))
    ]
    escaped = intersection(points, complement(union([*_PRINTABLE_ASCII, _SURROGATES])))
    long_escapes = [
        _unit_escape(first, last) for first, last in intersection(escaped, ((0, 0xFFFF),))
    ]
    for first, last in intersection(escaped, ((0x10000, LAST_CODE_POINT),)):
        # Beyond U+FFFF a character is a pair of UTF-16 units, and each unit has ten of its bits.
        first_pair = divmod(first - 0x10000, 1024)
        last_pair = divmod(last - 0x10000, 1024)
        for (high_first, high_last), (low_first, low_last) in boxes(first_pair, last_pair, 0, 1023):
            high_unit = _unit_escape(0xD800 + high_first, 0xD800 + high_last)
            low_unit = _unit_escape(0xDC00 + low_first, 0xDC00 + low_last)
            long_escapes.append(concatenation(high_unit, low_unit))
    unescaped = utf8(intersection(points, _PLAIN_IN_JSON))
    return Alternation((unescaped, *short_escapes, *long_escapes))


def _unit_escape(first: int, last: int) -> Concatenation:
    r"""Return an expression for `\uXXXX` with a number from `first` to `last`."""
    first_digits = [first >> shift & 15 for shift in (12, 8, 4, 0)]
    last_digits = [last >> shift & 15 for shift in (12, 8, 4, 0)]
    numbers = []
    for box in boxes(first_digits, last_digits, 0, 15):
        digits = [_hexadecimal_digit(lowest, highest) for lowest, highest in box]
        numbers.append(Concatenation(tuple(digits)))
    return concatenation(literal(b"\\u"), Alternation(tuple(numbers)))


def _hexadecimal_digit(first: int, last: int) -> ByteSet:
    """Return an expression for one hexadecimal digit from `first` to `last`, in either case."""
    characters = b"".join(f"{digit:x}{digit:X}".encode() for digit in range(first, last + 1))
    return ByteSet(sum(1 << byte for byte in set(characters)))


def boxes(
    first: Sequence[int], last: Sequence[int], lowest: int, highest: int
) -> Iterator[tuple[tuple[int, int], ...]]:
    """Split the strings of digits from `first` to `last`, in lexicographic order, into boxes.

    A box has one range of digits for each place, as (lowest digit, highest digit), and contains all
    strings with digits in these ranges. In base 10, the strings from 18 to 42 are three boxes:
    1 and 8 to 9; 2 to 3 and 0 to 9; 4 and 0 to 2.

    Args:
        first: the first string, as digits.
        last: the last string, of the same length.
        lowest: the lowest digit that a place other than the first may have.
        highest: the highest digit that a place other than the first may have.
    """
    if not first:
        yield ()
        return
    low, *low_rest = first
    high, *high_rest = last
    bottom = [lowest] * len(low_rest)
    top = [highest] * len(low_rest)
    if low == high:
        for rest in boxes(low_rest, high_rest, lowest, highest):
            yield ((low, low), *rest)
        return
    # Strings that begin with `low` must not be below `first`, and strings that begin with `high` must not be
    # above `last`. If this leaves some of them out, they are boxes of their own.
    if low_rest != bottom:
        for rest in boxes(low_rest, top, lowest, highest):
            yield ((low, low), *rest)
        low += 1
    if high_rest != top:
        for rest in boxes(bottom, high_rest, lowest, highest):
            yield ((high, high), *rest)
        high -= 1
    # After a first digit from `low` to `high`, every digit may follow.
    if low <= high:
        yield ((low, high), *((lowest, highest) for _ in low_rest))
