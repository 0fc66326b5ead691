"""Accumulate the gradient of one rank's share of a window, and sum it with those of all other
ranks.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from monograph.distributed.world import World
from monograph.ops.philox import LOW32
from monograph.optim import unlinked
from monograph.step import OnDevice, Step


class ByRank(OnDevice):
    """The parameters of one rank among several.

    Attributes:
        world: the ranks.
        joining: returns the context of a micro-batch; its argument says whether it is the window's
            last.
    """

    replays = False  # a replayed micro-step would contain collectives

    def __init__(self, world: World):
        """Take the ranks; what sums gradients over them does so by hooks, so products must not add
        them.
        """
        super().__init__(fused=False)
        self.world = world
        self.joining: Callable[[bool], AbstractContextManager[None]] = lambda last: nullcontext()

    def accumulate(self, batches: Sequence[Any]) -> None:
        """Add the gradient of this rank's micro-batches; with the last one, gradients are those of
        all ranks.
        """
        step = self.step
        step.link()
        for unit, batch in enumerate(batches):
            seed(self.world, step, unit)
            with self.joining(unit + 1 == len(batches)):
                with unlinked(step.planes), step.context():
                    loss, loss_sum, count = self.forward(batch)
                if not step.differentiate(loss, loss_sum, count):
                    self.without_gradient()

    def complete(self) -> None:
        """Sum loss and count over the ranks."""
        self.step.sum_window_over_ranks()

    @abstractmethod
    def forward(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return the number to differentiate, the sum of losses and the number of targets, as
        `Step.forward` does.
        """

    @abstractmethod
    def without_gradient(self) -> None:
        """Do what ranks must where a micro-batch's loss depends on no parameter."""


def seed(world: World, step: Step, unit: int) -> None:
    """Seed torch's generator (for dropout) by the micro-batch's number, so that the number of ranks
    does not matter.
    """
    torch.manual_seed(hash((step.optim.seed, step.index, unit * world.size + world.rank)) & LOW32)
