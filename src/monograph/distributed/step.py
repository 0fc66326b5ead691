"""The step of one rank among several: DDP or FSDP2 adds its gradients to the others'.

    gradient = sum over ranks of d/dp (1 / N  sum of the rank's losses),   N = targets of all ranks

which is the gradient of one process with all micro-batches. Both engines would average, of a loss that is multiplied by
the number of ranks: in fp16 that factor overflows sooner, and rounds what is subnormal otherwise. So they are told to
add. Shapes: the window's units (micro-batches) go to ranks in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from monograph import compat
from monograph.distributed.world import World
from monograph.ops.philox import LOW32
from monograph.step import Step


class RankStep(Step):
    """What DDP and FSDP2 have in common.

    Attributes:
        world: the ranks.
        left: micro-batches of the present window that are still to come.
    """

    def __init__(self, model: nn.Module, *, world: World, **others: Any):
        """Prepare a step; `others` are `Step`'s own."""
        self.world, self.left, self.unit = world, 0, 0
        super().__init__(model, sum_over_ranks=world.sum, **others)
        self.recorder = None  # a replay would hold collectives

    def count_window(self, batches: Sequence[Any]) -> None:
        """See `Step.count_window`."""
        self.left, self.unit = len(batches), 0
        super().count_window(batches)

    def joining(self) -> AbstractContextManager[None]:
        """The context of the micro-batch that is next; a hook for how often gradients are summed over ranks."""
        return nullcontext()

    def _micro_step(self, batch: Any) -> None:
        # What a module draws (dropout) depends on the unit alone, not on who computes it nor on how many there are.
        number = self.unit * self.world.size + self.world.rank
        torch.manual_seed(hash((self.optim.seed, self.index, number)) & LOW32)
        self.left, self.unit = self.left - 1, self.unit + 1
        with self.joining():
            super()._micro_step(batch)

    def total(self) -> None:
        """Sum loss and count over the ranks, once before the update."""
        totals = self.world.sum(torch.stack([self.loss_sum, self.count.double()]))
        self.loss_sum.copy_(totals[0])
        self.count.copy_(totals[1])


class ReplicatedStep(RankStep):
    """Every rank has the whole model, and DDP adds up the gradients: all that `Step` can do, a copy of it each."""

    def __init__(self, model: nn.Module, **others: Any):
        """Prepare a step; see `RankStep`."""
        super().__init__(model, **others)
        compat.one_graph_under_ddp()
        # Not gradient_as_bucket_view: gradients are views of the planes already.
        self.parallel = DistributedDataParallel(_Whole(self))
        # A lambda, since torch refuses annotations that are text.
        self.parallel.register_comm_hook(None, lambda _, bucket: self.world.summing(bucket.buffer()))
        # DDP lays its buckets out anew after a process's first pass, and more than two ranks' numbers are then added in
        # another order. That pass is over before the first update, so ranks that are started again have the same bits.
        reached: Tensor = self.parallel(None, self.seed)
        reached.backward()  # type: ignore[no-untyped-call]

    def joining(self) -> AbstractContextManager[None]:
        """Gradients are summed over ranks with the window's last micro-batch, all at once."""
        return self.parallel.no_sync() if self.left else nullcontext()

    def add_no_gradient(self) -> None:
        """See `Step.add_no_gradient`: the others wait for this rank's gradient, if it is all zeros too."""
        nothing: Tensor = self.parallel.module(None, self.seed)
        nothing.backward()  # type: ignore[no-untyped-call]

    def run(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        """See `Step.run`; what follows from it is watched by DDP."""
        found: tuple[Tensor, Tensor, Tensor] = self.parallel(batch, self.seed)
        return found


class _Whole(nn.Module):
    """Forward pass and loss of a step as one module; without a batch, a zero that depends on every parameter."""

    def __init__(self, step: ReplicatedStep):
        super().__init__()
        self.model = step.model
        self.__dict__["step"] = step

    def forward(self, batch: Any, seed: Tensor) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        if batch is None:
            # Gradients come from the last parameter to the first, about as those of a real pass do.
            return torch.cat([each.flatten()[:0] for each in self.parameters() if each.requires_grad]).sum()
        return self.step.forward(batch, seed)  # type: ignore[union-attr, operator, no-any-return]
