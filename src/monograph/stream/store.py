"""Store a model in stages, each with its planes, whose buffers live where the placement says.

A stage is some consecutive blocks, or the parts before or after the blocks; it is fetched,
recomputed and updated as a whole. Weights of linear layers that are computed with in bf16 are split
into two halves (`split`) of 2 bytes each, of which one crosses the link for a pass. Other weights
(gains, embedding and head) cross it as they are.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from monograph.errors import UsageError
from monograph.graph.experts import MULTIPLYING
from monograph.graph.fused_linears import FusedLinears
from monograph.graph.inspect import blocks
from monograph.graph.siblings import families
from monograph.optim import (
    Kind,
    Optimizer,
    Plane,
    initialise,
    join,
    planes,
    split,
    split_,
    splittable,
    trainable,
)
from monograph.stream.lanes import Home, Space
from monograph.stream.placement import Placement, on_host, place

WEIGHTS = "weights"
REST = "rest"
GRADIENT = "gradient"
AT_ONCE = 2**22  # elements that are rounded or split at once, which takes some copies of them
# Sets of host memory in which stages' gradients take turns, where stages are updated in the
# backward pass.
TURNS = 2

Further = Sequence[tuple[object, ...]]  # each block's arguments after its first one


class Staged(Protocol):
    """A module that can be trained stage by stage; `monograph.Llama` is one.

    `forward(x)` equals `end` of the output of all blocks, one after another, on `begin(x)`.
    """

    parts_before: Sequence[nn.Module]  # modules whose parameters `begin` reads
    parts_after: Sequence[nn.Module]  # modules whose parameters `end` and the loss read

    def begin(self, *args: object, **kwargs: object) -> tuple[Tensor, Further]:
        """Return the first block's input, and each block's further arguments."""

    def end(self, hidden: Tensor) -> Tensor:
        """Return the module's output from the last block's output."""


class Buffer(NamedTuple):
    """One buffer of a plane: its memory, and the space that the lanes know it by."""

    tensor: Tensor
    space: Space


@dataclass(eq=False)
class StoredPlane:
    """A plane of one stage.

    Attributes:
        plane: the plane, whose tensors are those of `buffers`; the model's parameters are views of
            it.
        start: index of its first element in the resident engine's plane of the same number.
        buffers: its buffers by name: "weights", "rest" if weights are split, "gradient", and the
            optimizer's.
        splits: whether "weights" are the high halves, in bf16, and "rest" the low halves of fp32
            weights.
        on_host: whether it is updated on the host.
    """

    plane: Plane
    buffers: dict[str, Buffer]
    start: int
    splits: bool
    on_host: bool

    def master(self) -> Tensor:
        """Return the fp32 (or fp64) weights: a copy on the host if they are split, else the weights
        themselves.
        """
        weights = self.buffers[WEIGHTS].tensor
        # A device is filled, and has no room for copies.
        return join(weights.cpu(), self.buffers[REST].tensor.cpu()) if self.splits else weights

    def set_master(self, master: Tensor) -> None:
        """Take over the split weights `master` [size]."""
        split_(splittable(master), self.buffers[WEIGHTS].tensor, self.buffers[REST].tensor)

    @property
    def moments(self) -> list[str]:
        """Return the names of the optimizer's buffers."""
        return [name for name in self.buffers if name not in (WEIGHTS, REST, GRADIENT)]


@dataclass(eq=False)
class Stage:
    """Some consecutive blocks of a model, or the parts before or after the blocks.

    Attributes:
        name: a name for messages.
        index: its index among the stages.
        blocks: its blocks, each with its index among the model's blocks; empty in the first and the
            last stage.
        families: the linear layers of its blocks that are computed together.
        stored: its planes.
        version: the number of times that its weights were changed.
    """

    name: str
    index: int
    blocks: list[tuple[int, nn.Module]]
    families: list[FusedLinears]
    stored: list[StoredPlane]
    version: int = 0

    @property
    def slots(self) -> Iterator[nn.Parameter]:
        """Return its parameters."""
        return (slot.parameter for stored in self.stored for slot in stored.plane.slots)


@dataclass
class Store:
    """All stages of a model.

    Attributes:
        stages: the stages in order, from the parts before the blocks to the parts after them.
        tied: whether the last stage reads weights of the first.
    """

    stages: list[Stage] = field(default_factory=list)
    tied: bool = False

    @property
    def stored(self) -> Iterator[StoredPlane]:
        """Return the planes of all stages."""
        return (stored for stage in self.stages for stored in stage.stored)

    def bytes_at(self) -> dict[Home, int]:
        """Return the bytes of buffers by home; memory that stages share counts once."""
        sizes = dict.fromkeys(Home, 0)
        seen: dict[int, int] = {}
        for tensor, space in (
            buffer for stored in self.stored for buffer in stored.buffers.values()
        ):
            if not tensor.is_meta:
                before = seen.get(tensor.data_ptr(), 0)
                size = tensor.nbytes
                seen[tensor.data_ptr()] = max(before, size)
                sizes[space.home] += max(0, size - before)
        return sizes


def staged(module: nn.Module) -> Staged:
    """Return the module, typed as one that can be trained in stages.

    Raises:
        UsageError: it cannot.
    """
    if missing := [
        name
        for name in ("begin", "end", "parts_before", "parts_after")
        if not hasattr(module, name)
    ]:
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


def stored(
    module: nn.Module,
    kinds: Mapping[str, Kind],
    optim: Optimizer,
    *,
    rounds: bool,
    placement: Placement,
) -> Store:
    """Move a module's parameters into stages; afterwards they are views of the stored weights.

    Args:
        module: a module on the host, with its weights.
        kinds: how each of its parameters is updated, by name.
        optim: the optimizer, which initialises its buffers as in the resident engine.
        rounds: whether weights are computed with in bf16.
        placement: where buffers live.

    Raises:
        UsageError: the module cannot be run in stages.
        InputRefused: memory or disk cannot hold it.
    """
    parts = staged(module)
    # Parameters are told apart by identity: a tied parameter is one, and belongs to the first stage
    # that has it.
    names = {id(p): name for name, p in trainable(module).items()}
    linear = {
        id(m.weight)
        for block in blocks(module).values()
        for m in block.modules()
        if isinstance(m, MULTIPLYING)
    }
    # Planes have the numbers and starts of the resident engine's, on which stochastic rounding
    # depends.
    numbers = {
        kind: number
        for number, kind in enumerate(dict.fromkeys(kinds[name] for name in names.values()))
    }
    reached = dict.fromkeys(kinds.values(), 0)
    store = Store()
    taken = set[int]()
    for stage_name, run, holders in _stages(module, parts, placement.blocks_per_stage):
        held = {id(p): p for holder in holders for p in holder.parameters() if id(p) in names}
        store.tied = store.tied or bool(held.keys() & taken)
        own = {names[key]: p for key, p in held.items() if key not in taken}
        taken |= held.keys()
        stage = Stage(
            stage_name, len(store.stages), run, [f for _, block in run for f in families(block)], []
        )
        of_block = {
            names[id(p)]: at for at, block in run for p in block.parameters() if id(p) in names
        }
        for plane in planes(own, kinds, optim.state, parts=of_block):
            plane.number, start = numbers[plane.kind], reached[plane.kind]
            reached[plane.kind] += plane.param.numel()
            for part in plane.param.split(AT_ONCE) if rounds and not plane.param.is_meta else ():
                part.copy_(splittable(part))
            # The gradient is one zero for now, seen as many times as needed; `_kept` makes the real
            # one.
            plane.grad = plane.grad.new_zeros(()).expand_as(plane.grad)
            plane.hold(plane.param)
            initialise(plane, optim)
            # Autocast rounds the weights of linear layers for its products. Other weights are
            # looked up or computed with in fp32, and need all of their bits in each pass, so that
            # splitting would save nothing.
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
        raise UsageError(
            f"memory = stream: {odd[0]} is in no block and in neither parts_before nor parts_after"
        )
    return store


def _stages(
    module: nn.Module, parts: Staged, blocks_per_stage: int
) -> Iterator[tuple[str, list[tuple[int, nn.Module]], Sequence[nn.Module]]]:
    """Yield for each stage its name, its blocks with their indices, and the modules that have its
    parameters.
    """
    yield "before the blocks", [], parts.parts_before
    of_model = list(blocks(module).values())
    for begin in range(0, len(of_model), blocks_per_stage):
        run = list(enumerate(of_model))[begin : begin + blocks_per_stage]
        last = run[-1][0]
        yield (
            f"block {begin}" if begin == last else f"blocks {begin}-{last}",
            run,
            [block for _, block in run],
        )
    yield "after the blocks", [], parts.parts_after


def _kept(
    stage: Stage, plane: Plane, start: int, splits: bool, placement: Placement
) -> StoredPlane:
    """Move a plane's buffers to their homes; the parameters become views of the new weights.

    Buffers are moved one by one, and the old one is freed before the next, so that no more than a
    stage exists twice.
    """
    buffers: dict[str, Buffer] = {}

    def put(name: str, tensor: Tensor) -> Tensor:
        home = placement.home(stage.index, name)
        # It is only in a slot, or in a set of `_take_turns`.
        if name == GRADIENT and placement.when == "backward":
            home = Home.HOST
            tensor = tensor.to("meta")
        label = f"{stage.name}, plane {plane.number}, {name}"
        here = tensor if tensor.is_meta else place(tensor, home, label, placement)
        buffers[name] = Buffer(here, Space(label, home))
        return here

    for name in list(plane.state):
        plane.state[name] = put(name, plane.state.pop(name))
    plane.grad = put(GRADIENT, plane.grad)
    if splits:
        hi, lo = _halves(plane.param)
        put(REST, lo)
    plane.param = put(WEIGHTS, hi if splits else plane.param)
    buffers = {
        name: buffers[name] for name in (WEIGHTS, GRADIENT, *plane.state, REST) if name in buffers
    }
    plane.hold(plane.param)
    # A plane with a buffer on the device is updated there, as the buffer would have to come to the
    # host and go back.
    stays = placement.where == "host" and all(
        buffer.space.home != Home.DEVICE for buffer in buffers.values()
    )
    return StoredPlane(plane, buffers, start, splits, stays)


def _halves(param: Tensor) -> tuple[Tensor, Tensor]:
    """Split a plane part by part, as splitting all of it at once would take several copies of it."""
    if param.is_meta:
        return torch.empty_like(param, dtype=torch.bfloat16), torch.empty_like(
            param, dtype=torch.int16
        )
    hi, lo = zip(*map(split, param.split(AT_ONCE)), strict=True)
    return torch.cat(hi), torch.cat(lo)


def _take_turns(stages: Sequence[Stage], placement: Placement) -> None:
    """Give planes that the host updates in the backward pass memory for gradients, the same in
    every TURNS-th stage.

    So the next stage's gradient can come while a stage is updated, and the host holds only TURNS
    sets.
    """
    for turn in range(TURNS):
        host_planes = [
            stored for stage in stages[turn::TURNS] for stored in stage.stored if stored.on_host
        ]
        largest: dict[tuple[int, torch.dtype], Tensor] = {}
        for stored in host_planes:
            key = (stored.plane.number, stored.plane.grad.dtype)
            grad = stored.plane.grad
            largest[key] = max(largest.get(key, grad), grad, key=torch.numel)
        label = f"gradients in turn {turn}"
        memory = {key: on_host(like, label, placement.device) for key, like in largest.items()}
        space = Space(label, Home.HOST)
        for stored in host_planes:
            plane = stored.plane
            plane.grad = memory[plane.number, plane.grad.dtype][: plane.grad.numel()]
            stored.buffers[GRADIENT] = Buffer(plane.grad, space)
