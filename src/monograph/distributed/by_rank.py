"""Accumulate the gradient of one rank's share of a window, and sum it over the ranks.

A window is the rows of one update. Its micro-batches go to the ranks in turn.
"""

from abc import abstractmethod
from collections.abc import Sequence
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
    """

    replays = False  # a micro-step contains collectives, which are not recorded

    def __init__(self, world: World):
        """Store the ranks."""
        # Matrix products must not add gradients themselves: hooks on the gradients sum them over
        # the ranks.
        super().__init__(fused=False)
        self.world = world

    def micro_batch_context(self, is_last: bool) -> AbstractContextManager[None]:
        """Return the context in which a micro-batch runs.

        Args:
            is_last: whether the micro-batch is the last one of the window.
        """
        return nullcontext()

    def accumulate(self, batches: Sequence[Any]) -> None:
        """Add the gradients of this rank's micro-batches, and sum them over the ranks.

        The sum is part of the backward pass: DDP sums with the last micro-batch, FSDP2 with each.
        """
        step = self.step
        step.link()  # gradients become views of the step's planes, which are large flat tensors
        for number, batch in enumerate(batches):
            seed_micro_batch(self.world, step, number)
            with self.micro_batch_context(is_last=number + 1 == len(batches)):
                with unlinked(step.planes), step.context():
                    loss, loss_sum, count = self.forward(batch)
                if not step.differentiate(loss, loss_sum, count):
                    self.handle_missing_gradient()

    def complete(self) -> None:
        """Sum loss and count over the ranks."""
        self.step.sum_window_over_ranks()

    @abstractmethod
    def forward(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return the number to differentiate, the sum of losses and the number of targets of a
        micro-batch; see `Step.forward`.
        """

    @abstractmethod
    def handle_missing_gradient(self) -> None:
        """Handle a micro-batch of this rank whose loss does not depend on the parameters.

        Such a micro-batch has no backward pass. But the other ranks sum gradients during theirs, and
        wait for this rank. So what they wait for must be done here, or the loss must be refused.
        """


def seed_micro_batch(world: World, step: Step, number: int) -> None:
    """Seed torch's random generator, e.g. for dropout, before a micro-batch.

    The seed depends on the number of the micro-batch in the window, so the number of ranks does not
    matter.

    Args:
        world: the ranks.
        step: the step.
        number: the number of the micro-batch among this rank's micro-batches, from 0.
    """
    number_in_window = number * world.size + world.rank
    torch.manual_seed(hash((step.optim.seed, step.index, number_in_window)) & LOW32)
