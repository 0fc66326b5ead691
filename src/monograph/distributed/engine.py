"""Engines of one rank among several, whose gradients DDP or FSDP2 sums over the ranks.

    gradient = sum over ranks of d/dp (1 / N  sum of the rank's losses),   N = targets of all ranks

which is the gradient of one process with all micro-batches. By default both of torch's engines average gradients, so
the loss would have to be multiplied by the number of ranks: in fp16 that factor overflows sooner, and rounds
subnormals differently. So they are set to sum instead. A window's micro-batches go to the ranks in turn.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from monograph import compat
from monograph.distributed.rows import OwnRows
from monograph.distributed.sharded import Shards
from monograph.distributed.world import World
from monograph.engine import Engine, emptied, out_of_memory
from monograph.errors import InputRefused, OutOfDeviceMemory, UsageError
from monograph.loop import EngineState
from monograph.loss import Batch, fill_of
from monograph.ops.philox import LOW32
from monograph.optim import unlinked
from monograph.step import Layout, Step, accumulate
from monograph.step.layout import on_device, total
from monograph.stream.engine import Streamed
from monograph.stream.placement import Placement

T = TypeVar("T")


class RankEngine(Engine):
    """An engine that computes its share of a window's micro-batches, as many as every other rank.

    Every rank reads the same windows. Rank r of W computes the window's micro-batches r, r + W and so on. A rank that
    would have one fewer than others adds one without targets. So the rows of an update do not depend on the number of
    ranks.
    """

    world: World
    joining: Callable[[bool], AbstractContextManager[None]]

    def _micro_batches(self, window: Batch) -> Iterator[Batch]:
        rows = self._rows(window)
        ranks = self.world.size
        size = self._size(window)
        turns = -(-rows // (size * ranks))
        if rows < turns * size * ranks and fill_of(self.step.loss, window) is None:
            raise UsageError(
                f"a window of {rows} rows cannot be shared out evenly to {ranks} ranks in micro-batches of {size}: "
                f"give a multiple of {size * ranks} rows, or a `fill` to the loss: what a row without targets holds"
            )
        for turn in range(turns):
            start = (turn * ranks + self.world.rank) * size
            own = {name: tensor[start : start + size] for name, tensor in window.items()}
            device = self.step.device
            yield self._filled({name: tensor.to(device, non_blocking=True) for name, tensor in own.items()}, size)

    def _size(self, window: Batch) -> int:
        return self.micro_batch or -(-self._rows(window) // self.world.size)

    def _fitting(self, window: Batch, work: Callable[[], T]) -> T:
        # The other ranks wait for this rank in the middle of a pass, so all of them have to begin again.
        try:
            return work()
        except (RuntimeError, InputRefused) as error:
            if not out_of_memory(error):
                raise
            rows = self._size(window)
            remedy = "let torchrun restart it (--max-restarts 3), or " if rows > 1 else ""
            failed = OutOfDeviceMemory(
                f"rank {self.world.rank}: out of memory at micro_batch = {rows}: {str(error).splitlines()[0]}; "
                f"{remedy}use a smaller train.micro_batch, model or sequence_length"
            )
            failed.retry_rows = (rows + 1) // 2 if rows > 1 else 0
            raise failed from error

    def _accumulate(self, step: Step, batches: Sequence[Any]) -> None:
        step.link()
        for unit, batch in enumerate(batches):
            seed(self.world, step, unit)
            with self.joining(unit + 1 == len(batches)):
                with unlinked(step.planes), step.context():
                    loss, loss_sum, count = self._forward(step, batch)
                if not step.differentiate(loss, loss_sum, count):
                    self._without_gradient(step)

    def _forward(self, step: Step, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError

    def _without_gradient(self, step: Step) -> None:
        """Do what ranks must where a micro-batch's loss depends on no parameter."""
        raise NotImplementedError


def seed(world: World, step: Step, unit: int) -> None:
    """Seed torch's generator (for dropout) by the micro-batch's number, so that the number of ranks does not matter."""
    torch.manual_seed(hash((step.optim.seed, step.index, unit * world.size + world.rank)) & LOW32)


@final
class Replicated(RankEngine):
    """The engine of a module that every rank holds whole (DDP); the gradient is that of one process.

    Attributes:
        joining: returns the context of a micro-batch; its argument says whether it is the window's last.
    """

    def __init__(self, model: nn.Module, *, world: World, micro_batch: int | None = None, **others: Any):
        """Build the step on the module's device.

        Args:
            model: the module, equal on every rank.
            world: the ranks.
            micro_batch: rows of a micro-batch; None: an even share of the window.
            others: further arguments of `Step`.
        """
        self.world = world
        # DDP asks for gradients by hooks, so products must not add them.
        layout = Layout(planes=functools.partial(on_device, fused=False), accumulate=self._accumulate, complete=total)
        step = Step(model, sum_over_ranks=world.sum, layout=layout, **others)
        step.recorder = None  # a replayed micro-step would contain collectives
        compat.one_graph_under_ddp()
        # Gradients are summed over ranks all at once, with the window's last micro-batch.
        self.joining = lambda last: nullcontext() if last else self.parallel.no_sync()
        super().__init__(lambda: step, micro_batch)
        self._wrap()

    def _wrap(self) -> None:
        """Give the step's module to a new DDP, as one whose backward pass failed cannot go on."""
        # gradient_as_bucket_view stays off, because gradients are views of the planes already.
        self.parallel = DistributedDataParallel(_Whole(self.step))
        # This is a lambda because torch refuses a hook whose annotations are strings, as all are in this file.
        self.parallel.register_comm_hook(None, lambda _, bucket: self._summing(bucket.buffer()))
        # After its first backward pass DDP rebuilds its buckets, so that the gradients of more than two ranks are
        # summed in another order. These passes, made before the first update, give restarted ranks the same bits.
        for _ in range(2):
            self._summed = list[Tensor]()
            with torch.enable_grad():  # memory may have run out in an evaluation
                self.parallel(None, self.step.loss_factor).backward()
        self._buckets = self._summed

    def _summing(self, bucket: Tensor) -> torch.futures.Future[Tensor]:
        self._summed.append(torch.empty_like(bucket, device="meta"))
        return self.world.summing(bucket)

    def accumulate(self, window: Batch) -> None:
        """Add the window's exact gradient, as `Engine.accumulate` does."""

        def work() -> None:
            self._summed = []
            accumulate(self.step, self._micro_batches(window))

        self._fitting(window, work)

    def _fitting(self, window: Batch, work: Callable[[], T]) -> T:
        if any(isinstance(module, nn.SyncBatchNorm) for module in self.step.model.modules()):
            return super()._fitting(window, work)  # the others wait for its rows in the middle of a pass

        # Ranks step down together. One that fails first takes part in the sums of gradients that the others wait for.
        def together() -> T:
            try:
                done = work()
                message = ""
            except (RuntimeError, InputRefused) as error:
                if not out_of_memory(error):
                    raise
                message = str(error).splitlines()[0]
            if message:
                emptied(self.step.device)
                for bucket in self._buckets[len(self._summed) :]:
                    self.world.sum(torch.zeros_like(bucket, device=self.step.device))
            if self.world.any(bool(message))[0]:
                raise torch.OutOfMemoryError(message or "on another rank")
            return done

        return Engine._fitting(self, window, together)

    def _step_down(self, window: Batch, message: str) -> None:
        super()._step_down(window, message)
        self._wrap()

    def _forward(self, step: Step, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        return self.parallel(batch, step.loss_factor)

    def _without_gradient(self, step: Step) -> None:
        # The other ranks wait for this rank's gradient, even if it is all zeros.
        self.parallel.module(None, step.loss_factor).backward()


@final
class Sharded(RankEngine):
    """The engine of a module of which every rank holds some rows of each parameter (FSDP2).

    The tensors of its state are sharded (`torch.distributed.tensor.DTensor`).

    Attributes:
        joining: returns the context of a micro-batch; its argument says whether it is the window's last.
        shards: the layout of the sharded parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        world: World,
        micro_batch: int | None = None,
        halved: bool = False,
        by_machine: bool = False,
        **others: Any,
    ):
        """Give each rank its rows; the arguments are those of `Replicated`, and the last two of `Shards`."""
        self.world = world
        self.shards = Shards(world, halved, by_machine)
        self.joining = lambda last: nullcontext()
        layout = self.shards.layout(accumulate=self._accumulate, complete=total)
        step = Step(model, sum_over_ranks=world.sum, layout=layout, **others)
        step.recorder = None  # a replayed micro-step would contain collectives
        super().__init__(lambda: step, micro_batch)

    def load_state(self, state: EngineState) -> None:
        """Load a state as `Engine.load_state` does; each rank takes its rows of whole tensors."""
        own = self.state()
        model = OwnRows(state.model, own.model)
        optimizer = OwnRows(state.optimizer, own.optimizer)
        super().load_state(EngineState(model, optimizer, state.scalars))

    def _forward(self, step: Step, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        return step.forward(batch, step.loss_factor)

    def _without_gradient(self, step: Step) -> None:
        raise UsageError(
            "a micro-batch's loss does not depend on the parameters, and fsdp needs a backward pass through all of "
            "them: have the loss call the model for rows without targets too, or take train.parallel = ddp"
        )


@final
class StreamedReplica(RankEngine, Streamed):
    """The engine of a module that every rank streams whole from its host; gradients are summed stage by stage."""

    def __init__(self, model: nn.Module, *, world: World, placement: Placement | None = None, **others: Any):
        """Move the module's parameters to their homes; the other arguments are those of `Streamed`."""
        self.world = world
        placement = placement or Placement()
        if placement.when == "backward":  # an update then is decided on by one rank's losses
            placement = replace(placement, when="next forward")
        Streamed.__init__(self, model, placement=placement, sum_over_ranks=world.sum, **others)

    def accumulate(self, window: Batch) -> None:
        """Add the window's exact gradient, as `Engine.accumulate` does."""
        if not self.walk.fresh:
            raise UsageError("several ranks take one window an update")  # the first one's sum would be summed again
        super().accumulate(window)


class _Whole(nn.Module):
    """The forward pass and loss of a step as one module; without a batch, a zero that depends on every parameter."""

    def __init__(self, step: Step):
        super().__init__()
        self.model = step.model
        self.__dict__["step"] = step

    def forward(self, batch: Any, loss_factor: Tensor) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        if batch is None:
            # The gradients come from the last parameter to the first, about as in a real backward pass.
            return torch.cat([weight.flatten()[:0] for weight in self.parameters() if weight.requires_grad]).sum()
        step: Step = self.__dict__["step"]
        return step.forward(batch, loss_factor)
