"""Predict a streamed update's time: a clock takes the device's place, and the walk runs on tensors
without data.

Each lane has a time of its own. A piece of work begins when its lane is free and all work that it
waits for is done. A copy lasts bytes / bandwidth, and computing lasts as long as `Costs` says.
Walk, slots, staging buffers, boundaries, lanes and waits are those that train, so the schedule that
is timed is the real one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from monograph.optim import Plane
from monograph.step import Step
from monograph.stream.engine import Streamed
from monograph.stream.lanes import LANES, Home, Lane, LaneWork, Mark
from monograph.stream.slots import HostPiece, Passes, StageOnDevice
from monograph.stream.store import Further, Stage

UPDATES = 2  # updates that are run; every later update takes as long as the last of these
DISK = "disk"
T = TypeVar("T")


class Link(NamedTuple):
    """The rates of copies, in bytes/s.

    Attributes:
        into: to the device.
        out: from the device, at the same time.
        disk: to or from files, one copy at a time.
    """

    into: float
    out: float
    disk: float = float("inf")


class Costs(NamedTuple):
    """The seconds that computing takes: each pass for one micro-batch, and the update of one
    parameter.

    Attributes:
        first_s: the forward pass of the parts before the blocks, such as the embedding.
        forward_s: one block's forward pass.
        again_s: one block's repeated forward pass and its backward pass.
        loss_s: the parts after the blocks and the loss, forward and backward.
        first_again_s: the backward pass of the parts before the blocks.
        number_s: the update of one parameter on the device.
        host_number_s: the update of one parameter on the host.
    """

    first_s: float = 0.0
    forward_s: float = 0.0
    again_s: float = 0.0
    loss_s: float = 0.0
    first_again_s: float = 0.0
    number_s: float = 0.0
    host_number_s: float = 0.0


class UpdateTiming(NamedTuple):
    """The timing of one update among many.

    Attributes:
        update_s: seconds from the end of one update to the end of the next.
        busy_s: seconds in these for which "compute", "in", "out", "host" and "disk" are busy.
        moved_bytes: bytes copied, by (from, to).
    """

    update_s: float
    busy_s: Mapping[str, float]
    moved_bytes: Mapping[tuple[Home, Home], int]

    @property
    def bottleneck(self) -> str:
        """Return the lane that is busy for longest, or "disk"."""
        return max(self.busy_s, key=lambda name: self.busy_s[name])


@dataclass
class Clock:
    """An executor that counts time instead of copying.

    Attributes:
        link: the rates of copies.
        now: the second at which each lane is free.
        busy_s: seconds for which each lane and the disk have worked.
        done: the second at which each piece of work was done.
    """

    link: Link
    now: dict[Lane, float] = field(default_factory=lambda: dict.fromkeys(LANES, 0.0))
    busy_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys((*LANES, DISK), 0.0))
    done: dict[Mark, float] = field(default_factory=dict)
    _disk_free: float = 0.0
    _spent: float = 0.0

    def spend(self, seconds: float) -> None:
        """Let the current computation last this much longer."""
        self._spent += seconds

    def run(self, work: LaneWork) -> Any:
        """Advance the lane by the time that the work takes; only computing is called, not copies."""
        lane = work.mark.lane
        # As on real lanes, work begins after the work before it on its lane and after the work that
        # it waits for.
        begin = max([self.now[lane], *(self.done[mark] for mark in work.waits)])
        result = None
        if lane in ("compute", "host"):
            self._spent = 0.0
            result = work.call()
            seconds = self._spent
        else:
            seconds = work.moved_bytes / (self.link.into if lane == "in" else self.link.out)
        worked = seconds
        # All lanes share one disk.
        if lane != "compute" and any(
            space.home == Home.DISK for space in (*work.reads, *work.writes)
        ):
            begin = max(begin, self._disk_free)
            of_disk = work.moved_bytes / self.link.disk
            self._disk_free = begin + of_disk
            self.busy_s[DISK] += of_disk
            seconds = max(seconds, of_disk)
            # The host is not busy while it waits for a file.
            worked = worked if lane == "host" else seconds
        self.now[lane] = self.done[work.mark] = begin + seconds
        self.busy_s[lane] += worked
        return result

    def finish(self) -> None:
        """Advance all lanes to the time at which the last one is free."""
        self.now = dict.fromkeys(LANES, max(self.now.values()))


class Pretend(Passes):
    """Passes that compute nothing and spend the clock's time instead."""

    def __init__(self, step: Step, clock: Clock, costs: Costs, state: Tensor):
        """Take a `state` on the meta device, which stands for every micro-batch's state between
        stages.
        """
        super().__init__(step)
        self.clock = clock
        self.costs = costs
        self.state = state

    def bound(self, needed: Sequence[StageOnDevice], call: Callable[[], T], backward: bool) -> T:
        """Run a call; nothing reads the parameters."""
        return call()

    def first(self, batch: object) -> tuple[Tensor, Further]:
        """Spend `first_s`."""
        self.clock.spend(self.costs.first_s)
        return self.state, ()

    def forward(self, stage: Stage, state: Tensor, further: Further) -> Tensor:
        """Spend `forward_s` for each block."""
        self.clock.spend(self.costs.forward_s * len(stage.blocks))
        return state

    def loss(self, planes: Sequence[Plane], state: Tensor, batch: object) -> Tensor:
        """Spend `loss_s`."""
        self.clock.spend(self.costs.loss_s)
        return state

    def again(
        self,
        planes: Sequence[Plane],
        state: Tensor,
        *,
        stage: Stage,
        further: Further,
        gradient: Tensor,
    ) -> Tensor:
        """Spend `again_s` for each block."""
        self.clock.spend(self.costs.again_s * len(stage.blocks))
        return state

    def first_again(self, planes: Sequence[Plane], batch: object, gradient: Tensor) -> None:
        """Spend `first_again_s`."""
        self.clock.spend(self.costs.first_again_s)

    def squares(self, plane: Plane, grad: Tensor) -> list[Tensor]:
        """Spend no time."""
        return [self.step.loss_sum]

    def update_part(
        self, plane: Plane, rest: Tensor | None, total: Tensor, scale: Tensor, accepted: Tensor
    ) -> None:
        """Spend `number_s` for each number."""
        self.clock.spend(self.costs.number_s * plane.param.numel())

    def update_on_host(self, update: HostPiece, plane: Plane, rest: Tensor | None) -> None:
        """Spend `host_number_s` for each number."""
        self.clock.spend(self.costs.host_number_s * plane.param.numel())


def pretended(engine: Streamed, clock: Clock, micro_batches: int) -> UpdateTiming:
    """Return the timing of an update in the middle of a training.

    Args:
        engine: the engine of a model on the meta device, whose lanes the clock runs and whose
            passes are `Pretend`.
        clock: the clock, which afterwards stands at the end of the last update.
        micro_batches: the micro-batches of an update.
    """
    walk = engine.walk
    moved = walk.lanes.moved_bytes
    # A schedule depends on shapes alone, so that a model of any size is timed without its memory.
    with torch.device("meta"):  # for buffers on the host, too
        # The first update is shorter than any later one, as no update before it is still being
        # made.
        for _ in range(UPDATES):
            begin = clock.now["compute"]
            busy = dict(clock.busy_s)
            before = moved.copy()
            walk.accumulate([None] * micro_batches)
            walk.update()
    return UpdateTiming(
        clock.now["compute"] - begin,
        {name: seconds - busy[name] for name, seconds in clock.busy_s.items()},
        moved - before,
    )
