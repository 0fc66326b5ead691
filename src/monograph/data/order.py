"""The order in which rows are visited: a stateless keyed permutation per epoch, so any position is found at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: the increment of splitmix64

UInt64 = NDArray[np.uint64]


@dataclass(frozen=True)
class Share:
    """Some of the rows, and how many visits an epoch has for them: rows · weight, rounded, at least one."""

    rows: int
    visits: int


def share(rows: int, weight: float) -> Share:
    """The share of rows that an epoch sees `weight` times: 2 is each twice, 1/2 one half, another in every epoch."""
    return Share(rows, max(1, round(rows * weight)) if rows else 0)


def shares_at(start: int, count: int, shares: Sequence[Share], seed: int) -> NDArray[np.int64]:
    """The row visited at each of the positions start .. start + count - 1 of an endless sequence of epochs.

    An epoch has V = sum of all visits. Position p is in epoch e = p // V, and P_{seed,e}(p mod V), a permutation of
    0..V-1, says which share's turn it is, and that it is the j-th of this epoch's v visits to it. A share with n rows
    counts its visits through all epochs, q = e·v + j, and goes through its rows again and again: visit q is to row
    P_{seed',q // n}(q mod n), or to row q mod n itself where v is a multiple of n and so every epoch sees all alike.
    So between any visit that is a multiple of n and the next, every row is seen exactly once.

    Returns:
        int64 [count], the rows of the first share from 0, then those of the next.
    """
    visits_S = np.array([each.visits for each in shares], dtype=np.int64)
    visits = int(visits_S.sum())
    turn = rows_at(start, count, visits, seed)
    epoch = np.arange(start, start + count, dtype=np.int64) // visits
    ends_S = np.cumsum(visits_S)
    which = np.searchsorted(ends_S, turn, side="right")
    result = np.empty(count, dtype=np.int64)
    first_row = 0
    for number, each in enumerate(shares):
        mine = np.flatnonzero(which == number)
        visit = epoch[mine] * each.visits + turn[mine] - (ends_S[number] - each.visits)
        if each.visits and each.visits % each.rows:
            own = _mix(_mix(np.full(1, seed % 2**64, dtype=np.uint64)) + np.full(1, number + 1, np.uint64) * _GOLDEN)
            row = _permuted(visit.astype(np.uint64), each.rows, own)
        else:
            row = visit % max(1, each.rows)
        result[mine] = first_row + row
        first_row += each.rows
    return result


def rows_at(start: int, count: int, rows: int, seed: int) -> NDArray[np.int64]:
    """The row visited at each of the positions start .. start + count - 1, where an epoch sees every row once.

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
    return _permuted(positions, rows, _mix(np.full(1, seed % 2**64, dtype=np.uint64)))


def _permuted(positions: UInt64, rows: int, seed: UInt64) -> NDArray[np.int64]:
    epochs, index = np.divmod(positions, np.uint64(rows))
    keys = _mix(seed + epochs)
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
