"""Predict the time of a streamed update.

The engine's walk over the stages of the model runs on tensors without data, and a clock replaces the
device. The work is given to lanes, which are queues: for computations, for copies in each direction
and for the host (`monograph.stream.lanes`). Each lane has its own time. A piece of work begins when
its lane is free and all work that it waits for is finished. A copy takes bytes / bandwidth, and a
computation takes as long as `Costs` says.

Walk, slots, staging buffers, stage inputs, lanes and waits are those of training, so the timed
schedule is the real one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from monograph.optim import Plane
from monograph.step import Step
from monograph.stream.engine import Streamed
from monograph.stream.lanes import LANES, Home, Lane, LaneMark, LaneWork
from monograph.stream.slots import HostPartUpdate, Passes, StageOnDevice
from monograph.stream.store import BlockArguments, Stage

# Updates that are run. The first one is shorter, because no earlier update is unfinished. Every
# later update takes as long as the second.
UPDATES = 2
DISK = "disk"  # the key of the disk among the lanes of `busy_s`
T = TypeVar("T")


class Link(NamedTuple):
    """The rates of copies, in bytes/s.

    Attributes:
        into: to the device.
        out: from the device; copies to the device may run at the same time.
        disk: to or from files; one copy runs at a time.
    """

    into: float
    out: float
    disk: float = float("inf")


class Costs(NamedTuple):
    """The seconds that computations take.

    Attributes:
        first_s: the forward pass of the parts before the blocks (such as the embedding), for one
            micro-batch.
        forward_s: the forward pass of one block, for one micro-batch.
        recompute_backward_s: the recomputed forward pass and the backward pass of one block, for one
            micro-batch.
        loss_s: the forward and backward pass of the parts after the blocks and the loss, for one
            micro-batch.
        first_backward_s: the backward pass of the parts before the blocks, for one micro-batch.
        weight_update_s: the update of one weight on the device.
        host_weight_update_s: the update of one weight on the host.
    """

    first_s: float = 0.0
    forward_s: float = 0.0
    recompute_backward_s: float = 0.0
    loss_s: float = 0.0
    first_backward_s: float = 0.0
    weight_update_s: float = 0.0
    host_weight_update_s: float = 0.0


class UpdateTiming(NamedTuple):
    """The timing of one update in the middle of a training.

    Attributes:
        update_s: seconds from the end of the previous update to the end of this update.
        busy_s: for how many of these seconds "compute", "in", "out", "host" and "disk" are busy.
        moved_bytes: bytes copied, by (home of the source, home of the target).
    """

    update_s: float
    busy_s: Mapping[str, float]
    moved_bytes: Mapping[tuple[Home, Home], int]

    @property
    def bottleneck(self) -> str:
        """Return what is busy for longest: the name of a lane, or "disk"."""
        return max(self.busy_s, key=lambda name: self.busy_s[name])


@dataclass
class Clock:
    """An executor that counts time instead of copying.

    Attributes:
        link: the rates of copies.
        free_at_s: the time at which each lane has finished its work.
        busy_s: seconds for which each lane and the disk have worked.
        finished_at_s: the time at which each piece of work was finished.
    """

    link: Link
    free_at_s: dict[Lane, float] = field(default_factory=lambda: dict.fromkeys(LANES, 0.0))
    busy_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys((*LANES, DISK), 0.0))
    finished_at_s: dict[LaneMark, float] = field(default_factory=dict)
    _disk_free_at_s: float = 0.0
    _spent_s: float = 0.0  # seconds of the current computation so far

    def spend(self, seconds: float) -> None:
        """Make the current computation last this much longer."""
        self._spent_s += seconds

    def run(self, work: LaneWork) -> Any:
        """Advance the lane by the time that the work takes.

        Returns:
            The result of a computation; None for a copy, which is not made.
        """
        lane = work.mark.lane
        # As on real lanes, the work waits for earlier work on its lane and for its `waits`.
        waits_until_s = [self.finished_at_s[mark] for mark in work.waits]
        begin_s = max([self.free_at_s[lane], *waits_until_s])
        result = None
        if lane in ("compute", "host"):
            self._spent_s = 0.0
            result = work.call()
            duration_s = self._spent_s
        elif lane == "in":
            duration_s = work.moved_bytes / self.link.into
        else:
            duration_s = work.moved_bytes / self.link.out
        busy_s = duration_s
        touches_disk = any(space.home == Home.DISK for space in (*work.reads, *work.writes))
        if touches_disk:
            # All lanes share one disk. Work on the compute lane never touches it.
            begin_s = max(begin_s, self._disk_free_at_s)
            disk_s = work.moved_bytes / self.link.disk
            self._disk_free_at_s = begin_s + disk_s
            self.busy_s[DISK] += disk_s
            duration_s = max(duration_s, disk_s)
            # The host is not busy while it waits for a file; the lanes of copies are.
            if lane != "host":
                busy_s = duration_s
        end_s = begin_s + duration_s
        self.free_at_s[lane] = end_s
        self.finished_at_s[work.mark] = end_s
        self.busy_s[lane] += busy_s
        return result

    def finish(self) -> None:
        """Advance all lanes to the time at which the last of them is free."""
        self.free_at_s = dict.fromkeys(LANES, max(self.free_at_s.values()))


class TimedPasses(Passes):
    """Passes that compute nothing; they only make the clock's current computation last longer."""

    def __init__(self, step: Step, clock: Clock, costs: Costs, state: Tensor):
        """Take what the passes need.

        Args:
            step: the step.
            clock: the clock to advance.
            costs: the seconds that computations take.
            state: a tensor on the meta device. It stands for every state and gradient that one
                stage passes to another.
        """
        super().__init__(step)
        self.clock = clock
        self.costs = costs
        self.state = state

    def run_with_weights(
        self, needed: Sequence[StageOnDevice], call: Callable[[], T], backward: bool
    ) -> T:
        """Run a call; parameters stay where they are, because nothing reads them."""
        return call()

    def forward_first(self, batch: object) -> tuple[Tensor, BlockArguments]:
        """Spend `first_s`."""
        self.clock.spend(self.costs.first_s)
        return self.state, ()

    def forward_blocks(
        self, stage: Stage, state: Tensor, block_arguments: BlockArguments
    ) -> Tensor:
        """Spend `forward_s` for each block."""
        self.clock.spend(self.costs.forward_s * len(stage.blocks))
        return state

    def backward_last(self, planes: Sequence[Plane], state: Tensor, batch: object) -> Tensor:
        """Spend `loss_s`."""
        self.clock.spend(self.costs.loss_s)
        return state

    def backward_blocks(
        self,
        planes: Sequence[Plane],
        state: Tensor,
        *,
        stage: Stage,
        block_arguments: BlockArguments,
        gradient: Tensor,
    ) -> Tensor:
        """Spend `recompute_backward_s` for each block."""
        self.clock.spend(self.costs.recompute_backward_s * len(stage.blocks))
        return state

    def backward_first(self, planes: Sequence[Plane], batch: object, gradient: Tensor) -> None:
        """Spend `first_backward_s`."""
        self.clock.spend(self.costs.first_backward_s)

    def squares(self, plane: Plane, grad: Tensor) -> list[Tensor]:
        """Spend no time."""
        return [self.step.loss_sum]

    def update_part(
        self, plane: Plane, rest: Tensor | None, total: Tensor, scale: Tensor, accepted: Tensor
    ) -> None:
        """Spend `weight_update_s` for each weight."""
        self.clock.spend(self.costs.weight_update_s * plane.param.numel())

    def update_on_host(self, update: HostPartUpdate, plane: Plane, rest: Tensor | None) -> None:
        """Spend `host_weight_update_s` for each weight."""
        self.clock.spend(self.costs.host_weight_update_s * plane.param.numel())


def time_update(engine: Streamed, clock: Clock, micro_batches: int) -> UpdateTiming:
    """Run updates that compute nothing, and return the timing of one in the middle of a training.

    Args:
        engine: the engine of a model on the meta device; the executor of its lanes is `clock`, and
            its passes are `TimedPasses`.
        clock: the clock, which is advanced to the end of the last update.
        micro_batches: the number of micro-batches in an update.
    """
    walk = engine.walk
    moved_bytes = walk.lanes.moved_bytes
    # A schedule depends only on shapes, so a model of any size is timed without its memory. Buffers
    # on the host are on the meta device as well.
    with torch.device("meta"):
        for _ in range(UPDATES):
            begin_s = clock.free_at_s["compute"]
            busy_s_before = dict(clock.busy_s)
            moved_bytes_before = moved_bytes.copy()
            walk.accumulate([None] * micro_batches)
            walk.update()
    return UpdateTiming(
        update_s=clock.free_at_s["compute"] - begin_s,
        busy_s={name: seconds - busy_s_before[name] for name, seconds in clock.busy_s.items()},
        moved_bytes=moved_bytes - moved_bytes_before,
    )
