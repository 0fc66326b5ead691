"""What a model in stages takes, where: in closed form, from the planes of its first, one middle and its last stage.

The planes are made by the code that makes those of a run, on tensors without data.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from monograph.graph.precision import Precision
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.optim import Optimizer
from monograph.stream import Placement
from monograph.stream.chunked_update import MOST, STAGING_BUFFERS
from monograph.stream.store import GRADIENT, REST, TURNS, WEIGHTS, Stage, stored

Names = frozenset[str]
META = torch.device("meta")
ORIGIN = {WEIGHTS: "weights", REST: "weights", GRADIENT: "gradients"}  # of all others: moments


@dataclass(frozen=True)
class PlaneShape:
    """A plane without its data.

    Attributes:
        place: which of the model's planes it is a stretch of; those of one place share a slot's memory.
        numbers: how many parameters.
        whole: of them, what is updated at once.
        buffers: (numbers, dtype) by name.
    """

    place: int
    numbers: int
    whole: int
    buffers: Mapping[str, tuple[int, torch.dtype]]

    def size_bytes(self, name: str) -> int:
        """Of one buffer."""
        numbers, dtype = self.buffers.get(name, (0, torch.int8))
        return numbers * dtype.itemsize

    def stays(self, resident: Names) -> bool:
        """Whether none of its buffers is on the device, where those of these names are."""
        return not resident & self.buffers.keys()

    def pieces(self) -> Iterable[tuple[int, int]]:
        """(begin, end) of what is brought to a desk."""
        step = max(1, MOST // self.whole) * self.whole
        most = range(0, self.numbers, step)
        return {(begin, min(self.numbers, begin + step)) for begin in (most[0], most[-1])}


@dataclass(frozen=True)
class Stages:
    """All stages of a model; those between the first and the last are alike.

    Attributes:
        first: planes of what comes before the blocks.
        middle: of some blocks.
        last: of what comes after them.
        count: how many stages, these two included.
        tied: whether the last reads weights of the first.
    """

    first: tuple[PlaneShape, ...]
    middle: tuple[PlaneShape, ...]
    last: tuple[PlaneShape, ...]
    count: int
    tied: bool

    def planes(self, index: int) -> tuple[PlaneShape, ...]:
        """Of one stage."""
        return self.first if index == 0 else self.last if index == self.count - 1 else self.middle

    @property
    def names(self) -> list[str]:
        """Of all buffers."""
        every = (*self.first, *self.middle, *self.last)
        return list(dict.fromkeys(name for plane in every for name in plane.buffers))

    def size_bytes(self, index: int, name: str) -> int:
        """Of a stage's buffers of that name."""
        kind = 0 if index == 0 else 2 if index == self.count - 1 else 1
        return self._sizes[kind].get(name, 0)

    @functools.cached_property
    def _sizes(self) -> list[dict[str, int]]:
        """By buffers' names: of the first stage, of one in the middle, of the last. A search asks millions of times."""
        kinds = self.first, self.middle, self.last
        return [{name: sum(plane.size_bytes(name) for plane in planes) for name in self.names} for planes in kinds]


def stages_of(config: LlamaConfig, optim: Optimizer, precision: str, blocks_per_stage: int) -> Stages:
    """The stages of a model; `blocks_per_stage` divides its blocks."""
    short = replace(config, num_hidden_layers=blocks_per_stage, layer_types=config.layer_types[:blocks_per_stage])
    with META:
        model = Llama(short)
    placement = Placement(META, blocks_per_stage=blocks_per_stage)
    store = stored(model, optim.kinds(model), optim, rounds=Precision(precision).rounds, placement=placement)
    first, middle, last = (_shapes(stage) for stage in store.stages)
    return Stages(first, middle, last, config.num_hidden_layers // blocks_per_stage + 2, store.tied)


def _shapes(stage: Stage) -> tuple[PlaneShape, ...]:
    found = []
    for each in stage.stored:
        plane = each.plane
        numbers = plane.param.numel()
        buffers = {name: (buffer.tensor.numel(), buffer.tensor.dtype) for name, buffer in each.buffers.items()}
        found.append(
            PlaneShape(plane.number, numbers, numbers // len(plane.slots) if plane.kind.matrix else 1, buffers)
        )
    return tuple(found)


def room_bytes(guests: Iterable[Mapping[Any, tuple[int, torch.dtype]]]) -> int:
    """What a `monograph.stream.slots.DeviceBuffer` for these takes."""
    sizes: dict[tuple[Any, torch.dtype], int] = {}
    for guest in guests:
        for key, (numbers, dtype) in guest.items():
            sizes[key, dtype] = max(sizes.get((key, dtype), 0), numbers)
    return sum(numbers * dtype.itemsize for (_, dtype), numbers in sizes.items())


def slots_bytes(stages: Stages, resident: Sequence[Names]) -> int:
    """What `monograph.stream.slots.Slots` take; `resident`: names of each stage's buffers on the device."""
    kinds = _kinds(stages, resident)
    first, middle, last = ([each for each in kinds if each[0] == kind] for kind in ("first", "middle", "last"))
    ends = [first, last] if stages.tied else [first + last]
    return sum(_slot_bytes(those) for those in ends) + min(2, stages.count - 2) * _slot_bytes(middle)


def desks_bytes(stages: Stages, resident: Sequence[Names], *, gradient: bool, on_host: bool) -> int:
    """What the desks take, whose guests have gradients with them unless these never leave a slot.

    `on_host`: what is all at home is updated there, and is no guest.
    """
    guests = []
    for _, planes, names in _kinds(stages, resident):
        for plane in (each for each in planes if not (on_host and each.stays(names))):
            away = [name for name in plane.buffers if name not in names and (gradient or name != GRADIENT)]
            guests += [{name: _part(plane, name, *piece) for name in away} for piece in plane.pieces()]
    return STAGING_BUFFERS * room_bytes(guests)


def turns_bytes(stages: Stages, resident: Sequence[Names]) -> int:
    """What gradients take at home, where stages take turns with it."""
    every = enumerate(resident)
    guests = [
        (index % TURNS, {plane.place: plane.buffers[GRADIENT]})
        for index, names in every
        for plane in stages.planes(index)
        if plane.stays(names)
    ]
    return sum(room_bytes(guest for turn, guest in guests if turn == each) for each in range(TURNS))


def _part(plane: PlaneShape, name: str, begin: int, end: int) -> tuple[int, torch.dtype]:
    numbers, dtype = plane.buffers[name]
    block = plane.numbers // numbers
    return -(-end // block) - begin // block, dtype


def _kinds(stages: Stages, resident: Sequence[Names]) -> list[tuple[str, tuple[PlaneShape, ...], Names]]:
    """What there is to bring: stages that are alike, and of which the same buffers are on the device, once."""
    ends = {0: "first", stages.count - 1: "last"}
    every = Counter((ends.get(index, "middle"), names) for index, names in enumerate(resident))
    planes = {"first": stages.first, "middle": stages.middle, "last": stages.last}
    return [(kind, planes[kind], names) for kind, names in every]


def _slot_bytes(kinds: Sequence[tuple[str, tuple[PlaneShape, ...], Names]]) -> int:
    return sum(
        room_bytes(
            {plane.place: plane.buffers[name] for plane in planes} for _, planes, names in kinds if name not in names
        )
        for name in (WEIGHTS, GRADIENT)
    )
