"""Cuts documents into pieces and packs the pieces into rows.

Shape suffixes: D documents, P pieces, R rows, T positions of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class Plan:
    """Which piece stands where.

    Attributes:
        starts: int64 [P], index in the shard of each piece's first input token; pieces of one row are adjacent, rows in
            order.
        lengths: int64 [P], inputs (= targets) of each piece, 1..T.
        offsets: int64 [R + 1], row r has the pieces offsets[r] .. offsets[r+1]-1.
        sequence_length: T.
    """

    starts: Int64
    lengths: Int64
    offsets: Int64
    sequence_length: int

    @property
    def rows(self) -> int:
        """R."""
        return len(self.offsets) - 1

    @property
    def filled(self) -> float:
        """Share of the R·T positions that hold an input; 0 without rows."""
        return float(self.lengths.sum()) / max(1, self.rows * self.sequence_length)


def plan_rows(document_starts: Int64, sequence_length: int, packed: bool) -> Plan:
    """Cut every document into pieces and give each piece a row.

    A document of n tokens has n - 1 (input, target) pairs. Piece k of it has the inputs k·T .. min((k+1)·T, n-1)-1 and
    as targets the tokens one further on, so neighbouring pieces share one token and every token but the first is a
    target exactly once.

    Args:
        document_starts: int64 [D + 1], document d is tokens document_starts[d] .. document_starts[d+1]-1 of the shard,
            at least 2 each.
        sequence_length: T.
        packed: several pieces to a row by best fit decreasing; else one.
    """
    pairs_D = np.diff(document_starts) - 1
    pieces_D = -(-pairs_D // sequence_length)
    document_P = np.repeat(np.arange(len(pairs_D)), pieces_D)
    first_P = (np.cumsum(pieces_D) - pieces_D)[document_P]
    begin_P = (np.arange(len(document_P)) - first_P) * sequence_length
    starts_P = document_starts[:-1][document_P] + begin_P
    lengths_P = np.minimum(sequence_length, pairs_D[document_P] - begin_P)
    if not packed:
        return Plan(starts_P, lengths_P, np.arange(len(starts_P) + 1), sequence_length)
    row_P = best_fit_decreasing(lengths_P, sequence_length)
    order_P = np.argsort(row_P, kind="stable")
    offsets_R = np.concatenate([[0], np.cumsum(np.bincount(row_P))]).astype(np.int64)
    return Plan(starts_P[order_P], lengths_P[order_P], offsets_R, sequence_length)


def best_fit_decreasing(lengths: Int64, capacity: int) -> Int64:
    """The row of each piece: by decreasing length, each goes into the fullest row that still has room for it.

    Pieces of one length are placed together: a row with room c takes floor(c / length) of them before another row is
    the best fit. So the work is O(P) numpy plus a loop over at most a few times `capacity` (length, room) pairs, and a
    million pieces take well under a second.

    Args:
        lengths: int64 [P], 1..capacity.
        capacity: T.

    Returns:
        int64 [P], rows numbered from 0 without gaps.
    """
    row_P = np.empty(len(lengths), dtype=np.int64)
    by_length = np.argsort(-lengths, kind="stable")
    ends = np.cumsum(np.bincount(capacity - lengths, minlength=capacity + 1))
    rooms = _OpenRows(capacity)
    begin = 0
    for length, end in zip(range(capacity, 0, -1), ends.tolist(), strict=False):
        pieces = by_length[begin:end]
        begin = end
        while len(pieces):
            room, rows = rooms.take(length, len(pieces))
            each = room // length
            placed = min(len(pieces), each * len(rows))
            row_P[pieces[:placed]] = np.repeat(rows, each)[:placed]
            pieces = pieces[placed:]
            full = placed // each
            rooms.put(room - each * length, rows[:full])
            if full < len(rows):
                rooms.put(room - (placed - full * each) * length, rows[full:])
    return row_P


class _OpenRows:
    """Rows that still have room, by room; `_nonempty` has bit c set where rows with room c exist."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._by_room: dict[int, list[Int64]] = {}
        self._nonempty = 0
        self._count = 0

    def put(self, room: int, rows: Int64) -> None:
        if room and len(rows):
            self._by_room.setdefault(room, []).append(rows)
            self._nonempty |= 1 << room

    def take(self, length: int, pieces: int) -> tuple[int, Int64]:
        """The smallest room >= length that some row has, and as many such rows as the pieces fill; else new rows."""
        fitting = self._nonempty >> length
        if not fitting:
            needed = -(-pieces // (self._capacity // length))
            self._count += needed
            return self._capacity, np.arange(self._count - needed, self._count)
        room = length + (fitting & -fitting).bit_length() - 1
        rows = np.concatenate(self._by_room.pop(room))
        self._nonempty ^= 1 << room
        needed = -(-pieces // (room // length))
        self.put(room, rows[needed:])
        return room, rows[:needed]
