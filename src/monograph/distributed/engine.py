"""Engines of one rank among several, whose gradients DDP or FSDP2 sums over the ranks.

    gradient = sum over ranks of d/dp (1 / N · sum of the rank's losses),   N = targets of all ranks

This is the gradient of one process with all micro-batches. A window has the rows of one update, and
its micro-batches go to the ranks in turn.

DDP and FSDP2 average gradients by default. To get the sum from the average, the loss would have to be
multiplied by the number of ranks. In fp16 that would make losses overflow sooner, and round subnormals
differently. So DDP and FSDP2 are set to sum gradients.
"""

from dataclasses import replace
from typing import TypedDict, Unpack, final

from torch import nn

from monograph.distributed.replicated import Replicas
from monograph.distributed.retries import RestartAll, RetryTogether
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
    """Trains a module of which each rank has a copy (DDP).

    Attributes:
        replicas: the parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        world: World,
        micro_batch: int | None = None,
        **step_options: Unpack[StepOptions],
    ):
        """Build the step on the module's device.

        Args:
            model: the module, the same on all ranks.
            world: the ranks.
            micro_batch: rows of a micro-batch; None: an even share of the window.
            step_options: other arguments of `Step`.
        """
        self.replicas = Replicas(world)
        step = Step(model, sum_over_ranks=world.sum, parameters=self.replicas, **step_options)
        super().__init__(lambda: step, RetryTogether(micro_batch, self.replicas))
        self.replicas.wrap()


@final
class Sharded(Engine):
    """Trains a module of which each rank has some rows of each parameter (FSDP2).

    The tensors of the engine's state are sharded (`torch.distributed.tensor.DTensor`).

    Attributes:
        shards: the parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        world: World,
        micro_batch: int | None = None,
        gathers_bf16: bool = False,
        by_machine: bool = False,
        **step_options: Unpack[StepOptions],
    ):
        """Give each rank its rows.

        Args:
            model: see `Replicated`.
            world: see `Replicated`.
            micro_batch: see `Replicated`.
            gathers_bf16: see `Shards`.
            by_machine: see `Shards`.
            step_options: other arguments of `Step`.
        """
        self.shards = Shards(world, gathers_bf16=gathers_bf16, by_machine=by_machine)
        step = Step(model, sum_over_ranks=world.sum, parameters=self.shards, **step_options)
        super().__init__(lambda: step, RestartAll(micro_batch, world))

    def load_state(self, state: EngineState) -> None:
        """Load a state of unsharded tensors, of which each rank takes its rows; see `Engine.load_state`."""
        own = self.state()
        model = OwnRows(state.model, own.model)
        optimizer = OwnRows(state.optimizer, own.optimizer)
        super().load_state(EngineState(model=model, optimizer=optimizer, scalars=state.scalars))


def streamed_replica(
    model: nn.Module,
    *,
    world: World,
    micro_batch: int | None = None,
    placement: Placement | None = None,
    **step_options: Unpack[StepOptions],
) -> Streamed:
    """Return the engine of a module of which each rank streams a copy from its host.

    Gradients are summed over ranks stage by stage (`monograph.stream`).

    Args:
        model: the module, the same on all ranks.
        world: the ranks.
        micro_batch: rows of a micro-batch; None: an even share of the window.
        placement: where buffers live and when weights are updated; "backward" is replaced by "next
            forward".
        step_options: other arguments of `Step`.
    """
    placement = placement or Placement()
    if placement.when == "backward":
        # In the backward pass, the losses of the other ranks are not known. But they, too, decide whether
        # an update is applied.
        placement = replace(placement, when="next forward")
    retries = RestartAll(micro_batch, world)
    return Streamed(
        model, placement=placement, sum_over_ranks=world.sum, retries=retries, **step_options
    )
