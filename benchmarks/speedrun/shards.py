"""Read and write files of GPT-2 tokens in the format of llm.c, which the speedrun's data have.

A file has 256 little-endian int32 (20240520, 1, the number of tokens, zeros), then each token as a
uint16. Source: `write_datafile` in data/fineweb.py of github.com/KellerJordan/modded-nanogpt.

A folder has files named `*_val_*.bin` and `*_train_*.bin`. The first token of a document is the
separator, GPT-2's <|endoftext|>. A folder whose tokens are not GPT-2's has a `vocabulary.json`,
which `make_shards.py` writes.

Shapes: R rows of an update, T positions of a row.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from monograph.errors import DiskFull, InputRefused
from monograph.loss import Batch
from monograph.storage.reading import is_folder, matching, open_input, read_json, refusing
from monograph.storage.writing import DISK_ERRORS

MAGIC, VERSION = 20240520, 1
HEADER_NUMBERS = 256
HEADER_BYTES = 4 * HEADER_NUMBERS
MOST_TOKENS = 2**31 - 1  # a header's number is an int32
MOST_IDS = 2**16
VOCABULARY = "vocabulary.json"


class Vocabulary(NamedTuple):
    """The ids of a folder's tokens.

    Attributes:
        size: number of ids; each is below it.
        separator: the id that begins each document.
    """

    size: int
    separator: int


GPT2 = Vocabulary(50_257, 50_256)


class Shard(NamedTuple):
    """A file of tokens.

    Attributes:
        path: the file.
        tokens: its tokens, mapped from the file: uint16.
    """

    path: Path
    tokens: NDArray[np.uint16]

    def read(self, start: int, count: int, vocabulary: Vocabulary) -> NDArray[np.int64]:
        """Return `count` tokens from `start` on.

        Raises:
            InputRefused: a token is not one of the vocabulary's.
        """
        tokens = self.tokens[start : start + count]
        largest = int(tokens.max())
        if largest >= vocabulary.size:
            raise InputRefused(
                f"{self.path}: has the token {largest}, but the vocabulary has {vocabulary.size:,}: these are "
                "another tokenizer's tokens"
            )
        return tokens.astype(np.int64)


def open_shard(path: Path) -> Shard:
    """Check a file's header and size, and map its tokens.

    Raises:
        InputRefused: the file is missing, of another format or version, or cut off.
        Unreadable: the system failed to read it.
    """
    with refusing(path), open_input(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        # What a short file lacks is taken for zeros, so that its first number is still looked at.
        header = np.frombuffer(file.read(HEADER_BYTES).ljust(HEADER_BYTES, b"\0"), "<i4")
        if header[0] != MAGIC:
            raise InputRefused(
                f"{path}: is not a file of tokens: it does not begin with the number {MAGIC}"
            )
        if size_bytes < HEADER_BYTES:
            raise InputRefused(f"{path}: ends inside its header of {HEADER_BYTES} bytes")
        if header[1] != VERSION:
            raise InputRefused(f"{path}: is of version {header[1]}; only {VERSION} is known")
        stored = (size_bytes - HEADER_BYTES) / 2
        if header[2] != stored:
            raise InputRefused(
                f"{path}: should have {header[2]:,} tokens and has {stored:,.15g}: it is damaged or not complete"
            )
        if not stored:
            raise InputRefused(f"{path}: has no tokens")
        return Shard(path, np.memmap(file, "<u2", "r", HEADER_BYTES, (int(header[2]),)))


def open_shards(folder: Path, split: str) -> list[Shard]:
    """Open the files of a split, "train" or "val", in the order of their names.

    Raises:
        InputRefused: there are none, or one is damaged.
    """
    if not is_folder(folder):
        raise InputRefused(f"{folder}: is not a folder")
    paths = sorted(matching(folder / f"*_{split}_*.bin"))
    if not paths:
        raise InputRefused(
            f"{folder}: has no file *_{split}_*.bin, such as fineweb_{split}_00000{int(split == 'train')}.bin"
        )
    return [open_shard(path) for path in paths]


def vocabulary_of(folder: Path) -> Vocabulary:
    """Return the vocabulary that a folder's `vocabulary.json` names; without that file GPT-2's."""
    path = folder / VOCABULARY
    if not path.exists():
        return GPT2
    values = read_json(path)
    found = [values.get(name) for name in Vocabulary._fields]
    if not all(type(value) is int and 0 <= value <= MOST_IDS for value in found):
        raise InputRefused(f"{path}: expected whole numbers size and separator, at most {MOST_IDS}")
    return Vocabulary(*found)


def write_shard(path: Path, tokens: Sequence[int] | NDArray[Any]) -> None:
    """Write a file of tokens; it gets its name once it is complete.

    Raises:
        InputRefused: a token does not fit 16 bits, there are too many, or the file cannot be made.
        DiskFull: there is no room.
    """
    values = np.asarray(tokens, dtype=np.int64)
    if len(values) > MOST_TOKENS or not (
        values.size and 0 <= values.min() <= values.max() < MOST_IDS
    ):
        raise InputRefused(f"{path}: expected 1 to {MOST_TOKENS:,} tokens from 0 to {MOST_IDS - 1}")
    header = np.zeros(HEADER_NUMBERS, "<i4")
    header[:3] = MAGIC, VERSION, len(values)
    write_whole(path, header.tobytes() + values.astype("<u2").tobytes())


def write_whole(path: Path, content: bytes) -> None:
    """Write a file under another name, then give it its name.

    Raises:
        DiskFull: there is no room; nothing is left behind.
        InputRefused: the file cannot be made there.
    """
    unfinished = path.with_name(path.name + ".tmp")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        if error.errno in DISK_ERRORS:
            raise DiskFull(f"{path}: cannot be written: {error.strerror}") from None
        raise InputRefused(f"{path}: cannot be written: {error.strerror}") from None


class Windows(Iterator[Batch]):
    """An iterator over the windows of an update, R rows of T tokens and their next tokens.

    A document sees nothing of another one in its row (`batch_of`). In the order "stream", which the
    speedrun's rules fix, window k has the next R T tokens of the files, one file after another. What
    is left of a file, less than a window, is left out, as the public code does. In the order
    "shuffled" the rows of all windows are permuted by the seed. No token is seen twice: after the
    last window the iterator ends.

    Attributes:
        index: windows that were returned.
        count: windows in all.
        separator: the id that begins each document.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        vocabulary: Vocabulary,
        rows: int,
        length: int,
        *,
        order: str = "stream",
        seed: int = 0,
        start: int = 0,
        pin: bool = False,
    ) -> None:
        """Begin at window `start`; with `pin`, windows are in pinned memory."""
        self._shards, self._vocabulary = shards, vocabulary
        self.separator = vocabulary.separator
        self._rows, self._length = rows, length
        self._pin = pin
        self.index = start
        # The windows of each file; a window's last target is one token more.
        self._per_shard = [(len(shard.tokens) - 1) // (rows * length) for shard in shards]
        self.count = sum(self._per_shard)
        self._order_R: NDArray[np.int64] | None = None
        if order == "shuffled":
            self._order_R = np.random.default_rng(seed).permutation(self.count * rows)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="speedrun-windows")
        self._next: Future[Batch] | None = None

    def __next__(self) -> Batch:
        if self.index >= self.count:
            raise StopIteration
        window = (self._next or self._worker.submit(self._window, self.index)).result()
        self.index += 1
        self._next = None
        if self.index < self.count:
            self._next = self._worker.submit(self._window, self.index)
        return window

    def _window(self, index: int) -> Batch:
        begin = index * self._rows
        rows_R = np.arange(begin, begin + self._rows)
        if self._order_R is not None:
            rows_R = self._order_R[rows_R]
        return self.rows_at(rows_R)

    def rows_at(self, rows_R: NDArray[np.int64]) -> Batch:
        """Return rows by their numbers: row i of window k is k R + i."""
        starts = np.concatenate([[0], np.cumsum(self._per_shard)]) * self._rows
        files_R = np.searchsorted(starts, rows_R, side="right") - 1
        T = self._length
        found = np.empty((len(rows_R), T + 1), np.int64)
        for place, (row, file) in enumerate(zip(rows_R, files_R, strict=True)):
            begin = int(row - starts[file]) * T
            found[place] = self._shards[file].read(begin, T + 1, self._vocabulary)
        return batch_of(found, self.separator, self._pin)


def batch_of(tokens: NDArray[np.int64], separator: int, pin: bool = False) -> Batch:
    """Return rows of T + 1 tokens as a batch whose documents do not see each other.

    A row's first document may have begun in the row before, of which it sees nothing. Every
    position has a target, the separator of the next document too.
    """
    inputs = tokens[:, :-1]
    begins = inputs == separator
    place_T = np.arange(inputs.shape[1])
    arrays = {
        "tokens": inputs,
        "targets": tokens[:, 1:],
        "segments": 1 + begins.cumsum(1),  # 0 would be padding
        "positions": place_T - np.maximum.accumulate(np.where(begins, place_T, 0), axis=1),
    }
    batch = {name: torch.from_numpy(np.ascontiguousarray(each)) for name, each in arrays.items()}
    return {name: each.pin_memory() for name, each in batch.items()} if pin else batch


def pairs_of(batch: Batch, window: int) -> int:
    """Return how many pairs of a query and a key attention computes, for a window of positions."""
    return int((batch["positions"] + 1).clamp(max=window).sum())


class Validation:
    """The first tokens of the validation file, as rows of T.

    Row i has the tokens i T .. i T + T - 1 as inputs, and the token after each as its target, so
    `tokens` tokens are predicted, each once. A row knows nothing of the row before it, and a
    document nothing of another one.

    Attributes:
        tokens: the number of predicted tokens.
        sha256: of the tokens as they are in the file, by which results of the same text are known.
    """

    def __init__(
        self, shard: Shard, vocabulary: Vocabulary, tokens: int, length: int, batch_rows: int
    ) -> None:
        """Read the tokens.

        Raises:
            InputRefused: the file has too few, or a token of another vocabulary.
        """
        if len(shard.tokens) < tokens + 1:
            raise InputRefused(
                f"{shard.path}: has {len(shard.tokens):,} tokens; {tokens + 1:,} are needed to score the first "
                f"{tokens:,}"
            )
        flat = shard.read(0, tokens + 1, vocabulary)
        if flat[0] != vocabulary.separator:
            raise InputRefused(
                f"{shard.path}: begins with the token {flat[0]}, not with the separator {vocabulary.separator}: "
                "these are another tokenizer's tokens"
            )
        starts = np.arange(0, tokens, length)
        self._rows = np.lib.stride_tricks.sliding_window_view(flat, length + 1)[starts]
        self._batch_rows = batch_rows
        self._separator = vocabulary.separator
        self.tokens = tokens
        self.sha256 = hashlib.sha256(shard.tokens[: tokens + 1].tobytes()).hexdigest()

    def batches(self) -> Iterator[Batch]:
        """Yield the rows in their order, `batch_rows` at a time."""
        for begin in range(0, len(self._rows), self._batch_rows):
            yield batch_of(self._rows[begin : begin + self._batch_rows], self._separator)


def write_vocabulary(folder: Path, vocabulary: Vocabulary) -> None:
    """Write a folder's `vocabulary.json`."""
    write_whole(folder / VOCABULARY, json.dumps(vocabulary._asdict()).encode() + b"\n")
