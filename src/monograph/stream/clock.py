"""A clock instead of a device: the walk that trains, timed on tensors without data.

Each lane has a time of its own. A piece of work begins when its lane is free and what it waits for is done; a copy
lasts bytes / bandwidth, computing as long as its stand-in says. Walk, slots, staging buffers, boundaries, lanes and
their waits are those that train, so the schedule under test is the one that is timed.
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

UPDATES = 2  # that are played; the last one's length is that of all further ones
DISK = "disk"


@dataclass(frozen=True)
class Link:
    """How fast copies are, in bytes/s.

    Attributes:
        into: the device.
        out: of it, at the same time.
        disk: to or from files, one at a time.
    """

    into: float
    out: float
    disk: float = float("inf")


@dataclass(frozen=True)
class Costs:
    """How long computing takes.

    Attributes:
        first_s: what comes before the blocks, of a micro-batch.
        forward_s: one block's forward pass.
        again_s: its forward pass once more, and its backward pass.
        loss_s: what comes after the blocks, the loss, and the way back.
        first_again_s: the backward pass of what comes before the blocks.
        number_s: the update of one number.
        host_number_s: the same on the host, where it stays there.
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
    """One update among many.

    Attributes:
        update_s: from its end to the next one's.
        busy_s: how long of that "compute", "in", "out", "host" and "disk" were busy.
        moved_bytes: copied, by (from, to).
    """

    update_s: float
    busy_s: Mapping[str, float]
    moved_bytes: Mapping[tuple[Home, Home], int]

    @property
    def bottleneck(self) -> str:
        """What was busy for the longest."""
        return max(self.busy_s, key=lambda name: self.busy_s[name])


@dataclass
class Clock:
    """An executor that copies nothing and counts time.

    Attributes:
        link: how fast copies are.
        now: when each lane is free, in seconds.
        busy_s: how long each lane and the disk have worked.
        done: when each piece of work was.
    """

    link: Link
    now: dict[Lane, float] = field(default_factory=lambda: dict.fromkeys(LANES, 0.0))
    busy_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys((*LANES, DISK), 0.0))
    done: dict[Mark, float] = field(default_factory=dict)
    _disk_free: float = 0.0
    _spent: float = 0.0

    def spend(self, seconds: float) -> None:
        """Let what is computing now last so much longer."""
        self._spent += seconds

    def run(self, work: Work) -> Any:
        """Pass the time that the work takes; only computing is called, for what it spends and returns."""
        lane = work.mark.lane
        # What real lanes do: in order on one lane, and after what other lanes have to have done.
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
        """Let all lanes come to rest."""
        self.now = dict.fromkeys(LANES, max(self.now.values()))


class Pretend(Passes):
    """Passes that compute nothing, and how long they would have taken."""

    def __init__(self, step: Step, clock: Clock, costs: Costs, state: Tensor):
        """`state` is like what goes from stage to stage of a micro-batch, on the meta device."""
        super().__init__(step)
        self.clock, self.costs, self.state = clock, costs, state

    def first(self, batch: Any) -> tuple[Tensor, Any]:
        """Takes `first_s`."""
        self.clock.spend(self.costs.first_s)
        return self.state, None

    def forward(self, stage: Stage, state: Tensor, further: Any) -> Tensor:
        """Takes `forward_s` a block."""
        self.clock.spend(self.costs.forward_s * len(stage.blocks))
        return state

    def loss(self, planes: Sequence[Plane], state: Tensor, batch: Any) -> Tensor:
        """Takes `loss_s`."""
        self.clock.spend(self.costs.loss_s)
        return state

    def again(self, planes: Sequence[Plane], state: Tensor, *, stage: Stage, further: Any, gradient: Tensor) -> Tensor:
        """Takes `again_s` a block."""
        self.clock.spend(self.costs.again_s * len(stage.blocks))
        return state

    def first_again(self, planes: Sequence[Plane], batch: Any, gradient: Tensor) -> None:
        """Takes `first_again_s`."""
        self.clock.spend(self.costs.first_again_s)

    def squares(self, plane: Plane, gradient: Tensor) -> list[Tensor]:
        """Takes no time."""
        return [self.step.loss_sum]

    def update_part(self, plane: Plane, rest: Tensor | None, total: Tensor, scale: Tensor, accepted: Tensor) -> None:
        """Takes `number_s` a number."""
        self.clock.spend(self.costs.number_s * plane.param.numel())

    def update_on_host(self, plane: Plane, rest: Tensor | None) -> None:
        """Takes `host_number_s` a number."""
        self.clock.spend(self.costs.host_number_s * plane.param.numel())


def pretended(engine: Streamed, clock: Clock, costs: Costs, state: Tensor, micro_batches: int) -> Timing:
    """An update of a model in the middle of its training.

    Args:
        engine: of a model on the meta device, its lanes run by the clock.
        clock: its times are those of the last update afterwards.
        costs: of a micro-batch.
        state: what goes from stage to stage of a micro-batch, [B, T, D] on the meta device.
        micro_batches: of an update.
    """
    walk, updates = engine.walk, engine.walk.updates
    walk.passes = pretend = Pretend(engine.step, clock, costs, state)
    walk.bound = lambda needed, call, backward: call()  # type: ignore[method-assign]  # nothing reads the parameters
    engine.step.squares = pretend.squares
    updates.update_part = pretend.update_part  # type: ignore[method-assign]
    updates.host_update.update_piece = pretend.update_on_host  # type: ignore[method-assign]
    moved = walk.lanes.moved_bytes
    # Shapes are all that a schedule depends on; a model of any size is timed in this way without its memory.
    with torch.device("meta"):  # also what is kept on the host
        # Nothing is on its way at the beginning: the first update is shorter than any later one.
        for _ in range(UPDATES):
            begin, busy, before = clock.now["compute"], dict(clock.busy_s), moved.copy()
            walk.accumulate([None] * micro_batches)
            walk.update()
    return Timing(
        clock.now["compute"] - begin,
        {name: seconds - busy[name] for name, seconds in clock.busy_s.items()},
        moved - before,
    )
