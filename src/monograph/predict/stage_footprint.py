"""Predict the bytes that passes and updates of a streamed model take on the device, by tracing the
engine's own code.

A stage is some consecutive blocks of a model, or the parts before or after them (`monograph.stream`).
The traced model has the stage before the blocks, one stage of blocks, and the stage after them, with
one micro-batch. Where stages of blocks differ, one model is traced for each kind. Another stage or
micro-batch adds only inputs of stages, and the arguments that the model's `begin` gives to all blocks,
such as masks and rotations. `planner.placement_bytes` counts these in closed form. Nothing is computed
and no device is needed.
"""

import functools
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from monograph import compat
from monograph.graph.capture import capture_with
from monograph.graph.precision import Precision
from monograph.graph.remat import policy_named
from monograph.model.adapter import install_adapters
from monograph.model.llama import Llama
from monograph.predict.fake_memory import ORIGINS, TRANSIENT, FakeMemory, MemorySample
from monograph.predict.footprint import Work, kinds_of_block_stages, token_loss_on
from monograph.step import Step, accumulate, update
from monograph.stream import Placement
from monograph.stream.parameters import InStages
from monograph.stream.slots import Passes
from monograph.stream.store import BlockArguments

# How many tensors of the size of a stage's input are alive at the peak of the traced passes: the input
# of the stage of blocks, the input of the last stage, and the gradient that is computed. One of the two
# inputs may have given way to a gradient.
TRACED_BOUNDARIES = 3


class StageFootprint(NamedTuple):
    """The bytes that a streamed model allocates and frees again. Planes, slots and staging buffers
    are not counted.

    Attributes:
        passes: bytes at the peak of the passes, with one micro-batch, without inputs of stages.
        block_arguments: bytes of the arguments that `begin` gives to the blocks for one micro-batch,
            such as masks and rotations.
        first_update: bytes at the peak of the first stage's update.
        block_update: bytes at the peak of the update of a stage of blocks.
        last_update: bytes at the peak of the last stage's update.
    """

    passes: int
    block_arguments: int
    first_update: int
    block_update: int
    last_update: int


class _TracedPasses(Passes):
    """Passes on tensors without data.

    Attributes:
        block_argument_bytes: the bytes of the arguments that `begin` gave to the blocks.
    """

    block_argument_bytes = 0

    def forward_first(self, batch: object) -> tuple[Tensor, BlockArguments]:
        """Run the first stage, and set `block_argument_bytes`."""
        state, block_arguments = super().forward_first(batch)
        tensors = [leaf for leaf in tree_leaves(block_arguments) if isinstance(leaf, Tensor)]
        # Several blocks may get the same tensor, so each storage counts once.
        storages = {id(tensor.untyped_storage()): tensor.untyped_storage() for tensor in tensors}
        self.block_argument_bytes = sum(storage.nbytes() for storage in storages.values())
        return state, block_arguments

    def generator_states(self) -> list[Tensor]:
        """Return an empty list: no random number is drawn without data."""
        return []


@functools.lru_cache(maxsize=64)
def stage_footprint(work: Work, blocks_per_stage: int) -> StageFootprint:
    """Return the bytes that the passes and the updates of a streamed model take on the device.

    Of different kinds of stages of blocks, each number is that of the one which takes most.

    Args:
        work: the step.
        blocks_per_stage: the number of blocks in a stage.
    """
    kind_numbers = kinds_of_block_stages(work.config, blocks_per_stage)
    footprints = [
        _footprint_of_one(work, blocks_per_stage, kind_numbers.index(number) * blocks_per_stage)
        for number in range(max(kind_numbers) + 1)
    ]
    return StageFootprint(*map(max, zip(*footprints, strict=True)))


def _footprint_of_one(work: Work, blocks: int, first_block: int) -> StageFootprint:
    """Return the bytes of a model with only one of the stages of blocks.

    Args:
        work: the step.
        blocks: the number of blocks in the stage.
        first_block: the index of its first block.
    """
    short = replace(work, config=work.config.shortened(blocks, first=first_block))
    with FakeMemory(short.config.vocab_size, short.device_type) as memory:
        model = Llama(short.config)
        # Flex attention is not traced. Fused attention without a mask takes its place.
        if short.device_type == "cuda":
            model.use_attention("sdpa", "repeated" if short.repeats_heads else "torch", "cuda")
        if short.lora:
            install_adapters(model, short.lora, precision=Precision(short.precision))
        # With "next forward", `update` only decides; the stages are updated one by one below.
        placement = Placement(blocks_per_stage=blocks, when="next forward")
        parameters = InStages(placement, None, passes=_TracedPasses, fused=short.fused)
        step = Step(
            model,
            optim=short.optim,
            clip=short.clip,
            precision=Precision(short.precision),
            remat=policy_named(short.remat),
            loss=token_loss_on(short.device_type),
            parameters=parameters,
        )
        # The first read of `walk` allocates slots and staging buffers. It comes before `origin` is set,
        # because only the origins of TRANSIENT are counted below.
        walk = parameters.walk
        memory.origin = "activations"
        names = ["tokens", "targets"]
        if short.packed and short.masked:
            names += ["segments", "positions"]
        batch = {name: torch.zeros(short.rows, short.length, dtype=torch.int64) for name in names}
        # These are listed here, because a capture replaces them by compiled functions.
        update_functions = [compilable.function for compilable in parameters.captured("blocks")]
        if short.compile != "none":
            capture_with(memory.captured, step, "blocks")
        # This runs a copy of the blocks, which must not be counted.
        with compat.without_modes():
            step.choose_kept_results(batch)
        begin = len(memory.curve)
        accumulate(step, [batch])
        end_of_passes = len(memory.curve)
        passes = max(map(_transient_bytes, memory.curve[begin:end_of_passes]))
        update(step)
        update_peaks = []
        for stage in walk.store.stages:
            begin = len(memory.curve)
            # A stage without trained parameters has no update.
            if stage in walk.updates.waiting:
                walk.updates.begin(stage)
                walk.updates.finish_current()
            update_peaks.append(max(map(_transient_bytes, memory.curve[begin:]), default=0))
        assert isinstance(walk.passes, _TracedPasses)
        block_argument_bytes = walk.passes.block_argument_bytes
    # The graphs of updates are forgotten, because they would add up: an update has a graph for each
    # shape of its chunks, and a search traces many ways to stream.
    for function in update_functions:
        compat.forget_graphs(function)
    boundary_bytes = TRACED_BOUNDARIES * short.input_bytes
    first_update, block_update, last_update = update_peaks
    return StageFootprint(
        passes=passes - boundary_bytes,
        block_arguments=block_argument_bytes,
        first_update=first_update,
        block_update=block_update,
        last_update=last_update,
    )


def _transient_bytes(sample: MemorySample) -> int:
    """Return the bytes of a sample that passes and updates allocate and free again."""
    by_origin = dict(zip(ORIGINS, sample, strict=True))
    return sum(by_origin[origin] for origin in TRANSIENT)
