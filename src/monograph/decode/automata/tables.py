"""Automata where the decode step can follow them: gathers in tensors of fixed size, without a word from the host.

Shapes: B rows, V tokens, S states of all automata together, N cells of their tables, A automata.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monograph.decode.automata.lift import Automaton
from monograph.errors import InputRefused

FREE, DEAD = 0, 1  # states: nothing is forbidden and nothing stops; everything is forbidden


class Tables:
    """Several automata over one vocabulary as a few tensors; 4 N + 9 S + 2 A V bytes.

    A row of a batch has a state, int32: FREE while nothing constrains it, else one of an automaton's.

    Attributes:
        next_N: int32 [N], the state after each class of tokens, state by state; DEAD where the token is forbidden.
        row_S: int32 [S], the first of each state's cells.
        slot_S: int32 [S], each state's automaton.
        stops_S: bool [S], whether the text is over there.
        class_AV: int16 [A, V], each automaton's class of each token.
    """

    def __init__(self, automata: Collection[Automaton], vocabulary: int, device: torch.device) -> None:
        """Hold these.

        Raises:
            InputRefused: one was made for another vocabulary.
        """
        # One cell each: FREE leads to FREE, DEAD to DEAD.
        nothing: NDArray[Any] = np.zeros(2, dtype=np.int32)
        following, rows = [np.array([FREE, DEAD])], [np.array([0, 1])]
        slots, stops, classes = [nothing], [nothing], [np.zeros(vocabulary, dtype=np.int16)]
        states = cells = 2
        self._starts: dict[int, int] = {}
        for slot, automaton in enumerate(automata, 1):
            if len(automaton.class_V) != vocabulary:
                raise InputRefused(
                    f"{automaton.where} was made for {len(automaton.class_V):,} tokens, not {vocabulary:,}"
                )
            table_SC = automaton.next_SC.astype(np.int32)
            self._starts[id(automaton)] = states
            following.append(np.where(table_SC < 0, DEAD, table_SC + states).reshape(-1))
            rows.append(np.arange(len(table_SC)) * table_SC.shape[1] + cells)
            slots.append(np.full(len(table_SC), slot))
            stops.append(automaton.stops_S)
            classes.append(automaton.class_V)
            states, cells = states + len(table_SC), cells + table_SC.size

        def together(parts: list[NDArray[Any]], dtype: torch.dtype) -> Tensor:
            return torch.from_numpy(np.concatenate(parts)).to(device, dtype)

        self.next_N, self.row_S = together(following, torch.int32), together(rows, torch.int32)
        self.slot_S, self.stops_S = together(slots, torch.int32), together(stops, torch.bool)
        self.class_AV = together(classes, torch.int16).view(-1, vocabulary)

    def start(self, automaton: Automaton) -> int | None:
        """The state in which its texts begin; None if it is not here."""
        return self._starts.get(id(automaton))


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
