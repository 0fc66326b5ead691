"""Update one stage on the device, chunk by chunk.

A stage is some consecutive blocks of the model, or the parts before or after them. A plane is a
flat buffer of a stage's parameters of one kind (`monograph.optim.Plane`), and a chunk is a part of
a plane. The home of a buffer is where it is kept: on the device, on the host or in a file. A slot is
device memory to which one stage after another is copied (`monograph.stream.slots`).

A chunk is fetched to a staging buffer, updated there, and copied home. The update is that of the
resident engine, which keeps all weights on the device. While one chunk is updated, other chunks are
copied to or from other staging buffers. Chunks are updated between the micro-batches of another
stage. So copies run while that stage computes.

Planes that are updated on the host are left to `monograph.stream.updates`.
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
# The largest number of elements in a chunk that the device updates. It is a multiple of the number of
# moments that are packed together, in every format (`monograph.optim.state_format`). Copies and updates
# of this size run at full rate, and yet each block of a large model has many chunks, so that copies and
# updates overlap.
MAX_CHUNK_ELEMENTS = 2**23
# The end of an error message: what to do if memory ran out when only some weights were updated.
ADVICE_AFTER_PARTIAL_UPDATE = (
    "take fewer blocks a stage or fewer rows (train.micro_batch), "
    "and go on from the last checkpoint"
)
# The type of `Passes.update_part`, called with (part of a plane, low halves of split weights or None,
# gradient, the gradient's factor, whether the update is applied).
PartUpdater = Callable[[Plane, Tensor | None, Tensor, Tensor, Tensor], None]


class Chunk(NamedTuple):
    """A part of a plane.

    Attributes:
        stored: the plane.
        begin: index of the first element.
        end: index after the last element.
    """

    stored: StoredPlane
    begin: int
    end: int

    def part(self, buffer: Buffer) -> Tensor:
        """Return the chunk's part of a buffer of the plane."""
        # A buffer of packed moments has one element for several weights, e.g. a scale for 256.
        # Parameters are padded to a multiple of that number (`monograph.optim.state_format`), and
        # chunks begin and end at multiples of it.
        weights_per_element = self.stored.plane.param.numel() // buffer.tensor.numel()
        return buffer.tensor[self.begin // weights_per_element : self.end // weights_per_element]

    def plane(self, tensors: Mapping[str, Tensor], device: torch.device) -> Plane:
        """Return the chunk as a plane.

        Args:
            tensors: the chunk's parts of the buffers, by name.
            device: the device of these tensors.
        """
        stored, begin, end = self
        placed = stored.plane.placed  # the plane's parameters, each with its place in the plane
        if stored.plane.kind.matrix_shape is not None:
            # Muon orthogonalises whole matrices, so a chunk consists of whole matrices.
            matrix_size = stored.plane.param.numel() // len(placed)
            placed = placed[begin // matrix_size : end // matrix_size]
        return replace(
            stored.plane,
            placed=placed,
            param=tensors[WEIGHTS],
            grad=tensors[GRADIENT],
            # `start` is a tensor, because a number would be a constant of the captured graph, and
            # each chunk would need its own graph.
            start=torch.full((), stored.start + begin, dtype=torch.int64, device=device),
            state={name: tensors[name] for name in stored.moments},
        )


def chunks(stage: Stage) -> Iterator[Chunk]:
    """Cut the planes that are updated on the device into chunks of at most MAX_CHUNK_ELEMENTS elements."""
    return cut_into_chunks(
        (stored for stored in stage.stored_planes if not stored.on_host), MAX_CHUNK_ELEMENTS
    )


def cut_into_chunks(planes: Iterable[StoredPlane], max_elements: int) -> Iterator[Chunk]:
    """Cut planes into chunks of at most `max_elements` elements.

    A plane of matrices is cut only between matrices. Each of its chunks has at least one matrix,
    even if the matrix has more elements.
    """
    for stored in planes:
        size = stored.plane.param.numel()
        # The unit is the smallest number of elements that must stay together.
        unit = size // len(stored.plane.placed) if stored.plane.kind.matrix_shape else 1
        units_per_chunk = max(1, max_elements // unit)
        chunk_size = units_per_chunk * unit
        for begin in range(0, size, chunk_size):
            yield Chunk(stored, begin, min(size, begin + chunk_size))


def chunk_tensors_to_fetch(chunk: Chunk, *, gradient: bool) -> dict[str, Tensor]:
    """Return a chunk's tensors that must be copied to the device, by name.

    Args:
        chunk: the chunk.
        gradient: whether the chunk's gradient is copied as well.
    """
    stored = chunk.stored
    tensors = dict[str, Tensor]()
    for name, buffer in stored.buffers.items():
        is_needed = gradient or name != GRADIENT
        if is_needed and buffer.space.home != Home.DEVICE:
            tensors[name] = chunk.part(buffer)
    return tensors


@dataclass
class StagingBuffers:
    """Device memory for chunks while they are updated.

    Attributes:
        lanes: the lanes that copy and compute.
        buffers: the buffers, in which chunks take turns.
        turn: how many times a buffer was taken.
    """

    lanes: Lanes
    buffers: list[DeviceBuffer]
    turn: int = 0

    def next(self) -> DeviceBuffer:
        """Return the least recently used buffer, whose copies home are most likely finished."""
        self.turn += 1
        return self.buffers[self.turn % len(self.buffers)]


class FetchedChunk(NamedTuple):
    """A chunk on the device.

    Attributes:
        chunk: the chunk.
        parts: the chunk's tensors on the device, by name.
        spaces: the spaces that the chunk's update reads and writes.
        staging: the chunk's staging buffer.
    """

    chunk: Chunk
    parts: dict[str, Tensor]
    spaces: list[Space]
    staging: DeviceBuffer


class ChunkedUpdate:
    """The update of one stage.

    Attributes:
        stage: the stage.
        staging_buffers: the memory that chunks are copied to.
        gradient_source: the stage on the device, if its gradients are still in its slot and are read
            there; None if they are at home.
        count: the number of the stage's chunks.
    """

    def __init__(
        self,
        stage: Stage,
        staging_buffers: StagingBuffers,
        gradient_source: StageOnDevice | None = None,
    ):
        """Prepare the update; nothing is copied yet. The arguments are described in the class."""
        self.stage = stage
        self.staging_buffers = staging_buffers
        self.gradient_source = gradient_source
        # This generator yields the chunks that are not fetched yet. They are counted with another
        # generator, because counting uses it up.
        self._unfetched = chunks(stage)
        self.count = sum(1 for _ in chunks(stage))
        self._fetched: list[FetchedChunk] = []

    def fetch_chunks(self) -> None:
        """Fetch chunks until all staging buffers are in use."""
        free_buffers = STAGING_BUFFERS - len(self._fetched)
        for chunk in islice(self._unfetched, free_buffers):
            self._fetch(chunk)

    # Callers may have gradients enabled or disabled. Without the decorator, the two would need two
    # captured graphs.
    @torch.no_grad()
    def update_chunks(
        self,
        update_part: PartUpdater,
        scale: Tensor,
        accepted: Tensor,
        in_slot: StageOnDevice | None = None,
    ) -> Iterator[None]:
        """Update the chunks one after another and copy each one home; yield after each chunk.

        Args:
            update_part: computes the update of a part of a plane, in place.
            scale: the gradient's factor.
            accepted: whether the update is applied.
            in_slot: the stage in a slot, to which the new weights are copied as well; None: they are
                only copied home.

        Raises:
            OutOfDeviceMemory: some chunks are updated and others are not, so the update can be
                neither repeated nor skipped.
        """
        self.fetch_chunks()
        while self._fetched:
            try:
                self._update(self._fetched.pop(0), update_part, scale, accepted, in_slot)
            except torch.OutOfMemoryError as error:
                raise OutOfDeviceMemory(
                    f"the update of {self.stage.name} does not fit the device's memory: {ADVICE_AFTER_PARTIAL_UPDATE}"
                ) from error
            self.fetch_chunks()
            yield
        # The new version makes copies of these weights in other slots outdated, so they are fetched
        # again when they are needed.
        self.stage.version += 1
        if in_slot is not None:
            # Planes that the host has updated are not copied to the slot by `_update`.
            host_planes = [stored for stored in self.stage.stored_planes if stored.on_host]
            in_slot.fetch(self.staging_buffers.lanes, host_planes)
            in_slot.slot.loaded = (self.stage, self.stage.version)

    def _fetch(self, chunk: Chunk) -> None:
        """Copy a chunk to the next staging buffer."""
        stored, begin, end = chunk
        staging = self.staging_buffers.next()
        lanes = self.staging_buffers.lanes
        sources = chunk_tensors_to_fetch(chunk, gradient=self.gradient_source is None)
        parts = staging.views(sources)
        spaces = [staging.space]
        for name, target in parts.items():
            lanes.copy(target, sources[name], staging.space, stored.buffers[name].space)
        for name, buffer in stored.buffers.items():
            if name == GRADIENT and self.gradient_source is not None:
                plane_in_slot = self.gradient_source.planes[self.stage.stored_planes.index(stored)]
                parts[name] = plane_in_slot.grad[begin:end]
                spaces += self.gradient_source.writes
            elif name not in parts:
                # The buffer lives on the device, and is updated in place.
                parts[name] = chunk.part(buffer)
                spaces.append(buffer.space)
        self._fetched.append(FetchedChunk(chunk, parts, spaces, staging))

    def _update(
        self,
        fetched: FetchedChunk,
        update_part: PartUpdater,
        scale: Tensor,
        accepted: Tensor,
        in_slot: StageOnDevice | None,
    ) -> None:
        """Update a fetched chunk, and copy it home and to the slot of `in_slot`."""
        chunk, parts, spaces, staging = fetched
        stored, begin, end = chunk
        lanes = self.staging_buffers.lanes
        plane = chunk.plane(parts, scale.device)
        lanes.compute(
            lambda: update_part(plane, parts.get(REST), parts[GRADIENT], scale, accepted),
            writes=spaces,
        )
        for name, buffer in stored.buffers.items():
            if name != GRADIENT and buffer.space.home != Home.DEVICE:
                lanes.copy(chunk.part(buffer), parts[name], buffer.space, staging.space)
        if in_slot is not None and stored.buffers[WEIGHTS].space.home != Home.DEVICE:
            # The next pass needs these weights. They are copied within the device, so that they do
            # not cross the link again.
            target = in_slot.planes[self.stage.stored_planes.index(stored)].param[begin:end]
            lanes.compute(
                lambda: target.copy_(parts[WEIGHTS]),
                reads=[staging.space],
                writes=[in_slot.slot.weights.space],
            )
