"""The smallest deterministic automaton of a byte expression.

The expression first becomes an automaton without empty moves: positions, the bytes they take, and what may follow them.
Shapes: S states, K classes of bytes that no state distinguishes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from monograph.decode.automata.expression import (
    Alternation,
    ByteSet,
    Concatenation,
    Expression,
    Intersection,
    Repetition,
)
from monograph.errors import InputRefused

# docs/constraints.md promises these limits: a larger automaton is refused within two seconds.
MAX_POSITIONS = 20_000
MAX_WORK = 1_000_000

Next: TypeAlias = frozenset[int]  # the positions of which one takes the next byte
NOWHERE: Next = frozenset()
END = 0  # the position that takes nothing: the text may end here


class Budget:
    """A limit on the steps spent on one automaton, so that none takes more than about two seconds.

    Attributes:
        where: the automaton's name in an error.
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
    """Reads an expression from its end to its beginning, so that a position's successors are known when it is made.

    Positions that take the same bytes and have the same successors become one, which merges common endings:
    the automaton of a character's UTF-8 sequences or of a schema's optional properties stays small.

    Attributes:
        takes: for each position a bit mask of the bytes that it takes; 0 for loops and the end.
        follow: for each position its successors; for a loop, its first positions and its successors.

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
        """Return the position that takes one of these bytes and is followed by `then`."""
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
        """Return all positions of the sets."""
        parts = list(sets)
        self.budget.spend(sum(map(len, parts)))
        return NOWHERE.union(*parts)

    def before(self, expression: Expression, then: Next) -> Next:
        """Return the positions that can take the first byte of the expression followed by `then`.

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
            # A loop is a position of its own, since its successors contain itself: they are known once it is made.
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
        """Return the positions with every loop among them replaced by its first positions and its successors."""
        closed = self._closed.get(positions)
        if closed is None:
            reached, waiting = set(positions), [*positions & self._loops]
            for loop in waiting:
                self.budget.spend(1 + len(self.follow[loop]))
                fresh = self.follow[loop] - reached
                reached |= fresh
                waiting.extend(fresh & self._loops)
            closed = self._closed[positions] = frozenset(reached - self._loops)
        return closed


MAX_STATES = 10_000

Rows: TypeAlias = Sequence[Mapping[int, int]]  # per state {class of bytes: next state}


@dataclass(frozen=True, eq=False)
class ByteAutomaton:
    """A deterministic automaton over bytes, all of whose states lie on a path from state 0 to an accepting one.

    Attributes:
        next_SK: int16 [S, K], the state after a byte of each class; -1 where no accepted text continues that way.
        class_256: uint8 [256], the class of each byte.
        accepting_S: bool [S], whether a text may end there.
    """

    next_SK: NDArray[np.int16]
    class_256: NDArray[np.uint8]
    accepting_S: NDArray[np.bool_]

    def accepts(self, text: bytes) -> bool:
        """Return whether a text, read byte by byte, ends in an accepting state: the slow reference for the rest."""
        state = 0
        for byte in text:
            state = int(self.next_SK[state, self.class_256[byte]])
            if state < 0:
                return False
        return bool(self.accepting_S[state])


def compiled(expression: Expression, where: str) -> ByteAutomaton:
    """Return the minimal automaton of an expression.

    Args:
        expression: the expression over bytes.
        where: its name in an error.

    Raises:
        InputRefused: it matches no text, or is too large (MAX_STATES, MAX_POSITIONS, MAX_WORK).
    """
    automaton = _compiled(expression, Budget(where))
    if automaton is None:
        raise InputRefused(f"{where} matches no text at all")
    return automaton


def _compiled(expression: Expression, budget: Budget) -> ByteAutomaton | None:
    positions = Positions(budget, _intersection_before)
    start = positions.closed(positions.before(expression, frozenset((END,))))
    if not start:
        return None
    # Bytes that no set tells apart share a class, so a row has a few entries instead of 256.
    class_256, classes_of = _byte_classes(set(positions.takes))
    numbers, rows = {start: 0}, []
    # The subset construction: a state is the set of positions that may take the next byte.
    for state in (queue := [start]):
        into: dict[int, list[Next]] = defaultdict(list)
        for position in state:
            classes = classes_of[positions.takes[position]]
            budget.spend(1 + len(classes))
            for byte_class in classes:
                into[byte_class].append(positions.follow[position])
        row = {}
        for byte_class, follow in into.items():
            following = positions.closed(follow[0] if len(follow) == 1 else positions.union(follow))
            if following not in numbers:
                numbers[following] = len(queue)
                queue.append(following)
            row[byte_class] = numbers[following]
        rows.append(row)
        _check_size(len(queue), budget)
    return _minimal(rows, [END in state for state in queue], class_256)


def _check_size(states: int, budget: Budget) -> None:
    if states > MAX_STATES:
        budget.refuse(MAX_STATES, "states")


def _byte_classes(sets: Iterable[int]) -> tuple[NDArray[np.uint8], dict[int, list[int]]]:
    """Return classes of bytes that lie in the same sets: the class of each byte, and the classes of each set."""
    ordered = list(sets)
    members = [{byte for byte in range(256) if mask >> byte & 1} for mask in ordered]
    profiles = [tuple(index for index, inside in enumerate(members) if byte in inside) for byte in range(256)]
    numbers = {profile: number for number, profile in enumerate(dict.fromkeys(profiles))}
    class_256 = np.array([numbers[profile] for profile in profiles], dtype=np.uint8)
    classes_of: dict[int, list[int]] = {mask: [] for mask in ordered}
    for profile, number in numbers.items():
        for index in profile:
            classes_of[ordered[index]].append(number)
    return class_256, classes_of


def _minimal(rows: Rows, accepting: Sequence[bool], class_256: NDArray[np.uint8]) -> ByteAutomaton:
    """Return the automaton with equivalent states and equivalent classes of bytes merged, numbered breadth first."""
    block_of = _equivalent(rows, accepting)
    order = {block_of[0]: 0}
    representatives = [0]
    for state in representatives:
        for _, target in sorted(rows[state].items()):
            if block_of[target] not in order:
                order[block_of[target]] = len(representatives)
                representatives.append(target)
    next_SK = np.full((len(representatives), int(class_256.max()) + 1), -1, dtype=np.int16)
    for number, state in enumerate(representatives):
        for byte_class, target in rows[state].items():
            next_SK[number, byte_class] = order[block_of[target]]
    # Merging states may have made classes equal that were different before.
    next_SK, merged = np.unique(next_SK, axis=1, return_inverse=True)
    accepting_S = np.array([accepting[state] for state in representatives])
    return ByteAutomaton(next_SK, merged.reshape(-1).astype(np.uint8)[class_256], accepting_S)


def _equivalent(rows: Rows, accepting: Sequence[bool]) -> list[int]:
    """Return each state's block number, where states of a block accept the same texts (Hopcroft 1971).

    A missing transition stands for a dead state. No block of dead states is needed to split the others, since each
    block splits those that have a transition into it from the others, and all blocks are splitters at first.
    """
    before: list[list[tuple[int, int]]] = [[] for _ in rows]
    for state, row in enumerate(rows):
        for byte_class, target in row.items():
            before[target].append((byte_class, state))
    partition = _Partition(accepting)
    while partition.waiting:
        into: dict[int, set[int]] = defaultdict(set)
        for target in partition.blocks[partition.waiting.pop()]:
            for byte_class, state in before[target]:
                into[byte_class].add(state)
        for sources in into.values():
            partition.split_by(sources)
    return partition.block_of


class _Partition:
    """Blocks of states, at first the accepting and the other ones, and the blocks that must still split the others."""

    def __init__(self, accepting: Sequence[bool]) -> None:
        halves: list[set[int]] = [set(), set()]
        for state, end in enumerate(accepting):
            halves[end].add(state)
        self.blocks = [half for half in halves if half]
        self.block_of = [0] * len(accepting)
        for number, block in enumerate(self.blocks):
            for state in block:
                self.block_of[state] = number
        self.waiting = set(range(len(self.blocks)))

    def split_by(self, splitter: set[int]) -> None:
        """Split every block into its states inside and outside a set."""
        touched: dict[int, set[int]] = defaultdict(set)
        for state in splitter:
            touched[self.block_of[state]].add(state)
        for number, inside in touched.items():
            outside = len(self.blocks[number]) - len(inside)
            if not outside:
                continue
            self.blocks[number] -= inside
            smaller = inside
            if outside < len(inside):
                smaller, self.blocks[number] = self.blocks[number], inside
            for state in smaller:
                self.block_of[state] = len(self.blocks)
            # The smaller part is enough, whether or not the rest waits too, since the whole was or will be a splitter.
            self.waiting.add(len(self.blocks))
            self.blocks.append(smaller)


def _intersection_before(expression: Intersection, positions: Positions, then: Next) -> Next:
    """Return the first positions of texts that both sides match, followed by `then`; see `Positions.before`."""
    sides = [_compiled(side, positions.budget) for side in (expression.left, expression.right)]
    if sides[0] is None or sides[1] is None:
        return NOWHERE
    rows, accepting, bytes_of = _product(sides[0], sides[1], positions.budget)
    firsts: dict[int, Next] = {}
    for state in _ends_first(rows):
        takes: dict[int, int] = defaultdict(int)  # {next state: the bytes that lead there}
        for byte_class, target in rows[state].items():
            takes[target] |= bytes_of[byte_class]
        ways = [positions.at(mask, firsts[target]) for target, mask in takes.items()]
        firsts[state] = positions.union([*ways, *([then] if accepting[state] else [])])
    return firsts[0]


def _product(
    left: ByteAutomaton, right: ByteAutomaton, budget: Budget
) -> tuple[list[dict[int, int]], list[bool], dict[int, int]]:
    """Return the pairs of states reached together: rows over pairs of classes, accepting pairs, each class's bytes."""
    bytes_of: dict[int, int] = defaultdict(int)
    right_classes = right.next_SK.shape[1]
    for byte in range(256):
        bytes_of[int(left.class_256[byte]) * right_classes + int(right.class_256[byte])] |= 1 << byte
    left_rows, right_rows = left.next_SK.tolist(), right.next_SK.tolist()
    numbers, rows = {(0, 0): 0}, []
    for one, other in (queue := [(0, 0)]):
        row: dict[int, int] = {}
        budget.spend(len(bytes_of))
        for byte_class in bytes_of:
            pair = left_rows[one][byte_class // right_classes], right_rows[other][byte_class % right_classes]
            if min(pair) < 0:
                continue
            if pair not in numbers:
                numbers[pair] = len(queue)
                queue.append(pair)
            row[byte_class] = numbers[pair]
        rows.append(row)
        _check_size(len(queue), budget)
    return rows, [bool(left.accepting_S[one] and right.accepting_S[other]) for one, other in queue], bytes_of


def _ends_first(rows: Rows) -> list[int]:
    """Return the states of an acyclic automaton in an order in which every state comes after its successors."""
    before: list[set[int]] = [set() for _ in rows]
    for state, row in enumerate(rows):
        for target in row.values():
            before[target].add(state)
    missing = [len(set(row.values())) for row in rows]
    order = [state for state, count in enumerate(missing) if not count]
    for state in order:
        for earlier in before[state]:
            missing[earlier] -= 1
            if not missing[earlier]:
                order.append(earlier)
    assert len(order) == len(rows), "one side of an intersection matches finitely many texts"
    return order
