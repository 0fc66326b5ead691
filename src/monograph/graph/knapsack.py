"""A 0-1 knapsack: what to keep, of things that cost bytes to keep and FLOPs to compute again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

# Of a front of choices so many are carried on; more are thinned, which can cost a choice 1 / MOST of the bytes.
MOST = 512


class Choice(NamedTuple):
    """Something that can be chosen.

    Attributes:
        stored_bytes: what it keeps until the backward pass.
        flops: what it computes a second time.
        what: whatever names it.
    """

    stored_bytes: int
    flops: int
    what: tuple[Any, ...]


def front(groups: Iterable[Iterable[Choice]]) -> tuple[Choice, ...]:
    """Every way to take one choice of each group that no other beats in both bytes and FLOPs, fewest bytes first.

    Bytes and FLOPs of what is taken add up, and so do the names. The method is Nemhauser and Ullmann's, "Discrete
    Dynamic Programming and Capital Allocation", Management Science 15 (1969): groups are joined one by one, and what is
    beaten is dropped at once.
    """
    best = [Choice(0, 0, ())]
    for group in groups:
        options = list(group)
        pairs = [
            (one.stored_bytes + other.stored_bytes, one.flops + other.flops, one, other)
            for one in best
            for other in options
        ]
        best = []
        for stored_bytes, flops, one, other in sorted(pairs, key=lambda pair: pair[:2]):
            if not best or flops < best[-1].flops:
                best.append(Choice(stored_bytes, flops, one.what + other.what))
        best = _thinned(best)
    return tuple(best)


def within(choices: Iterable[Choice], limit_bytes: int) -> Choice | None:
    """The choice with the fewest FLOPs that keeps at most `limit_bytes`, if there is one."""
    fitting = [choice for choice in choices if choice.stored_bytes <= limit_bytes]
    return min(fitting, key=lambda choice: (choice.flops, choice.stored_bytes), default=None)


def _thinned(choices: list[Choice]) -> list[Choice]:
    """At most MOST + 1 of them, ascending: of those that are almost of one size the one with the fewest FLOPs."""
    if len(choices) <= MOST:
        return choices
    step = choices[-1].stored_bytes / MOST
    return [choices[0], *{int(choice.stored_bytes / step): choice for choice in choices[1:]}.values()]
