"""Keep a copy of all parameters on each rank; DDP sums their gradients over the ranks."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from monograph import compat
from monograph.distributed.by_rank import ByRank
from monograph.distributed.world import World
from monograph.model.llama import is_never_trained
from monograph.step import Step


class Replicas(ByRank):
    """The parameters of a module of which each rank has a copy.

    DDP sums gradients in buckets, each of which has the gradients of several parameters.

    Attributes:
        parallel: DDP around the module and its loss.
        buckets: all buckets of a backward pass, in the order in which they are summed, as tensors
            without memory.
        summed: the buckets that this rank has begun to sum for the present window, in the same order.
    """

    parallel: DistributedDataParallel

    def __init__(self, world: World):
        """Store the ranks; `wrap` must be called once the step exists."""
        super().__init__(world)
        compat.one_graph_under_ddp()
        self.buckets = list[Tensor]()
        self.summed = list[Tensor]()

    def micro_batch_context(self, is_last: bool) -> AbstractContextManager[None]:
        """Return a context in which DDP sums gradients with the window's last micro-batch only."""
        if is_last:
            return nullcontext()
        context: AbstractContextManager[None] = self.parallel.no_sync()
        return context

    def wrap(self) -> None:
        """Wrap the step's module in a new DDP, and make two backward passes.

        A new DDP is also needed after a backward pass has failed.
        """
        # gradient_as_bucket_view stays off, because gradients are already views of the step's planes, which
        # are large flat tensors.
        module = _ModelWithLoss(self.step)
        # DDP would wait for gradients that no backward pass makes.
        never_trained = [name for name, _ in module.named_parameters() if is_never_trained(name)]
        compat.leave_out_of_ddp(module, never_trained)
        self.parallel = DistributedDataParallel(module)
        # A lambda, because torch refuses a hook whose annotations are other classes than it expects.
        self.parallel.register_comm_hook(
            state=None, hook=lambda _, bucket: self._sum_bucket(bucket.buffer())
        )
        # After its first backward pass, DDP rebuilds its buckets, which changes the order in which the
        # gradients of more than two ranks are summed. So a pass is made here, before the first update:
        # otherwise the first update of restarted ranks would have other bits. The second pass records
        # the rebuilt buckets.
        for _ in range(2):
            self.summed = []
            # Gradients may be disabled, if memory has run out in an evaluation.
            with torch.enable_grad():
                self.parallel(None, self.step.loss_factor).backward()
        self.buckets = self.summed

    def begin(self) -> None:
        """Begin a window: no bucket has been summed yet."""
        self.summed = []

    def begin_again(self) -> None:
        """Wrap the module in a new DDP."""
        self.wrap()

    def forward(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return the results of `Step.forward`, which DDP calls."""
        loss, loss_sum, count = self.parallel(batch, self.step.loss_factor)
        return loss, loss_sum, count

    def handle_missing_gradient(self) -> None:
        """Let DDP sum a gradient of zeros, since the other ranks wait for this rank's."""
        self.parallel.module(None, self.step.loss_factor).backward()

    def _sum_bucket(self, bucket: Tensor) -> torch.futures.Future[Tensor]:
        """Start to sum a bucket over ranks, in place."""
        self.summed.append(torch.empty_like(bucket, device="meta"))
        return self.world.sum_async(bucket)


class _ModelWithLoss(nn.Module):
    """The forward pass and the loss of a step as one module.

    Without a batch it returns 0, computed from all parameters, so that each gets a gradient of
    zeros.
    """

    def __init__(self, step: Step):
        super().__init__()
        self.model = step.model
        self.step = step

    def forward(self, batch: Any, loss_factor: Tensor) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        if batch is None:
            # DDP orders its buckets by the order in which a backward pass reaches the parameters. Of a
            # concatenation it reaches the last one first, much as in a real backward pass.
            empty = [weight.flatten()[:0] for weight in self.parameters() if weight.requires_grad]
            return torch.cat(empty).sum()
        return self.step.forward(batch, loss_factor)
