"""Automata where the decode step can follow them: gathers in tensors of fixed size, without a word from the host.

Shapes: B rows, V tokens, S states of all automata together, N cells of their tables, A automata.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from monograph.decode.automata.lift import Automaton
from monograph.errors import InputRefused

FREE, DEAD = 0, 1  # states: nothing is forbidden and nothing stops; everything is forbidden


@dataclass
class _Place:
    automaton: Automaton
    users: int
    slot: int
    first_state: int
    first_cell: int


class Tables:
    """Several automata over one vocabulary in preallocated tensors.

    A row of a batch has a state, int32: FREE while nothing constrains it, else one of an automaton that was placed.
    Placing and freeing write into the tensors and never change their shapes or addresses, so a compiled or captured
    step that reads them goes on as it is.

    Attributes:
        next_N: int32 [N], the state after each class of tokens, state by state; DEAD where the token is forbidden.
        row_S: int32 [S], the first of each state's cells.
        slot_S: int32 [S], each state's automaton.
        stops_S: bool [S], whether the text is over there.
        class_AV: int16 [A, V], each automaton's class of each token.
    """

    def __init__(self, vocabulary: int, device: torch.device, *, automata: int, states: int, cells: int) -> None:
        """Allocate room for that many automata with that many states and cells in all; 4 N + 9 S + 2 A V bytes."""
        self._capacity = {"automata": automata, "states": states, "cells": cells}
        self.next_N = torch.zeros(2 + cells, dtype=torch.int32, device=device)
        self.row_S = torch.zeros(2 + states, dtype=torch.int32, device=device)
        self.slot_S = torch.zeros(2 + states, dtype=torch.int32, device=device)
        self.stops_S = torch.zeros(2 + states, dtype=torch.bool, device=device)
        self.class_AV = torch.zeros(1 + automata, vocabulary, dtype=torch.int16, device=device)
        self.next_N[1] = self.row_S[1] = DEAD  # one cell each: FREE leads to FREE, DEAD to DEAD
        self._places: dict[int, _Place] = {}

    def place(self, automaton: Automaton) -> int:
        """Write an automaton into the tables, or count one more user of it if it is there already.

        Returns:
            The state in which its texts begin.

        Raises:
            InputRefused: its vocabulary is another one, or there is no room for it.
        """
        for start, place in self._places.items():
            if place.automaton is automaton:
                place.users += 1
                return start
        states, classes = automaton.next_SC.shape
        if len(automaton.class_V) != self.class_AV.shape[1]:
            raise InputRefused(
                f"{automaton.where} was made for {len(automaton.class_V):,} tokens, not {self.class_AV.shape[1]:,}"
            )
        places = self._places.values()
        shapes = [(place, place.automaton.next_SC) for place in places]
        slot = self._room(automaton, "automata", ((place.slot - 1, 1) for place in places), 1)
        state = self._room(automaton, "states", ((place.first_state, len(table)) for place, table in shapes), states)
        cell = self._room(
            automaton, "cells", ((place.first_cell, table.size) for place, table in shapes), states * classes
        )
        self._places[state + 2] = _Place(automaton, 1, slot + 1, state, cell)
        following = np.where(automaton.next_SC < 0, DEAD, automaton.next_SC.astype(np.int32) + state + 2)
        rows = np.arange(states, dtype=np.int32) * classes + cell + 2
        self.next_N[cell + 2 : cell + 2 + states * classes].copy_(torch.from_numpy(following.reshape(-1)))
        self.row_S[state + 2 : state + 2 + states].copy_(torch.from_numpy(rows))
        self.slot_S[state + 2 : state + 2 + states] = slot + 1
        self.stops_S[state + 2 : state + 2 + states].copy_(torch.from_numpy(automaton.stops_S))
        self.class_AV[slot + 1].copy_(torch.from_numpy(automaton.class_V))
        return state + 2

    def free(self, start: int) -> None:
        """Count one user less of the automaton that begins in `start`; without users its room is free.

        No row may still be in one of its states then.
        """
        place = self._places[start]
        place.users -= 1
        if not place.users:
            del self._places[start]

    def _room(self, automaton: Automaton, what: str, taken: Iterable[tuple[int, int]], size: int) -> int:
        """The lowest place where `size` units fit beside the taken (first, size)."""
        first, free = 0, 0
        capacity = self._capacity[what]
        for begin, length in sorted([*taken, (capacity, 0)]):
            if begin - first >= size:
                return first
            free, first = max(free, begin - first), begin + length
        raise InputRefused(
            f"{automaton.where} needs room for {size:,} {what}, and the tables have {capacity:,}, "
            f"of which at most {free:,} in one piece are free"
        )


def allowed(tables: Tables, state_B: Tensor) -> Tensor:
    """Which tokens may come next: next(state, token) is not DEAD.

    Args:
        tables: where the automata are.
        state_B: int32 [B].

    Returns:
        bool [B, V]; all true in state FREE, all false in state DEAD.
    """
    class_BV = tables.class_AV[tables.slot_S[state_B]].int()
    return tables.next_N[tables.row_S[state_B][:, None] + class_BV] != DEAD


def advance(tables: Tables, state_B: Tensor, token_B: Tensor) -> Tensor:
    """The states after one token of each row: DEAD after a forbidden one, FREE for rows that are FREE.

    Args:
        tables: where the automata are.
        state_B: int32 [B].
        token_B: int64 or int32 [B], ids below V.

    Returns:
        int32 [B].
    """
    class_B = tables.class_AV[tables.slot_S[state_B], token_B].int()
    return tables.next_N[tables.row_S[state_B] + class_B]


def stopped(tables: Tables, state_B: Tensor) -> Tensor:
    """Whether each row's text is over: a stop string has occurred, or only an end token could still come.

    Args:
        tables: where the automata are.
        state_B: int32 [B].

    Returns:
        bool [B]; never true in states FREE and DEAD.
    """
    return tables.stops_S[state_B]
