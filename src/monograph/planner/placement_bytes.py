"""Count a streamed model's bytes on the device, in the host's memory and in files, and choose what
stays on the device.

device = resident buffers + slots + staging buffers + boundaries + masks
         + max(one stage's passes, an update's intermediates)
host   = all other buffers + offloaded boundaries

A resident buffer stays on the device. The form is closed: it needs the planes of a model's first
stage, one middle stage and the last one, which the engine's own code makes on tensors without data.
"""

import functools
import itertools
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from monograph.graph.precision import Precision
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.ops.cross_entropy import chunk_count
from monograph.optim import Optimizer
from monograph.optim.formats import FORMATS
from monograph.predict.estimate import ORTHOGONAL_NUMBERS, stored_numbers
from monograph.predict.footprint import Work
from monograph.stream import Placement
from monograph.stream.chunked_update import MAX_CHUNK_ELEMENTS, STAGING_BUFFERS
from monograph.stream.placement import When, Where
from monograph.stream.store import GRADIENT, REST, TURNS, WEIGHTS, Stage, store_in_stages
from monograph.stream.walk import INPUT_SETS

Names = frozenset[str]
META = torch.device("meta")
# All other buffers are moments.
ORIGIN = {WEIGHTS: "weights", REST: "weights", GRADIENT: "gradients"}


class PlaneShape(NamedTuple):
    """A stage's plane without its data.

    Attributes:
        place: number of the model's plane that it is a part of; planes with the same number share a
            slot's memory.
        numbers: number of parameters.
        whole: how many numbers can only be updated together: those of a matrix, or 1.
        buffers: (numbers, dtype) by name.
    """

    place: int
    numbers: int
    whole: int
    buffers: Mapping[str, tuple[int, torch.dtype]]

    def size_bytes(self, name: str) -> int:
        """Return the bytes of one buffer."""
        numbers, dtype = self.buffers.get(name, (0, torch.int8))
        return numbers * dtype.itemsize

    def stays(self, resident: Names) -> bool:
        """Return whether the whole plane stays on the host: none of its buffers is `resident` on
        the device.
        """
        return not resident & self.buffers.keys()

    def pieces(self) -> Iterable[tuple[int, int]]:
        """Return (begin, end) of pieces that are copied to a staging buffer: the first, and the
        last if it differs.
        """
        step = max(1, MAX_CHUNK_ELEMENTS // self.whole) * self.whole
        most = range(0, self.numbers, step)
        return {(begin, min(self.numbers, begin + step)) for begin in (most[0], most[-1])}


@dataclass(frozen=True, eq=False)
class Stages:
    """All stages of a model; those between the first and the last are alike.

    Attributes:
        first: planes of the stage before the blocks.
        middle: planes of a stage of blocks.
        last: planes of the stage after the blocks.
        count: number of all stages.
        tied: whether the last stage reads weights of the first.
    """

    first: tuple[PlaneShape, ...]
    middle: tuple[PlaneShape, ...]
    last: tuple[PlaneShape, ...]
    count: int
    tied: bool

    @cached_property
    def planes(self) -> list[tuple[PlaneShape, ...]]:
        """Return the planes of each stage."""
        return [self.first, *[self.middle] * (self.count - 2), self.last]

    @property
    def names(self) -> list[str]:
        """Return the names of all buffers."""
        every = (*self.first, *self.middle, *self.last)
        return list(dict.fromkeys(name for plane in every for name in plane.buffers))

    def size_bytes(self, index: int, name: str) -> int:
        """Return the bytes of a stage's buffers of that name."""
        return self._sizes[index].get(name, 0)

    @cached_property
    def _sizes(self) -> list[dict[str, int]]:
        """Return bytes by buffer name for each stage, kept because a search asks for them millions
        of times.
        """
        names = self.names
        return [
            {name: sum(plane.size_bytes(name) for plane in planes) for name in names}
            for planes in self.planes
        ]


@functools.lru_cache(maxsize=64)  # if nothing fits, a second search looks for settings that would
def stages_of(
    config: LlamaConfig, optim: Optimizer, precision: str, blocks_per_stage: int
) -> Stages:
    """Return the stages of a model, whose number of blocks `blocks_per_stage` divides."""
    short = config.shortened(blocks_per_stage)
    with META:
        model = Llama(short)
    placement = Placement(META, blocks_per_stage=blocks_per_stage)
    store = store_in_stages(
        model, optim.kinds(model), optim, rounds=Precision(precision).rounds, placement=placement
    )
    first, middle, last = (_shapes(stage) for stage in store.stages)
    return Stages(first, middle, last, config.num_hidden_layers // blocks_per_stage + 2, store.tied)


def _shapes(stage: Stage) -> tuple[PlaneShape, ...]:
    shapes = []
    for entry in stage.stored:
        plane = entry.plane
        numbers = plane.param.numel()
        buffers = {
            name: (buffer.tensor.numel(), buffer.tensor.dtype)
            for name, buffer in entry.buffers.items()
        }
        whole = numbers // len(plane.slots) if plane.kind.matrix else 1
        shapes.append(PlaneShape(plane.number, numbers, whole, buffers))
    return tuple(shapes)


def room_bytes(guests: Iterable[Mapping[Any, tuple[int, torch.dtype]]]) -> int:
    """Return the bytes of a `monograph.stream.slots.DeviceBuffer` that each of these groups of
    tensors fits into.
    """
    sizes: dict[tuple[Any, torch.dtype], int] = {}
    for guest in guests:
        for key, (numbers, dtype) in guest.items():
            sizes[key, dtype] = max(sizes.get((key, dtype), 0), numbers)
    return sum(numbers * dtype.itemsize for (_, dtype), numbers in sizes.items())


def slots_bytes(stages: Stages, resident: Sequence[Names]) -> int:
    """Return the bytes of `monograph.stream.slots.Slots`; `resident` names each stage's buffers on
    the device.
    """
    kinds = _kinds(stages, resident)
    first, middle, last = (
        [group for group in kinds if group[0] == kind] for kind in ("first", "middle", "last")
    )
    ends = [first, last] if stages.tied else [first + last]
    return sum(_slot_bytes(kind) for kind in ends) + min(2, stages.count - 2) * _slot_bytes(middle)


def staging_bytes(
    stages: Stages, resident: Sequence[Names], *, gradient: bool, on_host: bool
) -> int:
    """Return the bytes of the staging buffers.

    Args:
        stages: the model's stages.
        resident: names of each stage's buffers on the device.
        gradient: whether gradients leave their slots, so that they are brought for an update.
        on_host: whether the host updates planes that are entirely off the device, which then need
            no staging buffer.
    """
    guests = []
    for _, planes, names in _kinds(stages, resident):
        for plane in (shape for shape in planes if not (on_host and shape.stays(names))):
            away = [
                name
                for name in plane.buffers
                if name not in names and (gradient or name != GRADIENT)
            ]
            guests += [
                {name: _part(plane, name, *piece) for name in away} for piece in plane.pieces()
            ]
    return STAGING_BUFFERS * room_bytes(guests)


@functools.lru_cache(maxsize=4096)  # ways that differ in their micro-batch hold the same planes
def held_bytes(
    stages: Stages, resident: tuple[Names, ...], *, gradient: bool, on_host: bool
) -> Mapping[str, int]:
    """Return the bytes on the device of planes, slots and staging buffers, by origin."""
    sizes = dict.fromkeys(("weights", "gradients", "moments"), 0)
    for index, names in enumerate(resident):
        for name in names:
            sizes[ORIGIN.get(name, "moments")] += stages.size_bytes(index, name)
    staging = staging_bytes(stages, resident, gradient=gradient, on_host=on_host)
    return sizes | {"slots": slots_bytes(stages, resident), "staging buffers": staging}


def turns_bytes(stages: Stages, resident: Sequence[Names]) -> int:
    """Return the bytes of gradients on the host if stages take turns with TURNS sets of memory."""
    guests = [
        (index % TURNS, {plane.place: plane.buffers[GRADIENT]})
        for index, names in enumerate(resident)
        for plane in stages.planes[index]
        if plane.stays(names)
    ]
    return sum(
        room_bytes(guest for turn, guest in guests if turn == number) for number in range(TURNS)
    )


def _part(plane: PlaneShape, name: str, begin: int, end: int) -> tuple[int, torch.dtype]:
    numbers, dtype = plane.buffers[name]
    block = plane.numbers // numbers
    return -(-end // block) - begin // block, dtype


def _kinds(
    stages: Stages, resident: Sequence[Names]
) -> list[tuple[str, tuple[PlaneShape, ...], Names]]:
    """Return (kind, planes, resident names), once for stages that are alike and have the same
    resident buffers.
    """
    ends = {0: "first", stages.count - 1: "last"}
    every = dict.fromkeys(
        (ends.get(index, "middle"), names) for index, names in enumerate(resident)
    )
    planes = {"first": stages.first, "middle": stages.middle, "last": stages.last}
    return [(kind, planes[kind], names) for kind, names in every]


def _slot_bytes(kinds: Sequence[tuple[str, tuple[PlaneShape, ...], Names]]) -> int:
    return sum(
        room_bytes(
            {p.place: p.buffers[name] for p in planes}
            for _, planes, names in kinds
            if name not in names
        )
        for name in (WEIGHTS, GRADIENT)
    )


Tiers = Mapping[str, Mapping[str, int]]  # bytes by origin, for "device", "host" and "disk"
# The memory of passes is only estimated, so resident buffers leave room for this many times the
# estimate.
MARGIN = 1.25
GOLDEN = 0.618033988749895  # any number of its first multiples, modulo 1, are spread evenly


@dataclass(frozen=True)
class StreamWay:
    """One way to stream a model.

    Attributes:
        work: micro-batch, precision, compile scope and recomputation.
        stages: the model's stages.
        blocks_per_stage: blocks in a stage.
        when: when weights are updated.
        offload: whether boundaries are kept on the host.
        where: where weights that are not resident are updated.
        on_disk: names of buffers that lie in files where they are not resident.
        files_first: whether buffers named in `on_disk` are the first to stay on the device, because
            a disk is slow, or the last, because it has room.
    """

    work: Work
    stages: Stages
    blocks_per_stage: int
    when: When
    offload: bool
    where: Where = "device"
    on_disk: Names = frozenset()
    files_first: bool = True

    @cached_property
    def order(self) -> list[list[tuple[int, str]]]:
        """Return buffers as (stage, name) in the order in which they stay on the device, in groups
        of one name.

        Buffers that save most copies per byte come first: weights, which are copied up to three
        times an update, then gradients, which leave in the backward pass and return in the forward
        pass. Buffers in files come before or after all others. Where the host updates weights, a
        group is a stage instead, as a stage is entirely on the host or on the device.
        """
        stages = sorted(range(self.stages.count), key=lambda index: index * GOLDEN % 1)
        names = [
            WEIGHTS,
            GRADIENT,
            REST,
            *(n for n in self.stages.names if n not in (WEIGHTS, GRADIENT, REST)),
        ]
        names = [
            name
            for name in names
            if name in self.stages.names and not (name == GRADIENT and self.at_once)
        ]
        names.sort(key=lambda name: (name in self.on_disk) != self.files_first)
        groups = [
            [(index, name) for index in stages if self.stages.size_bytes(index, name)]
            for name in names
        ]
        if self.where == "host":
            groups = [
                [(index, name) for name in names if self.stages.size_bytes(index, name)]
                for index in stages
            ]
        return [group for group in groups if group]

    @property
    def at_once(self) -> bool:
        """Return whether gradients never leave a slot."""
        return self.when == "backward"

    def on_host(self, index: int, resident: Sequence[Names]) -> list[PlaneShape]:
        """Return a stage's planes that the host updates."""
        return [
            plane
            for plane in self.stages.planes[index]
            if self.where == "host" and plane.stays(resident[index])
        ]

    @cached_property
    def passing(self) -> dict[str, int]:
        """Return the bytes on the device next to planes, by origin; all but boundaries and masks
        are estimates.
        """
        work, number = self.work, self.work.number_bytes
        config, tokens = work.config, work.tokens
        # The first block's input is the stage's, which is at a boundary.
        inside = (
            stored_numbers(work, work.remat) * number * tokens * self.blocks_per_stage
            - work.input_bytes
        )
        head = config.vocab_size * config.hidden_size
        chunks = chunk_count(tokens, config.vocab_size, work.device_type)
        # A block's backward pass begins with the gradients of gate, up and their product (in a
        # graph the product itself is gone by then), and ends with those of its weights, where
        # products do not add them. A chunk's logits become their gradient, next to the rounded
        # head.
        eager = work.compile == "none"
        rounded = number % 4
        added = 0 if work.fused else 4
        weights = sum(plane.numbers for plane in self.stages.middle) / self.blocks_per_stage
        # In the block that is recomputed.
        again = stored_numbers(work, "none") - stored_numbers(work, work.remat)
        block = (
            again + (3 if eager else 2) * work.inner_numbers
        ) * number * tokens + added * weights
        loss = (
            tokens
            / chunks
            * config.vocab_size
            * ((8 if eager else number) + (rounded or 4 * (not eager)))
        )
        # The head's gradient adds up over chunks; that of one chunk follows its logits.
        loss += head * (rounded + (4 if eager or chunks > 1 else added)) + 2 * work.input_bytes
        matrices = [plane.whole for plane in self.stages.middle if plane.whole > 1]
        planes = (*self.stages.first, *self.stages.middle, *self.stages.last)
        largest = max(end - begin for plane in planes for begin, end in plane.pieces())
        if eager:
            update = (FORMATS[work.optim.state].eager_update_bytes + 8) * largest
        else:
            update = max(4 * largest, ORTHOGONAL_NUMBERS * number * max(matrices, default=0))
        passes = inside + max(block, loss - inside, 4 * head - inside, update - inside)
        # Dense masks, cosines and sines.
        masks = (
            work.window_rows * work.length * (work.length + 4 * config.head_dim)
            if work.packed
            else 0
        )
        return {
            "boundaries": self._states * work.input_bytes,
            "activations": int(inside),
            "workspace": int(passes - inside) + masks,
        }

    @property
    def _states(self) -> int:
        """Return the most states on the device at once, in states of a micro-batch.

        A state is the tensor that passes from stage to stage. If states stay on the device, they
        are the inputs of all stages and one gradient; if they are offloaded, those of the stage
        that is read, those of the stage that is written, and the rings of copies.
        """
        inner = self.stages.count - 1
        if not self.offload:
            return inner * self.work.micro_batches + 1
        return (2 + min(INPUT_SETS, inner - 1)) * self.work.micro_batches

    @property
    def offloaded_bytes(self) -> int:
        """Return the bytes of boundaries that are kept on the host."""
        return (
            (self.stages.count - 2) * self.work.micro_batches * self.work.input_bytes
            if self.offload
            else 0
        )

    def resident(self, count: int) -> list[Names]:
        """Return the names of each stage's buffers on the device, if the first `count` of `order`
        are.
        """
        names_of: list[set[str]] = [set() for _ in range(self.stages.count)]
        for index, name in [buffer for group in self.order for buffer in group][:count]:
            names_of[index].add(name)
        return [frozenset(names) for names in names_of]

    def device(self, resident: Sequence[Names]) -> dict[str, int]:
        """Return the bytes on the device by origin."""
        held = held_bytes(
            self.stages, tuple(resident), gradient=not self.at_once, on_host=self.where == "host"
        )
        return {**held, **self.passing}

    def filled(self, limit: int) -> list[Names]:
        """Return the names of each stage's resident buffers: as many of `order` as `limit` bytes
        hold.
        """
        passing = self.passing
        spare = (
            limit
            - int(MARGIN * (passing["activations"] + passing["workspace"]))
            - passing["boundaries"]
        )

        def fits(count: int) -> bool:
            return (
                sum(
                    size
                    for name, size in self.device(self.resident(count)).items()
                    if name not in passing
                )
                <= spare
            )

        ends = [0, *itertools.accumulate(map(len, self.order))]
        # Within a group memory only grows with `count`, so it is bisected; at a group's end slots
        # may no longer be needed, so ends are tried one by one.
        whole = max((n for n, end in enumerate(ends) if fits(end)), default=0)
        if self.where == "host":
            return self.resident(ends[whole])
        low = ends[whole]
        high = ends[min(whole + 1, len(ends) - 1)]
        return self.resident(
            low + bisect_left(range(low + 1, high), True, key=lambda count: not fits(count))
        )

    def tiers(self, resident: Sequence[Names]) -> Tiers:
        """Return the bytes by origin on the device, on the host and on disk."""
        tiers = {
            "device": self.device(resident),
            "host": dict[str, int](),
            "disk": dict[str, int](),
        }
        for index in range(self.stages.count):
            for name in self.stages.names:
                size = self.stages.size_bytes(index, name)
                if not size or name in resident[index] or (name == GRADIENT and self.at_once):
                    continue
                tier = tiers["disk" if name in self.on_disk else "host"]
                origin = ORIGIN.get(name, "moments")
                tier[origin] = tier.get(origin, 0) + size
        if self.where == "host" and self.at_once and (turns := turns_bytes(self.stages, resident)):
            tiers["host"]["gradients"] = turns
        if self.offload:
            tiers["host"]["boundaries"] = self.offloaded_bytes
        return tiers

    def placement(self, resident: Sequence[Names]) -> Placement:
        """Return the placement for the engine; the caller sets its device and folder."""
        return Placement(
            when=self.when,
            where=self.where,
            blocks_per_stage=self.blocks_per_stage,
            offload=self.offload,
            on_device=frozenset(
                (index, name) for index, names in enumerate(resident) for name in names
            ),
            on_disk=self.on_disk,
        )
