"""Compiles a byte expression into the smallest deterministic automaton.

The expression first becomes a nondeterministic automaton without empty moves. Its states are
positions in the
expression: a position takes one symbol of a set and has successors, the positions that may take the
next symbol. The symbols are the 256 bytes and, after them, the operations on counters (`counting`),
which go away at the end.

Shapes: S states, K classes of bytes that no state distinguishes.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from monograph.automata.counting import (
    ALWAYS,
    STATE_BITS,
    Ambiguous,
    Arrows,
    Effect,
    Operation,
    live_states,
    moved,
    without_operations,
)
from monograph.automata.expression import (
    Alternation,
    ByteSet,
    Concatenation,
    Expression,
    Intersection,
    Mark,
    Placed,
    Repetition,
)
from monograph.errors import InputRefused

# docs/constraints.md promises these limits: a larger automaton is refused within two seconds.
MAX_STATES = 10_000
MAX_POSITIONS = 20_000
MAX_WORK = 1_000_000  # steps of a `Budget`
STATE_MASK = (1 << STATE_BITS) - 1

Next: TypeAlias = frozenset[int]  # positions, any of which may take the next byte
NOWHERE: Next = frozenset()
END = 0  # the position that takes no byte: the text may end here
S = TypeVar("S")
Rows: TypeAlias = Sequence[Mapping[int, int]]  # per state {class of symbols: next state}


class Budget:
    """The limits of one automaton, and the steps spent on it, so that none takes more than about
    two seconds.

    Attributes:
        where: the automaton's name in an error.
        reading: the place of the schema that is being read.
        place: what positions are being made for.
        built: how many positions each place has taken.
        symbols: the symbol of each operation, from 256.
    """

    def __init__(self, where: str) -> None:
        self.where = where
        self.reading = ""
        self.place = ""
        self.built: Counter[str] = Counter()
        self.symbols: dict[Operation, int] = {}
        self._spent = 0

    def spend(self, steps: int) -> None:
        """Count steps; raise InputRefused when there are too many."""
        self._spent += steps
        self.limit(self._spent, MAX_WORK, "steps to build")

    def limit(self, count: int, most: int, unit: str) -> None:
        """Raise InputRefused for an automaton that needs more than `most` of a unit."""
        if count > most:
            reached = f", when {self.reading} is read" if self.reading else ""
            if self.built:
                reached = f", the most of them for {max(self.built, key=self.built.__getitem__)}"
            raise InputRefused(
                f"{self.where}: its automaton needs more than {most:,} {unit}{reached}; make it simpler or shorter"
            )


class Positions:
    """The positions of an expression, made from its end to its beginning, as a position is made
    with its successors.

    Positions that take the same bytes and have the same successors are merged, and so are common
    endings: the automaton of a character's UTF-8 sequences or of a schema's optional properties
    stays small.

    A loop is a placeholder for a part that may repeat without limit: it takes no byte and `closed`
    replaces it.

    Attributes:
        takes: for each position a bit mask of the symbols that it takes; 0 for loops and the end.
        follow: for each position its successors; for a loop, the first positions of its part and
            its successors.

    Raises:
        InputRefused: more than MAX_POSITIONS positions, or the budget is spent; any method may
            raise it.
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
        """Return the one position that takes a symbol of the mask and has the successors `then`, or
        NOWHERE.
        """
        if not takes or not then:
            return NOWHERE  # no text leads through such a position
        if (known := self._known.get((takes, then))) is None:
            known = self._known[takes, then] = frozenset((self._add(takes, then),))
        return known

    def _add(self, takes: int, follow: Next) -> int:
        self.budget.limit(len(self.takes), MAX_POSITIONS, "positions")
        self.budget.spend(1)
        if self.budget.place:
            self.budget.built[self.budget.place] += 1
        self.takes.append(takes)
        self.follow.append(follow)
        return len(self.takes) - 1

    def union(self, sets: Iterable[Next]) -> Next:
        """Return the union of the sets."""
        parts = list(sets)
        self.budget.spend(sum(map(len, parts)))
        return NOWHERE.union(*parts)

    def before(self, expression: Expression, then: Next) -> Next:
        """Return the positions that can take the first byte of a text of the expression followed by
        one from `then`.

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
        if isinstance(expression, Mark):
            symbol = self.budget.symbols.setdefault(
                expression.operation, 256 + len(self.budget.symbols)
            )
            return self.at(1 << symbol, then)
        if isinstance(expression, Placed):
            outer = self.budget.place
            self.budget.place = expression.place
            first = self.before(expression.part, then)
            self.budget.place = outer
            return first
        assert isinstance(expression, Repetition)
        return self._repeated(expression, then)

    def _repeated(self, expression: Repetition, then: Next) -> Next:
        first = then
        if expression.most is None:
            # A loop is a position of its own, since its successors contain itself: they are known
            # once it is made.
            loop = self._add(0, NOWHERE)
            self._loops.add(loop)
            first = frozenset((loop,))
            self.follow[loop] = self.union((self.before(expression.part, first), then))
        # Stop once another repetition changes nothing: the part matches no text, or only the empty
        # one.
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

    def states(
        self, rows: Rows, accepting: Sequence[bool], symbols_of: Mapping[int, int], then: Next
    ) -> Next:
        """Return the positions before a text that an automaton accepts, followed by one from
        `then`.

        Args:
            rows: the automaton's transitions.
            accepting: whether a text may end in each of its states.
            symbols_of: the symbols of each class of its transitions.
            then: what follows.
        """
        # States may lead to each other in circles, so each is a loop, whose successors are known
        # once all are made.
        loops = [frozenset((self._add(0, NOWHERE),)) for _ in rows]
        self._loops.update(*loops)
        for state, row in enumerate(rows):
            takes: dict[int, int] = defaultdict(int)  # {next state: the symbols that lead there}
            for by, target in row.items():
                takes[target] |= symbols_of[by]
            ways = [self.at(mask, loops[target]) for target, mask in takes.items()]
            (loop,) = loops[state]
            self.follow[loop] = self.union([*ways, *([then] if accepting[state] else [])])
        return loops[0]

    def closed(self, positions: Next) -> Next:
        """Return the positions with every loop replaced by the first positions of its part and its
        successors.
        """
        if (closed := self._closed.get(positions)) is None:
            reached = set(positions)
            waiting = [*positions & self._loops]
            for loop in waiting:
                self.budget.spend(1 + len(self.follow[loop]))
                fresh = self.follow[loop] - reached
                reached |= fresh
                waiting.extend(fresh & self._loops)
            closed = self._closed[positions] = frozenset(reached - self._loops)
        return closed


@dataclass(frozen=True, eq=False)
class ByteAutomaton:
    """A deterministic automaton over bytes; every state lies on a path from state 0 to an accepting
    state.

    Attributes:
        next_SK: int16 [S, K], the state after a byte of each class; -1 where no accepted text
            continues that way.
        class_256: uint8 [256], the class of each byte.
        accepting_S: bool [S], whether a text may end there.
        effect_SK: int16 [S, K], the index in `effects` of what the byte does to the counters.
        effects: all effects; the first changes nothing and is always allowed.
    """

    next_SK: NDArray[np.int16]
    class_256: NDArray[np.uint8]
    accepting_S: NDArray[np.bool_]
    effect_SK: NDArray[np.int16]
    effects: tuple[Effect, ...] = (ALWAYS,)

    def accepts(self, text: bytes) -> bool:
        """Return whether the automaton accepts a text; this reads byte by byte and is the reference
        for the rest.
        """
        state = 0
        for byte in text:
            at = state & STATE_MASK
            by = self.class_256[byte]
            following = int(self.next_SK[at, by])
            if following < 0:
                return False
            state = moved(self.effects[self.effect_SK[at, by]], state, following)
            if state < 0:
                return False
        return bool(self.accepting_S[state & STATE_MASK])

    @property
    def counts(self) -> bool:
        """Return whether it has counters."""
        return len(self.effects) > 1


def compiled(expression: Expression, where: str) -> ByteAutomaton:
    """Return the minimal automaton of an expression (with counters it may have more states than it
    needs).

    Args:
        expression: the expression over bytes.
        where: its name in an error.

    Raises:
        Ambiguous: a byte may have two effects on the counters.
        InputRefused: the expression matches no text, or its automaton is too large (MAX_STATES,
            MAX_POSITIONS, MAX_WORK).
    """
    automaton = bytes_only(expression, Budget(where))
    if automaton is None:
        raise InputRefused(f"{where} matches no text at all")
    return automaton


def bytes_only(expression: Expression, budget: Budget) -> ByteAutomaton | None:
    """Return the automaton of an expression, or None if it matches no text; see `compiled`."""
    found = _deterministic(expression, budget)
    if found is None:
        return None
    used = {by for row in found.rows for by in row}
    byte_classes = used.intersection(found.classes[:256])
    known = [
        (symbol, operation)
        for operation, symbol in budget.symbols.items()
        if symbol < len(found.classes)
    ]
    operations = {
        found.classes[symbol]: operation
        for symbol, operation in known
        if found.classes[symbol] in used
    }
    if len(byte_classes) + len(operations) != len(used):
        raise Ambiguous  # an operation stands for another one, or for a byte
    arrows = without_operations(found.rows, found.accepting, byte_classes, operations)
    return _renumbered(arrows, found)


def _renumbered(arrows: Sequence[Arrows], found: "_Deterministic") -> ByteAutomaton | None:
    """Return the automaton of the states that bytes reach, numbered breadth first; None if state 0
    leads nowhere.
    """
    if not arrows[0] and not found.accepting[0]:
        return None
    effects = {ALWAYS: 0}
    order = {0: 0}
    states = [0]
    for state in states:
        for _, (target, effect) in sorted(arrows[state].items()):
            effects.setdefault(effect, len(effects))
            if target not in order:
                order[target] = len(states)
                states.append(target)
    next_SK = np.full((len(states), max(found.classes) + 1), -1, dtype=np.int16)
    effect_SK = np.zeros(next_SK.shape, dtype=np.int16)
    for number, state in enumerate(states):
        for by, (target, effect) in arrows[state].items():
            next_SK[number, by] = order[target]
            effect_SK[number, by] = effects[effect]
    # Bytes whose columns became equal when states were merged, or when operations went away, share
    # a class.
    both, merged = np.unique(np.concatenate([next_SK, effect_SK]), axis=1, return_inverse=True)
    class_256 = merged.reshape(-1)[found.classes[:256]]
    accepting_S = np.array([found.accepting[state] for state in states])
    next_SK = np.ascontiguousarray(both[: len(states)])
    effect_SK = np.ascontiguousarray(both[len(states) :])
    return ByteAutomaton(
        next_SK, class_256.astype(np.uint8), accepting_S, effect_SK, tuple(effects)
    )


@dataclass(frozen=True, eq=False)
class _Deterministic:
    """The smallest deterministic automaton over symbols.

    Attributes:
        rows: for each state {class of symbols: next state}.
        accepting: whether a text may end in each state.
        classes: the class of each symbol; that of symbols that occur nowhere has no transitions.
    """

    rows: Rows
    accepting: list[bool]
    classes: list[int]


def _deterministic(expression: Expression, budget: Budget) -> _Deterministic | None:
    positions = Positions(budget)
    start = positions.closed(positions.before(expression, frozenset((END,))))
    if not start:
        return None
    # Symbols that no set tells apart share a class, so a row has a few entries instead of 256.
    classes, classes_of = _symbol_classes(set(positions.takes), 256 + len(budget.symbols))

    # The subset construction: a state is the set of positions that may take the next symbol.
    def after(state: Next) -> Iterator[tuple[int, Next]]:
        into: dict[int, list[Next]] = defaultdict(list)
        for position in state:
            its_classes = classes_of[positions.takes[position]]
            budget.spend(1 + len(its_classes))
            for symbol_class in its_classes:
                into[symbol_class].append(positions.follow[position])
        for symbol_class, follow in into.items():
            yield (
                symbol_class,
                positions.closed(follow[0] if len(follow) == 1 else positions.union(follow)),
            )

    rows, states = _explored(start, after, budget)
    return _minimal(rows, [END in state for state in states], classes)


def _explored(
    start: S, after: Callable[[S], Iterable[tuple[int, S]]], budget: Budget
) -> tuple[Rows, list[S]]:
    """Return the rows of all states that `after` leads to, as (byte class, next state), and these
    states.
    """
    numbers = {start: 0}
    rows = []
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


def _symbol_classes(sets: Iterable[int], symbols: int) -> tuple[list[int], dict[int, list[int]]]:
    """Sort symbols into classes whose members lie in the same sets; return their classes and each
    set's classes.
    """
    masks = list(sets)
    # Whether each set has the symbol, for each symbol; the symbols of a class have the same
    # profile.
    profiles = [tuple(mask >> symbol & 1 for mask in masks) for symbol in range(symbols)]
    numbers = {profile: number for number, profile in enumerate(dict.fromkeys(profiles))}
    classes = [numbers[profile] for profile in profiles]
    classes_of = {
        mask: [number for profile, number in numbers.items() if profile[i]]
        for i, mask in enumerate(masks)
    }
    return classes, classes_of


def _minimal(rows: Rows, accepting: Sequence[bool], classes: list[int]) -> _Deterministic:
    """Merge equivalent states, and number them breadth first."""
    block_of = _equivalent(rows, accepting)
    order = {block_of[0]: 0}
    representatives = [0]
    for state in representatives:
        for _, target in sorted(rows[state].items()):
            if block_of[target] not in order:
                order[block_of[target]] = len(representatives)
                representatives.append(target)
    merged = [
        {by: order[block_of[target]] for by, target in rows[state].items()}
        for state in representatives
    ]
    return _Deterministic(merged, [accepting[state] for state in representatives], classes)


def _equivalent(rows: Rows, accepting: Sequence[bool]) -> list[int]:
    """Return each state's block; the states of a block are those that accept the same texts
    (Hopcroft 1971).

    A missing transition leads to a dead state. The dead state needs no block: each block splits the
    states that have a transition into it from those that have none, and at first all blocks are
    splitters.
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
                smaller = self.blocks[number]
                self.blocks[number] = inside
            for state in smaller:
                self.block_of[state] = len(self.blocks)
            # The larger part keeps the block's number: it waits if the block did, and else the
            # whole block has split.
            self.waiting.add(len(self.blocks))
            self.blocks.append(smaller)


def _intersection_before(expression: Intersection, positions: Positions, then: Next) -> Next:
    """Return what `Positions.before` returns, for an intersection."""
    sides = [_deterministic(side, positions.budget) for side in (expression.left, expression.right)]
    if sides[0] is None or sides[1] is None:
        return NOWHERE
    rows, accepting, symbols_of = _product(sides[0], sides[1], positions.budget)
    # A pair of states may accept nothing though each of them does: a text that leads there must not
    # begin.
    live = live_states(rows, accepting)
    if not live[0]:
        return NOWHERE
    rows = [{by: target for by, target in row.items() if live[target]} for row in rows]
    return positions.states(rows, accepting, symbols_of, then)


def _product(
    left: _Deterministic, right: _Deterministic, budget: Budget
) -> tuple[Rows, list[bool], dict[int, int]]:
    """Return the product automaton: rows over pairs of classes, whether each state accepts, each
    class's symbols.
    """
    symbols_of: dict[int, int] = defaultdict(int)
    # The side that was made first may not know an operation of the other; it has no transition for
    # it.
    unknown = max(right.classes) + 1
    for symbol in range(256 + len(budget.symbols)):
        if symbol < len(left.classes):
            other = right.classes[symbol] if symbol < len(right.classes) else unknown
            symbols_of[left.classes[symbol] * (unknown + 1) + other] |= 1 << symbol

    def after(state: tuple[int, int]) -> Iterator[tuple[int, tuple[int, int]]]:
        budget.spend(len(symbols_of))
        one, other = left.rows[state[0]], right.rows[state[1]]
        for both in symbols_of:
            of_one, of_other = divmod(both, unknown + 1)
            if of_one in one and of_other in other:
                yield both, (one[of_one], other[of_other])

    rows, pairs = _explored((0, 0), after, budget)
    return (
        rows,
        [left.accepting[one] and right.accepting[other] for one, other in pairs],
        symbols_of,
    )
