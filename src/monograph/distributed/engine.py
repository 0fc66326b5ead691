"""The engine of one rank: it takes its share of a window's micro-batches, as many as every other rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import Tensor, nn

from monograph.distributed.sharded import ShardedStep
from monograph.distributed.shards import OwnRows
from monograph.distributed.step import RankStep, ReplicatedStep
from monograph.distributed.world import World
from monograph.errors import OutOfDeviceMemory, UsageError
from monograph.loop import EngineState
from monograph.loss import Batch, fill_of
from monograph.resident import Resident, out_of_memory
from monograph.step import Update, update

T = TypeVar("T")


class Replicated(Resident):
    """Trains one module on all ranks, each of which has all of it (DDP): the gradient is that of one process.

    Every rank is given the same windows. Its micro-batches are the window's r-th, (r + W)-th and so on, with one that
    has no targets where others have one more; so the rows of an update do not depend on the number of ranks.
    """

    step: RankStep
    STEP: type[RankStep] = ReplicatedStep

    def __init__(self, model: nn.Module, *, world: World, micro_batch: int | None = None, **others: Any):
        """Build the step on the module's device.

        Args:
            model: the same on every rank.
            world: the ranks.
            micro_batch: rows per micro-batch; None: an even share of the window.
            others: those of `Resident`.
        """
        self.world = world
        self.step = self.STEP(model, world=world, **others)
        self._hold(micro_batch)

    def _micro_batches(self, window: Batch) -> Iterator[Batch]:
        rows, ranks = self._rows(window), self.world.size
        size = self.micro_batch or -(-rows // ranks)
        turns = -(-rows // (size * ranks))
        if rows < turns * size * ranks and fill_of(self.step.loss, window) is None:
            raise UsageError(
                f"a window of {rows} rows cannot be shared out evenly to {ranks} ranks in micro-batches of {size}: "
                f"give a multiple of {size * ranks} rows, or a `fill` to the loss: what a row without targets holds"
            )
        for turn in range(turns):
            start = (turn * ranks + self.world.rank) * size
            own = {name: tensor[start : start + size] for name, tensor in window.items()}
            yield from super()._micro_batches(self._filled(own, size))

    def _fitting(self, window: Batch, work: Callable[[], T]) -> T:
        # No smaller micro-batches: the other ranks are waiting for this one's gradients.
        try:
            return work()
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            raise OutOfDeviceMemory(
                f"rank {self.world.rank}: {str(error).splitlines()[0]}; use a smaller train.micro_batch"
            ) from error

    def update(self) -> Update:
        """Apply the accumulated gradient."""
        self.step.total()
        return update(self.step)

    def evaluate(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """See `Resident.evaluate`; every rank scores its share, and has the sums of all."""
        loss_sum, count = super().evaluate(batch)
        return self.world.sum(loss_sum), self.world.sum(count)


class Sharded(Replicated):
    """Trains one module on all ranks, each of which has some rows of every parameter (FSDP2).

    The tensors of its state are parts of whole ones (`torch.distributed.tensor.DTensor`).
    """

    step: ShardedStep
    STEP = ShardedStep

    def _scored(self, batch: Batch) -> tuple[Tensor, Tensor]:
        try:
            return super()._scored(batch)
        finally:
            self.step.root.reshard()  # without a backward pass the root's parameters stay whole

    def load_state(self, state: EngineState) -> None:
        """See `Resident.load_state`; of whole tensors each rank takes its rows."""
        own = self.state()
        model, optimizer = OwnRows(state.model, own.model), OwnRows(state.optimizer, own.optimizer)
        super().load_state(EngineState(model, optimizer, state.scalars))
