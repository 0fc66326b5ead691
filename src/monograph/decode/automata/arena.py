"""Room on the device for automata that come and go while a decoder runs.

The tensors keep their sizes and places, so a captured step goes on to read them.
"""

from collections import Counter
from typing import NamedTuple

import torch

from monograph.decode.automata.lift import DEAD, FREE, Automaton, Tables
from monograph.errors import InputRefused


class _Place(NamedTuple):
    """An automaton, where its cells and states begin, and its number."""

    automaton: Automaton
    cell: int
    state: int
    number: int


class Arena(Tables):
    """`Tables` of fixed sizes, in which each automaton has a place while a request uses it, and longer if nobody asks.

    Attributes:
        cells: most cells of all automata.
        states: most states of all.
        automata: most automata.
    """

    def __init__(
        self, vocabulary: int, device: torch.device, cells: int = 1 << 22, states: int = 1 << 16, automata: int = 64
    ) -> None:
        """Allocate tables of so many cells, states and automata, all free: 4 N + 9 S + 2 A V bytes."""
        super().__init__((), vocabulary, device, (cells, states, automata))
        self.cells, self.states, self.automata = cells, states, automata
        self._places: dict[int, _Place] = {}  # by identity, the longest unused first
        self._uses: Counter[int] = Counter()

    def require(self, *automata: Automaton | None) -> None:
        """Refuse the automata of one text if they never have room together; raises InputRefused."""
        given = [automaton for automaton in automata if automaton is not None]
        for automaton in given:
            self._require_vocabulary(automaton)
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


def _gap(taken: list[tuple[int, int]], size: int, most: int) -> int | None:
    """Return where so many entries find room between those that are taken (begin, size), or None."""
    begin = max(FREE, DEAD) + 1
    for at, length in sorted(taken):
        if begin + size <= at:
            return begin
        begin = at + length
    return begin if begin + size <= most else None
