"""Automata over tokens, made from automata over bytes.

Tokens share a class if they lead from each state to the same next state. So two small tables replace
one over states and tokens: one over states and classes, and the class of each token. Stop strings form
such an automaton, too: its state says how much of each string has been read (Aho and Corasick 1975).

A token may also change counters (`monograph.automata.counting`). Their counts say how often a part of the
text may still be repeated. A state and its counts are packed into one number.

Shapes, at the end of an array's name: V tokens, A tokens that have bytes left to read, S states, E states
that an edge leads to, C classes of tokens, K classes of bytes. A digit is an axis of that length, e.g. the
2 in `columns_C2S`.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from monograph.automata.counting import ALWAYS, Effect, apply_effect, compose_effects
from monograph.automata.dfa import STATE_MASK, ByteAutomaton
from monograph.errors import InputRefused

MAX_BYTES = 4_096  # the maximum number of bytes of all stop strings together
# The maximum number of cells of an automaton's table while it is built. A cell has a next state and an
# effect, both int16, so all cells take 128 MiB.
MAX_CELLS = 1 << 25
MAX_EFFECTS = 1 << 12  # the maximum number of different effects of an automaton's tokens
_CHUNK_CELLS = 1 << 22  # about how many cells are computed together
_MAX_CLASSES = (1 << 15) - 2  # a class is an int16, and `constraint_automaton` adds two


@dataclass(frozen=True, eq=False)
class Automaton:
    """An automaton over tokens; a text begins in state 0, with all counts 0.

    Attributes:
        where: the automaton's name in an error.
        next_SC: int16 [S, C], the state after a token of each class; -1 where such a token is
            forbidden.
        class_V: int16 [V], the class of each token.
        stops_S: bool [S], whether the text is over: a stop string has occurred, or only an end
            token may follow.
        effect_SC: int16 [S, C], the index in `effects` of what a token of each class does to the
            counters.
        effects: all effects; the first one is `ALWAYS`.
    """

    where: str
    next_SC: NDArray[np.int16]
    class_V: NDArray[np.int16]
    stops_S: NDArray[np.bool_]
    effect_SC: NDArray[np.int16]
    effects: tuple[Effect, ...] = (ALWAYS,)

    def after(self, packed_state: int, token: int) -> int:
        """Return the state after a token, or -1 if the token is forbidden.

        It is the reference for `monograph.decode.automaton_tables.next_states`, which the decode step
        runs on the device.

        Args:
            packed_state: a state, packed with its counts.
            token: the token's id.
        """
        state = packed_state & STATE_MASK
        token_class = self.class_V[token]
        next_state = int(self.next_SC[state, token_class])
        if next_state < 0:
            return -1
        effect = self.effects[self.effect_SC[state, token_class]]
        return apply_effect(effect, packed_state, next_state)

    @cached_property
    def allows_all_S(self) -> NDArray[np.bool_]:
        """Whether every token is allowed in each state, whatever the counts are."""
        allows_all_S: NDArray[np.bool_] = ((self.next_SC >= 0) & (self.effect_SC == 0)).all(axis=1)
        return allows_all_S

    @property
    def has_counters(self) -> bool:
        """Whether the automaton has counters."""
        return len(self.effects) > 1


def stop_automaton(strings: Sequence[bytes], pieces: Sequence[bytes]) -> Automaton:
    """Return the automaton of stop strings over tokens.

    It forbids no token, and a token without bytes keeps its state.

    Args:
        strings: the stop strings.
        pieces: the bytes of each token.

    Raises:
        InputRefused: the strings are refused by `_aho_corasick`, or the table is too large.
    """
    automaton = _aho_corasick(strings)
    where = "the stop strings"
    columns_C2S, class_V, _ = _token_columns(automaton, pieces, where)
    # For each class, the next states and the effects by state. The last state is left out: it is the dead
    # one, to which no token leads.
    next_CS, effect_CS = columns_C2S[:, 0, :-1], columns_C2S[:, 1, :-1]
    next_SC = np.ascontiguousarray(next_CS.T)
    effect_SC = np.ascontiguousarray(effect_CS.T)
    return Automaton(where, next_SC, class_V, automaton.accepting_S, effect_SC)


def _aho_corasick(strings: Sequence[bytes]) -> ByteAutomaton:
    """Return an automaton that accepts every text in which one of the strings occurs.

    A state stands for the end of the text so far: the longest end that is also the beginning of a string. An
    accepting state is never left.

    Raises:
        InputRefused: there is no string, a string is empty, or all strings together have more than
            MAX_BYTES bytes.
    """
    if not strings or not all(strings):
        raise InputRefused(
            "an empty stop string would end every text at once: give at least one character"
        )
    total_bytes = sum(map(len, strings))
    if total_bytes > MAX_BYTES:
        raise InputRefused(
            f"the stop strings have {total_bytes:,} bytes; at most {MAX_BYTES:,} are searched"
        )
    # A trie of all strings, whose nodes are the states.
    children: list[dict[int, int]] = [{}]
    ends: set[int] = set()  # nodes at which a string is complete
    for string in strings:
        node = 0
        for byte in string:
            if byte not in children[node]:
                children[node][byte] = len(children)
                children.append({})
            node = children[node][byte]
        ends.add(node)
    next_SK = np.zeros((len(children), 256), dtype=np.int16)
    # The text that leads to a state also ends with shorter prefixes of strings. `shorter` has, for each
    # state, the state of the longest of these prefixes (its failure link). States are visited breadth first,
    # so the row of that state is complete when it is copied.
    shorter = [0] * len(children)
    queue = [0]
    for node in queue:  # The queue grows in the loop body.
        # A shorter stop string may end inside a longer one that has only begun.
        if node in ends or shorter[node] in ends:
            ends.add(node)
            next_SK[node] = node  # A string has occurred, so the automaton stays here.
            continue
        next_SK[node] = next_SK[shorter[node]]
        for byte, child in children[node].items():
            # The only prefix shorter than one byte is the empty one, in state 0.
            shorter[child] = int(next_SK[shorter[node], byte]) if node else 0
            next_SK[node, byte] = child
            queue.append(child)
    accepting_S = np.isin(np.arange(len(children)), list(ends))
    class_256 = np.arange(256, dtype=np.uint8)  # each byte is a class of its own
    no_effect_SK = np.zeros_like(next_SK)
    return ByteAutomaton(next_SK, class_256, accepting_S, no_effect_SK)


def constraint_automaton(
    automaton: ByteAutomaton, pieces: Sequence[bytes], end_ids: Collection[int], where: str
) -> Automaton:
    """Return the automaton of a constraint over tokens.

    From each state of the result, tokens can reach an accepting state.

    Args:
        automaton: the automaton over bytes. If it has counters, each byte of its texts must be a
            token by itself (`has_each_byte`), so that tokens can finish what bytes can finish.
        pieces: the bytes of each token. A token without bytes is never allowed, unless it ends the
            text.
        end_ids: the tokens that end a text. They are allowed in accepting states only, whatever
            their bytes are.
        where: the automaton's name in an error.

    Raises:
        InputRefused: no sequence of tokens makes an accepted text, there is no end token, or the
            table is too large.
    """
    ends = sorted(end_ids)
    if not ends:
        raise InputRefused(f"{where} needs a token that ends a text, and the tokenizer has none")
    columns_C2S, class_V, effects = _token_columns(automaton, pieces, where)
    columns_C2S, class_V = _with_end_column(columns_C2S, class_V, pieces, ends)
    # Tables with a row for each state, [S + 1, C]. The last row is that of the dead state.
    next_SC = np.ascontiguousarray(columns_C2S[:, 0].T)
    effect_SC = columns_C2S[:, 1].T
    states = len(automaton.accepting_S)
    # If each byte is a token, all states are live, because every state of a `ByteAutomaton` is on a path of bytes
    # from state 0 to an accepting state.
    live_S = np.ones(states, dtype=bool)
    if not has_each_byte(automaton, pieces, end_ids):
        live_S = _live_states(next_SC, automaton.accepting_S)
    if not live_S[0]:
        raise InputRefused(f"{where}: no sequence of the tokenizer's tokens makes such a text")
    # Renumber the live states, and add a state after them, to which only end tokens lead.
    new_numbers = np.full(states + 1, -1, dtype=np.int16)  # -1: dead
    new_numbers[:states][live_S] = np.arange(live_S.sum(), dtype=np.int16)
    live_next_SC = next_SC[:states][live_S]
    end_row_1C = np.full((1, next_SC.shape[1]), -1, dtype=np.int16)
    next_SC = np.concatenate([new_numbers[live_next_SC], end_row_1C])
    may_end_S = np.append(automaton.accepting_S[live_S], True)
    # From accepting states and from the last state itself, end tokens lead to the last state.
    next_SC[may_end_S, -1] = len(next_SC) - 1
    no_effect_1C = np.zeros((1, next_SC.shape[1]), dtype=np.int16)
    effect_SC = np.concatenate([effect_SC[:states][live_S], no_effect_1C])
    # The effect of a forbidden token does not matter. It is set to 0, so that more columns are equal below.
    effect_SC[next_SC < 0] = 0
    stops_S = np.asarray((next_SC[:, :-1] < 0).all(axis=1))
    # Columns may have become equal by the renumbering. Tokens of equal columns then share a class.
    stacked = np.concatenate([next_SC, effect_SC])
    unique_columns, new_class_C = np.unique(stacked, axis=1, return_inverse=True)
    next_SC = np.ascontiguousarray(unique_columns[: len(stops_S)])
    effect_SC = np.ascontiguousarray(unique_columns[len(stops_S) :])
    class_V = new_class_C.reshape(-1).astype(np.int16)[class_V]
    return Automaton(where, next_SC, class_V, stops_S, effect_SC, effects)


def _with_end_column(
    columns_C2S: NDArray[np.int16],
    class_V: NDArray[np.int16],
    pieces: Sequence[bytes],
    ends: Sequence[int],
) -> tuple[NDArray[np.int16], NDArray[np.int16]]:
    """Return the columns and the classes with a last column for end tokens.

    For now this column leads to the dead state from everywhere. Tokens without bytes lead there, too.

    Args:
        columns_C2S: the columns by the bytes of tokens; see `_token_columns`.
        class_V: the class of each token by its bytes; it is overwritten.
        pieces: the bytes of each token.
        ends: the tokens that end a text.
    """
    dead_state = columns_C2S.shape[2] - 1
    dead_12S = np.zeros((1, 2, dead_state + 1), dtype=np.int16)
    dead_12S[:, 0] = dead_state
    columns_C2S = np.concatenate([columns_C2S, dead_12S, dead_12S])
    # A token without bytes is never allowed, because it adds nothing to the text. End tokens are set
    # afterwards, because some of them have no bytes.
    class_V[[not piece for piece in pieces]] = len(columns_C2S) - 2
    class_V[ends] = len(columns_C2S) - 1
    # Drop the columns that no token has any more. The column of end tokens stays the last one, because
    # `np.unique` keeps the order.
    used, new_class_V = np.unique(class_V, return_inverse=True)
    return columns_C2S[used], new_class_V.astype(np.int16)


def has_each_byte(
    automaton: ByteAutomaton, pieces: Sequence[bytes], end_ids: Collection[int]
) -> bool:
    """Return whether each byte that occurs in accepted texts is a token by itself.

    If so, tokens can write all of these texts. An end token does not count.
    """
    single_bytes = {
        piece[0] for token, piece in enumerate(pieces) if len(piece) == 1 and token not in end_ids
    }
    used_K = np.asarray((automaton.next_SK >= 0).any(axis=0))
    used_bytes = np.flatnonzero(used_K[automaton.class_256]).tolist()
    return single_bytes.issuperset(used_bytes)


def _token_columns(
    automaton: ByteAutomaton, pieces: Sequence[bytes], where: str
) -> tuple[NDArray[np.int16], NDArray[np.int16], tuple[Effect, ...]]:
    """Return the column of each class of tokens, the class of each token, and all effects.

    A column belongs to a sequence of bytes: for each state it has the state after these bytes, and the
    number of their effect. Sequences that lead from all states to the same states with the same effects
    share a column.

    The columns are found by reading all tokens at the same time, byte by byte.

    Returns:
        columns_C2S: int16 [C, 2, S + 1], the next states and the numbers of the effects; state S is
            the dead state.
        class_V: int16 [V].
        effects: all effects.
    """
    sequences = _SequenceColumns(automaton, where)
    # The classes of the bytes of all tokens, one token after the other.
    all_bytes = np.frombuffer(b"".join(pieces), dtype=np.uint8)
    all_byte_classes = automaton.class_256[all_bytes].astype(np.int64)
    lengths_V = np.fromiter(map(len, pieces), dtype=np.int64, count=len(pieces))
    starts_V = np.cumsum(lengths_V) - lengths_V
    # For each token, the number of the column of its bytes that have been read. At first these are none, and
    # column 0 belongs to the empty sequence.
    column_V = np.zeros(len(pieces), dtype=np.int64)
    # The next byte of all tokens is read by one lookup: a loop in Python over a vocabulary would take
    # seconds.
    bytes_read = 0  # of each token
    active = np.flatnonzero(lengths_V)  # the tokens that have more bytes than that
    while len(active):
        byte_class_A = all_byte_classes[starts_V[active] + bytes_read]
        column_V[active] = sequences.longer_by_a_byte(column_V[active], byte_class_A)
        bytes_read += 1
        active = active[lengths_V[active] > bytes_read]
    used, class_V = np.unique(column_V, return_inverse=True)
    columns_C2S = np.stack([sequences.columns[index] for index in used])
    return columns_C2S, class_V.astype(np.int16), tuple(sequences.effects)


class _SequenceColumns:
    """The columns of the sequences of bytes that have been read; `_token_columns` describes a column.

    Attributes:
        columns: the columns, int16 [2, S + 1] each. The first one belongs to the empty sequence.
    """

    def __init__(self, automaton: ByteAutomaton, where: str) -> None:
        states, byte_classes = automaton.next_SK.shape
        self._where = where
        self._states = states
        self._dead_state = states  # the state after the last one, numbered from 0
        next_SK = np.where(automaton.next_SK < 0, self._dead_state, automaton.next_SK)
        self._next_KS = np.full((byte_classes, states + 1), self._dead_state, dtype=np.int16)
        self._next_KS[:, :states] = next_SK.T
        self._effect_KS = np.zeros((byte_classes, states + 1), dtype=np.int16)
        self._effect_KS[:, :states] = automaton.effect_SK.T
        self._effects = _SequenceEffects(automaton.effects, where)
        # After the empty sequence, all states stay, and nothing happens to counters.
        all_states = np.arange(states + 1, dtype=np.int16)
        self.columns = [np.stack([all_states, np.zeros_like(all_states)])]
        self._number_of = {self.columns[0].tobytes(): 0}
        # [column, class of bytes]: the number of the column of a sequence that is longer by a byte of this
        # class; -1: it was not computed yet.
        self._longer = np.full((1, byte_classes), -1, dtype=np.int64)

    @property
    def effects(self) -> list[Effect]:
        """All effects, by their numbers."""
        return self._effects.effects

    def longer_by_a_byte(
        self, column_A: NDArray[np.int64], byte_class_A: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the numbers of the columns of sequences that are longer by a byte.

        Args:
            column_A: the numbers of the columns of the sequences so far.
            byte_class_A: the class of the next byte of each.
        """
        is_needed = np.zeros(self._longer.shape, dtype=bool)
        is_needed[column_A, byte_class_A] = True
        # The pairs of a column and a class of bytes that occur now for the first time.
        parents, byte_classes = np.nonzero(is_needed & (self._longer < 0))
        # They are computed in chunks, since all columns of a large vocabulary together would fill the
        # memory.
        chunk_columns = max(1, _CHUNK_CELLS // (self._states + 1))
        for first in range(0, len(parents), chunk_columns):
            chunk = slice(first, first + chunk_columns)
            self._add_longer(parents[chunk], byte_classes[chunk])
        new_columns = len(self.columns) - len(self._longer)
        new_rows = np.full((new_columns, self._longer.shape[1]), -1, dtype=np.int64)
        self._longer = np.concatenate([self._longer, new_rows])
        return self._longer[column_A, byte_class_A]

    def _add_longer(self, parents: NDArray[np.int64], byte_classes: NDArray[np.int64]) -> None:
        """Set entries of `_longer`, and add their columns to `columns` if they are new.

        Args:
            parents: the numbers of the columns before the byte.
            byte_classes: the class of the byte, for each of them.
        """
        # The columns before the byte, [parents, 2, S + 1].
        before = np.stack([self.columns[parent] for parent in parents])
        states_before = before[:, 0]
        effects_before = before[:, 1]
        states_after = self._next_KS[byte_classes[:, None], states_before]
        byte_effects = self._effect_KS[byte_classes[:, None], states_before]
        effects_after = self._effects.extend(effects_before, byte_effects)
        # An effect that no counts allow leads to the dead state. There the effect does not matter, and
        # is set to 0 so that more columns are equal.
        states_after[effects_after < 0] = self._dead_state
        effects_after[states_after == self._dead_state] = 0
        after = np.stack([states_after, effects_after], axis=1)
        for parent, byte_class, column in zip(parents, byte_classes, after, strict=True):
            number = self._number_of.setdefault(column.tobytes(), len(self.columns))
            self._longer[parent, byte_class] = number
            if number == len(self.columns):
                self.columns.append(column.copy())
        is_too_large = len(self.columns) * (self._states + 1) > MAX_CELLS
        if is_too_large or len(self.columns) >= _MAX_CLASSES:
            raise InputRefused(
                f"{self._where}: {self._states:,} states by {len(self.columns):,} kinds of tokens are more than the "
                f"{MAX_CELLS:,} cells of the largest table; make it simpler or shorter"
            )


_UNKNOWN = -2  # stands for a combined effect that was not computed yet


class _SequenceEffects:
    """The effects of sequences of bytes, combined from those of single bytes.

    Attributes:
        effects: all effects so far; the first are those of single bytes.
    """

    def __init__(self, byte_effects: Sequence[Effect], where: str) -> None:
        self.effects = list(byte_effects)
        self._where = where
        self._byte_count = len(byte_effects)
        self._number_of = {effect: number for number, effect in enumerate(byte_effects)}
        # [effect of a sequence, effect of a byte after it]: the number of the effect of both; -1 where no
        # counts allow both.
        self._combined = np.full((self._byte_count, self._byte_count), _UNKNOWN, dtype=np.int16)
        # Effect 0 changes nothing.
        self._combined[0] = np.arange(self._byte_count)
        self._combined[:, 0] = np.arange(self._byte_count)

    def extend(self, before: NDArray[np.int16], byte: NDArray[np.int16]) -> NDArray[np.int16]:
        """Return the numbers of the effects of sequences that are continued by a byte.

        Args:
            before: the numbers of the sequences' effects.
            byte: the numbers of the bytes' effects, in the same shape.

        Returns:
            The numbers, in the same shape; -1 where no counts allow both.
        """
        combined = self._combined[before, byte]
        missing = combined == _UNKNOWN
        if missing.any():
            # Each pair of effects as one number, so that `np.unique` finds the different pairs.
            pairs = before[missing].astype(np.int64) * self._byte_count + byte[missing]
            for pair in np.unique(pairs).tolist():
                before_effect, byte_effect = divmod(pair, self._byte_count)
                self._combine(before_effect, byte_effect)
            combined = self._combined[before, byte]
        return combined

    def _combine(self, before: int, byte: int) -> None:
        """Set one entry of `_combined`, and add the effect to `effects` if it is new."""
        effect = compose_effects(self.effects[before], self.effects[byte])
        if effect is None:
            self._combined[before, byte] = -1
            return
        if effect not in self._number_of:
            if len(self.effects) == MAX_EFFECTS:
                raise InputRefused(
                    f"{self._where}: tokens count its lengths in more than {MAX_EFFECTS:,} ways; give fewer different "
                    "values of maxLength and maxItems"
                )
            self._number_of[effect] = len(self.effects)
            self.effects.append(effect)
            row = np.full((1, self._byte_count), _UNKNOWN, dtype=np.int16)
            row[0, 0] = self._number_of[effect]
            self._combined = np.concatenate([self._combined, row])
        self._combined[before, byte] = self._number_of[effect]


def _live_states(next_SC: NDArray[np.int16], accepting_S: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which states are live, bool [S].

    Tokens lead from state 0 to a live state, and from it to an accepting state.

    Args:
        next_SC: int16 [S + 1, C]; the last row is that of the dead state.
        accepting_S: bool [S].
    """
    edges_SE = _edges(next_SC)
    from_start_S = _reachable(edges_SE, np.array([0]))
    to_end_S = _reachable(edges_SE.T, np.flatnonzero(accepting_S))
    return (from_start_S & to_end_S)[:-1]  # without the dead state


def _edges(next_SC: NDArray[np.int16]) -> NDArray[np.bool_]:
    """Return whether a token leads from one state to another, bool [S + 1, S + 1].

    Edges to the dead state, the last one, are left out.
    """
    edges_SE = np.zeros((len(next_SC), len(next_SC)), dtype=bool)
    for row, targets in zip(edges_SE, next_SC, strict=True):
        row[targets] = True
    edges_SE[:, -1] = False
    return edges_SE


def _reachable(edges_SE: NDArray[np.bool_], start: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which states can be reached from the start states along edges, bool [S + 1]."""
    reached_S = np.zeros(len(edges_SE), dtype=bool)
    reached_S[start] = True
    frontier = start
    while len(frontier):
        frontier = np.flatnonzero(edges_SE[frontier].any(axis=0) & ~reached_S)
        reached_S[frontier] = True
    return reached_S
