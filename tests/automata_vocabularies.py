"""Vocabularies and walks that the tests of automata share."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from monograph.automata import Automaton
from monograph.automata.dfa import STATE_MASK

END, PAD = 0, 1  # the ids of the special tokens


def vocabulary(alphabet: str = "ab", longer: int = 20, seed: int = 0) -> list[bytes]:
    """Two special tokens, all bytes of the alphabet's characters, and random pieces, which may cut
    a character.
    """
    draw = random.Random(seed)
    single = sorted({bytes([byte]) for byte in alphabet.encode()})
    pieces = {b"".join(draw.choices(single, k=draw.randrange(2, 6))) for _ in range(longer)}
    pieces |= {
        "".join(draw.choices(alphabet, k=draw.randrange(2, 5))).encode() for _ in range(longer)
    }
    return [b"", b"", *single, *sorted(pieces)]


def state_after(automaton: Automaton, tokens: Sequence[int], state: int = 0) -> int:
    """The state after some tokens; -1 once a token is forbidden."""
    for token in tokens:
        if state < 0:
            return state
        state = automaton.after(state, token)
    return state


def allowed_ids(automaton: Automaton, state: int) -> set[int]:
    """The tokens that may come next; none after a forbidden one."""
    if state < 0:
        return set()
    if not automaton.has_counters:
        return set(np.flatnonzero(automaton.next_SC[state, automaton.class_V] >= 0).tolist())
    return {token for token in range(len(automaton.class_V)) if automaton.after(state, token) >= 0}


def is_over(automaton: Automaton, state: int) -> bool:
    """Whether the text is over in a state, with whatever counters."""
    return bool(automaton.stops_S[state & STATE_MASK])


def random_text(
    automaton: Automaton, pieces: Sequence[bytes], draw: random.Random, most: int = 5000
) -> bytes:
    """Allowed tokens drawn at random until only the end may come, or it is drawn."""
    state, text = 0, b""
    for _ in range(most):
        if is_over(automaton, state):
            return text
        token = draw.choice(sorted(allowed_ids(automaton, state)))
        if token == END:
            return text
        text += pieces[token]
        state = state_after(automaton, [token], state)
    raise AssertionError(f"no end after {most} tokens: {text[:200]!r}")
