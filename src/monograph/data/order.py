"""The order in which rows are visited: a stateless keyed permutation per epoch, so any position is found at once."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: the increment of splitmix64

UInt64 = NDArray[np.uint64]


def rows_at(start: int, count: int, rows: int, seed: int) -> NDArray[np.int64]:
    """The row visited at each of the positions start .. start + count - 1 of an endless sequence of epochs.

    Position p is in epoch e = p // rows, and its row is P_{seed,e}(p mod rows), where P_{seed,e} is a permutation of
    0..rows-1. The result depends on nothing else: not on how positions are grouped into updates, nor on earlier calls.
    Checkpoints rely on it, so the arithmetic below is part of their format.

    P is a Feistel network over pairs (left, right) with left < a = ceil(sqrt(rows)) and right < b = ceil(rows / a),
    whose halves are changed in turn by adding a keyed hash of the other half (Black and Rogaway 2002, "Ciphers with
    Arbitrary Finite Domains", the generalised Feistel cipher with cycle walking; the hash is splitmix64's finaliser).

    Args:
        start: first position, >= 0.
        count: number of positions.
        rows: rows per epoch, >= 1.
        seed: any integer.

    Returns:
        int64 [count].
    """
    positions = np.arange(start, start + count, dtype=np.uint64)
    epochs, index = np.divmod(positions, np.uint64(rows))
    keys = _mix(_mix(np.full(1, seed % 2**64, dtype=np.uint64)) + epochs)
    left_size = math.isqrt(rows - 1) + 1
    right_size = -(-rows // left_size)
    result = _feistel(index, keys, left_size, right_size)
    # At most sqrt(rows) of the a·b pairs lie outside; walking on from one of them ends inside, and keeps the map one to
    # one.
    while (outside := np.flatnonzero(result >= rows)).size:
        result[outside] = _feistel(result[outside], keys[outside], left_size, right_size)
    return result.astype(np.int64)


def _feistel(index: UInt64, keys: UInt64, left_size: int, right_size: int) -> UInt64:
    a, b = np.uint64(left_size), np.uint64(right_size)
    left, right = np.divmod(index, b)
    for number in range(_ROUNDS):
        round_keys = keys + np.full(1, number, dtype=np.uint64) * _GOLDEN
        if number % 2 == 0:
            left = (left + _mix(round_keys ^ _mix(right)) % a) % a
        else:
            right = (right + _mix(round_keys ^ _mix(left)) % b) % b
    return left * b + right


def _mix(value: UInt64) -> UInt64:
    """One step of splitmix64 (Steele, Lea, Flood 2014): a bijection of 64-bit words that spreads every bit."""
    value = value + _GOLDEN
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
