"""A simulated device: the walk that trains, timed on tensors without data.

Each lane has a time of its own. A piece of work begins when its lane is free and what it waits for is done; a copy
lasts bytes / bandwidth, and computation as long as `Costs` says. Walk, slots, staging buffers, boundaries, lanes and
their waits are those of training, so the schedule that is timed is the real one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from monograph.optim import Plane
from monograph.step import Step
from monograph.stream.engine import Streamed
from monograph.stream.lanes import LANES, Home, Lane, Mark, Work
from monograph.stream.passes import Passes
from monograph.stream.store import Stage

UPDATES = 2  # simulated; all further ones take as long as the last one
DISK = "disk"


@dataclass(frozen=True)
class Link:
    """Rates of copies, in bytes/s.

    Attributes:
        into: to the device.
        out: from the device, at the same time.
        disk: to or from files, one copy at a time.
    """

    into: float
    out: float
    disk: float = float("inf")


@dataclass(frozen=True)
class Costs:
    """Seconds of computation.

    Attributes:
        first_s: the forward pass of the parts before the blocks, for a micro-batch.
        forward_s: one block's forward pass.
        again_s: one block's recomputed forward pass and its backward pass.
        loss_s: the parts after the blocks, the loss, and their backward pass.
        first_again_s: the backward pass of the parts before the blocks.
        number_s: the update of one number on the device.
        host_number_s: the update of one number on the host.
    """

    first_s: float = 0.0
    forward_s: float = 0.0
    again_s: float = 0.0
    loss_s: float = 0.0
    first_again_s: float = 0.0
    number_s: float = 0.0
    host_number_s: float = 0.0


@dataclass(frozen=True)
class Timing:
    """The time of one update among many.

    Attributes:
        update_s: seconds from the end of one update to the end of the next.
        busy_s: seconds of these in which "compute", "in", "out", "host" and "disk" were busy.
        moved_bytes: bytes copied, by (from, to).
    """

    update_s: float
    busy_s: Mapping[str, float]
    moved_bytes: Mapping[tuple[Home, Home], int]

    @property
    def bottleneck(self) -> str:
        """Return the name of the lane, or the disk, that was busy for the longest."""
        return max(self.busy_s, key=lambda name: self.busy_s[name])


@dataclass
class Clock:
    """An executor that counts time instead of copying.

    Attributes:
        link: the rates of copies.
        now: the time at which each lane is free, in seconds.
        busy_s: seconds for which each lane and the disk have worked.
        done: the time at which each piece of work was done.
    """

    link: Link
    now: dict[Lane, float] = field(default_factory=lambda: dict.fromkeys(LANES, 0.0))
    busy_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys((*LANES, DISK), 0.0))
    done: dict[Mark, float] = field(default_factory=dict)
    _disk_free: float = 0.0
    _spent: float = 0.0

    def spend(self, seconds: float) -> None:
        """Let the current computation last so many seconds longer."""
        self._spent += seconds

    def run(self, work: Work) -> Any:
        """Pass the time that the work takes; only computations are called, for the time they spend and their result."""
        lane = work.mark.lane
        # As real lanes do: in order within a lane, and after the work of other lanes that it waits for.
        begin = max([self.now[lane], *(self.done[mark] for mark in work.waits)])
        result = None
        if lane in ("compute", "host"):
            self._spent = 0.0
            result = work.call()
            seconds = self._spent
        else:
            seconds = work.moved_bytes / (self.link.into if lane == "in" else self.link.out)
        worked = seconds
        # There is one disk, however many lanes read and write it.
        if lane != "compute" and any(space.home == Home.DISK for space in (*work.reads, *work.writes)):
            begin, of_disk = max(begin, self._disk_free), work.moved_bytes / self.link.disk
            self._disk_free = begin + of_disk
            self.busy_s[DISK] += of_disk
            seconds = max(seconds, of_disk)
            worked = worked if lane == "host" else seconds  # who waits for a file is not busy
        self.now[lane] = self.done[work.mark] = begin + seconds
        self.busy_s[lane] += worked
        return result

    def finish(self) -> None:
        """Let all lanes finish."""
        self.now = dict.fromkeys(LANES, max(self.now.values()))


class Pretend(Passes):
    """Passes that compute nothing and spend the time that they would have taken."""

    def __init__(self, step: Step, clock: Clock, costs: Costs, state: Tensor):
        """Take `state`, a micro-batch's activations between stages on the meta device."""
        super().__init__(step)
        self.clock, self.costs, self.state = clock, costs, state

    def first(self, batch: Any) -> tuple[Tensor, Any]:
        """Spend `first_s`."""
        self.clock.spend(self.costs.first_s)
        return self.state, None

    def forward(self, stage: Stage, state: Tensor, further: Any) -> Tensor:
        """Spend `forward_s` for each block."""
        self.clock.spend(self.costs.forward_s * len(stage.blocks))
        return state

    def loss(self, planes: Sequence[Plane], state: Tensor, batch: Any) -> Tensor:
        """Spend `loss_s`."""
        self.clock.spend(self.costs.loss_s)
        return state

    def again(self, planes: Sequence[Plane], state: Tensor, *, stage: Stage, further: Any, gradient: Tensor) -> Tensor:
        """Spend `again_s` for each block."""
        self.clock.spend(self.costs.again_s * len(stage.blocks))
        return state

    def first_again(self, planes: Sequence[Plane], batch: Any, gradient: Tensor) -> None:
        """Spend `first_again_s`."""
        self.clock.spend(self.costs.first_again_s)

    def squares(self, plane: Plane, gradient: Tensor) -> list[Tensor]:
        """Spend no time."""
        return [self.step.loss_sum]

    def update_part(self, plane: Plane, rest: Tensor | None, total: Tensor, scale: Tensor, accepted: Tensor) -> None:
        """Spend `number_s` for each number."""
        self.clock.spend(self.costs.number_s * plane.param.numel())

    def update_on_host(self, plane: Plane, rest: Tensor | None) -> None:
        """Spend `host_number_s` for each number."""
        self.clock.spend(self.costs.host_number_s * plane.param.numel())


def pretended(engine: Streamed, clock: Clock, costs: Costs, state: Tensor, micro_batches: int) -> Timing:
    """Return the timing of an update in the middle of a model's training.

    Args:
        engine: the engine of a model on the meta device; the clock executes its lanes.
        clock: afterwards it has the times of the last update.
        costs: the times of one micro-batch.
        state: a micro-batch's activations between stages, [B, T, D] on the meta device.
        micro_batches: micro-batches of an update.
    """
    walk, updates = engine.walk, engine.walk.updates
    walk.passes = pretend = Pretend(engine.step, clock, costs, state)
    walk.bound = lambda needed, call, backward: call()  # type: ignore[method-assign]  # nothing reads the parameters
    engine.step.squares = pretend.squares
    updates.update_part = pretend.update_part  # type: ignore[method-assign]
    updates.host_update.update_piece = pretend.update_on_host  # type: ignore[method-assign]
    moved = walk.lanes.moved_bytes
    # A schedule depends on shapes alone, so a model of any size is timed without its memory.
    with torch.device("meta"):  # the host's memory, too
        # Before the first update nothing is under way, so it is shorter than any later one.
        for _ in range(UPDATES):
            begin, busy, before = clock.now["compute"], dict(clock.busy_s), moved.copy()
            walk.accumulate([None] * micro_batches)
            walk.update()
    return Timing(
        clock.now["compute"] - begin,
        {name: seconds - busy[name] for name, seconds in clock.busy_s.items()},
        moved - before,
    )
