"""Keep a whole copy of the parameters on every rank, whose gradients DDP sums over the ranks."""

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
    """The parameters of a module that every rank holds whole.

    Attributes:
        parallel: the module, its loss and what sums their gradients over the ranks.
        buckets: the memory, without values, of the gradients that are summed at once, in order.
        summed: those of them that this rank has given to a sum of the window.
    """

    parallel: DistributedDataParallel

    def __init__(self, world: World):
        """Take the ranks; `wrap` is to be called when the step is made."""
        super().__init__(world)
        compat.one_graph_under_ddp()
        self.buckets = list[Tensor]()
        self.summed = list[Tensor]()
        # Gradients are summed over ranks all at once, with the window's last micro-batch.
        self.joining = lambda last: nullcontext() if last else self.parallel.no_sync()

    def wrap(self) -> None:
        """Give the step's module to a new DDP, as one whose backward pass failed cannot go on."""
        # gradient_as_bucket_view stays off, because gradients are views of the planes already.
        self.parallel = DistributedDataParallel(_Whole(self.step))
        # This is a lambda because torch refuses a hook whose annotations are not its own classes.
        self.parallel.register_comm_hook(None, lambda _, bucket: self._summing(bucket.buffer()))
        # After its first backward pass DDP rebuilds its buckets, so that the gradients of more than
        # two ranks are summed in another order. These passes, made before the first update, give
        # restarted ranks the same bits.
        for _ in range(2):
            self.summed = []
            with torch.enable_grad():  # memory may have run out in an evaluation
                self.parallel(None, self.step.loss_factor).backward()
        self.buckets = self.summed

    def begin(self) -> None:
        """Count the sums of the window's gradients from the first one."""
        self.summed = []

    def begin_again(self) -> None:
        """Wrap the module anew."""
        self.wrap()

    def forward(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return what `Step.forward` returns, with DDP around it."""
        loss, loss_sum, count = self.parallel(batch, self.step.loss_factor)
        return loss, loss_sum, count

    def without_gradient(self) -> None:
        """Give the other ranks, which wait for it, a gradient of zeros."""
        self.parallel.module(None, self.step.loss_factor).backward()

    def _summing(self, bucket: Tensor) -> torch.futures.Future[Tensor]:
        self.summed.append(torch.empty_like(bucket, device="meta"))
        return self.world.summing(bucket)


class _Whole(nn.Module):
    """The forward pass and loss of a step as one module; without a batch, a zero that depends on
    every parameter.
    """

    def __init__(self, step: Step):
        super().__init__()
        self.model = step.model
        self.__dict__["step"] = step

    def forward(self, batch: Any, loss_factor: Tensor) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        if batch is None:
            # The gradients come from the last parameter to the first, about as in a real backward
            # pass.
            return torch.cat(
                [weight.flatten()[:0] for weight in self.parameters() if weight.requires_grad]
            ).sum()
        step: Step = self.__dict__["step"]
        return step.forward(batch, loss_factor)
