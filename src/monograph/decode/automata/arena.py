"""Automata over tokens: made from those over bytes, and on the device, where they come and go while a decoder runs.

Tokens that lead from every state to the same next state form one class, so a table over states and classes, and the
class of each token, stand for the table over states and tokens. Stop strings form such an automaton too; its state
tracks the progress in each of them (Aho and Corasick 1975).

The decode step follows automata by gathers in tensors of fixed size, without the host. The tensors keep their sizes and
places, so a captured step goes on to read them.

Shapes: V tokens, S states, C classes of tokens, K classes of bytes; on the device B rows, S states and N cells of all
automata, A automata.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monograph.decode.automata.dfa import ByteAutomaton
from monograph.errors import InputRefused

MAX_BYTES = 4_096  # most bytes of all stop strings together


def _aho_corasick(strings: Sequence[bytes]) -> ByteAutomaton:
    """Return an automaton that accepts every text in which one of the strings occurs.

    A state stands for the longest prefix of a string with which the text so far ends. An accepting state is never left.

    Raises:
        InputRefused: there is no string, one is empty, or they have more than MAX_BYTES bytes in all.
    """
    if not strings or not all(strings):
        raise InputRefused("an empty stop string would end every text at once: give at least one character")
    if sum(map(len, strings)) > MAX_BYTES:
        raise InputRefused(
            f"the stop strings have {sum(map(len, strings)):,} bytes; at most {MAX_BYTES:,} are searched"
        )
    # First a tree of all strings, then links to shorter prefixes, breadth first: a link leads to a finished state.
    children: list[dict[int, int]] = [{}]
    ends: set[int] = set()
    for string in strings:
        node = 0
        for byte in string:
            if byte not in children[node]:
                children[node][byte] = len(children)
                children.append({})
            node = children[node][byte]
        ends.add(node)
    next_SK = np.zeros((len(children), 256), dtype=np.int16)
    shorter = [0] * len(children)  # for each state the next shorter prefix with which its text ends
    for node in (queue := [0]):
        # A shorter stop string may end inside of a longer one that has only begun.
        if node in ends or shorter[node] in ends:
            ends.add(node)
            next_SK[node] = node  # a string has occurred, whatever follows
            continue
        next_SK[node] = next_SK[shorter[node]]
        for byte, child in children[node].items():
            shorter[child] = int(next_SK[shorter[node], byte]) if node else 0
            next_SK[node, byte] = child
            queue.append(child)
    return ByteAutomaton(next_SK, np.arange(256, dtype=np.uint8), np.isin(np.arange(len(children)), list(ends)))


MAX_CELLS = 1 << 25  # most cells of one automaton's table while it is built, 64 MiB
_PART = 1 << 22  # cells computed at once
_MAX_CLASSES = (1 << 15) - 2  # a class is an int16, and a constraint adds two


@dataclass(frozen=True, eq=False)
class Automaton:
    """An automaton over tokens; a text begins in state 0.

    Attributes:
        where: the automaton's name in an error.
        next_SC: int16 [S, C], the state after a token of each class; -1 where the token is forbidden.
        class_V: int16 [V], the class of each token.
        stops_S: bool [S], whether the text is over: a stop string has occurred, or only an end token may follow.
    """

    where: str
    next_SC: NDArray[np.int16]
    class_V: NDArray[np.int16]
    stops_S: NDArray[np.bool_]


def searcher(strings: Sequence[bytes], pieces: Sequence[bytes]) -> Automaton:
    """Return the automaton of stop strings over tokens; it forbids no token, and tokens without bytes keep its state.

    Args:
        strings: the stop strings.
        pieces: the bytes of each token.

    Raises:
        InputRefused: see `_aho_corasick`; or the table is too large.
    """
    automaton, where = _aho_corasick(strings), "the stop strings"
    columns_CS, class_V = _columns(automaton, pieces, where)
    return Automaton(where, np.ascontiguousarray(columns_CS[:, :-1].T), class_V, automaton.accepting_S)


def constrainer(automaton: ByteAutomaton, pieces: Sequence[bytes], end_ids: Collection[int], where: str) -> Automaton:
    """Return the automaton of a constraint over tokens: from every state it can reach an accepting state.

    Args:
        automaton: the automaton over bytes.
        pieces: the bytes of each token; a token without bytes is never allowed, unless it ends the text.
        end_ids: tokens that end a text; they are allowed in accepting states only, regardless of their bytes.
        where: the automaton's name in an error.

    Raises:
        InputRefused: no sequence of tokens makes an accepted text, there is no end token, or the table is too large.
    """
    if not (ends := sorted(end_ids)):
        raise InputRefused(f"{where} needs a token that ends a text, and the tokenizer has none")
    columns_CS, class_V = _columns(automaton, pieces, where)
    states = len(automaton.accepting_S)
    # Add two columns that lead to the dead state: one for tokens that are never allowed, and the last for end tokens.
    columns_CS = np.concatenate([columns_CS, np.full((2, states + 1), states, dtype=np.int16)])
    # An end token is one whatever its bytes are, and a token without bytes would never move the text on.
    class_V[[not piece for piece in pieces]] = len(columns_CS) - 2
    class_V[ends] = len(columns_CS) - 1
    # Drop the columns that only tokens without bytes and end tokens had.
    used, number_V = np.unique(class_V, return_inverse=True)
    columns_CS, class_V = columns_CS[used], number_V.astype(np.int16)
    next_SC = np.ascontiguousarray(columns_CS.T)  # row `states` is the dead state
    edges_SS = _edges(next_SC)
    # A live state can be reached from state 0, and an accepting state can be reached from it.
    live_S = (_spread(edges_SS, np.array([0])) & _spread(edges_SS.T, np.flatnonzero(automaton.accepting_S)))[:-1]
    if not live_S[0]:
        raise InputRefused(f"{where}: no sequence of the tokenizer's tokens makes such a text")
    # Renumber the live states, and add one last state, to which only end tokens lead.
    numbers = np.full(states + 1, -1, dtype=np.int16)
    numbers[:states][live_S] = np.arange(live_S.sum(), dtype=np.int16)
    next_SC = np.concatenate([numbers[next_SC[:states][live_S]], np.full((1, next_SC.shape[1]), -1, dtype=np.int16)])
    next_SC[np.append(automaton.accepting_S[live_S], True), -1] = len(next_SC) - 1
    stops_S = np.asarray((next_SC[:, :-1] < 0).all(axis=1))
    next_SC, merged_C = np.unique(next_SC, axis=1, return_inverse=True)
    return Automaton(where, next_SC, merged_C.reshape(-1).astype(np.int16)[class_V], stops_S)


def _columns(
    automaton: ByteAutomaton, pieces: Sequence[bytes], where: str
) -> tuple[NDArray[np.int16], NDArray[np.int16]]:
    """Return the next state for each class of tokens and state, [C, S + 1] (S is the dead state), and classes, [V].

    A column holds the states that a run of bytes leads to from each state. All tokens are read at once, byte by byte.
    Prefixes that lead from all states to the same states share a column, and each column is continued by each class of
    bytes only once.
    """
    states, byte_classes = automaton.next_SK.shape
    step_KS = np.full((byte_classes, states + 1), states, dtype=np.int16)
    step_KS[:, :states] = np.where(automaton.next_SK < 0, states, automaton.next_SK).T
    text = automaton.class_256[np.frombuffer(b"".join(pieces), dtype=np.uint8)].astype(np.int64)
    lengths_V = np.fromiter(map(len, pieces), dtype=np.int64, count=len(pieces))
    starts_V = np.cumsum(lengths_V) - lengths_V
    columns = [np.arange(states + 1, dtype=np.int16)]
    index_of = {columns[0].tobytes(): 0}
    known = np.full((1, byte_classes), -1, dtype=np.int64)  # the column after a column and a class of bytes
    column_V = np.zeros(len(pieces), dtype=np.int64)
    # One lookup for all tokens of a depth: a loop in Python over a vocabulary would take seconds.
    active, depth = np.flatnonzero(lengths_V), 0
    while len(active):
        now, by = column_V[active], text[starts_V[active] + depth]
        wanted = np.zeros(known.shape, dtype=bool)
        wanted[now, by] = True
        parents, kinds = np.nonzero(wanted & (known < 0))
        # In parts, as the columns of a large vocabulary would fill the memory all at once.
        part = max(1, _PART // (states + 1))
        for first in range(0, len(parents), part):
            chosen = slice(first, first + part)
            before = np.stack([columns[parent] for parent in parents[chosen]])
            for parent, kind, column in zip(
                parents[chosen], kinds[chosen], step_KS[kinds[chosen, None], before], strict=True
            ):
                known[parent, kind] = index_of.setdefault(column.tobytes(), len(columns))
                if known[parent, kind] == len(columns):
                    columns.append(column.copy())
            if len(columns) * (states + 1) > MAX_CELLS or len(columns) >= _MAX_CLASSES:
                raise InputRefused(
                    f"{where}: {states:,} states by {len(columns):,} kinds of tokens are more than the "
                    f"{MAX_CELLS:,} cells of the largest table; make it simpler or shorter"
                )
        known = np.concatenate([known, np.full((len(columns) - len(known), byte_classes), -1, dtype=np.int64)])
        column_V[active] = known[now, by]
        depth += 1
        active = active[lengths_V[active] > depth]
    used, class_V = np.unique(column_V, return_inverse=True)
    return np.stack([columns[index] for index in used]), class_V.astype(np.int16)


def _edges(next_SC: NDArray[np.int16]) -> NDArray[np.bool_]:
    """Return whether a token leads from one state to another, [S + 1, S + 1]; none leads to the dead state."""
    edges_SS = np.zeros((len(next_SC), len(next_SC)), dtype=bool)
    for row, following in zip(edges_SS, next_SC, strict=True):
        row[following] = True
    edges_SS[:, -1] = False
    return edges_SS


def _spread(edges_SS: NDArray[np.bool_], start: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which states can be reached from the start states along edges, [S + 1]."""
    seen = np.zeros(len(edges_SS), dtype=bool)
    seen[start] = True
    front = start
    while len(front):
        front = np.flatnonzero(edges_SS[front].any(axis=0) & ~seen)
        seen[front] = True
    return seen


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
