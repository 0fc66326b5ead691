"""Automata on the device, where they come and go while a decoder runs.

The decode step follows automata by gathers in tensors of fixed size, without the host. The tensors
keep their sizes and places, so a captured step goes on to read them.

Shapes: V tokens; B rows; S states, N cells and E effects of all automata, A automata, R counters.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from monograph.automata import Automaton
from monograph.automata.counting import ALWAYS, COUNTERS, MAX_COUNT, SHIFTS, STATE_BITS, Effect
from monograph.automata.dfa import STATE_MASK
from monograph.automata.tokens import MAX_EFFECTS
from monograph.errors import InputRefused

# States of an arena: in FREE every token is allowed and no text is over, in DEAD none is allowed.
FREE, DEAD = 0, 1
NEVER = 1  # the effect that no counters allow; effect 0 is `ALWAYS`


class _Place(NamedTuple):
    """An automaton, where its cells, states and effects begin, and its number."""

    automaton: Automaton
    cell: int
    state: int
    effect: int
    number: int


class Arena:
    """Automata over one vocabulary as a few tensors of 6 N + 9 S + 16 E R + 2 A V bytes.

    Each automaton has a place while a request uses it, and longer if nobody asks. Each row of a
    batch has a state,
    int64: FREE if it has no automaton, else a state of an automaton, with its counters.

    Attributes:
        cells: most cells of all automata.
        states: most states of all.
        automata: most automata.
        effects: most effects of all but `ALWAYS`.
        next_N: int32 [N], the state after each class of tokens, state by state; DEAD where the
            token is forbidden.
        effect_N: int16 [N], the effect on the counters; NEVER where the token is forbidden.
        classes_C: int32 [C], the numbers from 0 of as many classes as an automaton may have.
        effects_4ER: int32 [4, E, R], least, most, keep and add of each effect.
        row_S: int32 [S], the index in `next_N` of each state's first cell.
        automaton_S: int32 [S], the number of each state's automaton, from 1; 0 for FREE and DEAD.
        stops_S: bool [S], whether the text is over in the state.
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
        """Allocate tables of so many cells, states, automata and effects, all free.

        An automaton has at most so many classes; a step looks at as many, and at none per token of
        a large vocabulary.
        """
        self.cells = cells
        self.states = states
        self.automata = automata
        self.effects = effects
        self.next_N, self.row_S, self.automaton_S = (
            torch.zeros(size, dtype=torch.int32, device=device) for size in (cells, states, states)
        )
        self.effect_N = torch.zeros(cells, dtype=torch.int16, device=device)
        self.effects_4ER = torch.zeros(4, 2 + effects, COUNTERS, dtype=torch.int32, device=device)
        self.stops_S = torch.zeros(states, dtype=torch.bool, device=device)
        self.class_AV = torch.zeros(1 + automata, vocabulary, dtype=torch.int16, device=device)
        # FREE and DEAD have one cell each: FREE leads to FREE, DEAD to DEAD.
        self.next_N[DEAD] = self.row_S[DEAD] = DEAD
        self.effect_N[DEAD] = NEVER
        self._write_effects(0, [ALWAYS, ALWAYS._replace(low=(1,) * COUNTERS, high=(0,) * COUNTERS)])
        # On the device, so that a captured step copies nothing.
        self.classes_C = torch.arange(
            min(classes, vocabulary + 2), dtype=torch.int32, device=device
        )
        self.shifts_R = torch.tensor(SHIFTS, dtype=torch.int64, device=device)
        self._vocabulary = vocabulary
        self._places: dict[int, _Place] = {}  # by identity, the longest unused first
        self._uses: Counter[int] = Counter()

    @classmethod
    def holding(
        cls, automata: Collection[Automaton], vocabulary: int, device: torch.device
    ) -> Self:
        """Allocate as much as these automata take together; raises InputRefused like `require`."""
        cells, states, effects = _sizes(automata)
        classes = max([1, *(automaton.next_SC.shape[1] for automaton in automata)])
        arena = cls(vocabulary, device, 2 + cells, 2 + states, len(automata), effects, classes)
        arena.require(*automata)
        return arena

    def require(self, *automata: Automaton | None) -> None:
        """Refuse the automata of one text if they never have room together; raises InputRefused."""
        given = [automaton for automaton in automata if automaton is not None]
        for automaton in given:
            if (made_for := len(automaton.class_V)) != self._vocabulary:
                raise InputRefused(
                    f"{automaton.where} was made for {made_for:,} tokens, not {self._vocabulary:,}"
                )
            if (classes := automaton.next_SC.shape[1]) > len(self.classes_C):
                raise InputRefused(
                    f"{automaton.where}: it tells {classes:,} kinds of tokens apart, more than there is room for "
                    f"({len(self.classes_C):,}): make it simpler or shorter"
                )
        size, states, effects = _sizes(given)
        enough = size + 2 <= self.cells and states + 2 <= self.states and effects <= self.effects
        if not enough or len(given) > self.automata:
            raise InputRefused(
                f"{' and '.join(each.where for each in given)}: {states:,} states and {size:,} cells are more than "
                f"there is room for ({self.states:,} and {self.cells:,}), or {effects:,} effects than "
                f"{self.effects:,}: make it simpler or shorter"
            )

    def take(self, automaton: Automaton | None) -> int | None:
        """Use an automaton once more; return the state in which its texts begin, or None if there
        is no room now.
        """
        if automaton is None:
            return FREE
        key = id(automaton)
        if (place := self._places.pop(key, None) or self._placed(automaton)) is None:
            return None
        self._places[key] = place
        self._uses[key] += 1
        return place.state

    def give_back(self, automaton: Automaton | None) -> None:
        """Use it once less; if nobody uses it, another may have its place."""
        if automaton is not None:
            self._uses[id(automaton)] -= 1

    def clear(self) -> None:
        """Forget what nobody uses, so that it is not in the way where it lies."""
        for key in [key for key in self._places if not self._uses[key]]:
            del self._places[key], self._uses[key]

    def _placed(self, automaton: Automaton) -> _Place | None:
        while (place := self._free_place(automaton)) is None:
            if (unused := next((key for key in self._places if not self._uses[key]), None)) is None:
                return None
            del self._places[unused], self._uses[unused]
        self._write(*place)
        return place

    def _free_place(self, automaton: Automaton) -> _Place | None:
        there = self._places.values()
        number = next(
            (n for n in range(1, 1 + self.automata) if all(n != place.number for place in there)),
            None,
        )
        cell = _gap(
            [(p.cell, p.automaton.next_SC.size) for p in there], automaton.next_SC.size, self.cells
        )
        state = _gap(
            [(p.state, len(p.automaton.next_SC)) for p in there],
            len(automaton.next_SC),
            self.states,
        )
        effect = _gap(
            [(p.effect, len(p.automaton.effects) - 1) for p in there],
            len(automaton.effects) - 1,
            self.effects + 2,
        )
        if number is None or cell is None or state is None or effect is None:
            return None
        return _Place(automaton, cell, state, effect, number)

    def _write(self, automaton: Automaton, cell: int, state: int, effect: int, number: int) -> None:
        """Write an automaton's table from `cell`, `state` and `effect` on."""
        table_SC = automaton.next_SC.astype(np.int32)
        device = self.next_N.device
        states = slice(state, state + len(table_SC))
        # A forbidden token's -1 becomes the dead state here, so that the device needs no case for
        # it.
        following = np.where(table_SC < 0, DEAD, table_SC + state).reshape(-1)
        rows = np.arange(len(table_SC), dtype=np.int32) * table_SC.shape[1] + cell
        self.next_N[cell : cell + table_SC.size] = torch.from_numpy(following.astype(np.int32)).to(
            device
        )
        # The first effect is `ALWAYS`, which all automata share.
        effects = np.where(automaton.effect_SC > 0, automaton.effect_SC + (effect - 1), 0)
        effects = np.where(table_SC < 0, NEVER, effects).reshape(-1).astype(np.int16)
        self.effect_N[cell : cell + table_SC.size] = torch.from_numpy(effects).to(device)
        self._write_effects(effect, automaton.effects[1:])
        self.row_S[states] = torch.from_numpy(rows.astype(np.int32)).to(device)
        self.automaton_S[states] = number
        self.stops_S[states] = torch.from_numpy(automaton.stops_S).to(device)
        self.class_AV[number] = torch.from_numpy(automaton.class_V).to(device)

    def _write_effects(self, first: int, effects: Sequence[Effect]) -> None:
        """Write effects from the number `first` on."""
        if effects:
            written = torch.tensor(effects, dtype=torch.int32).transpose(0, 1)
            self.effects_4ER[:, first : first + len(effects)] = written.to(self.effects_4ER.device)


def _sizes(automata: Collection[Automaton]) -> tuple[int, int, int]:
    """Return the cells, states and effects of automata."""
    cells = sum(each.next_SC.size for each in automata)
    return (
        cells,
        sum(len(each.next_SC) for each in automata),
        sum(len(each.effects) - 1 for each in automata),
    )


def _gap(taken: list[tuple[int, int]], size: int, most: int) -> int | None:
    """Return where so many entries find room between those that are taken (begin, size), or None."""
    begin = max(FREE, DEAD) + 1
    for at, length in sorted(taken):
        if begin + size <= at:
            return begin
        begin = at + length
    return begin if begin + size <= most else None


def allowed(tables: Arena, state_B: Tensor) -> Tensor:
    """Return which tokens may come next, those that do not lead to DEAD.

    Args:
        tables: the automata.
        state_B: int64 [B].

    Returns:
        bool [B, V]; all true in state FREE, all false in state DEAD.
    """
    at_B = state_B & STATE_MASK
    # Whether the counters allow an effect is found out for each effect, then for each class, and
    # not for each token.
    counts_BR = _counts(tables, state_B)
    least_ER, most_ER = tables.effects_4ER[0], tables.effects_4ER[1]
    may_BE = ((counts_BR[:, None] >= least_ER) & (counts_BR[:, None] <= most_ER)).all(-1)
    # Behind an automaton's last class come cells of others, which no token has.
    cell_BC = (tables.row_S[at_B][:, None] + tables.classes_C).clamp(max=tables.cells - 1)
    may_BC = may_BE.gather(1, tables.effect_N[cell_BC].long())
    return may_BC.gather(1, tables.class_AV[tables.automaton_S[at_B]].long())


def advance(tables: Arena, state_B: Tensor, token_B: Tensor) -> Tensor:
    """Return the states after one token of each row: DEAD after a forbidden token, FREE for rows in
    FREE.

    Args:
        tables: the automata.
        state_B: int64 [B].
        token_B: int64 or int32 [B], ids below V.

    Returns:
        int64 [B].
    """
    at_B = state_B & STATE_MASK
    cell_B = tables.row_S[at_B] + tables.class_AV[tables.automaton_S[at_B], token_B].int()
    least_BR, most_BR, keep_BR, add_BR = (
        tables.effects_4ER[:, tables.effect_N[cell_B].int()].long().unbind(0)
    )
    counts_BR = _counts(tables, state_B)
    may_B = ((counts_BR >= least_BR) & (counts_BR <= most_BR)).all(-1)
    after_B = tables.next_N[cell_B] + ((keep_BR * counts_BR + add_BR) << tables.shifts_R).sum(-1)
    return torch.where(may_B, after_B, DEAD)


def stopped(tables: Arena, state_B: Tensor) -> Tensor:
    """Return whether each row's text is over: a stop string has occurred, or only an end token
    could still come.

    Args:
        tables: the automata.
        state_B: int64 [B].

    Returns:
        bool [B]; never true in states FREE and DEAD.
    """
    return tables.stops_S[state_B & STATE_MASK]


def _counts(tables: Arena, state_B: Tensor) -> Tensor:
    """Return the counters of each row, int64 [B, R]."""
    return (state_B[:, None] >> tables.shifts_R) & MAX_COUNT
