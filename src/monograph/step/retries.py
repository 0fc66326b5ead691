"""Repeat what did not fit the memory of a device in less of it, around the parameters of any
engine.

Fewer rows at once and recomputed blocks change no gradient (laws 2 and 3), so an update stays the
same.
"""

import gc
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch

from monograph.errors import InputRefused, OutOfDeviceMemory, UsageError, host_is_full
from monograph.graph import capture as graph
from monograph.graph import recompute
from monograph.graph.compilable import Scope
from monograph.graph.remat import Remat
from monograph.ranges import COUNT
from monograph.step.step import Step

T = TypeVar("T")


class Share(NamedTuple):
    """The micro-batches of a window that one rank computes: every `ranks`-th one, from the one of
    its number on.
    """

    ranks: int = 1
    rank: int = 0


WHOLE = Share()


class Retries:
    """How large micro-batches are, and what is changed when memory runs out.

    Attributes:
        micro_batch: rows per micro-batch; None: the whole window at once, or a rank's share of it.
        share: the micro-batches that are this rank's.
        captured: what the step was captured with, if it was.
        announce: gets a line when work goes on in another way.
    """

    def __init__(self, micro_batch: int | None, *, share: Share = WHOLE, recomputes: bool = True):
        """Begin with this number of rows.

        Args:
            micro_batch: rows per micro-batch.
            share: the micro-batches of a window that are this rank's; by default all of them.
            recomputes: whether blocks may be recomputed to save memory.
        """
        if micro_batch is not None and not COUNT.holds(micro_batch):
            raise UsageError(
                f"micro_batch = {micro_batch!r}: expected rows, at least 1, or None for all at once"
            )
        self.micro_batch = micro_batch
        self.share = share
        self.captured: tuple[graph.Backend, Scope] | None = None
        # Engines print nothing: a command shows the line in its progress, and a user of the library
        # may set `print`.
        self.announce: Callable[[str], None] = lambda line: None
        self._recomputes = recomputes

    def size(self, rows: int) -> int:
        """Return the rows of a micro-batch of a window of so many rows."""
        return self.micro_batch or -(-rows // self.share.ranks)

    def fitting(self, step: Step, rows: Callable[[], int], work: Callable[[], T]) -> T:
        """Return `work()`, a pass of the step; as long as the device's memory does not suffice,
        change and repeat it.

        Args:
            step: the step.
            rows: returns the rows of the window that the work is about.
            work: reads `size` anew each time.

        Raises:
            OutOfDeviceMemory: nothing is left to try.
        """
        while True:
            try:
                return work()
            except (RuntimeError, InputRefused) as error:
                if not out_of_memory(error):
                    raise
                message = str(error).splitlines()[0]
            # This is outside the except block, where the traceback would keep the failed pass's
            # tensors alive.
            self._step_down(step, rows(), message)

    def _step_down(self, step: Step, window_rows: int, message: str) -> None:
        """Take less memory for the same update: no replayed micro-steps, else half the rows, else
        recomputed blocks.
        """
        rows = min(self.size(window_rows), window_rows)
        step.discard()
        # The change that costs least comes first: replays save only launching, fewer rows cost some
        # speed, and recomputed blocks cost about a third more computing.
        if graph.give_back(step):
            change = f"{graph.ONE_BY_ONE} from now on"
        elif rows > 1:
            self.micro_batch = (rows + 1) // 2
            change = f"micro_batch is now {self.micro_batch}"
        elif self._recompute(step):
            change = "blocks are recomputed from now on"
        else:
            raise OutOfDeviceMemory(
                f"one row does not fit the device's memory: {message}; use a smaller model or sequence_length"
            )
        emptied(step.device)
        self.announce(f"out of memory at {rows_of(rows)}: {change}, the update stays the same")
        step.parameters.begin_again()

    def _recompute(self, step: Step) -> bool:
        """Keep only the blocks' inputs from now on; return False if that is so already, or if there
        are no blocks.
        """
        if not self._recomputes or step.remat in (Remat.Full(), Remat.Offload()):
            return False
        graph.release(step)
        step.parameters.at_rest(written=False)
        try:
            recompute.follow(step.model, Remat.Full())
        except UsageError:
            return False
        step.remat = Remat.Full()
        if self.captured:
            graph.capture(step, *self.captured)
        return True


def emptied(device: torch.device) -> None:
    """Free what a failed pass held on a device."""
    # Its tensors are in reference cycles of autograd, and the allocator keeps freed memory in
    # pieces of the old size.
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def rows_of(number: int) -> str:
    """Return a number of rows in words."""
    return f"{number} row" if number == 1 else f"{number} rows"


def out_of_memory(error: BaseException | None) -> bool:
    """Return whether the device's memory, or the host's, was too small."""
    # The trial step wraps a module's error in one with an explanation.
    if isinstance(error, InputRefused):
        return out_of_memory(error.__cause__)
    return isinstance(error, torch.OutOfMemoryError) or (error is not None and host_is_full(error))
