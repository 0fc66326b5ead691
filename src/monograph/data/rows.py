"""One side of a corpus as rows of T positions: what is in each row, and how to visit them.

Shape suffixes: D documents, P pieces, R rows, T positions of a row, N tokens of all pieces asked for.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from monograph.data.order import share
from monograph.data.pack import Plan, plan_rows
from monograph.data.store import Side
from monograph.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from monograph.data.batches import Batch

IGNORE = -100  # torch's ignore_index: no target here

Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class Piece:
    """A stretch of one document in a row: `length` inputs, from token `begin` of the document's `tokens` on."""

    document: str
    begin: int
    length: int
    tokens: int


class Rows:
    """The rows of one side of the split, `len(rows)` of them.

    Attributes:
        sequence_length: T.
        packed: whether a row may hold several pieces; decides the keys of a batch.
        shares: how often an epoch sees which rows.
        inputs: number of positions that hold a token with one after it: each token but a document's last.
        tokens: number of targets: every token but each document's first, or of conversations those trained on.
        bytes: bytes of the text that these targets stand for; bits per byte = sum of losses / ln 2 / bytes.
        documents: number of documents; of conversations, of the stretches that are trained on as one.
        conversations: number of conversations, 0 of texts.
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
        """The rows of a side.

        Args:
            side: its tokens.
            tokenizer: what they are.
            sequence_length: T.
            packed: whether a row may hold several pieces.
            weights: how often an epoch sees each file of the side; without it once.
            folder: where a large plan may lie.
        """
        self._side, self._tokenizer = side, tokenizer
        parts = _parts(side, weights or [1.0] * len(side.files))
        self._plan: Plan = plan_rows(side.starts, sequence_length, packed, [count for count, _ in parts], folder)
        self.shares = [share(rows, weight) for rows, (_, weight) in zip(self._plan.rows, parts, strict=True)]
        self.sequence_length, self.packed = sequence_length, packed
        self.documents = len(side.starts) - 1
        self.conversations = side.conversations
        self.inputs = len(side.tokens) - self.documents
        self.tokens = self.inputs if side.answers is None else int(np.diff(side.answers)[::2].sum())
        self.bytes = side.bytes
        self.filled = self._plan.filled

    def __len__(self) -> int:
        """How many different rows there are."""
        return len(self._plan.offsets) - 1

    @property
    def per_epoch(self) -> int:
        """Rows that an epoch visits: all of them once, if no weights were given."""
        return sum(each.visits for each in self.shares)

    def row(self, index: int) -> dict[str, Int64]:
        """One row: arrays [T] under the keys of `window`."""
        return {key: values[0] for key, values in self.window(np.array([index])).items()}

    def window(self, indices_R: Int64) -> dict[str, Int64]:
        """The rows with these indices.

        Returns:
            int64 [R, T] each: `tokens`, the input ids; `targets`, the id to predict at each position, -100 where there
            is none; and for packed rows `segments`, 1, 2, 3... for the pieces of the row and 0 for padding, and
            `positions`, 0-based in the piece.
        """
        plan, shape_RT = self._plan, (len(indices_R), self.sequence_length)
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
        arrays = {
            "tokens": (self._tokenizer.pad_id, self._side.tokens[source_N]),
            "targets": (IGNORE, self._targets(source_N + 1)),
        }
        if self.packed:
            arrays["segments"] = (0, np.repeat(ordinal_P + 1, lengths_P))
            arrays["positions"] = (0, positions_N)
        window = {}
        for key, (padding, values_N) in arrays.items():
            window[key] = np.full(shape_RT, padding, dtype=np.int64)
            window[key].reshape(-1)[place_N] = values_N
        return window

    def _targets(self, index_N: Int64) -> NDArray[Any]:
        """The tokens at these places of the shard; IGNORE for one of a conversation that is not trained on."""
        targets_N, answers = self._side.tokens[index_N], self._side.answers
        if answers is None:
            return targets_N
        # A place is in a stretch where an odd number of the rising begins and ends lies before it.
        trained_N = np.searchsorted(answers, index_N, side="right") % 2 == 1
        return np.where(trained_N, targets_N.astype(np.int64), IGNORE)

    def empty(self, count: int) -> dict[str, Int64]:
        """`count` rows of nothing but padding, in the form of `window`."""
        padding = {"tokens": self._tokenizer.pad_id, "targets": IGNORE} | (
            {"segments": 0, "positions": 0} if self.packed else {}
        )
        return {key: np.full((count, self.sequence_length), value, dtype=np.int64) for key, value in padding.items()}

    def pieces(self, index: int) -> list[Piece]:
        """Where the pieces of one row come from, in order."""
        begin, end = self._plan.offsets[index], self._plan.offsets[index + 1]
        found = []
        for start, length in zip(self._plan.starts[begin:end], self._plan.lengths[begin:end], strict=True):
            document = int(np.searchsorted(self._side.starts, start, side="right")) - 1
            first, last = self._side.starts[document : document + 2].tolist()
            found.append(Piece(self._side.name(document), int(start) - first, int(length), last - first))
        return found

    def owners(self, indices_R: Int64) -> Int64:
        """int64 [R, T]: the number of the document that each position belongs to, -1 where there is none."""
        owner_RT = np.full((len(indices_R), self.sequence_length), -1, dtype=np.int64)
        for row, index in enumerate(indices_R):
            begin, end = self._plan.offsets[index], self._plan.offsets[index + 1]
            documents = np.searchsorted(self._side.starts, self._plan.starts[begin:end], side="right") - 1
            lengths = self._plan.lengths[begin:end]
            owner_RT[row, : lengths.sum()] = np.repeat(documents, lengths)
        return owner_RT

    def bytes_of(self, window: Mapping[str, Int64]) -> int:
        """Bytes of text that a window's targets stand for; the end of a document stands for none."""
        targets, before = (window[key][window["targets"] != IGNORE] for key in ("targets", "tokens"))
        return self._tokenizer.bytes_of(targets, before)

    def texts(self) -> Iterator[bytes]:
        """The UTF-8 bytes of each document, decoded from its tokens: the text as the tokenizer reads it."""
        for document in range(self.documents):
            first, last = self._side.starts[document : document + 2].tolist()
            yield self._tokenizer.decode_bytes(self._side.tokens[first:last].tolist())

    def answer_ends(self) -> dict[int, int]:
        """{id: answers that end with it} of conversations, the most frequent first."""
        assert self._side.answers is not None
        ends, counts = np.unique(self._side.tokens[self._side.answers[1::2] - 1], return_counts=True)
        return {int(ends[each]): int(counts[each]) for each in np.argsort(-counts, kind="stable")}

    def first_prompt(self) -> list[int]:
        """Ids of the first conversation up to where its first answer begins."""
        assert self._side.answers is not None
        ids: list[int] = self._side.tokens[: self._side.answers[0]].tolist()
        return ids

    def in_order(self, batch_rows: int, limit: int | None = None) -> Iterator[Batch]:
        """Rows once, `batch_rows` at a time; the last batch is filled up with empty rows to the same shape.

        With a `limit`, that many rows, evenly spaced over all of them.
        """
        from monograph.data.batches import in_order  # torch takes seconds to import and only training needs it here

        return in_order(self, self.spread(limit), batch_rows)

    def spread(self, limit: int | None = None) -> Int64:
        """Indices of all rows, or of `limit` evenly spaced ones."""
        count = len(self) if limit is None else min(limit, len(self))
        return np.arange(count) * len(self) // max(1, count)

    def coverage(self, limit: int | None = None) -> tuple[int, int]:
        """(targets, bytes of text that they stand for) of the rows that `in_order` gives."""
        if limit is None or limit >= len(self):
            return self.tokens, self.bytes
        window = self.window(self.spread(limit))
        return int((window["targets"] != IGNORE).sum()), self.bytes_of(window)


def _parts(side: Side, weights: Sequence[float]) -> list[tuple[int, float]]:
    """(documents, weight) of each run of files of one weight."""
    runs = itertools.groupby(range(len(weights)), key=weights.__getitem__)
    ends = [(list(files)[-1] + 1, weight) for weight, files in runs]
    firsts = side.first[[0, *(end for end, _ in ends)]]
    return [(int(count), weight) for count, (_, weight) in zip(np.diff(firsts), ends, strict=True)]


def _ordinals(counts: Int64) -> Int64:
    """0 .. counts[0]-1, 0 .. counts[1]-1, ... as one array."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
