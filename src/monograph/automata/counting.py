"""Counters of an automaton: they bound a long string or array without a state for each length.

A part that is repeated M - W to M times is written with three operations on its counter: M is the
maximum, and W says how many of these repetitions may be left over at the end.

    begin(M) (count part)* end(W)

The count c is the number of repetitions that may still follow:

    begin(M)    sets c = M
    count       is allowed if c >= 1, and sets c = c - 1
    end(W)      is allowed if c <= W, and sets c = 0

A counted part inside another one has a counter of its own. There are COUNTERS of them; a part that
is nested deeper is written out, repetition by repetition, so that there is a state for each.

While an automaton is built, operations are symbols like the 256 bytes. Then `remove_operations`
moves the operations before a byte into the transition of that byte: the transition gets an
`Effect`, which is what these operations do together.

A state and its counters are packed into one number, so that a decoder keeps one number for a row:

    state + c[0] * 2^16 + c[1] * 2^31 + c[2] * 2^46
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

COUNTERS = 3
MAX_COUNT = (1 << 15) - 1  # the largest maxLength or maxItems, which docs/constraints.md promises
STATE_BITS = 16
COUNT_BITS = 15
# The lowest bit of each count in a packed state.
SHIFTS = tuple(STATE_BITS + COUNT_BITS * counter for counter in range(COUNTERS))
_NEVER = MAX_COUNT + 1  # more repetitions than a counter allows

Counts: TypeAlias = tuple[int, ...]  # a number for each counter


class CounterOperation(NamedTuple):
    """An operation on one counter.

    Attributes:
        kind: which of the three operations it is; the module's docstring describes them.
        counter: the counter's index.
        number: M of "begin", W of "end", and 0 of "count"; at most MAX_COUNT.
    """

    kind: Literal["begin", "count", "end"]
    counter: int
    number: int = 0


class Effect(NamedTuple):
    """What a byte or a token does to the counters.

    It is allowed where low <= c <= high for the count c of each counter. Then c becomes keep * c + add.

    Attributes:
        low: the smallest allowed count of each counter.
        high: the largest allowed count of each counter.
        keep: for each counter 1 if the new count depends on the old one, else 0.
        add: the number that is added to each count.
    """

    low: Counts
    high: Counts
    keep: Counts
    add: Counts


# The effect of a byte that is always allowed and changes no count.
ALWAYS = Effect((0,) * COUNTERS, (MAX_COUNT,) * COUNTERS, (1,) * COUNTERS, (0,) * COUNTERS)


def effect_of(operation: CounterOperation) -> Effect:
    """Return the effect of one operation."""
    low, high, keep, add = (list(numbers) for numbers in ALWAYS)
    if operation.kind == "count":
        low[operation.counter] = 1
        add[operation.counter] = -1
    elif operation.kind == "begin":
        keep[operation.counter] = 0
        add[operation.counter] = operation.number
    else:
        keep[operation.counter] = 0
        high[operation.counter] = operation.number
    return Effect(tuple(low), tuple(high), tuple(keep), tuple(add))


def compose_effects(first: Effect, second: Effect) -> Effect | None:
    """Return the effect of `first` followed by `second`; None if no counts allow both."""
    low, high, keep, add = (list(numbers) for numbers in first)
    for counter in range(COUNTERS):
        if first.keep[counter]:
            # `second` bounds the count c + add that `first` leaves, so subtracting `add` gives the
            # bounds of the count c before `first`.
            low[counter] = max(low[counter], second.low[counter] - first.add[counter])
            high[counter] = min(high[counter], second.high[counter] - first.add[counter])
        elif not second.low[counter] <= first.add[counter] <= second.high[counter]:
            # `first` sets the count to `add`, whatever it was before, and `second` forbids that.
            return None
        if low[counter] > high[counter]:
            return None
        keep[counter] = first.keep[counter] * second.keep[counter]
        add[counter] = second.add[counter] + second.keep[counter] * first.add[counter]
    return Effect(tuple(low), tuple(high), tuple(keep), tuple(add))


def is_sound(effect: Sequence[Sequence[int]]) -> bool:
    """Return whether an effect leaves every count between 0 and MAX_COUNT.

    Args:
        effect: the four fields of an `Effect`.
    """
    for low, high, keep, add in zip(*effect, strict=True):
        if keep not in (0, 1):
            return False
        new_low = keep * low + add
        new_high = keep * high + add
        if low < 0 or high > MAX_COUNT or new_low < 0 or new_high > MAX_COUNT:
            return False
    return True


def counters_of(packed_state: int) -> Counts:
    """Return the counts in a packed state."""
    return tuple(packed_state >> shift & MAX_COUNT for shift in SHIFTS)


def apply_effect(effect: Effect, packed_state: int, next_state: int) -> int:
    """Return the next state, packed with its counts; -1 if the present counts forbid the effect.

    Args:
        effect: the effect.
        packed_state: the present state, packed with its counts.
        next_state: the next state, without counts.
    """
    packed = next_state
    for counter, count in enumerate(counters_of(packed_state)):
        if not effect.low[counter] <= count <= effect.high[counter]:
            return -1
        packed += (effect.keep[counter] * count + effect.add[counter]) << SHIFTS[counter]
    return packed


class Ambiguous(Exception):
    """A byte may have two effects on the counters, and only later bytes decide which one."""


StateTransitions: TypeAlias = Mapping[int, int]  # {symbol class: next state}
Transitions: TypeAlias = dict[int, tuple[int, Effect]]  # {byte class: (next state, effect)}


def remove_operations(
    rows: Sequence[StateTransitions],
    accepting: Sequence[bool],
    byte_classes: Collection[int],
    operations: Mapping[int, CounterOperation],
) -> list[Transitions]:
    """Return each state's transitions by bytes, with the effects of the operations before each byte.

    States keep their numbers. After every transition that the counts allow, an accepting state can
    still be reached with the new counts. If state 0 has no transition, no text is accepted except perhaps the
    empty one.

    Args:
        rows: the transitions of each state. All of them lead to states from which an accepting state
            can be reached if the counts are ignored. If W of a part is less than M, the rows let it
            repeat without limit, so that its count can always fall to W.
        accepting: whether a text may end in each state.
        byte_classes: the classes of bytes.
        operations: the operation of each class that is not one of bytes.

    Raises:
        Ambiguous: a byte may have two effects.
    """
    if not operations:
        # There are no counts that could forbid a transition.
        return [{symbol: (state, ALWAYS) for symbol, state in row.items()} for row in rows]
    while True:
        needs = [_needed_repetitions(rows, operations, counter) for counter in range(COUNTERS)]
        # If a part needs more repetitions than its bound allows, it must not begin, so the transitions that
        # begin it are removed. States that lead only to such a part are then dead, and transitions to them are
        # removed, too. After that, other parts may need more repetitions, so the loop starts again.
        possible = [
            {
                symbol: state
                for symbol, state in row.items()
                if not _begins_hopeless_part(operations.get(symbol), needs, state)
            }
            for row in rows
        ]
        if possible == rows:
            break
        rows = without_dead_targets(possible, live_states(possible, accepting))
    effects = {symbol: effect_of(operation) for symbol, operation in operations.items()}
    guards = [_guard([need[state] for need in needs]) for state in range(len(rows))]
    byte_class_set = set(byte_classes)
    return [
        _byte_transitions(state, rows, byte_class_set, effects, guards)
        for state in range(len(rows))
    ]


def _byte_transitions(
    state: int,
    rows: Sequence[StateTransitions],
    byte_classes: set[int],
    effects: Mapping[int, Effect],
    guards: Sequence[Effect],
) -> Transitions:
    """Return a state's transitions by a byte, each after any operations before the byte.

    Args:
        state: the state.
        rows: the transitions of all states.
        byte_classes: the classes of bytes.
        effects: the effect of each operation's class.
        guards: for each state the condition on the counts under which the text can still end after
            it, as an effect that changes no count; see `_guard`.
    """
    transitions: Transitions = {}
    # The queue grows in the loop. It has the states that operations lead to, each with the effect of
    # these operations.
    queue = [(state, ALWAYS)]
    for current, effect in queue:
        if len(queue) > len(rows) + 1:
            # There are more entries than states, so operations reach some state in two ways. Either they form a
            # loop without a byte, and the queue would never end, or a byte may have two effects.
            raise Ambiguous
        for symbol, next_state in rows[current].items():
            if symbol not in byte_classes:
                effect_of_both = compose_effects(effect, effects[symbol])
                if effect_of_both is not None:
                    queue.append((next_state, effect_of_both))
                continue
            guarded_effect = compose_effects(effect, guards[next_state])
            if guarded_effect is None:
                continue
            if symbol in transitions:
                raise Ambiguous
            transitions[symbol] = (next_state, guarded_effect)
    return transitions


def _guard(needs: Sequence[int]) -> Effect:
    """Return an effect that changes no count, and requires that each has enough repetitions left.

    Args:
        needs: how many repetitions each counter needs; _NEVER: the counter's part is not being
            repeated.
    """
    return ALWAYS._replace(low=tuple(need if need < _NEVER else 0 for need in needs))


def _begins_hopeless_part(
    operation: CounterOperation | None, needs: Sequence[Sequence[int]], state: int
) -> bool:
    """Return whether an operation begins a part whose bound is too low for it to end.

    Args:
        operation: the operation; None: a transition by a byte, which begins no part.
        needs: for each counter, the repetitions that each state needs; see `_needed_repetitions`.
        state: the state that the operation leads to.
    """
    if operation is None or operation.kind != "begin":
        return False
    return needs[operation.counter][state] > operation.number


def _needed_repetitions(
    rows: Sequence[StateTransitions], operations: Mapping[int, CounterOperation], counter: int
) -> list[int]:
    """Return for each state the smallest number of repetitions of a counted part that must follow.

    The number is _NEVER for states outside the part.

    Args:
        rows: the transitions of all states.
        operations: the operation of each class that is not one of bytes.
        counter: the part's counter.
    """
    # For each state, (state before it, whether the transition between them counts a repetition).
    predecessors: list[list[tuple[int, bool]]] = [[] for _ in rows]
    needs = [_NEVER] * len(rows)
    frontier = set()  # states that need `number` repetitions, or fewer
    for state, row in enumerate(rows):
        for symbol, next_state in row.items():
            operation = operations.get(symbol)
            if operation is None or operation.counter != counter:
                predecessors[next_state].append((state, False))
            elif operation.kind == "count":
                predecessors[next_state].append((state, True))
            elif operation.kind == "end":
                frontier.add(state)
            # "begin" leads into the part from outside, and states outside need no repetitions.
    number = 0
    # The search is breadth first: all states that need `number` repetitions are found before the
    # states that need more.
    while frontier and number < _NEVER:
        next_frontier = set()
        queue = [state for state in frontier if needs[state] > number]
        for state in queue:
            if needs[state] <= number:
                continue
            needs[state] = number
            for predecessor, counts_one in predecessors[state]:
                if counts_one:
                    next_frontier.add(predecessor)
                elif needs[predecessor] > number:
                    queue.append(predecessor)
        frontier = next_frontier
        number += 1
    return needs


def without_dead_targets(
    rows: Sequence[StateTransitions], live: Sequence[bool]
) -> list[dict[int, int]]:
    """Return the rows without the transitions to states that are not live; see `live_states`."""
    return [{symbol: state for symbol, state in row.items() if live[state]} for row in rows]


def live_states(rows: Sequence[StateTransitions], accepting: Sequence[bool]) -> list[bool]:
    """Return for each state whether an accepting state can be reached from it."""
    predecessors: list[list[int]] = [[] for _ in rows]
    for state, row in enumerate(rows):
        for next_state in row.values():
            predecessors[next_state].append(state)
    live = [bool(accepts) for accepts in accepting]
    queue = [state for state, accepts in enumerate(live) if accepts]
    for state in queue:  # The queue grows in the loop body.
        for predecessor in predecessors[state]:
            if not live[predecessor]:
                live[predecessor] = True
                queue.append(predecessor)
    return live
