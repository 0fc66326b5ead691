"""Serve windows of rows as torch tensors. One background thread makes them ahead of time.

A *window* is all rows of one update. A *position* is a place in the endless order in which rows are
visited, epoch after epoch. Sources of text may have weights. With the weight 2 an epoch visits each row
of a source twice, and with 1/2 it visits half of the rows (`monograph.data.rows.row_share`).

Shape suffixes: R rows of a window, T tokens of a row.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monograph.data.rows import Rows, weighted_rows_at
from monograph.errors import UsageError
from monograph.ranges import COUNT

Batch = dict[str, Tensor]

# The number of prefetched windows: the window that the caller takes next, and one more that the thread
# makes while the caller computes.
_PREFETCHED = 2


class Batches(Iterator[Batch]):
    """An iterator over the windows of a training run: each `Batch` has all rows of one update.

    Window k has the rows at positions start + k·R .. start + (k+1)·R - 1 of the endless order that
    `seed` gives (see `monograph.data.rows.weighted_rows_at`), with R = tokens_per_update // T.
    Epochs follow each other directly, so a window may have the end of one epoch and the beginning
    of the next. The row at a position depends only on the seed and the position. So a run that
    resumes from `state()` sees the rows that an uninterrupted run would have seen, even with
    another tokens_per_update.

    Args:
        rows: the rows.
        tokens_per_update: number of tokens in a window, at least T; it is rounded down to whole
            rows.
        seed: the seed of the order.
        start: the first position, counted from the beginning of the first epoch.
        epochs: number of epochs after which to stop, counted from the beginning of the first. The
            last window may be shorter. None: the iterator never stops.
        pin: whether windows are in pinned memory, so that copies to a GPU overlap with computation;
            needs CUDA.
        skip: (begin, end) of ranges of positions to skip, which may overlap, such as rows that
            made a run diverge (`monograph.session.rewind`). Skipped positions do not count towards
            `epochs`. Ranges are looked at only where a window begins: if that is inside a range, the
            window begins at the end of the range instead. A window that begins before a range is not
            cut, so it may have rows of the range.

    Attributes:
        rows_per_window: R.
        rows_consumed: the position after the last row that was returned. Prefetched rows do not
            count.
        skip: the argument `skip`.

    Raises:
        UsageError: tokens_per_update < T, a negative start or epochs, or there are no rows.
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
        # `COUNT` is the range of whole numbers above 0.
        if not COUNT.holds(tokens_per_update) or tokens_per_update < rows.sequence_length:
            raise UsageError(
                f"train.tokens_per_update = {tokens_per_update}: must be at least one row of sequence_length = "
                f"{rows.sequence_length}; raise it or shorten the rows"
            )
        if start < 0 or (epochs is not None and epochs < 0):
            raise UsageError(f"start = {start}, epochs = {epochs}: neither can be negative")
        if len(rows) == 0:
            raise UsageError(
                "there are no rows to draw from; if these are held-out rows, nothing was held out"
            )
        self.rows_per_window = int(tokens_per_update // rows.sequence_length)
        self.rows_consumed = start
        self._rows = rows
        self._seed = int(seed)
        self._pin = pin
        self.skip = tuple((int(begin), int(end)) for begin, end in skip)
        self._end_position: int | None = None  # None: the iterator never stops
        if epochs is not None:
            # The end moves on by the number of skipped positions, so that the number of rows stays the same.
            # If a window begins before a range and has some of its rows, the run sees these rows in addition.
            self._end_position = epochs * rows.per_epoch + _positions_in(self.skip)
        # The position after the last prefetched window.
        self._next_position = start
        # For each prefetched window, the position at which it ends, and the future of the window.
        self._prefetched: deque[tuple[int, Future[Batch]]] = deque()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="monograph-batches")

    def __next__(self) -> Batch:
        """Return the next window: int64 [R, T] under each key of `Rows.window`.

        If the thread fails to make a window, its error is raised when this window is next.
        """
        self._prefetch()
        if not self._prefetched:
            raise StopIteration
        end_position, window = self._prefetched.popleft()
        batch = window.result()
        self.rows_consumed = end_position
        return batch

    def state(self) -> dict[str, Any]:
        """Return the state to resume from.

        `corpus.batches(..., seed=state["seed"], start=state["rows"])` resumes. If there are
        positions to skip, the state has them as "skip".
        """
        state: dict[str, Any] = {"seed": self._seed, "rows": self.rows_consumed}
        if self.skip:
            state["skip"] = self.skip
        return state

    def close(self) -> None:
        """Stop the background thread.

        Without this call the thread ends with this object or with the interpreter.
        """
        self._worker.shutdown(wait=True, cancel_futures=True)

    def _prefetch(self) -> None:
        """Submit windows to the thread until enough are prefetched, or the last one is submitted."""
        while len(self._prefetched) < _PREFETCHED:
            position = self._next_position
            if self._end_position is not None and position >= self._end_position:
                return
            # The end of the first range to skip that has this position.
            skip_end = next((end for begin, end in self.skip if begin <= position < end), None)
            if skip_end is not None:
                self._next_position = skip_end
                continue
            count = self.rows_per_window
            if self._end_position is not None:
                count = min(count, self._end_position - position)
            # `_window` is a function and not a method, so that the thread has no reference to this
            # object, and ends when the caller drops the iterator.
            window = self._worker.submit(
                _window, self._rows, position, count, self._seed, self._pin
            )
            self._next_position = position + count
            self._prefetched.append((self._next_position, window))


def _positions_in(ranges: Sequence[tuple[int, int]]) -> int:
    """Return how many positions are in at least one of the ranges."""
    count = 0
    covered_to = 0  # all positions of earlier ranges are below this one
    for begin, end in sorted(ranges):
        count += max(0, end - max(begin, covered_to))
        covered_to = max(covered_to, end)
    return count


def _window(rows: Rows, start: int, count: int, seed: int, pin: bool) -> Batch:
    """Return the rows at the positions start .. start + count - 1."""
    indices_R = weighted_rows_at(start, count, rows.shares, seed)
    return _tensors(rows.window(indices_R), pin)


def _tensors(window: dict[str, NDArray[np.int64]], pin: bool = False) -> Batch:
    """Return a window's arrays as tensors, in pinned memory if `pin` is True."""
    tensors = {key: torch.from_numpy(values) for key, values in window.items()}
    if pin:
        tensors = {key: tensor.pin_memory() for key, tensor in tensors.items()}
    return tensors


def batches_in_order(rows: Rows, indices_R: NDArray[np.int64], batch_rows: int) -> Iterator[Batch]:
    """Yield the rows with these indices, in their order, in batches [batch_rows, T].

    The last batch is padded with rows without targets.
    """
    for begin in range(0, len(indices_R), batch_rows):
        batch_indices = indices_R[begin : begin + batch_rows]
        window = rows.window(batch_indices)
        padding = rows.empty(batch_rows - len(batch_indices))
        padded = {key: np.concatenate([values, padding[key]]) for key, values in window.items()}
        yield _tensors(padded)
