"""Update one stage on the device, chunk by chunk: fetch a chunk, run the resident engine's own
update, copy it back.

A chunk is a part of a plane. Chunks take turns in staging buffers: while one is updated, others are
filled or emptied. Chunks are updated between the micro-batches of another stage, so that copies run
while that stage computes. Planes that are updated on the host are left to
`monograph.stream.updates`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from monograph.errors import OutOfDeviceMemory
from monograph.optim import Plane
from monograph.stream.lanes import Home, Lanes, Space
from monograph.stream.slots import DeviceBuffer, StageOnDevice
from monograph.stream.store import GRADIENT, REST, WEIGHTS, Buffer, Stage, StoredPlane

STAGING_BUFFERS = 4
# Elements of a chunk, a multiple of every block in which moments are packed: enough to use a link's
# and a device's full rate, and few compared with a large model's blocks.
MOST = 2**23
HALF_DONE = "take fewer blocks a stage or fewer rows (train.micro_batch), and go on from the last checkpoint"
UpdatePart = Callable[[Plane, Tensor | None, Tensor, Tensor, Tensor], None]


class Chunk(tuple[StoredPlane, int, int]):
    """A part of a plane: (the plane, index of the first element, index after the last element)."""

    __slots__ = ()

    def part(self, buffer: Buffer) -> Tensor:
        """Return the chunk's part of a buffer of the plane."""
        stored, begin, end = self
        # Moments in blocks have one element for several numbers, and chunks begin at multiples of
        # a block.
        block = stored.plane.param.numel() // buffer.tensor.numel()
        return buffer.tensor[begin // block : -(-end // block)]

    def plane(self, tensors: Mapping[str, Tensor], device: torch.device) -> Plane:
        """Return the chunk as a plane of its own, made of its buffers' parts on `device`, by name."""
        stored, begin, end = self
        slots = stored.plane.slots
        matrices = stored.plane.kind.matrix is not None
        whole = stored.plane.param.numel() // len(slots)
        return replace(
            stored.plane,
            # Muon orthogonalises whole matrices, so a chunk of a plane of matrices holds some of
            # them whole.
            slots=slots[begin // whole : end // whole] if matrices else slots,
            param=tensors[WEIGHTS],
            grad=tensors[GRADIENT],
            # It is a tensor, as a number would be a constant of the graph, and each chunk would
            # compile its own graph.
            start=torch.full((), stored.start + begin, dtype=torch.int64, device=device),
            state={name: tensors[name] for name in stored.moments},
        )


def chunks(stage: Stage) -> Iterator[Chunk]:
    """Cut the stage's planes that are updated on the device into chunks of at most MOST elements."""
    return cut((stored for stored in stage.stored if not stored.on_host), MOST)


def cut(planes: Iterable[StoredPlane], most: int) -> Iterator[Chunk]:
    """Cut planes into chunks of at most `most` elements; a chunk of matrices has whole ones, and at
    least one.
    """
    for stored in planes:
        size = stored.plane.param.numel()
        whole = size // len(stored.plane.slots) if stored.plane.kind.matrix else 1
        step = max(1, most // whole) * whole
        yield from (
            Chunk((stored, begin, min(size, begin + step))) for begin in range(0, size, step)
        )


def to_fetch(chunk: Chunk, *, gradient: bool) -> dict[str, Tensor]:
    """Return by name a chunk's tensors that do not live on the device, the gradient only if
    `gradient`.
    """
    away = {
        name: buffer
        for name, buffer in chunk[0].buffers.items()
        if buffer.space.home != Home.DEVICE
    }
    return {
        name: chunk.part(buffer) for name, buffer in away.items() if gradient or name != GRADIENT
    }


@dataclass
class StagingBuffers:
    """Device memory in which the chunks that are updated take turns."""

    lanes: Lanes
    buffers: list[DeviceBuffer]
    turn: int = 0

    def next(self) -> DeviceBuffer:
        """Return the buffer that was used longest ago, as its copies home are most likely done."""
        self.turn += 1
        return self.buffers[self.turn % len(self.buffers)]


class Fetched(NamedTuple):
    """A chunk on the device: its tensors by name, the spaces that its update writes, and its
    staging buffer.
    """

    chunk: Chunk
    parts: dict[str, Tensor]
    spaces: list[Space]
    staging: DeviceBuffer


class ChunkedUpdate:
    """The update of one stage.

    Attributes:
        count: the number of its chunks.
    """

    def __init__(
        self, stage: Stage, staging_buffers: StagingBuffers, gradients: StageOnDevice | None = None
    ):
        """Prepare the update; nothing is copied yet.

        Args:
            stage: the stage to update.
            staging_buffers: the memory that chunks are copied to.
            gradients: the stage on the device, if its gradients are still in its slot; None if they
                are at home.
        """
        self.stage = stage
        self.staging_buffers = staging_buffers
        self.gradients = gradients
        # This is a generator, as chunks are fetched when buffers become free.
        self._left = chunks(stage)
        self.count = sum(1 for _ in chunks(stage))
        self._fetched: list[Fetched] = []

    def begin(self) -> None:
        """Fetch chunks until all staging buffers are in use."""
        for chunk in islice(self._left, STAGING_BUFFERS - len(self._fetched)):
            self._fetch(chunk)

    @torch.no_grad()  # it may be called with and without gradients, and must be one captured graph
    def work(
        self,
        update_part: UpdatePart,
        scale: Tensor,
        accepted: Tensor,
        into: StageOnDevice | None = None,
    ) -> Iterator[None]:
        """Update one chunk after another and copy it home, its weights also to the slot `into`, if
        given.

        Raises:
            OutOfDeviceMemory: some chunks are updated and others are not, so the update can neither
                be repeated nor be skipped.
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
        # Copies of these weights in other slots are now outdated, and are fetched again when they
        # are needed.
        self.stage.version += 1
        if into is not None:
            into.fetch(
                self.staging_buffers.lanes,
                [stored for stored in self.stage.stored if stored.on_host],
            )
            into.slot.holds = (self.stage, self.stage.version)

    def _fetch(self, chunk: Chunk) -> None:
        stored, begin, end = chunk
        staging = self.staging_buffers.next()
        lanes = self.staging_buffers.lanes
        away = to_fetch(chunk, gradient=self.gradients is None)
        parts = staging.take(away)
        spaces = [staging.space]
        for name, target in parts.items():
            lanes.copy(target, away[name], staging.space, stored.buffers[name].space)
        for name, buffer in stored.buffers.items():
            if name == GRADIENT and self.gradients is not None:
                parts[name] = self.gradients.planes[self.stage.stored.index(stored)].grad[begin:end]
                spaces += self.gradients.writes
            # A buffer that lives on the device is updated in place.
            elif name not in parts:
                parts[name] = chunk.part(buffer)
                spaces.append(buffer.space)
        self._fetched.append(Fetched(chunk, parts, spaces, staging))

    def _update(
        self,
        fetched: Fetched,
        update_part: UpdatePart,
        scale: Tensor,
        accepted: Tensor,
        into: StageOnDevice | None,
    ) -> None:
        (stored, begin, end), parts, spaces, staging = fetched
        lanes = self.staging_buffers.lanes
        plane = fetched.chunk.plane(parts, scale.device)
        lanes.compute(
            lambda: update_part(plane, parts.get(REST), parts[GRADIENT], scale, accepted),
            writes=spaces,
        )
        for name, buffer in stored.buffers.items():
            if name != GRADIENT and buffer.space.home != Home.DEVICE:
                lanes.copy(fetched.chunk.part(buffer), parts[name], buffer.space, staging.space)
        if into is not None and stored.buffers[WEIGHTS].space.home != Home.DEVICE:
            # Copied on the device, as the next pass needs these weights, which would else cross the
            # link a second time.
            target = into.planes[self.stage.stored.index(stored)].param[begin:end]
            lanes.compute(
                lambda: target.copy_(parts[WEIGHTS]),
                reads=[staging.space],
                writes=[into.slot.weights.space],
            )
