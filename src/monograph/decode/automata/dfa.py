"""Compiles a byte expression into the smallest deterministic automaton.

The expression first becomes a nondeterministic automaton without empty moves. Its states are positions in the
expression: a position takes one byte of a set and has successors, the positions that may take the next byte.

Shapes: S states, K classes of bytes that no state distinguishes.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

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
MAX_STATES = 10_000
MAX_POSITIONS = 20_000
MAX_WORK = 1_000_000  # steps of a `Budget`

Next: TypeAlias = frozenset[int]  # positions, any of which may take the next byte
NOWHERE: Next = frozenset()
END = 0  # the position that takes no byte: the text may end here
S = TypeVar("S")
Rows: TypeAlias = Sequence[Mapping[int, int]]  # per state {class of bytes: next state}


class Budget:
    """The limits of one automaton, and the steps spent on it, so that none takes more than about two seconds.

    Attributes:
        where: the automaton's name in an error.
    """

    def __init__(self, where: str) -> None:
        self.where, self._spent = where, 0

    def spend(self, steps: int) -> None:
        """Count steps; raise InputRefused when there are too many."""
        self._spent += steps
        self.limit(self._spent, MAX_WORK, "steps to build")

    def limit(self, count: int, most: int, unit: str) -> None:
        """Raise InputRefused for an automaton that needs more than `most` of a unit."""
        if count > most:
            raise InputRefused(
                f"{self.where}: its automaton needs more than {most:,} {unit}; make it simpler or shorter"
            )


class Positions:
    """The positions of an expression, made from its end to its beginning, as a position is made with its successors.

    Positions that take the same bytes and have the same successors are merged, and so are common endings: the automaton
    of a character's UTF-8 sequences or of a schema's optional properties stays small.

    A loop is a placeholder for a part that may repeat without limit: it takes no byte and `closed` replaces it.

    Attributes:
        takes: for each position a bit mask of the bytes that it takes; 0 for loops and the end.
        follow: for each position its successors; for a loop, the first positions of its part and its successors.

    Raises:
        InputRefused: more than MAX_POSITIONS positions, or the budget is spent; any method may raise it.
    """

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.takes, self.follow = [0], [NOWHERE]
        self._loops: set[int] = set()
        # What `at`, `before` and `closed` have returned.
        self._known: dict[tuple[int, Next], Next] = {}
        self._before: dict[tuple[Expression, Next], Next] = {}
        self._closed: dict[Next, Next] = {}

    def at(self, takes: int, then: Next) -> Next:
        """Return the one position that takes a byte of the mask and has the successors `then`, or NOWHERE."""
        if not takes or not then:
            return NOWHERE  # no text leads through such a position
        if (known := self._known.get((takes, then))) is None:
            known = self._known[takes, then] = frozenset((self._add(takes, then),))
        return known

    def _add(self, takes: int, follow: Next) -> int:
        self.budget.limit(len(self.takes), MAX_POSITIONS, "positions")
        self.budget.spend(1)
        self.takes.append(takes)
        self.follow.append(follow)
        return len(self.takes) - 1

    def union(self, sets: Iterable[Next]) -> Next:
        """Return the union of the sets."""
        parts = list(sets)
        self.budget.spend(sum(map(len, parts)))
        return NOWHERE.union(*parts)

    def before(self, expression: Expression, then: Next) -> Next:
        """Return the positions that can take the first byte of a text of the expression followed by one from `then`.

        If the expression matches the empty text, they include `then`.
        """
        if isinstance(expression, ByteSet):
            return self.at(expression.mask, then)
        if (known := self._before.get((expression, then))) is None:
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
            return _intersection_before(expression, self, then)
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
        # Stop once another repetition changes nothing: the part matches no text, or only the empty one.
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
        """Return the positions with every loop replaced by the first positions of its part and its successors."""
        if (closed := self._closed.get(positions)) is None:
            reached, waiting = set(positions), [*positions & self._loops]
            for loop in waiting:
                self.budget.spend(1 + len(self.follow[loop]))
                fresh = self.follow[loop] - reached
                reached |= fresh
                waiting.extend(fresh & self._loops)
            closed = self._closed[positions] = frozenset(reached - self._loops)
        return closed


@dataclass(frozen=True, eq=False)
class ByteAutomaton:
    """A deterministic automaton over bytes; every state lies on a path from state 0 to an accepting state.

    Attributes:
        next_SK: int16 [S, K], the state after a byte of each class; -1 where no accepted text continues that way.
        class_256: uint8 [256], the class of each byte.
        accepting_S: bool [S], whether a text may end there.
    """

    next_SK: NDArray[np.int16]
    class_256: NDArray[np.uint8]
    accepting_S: NDArray[np.bool_]

    def accepts(self, text: bytes) -> bool:
        """Return whether the automaton accepts a text; this reads byte by byte and is the reference for the rest."""
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
        InputRefused: the expression matches no text, or its automaton is too large (MAX_STATES, MAX_POSITIONS,
            MAX_WORK).
    """
    if (automaton := _compiled(expression, Budget(where))) is None:
        raise InputRefused(f"{where} matches no text at all")
    return automaton


def _compiled(expression: Expression, budget: Budget) -> ByteAutomaton | None:
    positions = Positions(budget)
    start = positions.closed(positions.before(expression, frozenset((END,))))
    if not start:
        return None
    # Bytes that no set tells apart share a class, so a row has a few entries instead of 256.
    class_256, classes_of = _byte_classes(set(positions.takes))

    # The subset construction: a state is the set of positions that may take the next byte.
    def after(state: Next) -> Iterator[tuple[int, Next]]:
        into: dict[int, list[Next]] = defaultdict(list)
        for position in state:
            classes = classes_of[positions.takes[position]]
            budget.spend(1 + len(classes))
            for byte_class in classes:
                into[byte_class].append(positions.follow[position])
        for byte_class, follow in into.items():
            yield byte_class, positions.closed(follow[0] if len(follow) == 1 else positions.union(follow))

    rows, states = _explored(start, after, budget)
    return _minimal(rows, [END in state for state in states], class_256)


def _explored(start: S, after: Callable[[S], Iterable[tuple[int, S]]], budget: Budget) -> tuple[Rows, list[S]]:
    """Return the rows of all states that `after` leads to, as (byte class, next state), and these states."""
    numbers, rows = {start: 0}, []
    for state in (queue := [start]):
        row = {}
        for byte_class, following in after(state):
            if following not in numbers:
                numbers[following] = len(queue)
                queue.append(following)
            row[byte_class] = numbers[following]
        rows.append(row)
        budget.limit(len(queue), MAX_STATES, "states")
    return rows, queue


def _byte_classes(sets: Iterable[int]) -> tuple[NDArray[np.uint8], dict[int, list[int]]]:
    """Sort bytes into classes whose members lie in the same sets; return each byte's class and each set's classes."""
    masks = list(sets)
    # Whether each set has the byte, for each byte; the bytes of a class have the same profile.
    profiles = [tuple(mask >> byte & 1 for mask in masks) for byte in range(256)]
    numbers = {profile: number for number, profile in enumerate(dict.fromkeys(profiles))}
    class_256 = np.array([numbers[profile] for profile in profiles], dtype=np.uint8)
    classes_of = {mask: [number for profile, number in numbers.items() if profile[i]] for i, mask in enumerate(masks)}
    return class_256, classes_of


def _minimal(rows: Rows, accepting: Sequence[bool], class_256: NDArray[np.uint8]) -> ByteAutomaton:
    """Merge equivalent states and equivalent classes of bytes, and number the states breadth first."""
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
    """Return each state's block; the states of a block are those that accept the same texts (Hopcroft 1971).

    A missing transition leads to a dead state. The dead state needs no block: each block splits the states that have a
    transition into it from those that have none, and at first all blocks are splitters.
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
    """A partition of states into blocks, at first the accepting states and the others.

    Attributes:
        blocks: the states of each block.
        block_of: for each state the number of its block.
        waiting: the numbers of the blocks by which the others have not been split yet.
    """

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
        """Split every block into its states inside and its states outside the splitter."""
        touched: dict[int, set[int]] = defaultdict(set)
        for state in splitter:
            touched[self.block_of[state]].add(state)
        for number, inside in touched.items():
            if not (outside := len(self.blocks[number]) - len(inside)):
                continue
            self.blocks[number] -= inside
            smaller = inside
            if outside < len(inside):
                smaller, self.blocks[number] = self.blocks[number], inside
            for state in smaller:
                self.block_of[state] = len(self.blocks)
            # The larger part keeps the block's number: it waits if the block did, and else the whole block has split.
            self.waiting.add(len(self.blocks))
            self.blocks.append(smaller)


def _intersection_before(expression: Intersection, positions: Positions, then: Next) -> Next:
    """Return what `Positions.before` returns, for an intersection."""
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


def _product(left: ByteAutomaton, right: ByteAutomaton, budget: Budget) -> tuple[Rows, list[bool], dict[int, int]]:
    """Return the product automaton: rows over pairs of byte classes, whether each state accepts, each class's bytes."""
    bytes_of: dict[int, int] = defaultdict(int)
    right_classes = right.next_SK.shape[1]
    for byte in range(256):
        bytes_of[int(left.class_256[byte]) * right_classes + int(right.class_256[byte])] |= 1 << byte
    left_rows, right_rows = left.next_SK.tolist(), right.next_SK.tolist()

    def after(state: tuple[int, int]) -> Iterator[tuple[int, tuple[int, int]]]:
        budget.spend(len(bytes_of))
        one, other = left_rows[state[0]], right_rows[state[1]]
        pairs = ((c, (one[c // right_classes], other[c % right_classes])) for c in bytes_of)
        return ((byte_class, pair) for byte_class, pair in pairs if min(pair) >= 0)

    rows, pairs = _explored((0, 0), after, budget)
    return rows, [bool(left.accepting_S[one] and right.accepting_S[other]) for one, other in pairs], bytes_of


def _ends_first(rows: Rows) -> list[int]:
    """Return the states of an acyclic automaton, every state after its successors."""
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
