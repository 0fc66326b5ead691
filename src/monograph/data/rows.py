"""Arrange one side of a corpus as rows of T positions: the contents of each row, and the order of
visits.

The order is a keyed permutation for each epoch, without state, so that the row at any position is
computed directly.

Shape suffixes: D documents, P pieces, R rows, T positions of a row, N inputs of all requested
pieces, S shares.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from monograph.data.pack import Packing, plan_rows
from monograph.data.store import Side
from monograph.text.tokenizer import Tokenizer

_ROUNDS = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: the increment of splitmix64

UInt64 = NDArray[np.uint64]


class Share(NamedTuple):
    """A run of consecutive rows with one weight, and how many visits an epoch makes to them."""

    rows: int
    visits: int


def share(rows: int, weight: float) -> Share:
    """Return a share with rows · weight visits, rounded, at least one; with weight 1/2, epochs
    alternate two halves.
    """
    return Share(rows, max(1, round(rows * weight)) if rows else 0)


def shares_at(start: int, count: int, shares: Sequence[Share], seed: int) -> NDArray[np.int64]:
    """Return the row visited at each of the positions start .. start + count - 1 of an endless
    sequence of epochs.

    An epoch has V visits, the sum over all shares. Position p is in epoch e = p // V, where
    P_{seed,e} is a permutation of 0..V-1 (see `rows_at`), and P_{seed,e}(p mod V) says which share
    is visited, and that this is the j-th of the epoch's v visits to this share. The visits to a
    share with n rows are numbered through all epochs, q = e·v + j, and go through its rows again
    and again: visit q is to row P_{seed',q // n}(q mod n). If v is a multiple of n, every epoch
    sees every row equally often, and visit q is simply to row q mod n. Either way, the n visits
    from any multiple of n on see every row exactly once.

    Returns:
        int64 [count]; the rows of the first share are numbered from 0, followed by those of the
        next.
    """
    visits_S = np.array([share.visits for share in shares], dtype=np.int64)
    visits = int(visits_S.sum())
    turn = rows_at(start, count, visits, seed)
    epoch = np.arange(start, start + count, dtype=np.int64) // visits
    ends_S = np.cumsum(visits_S)
    which = np.searchsorted(ends_S, turn, side="right")
    result = np.empty(count, dtype=np.int64)
    first_row = 0
    for number, share in enumerate(shares):
        mine = np.flatnonzero(which == number)
        visit = epoch[mine] * share.visits + turn[mine] - (ends_S[number] - share.visits)
        if share.visits and share.visits % share.rows:
            own = _mix(
                _mix(np.full(1, seed % 2**64, dtype=np.uint64))
                + np.full(1, number + 1, np.uint64) * _GOLDEN
            )
            row = _permuted(visit.astype(np.uint64), share.rows, own)
        else:
            row = visit % max(1, share.rows)
        result[mine] = first_row + row
        first_row += share.rows
    return result


def rows_at(start: int, count: int, rows: int, seed: int) -> NDArray[np.int64]:
    """Return the row visited at each of the positions start .. start + count - 1, where an epoch
    sees every row once.

    Position p is in epoch e = p // rows, and its row is P_{seed,e}(p mod rows), where P_{seed,e} is
    a permutation of 0..rows-1. The result depends on nothing else: not on how positions are grouped
    into updates, nor on earlier calls. Checkpoints store only a position, so the arithmetic below
    is part of their format.

    P is a Feistel network over pairs (left, right) with left < a = ceil(sqrt(rows)) and right < b =
    ceil(rows / a), whose halves are changed in turn by adding a keyed hash of the other half (Black
    and Rogaway 2002, "Ciphers with Arbitrary Finite Domains", the generalised Feistel cipher with
    cycle walking; the hash is splitmix64's finaliser).

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
    # At most sqrt(rows) of the a·b pairs are not rows. Applying the network again until the result
    # is a row keeps the map one-to-one.
    while (outside := np.flatnonzero(result >= rows)).size:
        result[outside] = _feistel(result[outside], keys[outside], left_size, right_size)
    return result.astype(np.int64)


def _feistel(index: UInt64, keys: UInt64, left_size: int, right_size: int) -> UInt64:
    a = np.uint64(left_size)
    b = np.uint64(right_size)
    left, right = np.divmod(index, b)
    for number in range(_ROUNDS):
        round_keys = keys + np.full(1, number, dtype=np.uint64) * _GOLDEN
        if number % 2 == 0:
            left = (left + _mix(round_keys ^ _mix(right)) % a) % a
        else:
            right = (right + _mix(round_keys ^ _mix(left)) % b) % b
    return left * b + right


def _mix(value: UInt64) -> UInt64:
    """Apply one step of splitmix64 (Steele, Lea, Flood 2014): a bijection of 64-bit words that
    spreads every bit.
    """
    value = value + _GOLDEN
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


if TYPE_CHECKING:
    from monograph.data.batches import Batch

IGNORE = -100  # torch's ignore_index marks a position without a target

Int64 = NDArray[np.int64]


class Piece(NamedTuple):
    """A stretch of a document in a row: `length` inputs from token `begin` on; the document has
    `tokens` tokens.
    """

    document: str
    begin: int
    length: int
    tokens: int


class Rows:
    """The rows of one side of the split; `len(rows)` is their number.

    Attributes:
        sequence_length: T.
        packed: whether a row may hold several pieces; if so, batches have the keys `segments` and
            `positions`.
        shares: the runs of rows with one weight, and their visits in an epoch.
        inputs: number of inputs: all tokens except each document's last.
        tokens: number of targets: all tokens except each document's first; with conversations, the
            trained tokens.
        bytes: bytes of the text that these targets stand for; bits per byte = sum of losses / ln 2
            / bytes.
        documents: number of documents; with conversations, number of
            `monograph.data.loss_mask.Row`s.
        conversations: number of conversations, 0 for texts.
        filled: share of all positions that hold an input.
    """

    def __init__(
        self,
        side: Side,
        tokenizer: Tokenizer,
        sequence_length: int,
        packed: bool,
        weights: Sequence[float] = (),
        folder: Path | None = None,
    ) -> None:
        """Cut a side's documents into rows.

        Args:
            side: the side's tokens.
            tokenizer: the tokenizer of these tokens.
            sequence_length: T.
            packed: whether a row may hold several pieces.
            weights: how often an epoch sees each file of the side; by default once.
            folder: a folder for a large plan.
        """
        self._side, self._tokenizer = side, tokenizer
        parts = _parts(side, weights or [1.0] * len(side.files))
        self._plan: Packing = plan_rows(
            side.starts, sequence_length, packed, [count for count, _ in parts], folder
        )
        self.shares = [
            share(rows, weight) for rows, (_, weight) in zip(self._plan.rows, parts, strict=True)
        ]
        self.sequence_length, self.packed = sequence_length, packed
        self.documents = len(side.starts) - 1
        self.conversations = side.conversations
        self.inputs = len(side.tokens) - self.documents
        self.tokens = self.inputs if side.answers is None else int(np.diff(side.answers)[::2].sum())
        self.bytes = side.bytes
        self.filled = self._plan.filled

    def __len__(self) -> int:
        """Return the number of different rows."""
        return len(self._plan.offsets) - 1

    @property
    def per_epoch(self) -> int:
        """Return the number of visits in an epoch: one to each row, if all weights are 1."""
        return sum(share.visits for share in self.shares)

    def row(self, index: int) -> dict[str, Int64]:
        """Return one row as arrays [T] under the keys of `window`."""
        return {key: values[0] for key, values in self.window(np.array([index])).items()}

    def window(self, indices_R: Int64) -> dict[str, Int64]:
        """Return the rows with these indices.

        Returns:
            int64 [R, T] under each key: `tokens`, the input ids; `targets`, the id to predict at
            each position, or -100 where there is none; and for packed rows `segments`, 1, 2, 3...
            for the pieces of the row and 0 for padding, and `positions`, counted from 0 in each
            piece.
        """
        plan = self._plan
        pieces_R = plan.offsets[indices_R + 1] - plan.offsets[indices_R]
        row_P = np.repeat(np.arange(len(indices_R)), pieces_R)
        ordinal_P = _ordinals(pieces_R)
        piece_P = plan.offsets[indices_R][row_P] + ordinal_P
        lengths_P = plan.lengths[piece_P]
        before_P = np.cumsum(lengths_P) - lengths_P
        first_P = np.arange(len(row_P)) - ordinal_P
        column_P = before_P - before_P[first_P]
        positions_N = _ordinals(lengths_P)
        place_N = np.repeat(row_P * self.sequence_length + column_P, lengths_P) + positions_N
        source_N = np.repeat(plan.starts[piece_P], lengths_P) + positions_N
        contents = {"tokens": self._side.tokens[source_N], "targets": self._targets(source_N + 1)}
        if self.packed:
            contents |= {"segments": np.repeat(ordinal_P + 1, lengths_P), "positions": positions_N}
        window = self.empty(len(indices_R))
        for key, values_N in contents.items():
            window[key].reshape(-1)[place_N] = values_N
        return window

    def _targets(self, index_N: Int64) -> NDArray[Any]:
        """Return the tokens at these indices of the shard; in conversations, IGNORE outside the
        trained stretches.
        """
        targets_N = self._side.tokens[index_N]
        answers = self._side.answers
        if answers is None:
            return targets_N
        # `answers` has the rising begins and ends of stretches, and an index with an odd number of
        # them up to it is inside a stretch.
        trained_N = np.searchsorted(answers, index_N, side="right") % 2 == 1
        return np.where(trained_N, targets_N.astype(np.int64), IGNORE)

    def empty(self, count: int) -> dict[str, Int64]:
        """Return `count` rows of padding, in the form of `window`."""
        padding = {"tokens": self._tokenizer.pad_id, "targets": IGNORE}
        if self.packed:
            padding |= {"segments": 0, "positions": 0}
        return {
            key: np.full((count, self.sequence_length), value, dtype=np.int64)
            for key, value in padding.items()
        }

    def pieces(self, index: int) -> list[Piece]:
        """Return the pieces of one row, in order."""
        begin, end = self._plan.offsets[index], self._plan.offsets[index + 1]
        pieces = []
        for start, length in zip(
            self._plan.starts[begin:end], self._plan.lengths[begin:end], strict=True
        ):
            document = int(np.searchsorted(self._side.starts, start, side="right")) - 1
            first, last = self._side.starts[document : document + 2].tolist()
            pieces.append(
                Piece(self._side.name(document), int(start) - first, int(length), last - first)
            )
        return pieces

    def owners(self, indices_R: Int64) -> Int64:
        """Return the index of the document at each position, or -1 at padding, int64 [R, T]."""
        owner_RT = np.full((len(indices_R), self.sequence_length), -1, dtype=np.int64)
        for row, index in enumerate(indices_R):
            begin, end = self._plan.offsets[index], self._plan.offsets[index + 1]
            documents = (
                np.searchsorted(self._side.starts, self._plan.starts[begin:end], side="right") - 1
            )
            lengths = self._plan.lengths[begin:end]
            owner_RT[row, : lengths.sum()] = np.repeat(documents, lengths)
        return owner_RT

    def bytes_of(self, window: Mapping[str, Int64]) -> int:
        """Return the bytes of text that a window's targets stand for; the end of a document stands
        for none.
        """
        targets, before = (
            window[key][window["targets"] != IGNORE] for key in ("targets", "tokens")
        )
        return self._tokenizer.bytes_of(targets, before)

    def texts(self) -> Iterator[bytes]:
        """Yield the UTF-8 bytes of each document, decoded from its tokens: the text as the
        tokenizer reads it.
        """
        for document in range(self.documents):
            first, last = self._side.starts[document : document + 2].tolist()
            yield self._tokenizer.decode_bytes(self._side.tokens[first:last].tolist())

    def answer_ends(self) -> dict[int, int]:
        """Return {id: number of conversations' answers that end with it}, the most frequent first."""
        assert self._side.answers is not None
        ends, counts = np.unique(
            self._side.tokens[self._side.answers[1::2] - 1], return_counts=True
        )
        return {
            int(ends[answer]): int(counts[answer]) for answer in np.argsort(-counts, kind="stable")
        }

    def first_prompt(self) -> list[int]:
        """Return the ids of the first conversation up to where its first answer begins."""
        assert self._side.answers is not None
        ids: list[int] = self._side.tokens[: self._side.answers[0]].tolist()
        return ids

    def in_order(self, batch_rows: int, limit: int | None = None) -> "Iterator[Batch]":
        """Yield every row once, or `limit` evenly spaced rows, in batches of `batch_rows` rows.

        Empty rows fill up the last batch to the same shape.
        """
        # Importing torch takes seconds, and only training needs it here.
        from monograph.data.batches import in_order

        return in_order(self, self.spread(limit), batch_rows)

    def spread(self, limit: int | None = None) -> Int64:
        """Return the indices of all rows, or of `limit` evenly spaced ones."""
        count = len(self) if limit is None else min(limit, len(self))
        return np.arange(count) * len(self) // max(1, count)

    def coverage(self, limit: int | None = None) -> tuple[int, int]:
        """Return the number of targets in the rows that `in_order` yields, and the bytes that these
        stand for.
        """
        if limit is None or limit >= len(self):
            return self.tokens, self.bytes
        window = self.window(self.spread(limit))
        return int((window["targets"] != IGNORE).sum()), self.bytes_of(window)


def _parts(side: Side, weights: Sequence[float]) -> list[tuple[int, float]]:
    """Return (number of documents, weight) of each run of consecutive files with one weight."""
    runs = itertools.groupby(range(len(weights)), key=weights.__getitem__)
    ends = [(list(files)[-1] + 1, weight) for weight, files in runs]
    firsts = side.first[[0, *(end for end, _ in ends)]]
    return [(int(count), weight) for count, (_, weight) in zip(np.diff(firsts), ends, strict=True)]


def _ordinals(counts: Int64) -> Int64:
    """Return 0 .. counts[0]-1, 0 .. counts[1]-1, ... as one array."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
