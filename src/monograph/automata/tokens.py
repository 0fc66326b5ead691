"""Automata over tokens, made from automata over bytes.

Tokens that lead from every state to the same next state form one class, so a table over states and
classes, and the class of each token, stand for the table over states and tokens. Stop strings form
such an automaton too; its state tracks the progress in each of them (Aho and Corasick 1975).

A token may also have an effect on counters (`counting`), which say how often a part of the text may
still be repeated; each automaton lists its effects. A row's state and its counters are one number.

Shapes: V tokens, S states, C classes of tokens, K classes of bytes.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from monograph.automata.counting import ALWAYS, Effect, moved, then
from monograph.automata.dfa import STATE_MASK, ByteAutomaton
from monograph.errors import InputRefused

MAX_BYTES = 4_096  # most bytes of all stop strings together


def _aho_corasick(strings: Sequence[bytes]) -> ByteAutomaton:
    """Return an automaton that accepts every text in which one of the strings occurs.

    A state stands for the longest prefix of a string with which the text so far ends. An accepting
    state is never left.

    Raises:
        InputRefused: there is no string, one is empty, or they have more than MAX_BYTES bytes in
            all.
    """
    if not strings or not all(strings):
        raise InputRefused(
            "an empty stop string would end every text at once: give at least one character"
        )
    if sum(map(len, strings)) > MAX_BYTES:
        raise InputRefused(
            f"the stop strings have {sum(map(len, strings)):,} bytes; at most {MAX_BYTES:,} are searched"
        )
    # First a tree of all strings, then links to shorter prefixes, breadth first: a link leads to a
    # finished state.
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
    return ByteAutomaton(
        next_SK, np.arange(256, dtype=np.uint8), accepting_S, np.zeros_like(next_SK)
    )


MAX_CELLS = 1 << 25  # most cells of one automaton's table while it is built, 128 MiB
MAX_EFFECTS = 1 << 12  # most effects of one automaton
_PART = 1 << 22  # cells computed at once
_MAX_CLASSES = (1 << 15) - 2  # a class is an int16, and a constraint adds two


@dataclass(frozen=True, eq=False)
class Automaton:
    """An automaton over tokens; a text begins in state 0, with all counters 0.

    Attributes:
        where: the automaton's name in an error.
        next_SC: int16 [S, C], the state after a token of each class; -1 where the token is
            forbidden.
        class_V: int16 [V], the class of each token.
        stops_S: bool [S], whether the text is over: a stop string has occurred, or only an end
            token may follow.
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
        """Return the state after a token, or -1 if it is forbidden; this is the reference for
        `advance`.

        Args:
            state: a state with its counters.
            token: the token's id.
        """
        at = state & STATE_MASK
        by = self.class_V[token]
        following = int(self.next_SC[at, by])
        return (
            -1 if following < 0 else moved(self.effects[self.effect_SC[at, by]], state, following)
        )

    @property
    def counts(self) -> bool:
        """Return whether it has counters."""
        return len(self.effects) > 1


def searcher(strings: Sequence[bytes], pieces: Sequence[bytes]) -> Automaton:
    """Return the automaton of stop strings over tokens; it forbids no token, and tokens without
    bytes keep its state.

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


def constrainer(
    automaton: ByteAutomaton, pieces: Sequence[bytes], end_ids: Collection[int], where: str
) -> Automaton:
    """Return the automaton of a constraint over tokens: from every state it can reach an accepting
    state.

    Args:
        automaton: the automaton over bytes; if it has counters, each byte of its texts is a token
            by itself, so that what can be finished byte by byte can be finished by tokens.
        pieces: the bytes of each token; a token without bytes is never allowed, unless it ends the
            text.
        end_ids: tokens that end a text; they are allowed in accepting states only, regardless of
            their bytes.
        where: the automaton's name in an error.

    Raises:
        InputRefused: no sequence of tokens makes an accepted text, there is no end token, or the
            table is too large.
    """
    if not (ends := sorted(end_ids)):
        raise InputRefused(f"{where} needs a token that ends a text, and the tokenizer has none")
    columns_C2S, class_V, effects = _columns(automaton, pieces, where)
    states = len(automaton.accepting_S)
    # Add two columns that lead to the dead state: one for tokens that are never allowed, and the
    # last for end tokens.
    nowhere_2S = np.zeros((1, 2, states + 1), dtype=np.int16)
    nowhere_2S[:, 0] = states
    columns_C2S = np.concatenate([columns_C2S, nowhere_2S, nowhere_2S])
    # An end token is one whatever its bytes are, and a token without bytes would never move the
    # text on.
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
        live_S = (
            _spread(edges_SS, np.array([0]))
            & _spread(edges_SS.T, np.flatnonzero(automaton.accepting_S))
        )[:-1]
    if not live_S[0]:
        raise InputRefused(f"{where}: no sequence of the tokenizer's tokens makes such a text")
    # Renumber the live states, and add one last state, to which only end tokens lead.
    numbers = np.full(states + 1, -1, dtype=np.int16)
    numbers[:states][live_S] = np.arange(live_S.sum(), dtype=np.int16)
    next_SC = np.concatenate(
        [numbers[next_SC[:states][live_S]], np.full((1, next_SC.shape[1]), -1, dtype=np.int16)]
    )
    next_SC[np.append(automaton.accepting_S[live_S], True), -1] = len(next_SC) - 1
    effect_SC = np.concatenate(
        [effect_SC[:states][live_S], np.zeros((1, next_SC.shape[1]), dtype=np.int16)]
    )
    effect_SC[next_SC < 0] = 0
    stops_S = np.asarray((next_SC[:, :-1] < 0).all(axis=1))
    both, merged_C = np.unique(np.concatenate([next_SC, effect_SC]), axis=1, return_inverse=True)
    next_SC = np.ascontiguousarray(both[: len(stops_S)])
    effect_SC = np.ascontiguousarray(both[len(stops_S) :])
    return Automaton(
        where, next_SC, merged_C.reshape(-1).astype(np.int16)[class_V], stops_S, effect_SC, effects
    )


def has_each_byte(
    automaton: ByteAutomaton, pieces: Sequence[bytes], end_ids: Collection[int]
) -> bool:
    """Return whether each byte of the accepted texts is a token by itself, so that tokens write all
    of these texts.
    """
    alone = {
        piece[0] for token, piece in enumerate(pieces) if len(piece) == 1 and token not in end_ids
    }
    used_K = np.asarray((automaton.next_SK >= 0).any(axis=0))
    return alone.issuperset(np.flatnonzero(used_K[automaton.class_256]).tolist())


def _columns(
    automaton: ByteAutomaton, pieces: Sequence[bytes], where: str
) -> tuple[NDArray[np.int16], NDArray[np.int16], tuple[Effect, ...]]:
    """Return the columns of all classes of tokens, [C, 2, S + 1], each token's class, [V], and the
    effects.

    A column holds the states that a run of bytes leads to from each state, and the effects on the
    way there; state S is the dead state. All tokens are read at once, byte by byte. Prefixes that
    lead from all states to the same states with the same effects share a column, and each column is
    continued by each class of bytes only once.
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
    columns = [
        np.stack([np.arange(states + 1, dtype=np.int16), np.zeros(states + 1, dtype=np.int16)])
    ]
    index_of = {columns[0].tobytes(): 0}
    # The column after a column and a class of bytes.
    known = np.full((1, byte_classes), -1, dtype=np.int64)
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
            after[:, 1] = sequences.after(
                before[:, 1], effect_KS[kinds[chosen, None], before[:, 0]]
            )
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
        known = np.concatenate(
            [known, np.full((len(columns) - len(known), byte_classes), -1, dtype=np.int64)]
        )
        column_V[active] = known[now, by]
        depth += 1
        active = active[lengths_V[active] > depth]
    used, class_V = np.unique(column_V, return_inverse=True)
    return (
        np.stack([columns[index] for index in used]),
        class_V.astype(np.int16),
        tuple(sequences.effects),
    )


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
        # The effect after an effect and one of a byte: -1 where no counters allow it, _UNKNOWN
        # until it is asked for.
        self._known = np.full((len(of_bytes), len(of_bytes)), _UNKNOWN, dtype=np.int16)
        self._known[0] = np.arange(len(of_bytes))
        self._known[:, 0] = np.arange(len(of_bytes))

    def after(self, before: NDArray[np.int16], byte: NDArray[np.int16]) -> NDArray[np.int16]:
        """Return the effects of sequences and then of a byte, in the arrays' shape; -1 where no
        counters allow it.
        """
        found = self._known[before, byte]
        missing = found == _UNKNOWN
        if missing.any():
            for pair in np.unique(
                before[missing].astype(np.int64) * self._of_bytes + byte[missing]
            ).tolist():
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
    """Return whether a token leads from one state to another, [S + 1, S + 1]; none leads to the
    dead state.
    """
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
