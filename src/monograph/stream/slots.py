"""Slots: device memory into which one stage after another is copied, and which the model's parameters then view."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from monograph.optim import unlinked
from monograph.stream.lanes import Home, Lanes, Space
from monograph.stream.store import GRADIENT, WEIGHTS, Stage, Stored

Key = Hashable
BLOCK_SLOTS = 2  # shared in turn by all stages of blocks


class DeviceBuffer:
    """Device memory for tensors by name. Each has memory of its own, since a graph would copy inputs that overlap.

    Attributes:
        space: all of the memory, for the lanes.
    """

    def __init__(self, name: str, held_in_turn: Iterable[Mapping[Key, Tensor]], device: torch.device):
        """Allocate enough memory for any one of these sets of tensors."""
        self.space = Space(name, Home.DEVICE)
        sizes: dict[tuple[Key, torch.dtype], int] = {}
        for tensors in held_in_turn:
            for key, tensor in tensors.items():
                # By dtype as well: weights of one kind are bf16 where they are split, and fp32 elsewhere.
                at = key, tensor.dtype
                sizes[at] = max(sizes.get(at, 0), tensor.numel())
        self._memory = {at: torch.zeros(size, dtype=at[1], device=device) for at, size in sizes.items()}

    @property
    def size_bytes(self) -> int:
        """Return the bytes allocated."""
        return sum(memory.numel() * memory.element_size() for memory in self._memory.values())

    def take(self, tensors: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
        """Return views of the memory for one set of tensors."""
        return {key: self._memory[key, tensor.dtype][: tensor.numel()] for key, tensor in tensors.items()}


def traveling(stage: Stage, name: str) -> dict[Key, Tensor]:
    """Return the stage's buffers of a name that do not live on the device, by their plane's number.

    So planes of one kind share memory, as do an embedding's and the head's.
    """
    buffers = {stored.plane.number: stored.buffers[name] for stored in stage.stored}
    return {at: buffer.tensor for at, buffer in buffers.items() if buffer.space.home != Home.DEVICE}


class Slot:
    """Device memory for the weights and gradients of one stage at a time.

    Attributes:
        weights: the memory of the weights.
        gradients: the memory of the gradients.
        holds: the stage whose weights are in the slot, and their version.
    """

    def __init__(self, name: str, stages: list[Stage], device: torch.device):
        """Allocate enough memory for the largest of the stages."""
        self.weights = DeviceBuffer(f"{name}, weights", [traveling(stage, WEIGHTS) for stage in stages], device)
        self.gradients = DeviceBuffer(f"{name}, gradients", [traveling(stage, GRADIENT) for stage in stages], device)
        self.holds: tuple[Stage, int] | None = None


class StageOnDevice:
    """A stage on the device.

    Attributes:
        stage: the stage.
        slot: the slot that holds it.
        planes: its planes in the slot: the parameters' weights and gradients.
    """

    def __init__(self, stage: Stage, slot: Slot):
        """Make views of the slot; nothing is copied."""
        self.stage, self.slot = stage, slot
        weights, gradients = (
            room.take(traveling(stage, name)) for room, name in ((slot.weights, WEIGHTS), (slot.gradients, GRADIENT))
        )
        self.planes = [
            replace(
                stored.plane,
                param=weights.get(stored.plane.number, stored.plane.param),
                grad=gradients.get(stored.plane.number, stored.plane.grad),
            )
            for stored in stage.stored
        ]

    @property
    def reads(self) -> list[Space]:
        """Return the spaces that its forward pass reads."""
        return self._spaces(WEIGHTS, self.slot.weights)

    @property
    def writes(self) -> list[Space]:
        """Return the spaces that its backward pass adds to."""
        return self._spaces(GRADIENT, self.slot.gradients)

    def _spaces(self, name: str, memory: DeviceBuffer) -> list[Space]:
        own = [stored.buffers[name].space for stored in self.stage.stored]
        return list(dict.fromkeys(s if s.home == Home.DEVICE else memory.space for s in own))

    def fetch(self, lanes: Lanes, planes: Sequence[Stored]) -> None:
        """Copy these planes' weights to the slot."""
        for stored, plane in zip(self.stage.stored, self.planes, strict=True):
            weights = stored.buffers[WEIGHTS]
            if stored in planes and weights.space.home != Home.DEVICE:
                lanes.copy(plane.param, weights.tensor, self.slot.weights.space, weights.space)

    @contextmanager
    def parameters(self) -> Iterator[None]:
        """Let the model's parameters view the slot in the block."""
        # Only while the stage runs: outside of the block they view the host's buffers, as all other code expects.
        before = [slot.parameter.data for plane in self.planes for slot in plane.slots]
        for plane in self.planes:
            plane.hold(plane.param)
        try:
            yield
        finally:
            for parameter, data in zip(self.stage.slots, before, strict=True):
                parameter.grad = None
                parameter.data = data

    def link(self) -> None:
        """Let backward passes add to the slot's gradients."""
        for plane in self.planes:
            plane.link()

    def unlinked(self) -> AbstractContextManager[None]:
        """See `monograph.optim.planes.unlinked`."""
        return unlinked(self.planes)


class Slots:
    """The slots of a model, and the stage in each.

    Stages of blocks share two slots in turn. The parts before and those after the blocks share one, unless they share
    weights: then each has a slot, and the first keeps its own during the whole walk.
    """

    def __init__(self, stages: list[Stage], tied: bool, lanes: Lanes, device: torch.device):
        """Allocate the slots."""
        self.lanes = lanes
        first, *middle, last = stages
        # The last stage of a tied model reads weights of the first, so both are on the device at once.
        ends = [[first], [last]] if tied else [[first, last]]
        self.pools = [[Slot(f"slot of ends {n}", those, device)] for n, those in enumerate(ends)]
        self.pools.append([Slot(f"slot {number}", middle, device) for number in range(min(BLOCK_SLOTS, len(middle)))])
        self._pool = dict.fromkeys(middle, self.pools[-1])
        self._pool |= {first: self.pools[0], last: self.pools[len(ends) - 1]}

    @property
    def device_bytes(self) -> int:
        """Return the bytes of all slots."""
        every = [slot for pool in self.pools for slot in pool]
        return sum(slot.weights.size_bytes + slot.gradients.size_bytes for slot in every)

    def fetch(self, stage: Stage) -> StageOnDevice:
        """Return the stage with its weights in a slot; they are copied only if no slot has them."""
        here = self.claim(stage)
        if here.slot.holds != (stage, stage.version):
            here.fetch(self.lanes, stage.stored)
            here.slot.holds = (stage, stage.version)
        return here

    def claim(self, stage: Stage) -> StageOnDevice:
        """Return the stage with a slot of its own, whatever the slot holds."""
        # A stage that is in a slot keeps it, or its weights would be fetched a second time.
        pool = self._pool[stage]
        slot = next((slot for slot in pool if slot.holds and slot.holds[0] is stage), pool[0])
        pool.remove(slot)
        pool.append(slot)  # so that the slot longest unused comes first
        return StageOnDevice(stage, slot)
