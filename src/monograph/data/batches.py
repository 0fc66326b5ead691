"""Serve windows of rows as torch tensors, made ahead of time by one background thread."""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from monograph.data.rows import Rows, shares_at
from monograph.errors import UsageError
from monograph.ranges import COUNT

Batch = dict[str, torch.Tensor]

_AHEAD = 2  # windows: the one to return next, and one more that is made while the caller computes


class Batches(Iterator[Batch]):
    """An iterator over the windows of a training run: each `Batch` has all rows of one update.

    Window k has the rows at positions start + k·R .. start + (k+1)·R - 1 of the endless order given
    by `seed` (see `monograph.data.rows.shares_at`), with R = tokens_per_update // T. Epochs follow
    each other directly, so a window may hold the end of one and the beginning of the next. A row
    depends on (seed, position) alone: a run resumed from `state()` sees the rows that an
    uninterrupted run would have seen, even with another tokens_per_update.

    Args:
        rows: the rows to draw from.
        tokens_per_update: number of positions in a window; at least one row's.
        seed: selects the order.
        start: rows already consumed, counted from the beginning of the first epoch.
        epochs: stop after this many epochs, counted from the beginning of the first, with a shorter
            last window if need be; None never stops.
        skip: (begin, end) of stretches of positions to skip, in rising order; they do not count
            towards `epochs`. A window that begins before a stretch is drawn whole, even where it
            reaches into the stretch.
        pin: put windows into page-locked memory, so that copies to a GPU overlap with computation;
            needs CUDA.

    Attributes:
        rows_per_window: R.
        rows_consumed: the position after the last row that was returned; rows made ahead do not
            count.
        skip: as given.

    Raises:
        UsageError: tokens_per_update < T, or a negative start or epochs.
    """

    def __init__(
        self,
        rows: Rows,
        tokens_per_update: int,
        *,
        seed: int = 0,
        start: int = 0,
        epochs: int | None = None,
        pin: bool = False,
        skip: Sequence[Sequence[int]] = (),
    ) -> None:
        if not COUNT.holds(tokens_per_update) or tokens_per_update < rows.sequence_length:
            needed = f"must be at least one row of sequence_length = {rows.sequence_length}"
            raise UsageError(
                f"train.tokens_per_update = {tokens_per_update}: {needed}; raise it or shorten the rows"
            )
        if start < 0 or (epochs is not None and epochs < 0):
            raise UsageError(f"start = {start}, epochs = {epochs}: neither can be negative")
        if len(rows) == 0:
            raise UsageError("there are no rows to draw from: nothing was held out")
        self.rows_per_window = int(tokens_per_update // rows.sequence_length)
        self.rows_consumed = start
        self._rows = rows
        self._seed = int(seed)
        self._pin = pin
        self.skip = tuple((int(begin), int(end)) for begin, end in skip)
        passed_over = sum(end - begin for begin, end in self.skip)
        self._end = None if epochs is None else epochs * rows.per_epoch + passed_over
        self._next = start
        self._ahead: deque[tuple[int, Future[Batch]]] = deque()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="monograph-batches")

    def __next__(self) -> Batch:
        """Return the next window, [R, T] per key; an error in making a window is raised when its
        turn comes.
        """
        self._fill()
        if not self._ahead:
            raise StopIteration
        after, window = self._ahead.popleft()
        batch = window.result()
        self.rows_consumed = after
        return batch

    def state(self) -> dict[str, Any]:
        """Return the state to resume from, by
        `corpus.batches(..., seed=state["seed"], start=state["rows"])`.

        If there are positions to skip, they are under "skip".
        """
        return {"seed": self._seed, "rows": self.rows_consumed} | (
            {"skip": self.skip} if self.skip else {}
        )

    def close(self) -> None:
        """Stop the background thread now; without this call it ends with this object or the
        interpreter.
        """
        self._worker.shutdown(wait=True, cancel_futures=True)

    def _fill(self) -> None:
        while len(self._ahead) < _AHEAD and (self._end is None or self._next < self._end):
            beyond = next((end for begin, end in self.skip if begin <= self._next < end), None)
            if beyond is not None:
                self._next = beyond
                continue
            count = (
                self.rows_per_window
                if self._end is None
                else min(self.rows_per_window, self._end - self._next)
            )
            # The task holds no reference to this object, so that dropping the iterator ends the
            # thread.
            window = self._worker.submit(
                _window, self._rows, self._next, count, self._seed, self._pin
            )
            self._next += count
            self._ahead.append((self._next, window))


def _window(rows: Rows, start: int, count: int, seed: int, pin: bool) -> Batch:
    return _tensors(rows.window(shares_at(start, count, rows.shares, seed)), pin)


def _tensors(window: dict[str, NDArray[np.int64]], pin: bool = False) -> Batch:
    tensors = {key: torch.from_numpy(values) for key, values in window.items()}
    return {key: tensor.pin_memory() for key, tensor in tensors.items()} if pin else tensors


def in_order(rows: Rows, indices_N: NDArray[np.int64], batch_rows: int) -> Iterator[Batch]:
    """Yield the rows with these indices in batches [batch_rows, T]; rows without targets fill up
    the last batch.
    """
    for begin in range(0, len(indices_N), batch_rows):
        chosen = indices_N[begin : begin + batch_rows]
        window = rows.window(chosen)
        missing = rows.empty(batch_rows - len(chosen))
        yield _tensors(
            {key: np.concatenate([values, missing[key]]) for key, values in window.items()}
        )
