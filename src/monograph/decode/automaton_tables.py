"""Automata on the device, which are added and removed while a decoder runs.

The decode step follows automata by gathers in tensors of fixed size, without the host. The tensors
keep their sizes and addresses, so a captured step still works when automata are added or removed.

An automaton puts tokens that it treats alike into one class. A cell belongs to a pair of a state and a
class. It has the next state and an effect. For each counter of the automaton, an effect says between
which counts the token is allowed, and how it changes the count (`monograph.automata.counting.Effect`).

Shapes: V tokens, B rows, C classes of tokens, A automata, R counters; S states, N cells and E
effects of all automata.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monograph.automata import Automaton
from monograph.automata.counting import ALWAYS, COUNTERS, MAX_COUNT, SHIFTS, STATE_BITS, Effect
from monograph.automata.dfa import STATE_MASK
from monograph.automata.tokens import MAX_EFFECTS
from monograph.errors import InputRefused

# The state of a row without an automaton: every token is allowed, and the text is never over.
NO_AUTOMATON = 0
# The state in which no token is allowed.
DEAD = 1
# The index of the effect that never allows a token. The effect with index 0 is `ALWAYS`.
NEVER = 1
# The number of first states, cells and effects that do not belong to an automaton.
_RESERVED = 2


class _Place(NamedTuple):
    """The place of an automaton in the tables.

    Attributes:
        automaton: the automaton.
        first_cell: the index of its first cell.
        first_state: the index of its first state.
        first_effect: the index of its first effect other than `ALWAYS`.
        number: its number, from 1.
    """

    automaton: Automaton
    first_cell: int
    first_state: int
    first_effect: int
    number: int


class AutomatonTables:
    """Automata over one vocabulary as a few tensors of 6 N + 10 S + 16 E R + 2 A V bytes.

    An automaton has a place while a request uses it, and keeps it afterwards until another automaton
    needs the place. Each row of a batch has one int64, its state: NO_AUTOMATON, or the index of a state
    in the lowest bits (STATE_MASK) and the counts of the counters above them.

    Attributes:
        cells: the maximum number of cells.
        states: the maximum number of states.
        automata: the maximum number of automata.
        effects: the maximum number of effects, without `ALWAYS` and NEVER.
        next_N: int32 [N], the next state for each state and class of tokens; DEAD if the token is
            forbidden.
        effect_N: int16 [N], the index of the effect; NEVER if the token is forbidden.
        classes_C: int32 [C], 0 to C - 1, where C is the maximum number of classes of an automaton.
        effects_4RE: int32 [4, R, E], the numbers low, high, keep and add of each effect.
        shifts_R: int64 [R], the position of each counter's bits in a row's state.
        first_cell_S: int32 [S], the index in `next_N` of each state's cell of class 0. The cells of
            its other classes follow.
        automaton_S: int32 [S], the number of each state's automaton, from 1; 0 for NO_AUTOMATON and DEAD.
        stops_S: bool [S], whether the text is over in the state (`is_over`).
        allows_all_S: bool [S], whether every token is allowed in the state, whatever the counts are.
        class_AV: int16 [A, V], each automaton's class of each token.
    """

    def __init__(
        self,
        vocabulary: int,
        device: torch.device,
        cells: int = 1 << 22,
        states: int = 1 << STATE_BITS,
        automata: int = 64,
        effects: int = MAX_EFFECTS,
        classes: int = 1 << 13,
    ) -> None:
        """Allocate empty tables.

        Args:
            vocabulary: V.
            device: where the tables are.
            cells: the maximum number of cells of all automata.
            states: the maximum number of states of all automata.
            automata: the maximum number of automata.
            effects: the maximum number of effects of all automata.
            classes: C, the maximum number of classes of an automaton. A step reads C cells for each row,
                which is less than one for each token.
        """
        self.cells = cells
        self.states = states
        self.automata = automata
        self.effects = effects
        self.next_N, self.first_cell_S, self.automaton_S = (
            torch.zeros(size, dtype=torch.int32, device=device) for size in (cells, states, states)
        )
        self.effect_N = torch.zeros(cells, dtype=torch.int16, device=device)
        self.effects_4RE = torch.zeros(
            4, COUNTERS, _RESERVED + effects, dtype=torch.int32, device=device
        )
        self.stops_S = torch.zeros(states, dtype=torch.bool, device=device)
        self.allows_all_S = torch.zeros(states, dtype=torch.bool, device=device)
        self.allows_all_S[NO_AUTOMATON] = True
        self.class_AV = torch.zeros(1 + automata, vocabulary, dtype=torch.int16, device=device)
        # NO_AUTOMATON and DEAD have one cell each, whose index is that of the state, and lead to
        # themselves. The entries of NO_AUTOMATON are zeros.
        self.next_N[DEAD] = DEAD
        self.first_cell_S[DEAD] = DEAD
        self.effect_N[DEAD] = NEVER
        never = ALWAYS._replace(low=(1,) * COUNTERS, high=(0,) * COUNTERS)
        self._write_effects(0, [ALWAYS, never])
        # An automaton has at most a class for each token and two more (`constraint_automaton`). The numbers
        # are on the device, so that a captured step copies nothing.
        self.classes_C = torch.arange(
            min(classes, vocabulary + 2), dtype=torch.int32, device=device
        )
        self.shifts_R = torch.tensor(SHIFTS, dtype=torch.int64, device=device)
        self._vocabulary = vocabulary
        # The places by the automaton's id(), in the order in which they were last acquired, and how many
        # requests use each.
        self._places: dict[int, _Place] = {}
        self._uses: Counter[int] = Counter()

    @classmethod
    def with_room_for(
        cls, automata: Collection[Automaton], vocabulary: int, device: torch.device
    ) -> Self:
        """Allocate tables with room for these automata together.

        Raises:
            InputRefused: see `require`.
        """
        cells, states, effects = _sizes(automata)
        classes = max([1, *(automaton.next_SC.shape[1] for automaton in automata)])
        tables = cls(
            vocabulary,
            device,
            cells=_RESERVED + cells,
            states=_RESERVED + states,
            automata=len(automata),
            effects=effects,
            classes=classes,
        )
        tables.require(*automata)
        return tables

    def require(self, *automata: Automaton | None) -> None:
        """Refuse the automata of one text if the tables are too small for them together.

        Raises:
            InputRefused: the tables are too small, or an automaton was made for another vocabulary.
        """
        given = [automaton for automaton in automata if automaton is not None]
        for automaton in given:
            vocabulary = len(automaton.class_V)
            if vocabulary != self._vocabulary:
                raise InputRefused(
                    f"{automaton.where} was made for {vocabulary:,} tokens, not {self._vocabulary:,}"
                )
            classes = automaton.next_SC.shape[1]
            if classes > len(self.classes_C):
                raise InputRefused(
                    f"{automaton.where}: it tells {classes:,} kinds of tokens apart, more than there is room for "
                    f"({len(self.classes_C):,}): make it simpler or shorter"
                )
        cells, states, effects = _sizes(given)
        fits = (
            _RESERVED + cells <= self.cells
            and _RESERVED + states <= self.states
            and effects <= self.effects
        )
        if not fits or len(given) > self.automata:
            raise InputRefused(
                f"{' and '.join(each.where for each in given)}: {states:,} states and {cells:,} cells are more than "
                f"there is room for ({self.states:,} and {self.cells:,}), or {effects:,} effects than "
                f"{self.effects:,}: make it simpler or shorter"
            )

    def acquire(self, automaton: Automaton | None) -> int | None:
        """Give an automaton a place, and count a use of it.

        Returns:
            the state in which texts begin, which is NO_AUTOMATON if `automaton` is None. Or None: there is
            no room now, and no use is counted.
        """
        if automaton is None:
            return NO_AUTOMATON
        key = id(automaton)
        # The place is removed and added again below, so that places stay in the order of their last
        # acquisition.
        place = self._places.pop(key, None)
        if place is None:
            place = self._add(automaton)
        if place is None:
            return None
        self._places[key] = place
        self._uses[key] += 1
        return place.first_state

    def release(self, automaton: Automaton | None) -> None:
        """End a use of an automaton. When it has no more uses, it may lose its place to another one."""
        if automaton is not None:
            self._uses[id(automaton)] -= 1

    def remove_unused(self) -> None:
        """Free the places of all automata without uses."""
        for key in [key for key in self._places if not self._uses[key]]:
            del self._places[key], self._uses[key]

    def write_classes(self, automaton: Automaton, class_V: NDArray[np.int16]) -> None:
        """Replace the class of each token of an automaton that is in use."""
        self.class_AV[self._places[id(automaton)].number].copy_(torch.from_numpy(class_V))

    def state_of(self, automaton: Automaton, packed_state: int) -> int:
        """Return a row's state for a state of an automaton that is in use.

        Args:
            automaton: the automaton.
            packed_state: the index of the state in this automaton alone, with the counts above it.
        """
        return self._places[id(automaton)].first_state + packed_state

    def _add(self, automaton: Automaton) -> _Place | None:
        """Write an automaton to a free place and return the place; None if there is no room.

        It frees places without uses, the least recently acquired first, until the automaton fits.
        """
        place = self._free_place(automaton)
        while place is None:
            unused = next((key for key in self._places if not self._uses[key]), None)
            if unused is None:
                return None
            del self._places[unused], self._uses[unused]
            place = self._free_place(automaton)
        self._write(place)
        return place

    def _free_place(self, automaton: Automaton) -> _Place | None:
        """Return a place for an automaton that overlaps no present one; None if there is no room."""
        places = self._places.values()
        # For each table, the lists have the first index and the size of each present automaton's entries.
        numbers = {place.number for place in places}
        number = next((n for n in range(1, 1 + self.automata) if n not in numbers), None)
        cell = _find_gap(
            [(place.first_cell, place.automaton.next_SC.size) for place in places],
            automaton.next_SC.size,
            self.cells,
        )
        state = _find_gap(
            [(place.first_state, len(place.automaton.next_SC)) for place in places],
            len(automaton.next_SC),
            self.states,
        )
        effect = _find_gap(
            [(place.first_effect, len(place.automaton.effects) - 1) for place in places],
            len(automaton.effects) - 1,
            _RESERVED + self.effects,
        )
        if number is None or cell is None or state is None or effect is None:
            return None
        return _Place(automaton, cell, state, effect, number)

    def _write(self, place: _Place) -> None:
        """Write an automaton's tables to its place."""
        automaton = place.automaton
        next_SC = automaton.next_SC.astype(np.int32)
        device = self.next_N.device
        cells = slice(place.first_cell, place.first_cell + next_SC.size)
        states = slice(place.first_state, place.first_state + len(next_SC))
        # The automaton has -1 as the state after a forbidden token. Here it becomes DEAD, so that the device
        # needs no special case.
        next_N = np.where(next_SC < 0, DEAD, next_SC + place.first_state).reshape(-1)
        self.next_N[cells] = torch.from_numpy(next_N.astype(np.int32)).to(device)
        # An automaton's effect 0 is `ALWAYS`, which is common to all automata.
        effect_SC = np.where(
            automaton.effect_SC > 0, automaton.effect_SC + (place.first_effect - 1), 0
        )
        effect_N = np.where(next_SC < 0, NEVER, effect_SC).reshape(-1).astype(np.int16)
        self.effect_N[cells] = torch.from_numpy(effect_N).to(device)
        self._write_effects(place.first_effect, automaton.effects[1:])
        first_cell_S = np.arange(len(next_SC), dtype=np.int32) * next_SC.shape[1] + place.first_cell
        self.first_cell_S[states] = torch.from_numpy(first_cell_S.astype(np.int32)).to(device)
        self.automaton_S[states] = place.number
        self.stops_S[states] = torch.from_numpy(automaton.stops_S).to(device)
        self.allows_all_S[states] = torch.from_numpy(automaton.allows_all_S).to(device)
        self.class_AV[place.number] = torch.from_numpy(automaton.class_V).to(device)

    def _write_effects(self, first: int, effects: Sequence[Effect]) -> None:
        """Write effects to the indices from `first` on."""
        if effects:
            # From [E, 4, R].
            effects_4RE = torch.tensor(effects, dtype=torch.int32).permute(1, 2, 0)
            end = first + len(effects)
            self.effects_4RE[:, :, first:end] = effects_4RE.to(self.effects_4RE.device)


def _sizes(automata: Collection[Automaton]) -> tuple[int, int, int]:
    """Return how many cells, states and effects other than `ALWAYS` automata have together."""
    cells = sum(each.next_SC.size for each in automata)
    states = sum(len(each.next_SC) for each in automata)
    effects = sum(len(each.effects) - 1 for each in automata)
    return cells, states, effects


def _find_gap(occupied: list[tuple[int, int]], size: int, capacity: int) -> int | None:
    """Return the first index of the first gap with room for `size` entries; None if there is none.

    Args:
        occupied: (first index, size) of the occupied entries, without the reserved ones.
        size: the number of entries.
        capacity: the number of entries of the table.
    """
    begin = _RESERVED
    for occupied_begin, occupied_size in sorted(occupied):
        if begin + size <= occupied_begin:
            return begin
        begin = occupied_begin + occupied_size
    return begin if begin + size <= capacity else None


def allowed_tokens(
    tables: AutomatonTables, state_B: Tensor, running_B: Tensor | None = None
) -> Tensor:
    """Return the tokens that may come next: those that do not lead to DEAD.

    Args:
        tables: the automata.
        state_B: int64 [B].
        running_B: bool [B], the rows whose result matters; None: all.

    Returns:
        bool [B, V]; all true in state NO_AUTOMATON, all false in state DEAD.
    """
    inputs = (
        state_B,
        tables.allows_all_S,
        tables.first_cell_S,
        tables.automaton_S,
        tables.effects_4RE,
        tables.effect_N,
        tables.class_AV,
        tables.classes_C,
        tables.shifts_R,
    )
    if state_B.device.type != "cpu":
        return _computed_allowed_tokens(*inputs)
    if running_B is None:
        running_B = torch.ones_like(state_B, dtype=torch.bool)
    allowed_BV: Tensor = _allowed_tokens_on_cpu(running_B, *inputs)
    return allowed_BV


def _computed_allowed_tokens(
    state_B: Tensor,
    allows_all_S: Tensor,
    first_cell_S: Tensor,
    automaton_S: Tensor,
    effects_4RE: Tensor,
    effect_N: Tensor,
    class_AV: Tensor,
    classes_C: Tensor,
    shifts_R: Tensor,
) -> Tensor:
    """Return what `allowed_tokens` returns, by gathers for all rows; the tensors are those of the tables."""
    index_B = state_B & STATE_MASK
    # Whether the counts of a row allow an effect is computed once for each effect, and then gathered for
    # each class, which takes less time than to compute it for each token.
    counts_BR1 = _counts(shifts_R, state_B).int()[:, :, None]
    low_RE, high_RE = effects_4RE[0], effects_4RE[1]
    is_allowed_BE = ((counts_BR1 >= low_RE) & (counts_BR1 <= high_RE)).all(1)
    # An automaton with fewer than C classes is followed by cells of other states. They are read, too,
    # but no token has such a class.
    first_cell_B1 = first_cell_S[index_B][:, None]
    cell_BC = (first_cell_B1 + classes_C).clamp(max=len(effect_N) - 1)
    is_allowed_BC = is_allowed_BE.gather(1, effect_N[cell_BC].long())
    class_BV = class_AV[automaton_S[index_B]]
    return is_allowed_BC.gather(1, class_BV.long())


@torch.library.custom_op("monograph::allowed_tokens", mutates_args=())
def _allowed_tokens_on_cpu(
    running_B: Tensor,
    state_B: Tensor,
    allows_all_S: Tensor,
    first_cell_S: Tensor,
    automaton_S: Tensor,
    effects_4RE: Tensor,
    effect_N: Tensor,
    class_AV: Tensor,
    classes_C: Tensor,
    shifts_R: Tensor,
) -> Tensor:
    """Return what `_computed_allowed_tokens` returns; in rows that are not running it may be anything.

    It computes nothing while every token is allowed in all running rows, which is so while texts that may
    call a tool have not begun a call. This needs a branch on the data, which a graph cannot have. So it is
    a custom operator, which a compiled step calls as it is.
    """
    if bool((allows_all_S[state_B & STATE_MASK] | ~running_B).all()):
        return torch.ones(len(state_B), class_AV.shape[1], dtype=torch.bool)
    return _computed_allowed_tokens(
        state_B,
        allows_all_S,
        first_cell_S,
        automaton_S,
        effects_4RE,
        effect_N,
        class_AV,
        classes_C,
        shifts_R,
    )


@_allowed_tokens_on_cpu.register_fake
def _(running_B: Tensor, state_B: Tensor, *tables: Tensor) -> Tensor:
    class_AV = tables[5]
    return running_B.new_empty(len(state_B), class_AV.shape[1])


def next_states(tables: AutomatonTables, state_B: Tensor, token_B: Tensor) -> Tensor:
    """Return the states after one token of each row.

    A forbidden token leads to DEAD, and NO_AUTOMATON leads to NO_AUTOMATON.

    Args:
        tables: the automata.
        state_B: int64 [B].
        token_B: int64 or int32 [B], ids below V.

    Returns:
        int64 [B].
    """
    index_B = state_B & STATE_MASK
    class_B = tables.class_AV[tables.automaton_S[index_B], token_B]
    cell_B = tables.first_cell_S[index_B] + class_B.int()
    effect_B = tables.effect_N[cell_B]
    effects_4RB = tables.effects_4RE[:, :, effect_B.int()].long()
    low_BR, high_BR, keep_BR, add_BR = effects_4RB.transpose(1, 2).unbind(0)
    counts_BR = _counts(tables.shifts_R, state_B)
    is_allowed_B = ((counts_BR >= low_BR) & (counts_BR <= high_BR)).all(-1)
    # keep is 1, or 0 if the new count does not depend on the old one.
    next_counts_BR = keep_BR * counts_BR + add_BR
    next_B = tables.next_N[cell_B] + (next_counts_BR << tables.shifts_R).sum(-1)
    return torch.where(is_allowed_B, next_B, DEAD)


def is_over(tables: AutomatonTables, state_B: Tensor) -> Tensor:
    """Return whether each row's text is over.

    A text is over if a stop string has occurred, or if only an end token may come.

    Args:
        tables: the automata.
        state_B: int64 [B].

    Returns:
        bool [B]; never true in states NO_AUTOMATON and DEAD.
    """
    return tables.stops_S[state_B & STATE_MASK]


def _counts(shifts_R: Tensor, state_B: Tensor) -> Tensor:
    """Return the count of each counter in the states of rows, int64 [B, R]."""
    return (state_B[:, None] >> shifts_R) & MAX_COUNT
