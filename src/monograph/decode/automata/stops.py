"""Stop strings as one automaton over bytes: where in any of them the text stands (Aho and Corasick 1975)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from monograph.decode.automata.dfa import ByteAutomaton
from monograph.errors import InputRefused

MAX_BYTES = 4_096  # of all stop strings together


def searching(strings: Sequence[bytes]) -> ByteAutomaton:
    """An automaton that accepts every text in which one of the strings occurs, and stays accepting from there.

    A state is the longest beginning of a string with which the text so far ends; one in which a string has occurred is
    never left.

    Raises:
        InputRefused: no string, an empty one, or more than MAX_BYTES bytes of them.
    """
    if not strings or not all(strings):
        raise InputRefused("an empty stop string would end every text at once: give at least one character")
    if sum(map(len, strings)) > MAX_BYTES:
        raise InputRefused(
            f"the stop strings have {sum(map(len, strings)):,} bytes; at most {MAX_BYTES:,} are searched"
        )
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
    shorter = [0] * len(children)  # per state the next shorter beginning with which its text ends
    for node in (queue := [0]):
        if node in ends or shorter[node] in ends:
            ends.add(node)
            next_SK[node] = node  # it has occurred, whatever comes
            continue
        next_SK[node] = next_SK[shorter[node]]
        for byte, child in children[node].items():
            shorter[child] = int(next_SK[shorter[node], byte]) if node else 0
            next_SK[node, byte] = child
            queue.append(child)
    return ByteAutomaton(next_SK, np.arange(256, dtype=np.uint8), np.isin(np.arange(len(children)), list(ends)))
