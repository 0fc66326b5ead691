"""When the stages of a walk are updated, and where: on the device between what else it computes, or on the host."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from monograph.errors import OutOfDeviceMemory
from monograph.optim import Plane, join, split
from monograph.step import Step
from monograph.stream.chunked_update import DESKS, Desks, Renewal, guest, pieces
from monograph.stream.host_update import HostUpdate
from monograph.stream.lanes import Home, Lanes
from monograph.stream.placement import Placement
from monograph.stream.slots import Bound, Room
from monograph.stream.store import GRADIENT, Stage, Store


class Updates:
    """Decides on updates and makes them.

    Attributes:
        at_once: whether stages are updated in the backward pass.
        host_update: makes those on the host.
        waiting: stages with planes that are updated on the device, before the next forward pass or the next update.
        repeatable: whether a window that failed can be tried again, as no weight was updated by its gradient.
        failed: why some weights are updated and others not, for good.
    """

    def __init__(self, step: Step, store: Store, lanes: Lanes, placement: Placement):
        """Take the memory; `step` is the one whose decision and update are used."""
        self.step, self.store, self.lanes, self.placement = step, store, lanes, placement
        self.at_once = placement.when == "backward"
        guests = [guest(piece, gradient=not self.at_once) for stage in store.stages for piece in pieces(stage)]
        self.desks = Desks(lanes, [Room(f"desk {number}", guests, placement.device) for number in range(DESKS)])
        self.host_update = HostUpdate(step, store, lanes)
        self.waiting: list[Stage] = []
        self.repeatable = True
        self.failed: OutOfDeviceMemory | None = None
        self._squares: dict[tuple[int, int, int], list[Tensor]] = {}
        self._decided: tuple[Tensor, Tensor] | None = None
        self._beside: tuple[Renewal, Iterator[None]] | None = None

    @property
    def device_bytes(self) -> int:
        """What desks take."""
        return sum(room.size_bytes for room in self.desks.rooms)

    def measure(self, bound: Bound) -> None:
        """Square the stage's gradient, which is complete."""
        for at, (stored, plane) in enumerate(zip(bound.stage.stored, bound.planes, strict=True)):
            key = stored.plane.number, bound.stage.index, at
            square = functools.partial(self.step.squares, plane, plane.grad)
            self._squares[key] = self.lanes.compute(square, bound.writes)

    def bring_home(self, bound: Bound) -> None:
        """Bring the stage's gradient home, unless it is updated by it on the device right away."""
        for stored, plane in zip(bound.stage.stored, bound.planes, strict=True):
            home = stored.buffers[GRADIENT]
            if home.space.home != Home.DEVICE and (stored.on_host or not self.at_once):
                self.lanes.copy(home.tensor, plane.grad, home.space, bound.slot.gradients.space)

    # ── after the backward pass ─────────────────────────────────────────────────────────────────

    def decide(self, *, fresh: bool) -> Tensor:
        """Clip what was added up, and apply it, now or when it is time; the gradient's norm before clipping.

        `fresh`: there is no gradient, and nothing is applied.
        """
        self.flush()  # an update that no forward pass has followed
        squares = [each for key in sorted(self._squares) for each in self._squares[key]]
        if fresh:
            squares = [torch.zeros_like(self.step.loss_sum)]  # of no window
        applied = self.step.applied.clone()
        grad_norm, scale, accepted = self.lanes.compute(lambda: self.step.decide(squares))
        if self.at_once:
            self.step.applied.copy_(applied)  # counted when the first stage was updated
            return grad_norm  # type: ignore[no-any-return]
        self._decided = scale, accepted
        self._at_home(self.store.stages, scale, accepted)
        self.waiting = [stage for stage in self.store.stages if any(pieces(stage))]
        if self.placement.when == "sweep":
            self.flush()
        return grad_norm  # type: ignore[no-any-return]

    def flush(self) -> None:
        """Make the updates that wait for the next forward pass."""
        self.all_beside()
        for stage in list(self.waiting):
            self.begin(stage)
            self.all_beside()

    def begin(self, stage: Stage, into: Bound | None = None) -> None:
        """Begin the update of a stage that waits, and whose weights are wanted in the slot."""
        assert self._decided is not None
        self._begin(Renewal(stage, self.desks), *self._decided, into)

    # ── in the backward pass ────────────────────────────────────────────────────────────────────

    def allow(self) -> None:
        """Decide, from the losses, whether and by which factor gradients are applied while they are made."""
        step = self.step
        scale = step.unscaled()
        accepted = step.accepts(torch.zeros_like(scale))  # before any norm is known
        step.applied.add_(accepted)
        self._decided, self.repeatable = (scale, accepted), False

    def renew_at_once(self, bound: Bound) -> None:
        """Update the stage, whose gradient is complete."""
        assert self._decided is not None
        scale, accepted = self._decided
        stage = bound.stage
        own = [square for key, squares in self._squares.items() if key[1] == stage.index for square in squares]
        accepted = accepted & (torch.stack(own).sum().sqrt() * scale <= self.step.largest)
        self._at_home([stage], scale, accepted)
        if any(pieces(stage)):
            self._begin(Renewal(stage, self.desks, gradients=bound), scale, accepted)

    # ── on the host ─────────────────────────────────────────────────────────────────────────────

    def _at_home(self, stages: list[Stage], scale: Tensor, accepted: Tensor) -> None:
        if any(stored.on_host for stage in stages for stored in stage.stored):
            decision = self.host_update.told(stages[0].index, scale, accepted)
            for stage in stages:
                self.host_update.update(stage, decision)

    def update_part(self, plane: Plane, rest: Tensor | None, total: Tensor, scale: Tensor, accepted: Tensor) -> None:
        """Update a part of a plane, and where its weights are split: joined, and split again."""
        if rest is None:
            self.step.update_plane(plane, total, scale, accepted)
            return
        whole = replace(plane, param=join(plane.param, rest))
        self.step.update_plane(whole, total, scale, accepted)
        hi, lo = split(whole.param)
        plane.param.copy_(hi)
        rest.copy_(lo)

    # ── on the device, between what else is computed ────────────────────────────────────────────

    def _begin(self, renewal: Renewal, scale: Tensor, accepted: Tensor, into: Bound | None = None) -> None:
        """Begin an update, whose pieces are made between what is computed from now on; one at a time."""
        self.all_beside()
        renewal.begin()
        self._beside = renewal, renewal.work(self.update_part, scale, accepted, into)

    def some_beside(self, micro_batches: int) -> None:
        """Update as much as is due after one of so many micro-batches."""
        renewal, work = self._beside or (None, iter(()))
        if renewal:
            self._make(islice(work, -(-renewal.count // micro_batches)))

    def all_beside(self) -> None:
        """End the update that was begun."""
        renewal, work = self._beside or (None, iter(()))
        self._make(work)
        if renewal and renewal.stage in self.waiting:
            self.waiting.remove(renewal.stage)
        self._beside = None

    def _make(self, work: Iterable[None]) -> None:
        """Update pieces; if that fails nothing can be read or saved any more, as it is half updated."""
        if self.failed:
            raise self.failed
        try:
            for _ in work:
                pass
        except OutOfDeviceMemory as error:
            self.failed = error
            raise
