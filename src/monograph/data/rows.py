"""Arrange one side of a corpus as rows of T positions, and give the order in which rows are visited.

A corpus has two *sides*: the documents to train on and the held-out ones. A row has one or more
*pieces*, which are consecutive tokens of a document (`monograph.data.pack`).

The order is a permutation of the rows for each epoch, which follows from the seed and the epoch alone.
So there is no state to store, and the row at any position of the order can be computed directly. A
*visit* is one use of a row: if its source has a weight, an epoch may visit the row several times, or
not at all. A *share* is consecutive rows with the same weight.

Shape suffixes: P pieces, R rows, T positions of a row, N inputs of all requested pieces, S shares,
V visits to a share, L lengths of a piece from 0 to T.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from monograph.data.pack import Int64, Packing, plan_rows
from monograph.data.piece_lengths import PieceLengths
from monograph.data.store import Side
from monograph.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from monograph.data.batches import Batch

# The id under `targets` at positions without a target: torch's ignore_index.
IGNORE = -100
_ROUNDS = 8  # the number of rounds of the Feistel network in `_feistel`
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: the increment of splitmix64

# Sums and products of these numbers are meant to overflow. Single numbers are arrays of one element, because
# numpy warns if a scalar overflows, but not if an array does.
UInt64 = NDArray[np.uint64]


class RowShare(NamedTuple):
    """Consecutive rows with the same weight.

    Attributes:
        rows: number of rows.
        visits: number of visits that an epoch makes to these rows.
    """

    rows: int
    visits: int


def row_share(rows: int, weight: float) -> RowShare:
    """Return the share of rows that have a weight: an epoch makes round(rows · weight) visits to it.

    If there are rows, an epoch makes at least one visit. With the weight 1/2, for example, an epoch
    visits half of the rows, and the next epoch visits the others.
    """
    if rows == 0:
        return RowShare(0, 0)
    return RowShare(rows, max(1, round(rows * weight)))


def weighted_rows_at(
    start: int, count: int, shares: Sequence[RowShare], seed: int
) -> NDArray[np.int64]:
    """Return the row at each of the positions start .. start + count - 1 of an endless sequence of
    epochs.

    Position p leads to its row in two steps: p says which visit of the epoch it is, and the visit says
    which row of which share it uses.

    1. An epoch has W visits, the sum over all shares. Position p is in epoch e = p // W. This epoch
       has the permutation P_{seed,e} of 0 .. W - 1 (see `rows_at`), and position p is its visit
       P_{seed,e}(p mod W). The visits of an epoch are numbered share by share. So the number of a
       visit says which share is visited, and that it is visit j of the v visits that this epoch makes
       to the share.
    2. The visits to a share with n rows are also numbered through all epochs, q = e·v + j. Visit q
       is to row P_{seed',q // n}(q mod n) of the share, where seed' depends on the share. But if v
       is a multiple of n, every epoch sees every row equally often, and visit q is simply to row
       q mod n. In both cases, n consecutive visits that begin at a multiple of n see every row
       exactly once.

    Args:
        start: first position, >= 0.
        count: number of positions.
        shares: the shares, at least one of which has rows.
        seed: any integer.

    Returns:
        int64 [count]; rows are numbered share by share.
    """
    visits_S = np.array([share.visits for share in shares], dtype=np.int64)
    visit_ends_S = np.cumsum(visits_S)
    epoch_visits = int(visits_S.sum())
    # The next three arrays have, for each position, its epoch, the number of its visit in the
    # epoch, and the index of its share.
    epochs = np.arange(start, start + count, dtype=np.int64) // epoch_visits
    visits = rows_at(start, count, epoch_visits, seed)
    share_indices = np.searchsorted(visit_ends_S, visits, side="right")
    mixed_seed = _mix(np.full(1, seed % 2**64, dtype=np.uint64))
    result = np.empty(count, dtype=np.int64)
    first_row = 0  # the share's first row, among the rows of all shares
    for index, share in enumerate(shares):
        if share.rows == 0:
            continue
        positions_V = np.flatnonzero(share_indices == index)
        first_visit = visit_ends_S[index] - share.visits
        # The number q of the docstring.
        visit_V = epochs[positions_V] * share.visits + visits[positions_V] - first_visit
        sees_rows_equally = share.visits % share.rows == 0
        if sees_rows_equally:
            row_V = visit_V % share.rows
        else:
            share_seed = _mix(mixed_seed + np.full(1, index + 1, np.uint64) * _GOLDEN)
            row_V = _permute(visit_V.astype(np.uint64), share.rows, share_seed)
        result[positions_V] = first_row + row_V
        first_row += share.rows
    return result


def rows_at(start: int, count: int, rows: int, seed: int) -> NDArray[np.int64]:
    """Return the row at each of the positions start .. start + count - 1, in an order in which each
    epoch sees every row once.

    Position p is in epoch e = p // rows, and its row is P_{seed,e}(p mod rows), where P_{seed,e} is
    a permutation of 0..rows-1. The row does not depend on earlier calls, or on how positions are
    grouped into updates. Checkpoints store only a position, so the arithmetic below must never change.

    P is a Feistel network, which maps a pair (left, right) to another pair in rounds. Row r is the
    pair with r = left·b + right, where left < a = ceil(sqrt(rows)) and right < b = ceil(rows / a).
    Each round adds to one half a hash of the other half and of a key, and the next round does so with
    the halves exchanged. The hash is splitmix64's finaliser.

    Source: Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains", the generalised Feistel
    cipher with cycle walking.

    Args:
        start: first position, >= 0.
        count: number of positions.
        rows: rows per epoch, >= 1.
        seed: any integer.

    Returns:
        int64 [count].
    """
    positions = np.arange(start, start + count, dtype=np.uint64)
    return _permute(positions, rows, _mix(np.full(1, seed % 2**64, dtype=np.uint64)))


def _permute(positions: UInt64, rows: int, seed: UInt64) -> NDArray[np.int64]:
    """Return the row at each position, as `rows_at` does.

    Args:
        positions: uint64 [count].
        rows: rows per epoch.
        seed: uint64 [1], the seed after `_mix`, which makes every bit depend on every bit.
    """
    epochs, index = np.divmod(positions, np.uint64(rows))
    keys = _mix(seed + epochs)
    left_size = math.isqrt(rows - 1) + 1
    right_size = -(-rows // left_size)  # rounded up
    result = _feistel(index, keys, left_size, right_size)
    # At most sqrt(rows) of the a·b pairs are not rows. If the result is such a pair, the network is
    # applied to it again, until the result is a row. This keeps the map one-to-one.
    outside = np.flatnonzero(result >= rows)
    while outside.size:
        result[outside] = _feistel(result[outside], keys[outside], left_size, right_size)
        outside = np.flatnonzero(result >= rows)
    return result.astype(np.int64)


def _feistel(index: UInt64, keys: UInt64, left_size: int, right_size: int) -> UInt64:
    """Map each index below left_size · right_size to another one, one-to-one for each key."""
    a = np.uint64(left_size)
    b = np.uint64(right_size)
    left, right = np.divmod(index, b)
    for round_index in range(_ROUNDS):
        round_keys = keys + np.full(1, round_index, dtype=np.uint64) * _GOLDEN
        if round_index % 2 == 0:
            left = (left + _mix(round_keys ^ _mix(right)) % a) % a
        else:
            right = (right + _mix(round_keys ^ _mix(left)) % b) % b
    return left * b + right


def _mix(value: UInt64) -> UInt64:
    """Apply one step of splitmix64, a one-to-one map in which each bit changes about half of all bits.

    Source: Steele, Lea and Flood 2014.
    """
    value = value + _GOLDEN
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


class DocumentPiece(NamedTuple):
    """Consecutive tokens of a document in a row.

    Attributes:
        document: the document's name.
        begin: index of the piece's first input in the document.
        length: number of inputs of the piece.
        document_tokens: number of tokens of the whole document.
    """

    document: str
    begin: int
    length: int
    document_tokens: int


class Rows:
    """The rows of one side of the held-out split; `len(rows)` is their number.

    Attributes:
        sequence_length: T.
        packed: whether a row may have several pieces. If so, batches have the keys `segments` and
            `positions`.
        shares: consecutive rows with the same weight, in order.
        documents: number of documents. A conversation is cut into one or more documents
            (`monograph.data.loss_mask.MaskedRow`).
        conversations: number of conversations, 0 for texts.
        inputs: number of inputs: all tokens except the last one of each document.
        tokens: number of *targets*: all tokens except the first one of each document; with
            conversations, only the tokens that are trained on.
        bytes: bytes of the text that the targets stand for. Bits per byte are (sum of losses) / ln
            2 / bytes.
        filled_share: share of all positions that have an input.
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
            packed: whether a row may have several pieces.
            weights: number of times that an epoch sees each file of the side; (): once each.
            folder: a folder for the plan of the rows if it is too large for memory; None: the folder
                for temporary files.
        """
        self._side = side
        self._tokenizer = tokenizer
        parts = _weighted_parts(side, weights or [1.0] * len(side.files))
        self._plan: Packing = plan_rows(
            side.starts, sequence_length, packed, [part.documents for part in parts], folder
        )
        self.shares = [
            row_share(rows, part.weight)
            for rows, part in zip(self._plan.part_rows, parts, strict=True)
        ]
        self.sequence_length = sequence_length
        self.packed = packed
        self.documents = len(side.starts) - 1
        self.conversations = side.conversations
        self.inputs = len(side.tokens) - self.documents
        if side.answers is None:
            self.tokens = self.inputs
        else:
            # `answers` is begin, end, begin, end ..., so every second difference is the length of an answer.
            self.tokens = int(np.diff(side.answers)[::2].sum())
        self.bytes = side.bytes
        self.filled_share = self._plan.filled_share

    def __len__(self) -> int:
        """Return the number of different rows."""
        return len(self._plan.offsets) - 1

    @property
    def per_epoch(self) -> int:
        """Return the number of visits in an epoch: one to each row, if all weights are 1."""
        return sum(share.visits for share in self.shares)

    @functools.cached_property
    def piece_lengths(self) -> PieceLengths:
        """Return the lengths of the pieces that an epoch visits, in the mean over many epochs."""
        return PieceLengths.of_counts(self._piece_visits())

    def _piece_visits(self) -> NDArray[np.float64]:
        """Return how often an epoch visits a piece of n tokens, for each n of 0 .. T."""
        visits_L = np.zeros(self.sequence_length + 1)
        first_row = 0
        for share in self.shares:
            end_row = first_row + share.rows
            lengths_P = self._plan.lengths[
                self._plan.offsets[first_row] : self._plan.offsets[end_row]
            ]
            pieces_L = np.bincount(lengths_P, minlength=self.sequence_length + 1)
            visits_L += pieces_L * (share.visits / max(1, share.rows))
            first_row = end_row
        return visits_L

    def row(self, index: int) -> dict[str, Int64]:
        """Return one row as arrays [T] under the keys of `window`."""
        return {key: values[0] for key, values in self.window(np.array([index])).items()}

    def window(self, indices_R: Int64) -> dict[str, Int64]:
        """Return the rows with these indices.

        Returns:
            int64 [R, T] under each key: `tokens`, the input ids; and `targets`, the id to predict
            at each position, or -100 where there is none. Packed rows also have `segments`, which
            are 1, 2, 3... for the pieces of a row and 0 for padding, and `positions`, which are
            counted from 0 in each piece.
        """
        plan = self._plan
        pieces_R = plan.offsets[indices_R + 1] - plan.offsets[indices_R]
        # For each piece of the window, in order: its row in the window, its number in the row, and
        # its index in the plan.
        row_P = np.repeat(np.arange(len(indices_R)), pieces_R)
        ordinal_P = _ordinals(pieces_R)
        piece_P = plan.offsets[indices_R][row_P] + ordinal_P
        lengths_P = plan.lengths[piece_P]
        # The column at which a piece begins in its row is the number of inputs in the row before it. That is
        # the number of inputs before the piece, less those before the first piece of its row, both counted
        # from the beginning of the window.
        inputs_before_P = np.cumsum(lengths_P) - lengths_P
        first_in_row_P = np.arange(len(row_P)) - ordinal_P  # the first piece of each piece's row
        column_P = inputs_before_P - inputs_before_P[first_in_row_P]
        # For each input: its position in its piece, its index in the flattened window, and its
        # index in the side's array of tokens.
        positions_N = _ordinals(lengths_P)
        window_index_N = np.repeat(row_P * self.sequence_length + column_P, lengths_P) + positions_N
        shard_index_N = np.repeat(plan.starts[piece_P], lengths_P) + positions_N
        contents = {
            "tokens": self._side.tokens[shard_index_N],
            "targets": self._targets(shard_index_N + 1),
        }
        if self.packed:
            contents["segments"] = np.repeat(ordinal_P + 1, lengths_P)
            contents["positions"] = positions_N
        window = self.empty(len(indices_R))
        for key, values_N in contents.items():
            window[key].reshape(-1)[window_index_N] = values_N
        return window

    def _targets(self, index_N: Int64) -> NDArray[Any]:
        """Return the tokens at these indices of the side's tokens, as targets.

        In conversations, tokens outside the answers are replaced by IGNORE.
        """
        targets_N = self._side.tokens[index_N]
        answers = self._side.answers
        if answers is None:
            return targets_N
        # `answers` is begin, end, begin, end ... of the answers, in ascending order. An index is inside an
        # answer if the last of these boundaries up to the index is a begin. Then the number of boundaries up to
        # the index is odd.
        boundaries_N = np.searchsorted(answers, index_N, side="right")
        is_trained_N = boundaries_N % 2 == 1
        return np.where(is_trained_N, targets_N.astype(np.int64), IGNORE)

    def empty(self, count: int) -> dict[str, Int64]:
        """Return `count` rows that are all padding, under the keys of `window`."""
        padding = {"tokens": self._tokenizer.pad_id, "targets": IGNORE}
        if self.packed:
            padding |= {"segments": 0, "positions": 0}
        return {
            key: np.full((count, self.sequence_length), value, dtype=np.int64)
            for key, value in padding.items()
        }

    def pieces(self, index: int) -> list[DocumentPiece]:
        """Return the pieces of one row, in order."""
        of_row = slice(self._plan.offsets[index], self._plan.offsets[index + 1])
        pieces = []
        for start, length in zip(
            self._plan.starts[of_row], self._plan.lengths[of_row], strict=True
        ):
            document = int(np.searchsorted(self._side.starts, start, side="right")) - 1
            document_begin, document_end = self._side.starts[document : document + 2].tolist()
            piece = DocumentPiece(
                document=self._side.document_name(document),
                begin=int(start) - document_begin,
                length=int(length),
                document_tokens=document_end - document_begin,
            )
            pieces.append(piece)
        return pieces

    def document_indices(self, indices_R: Int64) -> Int64:
        """Return the index of the document at each position, or -1 at padding, int64 [R, T]."""
        document_RT = np.full((len(indices_R), self.sequence_length), -1, dtype=np.int64)
        for row, index in enumerate(indices_R):
            of_row = slice(self._plan.offsets[index], self._plan.offsets[index + 1])
            starts_P = self._plan.starts[of_row]
            lengths_P = self._plan.lengths[of_row]
            document_P = np.searchsorted(self._side.starts, starts_P, side="right") - 1
            document_RT[row, : lengths_P.sum()] = np.repeat(document_P, lengths_P)
        return document_RT

    def bytes_of(self, window: Mapping[str, Int64]) -> int:
        """Return the bytes of text that a window's targets stand for.

        The token that ends a document stands for 0 bytes.
        """
        has_target = window["targets"] != IGNORE
        targets = window["targets"][has_target]
        inputs = window["tokens"][has_target]
        return self._tokenizer.bytes_of(targets, inputs)

    def texts(self) -> Iterator[bytes]:
        """Yield the text of each document as the tokenizer decodes it, in UTF-8."""
        for document in range(self.documents):
            begin, end = self._side.starts[document : document + 2].tolist()
            yield self._tokenizer.decode_bytes(self._side.tokens[begin:end].tolist())

    def answer_ends(self) -> dict[int, int]:
        """Return {id: number of answers whose last token it is}, the most frequent id first."""
        assert self._side.answers is not None
        last_tokens = self._side.tokens[self._side.answers[1::2] - 1]
        ids, counts = np.unique(last_tokens, return_counts=True)
        most_frequent_first = np.argsort(-counts, kind="stable")
        return {int(ids[index]): int(counts[index]) for index in most_frequent_first}

    def first_prompt(self) -> list[int]:
        """Return the ids of the first conversation up to its first answer."""
        assert self._side.answers is not None
        ids: list[int] = self._side.tokens[: self._side.answers[0]].tolist()
        return ids

    def batches_in_order(self, batch_rows: int, limit: int | None = None) -> "Iterator[Batch]":
        """Yield every row once, or `limit` evenly spaced rows, in batches of `batch_rows` rows.

        The last batch is padded with rows without targets.
        """
        # Importing torch takes seconds, and only training needs it here.
        from monograph.data.batches import batches_in_order

        return batches_in_order(self, self.evenly_spaced(limit), batch_rows)

    def evenly_spaced(self, limit: int | None = None) -> Int64:
        """Return the indices of all rows, or of `limit` evenly spaced ones."""
        count = len(self) if limit is None else min(limit, len(self))
        return np.arange(count) * len(self) // max(1, count)

    def count_targets(self, limit: int | None = None) -> tuple[int, int]:
        """Return (number of targets, bytes of their text) of the rows of `batches_in_order`."""
        if limit is None or limit >= len(self):
            return self.tokens, self.bytes
        window = self.window(self.evenly_spaced(limit))
        return int((window["targets"] != IGNORE).sum()), self.bytes_of(window)


class _WeightedPart(NamedTuple):
    """The documents of consecutive files that have the same weight.

    `monograph.data.pack` keeps such parts apart: no row has pieces of two parts.
    """

    documents: int
    weight: float


def _weighted_parts(side: Side, weights: Sequence[float]) -> list[_WeightedPart]:
    """Return the parts of a side, given the weight of each of its files."""
    parts = []
    first_file = 0
    for weight, run in itertools.groupby(weights):
        end_file = first_file + len(list(run))
        documents = int(side.first_documents[end_file] - side.first_documents[first_file])
        parts.append(_WeightedPart(documents, weight))
        first_file = end_file
    return parts


def _ordinals(counts: Int64) -> Int64:
    """Return 0 .. counts[0]-1, 0 .. counts[1]-1, ... as one array.

    The counts [2, 3], for example, give [0, 1, 0, 1, 2].
    """
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
