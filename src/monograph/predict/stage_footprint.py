"""Predict what the passes of a streamed stage take on the device, by tracing the engine's own code.

The traced model has the stage before the blocks, one stage of blocks, and the stage after them,
with one micro-batch. All stages of blocks are alike, and a further stage or micro-batch adds only
inputs of stages and what `begin` gives to all blocks, which are counted in closed form
(`planner.placement_bytes`). Nothing is computed and no device is needed.
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
from monograph.model.llama import Llama
from monograph.predict.fake_memory import ORIGINS, TRANSIENT, FakeMemory, MemorySample
from monograph.predict.footprint import Work, token_loss_on
from monograph.step import Step, accumulate, update
from monograph.stream import Placement
from monograph.stream.parameters import InStages
from monograph.stream.slots import Passes
from monograph.stream.store import BlockArguments

# The inputs of stages that are alive at the peak of the traced passes: those of the stage of blocks
# and of the last stage, or a gradient of that size in place of one, and the gradient that is made.
TRACED_BOUNDARIES = 3


class StageFootprint(NamedTuple):
    """The bytes that a streamed model allocates beside its planes, slots and staging buffers.

    Attributes:
        passes: at the peak of the passes, with one micro-batch, without inputs of stages.
        further: of what `begin` gives to the blocks for a micro-batch, such as masks and rotations.
        first_update: at the peak of the first stage's update.
        block_update: at the peak of the update of a stage of blocks.
        last_update: at the peak of the last stage's update.
    """

    passes: int
    further: int
    first_update: int
    block_update: int
    last_update: int


class _TracedPasses(Passes):
    """Passes on tensors without data.

    Attributes:
        further_bytes: the bytes of what `begin` gave to the blocks.
    """

    further_bytes = 0

    def forward_first(self, batch: object) -> tuple[Tensor, BlockArguments]:
        """Run the first stage, and note the bytes of the blocks' further arguments."""
        state, further = super().forward_first(batch)
        tensors = [leaf for leaf in tree_leaves(further) if isinstance(leaf, Tensor)]
        storages = {id(tensor.untyped_storage()): tensor for tensor in tensors}
        self.further_bytes = sum(tensor.untyped_storage().nbytes() for tensor in storages.values())
        return state, further

    def generator_states(self) -> list[Tensor]:
        """Return nothing: no random number is drawn without data."""
        return []


@functools.lru_cache(maxsize=64)
def stage_footprint(work: Work, blocks_per_stage: int) -> StageFootprint:
    """Return what the passes and the update of a streamed model take on the device.

    Args:
        work: the step.
        blocks_per_stage: blocks of a stage.
    """
    short = replace(work, config=work.config.shortened(blocks_per_stage))
    with FakeMemory(short.config.vocab_size, short.device_type) as memory:
        model = Llama(short.config)
        # Fused attention without a mask takes the place of flex attention.
        if short.device_type == "cuda":
            model.use_attention("sdpa", "repeated" if short.repeats_heads else "torch", "cuda")
        # Then `update` only decides, and the stages are updated one by one below.
        placement = Placement(blocks_per_stage=blocks_per_stage, when="next forward")
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
        walk = parameters.walk  # which allocates slots and staging buffers
        memory.origin = "activations"
        names = ["tokens", "targets"]
        if short.packed and short.masked:
            names += ["segments", "positions"]
        batch = {name: torch.zeros(short.rows, short.length, dtype=torch.int64) for name in names}
        updating = [each.function for each in parameters.captured("blocks")]
        if short.compile != "none":
            capture_with(memory.captured, step, "blocks")
        with compat.without_modes():
            step.choose_kept_results(batch)
        begin = len(memory.curve)
        accumulate(step, [batch])
        end_of_passes = len(memory.curve)
        passes = max(map(_transient_bytes, memory.curve[begin:end_of_passes]))
        update(step)
        update_peaks = []
        for stage in list(walk.updates.waiting):
            begin = len(memory.curve)
            walk.updates.begin(stage)
            walk.updates.finish_current()
            update_peaks.append(max(map(_transient_bytes, memory.curve[begin:])))
        assert isinstance(walk.passes, _TracedPasses)
        further_bytes = walk.passes.further_bytes
    # An update has a graph for each kind of piece, and a search traces many ways.
    for function in updating:
        compat.forget_graphs(function)
    boundaries = TRACED_BOUNDARIES * short.input_bytes
    return StageFootprint(passes - boundaries, further_bytes, *update_peaks)


def _transient_bytes(sample: MemorySample) -> int:
    """Return the bytes of a sample that passes and updates allocate and free again."""
    by_origin = dict(zip(ORIGINS, sample, strict=True))
    return sum(by_origin[origin] for origin in TRANSIENT)
