"""Decide when and where the stages of a walk are updated; run the updates on the host.

A stage is some consecutive blocks of the model, or the parts before or after them. A plane is a
flat buffer of a stage's parameters of one kind (`monograph.optim.Plane`), with more buffers for
the gradient and the optimizer. The home of a buffer is where it is kept: on the device, on the host
or in a file. Work is given to lanes, which are queues (`monograph.stream.lanes`). Split weights are
fp32 weights that are stored as two halves of 16 bits (`monograph.optim.narrow.split`).

A plane is updated on the host if the placement says so and none of its buffers is on the device.
All other planes are updated on the device, between other work (`monograph.stream.chunked_update`).

An update on the host is the resident engine's own update, and runs while the device computes. Only
gradients are copied to the host for it. The new weights need no copy of their own, because weights
are copied to the device for every pass anyway. The device decides whether the update is applied and
which factor the gradient gets. This decision is copied to the host as four numbers.
"""

import functools
import math
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
    chunk_tensors_to_fetch,
    chunks,
    cut_into_chunks,
)
from monograph.stream.lanes import Home, Lanes, Space
from monograph.stream.placement import Placement, on_host
from monograph.stream.slots import DeviceBuffer, Passes, StageOnDevice
from monograph.stream.store import GRADIENT, REST, Buffer, Stage, Store

# The largest number of elements in a chunk that the host updates. The update of a chunk should take
# longer than the call of a graph (0.3 ms). But it should take only a few milliseconds, because
# generated code keeps Python's lock, so nothing is launched on the device meanwhile.
MAX_HOST_CHUNK_ELEMENTS = 2**22
# A decision is this many numbers in fp64: the gradient's factor, whether the update is applied, the
# number of updates so far, and the learning rate.
DECISION_SIZE = 4


class StreamedDecision(NamedTuple):
    """What a streamed update reads of the decision about it, on the device.

    Attributes:
        scale: the gradient's factor.
        accepted: whether the update is applied.
    """

    scale: Tensor
    accepted: Tensor


class DecisionBuffers(NamedTuple):
    """Memory for the numbers of a decision about an update.

    Attributes:
        on_device: the numbers [DECISION_SIZE] on the device.
        on_host: a copy of the numbers on the host.
    """

    on_device: Buffer
    on_host: Buffer


class HostUpdate:
    """Updates planes on the host: those whose `StoredPlane.on_host` is true.

    Attributes:
        scale: the gradient's factor in the current update, a tensor on the host.
        accepted: whether the current update is applied, a tensor on the host.
        applied: the number of updates so far, a tensor on the host.
        lr: the learning rate, a tensor on the host.
        master: memory in which the split weights of a chunk are joined; only the host lane uses it.
    """

    def __init__(self, step: Step, store: Store, lanes: Lanes, passes: Passes):
        """Allocate memory on the host for updates of `step`."""
        self.step = step
        self.lanes = lanes
        self.passes = passes
        # On the meta device nothing is computed; shapes and waits are those of a real run.
        self._host = torch.device("meta" if step.device.type == "meta" else "cpu")
        # Captured graphs read this memory, so each decision is copied into it.
        self.scale = torch.zeros((), dtype=torch.float64, device=self._host)
        self.lr = torch.zeros((), dtype=torch.float64, device=self._host)
        self.accepted = torch.zeros((), dtype=torch.bool, device=self._host)
        self.applied = torch.zeros((), dtype=torch.int64, device=self._host)
        split_sizes = (
            end - begin for stored, begin, end in self._chunks(*store.stages) if stored.splits
        )
        self.master = torch.empty(max(split_sizes, default=0), device=self._host)
        self._decisions: dict[int, DecisionBuffers] = {}
        self.join = Compilable(join_)
        self.split = Compilable(split_)
        self.update_part = Compilable(self._update_part)

    def send(self, index: int, decision: StreamedDecision) -> DecisionBuffers:
        """Copy a decision to the host.

        Args:
            index: the index of the memory for the decision. Decisions with different indices may be
                copied and used at the same time.
            decision: the decision.

        Returns:
            The memory of the decision; work on the host that reads it must wait for its space.
        """
        buffers = self._decisions.get(index)
        if buffers is None:
            buffers = self._decisions[index] = self._new_decision(index)
        source = buffers.on_device
        target = buffers.on_host
        applied = self.step.applied
        lr = self.step.lr

        def write_numbers() -> None:
            # All four numbers are in one tensor, so that one copy is enough. They are fp64, which
            # holds the number of updates exactly.
            numbers = (decision.scale, decision.accepted, applied, lr)
            source.tensor.copy_(torch.stack([number.to(torch.float64) for number in numbers]))

        self.lanes.compute(write_numbers, writes=[source.space])
        self.lanes.copy(target.tensor, source.tensor, target.space, source.space)
        return buffers

    def update(self, stage: Stage, decision: DecisionBuffers) -> None:
        """Queue the update of the stage's planes that belong to the host.

        The work begins when the gradients and the decision have arrived on the host.
        """
        host_chunks = self._chunks(stage)
        if not host_chunks:
            return
        # Only work on the host lane uses the tensors that `_read_decision` writes, so they need no
        # space.
        numbers = decision.on_host
        self.lanes.host(functools.partial(self._read_decision, numbers.tensor), [numbers.space])
        for chunk in host_chunks:
            stored = chunk.stored
            parts = {name: chunk.part(buffer) for name, buffer in stored.buffers.items()}
            spaces = {name: buffer.space for name, buffer in stored.buffers.items()}
            bytes_in_files = {
                name: part.nbytes for name, part in parts.items() if spaces[name].home == Home.DISK
            }
            # The gradient is only read, so the next gradient can be copied there as soon as this
            # work is done. All other buffers are read and written.
            gradient_space = spaces.pop(GRADIENT)
            self.lanes.host(
                functools.partial(self._update_chunk, chunk, parts),
                [gradient_space],
                spaces.values(),
                from_disk=sum(bytes_in_files.values()),
                to_disk=sum(size for name, size in bytes_in_files.items() if name != GRADIENT),
            )
        stage.version += 1

    def update_joined_part(self, plane: Plane, rest: Tensor | None) -> None:
        """Update a part of a plane in place; split weights are joined for it.

        Args:
            plane: the part; its weights are fp32, or the high halves of split weights.
            rest: the low halves of split weights; None: the weights are not split.
        """
        if rest is None:
            self.update_part(plane)
            return
        # Joining, updating and splitting are three graphs: torch 2.13 does not vectorise an update
        # that is fused with 16-bit integers.
        master = self.master[: len(rest)]
        self.join(master, plane.param, rest)
        self.update_part(replace(plane, param=master))
        self.split(master, plane.param, rest)

    def _update_part(self, plane: Plane) -> None:
        """Update weights that are not split, according to the decision that was read last."""
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
        """Return the chunks of those planes of the stages that belong to the host."""
        host_planes = (
            stored for stage in stages for stored in stage.stored_planes if stored.on_host
        )
        return list(cut_into_chunks(host_planes, MAX_HOST_CHUNK_ELEMENTS))

    def _new_decision(self, index: int) -> DecisionBuffers:
        """Allocate the memory of one decision."""
        label = f"decision {index}"
        numbers = torch.zeros(DECISION_SIZE, dtype=torch.float64, device=self.step.device)
        # Each decision has its own memory, because the next decision may be made while the host
        # still uses this one.
        numbers_at_home = on_host(numbers, label, self.step.device)
        decision = DecisionBuffers(
            Buffer(numbers, Space(label, Home.DEVICE)),
            Buffer(numbers_at_home, Space(f"{label} at home", Home.HOST)),
        )
        # Earlier computations may have used the memory on the device, so copies wait for them.
        self.lanes.declare_written(decision.on_device.space)
        return decision

    def _read_decision(self, numbers: Tensor) -> None:
        """Copy a decision's numbers [DECISION_SIZE] to the tensors that the updates read."""
        targets = (self.scale, self.accepted, self.applied, self.lr)
        for number, target in zip(numbers, targets, strict=True):
            target.copy_(number)

    # The decorator is needed although the caller disables gradients: a thread may run this method,
    # and each thread has its own setting.
    @torch.no_grad()
    def _update_chunk(self, chunk: Chunk, parts: dict[str, Tensor]) -> None:
        plane = chunk.plane(parts, self._host)
        self.passes.update_on_host(self.update_joined_part, plane, parts.get(REST))


def join_(master: Tensor, hi: Tensor, lo: Tensor) -> None:
    """Join halves into `master` in place, as `monograph.optim.join` does."""
    master.copy_(join(hi, lo))


class SquaresKey(NamedTuple):
    """The key of a plane's sums of squares; sorted keys are in the order of the norm's sum.

    Attributes:
        plane_number: the number of the plane.
        stage_index: the index of the stage.
        position: the position of the plane in the stage.
    """

    plane_number: int
    stage_index: int
    position: int


class UpdateUnderWay(NamedTuple):
    """The update of a stage that has begun on the device.

    Attributes:
        update: the update.
        work: updates one chunk each time it is advanced.
    """

    update: ChunkedUpdate
    work: Iterator[None]


class Updates:
    """The updates of a walk's stages.

    Attributes:
        in_backward: whether stages are updated in the backward pass.
        staging_buffers: device memory for the chunks of updates on the device.
        host_update: makes the updates on the host.
        waiting: stages that must still be updated on the device. They are updated before their next
            forward pass, or before the next decision about an update.
        repeatable: whether a window (the micro-batches of one update) can be tried again if it
            fails: no weight has been changed by its gradient yet.
        failed: the error that left some weights updated and others not, so that nothing can be
            trained or saved; None: there was no such error.
        update_part: updates a part of a plane on the device (`Passes.update_part`).
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
        # In the backward pass gradients are still in the stage's slot, so they are not fetched.
        tensors_of_chunks = [
            chunk_tensors_to_fetch(chunk, gradient=not self.in_backward)
            for stage in store.stages
            for chunk in chunks(stage)
        ]
        names = [f"staging buffer {number}" for number in range(STAGING_BUFFERS)]
        self.staging_buffers = StagingBuffers(
            lanes, [DeviceBuffer(name, tensors_of_chunks, placement.device) for name in names]
        )
        self.host_update = HostUpdate(step, store, lanes, passes)
        self.waiting: list[Stage] = []
        self.repeatable = True
        self.failed: OutOfDeviceMemory | None = None
        self.update_part = Compilable(passes.update_part)
        # Sums of squares of gradients.
        self._squares: dict[SquaresKey, list[Tensor]] = {}
        self._decision: StreamedDecision | None = None
        self._current: UpdateUnderWay | None = None

    @property
    def device_bytes(self) -> int:
        """Return the bytes of the staging buffers."""
        return sum(buffer.size_bytes for buffer in self.staging_buffers.buffers)

    def compute_squares(self, stage_on_device: StageOnDevice) -> None:
        """Compute the sums of squares of the stage's gradient, which must be complete."""
        for position, (stored, plane) in enumerate(
            zip(stage_on_device.stage.stored_planes, stage_on_device.planes, strict=True)
        ):
            # The bits of the norm depend on the order of its sum. Sorted keys give the order of the
            # resident engine's planes and their parts.
            key = SquaresKey(stored.plane.number, stage_on_device.stage.index, position)
            squares_of_plane = functools.partial(self.passes.squares, plane, plane.grad)
            self._squares[key] = self.lanes.compute(squares_of_plane, stage_on_device.writes)

    def store_gradients(self, stage_on_device: StageOnDevice) -> None:
        """Copy the stage's gradient home, except for planes that need it only on the device."""
        for stored, plane in zip(
            stage_on_device.stage.stored_planes, stage_on_device.planes, strict=True
        ):
            home = stored.buffers[GRADIENT]
            # An update on the device in the backward pass reads the gradient in the slot.
            used_at_home = stored.on_host or not self.in_backward
            if home.space.home != Home.DEVICE and used_at_home:
                self.lanes.copy(
                    home.tensor, plane.grad, home.space, stage_on_device.slot.gradients.space
                )

    # ── after the backward pass ─────────────────────────────────────────────────────────────────

    def decide(self, *, gradient_is_empty: bool) -> Tensor:
        """Clip the accumulated gradient, and apply it now or later, as the placement says.

        Args:
            gradient_is_empty: whether no window was accumulated; then nothing is applied.

        Returns:
            The gradient's norm before clipping.
        """
        # Stages may still wait for the previous update, if no forward pass has followed it.
        self.flush()
        squares = [square for key in sorted(self._squares) for square in self._squares[key]]
        if gradient_is_empty:
            squares = [torch.zeros_like(self.step.loss_sum)]
        applied_before = self.step.applied.clone()
        grad_norm, scale, accepted = self.lanes.compute(lambda: self.step.decide(squares))
        if self.in_backward:
            # `decide_by_losses` has counted the update already, and `step.decide` counts it again.
            self.step.applied.copy_(applied_before)
            return grad_norm
        self._decision = StreamedDecision(scale, accepted)
        self._update_on_host(self.store.stages, self._decision)
        self.waiting = [stage for stage in self.store.stages if any(chunks(stage))]
        if self.placement.when == "sweep":
            self.flush()
        return grad_norm

    def flush(self) -> None:
        """Make all updates on the device that are still waiting."""
        self.finish_current()
        for stage in list(self.waiting):
            self.begin(stage)
            self.finish_current()

    def begin(self, stage: Stage, in_slot: StageOnDevice | None = None) -> None:
        """Begin the update of a waiting stage on the device.

        Args:
            stage: the stage.
            in_slot: the stage in a slot, to which the new weights are copied as well; None: they are
                only copied home.
        """
        assert self._decision is not None
        self._begin(ChunkedUpdate(stage, self.staging_buffers), self._decision, in_slot)

    # ── in the backward pass ────────────────────────────────────────────────────────────────────

    def decide_by_losses(self) -> None:
        """Decide whether gradients are applied in the backward pass, and by which factor.

        The decision rests on the losses alone, because the gradient's norm is not known yet.
        """
        step = self.step
        scale = step.gradient_scale()
        unknown_norm = torch.zeros_like(scale)
        accepted = step.accepts(unknown_norm)
        step.applied.add_(accepted)
        self._decision = StreamedDecision(scale, accepted)
        self.repeatable = False

    def update_in_backward(self, stage_on_device: StageOnDevice) -> None:
        """Begin to update a stage whose gradient is complete, on the host and on the device."""
        assert self._decision is not None
        scale, accepted = self._decision
        stage = stage_on_device.stage
        stage_squares = [
            square
            for key, squares in self._squares.items()
            if key.stage_index == stage.index
            for square in squares
        ]
        # The norm over all stages is not known yet, so each stage's update depends on the norm of
        # its own gradient. The comparison is false for NaN, so such a gradient is not applied.
        stage_norm = torch.stack(stage_squares).sum().sqrt() * scale
        decision_for_stage = StreamedDecision(
            scale, accepted & (stage_norm <= self.step.largest_norm)
        )
        self._update_on_host([stage], decision_for_stage)
        if any(chunks(stage)):
            update = ChunkedUpdate(stage, self.staging_buffers, gradient_source=stage_on_device)
            self._begin(update, decision_for_stage)

    # ── on the host ─────────────────────────────────────────────────────────────────────────────

    def _update_on_host(self, stages: list[Stage], decision: StreamedDecision) -> None:
        """Queue the update of those planes of the stages that belong to the host."""
        # Copying a decision takes time, so it is copied only if the host updates something.
        if any(stored.on_host for stage in stages for stored in stage.stored_planes):
            # Either all stages have one decision, or each stage has its own.
            buffers = self.host_update.send(stages[0].index, decision)
            for stage in stages:
                self.host_update.update(stage, buffers)

    # ── on the device, between other work ───────────────────────────────────────────────────────

    def _begin(
        self,
        update: ChunkedUpdate,
        decision: StreamedDecision,
        in_slot: StageOnDevice | None = None,
    ) -> None:
        """Begin an update, after finishing the update that is under way.

        Later calls of `update_due_chunks` and `finish_current` update the chunks.
        """
        self.finish_current()
        update.fetch_chunks()
        work = update.update_chunks(self.update_part, decision.scale, decision.accepted, in_slot)
        self._current = UpdateUnderWay(update, work)

    def update_due_chunks(self, micro_batches: int) -> None:
        """Update the chunks that are due after one micro-batch.

        Args:
            micro_batches: the number of micro-batches during which the whole update is made.
        """
        if self._current:
            update, work = self._current
            # This is rounded up, so that the update is finished by the last micro-batch.
            chunks_due = math.ceil(update.count / micro_batches)
            self._update_chunks(islice(work, chunks_due))

    def finish_current(self) -> None:
        """Finish the update that is under way.

        Raises:
            OutOfDeviceMemory: this update or an earlier one failed.
        """
        self._raise_earlier_failure()
        if self._current is None:
            return
        update, work = self._current
        self._update_chunks(work)
        if update.stage in self.waiting:
            self.waiting.remove(update.stage)
        self._current = None

    def _raise_earlier_failure(self) -> None:
        """Raise the error of an earlier call that left some weights updated and others not."""
        if self.failed:
            raise self.failed

    def _update_chunks(self, work: Iterable[None]) -> None:
        """Update chunks by running an iterator, which updates one chunk each time it is advanced.

        Raises:
            OutOfDeviceMemory: memory ran out now or in an earlier call. Some weights are then
                updated and others not, so they must be neither trained nor saved.
        """
        self._raise_earlier_failure()
        try:
            for _ in work:
                pass
        except OutOfDeviceMemory as error:
            self.failed = error
            raise
