"""Convert between the decoder's tensors and the tensors of a family's files.

The files of some families have other tensors than the decoder, in three ways:

- Names may begin with another word than "model." (`Family.file_prefix`).
- Files may join several of the decoder's layers into one (`Family.joined_layers`), such as q_proj,
  k_proj and v_proj. The rows of the joined weight are those of the layers, one after another.
- An expert of a mixture has three matrices: gate, up and down. The decoder has one tensor for the
  gates of all experts of a layer, one for all ups and one for all downs. Some files have a tensor for
  each matrix of each expert instead. Others have one tensor for the gates and ups of all experts
  (`Family.fused_experts`). With "halves" this tensor is [E, 2 I, D], and gate's rows are above up's.
  With "columns" it is [E, D, 2 I], where columns of gate and of up alternate, and it may be in MXFP4,
  a format of 4 bits for each number.

Each of the last two differences is a rule that converts in both directions, and each family has a list of rules. A
rule does not need the numbers of a tensor. To write files, it takes and gives an `UnreadTensor` for each
tensor: the name, a meta tensor of the shape, and a function that reads the tensor. To read files, it
takes and gives a `StoredTensor` for each tensor, which says where in the files the numbers are.

Shapes: E experts, I an expert's width, D hidden size, R rows of an expert's matrix, G blocks of 32
numbers in a row.
"""

import functools
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from monograph.errors import InputRefused
from monograph.graph.lora_merge import UnreadTensor
from monograph.graph.stored_codes import can_stack, can_take_rows
from monograph.model.config import LlamaConfig
from monograph.model.files import AxisSlice, StoredTensor
from monograph.model.parameters import block_shapes, outer_shapes

# The name in files of a matrix of one expert. The groups are the name of the layer's experts, the
# expert's number, and the matrix.
_ONE_EXPERT = re.compile(r"(.+\.mlp\.experts\.)(0|[1-9]\d{0,8})\.(\w+_proj\.weight)")
# The decoder's name of a tensor of all experts. The groups are the block, the projection, and "weight" or
# "bias".
_STACKED = re.compile(r"(.+\.)mlp\.experts\.(gate|up|down)_proj\.(weight|bias)")
# The beginning of the name of a parameter in a block.
_BLOCK = re.compile(r".*\blayers\.\d+\.")
# The numbers that the 16 codes of MXFP4 stand for. A code has a sign bit, two bits of exponent and one
# of mantissa.
_FP4_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4_VALUES = (*_FP4_MAGNITUDES, *(-magnitude for magnitude in _FP4_MAGNITUDES))


class FileRule(ABC):
    """A difference between the decoder's tensors and those of some files, in both directions."""

    @abstractmethod
    def to_files(self, tensors: Iterable[UnreadTensor]) -> Iterator[UnreadTensor]:
        """Yield the decoder's tensors in the form of the files."""

    @abstractmethod
    def to_decoder(self, stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
        """Return a file's tensors in the form of the decoder.

        Raises:
            InputRefused: the tensors do not have this form.
        """


def rules_of(config: LlamaConfig) -> list[FileRule]:
    """Return the rules of a family's files. In both directions they are applied in this order."""
    family = config.family
    rules: list[FileRule] = []
    if config.joined_layers:
        rules.append(JoinedLayersRule(config))
    if family.fused_experts and config.num_experts:
        rules.append(FusedExpertsRule(config))
    if config.num_experts:
        # This rule also follows a `FusedExpertsRule`. Files of models that also see images may have
        # either form, because transformers 5 reads and writes both.
        rules.append(SeparateExpertsRule(config))
    return rules


def to_file_tensors(tensors: Iterable[UnreadTensor], config: LlamaConfig) -> Iterator[UnreadTensor]:
    """Return a model's tensors in the form of its family's files."""
    converted = iter(tensors)
    for rule in rules_of(config):
        converted = rule.to_files(converted)
    prefix = config.family.file_prefix
    if not prefix:
        return converted
    return (
        tensor._replace(name=_with_prefix(tensor.name, "model.", prefix)) for tensor in converted
    )


def to_decoder_tensors(
    stored: dict[str, StoredTensor], config: LlamaConfig
) -> dict[str, StoredTensor]:
    """Return a file's tensors in the form of the decoder.

    Raises:
        InputRefused: tensors do not fit together.
    """
    if config.family.file_prefix:
        stored = _with_own_prefix(stored, config.family.file_prefix)
    for rule in rules_of(config):
        stored = rule.to_decoder(stored)
    return stored


def _with_own_prefix(stored: dict[str, StoredTensor], prefix: str) -> dict[str, StoredTensor]:
    """Return a file's tensors with the prefix "model." instead of another. A file may have both."""
    renamed = dict[str, StoredTensor]()
    for name, tensor in stored.items():
        new_name = _with_prefix(name, prefix, "model.")
        _add(renamed, new_name, tensor._replace(name_in_file=tensor.name_in_file or name))
    return renamed


def _with_prefix(name: str, old: str, new: str) -> str:
    """Return a name with another prefix, if it begins with the old one."""
    return new + name.removeprefix(old) if name.startswith(old) else name


class JoinedLayersRule(FileRule):
    """Files join several layers of the decoder into one, whose rows are those of the layers in order."""

    def __init__(self, config: LlamaConfig):
        """Make the rule for a model of this shape."""
        self.config = config

    def to_files(self, tensors: Iterable[UnreadTensor]) -> Iterator[UnreadTensor]:
        """Yield a model's tensors in the form of the files.

        A joined tensor takes the place of its last part.
        """
        # For each part, such as self_attn.q_proj: the name of the joined layer, and all of its parts.
        joined_layer_by_part = {
            part: (joined, parts)
            for joined, parts in self.config.joined_layers.items()
            for part in parts
        }
        # The parts that wait for the last part of their joined layer.
        pending: dict[str, UnreadTensor] = {}
        for tensor in tensors:
            block, module, suffix = _split_name(tensor.name)
            if module not in joined_layer_by_part:
                yield tensor
                continue
            joined, parts = joined_layer_by_part[module]
            pending[tensor.name] = tensor
            if module == parts[-1]:
                part_tensors = [pending.pop(f"{block}{part}{suffix}") for part in parts]
                like = torch.cat([part.like for part in part_tensors])
                read = functools.partial(_read_joined, part_tensors)
                yield UnreadTensor(f"{block}{joined}{suffix}", like, read)

    def to_decoder(self, stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
        """Return a file's tensors in the form of the decoder.

        Each part is described as a slice of the rows of the joined tensor.

        Raises:
            InputRefused: a joined tensor does not have as many rows as its parts together, or a file
                has both a joined tensor and one of its parts.
        """
        # Layers of one name have the same shape in all blocks that have them.
        shapes = dict(outer_shapes(self.config))
        for layer in range(self.config.num_hidden_layers):
            shapes |= block_shapes(self.config, layer)
        if self.config.mtp_num_hidden_layers:
            shapes |= block_shapes(self.config.of_mtp_layer(), 0)
        converted = dict[str, StoredTensor]()
        for name, tensor in stored.items():
            block, module, suffix = _split_name(name)
            parts = self.config.joined_layers.get(module, ())
            # The rows of each part. The list is empty if this is not a joined tensor, or if it is a bias
            # that the decoder does not have.
            row_counts = [
                shapes[f"{part}{suffix}"][0] for part in parts if f"{part}{suffix}" in shapes
            ]
            if not row_counts:
                converted[name] = tensor
                continue
            if tensor.shape[:1] != (sum(row_counts),):
                raise InputRefused(
                    f"{tensor.path}: {name} has shape {list(tensor.shape)}, expected "
                    f"{' + '.join(map(str, row_counts))} rows, those of {', '.join(parts)} by config.json"
                )
            # The parts get other names, so the description keeps the name in the file.
            tensor = tensor._replace(name_in_file=tensor.name_in_file or name)
            begin = 0
            for part, rows in zip(parts, row_counts, strict=True):
                part_name = f"{block}{part}{suffix}"
                if part_name in stored:
                    raise InputRefused(
                        f"{tensor.path}: {tensor.name_in_file} and {part_name} are one tensor of the model"
                    )
                has_codes = can_take_rows(tensor.codes_form, begin, tensor.shape[-1])
                converted[part_name] = tensor._replace(
                    shape=(rows, *tensor.shape[1:]),
                    slice=AxisSlice(begin, begin + rows, step=1, axis=0),
                    codes_form=tensor.codes_form if has_codes else "",
                )
                begin += rows
        return converted


def _read_joined(parts: list[UnreadTensor]) -> Tensor:
    """Read the parts of a joined tensor, and return the joined tensor."""
    return torch.cat([part.read() for part in parts])


def _split_name(name: str) -> tuple[str, str, str]:
    """Split a parameter's name into the block, the module in it, and ".weight" or ".bias".

    For example, model.layers.0.mlp.up_proj.weight becomes ("model.layers.0.", "mlp.up_proj",
    ".weight").
    """
    path, _, kind = name.rpartition(".")
    block = _BLOCK.match(path)
    begin = block.end() if block else 0
    return path[:begin], path[begin:], f".{kind}"


class FusedExpertsRule(FileRule):
    """Files have two tensors for the matrices of all experts of a layer: gate with up, and down.

    Attributes:
        alternating_columns: True if matrices are transposed, and columns of gate and of up alternate;
            False if gate's rows are above up's.
    """

    def __init__(self, config: LlamaConfig):
        """Make the rule for a model of this shape."""
        self.alternating_columns = config.family.fused_experts == "columns"
        self._names = config.family.fused_names._asdict()
        # A name in files: the block, the tensor in it, and a suffix. _blocks has the codes of MXFP4.
        names = "|".join(map(re.escape, self._names.values()))
        self._pattern = re.compile(rf"(.+\.)({names})(_bias|_blocks)?")

    def to_files(self, tensors: Iterable[UnreadTensor]) -> Iterator[UnreadTensor]:
        """Yield a model's tensors with gate and up as one tensor."""
        # The gates that wait for their ups, by "weight" or "bias".
        gates = dict[str, UnreadTensor]()
        for tensor in tensors:
            match = _STACKED.fullmatch(tensor.name)
            if match is None:
                yield tensor
                continue
            block, projection, kind = match.groups()
            if projection == "gate":
                gates[kind] = tensor
                continue
            parts = [tensor]
            if projection == "up":
                parts = [gates.pop(kind), tensor]
                projection = "gate_up"
            suffix = "_bias" if kind == "bias" else ""
            like = _fuse([part.like for part in parts], self.alternating_columns)
            read = functools.partial(_read_fused, parts, self.alternating_columns)
            yield UnreadTensor(f"{block}{self._names[projection]}{suffix}", like, read)

    def to_decoder(self, stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
        """Return a file's tensors with gate and up as two tensors.

        Raises:
            InputRefused: a shape that cannot be halved, or MXFP4 whose codes and scales do not fit
                together.
        """
        alternating_columns = self.alternating_columns
        converted = dict[str, StoredTensor]()
        for name, tensor in stored.items():
            is_scales = alternating_columns and name.endswith("_scales")
            if is_scales and f"{name.removesuffix('_scales')}_blocks" in stored:
                # `_mxfp4_tensor` makes one tensor of the scales and the codes, which are in _blocks.
                continue
            match = self._pattern.fullmatch(name)
            # Only files with alternating columns have biases or blocks.
            if match is None or (match[3] and not alternating_columns):
                _add(converted, name, tensor)
                continue
            block, name_in_block, suffix = match.groups()
            kind = "bias" if suffix == "_bias" else "weight"
            tensor = tensor._replace(name_in_file=tensor.name_in_file or name)
            # The projections in this tensor: 0 or 1 is the half of the tensor that belongs to the
            # projection, and None is all of it.
            halves: dict[str, int | None] = {"down": None}
            if name_in_block == self._names["gate_up"]:
                halves = {"gate": 0, "up": 1}
            for half_projection, half in halves.items():
                take_half = functools.partial(
                    _take_half, half=half, alternating=alternating_columns
                )
                if suffix == "_blocks":
                    part = _mxfp4_tensor(name, tensor, stored, take_half)
                else:
                    # The axis that has gate and up: columns are the last axis, and rows are axis 1.
                    axis = len(tensor.shape) - 1 if alternating_columns else 1
                    part = take_half(tensor, axis)
                    if alternating_columns and kind == "weight":
                        # The file has [E, columns, rows], and the decoder has [E, rows, columns].
                        expert_count, *matrix_shape = part.shape
                        shape = (expert_count, *reversed(matrix_shape))
                        part = part._replace(shape=shape, transposed=True, codes_form="")
                _add(converted, f"{block}mlp.experts.{half_projection}_proj.{kind}", part)
        return converted


def _read_fused(parts: list[UnreadTensor], alternating_columns: bool) -> Tensor:
    """Read gate and up, or down alone, and return the tensor of the files."""
    return _fuse([part.read() for part in parts], alternating_columns)


def _fuse(parts: list[Tensor], alternating_columns: bool) -> Tensor:
    """Return the tensor of the files for all experts' gates and ups, or for their downs.

    Args:
        parts: the decoder's tensors, [E, R, ...] each: gate and up, or down alone.
        alternating_columns: see `FusedExpertsRule`.
    """
    if not alternating_columns:
        return torch.cat(parts, dim=1)
    # Here rows of gate and of up alternate. The transpose below makes columns of them.
    rows = torch.stack(parts, dim=2).flatten(1, 2)
    is_bias = rows.ndim == 2
    return rows if is_bias else rows.mT.contiguous()


def _add(tensors: dict[str, StoredTensor], name: str, tensor: StoredTensor) -> None:
    """Add a tensor, and raise InputRefused if another one has its name."""
    if name in tensors:
        first = tensors[name].name_in_file or name
        second = tensor.name_in_file or name
        raise InputRefused(f"{tensor.path}: {first} and {second} are one tensor of the model")
    tensors[name] = tensor


def _take_half(
    tensor: StoredTensor, axis: int, half: int | None, alternating: bool
) -> StoredTensor:
    """Return the part of a tensor that belongs to gate or up.

    Args:
        tensor: the tensor of gate and up, or of down.
        axis: the axis along which gate and up are joined.
        half: 0 for gate, 1 for up; None: the tensor is down's, and is returned as it is.
        alternating: whether gate and up alternate along the axis; if not, gate is the first half.
    """
    if half is None:
        return tensor
    if len(tensor.shape) <= axis or tensor.shape[axis] % 2:
        raise InputRefused(
            f"{tensor.path}: {tensor.name_in_file} has shape {list(tensor.shape)}, expected an even number on axis "
            f"{axis}"
        )
    size = tensor.shape[axis]
    shape = (*tensor.shape[:axis], size // 2, *tensor.shape[axis + 1 :])
    if alternating:
        part = AxisSlice(begin=half, end=size, step=2, axis=axis)
    else:
        middle = size // 2
        begin = 0 if half == 0 else middle
        end = middle if half == 0 else size
        part = AxisSlice(begin, end, step=1, axis=axis)
    # The codes of a half are not read on their own.
    return tensor._replace(shape=shape, slice=part, codes_form="")


def _mxfp4_tensor(
    name: str,
    blocks: StoredTensor,
    stored: dict[str, StoredTensor],
    take_half: Callable[[StoredTensor, int], StoredTensor],
) -> StoredTensor:
    """Return the description of one matrix of all experts that is stored in MXFP4.

    A file stores it as two tensors, of codes and of scales (`from_mxfp4`).

    Args:
        name: the name of the tensor of codes, which ends with _blocks.
        blocks: the tensor of codes.
        stored: the file's tensors, including the scales.
        take_half: returns the part of a tensor that belongs to the matrix, as `_take_half` does, for
            a tensor and an axis.
    """
    scales_name = f"{name.removesuffix('_blocks')}_scales"
    scales = stored.get(scales_name)
    if scales is None or scales.shape != blocks.shape[:-1] or blocks.shape[3:] != (16,):
        fault = "is missing" if scales is None else f"has shape {list(scales.shape)}"
        raise InputRefused(
            f"{blocks.path}: {name} has shape {list(blocks.shape)} and {scales_name} {fault}, expected [experts, rows, "
            "blocks, 16] and the same without the last axis"
        )
    for tensor_name, tensor in ((name, blocks), (scales_name, scales)):
        if tensor.dtype != "U8":
            raise InputRefused(
                f"{tensor.path}: {tensor_name} is stored as {tensor.dtype}, expected U8"
            )
    scales = scales._replace(name_in_file=scales.name_in_file or scales_name)
    codes = take_half(blocks, 1)  # axis 1 has the rows
    shape = (*codes.shape[:2], codes.shape[2] * 32)  # 32 numbers in a block
    # Gate and up are made of pieces of the same two tensors of the file. The pieces of gate must have
    # other names than those of up, so their slice is a part of the names.
    pieces = {f"{name} {codes.slice}": codes, f"{scales_name} {codes.slice}": take_half(scales, 1)}
    return StoredTensor(
        blocks.path, shape, "BF16", blocks.name_in_file, pieces=pieces, join=from_mxfp4
    )


def from_mxfp4(codes_and_scales: list[Tensor]) -> Tensor:
    """Return the numbers of a tensor in MXFP4, W = fp4[code] 2^(scale - 127), each exact in bf16.

    Each block of 32 numbers has one scale.

    Args:
        codes_and_scales: two tensors. The codes are [E, R, G, 16] uint8, where a byte has two codes
            of 4 bits, the first in its lower bits. The scales are [E, R, G] uint8.

    Returns:
        [E, R, 32 G] bf16. Experts are converted one at a time, because the intermediate tensors of
        all experts together would need several times the memory of the result.

    Source: Open Compute Project, "OCP Microscaling Formats (MX) Specification", version 1.0,
    sections 5.3 and 6.3.
    """
    codes, scales = codes_and_scales
    table = torch.tensor(_FP4_VALUES)
    out = torch.empty(*codes.shape[:2], codes.shape[2] * 32, dtype=torch.bfloat16)
    for expert in range(len(codes)):
        pairs = torch.stack([codes[expert] & 15, codes[expert] >> 4], -1).flatten(-2)
        factors = torch.exp2(scales[expert].float() - 127)
        out[expert] = (table[pairs.int()] * factors[..., None]).flatten(-2)
    return out


class SeparateExpertsRule(FileRule):
    """Files have a tensor for each matrix of each expert."""

    def __init__(self, config: LlamaConfig):
        """Make the rule for a model of this shape."""
        self.config = config

    def to_files(self, tensors: Iterable[UnreadTensor]) -> Iterator[UnreadTensor]:
        """Yield a model's tensors with one tensor for each matrix of each expert.

        A tensor of all experts is read once for all of them. It stays in memory until the next such
        tensor is read.
        """
        # The tensor of all experts that was read last, by its name.
        last_read = dict[str, Tensor]()
        for tensor in tensors:
            match = _STACKED.fullmatch(tensor.name)
            if match is None:
                yield tensor
                continue
            block, projection, kind = match.groups()
            for expert in range(len(tensor.like)):
                name = f"{block}mlp.experts.{expert}.{projection}_proj.{kind}"
                read = functools.partial(_read_expert, tensor, expert, last_read)
                yield UnreadTensor(name, tensor.like[expert], read)

    def to_decoder(self, stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
        """Return a file's tensors in the form of the decoder, with one tensor for all experts.

        Raises:
            InputRefused: an expert's matrix is missing, or differs from the first one's in shape or
                dtype.
        """
        converted = dict[str, StoredTensor]()
        # {name in the decoder of a tensor of all experts: {the expert's number: (the name in the file
        # of the expert's tensor, its description)}}
        stacks = dict[str, dict[int, tuple[str, StoredTensor]]]()
        for name, tensor in stored.items():
            match = _ONE_EXPERT.fullmatch(name)
            if match is None:
                converted[name] = tensor
            else:
                prefix, expert, matrix = match.groups()
                stacks.setdefault(prefix + matrix, {})[int(expert)] = name, tensor
        for stack_name, experts in stacks.items():
            if stack_name in converted:
                fused = converted[stack_name]
                raise InputRefused(
                    f"{fused.path}: {fused.name_in_file} is there, and tensors of each expert, too"
                )
            converted[stack_name] = self._stack(experts)
        return converted

    def _stack(self, experts: Mapping[int, tuple[str, StoredTensor]]) -> StoredTensor:
        """Return the description of one tensor for all experts.

        Args:
            experts: the name in the file and the tensor of each expert, by the expert's number.
        """
        count = self.config.num_experts
        first_name, first = experts[min(experts)]
        if len(experts) != count or max(experts) >= count:
            raise InputRefused(
                f"{first.path}: there are {len(experts)} tensors such as {first_name!r}, the last of expert "
                f"{max(experts)}, but num_experts = {count}"
            )
        for other_name, other in experts.values():
            if (other.shape, other.dtype) != (first.shape, first.dtype):
                raise InputRefused(
                    f"{other.path}: {other_name} has shape {list(other.shape)} and dtype {other.dtype}, but "
                    f"{first_name} {list(first.shape)} and {first.dtype}"
                )
        pieces = dict(experts[expert] for expert in range(count))
        forms = {piece.codes_form for piece in pieces.values()}
        form = forms.pop() if len(forms) == 1 else ""
        if not can_stack(form, math.prod(first.shape)):
            form = ""
        return StoredTensor(
            first.path, (count, *first.shape), first.dtype, pieces=pieces, codes_form=form
        )


def _read_expert(stack: UnreadTensor, expert: int, last_read: dict[str, Tensor]) -> Tensor:
    """Return an expert's matrix.

    Args:
        stack: the tensor of this matrix of all experts.
        expert: the expert's number.
        last_read: the tensor of all experts that was read last, by its name. If it is not the one that
            is needed, it is replaced.
    """
    if stack.name not in last_read:
        last_read.clear()
        last_read[stack.name] = stack.read()
    return last_read[stack.name][expert]
