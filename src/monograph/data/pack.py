"""Cut documents into pieces and pack the pieces into rows.

Shape suffixes: D documents, P pieces, R rows, T positions of a row.
"""

import math
import mmap
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]


# The number of pieces that are packed at a time. A limit keeps memory from growing with the text, and
# a larger one would not fill rows better.
BLOCK_PIECES = 1 << 18


class Packing(NamedTuple):
    """The place of each piece in the rows.

    Attributes:
        starts: int64 [P], the index in the shard of each piece's first input token. Pieces are sorted
            by row.
        lengths: int64 [P], the number of inputs of each piece, 1..T.
        offsets: int64 [R + 1]; row r has the pieces offsets[r] .. offsets[r+1]-1.
        rows: the number of rows of each part of the documents. No row has pieces of two parts.
        filled: share of the R·T positions that have an input; 0 if there are no rows.
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

    A document of n tokens has n - 1 pairs of an input and a target. Its piece k has the inputs k·T ..
    min((k+1)·T, n-1)-1, and the targets are the tokens one position later. So neighbouring pieces
    share one token, and every token except the first is a target exactly once.

    Args:
        document_starts: int64 [D + 1]; document d has the tokens document_starts[d] ..
            document_starts[d+1]-1 of the shard, which are at least two.
        sequence_length: T.
        packed: whether to put several pieces into a row, by best fit decreasing among BLOCK_PIECES
            consecutive pieces at a time; otherwise each piece has its own row.
        parts: the number of documents of each part, in order.
        folder: the folder for a large plan, which is in unnamed files that vanish with the plan;
            None: the folder for temporary files.
    """
    part_rows = []
    inputs = 0
    first_document = 0
    with _Column(folder) as starts, _Column(folder) as lengths, _Column(folder) as offsets:
        offsets.append(np.zeros(1, dtype=np.int64))
        for documents in parts:
            offsets_before = offsets.count
            part_starts = document_starts[first_document : first_document + documents + 1]
            for starts_P, lengths_P in _pieces(part_starts, sequence_length):
                ends_R = np.arange(1, len(starts_P) + 1)
                if packed:
                    row_P = best_fit_decreasing(lengths_P, sequence_length)
                    order_P = np.argsort(row_P, kind="stable")
                    ends_R = np.cumsum(np.bincount(row_P))
                    starts_P = starts_P[order_P]
                    lengths_P = lengths_P[order_P]
                # `starts.count` is still the number of the pieces before these.
                offsets.append(starts.count + ends_R)
                starts.append(starts_P)
                lengths.append(lengths_P)
                inputs += int(lengths_P.sum())
            part_rows.append(offsets.count - offsets_before)
            first_document += documents
        rows = offsets.count - 1
        return Packing(
            starts=starts.array(),
            lengths=lengths.array(),
            offsets=offsets.array(),
            rows=tuple(part_rows),
            filled=inputs / max(1, rows * sequence_length),
        )


def _pieces(document_starts: Int64, sequence_length: int) -> Iterator[tuple[Int64, Int64]]:
    """Yield (starts, lengths) of all pieces in order, at most BLOCK_PIECES at a time."""
    for begin in range(0, len(document_starts) - 1, BLOCK_PIECES):
        starts_D = document_starts[begin : begin + BLOCK_PIECES + 1]
        inputs_D = np.diff(starts_D) - 1
        pieces_D = -(-inputs_D // sequence_length)  # rounded up
        piece_ends_D = np.cumsum(pieces_D)
        first_pieces_D = np.concatenate([[0], piece_ends_D[:-1]])
        total_pieces = int(piece_ends_D[-1])
        for first_piece in range(0, total_pieces, BLOCK_PIECES):
            piece_P = np.arange(first_piece, min(first_piece + BLOCK_PIECES, total_pieces))
            document_P = np.searchsorted(piece_ends_D, piece_P, side="right")
            begin_P = (piece_P - first_pieces_D[document_P]) * sequence_length
            lengths_P = np.minimum(sequence_length, inputs_D[document_P] - begin_P)
            yield starts_D[document_P] + begin_P, lengths_P


class _Column(AbstractContextManager["_Column"]):
    """An int64 array that grows at its end.

    An array of more than BLOCK_PIECES items is in a file, to limit memory.
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
        # The mapping keeps the unnamed file alive after `__exit__` closes it.
        mapping = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        return np.frombuffer(mapping, dtype=np.int64)


def best_fit_decreasing(lengths: Int64, capacity: int) -> Int64:
    """Return the row of each piece, where the longest piece is placed first.

    Each piece goes into the fullest row that has room for it. Pieces of one length are placed
    together, because a row with room c takes floor(c / length) of them before another row is the
    best fit. So the work is O(P) in numpy, and a loop over pairs of a length and a room, whose number
    is at most a few times `capacity`. A million pieces take well under a second.

    Args:
        lengths: int64 [P], 1..capacity.
        capacity: T.

    Returns:
        int64 [P], rows numbered from 0 without gaps.
    """
    row_P = np.empty(len(lengths), dtype=np.int64)
    by_length = np.argsort(-lengths, kind="stable")
    # The ends, in `by_length`, of the pieces of each length from `capacity` down.
    ends = np.cumsum(np.bincount(capacity - lengths, minlength=capacity + 1))
    open_rows = _OpenRows(capacity)
    begin = 0
    # `ends` also has the length 0, of which there are no pieces.
    for length, end in zip(range(capacity, 0, -1), ends.tolist(), strict=False):
        pieces = by_length[begin:end]
        begin = end
        while len(pieces):
            room, rows = open_rows.take(length, len(pieces))
            per_row = room // length
            placed = min(len(pieces), per_row * len(rows))
            row_P[pieces[:placed]] = np.repeat(rows, per_row)[:placed]
            pieces = pieces[placed:]
            # `full_rows` rows took `per_row` pieces each. The last row may have taken fewer.
            full_rows = placed // per_row
            open_rows.put(room - per_row * length, rows[:full_rows])
            if full_rows < len(rows):
                in_last_row = placed - full_rows * per_row
                open_rows.put(room - in_last_row * length, rows[full_rows:])
    return row_P


class _OpenRows:
    """The rows that still have room."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._by_room: dict[int, list[Int64]] = {}
        # Bit c is 1 if there are rows with room c.
        self._nonempty = 0
        # The number of rows, with those that are full.
        self._count = 0

    def put(self, room: int, rows: Int64) -> None:
        """Add rows with this room, unless they are full."""
        if room and len(rows):
            self._by_room.setdefault(room, []).append(rows)
            self._nonempty |= 1 << room

    def take(self, length: int, pieces: int) -> tuple[int, Int64]:
        """Remove and return the fullest rows that have room for a piece of this length.

        The rows have the same room, and are at most as many as the pieces need. If no row has enough
        room, they are new.

        Returns:
            The room of each row.
            The rows.
        """
        # Bit c is 1 if there are rows with room length + c.
        fitting = self._nonempty >> length
        if not fitting:
            needed = math.ceil(pieces / (self._capacity // length))
            self._count += needed
            return self._capacity, np.arange(self._count - needed, self._count)
        lowest_bit = (fitting & -fitting).bit_length() - 1
        room = length + lowest_bit
        rows = np.concatenate(self._by_room.pop(room))
        self._nonempty ^= 1 << room
        needed = math.ceil(pieces / (room // length))
        self.put(room, rows[needed:])
        return room, rows[:needed]
