"""Automata over tokens: made from those over bytes, and on the device, where they come and go while a decoder runs.

Tokens that lead from every state to the same next state form one class, so a table over states and classes, and the
class of each token, stand for the table over states and tokens. Stop strings form such an automaton too; its state
tracks the progress in each of them (Aho and Corasick 1975).

A token may also have an effect on counters (`counting`), which say how often a part of the text may still be repeated;
each automaton lists its effects. A row's state and its counters are one number.

The decode step follows automata by gathers in tensors of fixed size, without the host. The tensors keep their sizes and
places, so a captured step goes on to read them.

Shapes: V tokens, S states, C classes of tokens, K classes of bytes, E effects, R counters; on the device B rows, S
states, N cells and E effects of all automata, A automata.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monograph.decode.automata.counting import (
    ALWAYS,
    COUNTERS,
    MAX_COUNT,
    SHIFTS,
    STATE_BITS,
    Effect,
    moved,
    then,
)
from monograph.decode.automata.dfa import STATE_MASK, ByteAutomaton
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
    accepting_S = np.isin(np.arange(len(children)), list(ends))
    return ByteAutomaton(next_SK, np.arange(256, dtype=np.uint8), accepting_S, np.zeros_like(next_SK))


MAX_CELLS = 1 << 25  # most cells of one automaton's table while it is built, 128 MiB
MAX_EFFECTS = 1 << 12  # most effects of one automaton
_PART = 1 << 22  # cells computed at once
_MAX_CLASSES = (1 << 15) - 2  # a class is an int16, and a constraint adds two


@dataclass(frozen=True, eq=False)
class Automaton:
    """An automaton over tokens; a text begins in state 0, with all counters 0.

    Attributes:
        where: the automaton's name in an error.
        next_SC: int16 [S, C], the state after a token of each class; -1 where the token is forbidden.
        class_V: int16 [V], the class of each token.
        stops_S: bool [S], whether the text is over: a stop string has occurred, or only an end token may follow.
        effect_SC: int16 [S, C], the index in `effects` of what the token does to the counters.
        effects: all effects; the first is `ALWAYS`.
    """

    where: str
    next_SC: NDArray[np.int16]
    class_V: NDArray[np.int16]
    stops_S: NDArray[np.bool_]
    effect_SC: NDArray[np.int16]
    effects: tuple[Effect, ...] = (ALWAYS,)

    def after(self, state: int, token: int) -> int:
        """Return the state after a token, or -1 if it is forbidden; this is the reference for `advance`.

        Args:
            state: a state with its counters.
            token: the token's id.
        """
        at = state & STATE_MASK
        by = self.class_V[token]
        following = int(self.next_SC[at, by])
        return -1 if following < 0 else moved(self.effects[self.effect_SC[at, by]], state, following)

    @property
    def counts(self) -> bool:
        """Return whether it has counters."""
        return len(self.effects) > 1


def searcher(strings: Sequence[bytes], pieces: Sequence[bytes]) -> Automaton:
    """Return the automaton of stop strings over tokens; it forbids no token, and tokens without bytes keep its state.

    Args:
        strings: the stop strings.
        pieces: the bytes of each token.

    Raises:
        InputRefused: see `_aho_corasick`; or the table is too large.
    """
    automaton = _aho_corasick(strings)
    where = "the stop strings"
    columns_C2S, class_V, _ = _columns(automaton, pieces, where)
    next_SC, effect_SC = (np.ascontiguousarray(columns_C2S[:, part, :-1].T) for part in (0, 1))
    return Automaton(where, next_SC, class_V, automaton.accepting_S, effect_SC)


def constrainer(automaton: ByteAutomaton, pieces: Sequence[bytes], end_ids: Collection[int], where: str) -> Automaton:
    """Return the automaton of a constraint over tokens: from every state it can reach an accepting state.

    Args:
        automaton: the automaton over bytes; if it has counters, each byte of its texts is a token by itself, so that
            what can be finished byte by byte can be finished by tokens.
        pieces: the bytes of each token; a token without bytes is never allowed, unless it ends the text.
        end_ids: tokens that end a text; they are allowed in accepting states only, regardless of their bytes.
        where: the automaton's name in an error.

    Raises:
        InputRefused: no sequence of tokens makes an accepted text, there is no end token, or the table is too large.
    """
    if not (ends := sorted(end_ids)):
        raise InputRefused(f"{where} needs a token that ends a text, and the tokenizer has none")
    columns_C2S, class_V, effects = _columns(automaton, pieces, where)
    states = len(automaton.accepting_S)
    # Add two columns that lead to the dead state: one for tokens that are never allowed, and the last for end tokens.
    nowhere_2S = np.zeros((1, 2, states + 1), dtype=np.int16)
    nowhere_2S[:, 0] = states
    columns_C2S = np.concatenate([columns_C2S, nowhere_2S, nowhere_2S])
    # An end token is one whatever its bytes are, and a token without bytes would never move the text on.
    class_V[[not piece for piece in pieces]] = len(columns_C2S) - 2
    class_V[ends] = len(columns_C2S) - 1
    # Drop the columns that only tokens without bytes and end tokens had.
    used, number_V = np.unique(class_V, return_inverse=True)
    columns_C2S = columns_C2S[used]
    class_V = number_V.astype(np.int16)
    next_SC = np.ascontiguousarray(columns_C2S[:, 0].T)  # row `states` is the dead state
    effect_SC = columns_C2S[:, 1].T
    live_S = np.ones(states, dtype=bool)
    if not has_each_byte(automaton, pieces, end_ids):
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
    effect_SC = np.concatenate([effect_SC[:states][live_S], np.zeros((1, next_SC.shape[1]), dtype=np.int16)])
    effect_SC[next_SC < 0] = 0
    stops_S = np.asarray((next_SC[:, :-1] < 0).all(axis=1))
    both, merged_C = np.unique(np.concatenate([next_SC, effect_SC]), axis=1, return_inverse=True)
    next_SC = np.ascontiguousarray(both[: len(stops_S)])
    effect_SC = np.ascontiguousarray(both[len(stops_S) :])
    return Automaton(where, next_SC, merged_C.reshape(-1).astype(np.int16)[class_V], stops_S, effect_SC, effects)


def has_each_byte(automaton: ByteAutomaton, pieces: Sequence[bytes], end_ids: Collection[int]) -> bool:
    """Return whether each byte of the accepted texts is a token by itself, so that tokens write all of these texts."""
    alone = {piece[0] for token, piece in enumerate(pieces) if len(piece) == 1 and token not in end_ids}
    used_K = np.asarray((automaton.next_SK >= 0).any(axis=0))
    return alone.issuperset(np.flatnonzero(used_K[automaton.class_256]).tolist())


def _columns(
    automaton: ByteAutomaton, pieces: Sequence[bytes], where: str
) -> tuple[NDArray[np.int16], NDArray[np.int16], tuple[Effect, ...]]:
    """Return the columns of all classes of tokens, [C, 2, S + 1], each token's class, [V], and the effects.

    A column holds the states that a run of bytes leads to from each state, and the effects on the way there; state S is
    the dead state. All tokens are read at once, byte by byte. Prefixes that lead from all states to the same states
    with the same effects share a column, and each column is continued by each class of bytes only once.
    """
    states, byte_classes = automaton.next_SK.shape
    step_KS = np.full((byte_classes, states + 1), states, dtype=np.int16)
    step_KS[:, :states] = np.where(automaton.next_SK < 0, states, automaton.next_SK).T
    effect_KS = np.zeros((byte_classes, states + 1), dtype=np.int16)
    effect_KS[:, :states] = automaton.effect_SK.T
    sequences = _Sequences(automaton.effects, where)
    text = automaton.class_256[np.frombuffer(b"".join(pieces), dtype=np.uint8)].astype(np.int64)
    lengths_V = np.fromiter(map(len, pieces), dtype=np.int64, count=len(pieces))
    starts_V = np.cumsum(lengths_V) - lengths_V
    columns = [np.stack([np.arange(states + 1, dtype=np.int16), np.zeros(states + 1, dtype=np.int16)])]
    index_of = {columns[0].tobytes(): 0}
    known = np.full((1, byte_classes), -1, dtype=np.int64)  # the column after a column and a class of bytes
    column_V = np.zeros(len(pieces), dtype=np.int64)
    # One lookup for all tokens of a depth: a loop in Python over a vocabulary would take seconds.
    active = np.flatnonzero(lengths_V)
    depth = 0
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
            after = np.empty_like(before)
            after[:, 0] = step_KS[kinds[chosen, None], before[:, 0]]
            after[:, 1] = sequences.after(before[:, 1], effect_KS[kinds[chosen, None], before[:, 0]])
            # What no counters allow leads to the dead state, where all effects are one.
            after[:, 0][after[:, 1] < 0] = states
            after[:, 1][after[:, 0] == states] = 0
            for parent, kind, column in zip(parents[chosen], kinds[chosen], after, strict=True):
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
    return np.stack([columns[index] for index in used]), class_V.astype(np.int16), tuple(sequences.effects)


class _Sequences:
    """The effects of sequences of bytes, made from those of single bytes.

    Attributes:
        effects: all effects so far; the first are those of single bytes.
    """

    def __init__(self, of_bytes: Sequence[Effect], where: str) -> None:
        self.effects = list(of_bytes)
        self._where = where
        self._of_bytes = len(of_bytes)
        self._number = {effect: number for number, effect in enumerate(of_bytes)}
        # The effect after an effect and one of a byte: -1 where no counters allow it, _UNKNOWN until it is asked for.
        self._known = np.full((len(of_bytes), len(of_bytes)), _UNKNOWN, dtype=np.int16)
        self._known[0] = np.arange(len(of_bytes))
        self._known[:, 0] = np.arange(len(of_bytes))

    def after(self, before: NDArray[np.int16], byte: NDArray[np.int16]) -> NDArray[np.int16]:
        """Return the effects of sequences and then of a byte, in the arrays' shape; -1 where no counters allow it."""
        found = self._known[before, byte]
        missing = found == _UNKNOWN
        if missing.any():
            for pair in np.unique(before[missing].astype(np.int64) * self._of_bytes + byte[missing]).tolist():
                self._add(*divmod(pair, self._of_bytes))
            found = self._known[before, byte]
        return found

    def _add(self, before: int, byte: int) -> None:
        effect = then(self.effects[before], self.effects[byte])
        if effect is None:
            self._known[before, byte] = -1
            return
        if effect not in self._number:
            if len(self.effects) == MAX_EFFECTS:
                raise InputRefused(
                    f"{self._where}: tokens count its lengths in more than {MAX_EFFECTS:,} ways; give fewer different "
                    "values of maxLength and maxItems"
                )
            self._number[effect] = len(self.effects)
            self.effects.append(effect)
            row = np.full((1, self._of_bytes), _UNKNOWN, dtype=np.int16)
            row[0, 0] = self._number[effect]
            self._known = np.concatenate([self._known, row])
        self._known[before, byte] = self._number[effect]


_UNKNOWN = -2


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

    Each automaton has a place while a request uses it, and longer if nobody asks. Each row of a batch has a state,
    int64: FREE if it has no automaton, else a state of an automaton, with its counters.

    Attributes:
        cells: most cells of all automata.
        states: most states of all.
        automata: most automata.
        effects: most effects of all but `ALWAYS`.
        next_N: int32 [N], the state after each class of tokens, state by state; DEAD where the token is forbidden.
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

        An automaton has at most so many classes; a step looks at as many, and at none per token of a large vocabulary.
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
        self._write_effects(0, [ALWAYS, ALWAYS._replace(least=(1,) * COUNTERS, most=(0,) * COUNTERS)])
        # On the device, so that a captured step copies nothing.
        self.classes_C = torch.arange(min(classes, vocabulary + 2), dtype=torch.int32, device=device)
        self.shifts_R = torch.tensor(SHIFTS, dtype=torch.int64, device=device)
        self._vocabulary = vocabulary
        self._places: dict[int, _Place] = {}  # by identity, the longest unused first
        self._uses: Counter[int] = Counter()

    @classmethod
    def holding(cls, automata: Collection[Automaton], vocabulary: int, device: torch.device) -> Self:
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
                raise InputRefused(f"{automaton.where} was made for {made_for:,} tokens, not {self._vocabulary:,}")
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
        effect = _gap(
            [(p.effect, len(p.automaton.effects) - 1) for p in there], len(automaton.effects) - 1, self.effects + 2
        )
        if number is None or cell is None or state is None or effect is None:
            return None
        return _Place(automaton, cell, state, effect, number)

    def _write(self, automaton: Automaton, cell: int, state: int, effect: int, number: int) -> None:
        """Write an automaton's table from `cell`, `state` and `effect` on."""
        table_SC = automaton.next_SC.astype(np.int32)
        device = self.next_N.device
        states = slice(state, state + len(table_SC))
        # A forbidden token's -1 becomes the dead state here, so that the device needs no case for it.
        following = np.where(table_SC < 0, DEAD, table_SC + state).reshape(-1)
        rows = np.arange(len(table_SC), dtype=np.int32) * table_SC.shape[1] + cell
        self.next_N[cell : cell + table_SC.size] = torch.from_numpy(following.astype(np.int32)).to(device)
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
    return cells, sum(len(each.next_SC) for each in automata), sum(len(each.effects) - 1 for each in automata)


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
    # Whether the counters allow an effect is found out for each effect, then for each class, and not for each token.
    counts_BR = _counts(tables, state_B)
    least_ER, most_ER = tables.effects_4ER[0], tables.effects_4ER[1]
    may_BE = ((counts_BR[:, None] >= least_ER) & (counts_BR[:, None] <= most_ER)).all(-1)
    # Behind an automaton's last class come cells of others, which no token has.
    cell_BC = (tables.row_S[at_B][:, None] + tables.classes_C).clamp(max=tables.cells - 1)
    may_BC = may_BE.gather(1, tables.effect_N[cell_BC].long())
    return may_BC.gather(1, tables.class_AV[tables.automaton_S[at_B]].long())


def advance(tables: Arena, state_B: Tensor, token_B: Tensor) -> Tensor:
    """Return the states after one token of each row: DEAD after a forbidden token, FREE for rows in FREE.

    Args:
        tables: the automata.
        state_B: int64 [B].
        token_B: int64 or int32 [B], ids below V.

    Returns:
        int64 [B].
    """
    at_B = state_B & STATE_MASK
    cell_B = tables.row_S[at_B] + tables.class_AV[tables.automaton_S[at_B], token_B].int()
    least_BR, most_BR, keep_BR, add_BR = tables.effects_4ER[:, tables.effect_N[cell_B].int()].long().unbind(0)
    counts_BR = _counts(tables, state_B)
    may_B = ((counts_BR >= least_BR) & (counts_BR <= most_BR)).all(-1)
    after_B = tables.next_N[cell_B] + ((keep_BR * counts_BR + add_BR) << tables.shifts_R).sum(-1)
    return torch.where(may_B, after_B, DEAD)


def stopped(tables: Arena, state_B: Tensor) -> Tensor:
    """Return whether each row's text is over: a stop string has occurred, or only an end token could still come.

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
