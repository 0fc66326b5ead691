"""Compile an expression over bytes to a minimal deterministic automaton.

The expression (`monograph.automata.expression`) first becomes a position automaton (Glushkov 1961): a
nondeterministic one without ε-transitions, whose states are positions in the expression. A position
reads one symbol of a set and has successors: the positions that may read the next symbol. The symbols
are the 256 bytes and, from 256 on, the operations on counters (`monograph.automata.counting`), which
are removed at the end.

Then the subset construction makes it deterministic, and Hopcroft's algorithm merges equivalent states.

Shapes: S states, K classes of bytes. Bytes share a class if they lead from each state to the same state,
with the same effect on the counters.
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
    CounterOperation,
    Effect,
    Transitions,
    apply_effect,
    live_states,
    remove_operations,
    without_dead_targets,
)
from monograph.automata.expression import (
    Alternation,
    ByteSet,
    Concatenation,
    CounterMark,
    Expression,
    Intersection,
    Repetition,
    StateMachine,
    WithSource,
)
from monograph.errors import InputRefused

# docs/constraints.md promises these limits, and that a larger automaton is refused within two
# seconds.
MAX_STATES = 10_000
MAX_POSITIONS = 20_000
MAX_WORK = 1_000_000  # in steps of a `Budget`
STATE_MASK = (1 << STATE_BITS) - 1

PositionSet: TypeAlias = frozenset[int]  # any of these positions may read the next symbol
EMPTY: PositionSet = frozenset()
END = 0  # the position that reads no symbol; the text may end there
BYTES = 256
StateT = TypeVar("StateT")
# For each state {class of symbols: next state}.
StateTransitionTable: TypeAlias = Sequence[Mapping[int, int]]


class Budget:
    """Counts the steps of compiling one automaton, so that none takes more than about two seconds.

    The budget is passed through all of the compilation. So it also has two other things that are needed
    everywhere: what is being compiled, for error messages, and the symbols of operations on counters.

    Attributes:
        where: the automaton's name in an error.
        schema_path: the place of the schema that is being read, or "".
        source: the keyword of a schema for which positions are being made, with its place, or "".
        positions_by_source: how many positions were made for each source.
        symbols: the symbol of each operation on a counter that was met so far; the first one is 256.
    """

    def __init__(self, where: str) -> None:
        self.where = where
        self.schema_path = ""
        self.source = ""
        self.positions_by_source: Counter[str] = Counter()
        self.symbols: dict[CounterOperation, int] = {}
        self._spent = 0

    def spend(self, steps: int) -> None:
        """Count steps.

        Raises:
            InputRefused: there are more than MAX_WORK steps.
        """
        self._spent += steps
        self.require_at_most(MAX_WORK, self._spent, "steps to build")

    def require_at_most(self, limit: int, count: int, unit: str) -> None:
        """Refuse an automaton that needs more than `limit` of a unit.

        Raises:
            InputRefused: `count` is more than `limit`.
        """
        if count <= limit:
            return
        detail = ""
        if self.positions_by_source:
            [(source, _)] = self.positions_by_source.most_common(1)
            detail = f", the most of them for {source}"
        elif self.schema_path:
            detail = f", when {self.schema_path} is read"
        raise InputRefused(
            f"{self.where}: its automaton needs more than {limit:,} {unit}{detail}; make it simpler or shorter"
        )


class Positions:
    """The positions of an expression.

    They are made from the end of the expression to its beginning, because the successors of a
    position must exist before it. Positions that read the same symbols and have the same successors
    are merged, so common endings are merged as well. This keeps the automaton small for a
    character's UTF-8 sequences and for a schema's optional properties.

    If a part may repeat without limit, its positions are among their own successors, so these do not all
    exist when a position is made. A *loop* stands for the part's first positions in the meantime. It reads
    no symbol, and `without_loops` replaces it.

    Attributes:
        symbol_masks: for each position a bit mask of the symbols that it reads; 0 for loops and the
            end.
        successors: for each position its successors. Those of a loop are the first positions of its
            part, and the positions after the part.

    Raises:
        InputRefused: there are more than MAX_POSITIONS positions, or the budget is spent. Any
            method may raise this.
    """

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.symbol_masks = [0]
        self.successors = [EMPTY]
        self._loops: set[int] = set()
        # The results of `make_position`, `first_positions` and `without_loops`, by their arguments.
        self._positions: dict[tuple[int, PositionSet], PositionSet] = {}
        self._first: dict[tuple[Expression, PositionSet], PositionSet] = {}
        self._expanded: dict[PositionSet, PositionSet] = {}

    def make_position(self, symbol_mask: int, after: PositionSet) -> PositionSet:
        """Return the set of one position, which reads a symbol of a mask and is followed by `after`.

        The set is EMPTY if there is no symbol to read or nothing may follow, so that no text leads
        through such a position.
        """
        if not symbol_mask or not after:
            return EMPTY
        position = self._positions.get((symbol_mask, after))
        if position is None:
            position = frozenset((self._add_position(symbol_mask, after),))
            self._positions[symbol_mask, after] = position
        return position

    def _add_position(self, symbol_mask: int, successors: PositionSet) -> int:
        self.budget.require_at_most(MAX_POSITIONS, len(self.symbol_masks), "positions")
        self.budget.spend(1)
        if self.budget.source:
            self.budget.positions_by_source[self.budget.source] += 1
        self.symbol_masks.append(symbol_mask)
        self.successors.append(successors)
        return len(self.symbol_masks) - 1

    def union(self, sets: Iterable[PositionSet]) -> PositionSet:
        """Return the union of sets of positions."""
        position_sets = list(sets)
        self.budget.spend(sum(map(len, position_sets)))
        return EMPTY.union(*position_sets)

    def first_positions(self, expression: Expression, after: PositionSet) -> PositionSet:
        """Return the positions that can read the first symbol of an expression's texts.

        If the expression matches the empty text, the result includes the positions `after`.

        Args:
            expression: the expression.
            after: the positions that follow the expression.
        """
        if isinstance(expression, ByteSet):
            return self.make_position(expression.mask, after)
        first = self._first.get((expression, after))
        if first is None:
            self.budget.spend(1)
            first = self._composed_positions(expression, after)
            self._first[expression, after] = first
        return first

    def _composed_positions(self, expression: Expression, after: PositionSet) -> PositionSet:
        """Return what `first_positions` returns, for an expression that has parts or is a mark."""
        if isinstance(expression, Concatenation):
            self.budget.spend(len(expression.parts))
            for part in reversed(expression.parts):
                after = self.first_positions(part, after)
            return after
        if isinstance(expression, Alternation):
            return self.union(self.first_positions(option, after) for option in expression.options)
        if isinstance(expression, Intersection):
            return _intersection_positions(expression, self, after)
        if isinstance(expression, CounterMark):
            return self.make_position(1 << self._symbol_of(expression.operation), after)
        if isinstance(expression, WithSource):
            outer_source = self.budget.source
            self.budget.source = expression.source
            first = self.first_positions(expression.part, after)
            self.budget.source = outer_source
            return first
        if isinstance(expression, StateMachine):
            return self._machine_positions(expression, after)
        assert isinstance(expression, Repetition)
        return self._repeated_positions(expression, after)

    def _symbol_of(self, operation: CounterOperation) -> int:
        symbols = self.budget.symbols
        return symbols.setdefault(operation, BYTES + len(symbols))

    def _machine_positions(self, machine: StateMachine, after: PositionSet) -> PositionSet:
        """Return what `first_positions` returns, for a state machine."""
        rows = machine.rows
        symbols_of = dict(machine.symbols_of)
        if machine.ignored:
            # The symbols of ignored operations are one more class, which leads from each state to itself.
            ignored_class = max(symbols_of) + 1
            symbols_of[ignored_class] = sum(
                1 << self._symbol_of(operation) for operation in machine.ignored
            )
            rows = tuple({**row, ignored_class: state} for state, row in enumerate(rows))
        return self.add_automaton(rows, machine.accepting, symbols_of, after)

    def _repeated_positions(self, expression: Repetition, after: PositionSet) -> PositionSet:
        """Return what `first_positions` returns, for a repetition."""
        first = after
        optional_count = 0
        if expression.max_count is None:
            # The loop is made before its successors are known, because they lead back to it. Until then the
            # part is followed by the loop itself.
            loop = self._add_position(0, EMPTY)
            self._loops.add(loop)
            first = frozenset((loop,))
            self.successors[loop] = self.union(
                (self.first_positions(expression.part, first), after)
            )
        else:
            optional_count = expression.max_count - expression.min_count
        # The repetitions are added from the last to the first: `first` has the first positions of those
        # added so far and of what follows them. If one more repetition changes nothing, the part matches no
        # text, or only the empty text, and further ones change nothing either.
        for _ in range(optional_count):
            longer = self.union((self.first_positions(expression.part, first), after))
            if longer == first:
                break
            first = longer
        for _ in range(expression.min_count):
            longer = self.first_positions(expression.part, first)
            if longer == first:
                break
            first = longer
        return first

    def add_automaton(
        self,
        rows: StateTransitionTable,
        accepting: Sequence[bool],
        symbols_of: Mapping[int, int],
        after: PositionSet,
    ) -> PositionSet:
        """Add positions for the texts of an automaton, and return their first positions.

        Args:
            rows: the automaton's transitions.
            accepting: whether a text may end in each of its states.
            symbols_of: for each class of symbols in `rows`, a bit mask of its symbols.
            after: the positions that follow the texts.
        """
        # States may lead to each other in cycles. So each state becomes a loop, whose successors are set
        # when all loops exist.
        loops = [frozenset((self._add_position(0, EMPTY),)) for _ in rows]
        self._loops.update(*loops)
        for state, row in enumerate(rows):
            masks: dict[int, int] = defaultdict(int)  # {next state: the symbols that lead there}
            for symbol_class, target in row.items():
                masks[target] |= symbols_of[symbol_class]
            successors = [self.make_position(mask, loops[target]) for target, mask in masks.items()]
            if accepting[state]:
                successors.append(after)
            (loop,) = loops[state]
            self.successors[loop] = self.union(successors)
        return loops[0]

    def without_loops(self, positions: PositionSet) -> PositionSet:
        """Replace loops by their successors until no loop is left, and return the positions."""
        expanded = self._expanded.get(positions)
        if expanded is None:
            reached = set(positions)
            queue = [*positions & self._loops]
            for loop in queue:  # The queue grows in the loop body.
                self.budget.spend(1 + len(self.successors[loop]))
                newly_reached = self.successors[loop] - reached
                reached |= newly_reached
                queue.extend(newly_reached & self._loops)
            expanded = frozenset(reached - self._loops)
            self._expanded[positions] = expanded
        return expanded


@dataclass(frozen=True, eq=False)
class ByteAutomaton:
    """A deterministic automaton over bytes.

    Every state is on a path from state 0 to an accepting state.

    Attributes:
        next_SK: int16 [S, K], the state after a byte of each class; -1: no accepted text has such
            a byte there.
        class_256: uint8 [256], the class of each byte.
        accepting_S: bool [S], whether a text may end in the state.
        effect_SK: int16 [S, K], the index in `effects` of what a byte of each class does to the
            counters.
        effects: all effects; the first one is `ALWAYS`.
    """

    next_SK: NDArray[np.int16]
    class_256: NDArray[np.uint8]
    accepting_S: NDArray[np.bool_]
    effect_SK: NDArray[np.int16]
    effects: tuple[Effect, ...] = (ALWAYS,)

    def accepts(self, text: bytes) -> bool:
        """Return whether the automaton accepts a text.

        This method reads one byte after another. It is the reference for automata over tokens.
        """
        packed_state = 0
        for byte in text:
            state = packed_state & STATE_MASK
            byte_class = self.class_256[byte]
            next_state = int(self.next_SK[state, byte_class])
            if next_state < 0:
                return False
            effect = self.effects[self.effect_SK[state, byte_class]]
            packed_state = apply_effect(effect, packed_state, next_state)
            if packed_state < 0:
                return False
        return bool(self.accepting_S[packed_state & STATE_MASK])

    @property
    def has_counters(self) -> bool:
        """Whether the automaton has counters."""
        return len(self.effects) > 1


def compile_expression(expression: Expression, where: str) -> ByteAutomaton:
    """Return the automaton of an expression.

    It is the smallest one if it has no counters, and else it may have more states than needed.

    Args:
        expression: the expression over bytes.
        where: the expression's name in an error.

    Raises:
        Ambiguous: a byte may have two different effects on the counters.
        InputRefused: the expression matches no text, or its automaton is too large (MAX_STATES,
            MAX_POSITIONS, MAX_WORK).
    """
    automaton = byte_automaton(expression, Budget(where))
    if automaton is None:
        raise InputRefused(f"{where} matches no text at all")
    return automaton


def byte_automaton(expression: Expression, budget: Budget) -> ByteAutomaton | None:
    """Return the automaton of an expression, or None if it matches no text.

    Raises:
        Ambiguous: see `compile_expression`.
        InputRefused: the automaton is too large.
    """
    automaton = _symbol_automaton(expression, budget)
    if automaton is None:
        return None
    used_classes = {symbol_class for row in automaton.rows for symbol_class in row}
    byte_classes = used_classes.intersection(automaton.classes[:BYTES])
    operations = {}
    for operation, symbol in budget.symbols.items():
        # The budget may know operations that only other expressions use.
        if symbol < len(automaton.classes) and automaton.classes[symbol] in used_classes:
            operations[automaton.classes[symbol]] = operation
    if len(byte_classes) + len(operations) != len(used_classes):
        # Each class should have either bytes or one operation. If the numbers differ, a class has two
        # operations, or an operation and a byte.
        raise Ambiguous
    transitions = remove_operations(automaton.rows, automaton.accepting, byte_classes, operations)
    return _make_byte_automaton(transitions, automaton)


def _make_byte_automaton(
    transitions: Sequence[Transitions], automaton: "_SymbolAutomaton"
) -> ByteAutomaton | None:
    """Return the automaton of the states that bytes reach, numbered breadth first.

    If it accepts no text, the result is None.

    Args:
        transitions: the transitions by bytes of each state of `automaton`.
        automaton: the automaton before operations were removed.
    """
    if not transitions[0] and not automaton.accepting[0]:
        return None
    effect_numbers = {ALWAYS: 0}
    new_numbers = {0: 0}
    old_states = [0]
    for state in old_states:  # The list grows in the loop body.
        for _, (target, effect) in sorted(transitions[state].items()):
            effect_numbers.setdefault(effect, len(effect_numbers))
            if target not in new_numbers:
                new_numbers[target] = len(old_states)
                old_states.append(target)
    next_SK = np.full((len(old_states), max(automaton.classes) + 1), -1, dtype=np.int16)
    effect_SK = np.zeros(next_SK.shape, dtype=np.int16)
    for number, state in enumerate(old_states):
        for byte_class, (target, effect) in transitions[state].items():
            next_SK[number, byte_class] = new_numbers[target]
            effect_SK[number, byte_class] = effect_numbers[effect]
    # Columns may have become equal when states were merged or operations were removed. The bytes of
    # equal columns then share a class.
    stacked = np.concatenate([next_SK, effect_SK])
    unique_columns, new_classes = np.unique(stacked, axis=1, return_inverse=True)
    class_256 = new_classes.reshape(-1)[automaton.classes[:BYTES]].astype(np.uint8)
    accepting_S = np.array([automaton.accepting[state] for state in old_states])
    next_SK = np.ascontiguousarray(unique_columns[: len(old_states)])
    effect_SK = np.ascontiguousarray(unique_columns[len(old_states) :])
    return ByteAutomaton(next_SK, class_256, accepting_S, effect_SK, tuple(effect_numbers))


@dataclass(frozen=True, eq=False)
class _SymbolAutomaton:
    """The smallest deterministic automaton over symbols.

    Attributes:
        rows: for each state {class of symbols: next state}.
        accepting: whether a text may end in each state.
        classes: the class of each symbol. Symbols that the expression does not use have a class
            without transitions.
    """

    rows: StateTransitionTable
    accepting: list[bool]
    classes: list[int]


def _symbol_automaton(expression: Expression, budget: Budget) -> _SymbolAutomaton | None:
    """Return the automaton of an expression, or None if it matches no text."""
    positions = Positions(budget)
    first = positions.first_positions(expression, frozenset((END,)))
    start = positions.without_loops(first)
    if not start:
        return None
    # Symbols that no position distinguishes share a class, so a row has few entries instead of 256.
    classes, classes_of_mask = _symbol_classes(
        set(positions.symbol_masks), BYTES + len(budget.symbols)
    )

    # The subset construction: a state is the set of positions that may read the next symbol.
    def transitions(state: PositionSet) -> Iterator[tuple[int, PositionSet]]:
        successors_by_class: dict[int, list[PositionSet]] = defaultdict(list)
        for position in state:
            position_classes = classes_of_mask[positions.symbol_masks[position]]
            budget.spend(1 + len(position_classes))
            for symbol_class in position_classes:
                successors_by_class[symbol_class].append(positions.successors[position])
        for symbol_class, successors in successors_by_class.items():
            if len(successors) == 1:
                next_positions = successors[0]
            else:
                next_positions = positions.union(successors)
            yield symbol_class, positions.without_loops(next_positions)

    rows, states = _explore(start, transitions, budget)
    accepting = [END in state for state in states]
    # A loop has positions even if what follows it matches no text, as in an empty class after `x*`.
    # Transitions to such states are removed, so that no text can begin that cannot be completed.
    live = live_states(rows, accepting)
    if not live[0]:
        return None
    return _minimize(without_dead_targets(rows, live), accepting, classes)


def _explore(
    start: StateT, transitions: Callable[[StateT], Iterable[tuple[int, StateT]]], budget: Budget
) -> tuple[StateTransitionTable, list[StateT]]:
    """Number all states that can be reached from a start state, breadth first.

    Args:
        start: the start state.
        transitions: returns (class of symbols, next state) for each transition of a state.
        budget: limits the number of states.

    Returns:
        (the transitions of each state by its number, the states).
    """
    numbers = {start: 0}
    queue = [start]
    rows = []
    for state in queue:  # The queue grows in the loop body.
        row = {}
        for symbol_class, next_state in transitions(state):
            if next_state not in numbers:
                numbers[next_state] = len(queue)
                queue.append(next_state)
            row[symbol_class] = numbers[next_state]
        rows.append(row)
        budget.require_at_most(MAX_STATES, len(queue), "states")
    return rows, queue


def _symbol_classes(
    symbol_masks: Iterable[int], symbol_count: int
) -> tuple[list[int], dict[int, list[int]]]:
    """Return the class of each symbol, and for each mask the classes of its symbols.

    Two symbols share a class if they are in the same masks.

    Args:
        symbol_masks: sets of symbols, as bit masks.
        symbol_count: the number of symbols.
    """
    masks = list(symbol_masks)
    # For each symbol, whether each mask has it. The symbols of a class have the same profile.
    profiles = [tuple(mask >> symbol & 1 for mask in masks) for symbol in range(symbol_count)]
    class_of_profile = {profile: index for index, profile in enumerate(dict.fromkeys(profiles))}
    classes = [class_of_profile[profile] for profile in profiles]
    classes_of_mask = {}
    for index, mask in enumerate(masks):
        classes_of_mask[mask] = [
            symbol_class for profile, symbol_class in class_of_profile.items() if profile[index]
        ]
    return classes, classes_of_mask


def _minimize(
    rows: StateTransitionTable, accepting: Sequence[bool], classes: list[int]
) -> _SymbolAutomaton:
    """Return the automaton with equivalent states merged, numbered breadth first."""
    block_of = _equivalence_blocks(rows, accepting)
    number_of_block = {block_of[0]: 0}
    representatives = [0]  # a state of each block
    for state in representatives:  # The list grows in the loop body.
        for _, target in sorted(rows[state].items()):
            if block_of[target] not in number_of_block:
                number_of_block[block_of[target]] = len(representatives)
                representatives.append(target)
    merged_rows = [
        {
            symbol_class: number_of_block[block_of[target]]
            for symbol_class, target in rows[state].items()
        }
        for state in representatives
    ]
    merged_accepting = [accepting[state] for state in representatives]
    return _SymbolAutomaton(merged_rows, merged_accepting, classes)


def _equivalence_blocks(rows: StateTransitionTable, accepting: Sequence[bool]) -> list[int]:
    """Return the block of each state, by Hopcroft's algorithm (1971).

    The states of a block accept the same texts. A missing transition leads to a dead state, which accepts no
    text. The dead state needs no block of its own: splitting by all other blocks already separates the states
    that have a transition from the states that lack it.
    """
    # For each state, (class of symbols, state before it) of the transitions that lead to it.
    predecessors: list[list[tuple[int, int]]] = [[] for _ in rows]
    for state, row in enumerate(rows):
        for symbol_class, target in row.items():
            predecessors[target].append((symbol_class, state))
    partition = _Partition(accepting)
    while partition.waiting:
        # The states that lead into the block, by the class of symbols of the transition.
        sources_by_class: dict[int, set[int]] = defaultdict(set)
        for target in partition.blocks[partition.waiting.pop()]:
            for symbol_class, state in predecessors[target]:
                sources_by_class[symbol_class].add(state)
        for sources in sources_by_class.values():
            partition.split_by(sources)
    return partition.block_of


class _Partition:
    """A partition of states into blocks, at first the accepting states and the others.

    Attributes:
        blocks: the states of each block.
        block_of: for each state the number of its block.
        waiting: the numbers of the blocks by which the others must still be split.
    """

    def __init__(self, accepting: Sequence[bool]) -> None:
        halves: list[set[int]] = [set(), set()]  # not accepting, accepting
        for state, accepts in enumerate(accepting):
            halves[accepts].add(state)
        self.blocks = [half for half in halves if half]
        self.block_of = [0] * len(accepting)
        for number, block in enumerate(self.blocks):
            for state in block:
                self.block_of[state] = number
        self.waiting = set(range(len(self.blocks)))

    def split_by(self, splitter: set[int]) -> None:
        """Split every block into its states inside and its states outside the splitter."""
        inside_of_block: dict[int, set[int]] = defaultdict(set)
        for state in splitter:
            inside_of_block[self.block_of[state]].add(state)
        for number, inside in inside_of_block.items():
            outside_count = len(self.blocks[number]) - len(inside)
            if outside_count == 0:
                continue
            self.blocks[number] -= inside
            smaller = inside
            if outside_count < len(inside):
                smaller = self.blocks[number]
                self.blocks[number] = inside
            for state in smaller:
                self.block_of[state] = len(self.blocks)
            # The larger part keeps the block's number. If the block waits, both parts now wait.
            # Otherwise the whole block has already split the others, and it is enough to split by
            # the smaller part.
            self.waiting.add(len(self.blocks))
            self.blocks.append(smaller)


def _intersection_positions(
    expression: Intersection, positions: Positions, after: PositionSet
) -> PositionSet:
    """Return the first positions of an intersection; see `Positions.first_positions`.

    Both sides are compiled to deterministic automata, whose product is added to the positions.
    """
    left = _symbol_automaton(expression.left, positions.budget)
    right = _symbol_automaton(expression.right, positions.budget)
    if left is None or right is None:
        return EMPTY
    rows, accepting, symbols_of = _product(left, right, positions.budget)
    # A pair of states may accept no text, although each of its states accepts one. Transitions to
    # such pairs are removed, so that no text can begin that cannot be completed.
    live = live_states(rows, accepting)
    if not live[0]:
        return EMPTY
    live_rows = without_dead_targets(rows, live)
    return positions.add_automaton(live_rows, accepting, symbols_of, after)


def _product(
    left: _SymbolAutomaton, right: _SymbolAutomaton, budget: Budget
) -> tuple[StateTransitionTable, list[bool], dict[int, int]]:
    """Return the product of two automata, which accepts the texts that both accept.

    Returns:
        (the product's rows, over pairs of classes; whether a text may end in each of its states; for
        each pair of classes a bit mask of its symbols).
    """
    symbols_of: dict[int, int] = defaultdict(int)
    pair_base = max(right.classes) + 1  # the pair of classes (l, r) is the number l * pair_base + r
    # An operation may have become known after one of the automata was made. That automaton has no transition
    # for it, so the product has none either.
    symbol_count = min(len(left.classes), len(right.classes))
    for symbol in range(symbol_count):
        pair = left.classes[symbol] * pair_base + right.classes[symbol]
        symbols_of[pair] |= 1 << symbol

    def transitions(state: tuple[int, int]) -> Iterator[tuple[int, tuple[int, int]]]:
        budget.spend(len(symbols_of))
        left_row = left.rows[state[0]]
        right_row = right.rows[state[1]]
        for pair in symbols_of:
            left_class, right_class = divmod(pair, pair_base)
            if left_class in left_row and right_class in right_row:
                yield pair, (left_row[left_class], right_row[right_class])

    rows, states = _explore((0, 0), transitions, budget)
    accepting = [
        left.accepting[left_state] and right.accepting[right_state]
        for left_state, right_state in states
    ]
    return rows, accepting, symbols_of


def complement(expression: Expression, budget: Budget) -> StateMachine:
    """Return an expression for the texts of bytes that an expression without counters does not match."""
    automaton = byte_automaton(expression, budget)
    assert automaton is not None and not automaton.has_counters
    states, byte_classes = automaton.next_SK.shape
    # Missing transitions lead to a new last state, which is never left. That state is accepting, and each other
    # state is accepting if it was not accepting before.
    rest_state = states
    next_SK = np.where(automaton.next_SK < 0, rest_state, automaton.next_SK)
    rows = [dict(enumerate(row)) for row in next_SK.tolist()]
    rows.append(dict.fromkeys(range(byte_classes), rest_state))
    accepting = [*(not accepts for accepts in automaton.accepting_S.tolist()), True]
    symbols_of = {}
    for byte_class in range(byte_classes):
        class_bytes = np.flatnonzero(automaton.class_256 == byte_class).tolist()
        symbols_of[byte_class] = sum(1 << byte for byte in class_bytes)
    return StateMachine(tuple(rows), tuple(accepting), symbols_of)
