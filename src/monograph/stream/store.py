"""The store: a model in stages, each with its planes, and where every buffer of them lives.

A stage is some blocks in a row, or what comes before or after the blocks. It is what is fetched, computed again, and
updated at once. Weights of linear layers that are computed with in bf16 are kept as `split` gives them, 4 bytes of
which 2 cross the link; the rest, gains, embedding and head, cross as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from monograph.errors import UsageError
from monograph.graph.inspect import blocks
from monograph.optim import Kind, Optimizer, Plane, initialise, join, planes, split, splittable, trainable
from monograph.stream.lanes import Home, Space
from monograph.stream.placement import Placement, on_host, place

WEIGHTS, REST, GRADIENT = "weights", "rest", "gradient"
AT_ONCE = 2**22  # elements that are rounded or split at once, in some copies of them
TURNS = 2  # that stages take with the host's memory for gradients, where they are updated while these are made


class Staged(Protocol):
    """A module that can be trained stage by stage; `monograph.Llama` is one.

    `forward(x)` equals `end` of the blocks, one after another, of `begin(x)`.
    """

    parts_before: Sequence[nn.Module]  # whose parameters `begin` reads
    parts_after: Sequence[nn.Module]  # whose parameters `end` and the loss read

    def begin(self, *args: object, **kwargs: object) -> tuple[Tensor, Sequence[tuple[object, ...]]]:
        """The first block's input, and what each block takes in addition to the output of the one before."""
        ...

    def end(self, hidden: Tensor) -> Tensor:
        """What the module returns, from the last block's output."""
        ...


class Buffer(NamedTuple):
    """One buffer of a plane: its memory, and how the lanes know it."""

    tensor: Tensor
    space: Space


@dataclass(eq=False)
class Stored:
    """A plane of one stage.

    Attributes:
        plane: on the host; its tensors are those of `buffers`, which is how the model's own parameters see them.
        start: of its first element in the model's plane of that number.
        buffers: by name: "weights", "rest" if they are split, "gradient", and the optimizer's.
        splits: whether `weights` are bf16 and `rest` what is missing to fp32.
        on_host: whether it is updated there.
    """

    plane: Plane
    buffers: dict[str, Buffer]
    start: int
    splits: bool
    on_host: bool

    def master(self) -> Tensor:
        """Return the fp32 (or fp64) weights: the live ones, or where they are split a copy."""
        weights = self.buffers[WEIGHTS].tensor
        return join(weights, self.buffers[REST].tensor) if self.splits else weights

    def set_master(self, master: Tensor) -> None:
        """Take over weights [size]."""
        if self.splits:
            hi, lo = split(splittable(master))
            self.buffers[REST].tensor.copy_(lo)
            self.buffers[WEIGHTS].tensor.copy_(hi)
        else:
            self.buffers[WEIGHTS].tensor.copy_(master)

    @property
    def moments(self) -> list[str]:
        """The names of the optimizer's buffers."""
        return [name for name in self.buffers if name not in (WEIGHTS, REST, GRADIENT)]


@dataclass(eq=False)
class Stage:
    """Some blocks in a row, or what comes before or after them.

    Attributes:
        name: for people.
        index: its place among the stages.
        blocks: what runs, with their places among the model's blocks; empty at both ends.
        stored: its planes.
        version: how often its weights were changed.
    """

    name: str
    index: int
    blocks: list[tuple[int, nn.Module]]
    stored: list[Stored]
    version: int = 0

    @property
    def slots(self) -> Iterator[nn.Parameter]:
        """Its parameters."""
        return (slot.parameter for stored in self.stored for slot in stored.plane.slots)


@dataclass
class Store:
    """All stages of a model.

    Attributes:
        stages: first what comes before the blocks, last what comes after.
        tied: whether the last stage reads weights of the first.
    """

    stages: list[Stage] = field(default_factory=list)
    tied: bool = False

    @property
    def stored(self) -> Iterator[Stored]:
        """The planes of all stages."""
        return (stored for stage in self.stages for stored in stage.stored)

    def bytes_at(self) -> dict[Home, int]:
        """Return how many bytes lie where; memory that stages share counts once."""
        sizes = dict.fromkeys(Home, 0)
        seen: dict[int, int] = {}
        for tensor, space in (buffer for stored in self.stored for buffer in stored.buffers.values()):
            if not tensor.is_meta:
                before, size = seen.get(tensor.data_ptr(), 0), tensor.numel() * tensor.element_size()
                seen[tensor.data_ptr()] = max(before, size)
                sizes[space.home] += max(0, size - before)
        return sizes


def staged(module: nn.Module) -> Staged:
    """Return the module, as one with stages.

    Raises:
        UsageError: it has none.
    """
    if missing := [name for name in ("begin", "end", "parts_before", "parts_after") if not hasattr(module, name)]:
        raise UsageError(
            f"memory = stream runs a model stage by stage, and {type(module).__name__} has no {missing[0]}: give it "
            "begin, end, parts_before and parts_after as monograph.Llama has them, or use memory = device"
        )
    if not blocks(module):
        raise UsageError(
            "memory = stream runs a model block by block, and the module has no block, which is a module with parts "
            "inside an nn.ModuleList or nn.Sequential: use memory = device"
        )
    return cast(Staged, module)


def stored(  # noqa: PLR0913 - what a store is made of
    module: nn.Module, kinds: Mapping[str, Kind], optim: Optimizer, *, rounds: bool, placement: Placement
) -> Store:
    """Move a module's parameters into stages; afterwards they are views of what is stored.

    Args:
        module: with its weights, on the host.
        kinds: how each of its parameters is updated, by name.
        optim: the optimizer, whose buffers begin as they do on a device.
        rounds: whether weights are computed with in bf16.
        placement: where buffers live.

    Raises:
        UsageError: the module cannot be run in stages.
        InputRefused: memory or disk cannot hold it.
    """
    parts = staged(module)
    # By identity: a tied parameter is one, in the first stage that has it.
    names = {id(p): name for name, p in trainable(module).items()}
    linear = {id(m.weight) for block in blocks(module).values() for m in block.modules() if isinstance(m, nn.Linear)}
    # Numbers and starts are those of the resident engine's planes, on which stochastic rounding depends.
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds[name] for name in names.values()))}
    reached = dict.fromkeys(kinds.values(), 0)
    store, taken = Store(), set[int]()
    for stage_name, run, holders in _stages(module, parts, placement.blocks_per_stage):
        held = {id(p): p for holder in holders for p in holder.parameters() if id(p) in names}
        store.tied = store.tied or bool(held.keys() & taken)
        own = {names[key]: p for key, p in held.items() if key not in taken}
        taken |= held.keys()
        stage = Stage(stage_name, len(store.stages), run, [])
        of_block = {names[id(p)]: at for at, block in run for p in block.parameters() if id(p) in names}
        for plane in planes(own, kinds, optim.state, parts=of_block):
            plane.number, start = numbers[plane.kind], reached[plane.kind]
            reached[plane.kind] += plane.param.numel()
            for part in plane.param.split(AT_ONCE) if rounds and not plane.param.is_meta else ():
                part.copy_(splittable(part))
            # Zeros that nobody can write to, and one in memory: what is kept of it is made in `_kept`.
            plane.grad = plane.grad.new_zeros(()).expand_as(plane.grad)
            plane.hold(plane.param)
            initialise(plane, optim)
            # Autocast rounds the weights of linear layers for its products. What is looked up, or computed with in
            # fp32, needs all of its bits in each pass, so nothing would be saved.
            splits = rounds and all(id(slot.parameter) in linear for slot in plane.slots)
            stage.stored.append(_kept(stage, plane, start, splits, placement))
        store.stages.append(stage)
    if placement.when == "backward":
        _take_turns(store.stages, placement)
    if beyond := sorted(stage for stage, _ in placement.on_device if stage >= len(store.stages)):
        raise UsageError(
            f"Placement: on_device names stage {beyond[0]}, and the stages are 0 to {len(store.stages) - 1}"
        )
    if odd := [name for key, name in names.items() if key not in taken]:
        raise UsageError(f"memory = stream: {odd[0]} is in no block and in neither parts_before nor parts_after")
    return store


def _stages(
    module: nn.Module, parts: Staged, blocks_per_stage: int
) -> Iterator[tuple[str, list[tuple[int, nn.Module]], Sequence[nn.Module]]]:
    yield "before the blocks", [], parts.parts_before
    of_model = list(blocks(module).values())
    for begin in range(0, len(of_model), blocks_per_stage):
        run = list(enumerate(of_model))[begin : begin + blocks_per_stage]
        last = run[-1][0]
        yield f"block {begin}" if begin == last else f"blocks {begin}-{last}", run, [block for _, block in run]
    yield "after the blocks", [], parts.parts_after


def _kept(stage: Stage, plane: Plane, start: int, splits: bool, placement: Placement) -> Stored:
    """Put a plane's buffers where they belong; the parameters are views of the new ones.

    Each leaves the host when it is there, before the next one goes: a stage is all that is there twice.
    """
    homes: dict[str, Home] = {}
    buffers: dict[str, Buffer] = {}

    def put(name: str, tensor: Tensor) -> Tensor:
        home = placement.home(stage.index, name)
        if name == GRADIENT and placement.when == "backward":  # nowhere but in a slot: but see `_take_turns`
            home, tensor = Home.HOST, tensor.to("meta")
        label = f"{stage.name}, plane {plane.number}, {name}"
        here = tensor if tensor.is_meta else place(tensor, home, label, placement)
        homes[name], buffers[name] = home, Buffer(here, Space(label, home))
        return here

    for name in list(plane.state):
        plane.state[name] = put(name, plane.state.pop(name))
    plane.grad = put(GRADIENT, plane.grad)
    if splits:
        hi, lo = _halves(plane.param)
        put(REST, lo)
    plane.param = put(WEIGHTS, hi if splits else plane.param)
    buffers = {name: buffers[name] for name in (WEIGHTS, GRADIENT, *plane.state, REST) if name in buffers}
    plane.hold(plane.param)
    # One buffer on the device is reason enough to update there: it would have to come home and go back.
    stays = placement.where == "host" and Home.DEVICE not in homes.values()
    return Stored(plane, buffers, start, splits, stays)


def _halves(param: Tensor) -> tuple[Tensor, Tensor]:
    """Split in stretches, as a split of the whole plane at once would need several copies of it."""
    if param.is_meta:
        return torch.empty_like(param, dtype=torch.bfloat16), torch.empty_like(param, dtype=torch.int16)
    hi, lo = zip(*map(split, param.split(AT_ONCE)), strict=True)
    return torch.cat(hi), torch.cat(lo)


def _take_turns(stages: Sequence[Stage], placement: Placement) -> None:
    """Give planes that are updated on the host, while gradients are made, memory for theirs: every TURNS-th the same.

    So while a stage is updated the next one's gradient comes, and no more than these are ever kept.
    """
    for turn in range(TURNS):
        those = [stored for stage in stages[turn::TURNS] for stored in stage.stored if stored.on_host]
        largest: dict[tuple[int, torch.dtype], Tensor] = {}
        for stored in those:
            key, grad = (stored.plane.number, stored.plane.grad.dtype), stored.plane.grad
            largest[key] = max(largest.get(key, grad), grad, key=torch.numel)
        label = f"gradients in turn {turn}"
        memory = {key: on_host(like, label, placement.device) for key, like in largest.items()}
        space = Space(label, Home.HOST)
        for stored in those:
            plane = stored.plane
            plane.grad = memory[plane.number, plane.grad.dtype][: plane.grad.numel()]
            stored.buffers[GRADIENT] = Buffer(plane.grad, space)
