"""The update of one stage, chunk by chunk, on the device: fetch, the resident engine's own update, bring back.

A chunk is a stretch of a plane. Staging buffers take turns: while one is updated the others are filled or emptied.
Chunks are updated between the micro-batches of another stage, so that they come and go while that one computes. Planes
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
# Elements of a chunk, a multiple of the 256 that share a number in 8-bit moments: long enough to fill a link and a
# device, short compared with a large model's blocks.
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
        """Return the chunk as a plane of its own, given its buffers' parts on that device, by name."""
        stored, begin, end = self
        slots, matrices = stored.plane.slots, stored.plane.kind.matrix is not None
        whole = stored.plane.param.numel() // len(slots)
        return replace(
            stored.plane,
            # Muon orthogonalises whole matrices, so a chunk of a plane of matrices is some of them.
            slots=slots[begin // whole : end // whole] if matrices else slots,
            param=tensors[WEIGHTS],
            grad=tensors[GRADIENT],
            # A tensor, as a number would be a constant of the graph, and each chunk would compile one of its own.
            start=torch.full((), stored.start + begin, dtype=torch.int64, device=device),
            state={name: tensors[name] for name in stored.moments},
        )


def chunks(stage: Stage) -> Iterator[Chunk]:
    """Cut those of the stage's planes that are updated on the device into chunks of at most MOST elements."""
    return cut((stored for stored in stage.stored if not stored.on_host), MOST)


def cut(planes: Iterable[Stored], most: int) -> Iterator[Chunk]:
    """Cut planes into chunks of at most so many elements; matrices that are updated as such stay whole."""
    for stored in planes:
        size = stored.plane.param.numel()
        whole = size // len(stored.plane.slots) if stored.plane.kind.matrix else 1
        step = max(1, most // whole) * whole
        for begin in range(0, size, step):
            yield Chunk((stored, begin, min(size, begin + step)))


def to_fetch(chunk: Chunk, *, gradient: bool) -> dict[Hashable, Tensor]:
    """Return a chunk's tensors that are not on the device, by name; the gradient only if it is brought home before."""
    away = {name: buffer for name, buffer in chunk[0].buffers.items() if buffer.space.home != Home.DEVICE}
    return {name: chunk.part(buffer) for name, buffer in away.items() if gradient or name != GRADIENT}


@dataclass
class StagingBuffers:
    """Memory on the device for the chunks that are updated, in turn."""

    lanes: Lanes
    buffers: list[DeviceBuffer]
    turn: int = 0

    def next(self) -> DeviceBuffer:
        """Return the one whose turn it is."""
        # In turn: the buffer longest unused is the one whose copies home are most likely done.
        self.turn += 1
        return self.buffers[self.turn % len(self.buffers)]


class Fetched(NamedTuple):
    """A chunk on the device: its tensors by name, the spaces that its update writes, and the memory that it is in."""

    chunk: Chunk
    parts: dict[str, Tensor]
    spaces: list[Space]
    staging: DeviceBuffer


class ChunkedUpdate:
    """One stage's update.

    Attributes:
        count: how many chunks it has.
    """

    def __init__(self, stage: Stage, staging_buffers: StagingBuffers, gradients: StageOnDevice | None = None):
        """Copy nothing yet.

        Args:
            stage: that is updated.
            staging_buffers: where chunks are brought to.
            gradients: where the stage's gradients are on the device; None: at home.
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
        """Update one chunk after another, and bring each home, and to the slot `into` where the weights are wanted.

        Raises:
            OutOfDeviceMemory: some chunks are updated and others not, so that it can be neither repeated nor left out.
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
        # Copies of these weights in a slot are old from here on, and are fetched again when they are wanted.
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
            # What lives on the device is updated where it is.
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
            # On the device: the weights need not come over the link a second time for the pass that waits for them.
            target = into.planes[self.stage.stored.index(stored)].param[begin:end]
            lanes.compute(lambda: target.copy_(parts[WEIGHTS]), reads=[staging.space], writes=[into.slot.weights.space])
