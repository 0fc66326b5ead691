"""Cut documents into pieces and pack the pieces into rows.

A *piece* is at most T consecutive tokens of one document. The documents are divided into *parts*, such
as those of one source. A row never has pieces of two parts, because an epoch may see the rows of one
part more often than those of another.

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

# The largest number of pieces that are packed at a time. With this limit, memory does not grow with the
# text. A larger limit would not fill rows better.
BLOCK_PIECES = 1 << 18


class Packing(NamedTuple):
    """The place of each piece in the rows.

    Attributes:
        starts: int64 [P], the index of each piece's first input in the shard, which is the array of
            all tokens. Pieces are sorted by row.
        lengths: int64 [P], the number of inputs of each piece, 1..T.
        offsets: int64 [R + 1]; row r has the pieces offsets[r] .. offsets[r+1]-1.
        part_rows: the number of rows of each part.
        filled_share: share of the R·T positions that have an input; 0 if there are no rows.
    """

    starts: Int64
    lengths: Int64
    offsets: Int64
    part_rows: tuple[int, ...]
    filled_share: float


def plan_rows(
    document_starts: Int64,
    sequence_length: int,
    packed: bool,
    part_documents: Sequence[int],
    folder: Path | None = None,
) -> Packing:
    """Cut every document into pieces and assign each piece to a row.

    In a document of n tokens, all tokens but the last are inputs, and the target of an input is the
    token after it. Piece k has the inputs k·T .. min((k+1)·T, n-1)-1. So a piece's last target is
    the first input of the next piece, and every token except the first is a target exactly once.

    Args:
        document_starts: int64 [D + 1]; document d has the tokens document_starts[d] ..
            document_starts[d+1]-1 of the shard, which are at least two.
        sequence_length: T.
        packed: whether to put several pieces into a row, by best fit decreasing among BLOCK_PIECES
            consecutive pieces at a time; otherwise each piece has its own row.
        part_documents: the number of documents of each part, in order.
        folder: a folder for the result's arrays. If they are large, they are kept there in files without a
            name, which vanish with the result. None: the system's folder for temporary files.
    """
    part_rows = []
    total_inputs = 0
    first_document = 0
    with (
        _GrowingArray(folder) as starts,
        _GrowingArray(folder) as lengths,
        _GrowingArray(folder) as offsets,
    ):
        offsets.append(np.zeros(1, dtype=np.int64))
        for documents in part_documents:
            rows_before = offsets.count - 1
            part_starts = document_starts[first_document : first_document + documents + 1]
            for starts_P, lengths_P in _pieces(part_starts, sequence_length):
                # These pieces are sorted by their rows. Then row r ends before piece ends_R[r].
                if packed:
                    row_P = best_fit_decreasing(lengths_P, sequence_length)
                    order_P = np.argsort(row_P, kind="stable")
                    starts_P = starts_P[order_P]
                    lengths_P = lengths_P[order_P]
                    ends_R = np.cumsum(np.bincount(row_P))
                else:
                    ends_R = np.arange(1, len(starts_P) + 1)
                # `starts.count` is the number of earlier pieces, because the new ones are added to
                # `starts` only below.
                offsets.append(starts.count + ends_R)
                starts.append(starts_P)
                lengths.append(lengths_P)
                total_inputs += int(lengths_P.sum())
            part_rows.append(offsets.count - 1 - rows_before)
            first_document += documents
        rows = offsets.count - 1
        return Packing(
            starts=starts.array(),
            lengths=lengths.array(),
            offsets=offsets.array(),
            part_rows=tuple(part_rows),
            filled_share=total_inputs / max(1, rows * sequence_length),
        )


def _pieces(document_starts: Int64, sequence_length: int) -> Iterator[tuple[Int64, Int64]]:
    """Yield (starts, lengths) of all pieces, at most BLOCK_PIECES pieces at a time.

    Starts and lengths are as in `Packing`, but in the order of the documents.
    """
    for first_document in range(0, len(document_starts) - 1, BLOCK_PIECES):
        # The start of each document of this block, and the end of the last one: [D + 1].
        starts = document_starts[first_document : first_document + BLOCK_PIECES + 1]
        inputs_D = np.diff(starts) - 1
        pieces_D = -(-inputs_D // sequence_length)  # rounded up
        # The pieces of the block are numbered from 0. Those of document d are piece_begins_D[d] ..
        # piece_ends_D[d]-1.
        piece_ends_D = np.cumsum(pieces_D)
        piece_begins_D = np.concatenate([[0], piece_ends_D[:-1]])
        total_pieces = int(piece_ends_D[-1])
        for first_piece in range(0, total_pieces, BLOCK_PIECES):
            piece_P = np.arange(first_piece, min(first_piece + BLOCK_PIECES, total_pieces))
            document_P = np.searchsorted(piece_ends_D, piece_P, side="right")
            # Where each piece begins in its document.
            begin_P = (piece_P - piece_begins_D[document_P]) * sequence_length
            lengths_P = np.minimum(sequence_length, inputs_D[document_P] - begin_P)
            yield starts[document_P] + begin_P, lengths_P


class _GrowingArray(AbstractContextManager["_GrowingArray"]):
    """An int64 array that grows at its end.

    An array of more than BLOCK_PIECES items is in a file, to limit memory.

    Attributes:
        count: the number of items so far.
    """

    def __init__(self, folder: Path | None) -> None:
        self.count = 0
        item_bytes = 8
        # A file that is in memory up to `max_size`, and on the disk beyond that.
        self._file = tempfile.SpooledTemporaryFile(
            max_size=item_bytes * BLOCK_PIECES, dir=str(folder) if folder else None
        )

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, values: Int64) -> None:
        """Add items at the end."""
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
    """Assign pieces to rows, the longest piece first, and return the row of each piece.

    Each piece goes into the fullest row that has room for it. Pieces of one length are placed
    together: a row with room c stays the best fit for them until it has taken floor(c / length). So
    the loop in Python has only a few times `capacity` rounds, and all work that grows with the number
    of pieces is numpy's. A million pieces take well under a second.

    Args:
        lengths: int64 [P], 1..capacity.
        capacity: the number of positions of a row, T.

    Returns:
        int64 [P], rows numbered from 0 without gaps.
    """
    row_P = np.empty(len(lengths), dtype=np.int64)
    longest_first_P = np.argsort(-lengths, kind="stable")
    # Where the pieces of each length end in `longest_first_P`, for the lengths capacity .. 0.
    ends = np.cumsum(np.bincount(capacity - lengths, minlength=capacity + 1))
    open_rows = _OpenRows(capacity)
    begin = 0
    # The last of `ends` is left out: it is for the length 0, which no piece has.
    for length, end in zip(range(capacity, 0, -1), ends[:-1].tolist(), strict=True):
        pieces = longest_first_P[begin:end]
        begin = end
        while len(pieces):
            room, rows = open_rows.take(length, len(pieces))
            pieces_per_row = room // length
            placed = min(len(pieces), pieces_per_row * len(rows))
            row_P[pieces[:placed]] = np.repeat(rows, pieces_per_row)[:placed]
            pieces = pieces[placed:]
            # All rows took `pieces_per_row` pieces, except that the last row may have taken fewer.
            complete_rows = placed // pieces_per_row
            open_rows.put(room - pieces_per_row * length, rows[:complete_rows])
            if complete_rows < len(rows):
                in_last_row = placed - complete_rows * pieces_per_row
                open_rows.put(room - in_last_row * length, rows[complete_rows:])
    return row_P


class _OpenRows:
    """The rows that still have room, by their room: the number of positions that are free."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._by_room: dict[int, list[Int64]] = {}
        # Bit c is 1 if there are rows with room c.
        self._room_bits = 0
        # The number of rows so far, including those that are full.
        self._row_count = 0

    def put(self, room: int, rows: Int64) -> None:
        """Add rows with this room, unless they are full."""
        if room and len(rows):
            self._by_room.setdefault(room, []).append(rows)
            self._room_bits |= 1 << room

    def take(self, length: int, pieces: int) -> tuple[int, Int64]:
        """Remove and return the fullest rows that have room for a piece of this length.

        All returned rows have the same room. They are as many as `pieces` pieces need, or fewer if
        there are fewer rows with this room. If no row has enough room, new rows are returned.

        Returns:
            The room of each row.
            The rows.
        """
        # Bit c is 1 if there are rows with room length + c.
        fitting_bits = self._room_bits >> length
        if not fitting_bits:
            needed = math.ceil(pieces / (self._capacity // length))
            self._row_count += needed
            return self._capacity, np.arange(self._row_count - needed, self._row_count)
        # The fullest rows are at the lowest bit that is 1. x & -x has only this bit of x.
        lowest_bit = (fitting_bits & -fitting_bits).bit_length() - 1
        room = length + lowest_bit
        rows = np.concatenate(self._by_room.pop(room))
        self._room_bits ^= 1 << room
        needed = math.ceil(pieces / (room // length))
        # This sets the bit again if rows are left over.
        self.put(room, rows[needed:])
        return room, rows[:needed]
