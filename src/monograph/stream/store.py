"""Store a model in stages; the buffers of each stage's planes live where the placement says.

A stage is some consecutive blocks, or the parts before or after the blocks. It is fetched,
recomputed and updated as a whole. A plane is a flat buffer of a stage's parameters of one kind
(`monograph.optim.Plane`), with buffers of the same size for the gradient and for the optimizer.

If linear layers compute in bf16, each of their fp32 weights is split into two halves of 2 bytes
(`split`), and only the high half crosses the link for a pass. Other weights (gains, embedding and
head) are not split.

Tensors that are not trained, such as the weights under adapters, belong to no plane. Each stage packs
its own into one piece of memory (`monograph.stream.frozen`).
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from monograph.errors import UsageError
from monograph.graph.experts import MATMUL_MODULES
from monograph.graph.fused_linears import FusedLinears
from monograph.graph.inspect import blocks
from monograph.graph.lora import FACTORS
from monograph.graph.siblings import families
from monograph.optim import (
    Optimizer,
    ParameterKind,
    Plane,
    initialise,
    join,
    planes,
    split,
    split_,
    splittable,
    trainable,
)
from monograph.stream.frozen import FROZEN, FrozenTensors, pack
from monograph.stream.lanes import Home, Space
from monograph.stream.placement import Placement, buffer_names, on_host, place

WEIGHTS = "weights"
REST = "rest"
GRADIENT = "gradient"
# The number of elements that are rounded or split at once. Both need some copies of the elements, so
# the number bounds their memory.
ELEMENTS_AT_ONCE = 2**22
# The number of sets of host memory for gradients, if stages are updated in the backward pass. Stages
# take turns in using these sets.
GRADIENT_SETS = 2

BlockArguments = Sequence[tuple[object, ...]]  # for each block, its arguments besides its input


class Staged(Protocol):
    """A module that can be trained stage by stage, such as `monograph.Llama`.

    Its `forward(x)` must equal `begin(x)`, then all blocks one after another, then `end`.
    """

    parts_before: Sequence[nn.Module]  # modules whose parameters `begin` reads
    parts_after: Sequence[nn.Module]  # modules whose parameters `end` and the loss read

    def begin(self, *args: object, **kwargs: object) -> tuple[Tensor, BlockArguments]:
        """Return the first block's input, and for each block its arguments besides its input."""

    def end(self, hidden: Tensor) -> Tensor:
        """Return the module's output from the last block's output."""


class Buffer(NamedTuple):
    """One buffer of a plane.

    Attributes:
        tensor: its memory.
        space: the same memory, as a unit that work on the lanes reads or writes.
    """

    tensor: Tensor
    space: Space


@dataclass(eq=False)
class StoredPlane:
    """A plane of one stage.

    Attributes:
        plane: the plane. Its tensors are those of `buffers`, and the model's parameters are views of
            its weights.
        buffers: the plane's buffers by name: "weights", "gradient", the optimizer's buffers, and
            "rest" if weights are split.
        start: index of the plane's first element in the resident engine's plane of the same number.
        splits: whether fp32 weights are split: "weights" are the high halves, in bf16, and "rest"
            are the low halves.
        on_host: whether the plane is updated on the host.
    """

    plane: Plane
    buffers: dict[str, Buffer]
    start: int
    splits: bool
    on_host: bool

    def master(self) -> Tensor:
        """Return the fp32 (or fp64) weights [size].

        If the weights are split, the result is a copy on the host. Otherwise it is the stored
        weights themselves.
        """
        weights = self.buffers[WEIGHTS].tensor
        if not self.splits:
            return weights
        # The halves are joined on the host, because the device may have no memory left for a copy.
        return join(weights.cpu(), self.buffers[REST].tensor.cpu())

    def set_master(self, master: Tensor) -> None:
        """Split the weights `master` [size] and store the halves."""
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
        index: the stage's index among the stages.
        blocks: the stage's blocks, as (index among the model's blocks, block); empty in the first and
            the last stage.
        families: the groups of linear layers in its blocks that are computed together.
        stored_planes: the stage's planes.
        frozen: the stage's tensors that are not trained.
        version: how many times the stage's weights were changed. A copy of the weights in a slot
            (device memory for one stage) is outdated if its version differs.
    """

    name: str
    index: int
    blocks: list[tuple[int, nn.Module]]
    families: list[FusedLinears]
    stored_planes: list[StoredPlane]
    frozen: FrozenTensors
    version: int = 0

    @property
    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the stage's parameters, in the order of its planes."""
        return (placed.parameter for stored in self.stored_planes for placed in stored.plane.placed)


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
    def stored_planes(self) -> Iterator[StoredPlane]:
        """Return the planes of all stages."""
        return (stored for stage in self.stages for stored in stage.stored_planes)

    def bytes_at(self) -> dict[Home, int]:
        """Return the bytes of buffers by home; memory that stages share is counted once."""
        sizes = dict.fromkeys(Home, 0)
        # Buffers that share memory begin at the same address; the largest of them counts.
        counted_by_address: dict[int, int] = {}
        buffers = [buffer for stored in self.stored_planes for buffer in stored.buffers.values()]
        buffers += [Buffer(stage.frozen.memory, stage.frozen.space) for stage in self.stages]
        for tensor, space in buffers:
            if tensor.is_meta:
                continue
            address = tensor.data_ptr()
            counted = counted_by_address.get(address, 0)
            counted_by_address[address] = max(counted, tensor.nbytes)
            sizes[space.home] += max(0, tensor.nbytes - counted)
        return sizes


def as_staged(module: nn.Module) -> Staged:
    """Return the module, typed as one that can be trained stage by stage.

    Raises:
        UsageError: the module has no blocks, its blocks read more than the result of the block before, or it
            lacks an attribute of `Staged`.
    """
    for name in ("begin", "end", "parts_before", "parts_after"):
        if not hasattr(module, name):
            raise UsageError(
                f"memory = stream runs a model stage by stage, and {type(module).__name__} has no {name}: give it "
                "begin, end, parts_before and parts_after as monograph.Llama has them, or use memory = device"
            )
    # A model says whether its blocks are a chain (`Llama.is_chain`); most are.
    if not getattr(module, "is_chain", True):
        raise UsageError(
            "memory = stream runs a model block by block, and blocks of this model read what others computed: use "
            "memory = device"
        )
    if not blocks(module):
        raise UsageError(
            "memory = stream runs a model block by block, and this model has no blocks (modules with parts, inside an "
            "nn.ModuleList or nn.Sequential): use memory = device"
        )
    return cast(Staged, module)


def store_in_stages(
    module: nn.Module,
    kinds: Mapping[str, ParameterKind],
    optim: Optimizer,
    *,
    rounds_weights: bool,
    placement: Placement,
) -> Store:
    """Move a module's parameters into stages; afterwards they are views of the stored weights.

    Args:
        module: a module on the host, with its weights.
        kinds: how each of its parameters is updated, by name.
        optim: the optimizer, whose buffers get the same first values as in the resident engine.
        rounds_weights: whether linear layers compute in bf16, with rounded weights.
        placement: where buffers live.

    Raises:
        UsageError: the module cannot run in stages, or the placement names a stage that does not
            exist.
        InputRefused: memory or disk cannot hold the module.
    """
    staged_module = as_staged(module)
    # Parameters are identified by `id`, because a tied parameter has several names. Such a parameter
    # belongs to the first stage that has it.
    name_by_id = {id(parameter): name for name, parameter in trainable(module).items()}
    linear_weight_ids = _linear_weight_ids(module)
    # The resident engine has one plane for each kind of parameter. Here that plane is cut between
    # stages. Each part has the number of the whole plane and the index at which it starts there,
    # because stochastic rounding depends on both.
    distinct_kinds = dict.fromkeys(kinds[name] for name in name_by_id.values())
    number_of_kind = {kind: number for number, kind in enumerate(distinct_kinds)}
    next_start = dict.fromkeys(kinds.values(), 0)
    store = Store()
    stored_ids = set[int]()
    frozen_ids = set[int]()
    for name, stage_blocks, modules in _stage_modules(staged_module, placement.blocks_per_stage):
        used_by_id = {
            id(parameter): parameter
            for part in modules
            for parameter in part.parameters()
            if id(parameter) in name_by_id
        }
        # A parameter that an earlier stage has stored is tied.
        store.tied = store.tied or bool(used_by_id.keys() & stored_ids)
        new_by_name = {
            name_by_id[key]: parameter
            for key, parameter in used_by_id.items()
            if key not in stored_ids
        }
        stored_ids |= used_by_id.keys()
        frozen_by_id = {
            id(tensor): tensor
            for part in modules
            for tensor in itertools.chain(part.parameters(), part.buffers())
            if id(tensor) not in name_by_id
        }
        store.tied = store.tied or bool(frozen_by_id.keys() & frozen_ids)
        new_frozen = [tensor for key, tensor in frozen_by_id.items() if key not in frozen_ids]
        frozen_ids |= frozen_by_id.keys()
        index = len(store.stages)
        stage = Stage(
            name=name,
            index=index,
            blocks=stage_blocks,
            families=[family for _, block in stage_blocks for family in families(block)],
            stored_planes=[],
            frozen=pack(new_frozen, index, name, placement),
        )
        block_of_parameter = {
            name_by_id[id(parameter)]: index
            for index, block in stage_blocks
            for parameter in block.parameters()
            if id(parameter) in name_by_id
        }
        for plane in planes(new_by_name, kinds, optim.state, layers=block_of_parameter):
            plane.number = number_of_kind[plane.kind]
            start = next_start[plane.kind]
            next_start[plane.kind] += plane.param.numel()
            # A few weights change in their last bit, so that they can be split (`splittable`). The
            # resident engine changes the same ones, even if they are not split.
            if rounds_weights and not plane.param.is_meta:
                for piece in plane.param.split(ELEMENTS_AT_ONCE):
                    piece.copy_(splittable(piece))
            # Until `_move_home` allocates the gradient, it is a view of a single zero, which takes
            # no memory.
            plane.grad = plane.grad.new_zeros(()).expand_as(plane.grad)
            plane.rebind_parameters(plane.param)
            initialise(plane, optim)
            # Only weights of linear layers are split, because only these are rounded to bf16 for
            # computing. Each pass needs all bits of the other weights, so splitting those would
            # save nothing.
            splits = rounds_weights and all(
                id(placed.parameter) in linear_weight_ids for placed in plane.placed
            )
            stage.stored_planes.append(_move_home(stage, plane, start, splits, placement))
        store.stages.append(stage)
    if placement.when == "backward":
        _share_gradient_memory(store.stages, placement)
    unknown_stages = [stage for stage, _ in placement.on_device if stage >= len(store.stages)]
    if unknown_stages:
        raise UsageError(
            f"Placement: on_device names stage {min(unknown_stages)}, and the stages are 0 to {len(store.stages) - 1}"
        )
    names_without_stage = [
        name
        for name, parameter in module.named_parameters()
        if id(parameter) not in stored_ids | frozen_ids
    ]
    if names_without_stage:
        raise UsageError(
            f"memory = stream: {names_without_stage[0]} is in no block and in neither parts_before nor parts_after"
        )
    return store


def _linear_weight_ids(module: nn.Module) -> set[int]:
    """Return the ids of the weights of all linear layers in a module's blocks, except adapters'.

    Adapters stay whole: they are small, and DoRA reads all bits of its factors.
    """
    return {
        id(parameter)
        for block in blocks(module).values()
        for layer in block.modules()
        if isinstance(layer, MATMUL_MODULES) and not isinstance(layer, FACTORS)
        # A quantised layer has no weight, and nothing of it is trained.
        for parameter in [layer._parameters.get("weight")]
        if parameter is not None
    }


def adapters_on_device(module: nn.Module, placement: Placement) -> Placement:
    """Return the placement with everything that is trained on the device.

    Adapters, their gradients and moments are small, so only frozen tensors cross the link.
    """
    block_stages = math.ceil(len(blocks(module)) / placement.blocks_per_stage)
    trained = {
        (stage, name)
        for stage in range(block_stages + 2)
        for name in buffer_names()
        if name != FROZEN
    }
    return replace(placement, on_device=placement.on_device | trained)


class StageModules(NamedTuple):
    """The modules of a stage.

    Attributes:
        name: the stage's name, for messages.
        blocks: its blocks, as (index among the model's blocks, block).
        modules: the modules whose parameters it uses.
    """

    name: str
    blocks: list[tuple[int, nn.Module]]
    modules: Sequence[nn.Module]


def _stage_modules(staged_module: Staged, blocks_per_stage: int) -> Iterator[StageModules]:
    """Yield the modules of each stage, in order.

    Args:
        staged_module: the module.
        blocks_per_stage: the number of blocks in a stage.
    """
    yield StageModules("before the blocks", [], staged_module.parts_before)
    indexed_blocks = list(enumerate(blocks(cast(nn.Module, staged_module)).values()))
    for first in range(0, len(indexed_blocks), blocks_per_stage):
        stage_blocks = indexed_blocks[first : first + blocks_per_stage]
        last, _ = stage_blocks[-1]
        name = f"block {first}" if first == last else f"blocks {first}-{last}"
        yield StageModules(name, stage_blocks, [block for _, block in stage_blocks])
    yield StageModules("after the blocks", [], staged_module.parts_after)


def _move_home(
    stage: Stage, plane: Plane, start: int, splits: bool, placement: Placement
) -> StoredPlane:
    """Move a plane's buffers to their homes; the parameters become views of the moved weights.

    Buffers are moved one by one, and each old buffer is freed before the next is moved, so that at
    most one stage exists twice.

    Args:
        stage: the stage of the plane.
        plane: the plane, which is changed in place.
        start: index of its first element in the resident engine's plane of the same number.
        splits: whether its weights are split.
        placement: where buffers live.
    """
    buffers: dict[str, Buffer] = {}

    def move(name: str, tensor: Tensor) -> Tensor:
        home = placement.home(stage.index, name)
        # An update in the backward pass reads the gradient in a slot, or in memory that stages
        # share (`_share_gradient_memory`). So this gradient needs no memory of its own, and gets a
        # tensor without data.
        if name == GRADIENT and placement.when == "backward":
            home = Home.HOST
            tensor = tensor.to("meta")
        label = f"{stage.name}, plane {plane.number}, {name}"
        moved = tensor if tensor.is_meta else place(tensor, home, label, placement)
        buffers[name] = Buffer(moved, Space(label, home))
        return moved

    for name in list(plane.state):
        plane.state[name] = move(name, plane.state.pop(name))
    plane.grad = move(GRADIENT, plane.grad)
    if splits:
        hi, lo = _split_in_parts(plane.param)
        move(REST, lo)
        plane.param = move(WEIGHTS, hi)
    else:
        plane.param = move(WEIGHTS, plane.param)
    # Updates copy the buffers in this order.
    order = (WEIGHTS, GRADIENT, *plane.state, REST)
    buffers = {name: buffers[name] for name in order if name in buffers}
    plane.rebind_parameters(plane.param)
    # A plane with a buffer on the device is updated on the device: an update on the host would have
    # to copy that buffer to the host and back.
    any_on_device = any(buffer.space.home == Home.DEVICE for buffer in buffers.values())
    updated_on_host = placement.where == "host" and not any_on_device
    return StoredPlane(plane, buffers, start, splits, updated_on_host)


def _split_in_parts(param: Tensor) -> tuple[Tensor, Tensor]:
    """Return the high halves (bf16) and the low halves (int16) of fp32 weights.

    Parts are split one after another, because splitting needs several copies of what it splits.
    """
    if param.is_meta:
        hi = torch.empty_like(param, dtype=torch.bfloat16)
        lo = torch.empty_like(param, dtype=torch.int16)
        return hi, lo
    halves = [split(part) for part in param.split(ELEMENTS_AT_ONCE)]
    return torch.cat([hi for hi, _ in halves]), torch.cat([lo for _, lo in halves])


def _share_gradient_memory(stages: Sequence[Stage], placement: Placement) -> None:
    """Allocate host memory for gradients that the host applies in the backward pass.

    Every GRADIENT_SETS-th stage uses the same memory. So the next stage's gradient can be copied to the
    host while a stage is updated, and the host holds only GRADIENT_SETS sets of gradients.
    """
    for turn in range(GRADIENT_SETS):
        stages_of_turn = stages[turn::GRADIENT_SETS]
        host_planes = [
            stored for stage in stages_of_turn for stored in stage.stored_planes if stored.on_host
        ]
        largest: dict[tuple[int, torch.dtype], Tensor] = {}
        for stored in host_planes:
            grad = stored.plane.grad
            key = stored.plane.number, grad.dtype
            largest[key] = max(largest.get(key, grad), grad, key=torch.numel)
        label = f"gradients in turn {turn}"
        memory = {key: on_host(like, label, placement.device) for key, like in largest.items()}
        space = Space(label, Home.HOST)
        for stored in host_planes:
            plane = stored.plane
            plane.grad = memory[plane.number, plane.grad.dtype][: plane.grad.numel()]
            stored.buffers[GRADIENT] = Buffer(plane.grad, space)
