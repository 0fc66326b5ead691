"""Repeat a pass that ran out of device memory, and use less memory for it; for any engine.

Neither smaller micro-batches nor recomputed blocks change a gradient (laws 2 and 3 in docs/laws.md), so
the update stays the same.
"""

import gc
import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch

from monograph.errors import InputRefused, OutOfDeviceMemory, UsageError, host_is_full
from monograph.graph import capture, recompute
from monograph.graph.compilable import Scope
from monograph.graph.remat import Remat
from monograph.ranges import COUNT
from monograph.step.step import Step

T = TypeVar("T")


class RankShare(NamedTuple):
    """The micro-batches of a window that one rank computes: `rank`, `rank + ranks`, and so on.

    Attributes:
        ranks: the number of ranks.
        rank: this rank's number, from 0.
    """

    ranks: int = 1
    rank: int = 0


ALL_MICRO_BATCHES = RankShare()


class Retries:
    """The size of micro-batches, and what changes when memory runs out.

    Attributes:
        micro_batch: rows per micro-batch; None: the whole window at once, or a rank's share of it.
        share: this rank's micro-batches.
        captured: backend and scope of the step's capture, which `Engine.capture` sets; None: the step
            is not captured.
        announce: called with one line when a pass is repeated in another way.
    """

    def __init__(
        self,
        micro_batch: int | None,
        *,
        share: RankShare = ALL_MICRO_BATCHES,
        recomputes: bool = True,
    ):
        """Set the size of micro-batches to begin with.

        Args:
            micro_batch: rows per micro-batch; None: the whole window at once.
            share: this rank's micro-batches of a window; by default all of them.
            recomputes: whether blocks may be recomputed to save memory.

        Raises:
            UsageError: `micro_batch` is not a whole number of at least 1.
        """
        if micro_batch is not None and not COUNT.holds(micro_batch):
            raise UsageError(
                f"micro_batch = {micro_batch!r}: expected rows, at least 1, or None for all at once"
            )
        self.micro_batch = micro_batch
        self.share = share
        self.captured: tuple[capture.Backend, Scope] | None = None
        # By default nothing is printed: a command shows the line in its progress display, and a
        # caller of the library may set `print`.
        self.announce: Callable[[str], None] = lambda line: None
        self._recomputes = recomputes

    def rows_per_micro_batch(self, rows: int) -> int:
        """Return the rows per micro-batch of a window that has `rows` rows."""
        return self.micro_batch or math.ceil(rows / self.share.ranks)

    def run(self, step: Step, count_rows: Callable[[], int], work: Callable[[], T]) -> T:
        """Call `work`, and repeat it with less memory until it fits; return its result.

        Args:
            step: the step.
            count_rows: returns the number of rows of the window. It is a function because the number is
                needed only after a failure.
            work: a pass of the step over the window; it must call `rows_per_micro_batch` again each
                time.

        Raises:
            OutOfDeviceMemory: one row does not fit, even with recomputed blocks.
        """
        while True:
            try:
                return work()
            # The trial step wraps a module's error in an `InputRefused`, so either may say that memory ran
            # out.
            except (RuntimeError, InputRefused) as error:
                if not out_of_memory(error):
                    raise
                message = str(error).splitlines()[0]
            # This call is outside the except block, because there the traceback would keep the
            # failed pass's tensors alive.
            self._step_down(step, count_rows(), message)

    def _step_down(self, step: Step, window_rows: int, message: str) -> None:
        """Make one change that saves memory.

        Recorded CUDA graphs are freed, if there are any. Otherwise micro-batches get half the rows, or
        if they have one row, blocks are recomputed.
        """
        rows = min(self.rows_per_micro_batch(window_rows), window_rows)
        step.discard()  # the failed pass may have added a part of the gradient
        # The cheapest change comes first: without CUDA graphs only launches cost more, fewer rows
        # cost some speed, and recomputed blocks add about a third to the computation.
        if capture.stop_replaying(step):
            change = f"{capture.ONE_BY_ONE} from now on"  # "micro-steps are launched one by one"
        elif rows > 1:
            self.micro_batch = (rows + 1) // 2
            change = f"micro_batch is now {self.micro_batch}"
        elif self._recompute(step):
            change = "blocks are recomputed from now on"
        else:
            raise OutOfDeviceMemory(
                f"one row does not fit the device's memory: {message}; use a smaller model or sequence_length"
            )
        empty_cache(step.device)
        self.announce(f"out of memory at {rows_text(rows)}: {change}, the update stays the same")
        # This comes last, because a streamed engine reads here whether the step is captured
        # (`step.scope`), and `_recompute` undoes the capture and repeats it.
        step.parameters.begin_again()

    def _recompute(self, step: Step) -> bool:
        """Keep only the blocks' inputs from now on, and recompute the blocks in the backward pass.

        Returns:
            False if the blocks are recomputed already, may not be recomputed, or do not exist.
        """
        if not self._recomputes or step.remat in (Remat.Full(), Remat.Offload()):
            return False
        capture.uncapture(step)
        # Planes are the buffers of parameters, gradients and moments. In a streamed engine, the last
        # update of them may still be running, and has to end first. The weights are not changed here, so
        # they need not be copied to the device again (`to_write=False`).
        step.parameters.wait_for_planes(to_write=False)
        try:
            recompute.apply_policy(step.model, Remat.Full())
        except UsageError:
            # The model has no blocks that can be recomputed. The caller then raises OutOfDeviceMemory, so
            # the step is not captured again.
            return False
        step.remat = Remat.Full()
        if self.captured:
            capture.capture(step, *self.captured)
        return True


def empty_cache(device: torch.device) -> None:
    """Free the memory that a failed pass held on a device."""
    # The pass's tensors are in reference cycles of autograd, and the allocator keeps freed memory in
    # blocks of the old size.
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def rows_text(number: int) -> str:
    """Return "1 row", "2 rows" and so on."""
    return f"{number} row" if number == 1 else f"{number} rows"


def out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error says that the device's or the host's memory was too small."""
    # The trial step wraps a module's error in an `InputRefused` that explains it.
    if isinstance(error, InputRefused):
        return out_of_memory(error.__cause__)
    return isinstance(error, torch.OutOfMemoryError) or (error is not None and host_is_full(error))
