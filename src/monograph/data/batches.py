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

# The number of prefetched windows: the next one, and one more that the thread makes while the caller
# computes.
_PREFETCHED = 2


class Batches(Iterator[Batch]):
    """An iterator over the windows of a training run: each `Batch` has all rows of one update.

    Window k has the rows at positions start + k·R .. start + (k+1)·R - 1 of the endless order that
    `seed` gives (see `monograph.data.rows.shares_at`), with R = tokens_per_update // T. Epochs follow
    each other directly, so a window may have the end of one epoch and the beginning of the next. A
    row depends only on the seed and its position. So a run that resumes from `state()` sees the rows
    that an uninterrupted run would have seen, even with another tokens_per_update.

    Args:
        rows: the rows.
        tokens_per_update: number of positions in a window, at least T.
        seed: the seed of the order.
        start: the first position, counted from the beginning of the first epoch.
        epochs: number of epochs after which to stop, counted from the beginning of the first. The
            last window may be shorter. None: the iterator never stops.
        pin: whether windows are in pinned memory, so that copies to a GPU overlap with computation;
            needs CUDA.
        skip: (begin, end) of ranges of positions to skip, in ascending order. They do not count
            towards `epochs`. Only windows that would begin in such a range are moved behind it: a
            window that begins before the range may have rows of it.

    Attributes:
        rows_per_window: R.
        rows_consumed: the position after the last row that was returned. Prefetched rows do not
            count.
        skip: the argument.

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
        if not COUNT.holds(tokens_per_update) or tokens_per_update < rows.sequence_length:
            raise UsageError(
                f"train.tokens_per_update = {tokens_per_update}: must be at least one row of sequence_length = "
                f"{rows.sequence_length}; raise it or shorten the rows"
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
        self._end: int | None = None
        if epochs is not None:
            skipped = sum(end - begin for begin, end in self.skip)
            self._end = epochs * rows.per_epoch + skipped
        # The position after the last prefetched window.
        self._next = start
        # The position after each prefetched window, and the window.
        self._prefetched: deque[tuple[int, Future[Batch]]] = deque()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="monograph-batches")

    def __next__(self) -> Batch:
        """Return the next window, [R, T] per key.

        An error of the thread in making a window is raised when this window would be returned.
        """
        self._prefetch()
        if not self._prefetched:
            raise StopIteration
        end, window = self._prefetched.popleft()
        batch = window.result()
        self.rows_consumed = end
        return batch

    def state(self) -> dict[str, Any]:
        """Return the state to resume from.

        `corpus.batches(..., seed=state["seed"], start=state["rows"])` resumes. If there are positions
        to skip, the state has them as "skip".
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
        """Let the thread make windows until there are enough, or the last one is made."""
        while len(self._prefetched) < _PREFETCHED:
            if self._end is not None and self._next >= self._end:
                return
            skip_end = next((end for begin, end in self.skip if begin <= self._next < end), None)
            if skip_end is not None:
                self._next = skip_end
                continue
            count = self.rows_per_window
            if self._end is not None:
                count = min(count, self._end - self._next)
            # `_window` is a function, so that the thread has no reference to this object and ends
            # when the caller drops the iterator.
            window = self._worker.submit(
                _window, self._rows, self._next, count, self._seed, self._pin
            )
            self._next += count
            self._prefetched.append((self._next, window))


def _window(rows: Rows, start: int, count: int, seed: int, pin: bool) -> Batch:
    """Return the rows at these positions of the order."""
    return _tensors(rows.window(shares_at(start, count, rows.shares, seed)), pin)


def _tensors(window: dict[str, NDArray[np.int64]], pin: bool = False) -> Batch:
    """Return a window's arrays as tensors, in pinned memory if `pin` is True."""
    tensors = {key: torch.from_numpy(values) for key, values in window.items()}
    return {key: tensor.pin_memory() for key, tensor in tensors.items()} if pin else tensors


def in_order(rows: Rows, indices_N: NDArray[np.int64], batch_rows: int) -> Iterator[Batch]:
    """Yield the rows with these indices, in batches [batch_rows, T].

    The last batch is padded with rows without targets.
    """
    for begin in range(0, len(indices_N), batch_rows):
        batch_indices = indices_N[begin : begin + batch_rows]
        window = rows.window(batch_indices)
        padding = rows.empty(batch_rows - len(batch_indices))
        padded = {key: np.concatenate([values, padding[key]]) for key, values in window.items()}
        yield _tensors(padded)
