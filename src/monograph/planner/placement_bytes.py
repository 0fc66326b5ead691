"""Count a streamed model's bytes on the device, in the host's memory and in files, and choose which
buffers stay on the device.

device = resident buffers + slots + staging buffers + boundaries + masks
         + max(one stage's passes, an update's intermediates)
host   = all other buffers + offloaded boundaries

The words, which are those of `monograph.stream`:
    stage           what is before the blocks, a group of blocks, or what is after them
    plane           a part of a stage's trained parameters in one tensor
    buffer          one of a plane's tensors: "weights", "gradient", a moment of the optimizer, or "rest",
                    which has the low halves of fp32 weights if "weights" has only the high halves; or
                    "frozen", all tensors of a stage that are not trained
    number          an element of a tensor
    origin          what bytes are for, as plans show it: "weights", "gradients", "moments", "slots", ...
    resident        on the device all the time
    slot            device memory that holds the weights and gradients of one stage after another
    chunk           a part of a plane, which the device updates as one unit
    staging buffer  device memory for a chunk while it is updated
    boundary        the tensor that passes from one stage to the next, for one micro-batch

Planes, slots and staging buffers are counted exactly, in closed form. For this, the engine's own code
makes the planes of the first stage, of one stage of each kind of blocks, and of the last stage, on tensors
without data. The other memory, which passes and updates allocate, is estimated for a search, and traced
for the ways that the search finds (`predict.stage_footprint`).
"""

import functools
import itertools
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from monograph.graph.lora import Lora
from monograph.graph.precision import Precision
from monograph.model.adapter import install_adapters
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.ops.cross_entropy import chunk_count
from monograph.optim import Optimizer
from monograph.optim.formats import FORMATS
from monograph.planner.traces import traced_stage
from monograph.predict.estimate import (
    ORTHOGONAL_NUMBERS,
    dequantised_weight_bytes,
    stored_numbers,
)
from monograph.predict.footprint import Work, kinds_of_block_stages
from monograph.stream import Placement
from monograph.stream.chunked_update import MAX_CHUNK_ELEMENTS, STAGING_BUFFERS
from monograph.stream.frozen import FROZEN
from monograph.stream.placement import When, Where
from monograph.stream.slots import BLOCK_SLOTS
from monograph.stream.store import GRADIENT, GRADIENT_SETS, REST, WEIGHTS, Stage, store_in_stages
from monograph.stream.walk import INPUT_SETS

BufferNames = frozenset[str]
META = torch.device("meta")
# A buffer's origin by its name. Buffers that are not listed here have the origin "moments".
ORIGIN = {WEIGHTS: "weights", REST: "weights", FROZEN: "weights", GRADIENT: "gradients"}


class BufferSize(NamedTuple):
    """The size of a tensor.

    Attributes:
        numbers: how many numbers it has.
        dtype: their dtype.
    """

    numbers: int
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """Return the bytes."""
        return self.numbers * self.dtype.itemsize


class PlaneShape(NamedTuple):
    """A stage's plane without its data.

    Attributes:
        plane_number: the plane's number. Planes of different stages that have the same number hold the
            same kind of parameters, and take turns in the same memory of a slot.
        parameters: how many parameters it has.
        update_unit: how many parameters can only be updated together: those of a matrix, or 1.
        buffers: the buffers' sizes by name.
    """

    plane_number: int
    parameters: int
    update_unit: int
    buffers: Mapping[str, BufferSize]

    def size_bytes(self, name: str) -> int:
        """Return the bytes of one buffer; 0 if the plane does not have it."""
        return self.buffers[name].size_bytes if name in self.buffers else 0

    def is_off_device(self, resident: BufferNames) -> bool:
        """Return whether no buffer of the plane is on the device.

        Args:
            resident: the names of the stage's buffers that stay on the device.
        """
        return not resident & self.buffers.keys()

    def first_and_last_chunk(self) -> Iterable[tuple[int, int]]:
        """Return (begin, end) of the first and the last chunk of parameters. All chunks but the last
        one are as large as the first.
        """
        units_per_chunk = max(1, MAX_CHUNK_ELEMENTS // self.update_unit)
        chunk_size = units_per_chunk * self.update_unit
        begins = range(0, self.parameters, chunk_size)
        return {
            (begin, min(self.parameters, begin + chunk_size)) for begin in (begins[0], begins[-1])
        }


class StageShape(NamedTuple):
    """A stage without its data.

    Attributes:
        planes: its planes.
        frozen: the bytes of its tensors that are not trained.
    """

    planes: tuple[PlaneShape, ...]
    frozen: int

    def size_bytes(self, name: str) -> int:
        """Return the bytes of all buffers of one name."""
        if name == FROZEN:
            return self.frozen
        return sum(plane.size_bytes(name) for plane in self.planes)


@dataclass(frozen=True, eq=False)
class Stages:
    """All stages of a model.

    Attributes:
        kinds: the different stages: the one before the blocks, each kind of a stage of blocks, and the
            one after the blocks.
        kind_numbers: for each stage, the index of its kind in `kinds`.
        tied: whether the last stage reads weights of the first.
    """

    kinds: tuple[StageShape, ...]
    kind_numbers: tuple[int, ...]
    tied: bool

    @property
    def count(self) -> int:
        """Return the number of all stages."""
        return len(self.kind_numbers)

    @cached_property
    def planes(self) -> list[tuple[PlaneShape, ...]]:
        """Return the planes of each stage."""
        return [self.kinds[number].planes for number in self.kind_numbers]

    @property
    def planes_of_kinds(self) -> list[PlaneShape]:
        """Return the planes of one stage of each kind."""
        return [plane for kind in self.kinds for plane in kind.planes]

    @property
    def block_parameters(self) -> float:
        """Return the trained parameters of a stage of blocks; their mean, if stages differ."""
        planes = itertools.chain.from_iterable(self.planes[1:-1])
        return sum(plane.parameters for plane in planes) / (self.count - 2)

    @cached_property
    def buffer_names(self) -> list[str]:
        """Return the names of all buffers."""
        names = dict.fromkeys(name for plane in self.planes_of_kinds for name in plane.buffers)
        has_frozen = any(kind.frozen for kind in self.kinds)
        return [*names, FROZEN] if has_frozen else [*names]

    @property
    def trained(self) -> frozenset[tuple[int, str]]:
        """Return all buffers of planes, as (stage, name)."""
        return frozenset(
            (index, name)
            for index in range(self.count)
            for name in self.buffer_names
            if name != FROZEN and self.size_bytes(index, name)
        )

    def size_bytes(self, index: int, name: str) -> int:
        """Return the bytes of all buffers of one name in a stage."""
        return self._sizes[self.kind_numbers[index]].get(name, 0)

    @cached_property
    def _sizes(self) -> list[dict[str, int]]:
        """Return the bytes of each kind's buffers by name. They are cached, because a search reads
        them millions of times.
        """
        return [{name: kind.size_bytes(name) for name in self.buffer_names} for kind in self.kinds]


class _PlacedKind(NamedTuple):
    """Stages of one kind that have the same resident buffers.

    Attributes:
        shape: the shape of each of them.
        resident: the names of their buffers that stay on the device.
    """

    shape: StageShape
    resident: BufferNames


# Cached, because a second search needs the same stages: if nothing fits, it looks for settings that
# would fit.
@functools.lru_cache(maxsize=64)
def stages_of(
    config: LlamaConfig,
    optim: Optimizer,
    precision: str,
    blocks_per_stage: int,
    lora: Lora | None = None,
) -> Stages:
    """Return the stages of a model whose number of blocks is a multiple of `blocks_per_stage`.

    Args:
        config: the model's shape.
        optim: the optimizer.
        precision: the compute precision.
        blocks_per_stage: the number of blocks in a stage.
        lora: the adapters that are trained; None: the model itself is trained.
    """
    kind_numbers = kinds_of_block_stages(config, blocks_per_stage)
    # Numbers are given in the order of the stages, so the first stages of blocks include all kinds.
    known = max(kind_numbers)
    short = config.shortened((kind_numbers.index(known) + 1) * blocks_per_stage)
    with META:
        model = Llama(short)
        if lora:
            install_adapters(model, lora, precision=Precision(precision))
    placement = Placement(META, blocks_per_stage=blocks_per_stage)
    store = store_in_stages(
        model,
        optim.kinds(model),
        optim,
        rounds_weights=Precision(precision).rounds_weights,
        placement=placement,
    )
    first, *of_blocks, last = (
        StageShape(_plane_shapes(stage), stage.frozen.memory.nbytes) for stage in store.stages
    )
    block_kinds = [of_blocks[kind_numbers.index(number)] for number in range(known + 1)]
    return Stages(
        kinds=(first, *block_kinds, last),
        kind_numbers=(0, *[1 + number for number in kind_numbers], known + 2),
        tied=store.tied,
    )


def _plane_shapes(stage: Stage) -> tuple[PlaneShape, ...]:
    """Return the planes of a stage that the engine's own code has made."""
    shapes = []
    for entry in stage.stored_planes:
        plane = entry.plane
        parameters = plane.param.numel()
        buffers = {
            name: BufferSize(buffer.tensor.numel(), buffer.tensor.dtype)
            for name, buffer in entry.buffers.items()
        }
        # A plane of matrices holds matrices of one size: each of `plane.placed` is one.
        update_unit = parameters // len(plane.placed) if plane.kind.matrix_shape else 1
        shape = PlaneShape(
            plane_number=plane.number,
            parameters=parameters,
            update_unit=update_unit,
            buffers=buffers,
        )
        shapes.append(shape)
    return tuple(shapes)


def device_buffer_bytes(sets_of_sizes: Iterable[Mapping[Any, BufferSize]]) -> int:
    """Return the bytes of a `monograph.stream.slots.DeviceBuffer`, which holds one of several sets of
    tensors at a time.

    Args:
        sets_of_sizes: for each set, the sizes of its tensors by key. Tensors of different sets that
            have the same key and dtype share memory.
    """
    largest: dict[tuple[Any, torch.dtype], int] = {}
    for sizes in sets_of_sizes:
        for key, (numbers, dtype) in sizes.items():
            largest[key, dtype] = max(largest.get((key, dtype), 0), numbers)
    return sum(numbers * dtype.itemsize for (_, dtype), numbers in largest.items())


def slots_bytes(stages: Stages, resident: Sequence[BufferNames]) -> int:
    """Return the bytes of all slots (`monograph.stream.slots.Slots`).

    Args:
        stages: the model's stages.
        resident: for each stage, the names of its buffers that stay on the device.
    """
    first, *of_blocks, last = _placed_kinds(stages, resident)
    # BLOCK_SLOTS = 2 slots hold stages of blocks, so that one stage is copied while another one computes.
    # The first and the last stage share a slot, unless the last reads the first one's weights.
    block_slots = min(BLOCK_SLOTS, stages.count - 2)
    if stages.tied:
        first_and_last_bytes = _slot_bytes([first]) + _slot_bytes([last])
    else:
        first_and_last_bytes = _slot_bytes([first, last])
    return first_and_last_bytes + block_slots * _slot_bytes(of_blocks)


def staging_bytes(
    stages: Stages, resident: Sequence[BufferNames], *, fetches_gradients: bool, host_updates: bool
) -> int:
    """Return the bytes of the staging buffers.

    Args:
        stages: the model's stages.
        resident: for each stage, the names of its buffers that stay on the device.
        fetches_gradients: whether gradients leave their slots, so that they are fetched again for an
            update.
        host_updates: whether the host updates planes that are entirely off the device, which then
            need no staging buffer.
    """
    sizes_of_chunks: list[dict[str, BufferSize]] = []
    for kind in _placed_kinds(stages, resident):
        for plane in kind.shape.planes:
            if host_updates and plane.is_off_device(kind.resident):
                continue
            fetched_names = [
                name
                for name in plane.buffers
                if name not in kind.resident and (fetches_gradients or name != GRADIENT)
            ]
            for begin, end in plane.first_and_last_chunk():
                sizes_of_chunks.append(
                    {name: _chunk_size(plane, name, begin, end) for name in fetched_names}
                )
    return STAGING_BUFFERS * device_buffer_bytes(sizes_of_chunks)


# The result is cached, because ways that differ only in their micro-batch hold the same planes.
@functools.lru_cache(maxsize=4096)
def plane_bytes(
    stages: Stages,
    resident: tuple[BufferNames, ...],
    *,
    fetches_gradients: bool,
    host_updates: bool,
) -> Mapping[str, int]:
    """Return the bytes on the device of planes, slots and staging buffers, by origin.

    The arguments are those of `staging_bytes`.
    """
    sizes = dict.fromkeys(("weights", "gradients", "moments"), 0)
    for index, names in enumerate(resident):
        for name in names:
            sizes[ORIGIN.get(name, "moments")] += stages.size_bytes(index, name)
    staging = staging_bytes(
        stages, resident, fetches_gradients=fetches_gradients, host_updates=host_updates
    )
    return sizes | {"slots": slots_bytes(stages, resident), "staging buffers": staging}


def shared_gradient_bytes(stages: Stages, resident: Sequence[BufferNames]) -> int:
    """Return the bytes on the host for gradients of planes that the host updates, if stages take turns
    in GRADIENT_SETS sets of memory.
    """
    gradients_by_set: list[list[dict[int, BufferSize]]] = [[] for _ in range(GRADIENT_SETS)]
    for index, names in enumerate(resident):
        for plane in stages.planes[index]:
            if plane.is_off_device(names):
                gradients_by_set[index % GRADIENT_SETS].append(
                    {plane.plane_number: plane.buffers[GRADIENT]}
                )
    return sum(device_buffer_bytes(gradients) for gradients in gradients_by_set)


def _chunk_size(plane: PlaneShape, name: str, begin: int, end: int) -> BufferSize:
    """Return the size of a buffer's part that belongs to the parameters from `begin` to `end`."""
    numbers, dtype = plane.buffers[name]
    # A buffer of scales has one number for several parameters; other buffers have one for each.
    parameters_per_number = plane.parameters // numbers
    rounded_up_end = -(-end // parameters_per_number)
    return BufferSize(rounded_up_end - begin // parameters_per_number, dtype)


def _placed_kinds(stages: Stages, resident: Sequence[BufferNames]) -> list[_PlacedKind]:
    """Return the stages without those that are like earlier ones: of the same kind, and with the same
    resident buffers. The first stage and the last one have no like.
    """
    # `dict.fromkeys` removes duplicates, and keeps the order.
    different = dict.fromkeys(zip(stages.kind_numbers, resident, strict=True))
    return [_PlacedKind(stages.kinds[number], names) for number, names in different]


def _slot_bytes(kinds: Sequence[_PlacedKind]) -> int:
    """Return the bytes of one slot for stages of these kinds: their weights, gradients and frozen
    tensors that are not resident.
    """
    total = max((kind.shape.frozen for kind in kinds if FROZEN not in kind.resident), default=0)
    for name in (WEIGHTS, GRADIENT):
        total += device_buffer_bytes(
            {plane.plane_number: plane.buffers[name] for plane in kind.shape.planes}
            for kind in kinds
            if name not in kind.resident
        )
    return total


Tiers = Mapping[str, Mapping[str, int]]  # bytes by origin, for "device", "host" and "disk"
# If the memory of passes is only estimated, resident buffers leave room for this many times the
# estimate.
MARGIN = 1.25
# The fractional parts of the first n multiples of the golden ratio are spread evenly between 0 and 1,
# for every n.
GOLDEN_RATIO = 0.618033988749895


@dataclass(frozen=True)
class StreamWay:
    """One way to stream a model.

    Attributes:
        work: micro-batch, precision, compile scope and recomputation.
        stages: the model's stages.
        blocks_per_stage: blocks in a stage.
        when: when weights are updated, see `monograph.stream.Placement`.
        offload: whether boundaries are kept on the host.
        where: where weights that are not resident are updated.
        on_disk: names of buffers that are in files where they are not resident.
        files_first: whether buffers named in `on_disk` are the first to stay on the device, because
            a disk is slow. Otherwise they are the last, because a disk has room.
    """

    work: Work
    stages: Stages
    blocks_per_stage: int
    when: When
    offload: bool
    where: Where = "device"
    on_disk: BufferNames = frozenset()
    files_first: bool = True

    @cached_property
    def residency_order(self) -> list[list[tuple[int, str]]]:
        """Return the buffers as (stage, name), in the order in which they become resident while there
        is room on the device.

        They are in groups; all buffers of a group have the same name. Buffers that save most copies
        per byte come first: weights, which are copied up to three times an update, then gradients,
        which leave in the backward pass and return for the update. Buffers in files come before or
        after all others (`files_first`). If the host updates weights, a group is a stage instead, because then
        all buffers of a stage are on the host, or all are on the device.

        With adapters only frozen tensors are listed, because all else is on the device anyway.
        """
        # Resident stages are spread evenly over the model, so that copies are, too.
        spread_stages = sorted(range(self.stages.count), key=lambda index: index * GOLDEN_RATIO % 1)
        existing_names = self.stages.buffer_names
        if self.work.lora:
            existing_names = [FROZEN]
        copied_most = [WEIGHTS, GRADIENT, REST]
        moments = [name for name in existing_names if name not in copied_most]
        names = [name for name in (*copied_most, *moments) if name in existing_names]
        if self.gradients_stay_in_slots:
            names = [name for name in names if name != GRADIENT]
        in_files = [name for name in names if name in self.on_disk]
        in_memory = [name for name in names if name not in self.on_disk]
        if self.files_first:
            ordered_names = in_files + in_memory
        else:
            ordered_names = in_memory + in_files

        def existing(buffers: Iterable[tuple[int, str]]) -> list[tuple[int, str]]:
            """Return those of the buffers that exist: not every stage has a buffer of each name."""
            return [(index, name) for index, name in buffers if self.stages.size_bytes(index, name)]

        if self.where == "host":
            groups = [existing((index, name) for name in ordered_names) for index in spread_stages]
        else:
            groups = [existing((index, name) for index in spread_stages) for name in ordered_names]
        return [group for group in groups if group]

    @property
    def gradients_stay_in_slots(self) -> bool:
        """Return whether gradients are never kept outside of a slot, because each stage is updated as
        soon as its gradient is complete.
        """
        return self.when == "backward"

    def planes_updated_on_host(
        self, index: int, resident: Sequence[BufferNames]
    ) -> list[PlaneShape]:
        """Return a stage's planes that the host updates.

        Args:
            index: the stage's index.
            resident: for each stage, the names of its buffers that stay on the device.
        """
        if self.where != "host":
            return []
        return [
            plane for plane in self.stages.planes[index] if plane.is_off_device(resident[index])
        ]

    @cached_property
    def pass_bytes(self) -> dict[str, int]:
        """Return the bytes on the device of passes and of an update's intermediate values, by origin.

        Boundaries and masks are exact, all others are estimates.
        """
        number_bytes = self.work.number_bytes
        config = self.work.config
        tokens = self.work.tokens
        is_eager = self.work.compile == "none"

        # What the forward pass of a stage keeps for its backward pass (`stored_numbers` are for each
        # block and token), without the first block's input. That is the input of the stage, which is
        # counted as a boundary.
        kept_by_block = stored_numbers(self.work, self.work.remat) * number_bytes * tokens
        kept_bytes = kept_by_block * self.blocks_per_stage - self.work.input_bytes
        dense_weight_bytes = dequantised_weight_bytes(self.work)
        planes = self.stages.planes_of_kinds
        matrix_sizes = [plane.update_unit for plane in planes if plane.update_unit > 1]
        largest_chunk = max(
            end - begin for plane in planes for begin, end in plane.first_and_last_chunk()
        )
        if is_eager:
            # Besides what a resident update takes, split weights are joined to 4 bytes, and the new
            # weights of 4 bytes are split again.
            state_format = FORMATS[self.work.optim.state]
            update_bytes = (state_format.eager_update_bytes + 8) * largest_chunk
        else:
            # An fp32 number for each of a chunk's parameters, or what orthogonalises the largest matrix.
            largest_matrix = max(matrix_sizes, default=0)
            update_bytes = max(
                4 * largest_chunk, ORTHOGONAL_NUMBERS * number_bytes * largest_matrix
            )

        # The peak is in a block's backward pass, in the loss, when an fp32 tensor of the head's size
        # is made, or in an update. Only a block's backward pass needs what the forward pass has kept.
        # A frozen head has no gradient.
        head_numbers = 0 if self.work.lora else config.vocab_size * config.hidden_size
        peak = max(
            kept_bytes + self._block_backward_bytes + dense_weight_bytes,
            self._loss_bytes,
            4 * head_numbers,
            update_bytes,
        )
        mask_bytes = 0
        if self.work.packed:
            # For each token of the window: a row of a dense mask, one byte for each position; and its
            # rotation, which is an fp32 cosine and an fp32 sine for each two dimensions of a head.
            length = self.work.length
            mask_bytes = self.work.window_rows * length * (length + 4 * config.head_dim)
        return {
            "boundaries": self._max_boundaries * self.work.input_bytes,
            "activations": int(kept_bytes),
            "workspace": int(peak - kept_bytes) + mask_bytes,
        }

    @cached_property
    def traced_pass_bytes(self) -> dict[str, int]:
        """Return the bytes on the device of passes and updates by origin, from a trace of one stage's
        passes, and of its update.
        """
        work = self.work
        traced = traced_stage(work, self.blocks_per_stage)
        estimated = self.pass_bytes
        boundaries = estimated["boundaries"]
        window_tokens = work.tokens_per_update
        # The trace has one micro-batch. The tokens of all others are on the device, too, as 8-byte
        # integers: tokens and targets; if rows are packed, also the documents and positions.
        tensors_of_tokens = 4 if work.packed else 2
        token_bytes = tensors_of_tokens * 8 * (window_tokens - work.tokens)
        # Masks and rotations of the other micro-batches.
        argument_bytes = (work.micro_batches - 1) * traced.block_arguments
        if work.packed and not work.masked:
            # In the trace all rows share the rotations of one row. With flex attention, each row has
            # its own.
            argument_bytes += 4 * work.config.head_dim * window_tokens
        # The largest update of a stage of blocks is counted for the last of them, whose index is
        # count - 2, because most boundaries are on the device then.
        update_peaks = (
            traced.first_update + self._boundary_bytes_in_update(0),
            traced.block_update + self._boundary_bytes_in_update(self.stages.count - 2),
            traced.last_update + self._boundary_bytes_in_update(self.stages.count - 1),
        )
        pass_peak = traced.passes + argument_bytes
        # `boundaries` are counted separately, and the peaks of updates include some of them.
        other_bytes = max(pass_peak, max(update_peaks) - boundaries) + token_bytes
        # The trace does not tell activations from the rest of these bytes, so the estimate does.
        activations = min(estimated["activations"], other_bytes)
        return {
            "boundaries": boundaries,
            "activations": activations,
            "workspace": other_bytes - activations,
        }

    def _boundary_bytes_in_update(self, index: int) -> int:
        """Return the bytes of boundaries on the device while the stage of this index is updated."""
        micro_batches = self.work.micro_batches
        if self.when == "sweep":
            # The passes are over. Only memory for boundaries that come back from the host is still
            # allocated.
            sets = min(INPUT_SETS, self.stages.count - 2) if self.offload else 0
            return sets * micro_batches * self.work.input_bytes
        if self.when == "backward" or self.offload:
            return self.pass_bytes["boundaries"]
        # With "next forward", a stage is updated while the previous stage runs forward: one or more
        # chunks after each micro-batch. When the last chunk is updated, stages 1 to index - 1 have all
        # of their inputs, and this stage has those of the micro-batches so far.
        chunks = sum(
            -(-plane.parameters // max(MAX_CHUNK_ELEMENTS, plane.update_unit))  # rounded up
            for plane in self.stages.planes[index]
        )
        inputs_of_earlier_stages = max(0, index - 1) * micro_batches
        inputs_so_far = min(micro_batches, chunks) if index > 0 else 0
        return (inputs_of_earlier_stages + inputs_so_far) * self.work.input_bytes

    @property
    def _block_backward_bytes(self) -> float:
        """Return the estimated bytes of a block's backward pass, recomputation included.

        The pass begins with the gradients of gate, up and their product, three results inside the
        feed-forward layer; in a graph the gradient of the product is gone by then. It ends with the
        gradients of the block's weights, unless matrix products add them to the plane.
        """
        work = self.work
        recomputed = stored_numbers(work, "none") - stored_numbers(work, work.remat)
        weights = self.stages.block_parameters / self.blocks_per_stage
        gradient_bytes = 0 if work.fused else 4
        inner_gradients = 3 if work.compile == "none" else 2
        numbers = recomputed + inner_gradients * work.inner_numbers
        return numbers * work.number_bytes * work.tokens + gradient_bytes * weights

    @property
    def _loss_bytes(self) -> float:
        """Return the estimated bytes of the loss, whose logits are computed in chunks of tokens."""
        work = self.work
        is_eager = work.compile == "none"
        vocabulary = work.config.vocab_size
        # A frozen head is stored in 16 bits already, and has no gradient.
        head_numbers = 0 if work.lora else vocabulary * work.config.hidden_size
        logit_chunks = chunk_count(work.tokens, vocabulary, work.device_type)
        # The bytes of a number of the head's weights, rounded to 16 bits; 0 in fp32, without rounding.
        rounded_bytes = work.number_bytes if work.number_bytes < 4 else 0
        gradient_bytes = 0 if work.fused else 4
        # The bytes of a chunk's logit and its gradient.
        if is_eager:
            logit_bytes = 8 + rounded_bytes
        else:
            logit_bytes = 2 * work.number_bytes
        loss_bytes = work.tokens / logit_chunks * vocabulary * logit_bytes
        # With several chunks the head's gradient adds up over them, in memory of its own.
        head_gradient_bytes = 4 if is_eager or logit_chunks > 1 else gradient_bytes
        head_bytes = rounded_bytes + head_gradient_bytes
        loss_bytes += head_numbers * head_bytes + 2 * work.input_bytes
        return loss_bytes

    @property
    def _max_boundaries(self) -> int:
        """Return the largest number of boundaries on the device at once, over all micro-batches.

        If boundaries stay on the device, they are the inputs of all stages but the first, and one
        gradient. If they are offloaded, they are the inputs of the stage that computes, the inputs of
        the next stage, and INPUT_SETS sets that come back from the host.
        """
        stages_with_input = self.stages.count - 1
        if not self.offload:
            return stages_with_input * self.work.micro_batches + 1
        return (2 + min(INPUT_SETS, stages_with_input - 1)) * self.work.micro_batches

    @property
    def offloaded_bytes(self) -> int:
        """Return the bytes of boundaries that are kept on the host."""
        if not self.offload:
            return 0
        return (self.stages.count - 2) * self.work.micro_batches * self.work.input_bytes

    def first_resident(self, count: int) -> list[BufferNames]:
        """Return the names of each stage's resident buffers, if the first `count` buffers of
        `residency_order` are resident. All that belongs to adapters is resident, too.
        """
        buffers = list(itertools.chain.from_iterable(self.residency_order))
        always_resident = self.stages.trained if self.work.lora else frozenset()
        names_of_stages: list[set[str]] = [set() for _ in range(self.stages.count)]
        for index, name in (*always_resident, *buffers[:count]):
            names_of_stages[index].add(name)
        return [frozenset(names) for names in names_of_stages]

    def device_bytes(
        self, resident: Sequence[BufferNames], *, traced: bool = False
    ) -> dict[str, int]:
        """Return the bytes on the device by origin.

        Args:
            resident: for each stage, the names of its buffers that stay on the device.
            traced: whether the bytes of passes are traced, which takes seconds, or estimated.
        """
        passes = self.traced_pass_bytes if traced else self.pass_bytes
        return {**self._plane_bytes(resident), **passes}

    def _plane_bytes(self, resident: Sequence[BufferNames]) -> Mapping[str, int]:
        return plane_bytes(
            self.stages,
            tuple(resident),
            fetches_gradients=not self.gradients_stay_in_slots,
            host_updates=self.where == "host",
        )

    def resident_within(self, limit: int, *, traced: bool = False) -> list[BufferNames]:
        """Choose the resident buffers: as many of `residency_order` as fit into `limit` bytes.

        Args:
            limit: the bytes that may be taken on the device.
            traced: whether the bytes of passes are traced, or estimated with a margin.

        Returns:
            For each stage, the names of its resident buffers.
        """
        passes = self.traced_pass_bytes if traced else self.pass_bytes
        inexact_bytes = passes["activations"] + passes["workspace"]
        margin = 1.0 if traced else MARGIN
        available = limit - int(margin * inexact_bytes) - passes["boundaries"]

        def fits(count: int) -> bool:
            return sum(self._plane_bytes(self.first_resident(count)).values()) <= available

        # Within a group, memory only grows with `count`, so the count is bisected. At the end of a
        # group memory may fall, because slots may no longer be needed. So all ends are tried.
        ends = [0, *itertools.accumulate(len(group) for group in self.residency_order)]
        complete_groups = max((groups for groups, end in enumerate(ends) if fits(end)), default=0)
        buffers_in_complete_groups = ends[complete_groups]
        if self.where == "host":
            # Here a group is a stage, which is either resident or not.
            return self.first_resident(buffers_in_complete_groups)
        # How many buffers of the next group are resident, too: as many of `counts` as fit. All of the
        # group would not fit.
        end_of_next_group = ends[min(complete_groups + 1, len(ends) - 1)]
        counts = range(buffers_in_complete_groups + 1, end_of_next_group)
        buffers_of_next_group = bisect_left(counts, True, key=lambda count: not fits(count))
        return self.first_resident(buffers_in_complete_groups + buffers_of_next_group)

    def bytes_by_tier(self, resident: Sequence[BufferNames], *, traced: bool = False) -> Tiers:
        """Return the bytes by origin on the device, on the host and on disk; see `device_bytes`."""
        tiers = {
            "device": self.device_bytes(resident, traced=traced),
            "host": dict[str, int](),
            "disk": dict[str, int](),
        }
        for index in range(self.stages.count):
            for name in self.stages.buffer_names:
                size = self.stages.size_bytes(index, name)
                if not size or name in resident[index]:
                    continue
                if name == GRADIENT and self.gradients_stay_in_slots:
                    continue
                tier = tiers["disk" if name in self.on_disk else "host"]
                origin = ORIGIN.get(name, "moments")
                tier[origin] = tier.get(origin, 0) + size
        # The gradients of planes that the host updates are copied to it, although they are not kept.
        if self.where == "host" and self.gradients_stay_in_slots:
            gradients = shared_gradient_bytes(self.stages, resident)
            if gradients:
                tiers["host"]["gradients"] = gradients
        if self.offload:
            tiers["host"]["boundaries"] = self.offloaded_bytes
        return tiers

    def placement(self, resident: Sequence[BufferNames]) -> Placement:
        """Return the placement for the engine. The caller sets its device and folder."""
        on_device = frozenset(
            (index, name) for index, names in enumerate(resident) for name in names
        )
        return Placement(
            when=self.when,
            where=self.where,
            blocks_per_stage=self.blocks_per_stage,
            offload=self.offload,
            on_device=on_device,
            on_disk=self.on_disk,
        )
