"""The update of one stage on the device, chunk by chunk: fetch, the resident engine's own update, bring back.

A chunk is a stretch of a plane. Staging buffers take turns: while one is updated the others are filled or emptied.
Chunks are updated between the micro-batches of another stage, so that copies overlap with its computation. Planes
that are updated on the host are left to `monograph.stream.host_update`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from monograph.errors import OutOfDeviceMemory
from monograph.optim import Plane
from monograph.stream.lanes import Home, Lanes, Space
from monograph.stream.slots import DeviceBuffer, StageOnDevice
from monograph.stream.store import GRADIENT, REST, WEIGHTS, Buffer, Stage, Stored

STAGING_BUFFERS = 4
# Elements of a chunk, a multiple of the 256 that share a scale in 8-bit moments: enough to use a link's and a device's
# full rate, and few compared with a large model's blocks.
MOST = 2**23
HALF_DONE = "take fewer blocks a stage or fewer rows (train.micro_batch), and go on from the last checkpoint"
UpdatePart = Callable[[Plane, Tensor | None, Tensor, Tensor, Tensor], None]


class Chunk(tuple[Stored, int, int]):
    """A plane and the elements of it, from (included) to (excluded)."""

    __slots__ = ()

    def part(self, buffer: Buffer) -> Tensor:
        """Return the chunk's part of a buffer of the plane; a buffer may have one number for many elements."""
        stored, begin, end = self
        # 8-bit moments have one scale for 256 elements; chunks begin at multiples of these.
        block = stored.plane.param.numel() // buffer.tensor.numel()
        return buffer.tensor[begin // block : -(-end // block)]

    def plane(self, tensors: Mapping[str, Tensor], device: torch.device) -> Plane:
        """Return the chunk as a plane of its own, from the parts of its buffers on that device, by name."""
        stored, begin, end = self
        slots, matrices = stored.plane.slots, stored.plane.kind.matrix is not None
        whole = stored.plane.param.numel() // len(slots)
        return replace(
            stored.plane,
            # Muon orthogonalises whole matrices, so a chunk of a plane of matrices holds some whole ones.
            slots=slots[begin // whole : end // whole] if matrices else slots,
            param=tensors[WEIGHTS],
            grad=tensors[GRADIENT],
            # A tensor: a number would be a constant of the graph, and every chunk would compile a graph of its own.
            start=torch.full((), stored.start + begin, dtype=torch.int64, device=device),
            state={name: tensors[name] for name in stored.moments},
        )


def chunks(stage: Stage) -> Iterator[Chunk]:
    """Cut those of the stage's planes that are updated on the device into chunks of at most MOST elements."""
    return cut((stored for stored in stage.stored if not stored.on_host), MOST)


def cut(planes: Iterable[Stored], most: int) -> Iterator[Chunk]:
    """Cut planes into chunks of at most `most` elements; matrices that are updated as matrices stay whole."""
    for stored in planes:
        size = stored.plane.param.numel()
        whole = size // len(stored.plane.slots) if stored.plane.kind.matrix else 1
        step = max(1, most // whole) * whole
        for begin in range(0, size, step):
            yield Chunk((stored, begin, min(size, begin + step)))


def to_fetch(chunk: Chunk, *, gradient: bool) -> dict[Hashable, Tensor]:
    """Return a chunk's tensors that are not on the device, by name; the gradient only if the host has it."""
    away = {name: buffer for name, buffer in chunk[0].buffers.items() if buffer.space.home != Home.DEVICE}
    return {name: chunk.part(buffer) for name, buffer in away.items() if gradient or name != GRADIENT}


@dataclass
class StagingBuffers:
    """Memory on the device for chunks, used in turn."""

    lanes: Lanes
    buffers: list[DeviceBuffer]
    turn: int = 0

    def next(self) -> DeviceBuffer:
        """Return the next buffer."""
        # The buffer longest unused is the one whose copies to the host are most likely done.
        self.turn += 1
        return self.buffers[self.turn % len(self.buffers)]


class Fetched(NamedTuple):
    """A chunk on the device: its tensors by name, the spaces that its update writes, and the buffer that holds it."""

    chunk: Chunk
    parts: dict[str, Tensor]
    spaces: list[Space]
    staging: DeviceBuffer


class ChunkedUpdate:
    """One stage's update.

    Attributes:
        count: number of chunks.
    """

    def __init__(self, stage: Stage, staging_buffers: StagingBuffers, gradients: StageOnDevice | None = None):
        """Copy nothing yet.

        Args:
            stage: the stage to update.
            staging_buffers: the device memory for its chunks.
            gradients: the stage on the device, if its gradients are there; None if the host has them.
        """
        self.stage, self.staging_buffers, self.gradients = stage, staging_buffers, gradients
        # A generator: chunks are fetched as buffers become free, not all at once.
        self._left = chunks(stage)
        self.count = sum(1 for _ in chunks(stage))
        self._fetched: list[Fetched] = []

    def begin(self) -> None:
        """Fetch as many chunks as there are staging buffers, if not done yet."""
        for chunk in islice(self._left, STAGING_BUFFERS - len(self._fetched)):
            self._fetch(chunk)

    @torch.no_grad()  # wherever it is called, an evaluation among others: captured, it is one graph
    def work(
        self, update_part: UpdatePart, scale: Tensor, accepted: Tensor, into: StageOnDevice | None = None
    ) -> Iterator[None]:
        """Update one chunk after another; copy each back to the host, and to the slot `into` if the weights are needed.

        Raises:
            OutOfDeviceMemory: some chunks are updated and others are not, so the update can be neither repeated nor
                skipped.
        """
        self.begin()
        while self._fetched:
            try:
                self._update(self._fetched.pop(0), update_part, scale, accepted, into)
            except torch.OutOfMemoryError as error:
                raise OutOfDeviceMemory(
                    f"the update of {self.stage.name} does not fit the device's memory: {HALF_DONE}"
                ) from error
            self.begin()
            yield
        # From here on a slot's copy of these weights is out of date, and is fetched again before its next use.
        self.stage.version += 1
        if into is not None:
            into.fetch(self.staging_buffers.lanes, [stored for stored in self.stage.stored if stored.on_host])
            into.slot.holds = (self.stage, self.stage.version)

    def _fetch(self, chunk: Chunk) -> None:
        stored, begin, end = chunk
        staging, lanes = self.staging_buffers.next(), self.staging_buffers.lanes
        away = to_fetch(chunk, gradient=self.gradients is None)
        parts: dict[Any, Tensor] = staging.take(away)
        spaces = [staging.space]
        for name, target in parts.items():
            lanes.copy(target, away[name], staging.space, stored.buffers[name].space)
        for name, buffer in stored.buffers.items():
            if name == GRADIENT and self.gradients is not None:
                parts[name] = self.gradients.planes[self.stage.stored.index(stored)].grad[begin:end]
                spaces += self.gradients.writes
            # Buffers that live on the device are updated in place.
            elif name not in parts:
                parts[name] = chunk.part(buffer)
                spaces.append(buffer.space)
        self._fetched.append(Fetched(chunk, parts, spaces, staging))

    def _update(
        self, fetched: Fetched, update_part: UpdatePart, scale: Tensor, accepted: Tensor, into: StageOnDevice | None
    ) -> None:
        (stored, begin, end), parts, spaces, staging = fetched
        lanes = self.staging_buffers.lanes
        plane = fetched.chunk.plane(parts, scale.device)
        lanes.compute(lambda: update_part(plane, parts.get(REST), parts[GRADIENT], scale, accepted), writes=spaces)
        for name, buffer in stored.buffers.items():
            if name != GRADIENT and buffer.space.home != Home.DEVICE:
                lanes.copy(fetched.chunk.part(buffer), parts[name], buffer.space, staging.space)
        if into is not None and stored.buffers[WEIGHTS].space.home != Home.DEVICE:
            # Device to device, so that the weights need not cross the link again for the pass that waits for them.
            target = into.planes[self.stage.stored.index(stored)].param[begin:end]
            lanes.compute(lambda: target.copy_(parts[WEIGHTS]), reads=[staging.space], writes=[into.slot.weights.space])
