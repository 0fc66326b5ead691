"""Counters of an automaton: what bounds a long string or array without a state for each of its
lengths.

A counted part of an expression stands between two operations, and an operation stands in each of
its repetitions:

    begin(M) (count part)* end(W)       begin: c = M        count: c >= 1, then c -= 1        end: c <= W, then c = 0

so c is how many repetitions are left, and at most M - W are missing. Parts that lie inside each
other have counters of their own; there are COUNTERS of them, and a part that lies deeper is written
out. While an automaton is built, operations are symbols beside the 256 bytes. Then
`without_operations` moves each of them to the byte after it: a transition of bytes has an `Effect`,
which is what the operations on its way do together.

A state and its counters are one number, so that a decoder keeps one number for a row:

    state + c[0] * 2^16 + c[1] * 2^31 + c[2] * 2^46

Shapes: S states, K classes of symbols.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

COUNTERS = 3
MAX_COUNT = (1 << 15) - 1  # docs/constraints.md promises it: the largest maxLength or maxItems
STATE_BITS, COUNT_BITS = 16, 15
SHIFTS = tuple(STATE_BITS + COUNT_BITS * counter for counter in range(COUNTERS))
_FAR = MAX_COUNT + 1  # repetitions that no counter allows

Counts: TypeAlias = tuple[int, ...]  # a number for each counter


class Operation(NamedTuple):
    """An operation on one counter; `number` is M of "begin" and W of "end", see above."""

    kind: Literal["begin", "count", "end"]
    counter: int
    number: int = 0


class Effect(NamedTuple):
    """What a byte or a token does to the counters: it is allowed where least <= c <= most, then c =
    keep * c + add.

    Attributes:
        least: the least value of each counter.
        most: the largest value.
        keep: 1 if the new value depends on the old one, else 0.
        add: what is added.
    """

    least: Counts
    most: Counts
    keep: Counts
    add: Counts


ALWAYS = Effect((0,) * COUNTERS, (MAX_COUNT,) * COUNTERS, (1,) * COUNTERS, (0,) * COUNTERS)


def effect_of(operation: Operation) -> Effect:
    """Return the effect of one operation."""
    least, most, keep, add = (list(numbers) for numbers in ALWAYS)
    if operation.kind == "count":
        least[operation.counter] = 1
        add[operation.counter] = -1
    elif operation.kind == "begin":
        keep[operation.counter] = 0
        add[operation.counter] = operation.number
    else:
        keep[operation.counter] = 0
        most[operation.counter] = min(operation.number, MAX_COUNT)
    return Effect(tuple(least), tuple(most), tuple(keep), tuple(add))


def then(first: Effect, second: Effect) -> Effect | None:
    """Return the effect of one after the other, or None if no values of the counters allow both."""
    least, most, keep, add = (list(numbers) for numbers in first)
    for counter in range(COUNTERS):
        if first.keep[counter]:
            least[counter] = max(least[counter], second.least[counter] - first.add[counter])
            most[counter] = min(most[counter], second.most[counter] - first.add[counter])
        elif not second.least[counter] <= first.add[counter] <= second.most[counter]:
            return None
        if least[counter] > most[counter]:
            return None
        keep[counter] = first.keep[counter] * second.keep[counter]
        add[counter] = second.add[counter] + second.keep[counter] * first.add[counter]
    return Effect(tuple(least), tuple(most), tuple(keep), tuple(add))


def is_sound(effect: Sequence[Sequence[int]]) -> bool:
    """Return whether counters from 0 to MAX_COUNT are still such numbers after an effect, given as
    four lists.
    """
    for least, most, keep, add in zip(*effect, strict=True):
        lowest, highest = (add, add) if keep == 0 else (least + add, most + add)
        if keep not in (0, 1) or not (
            0 <= least and most <= MAX_COUNT and 0 <= lowest and highest <= MAX_COUNT
        ):
            return False
    return True


def counts_of(state: int) -> Counts:
    """Return the counters of a state's number."""
    return tuple(state >> shift & MAX_COUNT for shift in SHIFTS)


def moved(effect: Effect, state: int, following: int) -> int:
    """Return the number of the state `following` after an effect on the counters of `state`, or -1
    if it is forbidden.

    Args:
        effect: the effect.
        state: a state with its counters.
        following: a state without counters.
    """
    for counter, count in enumerate(counts_of(state)):
        if not effect.least[counter] <= count <= effect.most[counter]:
            return -1
        following += (effect.keep[counter] * count + effect.add[counter]) << SHIFTS[counter]
    return following


class Ambiguous(Exception):
    """A byte may be read with one effect on the counters or with another, and the bytes after it
    decide.
    """


Row: TypeAlias = Mapping[int, int]  # {symbol class: next state}
Arrows: TypeAlias = dict[int, tuple[int, Effect]]  # {byte class: (next state, effect)}


def without_operations(
    rows: Sequence[Row],
    accepting: Sequence[bool],
    byte_classes: Collection[int],
    operations: Mapping[int, Operation],
) -> list[Arrows]:
    """Return the transitions of bytes of each state with their effects; states keep their numbers.

    The transitions are exactly those after which values of the counters remain with which an
    accepting state can be reached. If there are none in state 0, nothing is accepted.

    Args:
        rows: the transitions of each state.
        accepting: whether a text may end in each state.
        byte_classes: the classes of bytes.
        operations: the operation of each other class.

    Raises:
        Ambiguous: see the class.
    """
    if not operations:
        return [{by: (to, ALWAYS) for by, to in row.items()} for row in rows]
    live = live_states(rows, accepting)
    while True:
        rows = [{by: to for by, to in row.items() if live[to]} for row in rows]
        needs = [_needs(rows, operations, counter) for counter in range(COUNTERS)]
        # What needs more repetitions than its bound allows is never begun, and what leads only
        # there is not either.
        possible = [
            {by: to for by, to in row.items() if not _too_short(operations.get(by), needs, to)}
            for row in rows
        ]
        if possible == rows:
            break
        rows = possible
        live = live_states(rows, accepting)
    effects = {by: effect_of(operation) for by, operation in operations.items()}
    wanted = [_guard([need[state] for need in needs]) for state in range(len(rows))]
    bytes_only = set(byte_classes)
    return [_arrows(state, rows, bytes_only, effects, wanted) for state in range(len(rows))]


def _arrows(
    state: int,
    rows: Sequence[Row],
    byte_classes: set[int],
    effects: Mapping[int, Effect],
    wanted: Sequence[Effect],
) -> Arrows:
    """Return the transitions of one state by a byte, after any operations."""
    found: Arrows = {}
    waiting = [(state, ALWAYS)]
    for here, effect in waiting:
        if len(waiting) > len(rows) + 1:
            raise Ambiguous  # operations that repeat without a byte
        for by, to in rows[here].items():
            if by not in byte_classes:
                further = then(effect, effects[by])
                if further is not None:
                    waiting.append((to, further))
                continue
            guarded = then(effect, wanted[to])
            if guarded is None:
                continue
            if by in found:
                raise Ambiguous
            found[by] = (to, guarded)
    return found


def _guard(needs: Sequence[int]) -> Effect:
    """Return the effect that changes nothing, and is allowed where at least so many repetitions are
    left.
    """
    return ALWAYS._replace(least=tuple(need if need < _FAR else 0 for need in needs))


def _too_short(operation: Operation | None, needs: Sequence[Sequence[int]], to: int) -> bool:
    if operation is None or operation.kind != "begin":
        return False
    return needs[operation.counter][to] > operation.number


def _needs(rows: Sequence[Row], operations: Mapping[int, Operation], counter: int) -> list[int]:
    """Return the fewest repetitions that a counted part still needs in each state inside it; _FAR
    outside of it.
    """
    before: list[list[tuple[int, int]]] = [[] for _ in rows]
    needs = [_FAR] * len(rows)
    now = set()
    for state, row in enumerate(rows):
        for by, to in row.items():
            operation = operations.get(by)
            its_own = operation is not None and operation.counter == counter
            if operation is None or not its_own:
                before[to].append((state, 0))
            elif operation.kind == "count":
                before[to].append((state, 1))
            elif operation.kind == "end":
                now.add(state)
    number = 0
    while now and number < _FAR:
        # All states that need so many repetitions are known before one that needs more is looked
        # at.
        later = set()
        queue = [state for state in now if needs[state] > number]
        for state in queue:
            if needs[state] <= number:
                continue
            needs[state] = number
            for earlier, more in before[state]:
                if more:
                    later.add(earlier)
                elif needs[earlier] > number:
                    queue.append(earlier)
        now = later
        number += 1
    return needs


def live_states(rows: Sequence[Row], accepting: Sequence[bool]) -> list[bool]:
    """Return from which states an accepting one can be reached."""
    before: list[list[int]] = [[] for _ in rows]
    for state, row in enumerate(rows):
        for to in row.values():
            before[to].append(state)
    live = [bool(accepts) for accepts in accepting]
    queue = [state for state, accepts in enumerate(live) if accepts]
    for state in queue:
        for earlier in before[state]:
            if not live[earlier]:
                live[earlier] = True
                queue.append(earlier)
    return live
