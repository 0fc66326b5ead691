"""Cut documents into pieces and pack the pieces into rows.

Shape suffixes: D documents, P pieces, R rows, T positions of a row.
"""

import mmap
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]


# Number of pieces packed at a time, so that memory does not grow with the text; more pieces would
# not fill rows better.
BLOCK_PIECES = 1 << 18


class Packing(NamedTuple):
    """The place of each piece in the rows.

    Attributes:
        starts: int64 [P], index in the shard of each piece's first input token; the pieces of a row
            are adjacent, rows in order.
        lengths: int64 [P], inputs (= targets) of each piece, 1..T.
        offsets: int64 [R + 1]; row r has the pieces offsets[r] .. offsets[r+1]-1.
        rows: number of rows of each part of the documents; parts share no row.
        filled: share of the R·T positions that hold an input; 0 if there are no rows.
    """

    starts: Int64
    lengths: Int64
    offsets: Int64
    rows: tuple[int, ...]
    filled: float


def plan_rows(
    document_starts: Int64,
    sequence_length: int,
    packed: bool,
    parts: Sequence[int],
    folder: Path | None = None,
) -> Packing:
    """Cut every document into pieces and assign each piece to a row.

    A document of n tokens has n - 1 (input, target) pairs. Its piece k has the inputs k·T ..
    min((k+1)·T, n-1)-1 and as targets the tokens one position later, so neighbouring pieces share
    one token, and every token but the first is a target exactly once.

    Args:
        document_starts: int64 [D + 1]; document d has the tokens document_starts[d] ..
            document_starts[d+1]-1 of the shard, at least two.
        sequence_length: T.
        packed: whether to put several pieces into a row, by best fit decreasing among 262,144
            consecutive pieces at a time; otherwise each piece has its own row.
        parts: number of documents of each part, in order.
        folder: the folder for a large plan, which is stored in unnamed files that vanish with it.
    """
    rows_of_parts = []
    inputs = 0
    first = 0
    with _Column(folder) as starts, _Column(folder) as lengths, _Column(folder) as offsets:
        offsets.append(np.zeros(1, dtype=np.int64))
        for documents in parts:
            rows_before = offsets.count
            for starts_P, lengths_P in _pieces(
                document_starts[first : first + documents + 1], sequence_length
            ):
                ends_R = np.arange(1, len(starts_P) + 1)
                if packed:
                    row_P = best_fit_decreasing(lengths_P, sequence_length)
                    order_P = np.argsort(row_P, kind="stable")
                    ends_R = np.cumsum(np.bincount(row_P))
                    starts_P, lengths_P = starts_P[order_P], lengths_P[order_P]
                offsets.append(starts.count + ends_R)
                starts.append(starts_P)
                lengths.append(lengths_P)
                inputs += int(lengths_P.sum())
            rows_of_parts.append(offsets.count - rows_before)
            first += documents
        filled = inputs / max(1, (offsets.count - 1) * sequence_length)
        return Packing(
            starts.array(), lengths.array(), offsets.array(), tuple(rows_of_parts), filled
        )


def _pieces(document_starts: Int64, sequence_length: int) -> Iterator[tuple[Int64, Int64]]:
    """Yield (starts, lengths) of all pieces in order, at most BLOCK_PIECES at a time."""
    for begin in range(0, len(document_starts) - 1, BLOCK_PIECES):
        starts_D = document_starts[begin : begin + BLOCK_PIECES + 1]
        pairs_D = np.diff(starts_D) - 1
        ends_D = np.cumsum(-(-pairs_D // sequence_length))
        firsts_D = np.concatenate([[0], ends_D[:-1]])
        for piece in range(0, int(ends_D[-1]), BLOCK_PIECES):
            index_P = np.arange(piece, min(piece + BLOCK_PIECES, int(ends_D[-1])))
            document_P = np.searchsorted(ends_D, index_P, side="right")
            begin_P = (index_P - firsts_D[document_P]) * sequence_length
            yield (
                starts_D[document_P] + begin_P,
                np.minimum(sequence_length, pairs_D[document_P] - begin_P),
            )


class _Column(AbstractContextManager["_Column"]):
    """An int64 array that grows at its end; beyond BLOCK_PIECES items it is in a file, to bound
    memory.
    """

    def __init__(self, folder: Path | None) -> None:
        self.count = 0
        self._file = tempfile.SpooledTemporaryFile(
            max_size=8 * BLOCK_PIECES, dir=str(folder) if folder else None
        )

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, values: Int64) -> None:
        self.count += len(values)
        self._file.write(values.astype(np.int64).tobytes())

    def array(self) -> Int64:
        """Return the whole array, read-only."""
        if self.count <= BLOCK_PIECES:
            self._file.seek(0)
            return np.frombuffer(self._file.read(), dtype=np.int64)
        self._file.flush()
        # The mapping keeps the unnamed file alive after it is closed.
        return np.frombuffer(
            mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.int64
        )


def best_fit_decreasing(lengths: Int64, capacity: int) -> Int64:
    """Return the row of each piece; in falling order of length, a piece goes into the fullest row
    with room for it.

    Pieces of one length are placed together, as a row with room c takes floor(c / length) of them
    before another row is the best fit. So the work is O(P) in numpy plus a loop over at most a few
    times `capacity` (length, room) pairs, and a million pieces take well under a second.

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
            per_row = room // length
            placed = min(len(pieces), per_row * len(rows))
            row_P[pieces[:placed]] = np.repeat(rows, per_row)[:placed]
            pieces = pieces[placed:]
            full = placed // per_row
            rooms.put(room - per_row * length, rows[:full])
            if full < len(rows):
                rooms.put(room - (placed - full * per_row) * length, rows[full:])
    return row_P


class _OpenRows:
    """The rows that still have room, by room; bit c of `_nonempty` says whether there are rows with
    room c.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._by_room: dict[int, list[Int64]] = {}
        self._nonempty = self._count = 0

    def put(self, room: int, rows: Int64) -> None:
        if room and len(rows):
            self._by_room.setdefault(room, []).append(rows)
            self._nonempty |= 1 << room

    def take(self, length: int, pieces: int) -> tuple[int, Int64]:
        """Return the smallest room >= length, and as many rows with it as the pieces need; else new
        rows.
        """
        if not (fitting := self._nonempty >> length):
            needed = -(-pieces // (self._capacity // length))
            self._count += needed
            return self._capacity, np.arange(self._count - needed, self._count)
        room = length + (fitting & -fitting).bit_length() - 1
        rows = np.concatenate(self._by_room.pop(room))
        self._nonempty ^= 1 << room
        needed = -(-pieces // (room // length))
        self.put(room, rows[needed:])
        return room, rows[:needed]
