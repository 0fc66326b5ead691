"""Engines of one rank among several, whose gradients DDP or FSDP2 sums over the ranks.

    gradient = sum over ranks of d/dp (1 / N  sum of the rank's losses),   N = targets of all ranks

which is the gradient of one process with all micro-batches. By default both of torch's engines
average gradients, so the loss would have to be multiplied by the number of ranks: in fp16 that
factor overflows sooner, and rounds subnormals differently. So they are set to sum instead. A
window's micro-batches go to the ranks in turn.
"""

from dataclasses import replace
from typing import TypedDict, Unpack, final

from torch import nn

from monograph.distributed.replicated import Replicas
from monograph.distributed.retries import BeginAgain, Together
from monograph.distributed.rows import OwnRows
from monograph.distributed.sharded import Shards
from monograph.distributed.world import World
from monograph.engine import Engine
from monograph.graph.precision import Precision
from monograph.graph.remat import Policy
from monograph.loop import EngineState
from monograph.loss import Loss
from monograph.optim import Optimizer
from monograph.schedule import Schedule
from monograph.step import Clip, Step
from monograph.stream.engine import Streamed
from monograph.stream.placement import Placement


class StepOptions(TypedDict, total=False):
    """The arguments of `Step` that an engine passes on."""

    loss: Loss
    optim: Optimizer | None
    schedule: Schedule | None
    clip: float | Clip | None
    precision: Precision | None
    remat: Policy | None


@final
class Replicated(Engine):
    """The engine of a module that every rank holds whole (DDP); the gradient is that of one
    process.

    Attributes:
        replicas: the parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        world: World,
        micro_batch: int | None = None,
        **others: Unpack[StepOptions],
    ):
        """Build the step on the module's device.

        Args:
            model: the module, equal on every rank.
            world: the ranks.
            micro_batch: rows of a micro-batch; None: an even share of the window.
            others: further arguments of `Step`.
        """
        self.replicas = Replicas(world)
        step = Step(model, sum_over_ranks=world.sum, parameters=self.replicas, **others)
        super().__init__(lambda: step, Together(micro_batch, self.replicas))
        self.replicas.wrap()


@final
class Sharded(Engine):
    """The engine of a module of which every rank holds some rows of each parameter (FSDP2).

    The tensors of its state are sharded (`torch.distributed.tensor.DTensor`).

    Attributes:
        shards: the parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        world: World,
        micro_batch: int | None = None,
        halved: bool = False,
        by_machine: bool = False,
        **others: Unpack[StepOptions],
    ):
        """Give each rank its rows; the arguments are those of `Replicated`, and the last two of
        `Shards`.
        """
        self.shards = Shards(world, halved, by_machine)
        step = Step(model, sum_over_ranks=world.sum, parameters=self.shards, **others)
        super().__init__(lambda: step, BeginAgain(micro_batch, world))

    def load_state(self, state: EngineState) -> None:
        """Load a state as `Engine.load_state` does; each rank takes its rows of whole tensors."""
        own = self.state()
        model = OwnRows(state.model, own.model)
        optimizer = OwnRows(state.optimizer, own.optimizer)
        super().load_state(EngineState(model, optimizer, state.scalars))


def streamed_replica(
    model: nn.Module,
    *,
    world: World,
    micro_batch: int | None = None,
    placement: Placement | None = None,
    **others: Unpack[StepOptions],
) -> Streamed:
    """Return the engine of a module that every rank streams whole from its host; gradients are
    summed stage by stage.

    The other arguments are those of `Streamed`.
    """
    placement = placement or Placement()
    if placement.when == "backward":  # an update then is decided on by one rank's losses
        placement = replace(placement, when="next forward")
    retries = BeginAgain(micro_batch, world)
    return Streamed(model, placement=placement, sum_over_ranks=world.sum, retries=retries, **others)
