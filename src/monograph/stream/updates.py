"""Decide when and where the stages of a walk are updated, and update those on the host whose planes
are off the device.

Otherwise a stage is updated on the device between its other work
(`monograph.stream.chunked_update`). The host updates by the resident engine's own update, while the
device computes: only gradients come to it for this, and weights go to the device for the passes as
always. The device's decision, whether an update is applied and by which factor, comes as four
numbers.
"""

import functools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from monograph.errors import OutOfDeviceMemory
from monograph.graph.compilable import Compilable
from monograph.optim import Plane, join, split_
from monograph.step import Step
from monograph.step.clip import update_plane
from monograph.stream.chunked_update import (
    STAGING_BUFFERS,
    Chunk,
    ChunkedUpdate,
    StagingBuffers,
    chunks,
    cut,
    to_fetch,
)
from monograph.stream.lanes import Home, Lanes, Space
from monograph.stream.placement import Placement, on_host
from monograph.stream.slots import DeviceBuffer, Passes, StageOnDevice
from monograph.stream.store import GRADIENT, REST, Buffer, Stage, Store

# Elements of a chunk. Its update should take long compared with calling a graph (0.3 ms), but only
# a few milliseconds: nothing is launched on the device meanwhile, as generated code keeps Python's
# lock.
MOST = 2**22
# Of a decision, in fp64: the gradient's factor, whether it is applied, updates so far, learning
# rate.
NUMBERS = 4


class Decision(NamedTuple):
    """The memory of a decision's numbers, on the device (`there`) and on the host (`home`)."""

    there: Buffer
    home: Buffer


class HostUpdate:
    """The updates on the host of a store's planes.

    Attributes:
        scale: factor of the gradient in the current update, on the host like the next three.
        accepted: whether the update is applied.
        applied: the number of updates so far.
        lr: the learning rate.
        master: memory in which the split weights of a chunk are joined; only the host lane uses it.
    """

    def __init__(self, step: Step, store: Store, lanes: Lanes, passes: Passes):
        """Allocate memory on the host for updates of `step`."""
        self.step = step
        self.lanes = lanes
        self.passes = passes
        # On the meta device nothing is computed; shapes and waits are those of a real run.
        self._host = torch.device("meta" if step.device.type == "meta" else "cpu")
        # Captured functions read this memory, so each decision is copied into it.
        self.scale, self.lr = (
            torch.zeros((), dtype=torch.float64, device=self._host) for _ in range(2)
        )
        self.accepted = torch.zeros((), dtype=torch.bool, device=self._host)
        self.applied = torch.zeros((), dtype=torch.int64, device=self._host)
        halved = (
            end - begin for stored, begin, end in self._chunks(*store.stages) if stored.splits
        )
        self.master = torch.empty(max(halved, default=0), device=self._host)
        self._decisions: dict[int, Decision] = {}
        self.join = Compilable(join_)
        self.split = Compilable(split_)
        self.update_part = Compilable(self._update_part)

    def send(self, index: int, scale: Tensor, accepted: Tensor) -> Decision:
        """Copy a decision to the host, into the memory of that index; decisions of several indices
        may be under way.
        """
        decision = self._decisions.get(index) or self._decisions.setdefault(
            index, self._room(index)
        )
        of_step = self.step.applied, self.step.lr

        def say() -> None:
            # One copy takes all four numbers; fp64 holds a count of updates exactly.
            numbers = [number.to(torch.float64) for number in (scale, accepted, *of_step)]
            decision.there.tensor.copy_(torch.stack(numbers))

        self.lanes.compute(say, writes=[decision.there.space])
        self.lanes.copy(
            decision.home.tensor, decision.there.tensor, decision.home.space, decision.there.space
        )
        return decision

    def update(self, stage: Stage, decision: Decision) -> None:
        """Update a stage's planes that live on the host, as soon as their gradients and the
        decision are there.
        """
        if not (chunks := list(self._chunks(stage))):
            return
        self.lanes.host(
            functools.partial(self._receive, decision.home.tensor), [decision.home.space]
        )
        for chunk in chunks:
            stored = chunk[0]
            parts = {name: chunk.part(buffer) for name, buffer in stored.buffers.items()}
            spaces = {name: buffer.space for name, buffer in stored.buffers.items()}
            in_files = {
                name: part.nbytes for name, part in parts.items() if spaces[name].home == Home.DISK
            }
            # The gradient is only read, so the next gradient may come once it was read; all other
            # buffers are written.
            self.lanes.host(
                functools.partial(self._updated, chunk, parts),
                [spaces.pop(GRADIENT)],
                spaces.values(),
                from_disk=sum(in_files.values()),
                to_disk=sum(size for name, size in in_files.items() if name != GRADIENT),
            )
        stage.version += 1

    def update_piece(self, plane: Plane, rest: Tensor | None) -> None:
        """Update a part of a plane; split weights are joined before and split again afterwards.

        Each of the three steps is a graph of its own: if an update is fused with 16-bit integers,
        torch 2.13 vectorises none of it.
        """
        if rest is None:
            self.update_part(plane)
            return
        master = self.master[: len(rest)]
        self.join(master, plane.param, rest)
        self.update_part(replace(plane, param=master))
        self.split(master, plane.param, rest)

    def _update_part(self, plane: Plane) -> None:
        """Update weights that are not split by the decision received."""
        update_plane(
            plane,
            plane.grad,
            self.scale,
            self.accepted,
            optim=self.step.optim,
            precision=self.step.precision,
            lr=self.lr,
            applied=self.applied,
        )

    @staticmethod
    def _chunks(*stages: Stage) -> list[Chunk]:
        return list(
            cut((stored for stage in stages for stored in stage.stored if stored.on_host), MOST)
        )

    def _room(self, index: int) -> Decision:
        there = torch.zeros(NUMBERS, dtype=torch.float64, device=self.step.device)
        label = f"decision {index}"
        # Each decision has memory of its own, as the next one may be made while the host still uses
        # this one.
        own = on_host(there, label, self.step.device)
        decision = Decision(
            Buffer(there, Space(label, Home.DEVICE)),
            Buffer(own, Space(f"{label} at home", Home.HOST)),
        )
        # Earlier computations may have used its memory.
        self.lanes.compute(lambda: None, writes=[decision.there.space])
        return decision

    def _receive(self, decision: Tensor) -> None:
        for number, target in zip(
            decision, (self.scale, self.accepted, self.applied, self.lr), strict=True
        ):
            target.copy_(number)

    # A thread may run it, and whether gradients are enabled is a setting of each thread.
    @torch.no_grad()
    def _updated(self, chunk: Chunk, parts: dict[str, Tensor]) -> None:
        self.passes.update_on_host(
            self.update_piece, chunk.plane(parts, self._host), parts.get(REST)
        )


def join_(master: Tensor, hi: Tensor, lo: Tensor) -> None:
    """Join halves into `master` in place, as `monograph.optim.join` does."""
    master.copy_(join(hi, lo))


class Updates:
    """The updates of a walk's stages.

    Attributes:
        in_backward: whether stages are updated in the backward pass.
        host_update: the updates on the host.
        waiting: stages with planes that are still to be updated on the device, before the next
            forward pass or update.
        repeatable: whether a window that failed can be tried again, as no weight was updated by its
            gradient yet.
        failed: the error that left some weights updated and others not; nothing can be trained or
            saved after it.
    """

    def __init__(
        self, step: Step, store: Store, lanes: Lanes, placement: Placement, passes: Passes
    ):
        """Allocate memory for updates of `step`."""
        self.step = step
        self.store = store
        self.lanes = lanes
        self.placement = placement
        self.passes = passes
        self.in_backward = placement.when == "backward"
        tensors = [
            to_fetch(chunk, gradient=not self.in_backward)
            for stage in store.stages
            for chunk in chunks(stage)
        ]
        names = [f"staging buffer {number}" for number in range(STAGING_BUFFERS)]
        self.staging_buffers = StagingBuffers(
            lanes, [DeviceBuffer(name, tensors, placement.device) for name in names]
        )
        self.host_update = HostUpdate(step, store, lanes, passes)
        self.waiting: list[Stage] = []
        self.repeatable = True
        self.failed: OutOfDeviceMemory | None = None
        self.update_part = Compilable(passes.update_part)
        self._squares: dict[tuple[int, int, int], list[Tensor]] = {}
        self._decided: tuple[Tensor, Tensor] | None = None
        self._begun: tuple[ChunkedUpdate, Iterator[None]] | None = None

    @property
    def device_bytes(self) -> int:
        """Return the bytes of the staging buffers."""
        return sum(buffer.size_bytes for buffer in self.staging_buffers.buffers)

    def measure(self, here: StageOnDevice) -> None:
        """Compute the squared norms of the stage's gradient, which is complete."""
        for at, (stored, plane) in enumerate(zip(here.stage.stored, here.planes, strict=True)):
            # Keys sort in the order of the resident engine's planes and parts, as the bits of a sum
            # depend on it.
            key = stored.plane.number, here.stage.index, at
            square = functools.partial(self.passes.squares, plane, plane.grad)
            self._squares[key] = self.lanes.compute(square, here.writes)

    def store_gradients(self, here: StageOnDevice) -> None:
        """Copy the stage's gradient home, unless it is about to be updated on the device."""
        for stored, plane in zip(here.stage.stored, here.planes, strict=True):
            home = stored.buffers[GRADIENT]
            if home.space.home != Home.DEVICE and (stored.on_host or not self.in_backward):
                self.lanes.copy(home.tensor, plane.grad, home.space, here.slot.gradients.space)

    # ── after the backward pass ─────────────────────────────────────────────────────────────────

    def decide(self, *, fresh: bool) -> Tensor:
        """Clip the accumulated gradient and apply it, now or when it is time; return its norm
        before clipping.

        If `fresh`, there is no gradient, and nothing is applied.
        """
        self.flush()  # the last update, if no forward pass has followed it
        squares = [square for key in sorted(self._squares) for square in self._squares[key]]
        if fresh:
            # Without a window there is no gradient.
            squares = [torch.zeros_like(self.step.loss_sum)]
        applied = self.step.applied.clone()
        grad_norm, scale, accepted = self.lanes.compute(lambda: self.step.decide(squares))
        if self.in_backward:
            # The update was counted already, by `decide_by_losses`.
            self.step.applied.copy_(applied)
            return grad_norm
        self._decided = scale, accepted
        self._update_on_host(self.store.stages, scale, accepted)
        self.waiting = [stage for stage in self.store.stages if any(chunks(stage))]
        if self.placement.when == "sweep":
            self.flush()
        return grad_norm

    def flush(self) -> None:
        """Make all updates that are still waiting."""
        self.finish_begun()
        for stage in list(self.waiting):
            self.begin(stage)
            self.finish_begun()

    def begin(self, stage: Stage, into: StageOnDevice | None = None) -> None:
        """Begin the update of a stage that waits; its weights are also copied to the slot `into`,
        if given.
        """
        assert self._decided is not None
        self._begin(ChunkedUpdate(stage, self.staging_buffers), *self._decided, into)

    # ── in the backward pass ────────────────────────────────────────────────────────────────────

    def decide_by_losses(self) -> None:
        """Decide from the losses alone whether and by which factor gradients are applied in the
        backward pass.
        """
        step = self.step
        scale = step.gradient_scale()
        accepted = step.accepts(torch.zeros_like(scale))  # no norm is known yet
        step.applied.add_(accepted)
        self._decided = (scale, accepted)
        self.repeatable = False

    def update_in_backward(self, here: StageOnDevice) -> None:
        """Update a stage whose gradient is complete."""
        assert self._decided is not None
        scale, accepted = self._decided
        stage = here.stage
        own = [
            square
            for key, squares in self._squares.items()
            if key[1] == stage.index
            for square in squares
        ]
        # The norm over all stages is not known yet, so a stage is refused if its own gradient is
        # not finite.
        accepted = accepted & (torch.stack(own).sum().sqrt() * scale <= self.step.largest)
        self._update_on_host([stage], scale, accepted)
        if any(chunks(stage)):
            self._begin(ChunkedUpdate(stage, self.staging_buffers, gradients=here), scale, accepted)

    # ── on the host ─────────────────────────────────────────────────────────────────────────────

    def _update_on_host(self, stages: list[Stage], scale: Tensor, accepted: Tensor) -> None:
        # The copy of a decision costs latency, so it is made only for stages that need it.
        if any(stored.on_host for stage in stages for stored in stage.stored):
            decision = self.host_update.send(stages[0].index, scale, accepted)
            for stage in stages:
                self.host_update.update(stage, decision)

    # ── on the device, between its other work ───────────────────────────────────────────────────

    def _begin(
        self,
        begun: ChunkedUpdate,
        scale: Tensor,
        accepted: Tensor,
        into: StageOnDevice | None = None,
    ) -> None:
        """Begin an update, whose chunks are updated between later computations; one update is under
        way at a time.
        """
        self.finish_begun()
        begun.begin()
        self._begun = begun, begun.work(self.update_part, scale, accepted, into)

    def update_some(self, micro_batches: int) -> None:
        """Update the chunks that are due after one of `micro_batches` micro-batches."""
        begun, work = self._begun or (None, iter(()))
        if begun:
            # The number is rounded up, so that the update is done with the stage's last
            # micro-batch.
            self._make(islice(work, -(-begun.count // micro_batches)))

    def finish_begun(self) -> None:
        """Finish the update that is under way."""
        begun, work = self._begun or (None, iter(()))
        self._make(work)
        if begun and begun.stage in self.waiting:
            self.waiting.remove(begun.stage)
        self._begun = None

    def _make(self, work: Iterable[None]) -> None:
        """Update chunks; after a failure every later call fails too.

        The weights are then half updated, and whoever went on would train or save a mixture of two
        updates.
        """
        if self.failed:
            raise self.failed
        try:
            for _ in work:
                pass
        except OutOfDeviceMemory as error:
            self.failed = error
            raise
