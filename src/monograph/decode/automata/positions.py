"""A byte expression as an automaton without empty moves: positions, the bytes they take, and what may follow them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NoReturn, TypeAlias

from monograph.decode.automata.expression import (
    Alternation,
    ByteSet,
    Concatenation,
    Expression,
    Intersection,
    Repetition,
)
from monograph.errors import InputRefused

MAX_POSITIONS = 20_000
MAX_WORK = 1_000_000

Next: TypeAlias = frozenset[int]  # positions one of which takes the next byte
NOWHERE: Next = frozenset()
END = 0  # the position that takes nothing: the text may end here


class Budget:
    """The steps that may still be spent on one automaton, so that none takes more than about two seconds.

    Attributes:
        where: what to call the automaton in an error.
    """

    def __init__(self, where: str) -> None:
        self.where, self._left = where, MAX_WORK

    def spend(self, steps: int) -> None:
        """Count steps; raise InputRefused when they are too many."""
        self._left -= steps
        if self._left < 0:
            self.refuse(MAX_WORK, "steps to build")

    def refuse(self, limit: int, unit: str) -> NoReturn:
        """Refuse an automaton that is too large."""
        raise InputRefused(f"{self.where}: its automaton needs more than {limit:,} {unit}; make it simpler or shorter")


class Positions:
    """Reads an expression from its end to its beginning, so that what follows a position is known when it is made.

    Two positions that take the same bytes and are followed by the same are one position, which merges common endings:
    the automaton of a character's UTF-8 sequences or of a schema's optional properties stays small by itself.

    Attributes:
        takes: per position, the bytes that it takes, bit by bit; 0 for loops and the end.
        follow: per position, what comes after it; for a loop, what it begins with and what comes after it.

    Raises:
        InputRefused: more than MAX_POSITIONS positions, or the budget is spent; from any method.
    """

    def __init__(self, budget: Budget, intersect: Callable[[Intersection, Positions, Next], Next]) -> None:
        self.budget, self._intersect = budget, intersect
        self.takes, self.follow = [0], [NOWHERE]
        self._loops: set[int] = set()
        self._known: dict[tuple[int, Next], Next] = {}
        self._before: dict[tuple[Expression, Next], Next] = {}
        self._closed: dict[Next, Next] = {}

    def at(self, takes: int, then: Next) -> Next:
        """The position that takes one of these bytes and is followed by `then`."""
        if not takes or not then:
            return NOWHERE  # no text goes on from here
        known = self._known.get((takes, then))
        if known is None:
            known = self._known[takes, then] = frozenset((self._add(takes, then),))
        return known

    def _add(self, takes: int, follow: Next) -> int:
        if len(self.takes) > MAX_POSITIONS:
            self.budget.refuse(MAX_POSITIONS, "positions")
        self.budget.spend(1)
        self.takes.append(takes)
        self.follow.append(follow)
        return len(self.takes) - 1

    def union(self, sets: Iterable[Next]) -> Next:
        """All positions of the sets."""
        parts = list(sets)
        self.budget.spend(sum(map(len, parts)))
        return NOWHERE.union(*parts)

    def before(self, expression: Expression, then: Next) -> Next:
        """The positions that can take the first byte of the expression followed by `then`.

        Those of `then` are among them where the expression matches the empty text.
        """
        if isinstance(expression, ByteSet):
            return self.at(expression.mask, then)
        known = self._before.get((expression, then))
        if known is None:
            self.budget.spend(1)
            known = self._before[expression, then] = self._composed(expression, then)
        return known

    def _composed(self, expression: Expression, then: Next) -> Next:
        if isinstance(expression, Concatenation):
            self.budget.spend(len(expression.parts))
            for part in reversed(expression.parts):
                then = self.before(part, then)
            return then
        if isinstance(expression, Alternation):
            return self.union(self.before(option, then) for option in expression.options)
        if isinstance(expression, Intersection):
            return self._intersect(expression, self, then)
        assert isinstance(expression, Repetition)
        return self._repeated(expression, then)

    def _repeated(self, expression: Repetition, then: Next) -> Next:
        first = then
        if expression.most is None:
            loop = self._add(0, NOWHERE)
            self._loops.add(loop)
            first = frozenset((loop,))
            self.follow[loop] = self.union((self.before(expression.part, first), then))
        # A count of what changes nothing (nothing at all, or an empty text) is done as soon as that shows.
        for _ in range((expression.most or expression.least) - expression.least):
            longer = self.union((self.before(expression.part, first), then))
            if longer == first:
                break
            first = longer
        for _ in range(expression.least):
            longer = self.before(expression.part, first)
            if longer == first:
                break
            first = longer
        return first

    def closed(self, positions: Next) -> Next:
        """The positions with every loop among them replaced by what it begins with and what comes after it."""
        found = self._closed.get(positions)
        if found is None:
            reached, waiting = set(positions), [*positions & self._loops]
            for loop in waiting:
                self.budget.spend(1 + len(self.follow[loop]))
                fresh = self.follow[loop] - reached
                reached |= fresh
                waiting.extend(fresh & self._loops)
            found = self._closed[positions] = frozenset(reached - self._loops)
        return found
