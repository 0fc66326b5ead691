"""Automata on the device, which come and go while a decoder runs.

The decode step follows them by gathers in tensors of fixed size, without the host. The tensors keep their sizes and
places, so a captured step goes on to read them.

Shapes: B rows, V tokens, S states and N cells of all automata, A automata.
"""

from collections import Counter
from collections.abc import Collection
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from monograph.decode.automata.lift import Automaton
from monograph.errors import InputRefused

FREE, DEAD = 0, 1  # states of an arena: in FREE every token is allowed and no text is over, in DEAD none is allowed


class _Place(NamedTuple):
    """An automaton, where its cells and states begin, and its number."""

    automaton: Automaton
    cell: int
    state: int
    number: int


class Arena:
    """Automata over one vocabulary as a few tensors of 4 N + 9 S + 2 A V bytes.

    Each automaton has a place while a request uses it, and longer if nobody asks. Each row of a batch has a state,
    int32: FREE if it has no automaton, else a state of an automaton.

    Attributes:
        cells: most cells of all automata.
        states: most states of all.
        automata: most automata.
        next_N: int32 [N], the state after each class of tokens, state by state; DEAD where the token is forbidden.
        row_S: int32 [S], the index in `next_N` of each state's first cell.
        automaton_S: int32 [S], the number of each state's automaton, from 1; 0 for FREE and DEAD.
        stops_S: bool [S], whether the text is over in the state.
        class_AV: int16 [A, V], each automaton's class of each token.
    """

    def __init__(
        self, vocabulary: int, device: torch.device, cells: int = 1 << 22, states: int = 1 << 16, automata: int = 64
    ) -> None:
        """Allocate tables of so many cells, states and automata, all free."""
        self.cells, self.states, self.automata = cells, states, automata
        self.next_N, self.row_S, self.automaton_S = (
            torch.zeros(size, dtype=torch.int32, device=device) for size in (cells, states, states)
        )
        self.stops_S = torch.zeros(states, dtype=torch.bool, device=device)
        self.class_AV = torch.zeros(1 + automata, vocabulary, dtype=torch.int16, device=device)
        # FREE and DEAD have one cell each: FREE leads to FREE, DEAD to DEAD.
        self.next_N[DEAD] = self.row_S[DEAD] = DEAD
        self._vocabulary = vocabulary
        self._places: dict[int, _Place] = {}  # by identity, the longest unused first
        self._uses: Counter[int] = Counter()

    @classmethod
    def holding(cls, automata: Collection[Automaton], vocabulary: int, device: torch.device) -> Self:
        """Allocate as much as these automata take together; raises InputRefused like `require`."""
        cells, states = sum(each.next_SC.size for each in automata), sum(len(each.next_SC) for each in automata)
        arena = cls(vocabulary, device, 2 + cells, 2 + states, len(automata))
        arena.require(*automata)
        return arena

    def require(self, *automata: Automaton | None) -> None:
        """Refuse the automata of one text if they never have room together; raises InputRefused."""
        given = [automaton for automaton in automata if automaton is not None]
        for automaton in given:
            if (made_for := len(automaton.class_V)) != self._vocabulary:
                raise InputRefused(f"{automaton.where} was made for {made_for:,} tokens, not {self._vocabulary:,}")
        size, states = sum(each.next_SC.size for each in given), sum(len(each.next_SC) for each in given)
        if size + 2 > self.cells or states + 2 > self.states or len(given) > self.automata:
            raise InputRefused(
                f"{' and '.join(each.where for each in given)}: {states:,} states and {size:,} cells are more than "
                f"there is room for ({self.states:,} and {self.cells:,}): make it simpler or shorter"
            )

    def take(self, automaton: Automaton | None) -> int | None:
        """Use an automaton once more; return the state in which its texts begin, or None if there is no room now."""
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
        number = next((n for n in range(1, 1 + self.automata) if all(n != place.number for place in there)), None)
        cell = _gap([(p.cell, p.automaton.next_SC.size) for p in there], automaton.next_SC.size, self.cells)
        state = _gap([(p.state, len(p.automaton.next_SC)) for p in there], len(automaton.next_SC), self.states)
        return None if number is None or cell is None or state is None else _Place(automaton, cell, state, number)

    def _write(self, automaton: Automaton, cell: int, state: int, number: int) -> None:
        """Write an automaton's table from `cell` and `state` on."""
        table_SC, device = automaton.next_SC.astype(np.int32), self.next_N.device
        states = slice(state, state + len(table_SC))
        # A forbidden token's -1 becomes the dead state here, so that the device needs no case for it.
        following = np.where(table_SC < 0, DEAD, table_SC + state).reshape(-1)
        rows = np.arange(len(table_SC), dtype=np.int32) * table_SC.shape[1] + cell
        self.next_N[cell : cell + table_SC.size] = torch.from_numpy(following.astype(np.int32)).to(device)
        self.row_S[states] = torch.from_numpy(rows.astype(np.int32)).to(device)
        self.automaton_S[states] = number
        self.stops_S[states] = torch.from_numpy(automaton.stops_S).to(device)
        self.class_AV[number] = torch.from_numpy(automaton.class_V).to(device)


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
        state_B: int32 [B].

    Returns:
        bool [B, V]; all true in state FREE, all false in state DEAD.
    """
    class_BV = tables.class_AV[tables.automaton_S[state_B]].int()
    return tables.next_N[tables.row_S[state_B][:, None] + class_BV] != DEAD


def advance(tables: Arena, state_B: Tensor, token_B: Tensor) -> Tensor:
    """Return the states after one token of each row: DEAD after a forbidden token, FREE for rows in FREE.

    Args:
        tables: the automata.
        state_B: int32 [B].
        token_B: int64 or int32 [B], ids below V.

    Returns:
        int32 [B].
    """
    class_B = tables.class_AV[tables.automaton_S[state_B], token_B].int()
    return tables.next_N[tables.row_S[state_B] + class_B]


def stopped(tables: Arena, state_B: Tensor) -> Tensor:
    """Return whether each row's text is over: a stop string has occurred, or only an end token could still come.

    Args:
        tables: the automata.
        state_B: int32 [B].

    Returns:
        bool [B]; never true in states FREE and DEAD.
    """
    return tables.stops_S[state_B]
