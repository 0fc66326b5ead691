"""Keep a whole copy of the parameters on each rank; DDP sums their gradients over the ranks."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from monograph import compat
from monograph.distributed.by_rank import ByRank
from monograph.distributed.world import World
from monograph.step import Step


class Replicas(ByRank):
    """The parameters of a module of which each rank has a whole copy.

    DDP sums gradients in buckets, each of which has the gradients of several parameters.

    Attributes:
        parallel: DDP around the module and its loss.
        buckets: the buckets of a backward pass, in order, as tensors without memory.
        summed: the buckets of the window that this rank has begun to sum.
    """

    parallel: DistributedDataParallel

    def __init__(self, world: World):
        """Store the ranks; `wrap` must be called when the step was made."""
        super().__init__(world)
        compat.one_graph_under_ddp()
        self.buckets = list[Tensor]()
        self.summed = list[Tensor]()
        # Gradients are summed over ranks with the window's last micro-batch only.
        self.micro_batch_context = lambda last: nullcontext() if last else self.parallel.no_sync()

    def wrap(self) -> None:
        """Give the step's module to a new DDP, and make two backward passes.

        A new DDP is also needed after a backward pass has failed.
        """
        # gradient_as_bucket_view stays off, because gradients are views of the planes already.
        self.parallel = DistributedDataParallel(_ModelWithLoss(self.step))
        # A lambda, because torch refuses hooks whose annotations are not its own classes.
        self.parallel.register_comm_hook(None, lambda _, bucket: self._sum_bucket(bucket.buffer()))
        # After its first backward pass, DDP rebuilds its buckets, which changes the order in which
        # the gradients of more than two ranks are summed. Because these passes come before the
        # first update, restarted ranks get the same bits.
        for _ in range(2):
            self.summed = []
            # Gradients may be disabled, if memory has run out in an evaluation.
            with torch.enable_grad():
                self.parallel(None, self.step.loss_factor).backward()
        self.buckets = self.summed

    def begin(self) -> None:
        """Begin a window: none of its buckets was summed."""
        self.summed = []

    def begin_again(self) -> None:
        """Wrap the module in a new DDP."""
        self.wrap()

    def forward(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return what `Step.forward` returns, with DDP around it."""
        loss, loss_sum, count = self.parallel(batch, self.step.loss_factor)
        return loss, loss_sum, count

    def handle_missing_gradient(self) -> None:
        """Give the other ranks, which wait for it, a gradient of zeros."""
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
        self.__dict__["step"] = step

    def forward(self, batch: Any, loss_factor: Tensor) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        if batch is None:
            # Concatenated, so that gradients come from the last parameter to the first, about as in
            # a real backward pass.
            empty = [weight.flatten()[:0] for weight in self.parameters() if weight.requires_grad]
            return torch.cat(empty).sum()
        step: Step = self.__dict__["step"]
        return step.forward(batch, loss_factor)
