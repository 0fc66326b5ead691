"""Slots: memory on the device that one stage after another is brought to, and where the model's parameters then are."""

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
BLOCK_SLOTS = 2  # that stages of blocks take turns in


class DeviceBuffer:
    """Memory on the device for tensors by name, each in memory of its own: a graph would copy inputs that overlap.

    Attributes:
        space: all of it, as the lanes know it.
    """

    def __init__(self, name: str, held_in_turn: Iterable[Mapping[Key, Tensor]], device: torch.device):
        """Take enough memory for each of these sets of tensors, one set at a time."""
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
        """What it takes."""
        return sum(memory.numel() * memory.element_size() for memory in self._memory.values())

    def take(self, tensors: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
        """Return memory for one set of tensors."""
        return {key: self._memory[key, tensor.dtype][: tensor.numel()] for key, tensor in tensors.items()}


def traveling(stage: Stage, name: str) -> dict[Key, Tensor]:
    """Return the stage's buffers of that name that do not live on the device, by the plane's number.

    So planes of one kind share memory, and an embedding's is the head's.
    """
    buffers = {stored.plane.number: stored.buffers[name] for stored in stage.stored}
    return {at: buffer.tensor for at, buffer in buffers.items() if buffer.space.home != Home.DEVICE}


class Slot:
    """Memory for the weights and gradients of one stage.

    Attributes:
        weights: their memory.
        gradients: theirs.
        holds: the stage whose weights are there, and its version.
    """

    def __init__(self, name: str, stages: list[Stage], device: torch.device):
        """Take enough memory for the largest of the stages."""
        self.weights = DeviceBuffer(f"{name}, weights", [traveling(stage, WEIGHTS) for stage in stages], device)
        self.gradients = DeviceBuffer(f"{name}, gradients", [traveling(stage, GRADIENT) for stage in stages], device)
        self.holds: tuple[Stage, int] | None = None


class StageOnDevice:
    """A stage on the device.

    Attributes:
        stage: which.
        slot: where it is.
        planes: its planes there: the parameters' weights and gradients.
    """

    def __init__(self, stage: Stage, slot: Slot):
        """Nothing is copied."""
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
        """What its forward pass reads."""
        return self._spaces(WEIGHTS, self.slot.weights)

    @property
    def writes(self) -> list[Space]:
        """What its backward pass adds to."""
        return self._spaces(GRADIENT, self.slot.gradients)

    def _spaces(self, name: str, memory: DeviceBuffer) -> list[Space]:
        own = [stored.buffers[name].space for stored in self.stage.stored]
        return list(dict.fromkeys(s if s.home == Home.DEVICE else memory.space for s in own))

    def fetch(self, lanes: Lanes, planes: Sequence[Stored]) -> None:
        """Have these planes' weights copied to the slot."""
        for stored, plane in zip(self.stage.stored, self.planes, strict=True):
            weights = stored.buffers[WEIGHTS]
            if stored in planes and weights.space.home != Home.DEVICE:
                lanes.copy(plane.param, weights.tensor, self.slot.weights.space, weights.space)

    @contextmanager
    def parameters(self) -> Iterator[None]:
        """In the block the model's parameters are what is on the device."""
        # The model's parameters are at home for everybody else: they are pointed at the slot only while the stage
        # runs.
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
        """Let gradients be added to the slot's."""
        for plane in self.planes:
            plane.link()

    def unlinked(self) -> AbstractContextManager[None]:
        """See `monograph.optim.planes.unlinked`."""
        return unlinked(self.planes)


class Slots:
    """The slots of a model, and which stage is in which.

    Blocks take turns in two slots; what comes before and after the blocks takes turns in one of its own, unless the two
    share weights: then each has its own, and the first stays where it is all the way.
    """

    def __init__(self, stages: list[Stage], tied: bool, lanes: Lanes, device: torch.device):
        """Take the memory."""
        self.lanes = lanes
        first, *middle, last = stages
        # The last stage of a tied model reads weights of the first, so both are wanted at once.
        ends = [[first], [last]] if tied else [[first, last]]
        self.pools = [[Slot(f"slot of ends {n}", those, device)] for n, those in enumerate(ends)]
        self.pools.append([Slot(f"slot {number}", middle, device) for number in range(min(BLOCK_SLOTS, len(middle)))])
        self._pool = dict.fromkeys(middle, self.pools[-1])
        self._pool |= {first: self.pools[0], last: self.pools[len(ends) - 1]}

    @property
    def device_bytes(self) -> int:
        """What all of them take."""
        every = [slot for pool in self.pools for slot in pool]
        return sum(slot.weights.size_bytes + slot.gradients.size_bytes for slot in every)

    def fetch(self, stage: Stage) -> StageOnDevice:
        """Return the stage with its weights in a slot; they are copied only if they are in none."""
        here = self.claim(stage)
        if here.slot.holds != (stage, stage.version):
            here.fetch(self.lanes, stage.stored)
            here.slot.holds = (stage, stage.version)
        return here

    def claim(self, stage: Stage) -> StageOnDevice:
        """Return the stage with a slot of its own, whatever is in it."""
        # If the stage is in a slot already it keeps it, or what is there would be fetched a second time.
        pool = self._pool[stage]
        slot = next((slot for slot in pool if slot.holds and slot.holds[0] is stage), pool[0])
        pool.remove(slot)
        pool.append(slot)  # the longest unused is first
        return StageOnDevice(stage, slot)
