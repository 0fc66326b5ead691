"""Regular expressions over bytes, as trees: patterns and schemas become such trees, and these become automata."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, eq=False)
class ByteSet:
    """One byte of a set; bit b of `mask` says whether byte b is in it."""

    mask: int


@dataclass(frozen=True, eq=False)
class Concatenation:
    """The parts one after the other; without parts, the empty text."""

    parts: tuple[Expression, ...]


@dataclass(frozen=True, eq=False)
class Alternation:
    """Any one of the options; without options, nothing matches, not even the empty text."""

    options: tuple[Expression, ...]


@dataclass(frozen=True, eq=False)
class Repetition:
    """The part `least` to `most` times; `most` None: any number of times."""

    part: Expression
    least: int
    most: int | None


@dataclass(frozen=True, eq=False)
class Intersection:
    """What both sides match; at least one side has to match finitely many texts only."""

    left: Expression
    right: Expression


Expression: TypeAlias = ByteSet | Concatenation | Alternation | Repetition | Intersection


def byte_range(first: int, last: int) -> ByteSet:
    """One byte from `first` to `last`, both included."""
    return ByteSet((2 << last) - (1 << first))


def literal(text: bytes) -> Concatenation:
    """Exactly these bytes."""
    return Concatenation(tuple(ByteSet(1 << byte) for byte in text))


def joined(*parts: Expression) -> Concatenation:
    """The parts one after the other."""
    return Concatenation(parts)


def optional(part: Expression) -> Repetition:
    """The part or the empty text."""
    return Repetition(part, 0, 1)
