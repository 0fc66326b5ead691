"""Regular expressions over bytes, as trees: patterns and schemas are read into them, and automata
are made from them.

`utf8` and `in_json` return the expression of one character of a set, in UTF-8 or inside a JSON
string.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from monograph.automata.counting import Operation


# Expressions are equal by identity (eq=False), so that even large ones are cheap keys of a dict
# (`Positions.before`).
@dataclass(frozen=True, eq=False)
class ByteSet:
    """An expression that matches one byte of a set; bit b of `mask` says whether byte b is in it."""

    mask: int


@dataclass(frozen=True, eq=False)
class Concatenation:
    """An expression that matches its parts one after the other; without parts it matches the empty
    text.
    """

    parts: tuple[Expression, ...]


@dataclass(frozen=True, eq=False)
class Alternation:
    """An expression that matches any one of its options; without options it matches no text, not
    even the empty one.
    """

    options: tuple[Expression, ...]


@dataclass(frozen=True, eq=False)
class Repetition:
    """An expression that matches its part `min_count` to `max_count` times; None: without an upper
    bound.
    """

    part: Expression
    min_count: int
    max_count: int | None


@dataclass(frozen=True, eq=False)
class Intersection:
    """An expression that matches the texts that both sides match."""

    left: Expression
    right: Expression


@dataclass(frozen=True, eq=False)
class Mark:
    """An expression that matches the empty text, where an operation on a counter takes place."""

    operation: Operation


@dataclass(frozen=True, eq=False)
class WithSource:
    """An expression that matches what its part does; `source` names the part's keyword in an
    error.
    """

    part: Expression
    source: str


Expression: TypeAlias = (
    ByteSet | Concatenation | Alternation | Repetition | Intersection | Mark | WithSource
)


def byte_range(first: int, last: int) -> ByteSet:
    """Return an expression for one byte from `first` to `last`, both included."""
    return ByteSet((2 << last) - (1 << first))


def literal(text: bytes) -> Concatenation:
    """Return an expression for exactly these bytes."""
    return Concatenation(tuple(ByteSet(1 << byte) for byte in text))


def joined(*parts: Expression) -> Concatenation:
    """Return an expression for the parts one after the other."""
    return Concatenation(parts)


def optional(part: Expression) -> Repetition:
    """Return an expression for the part or the empty text."""
    return Repetition(part, 0, 1)


# Code points as (first, last) ranges, both ends included, in order and apart from each other.
CodePoints: TypeAlias = tuple[tuple[int, int], ...]
Encoding: TypeAlias = Callable[[CodePoints], Expression]

_LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)  # halves of UTF-16 pairs: not characters, and not encodable in UTF-8
ANY: CodePoints = ((0, _LAST),)
# Every character that JSON writes as a backslash and one letter (RFC 8259, section 7), except "/",
# which needs none.
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
# The characters that stand for themselves in a JSON string: all but control characters, '"' and the
# backslash.
_PLAIN_IN_JSON: CodePoints = ((0x20, 0x21), (0x23, 0x5B), (0x5D, _LAST))


def single(point: int) -> CodePoints:
    """Return the set of one code point."""
    return ((point, point),)


def union(ranges: Iterable[tuple[int, int]]) -> CodePoints:
    """Return the ranges in order, with overlapping and adjacent ones merged."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return tuple(merged)


def complement(points: CodePoints) -> CodePoints:
    """Return all other code points."""
    firsts = [0, *(last + 1 for _, last in points)]
    lasts = [*(first - 1 for first, _ in points), _LAST]
    return tuple((first, last) for first, last in zip(firsts, lasts, strict=True) if first <= last)


def intersection(left: CodePoints, right: CodePoints) -> CodePoints:
    """Return the code points that are in both."""
    return complement(union([*complement(left), *complement(right)]))


@lru_cache(maxsize=256)
def utf8(points: CodePoints) -> Expression:
    """Return an expression for the UTF-8 bytes of one character of the set (RFC 3629)."""
    characters = intersection(points, complement((_SURROGATES,)))
    sequences: list[Expression] = []
    # UTF-8 sequences of one length order as their characters do, so a range of characters is a few
    # boxes of bytes.
    for lengths in ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xFFFF), (0x10000, _LAST)):
        for first, last in intersection(characters, (lengths,)):
            for box in boxes(chr(first).encode(), chr(last).encode(), 0x80, 0xBF):
                sequences.append(Concatenation(tuple(byte_range(*side) for side in box)))
    return Alternation(tuple(sequences))


@lru_cache(maxsize=256)
def in_json(points: CodePoints) -> Expression:
    r"""Return an expression for one character of the set as it is written in a JSON string.

    Printable ASCII stands for itself, except that a quote and a backslash have a backslash before
    them. A control character is `\n` and the like or `\u000a`. Any other character is UTF-8 or
    `\uXXXX`, a pair of them beyond U+FFFF. So the output of serialisers matches, whether or not
    they escape everything outside ASCII; `\/` and escapes of printable ASCII such as `\u0061` do
    not.
    """
    short = [
        literal(b"\\" + letter)
        for point, letter in _SHORT_ESCAPES.items()
        if intersection(points, single(point))
    ]
    escaped = intersection(points, complement(union([*_PRINTABLE_ASCII, _SURROGATES])))
    hexadecimal = [_unit(first, last) for first, last in intersection(escaped, ((0, 0xFFFF),))]
    for first, last in intersection(escaped, ((0x10000, _LAST),)):
        # Beyond U+FFFF JSON writes a pair of UTF-16 units, each of ten bits.
        for high, low in boxes(
            divmod(first - 0x10000, 1024), divmod(last - 0x10000, 1024), 0, 1023
        ):
            surrogates = (
                _unit(0xD800 + high[0], 0xD800 + high[1]),
                _unit(0xDC00 + low[0], 0xDC00 + low[1]),
            )
            hexadecimal.append(joined(*surrogates))
    return Alternation((utf8(intersection(points, _PLAIN_IN_JSON)), *short, *hexadecimal))


def _unit(first: int, last: int) -> Concatenation:
    r"""Return an expression for `\uXXXX` with a number from `first` to `last`."""
    low, high = ([number >> shift & 15 for shift in (12, 8, 4, 0)] for number in (first, last))
    numbers = [
        Concatenation(tuple(_hexadecimal(*side) for side in box)) for box in boxes(low, high, 0, 15)
    ]
    return joined(literal(b"\\u"), Alternation(tuple(numbers)))


def _hexadecimal(first: int, last: int) -> ByteSet:
    either_case = (f"{digit:x}{digit:X}".encode() for digit in range(first, last + 1))
    return ByteSet(sum(1 << byte for byte in set(b"".join(either_case))))


def boxes(
    first: Sequence[int], last: Sequence[int], lowest: int, highest: int
) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield the digit strings from `first` to `last` as boxes: products of one range of digits for
    each place.

    Args:
        first: the first string in lexicographic order, as digits.
        last: the last one, of the same length.
        lowest: the lowest digit that any place but the first may have.
        highest: the highest such digit.
    """
    if not first:
        yield ()
        return
    (low, *low_rest), (high, *high_rest) = first, last
    # The first digit's ends may limit the digits after it; between the ends every digit may follow.
    bottom = [lowest] * len(low_rest)
    top = [highest] * len(low_rest)
    if low == high:
        yield from (((low, low), *rest) for rest in boxes(low_rest, high_rest, lowest, highest))
        return
    if low_rest != bottom:
        yield from (((low, low), *rest) for rest in boxes(low_rest, top, lowest, highest))
        low += 1
    if high_rest != top:
        yield from (((high, high), *rest) for rest in boxes(bottom, high_rest, lowest, highest))
        high -= 1
    if low <= high:
        yield ((low, high), *((lowest, highest) for _ in low_rest))
