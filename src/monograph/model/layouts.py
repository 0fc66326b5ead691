"""Convert between the decoder's tensors and the forms in which files of some families hold them.

Files differ from the decoder in two ways. Some join several of the decoder's tensors into one, in
which the rows of one tensor are below those of another (`Family.joined`). And the decoder has one
tensor for the matrices of all experts of a layer, while files have a tensor for each expert, or one
tensor for gate and up of all experts (`Family.fused_experts`). The latter is [E, 2 I, D] with
"halves", where gate's rows are above up's. It is [E, D, 2 I] with "columns", where columns of gate
and of up alternate, and it may then be in MXFP4.

Each form is a rule with both directions, and each family has a list of rules for its files.

Shapes: E experts, I an expert's width, D hidden size, R rows of an expert's matrix, G blocks of 32
numbers in a row.
"""

import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from monograph.errors import InputRefused
from monograph.graph.lora import Plain
from monograph.model.config import LlamaConfig
from monograph.model.files import Stored
from monograph.model.parameters import layer_shapes

_EXPERT = re.compile(r"(.+\.mlp\.experts\.)(0|[1-9]\d{0,8})\.(\w+_proj\.weight)")
STACK = re.compile(r"(.+\.mlp\.experts\.)(gate|up|down)_proj\.(weight|bias)")
_FUSED = re.compile(r"(.+\.mlp\.experts\.)(gate_up|down)_proj(_bias|_blocks)?")
# The numbers of MXFP4's codes, which have a sign, two bits of exponent and one of mantissa.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class FileRule(ABC):
    """A form in which files hold some of the decoder's tensors."""

    @abstractmethod
    def written(self, named: Iterable[Plain]) -> Iterator[Plain]:
        """Yield the decoder's tensors in the form of the files."""

    @abstractmethod
    def read(self, stored: dict[str, Stored]) -> dict[str, Stored]:
        """Return a file's tensors in the form of the decoder.

        Raises:
            InputRefused: the tensors do not have this form.
        """


def rules_of(config: LlamaConfig) -> list[FileRule]:
    """Return the rules of a family's files. Both directions apply them in this order."""
    family = config.family
    rules: list[FileRule] = []
    if family.joined_layers:
        rules.append(JoinedRule(config))
    if family.fused_experts:
        rules.append(FusedRule(columns=family.fused_experts == "columns"))
    if family.expert_width_key:
        # Also after `FusedRule`: for models that also see images, transformers 5 reads and writes
        # a tensor for each expert, too.
        rules.append(ApartRule(config))
    return rules


def in_files(named: Iterable[Plain], config: LlamaConfig) -> Iterator[Plain]:
    """Return a model's tensors in the form of its family's files."""
    tensors = iter(named)
    for rule in rules_of(config):
        tensors = rule.written(tensors)
    return tensors


def in_decoder(stored: dict[str, Stored], config: LlamaConfig) -> dict[str, Stored]:
    """Return a file's tensors in the form of the decoder.

    Raises:
        InputRefused: tensors do not fit together.
    """
    for rule in rules_of(config):
        stored = rule.read(stored)
    return stored


class JoinedRule(FileRule):
    """Files join several of the decoder's tensors into one, in which their rows are in order."""

    def __init__(self, config: LlamaConfig):
        """Make the rule for a model of this shape."""
        self.config = config

    def written(self, named: Iterable[Plain]) -> Iterator[Plain]:
        """Yield a model's tensors in the form of the files.

        A joined tensor takes the place of its last part.
        """
        joined_and_parts = {
            part: (joined, parts)
            for joined, parts in self.config.family.joined_layers.items()
            for part in parts
        }
        waiting: dict[str, Plain] = {}
        for tensor in named:
            block, module, suffix = _split_name(tensor.name)
            if module not in joined_and_parts:
                yield tensor
                continue
            joined, parts = joined_and_parts[module]
            waiting[tensor.name] = tensor
            if module == parts[-1]:
                tensors = [waiting.pop(f"{block}{part}{suffix}") for part in parts]
                like = torch.cat([part.like for part in tensors])
                read = functools.partial(_read_joined, tensors)
                yield Plain(f"{block}{joined}{suffix}", like, read)

    def read(self, stored: dict[str, Stored]) -> dict[str, Stored]:
        """Return a file's tensors in the form of the decoder.

        A part of a joined tensor is described by its rows there.

        Raises:
            InputRefused: a joined tensor does not have as many rows as its parts together, or a file
                has both a joined tensor and one of its parts.
        """
        # All layers have the same shapes in a family that joins tensors.
        shapes = layer_shapes(self.config, 0)
        found = dict[str, Stored]()
        for name, tensor in stored.items():
            block, module, suffix = _split_name(name)
            parts = self.config.family.joined_layers.get(module, ())
            row_counts = [
                shapes[f"{part}{suffix}"][0] for part in parts if f"{part}{suffix}" in shapes
            ]
            if not row_counts:
                found[name] = tensor
                continue
            if tensor.shape[:1] != (sum(row_counts),):
                raise InputRefused(
                    f"{tensor.path}: {name} has shape {list(tensor.shape)}, expected "
                    f"{' + '.join(map(str, row_counts))} rows, those of {', '.join(parts)} by config.json"
                )
            tensor = tensor._replace(known_as=tensor.known_as or name)
            begin = 0
            for part, rows in zip(parts, row_counts, strict=True):
                part_name = f"{block}{part}{suffix}"
                if part_name in stored:
                    raise InputRefused(
                        f"{tensor.path}: {tensor.known_as} and {part_name} are one tensor of the model"
                    )
                found[part_name] = tensor._replace(
                    shape=(rows, *tensor.shape[1:]), part=(begin, begin + rows, 1, 0)
                )
                begin += rows
        return found


def _read_joined(parts: list[Plain]) -> Tensor:
    return torch.cat([part.read() for part in parts])


def _split_name(name: str) -> tuple[str, str, str]:
    """Return the block, the module in it, and ".weight" or ".bias" of a parameter's name."""
    path, _, kind = name.rpartition(".")
    module = ".".join(path.split(".")[-2:])
    return path.removesuffix(module), module, f".{kind}"


class FusedRule(FileRule):
    """Files have two tensors for all experts' matrices of a layer: gate with up, and down."""

    def __init__(self, columns: bool):
        """Make the rule.

        Args:
            columns: True if columns of gate and of up alternate, False if gate's rows are above
                up's.
        """
        self.columns = columns

    def written(self, named: Iterable[Plain]) -> Iterator[Plain]:
        """Yield a model's tensors with gate and up as one tensor."""
        gates = dict[str, Plain]()
        for tensor in named:
            match = STACK.fullmatch(tensor.name)
            if match is None:
                yield tensor
                continue
            experts, projection, kind = match.groups()
            if projection == "gate":
                gates[kind] = tensor
                continue
            parts = [tensor]
            if projection == "up":
                parts = [gates.pop(kind), tensor]
                projection = "gate_up"
            suffix = "_bias" if kind == "bias" else ""
            like = _fuse([part.like for part in parts], self.columns)
            read = functools.partial(_read_fused, parts, self.columns)
            yield Plain(f"{experts}{projection}_proj{suffix}", like, read)

    def read(self, stored: dict[str, Stored]) -> dict[str, Stored]:
        """Return a file's tensors with gate and up as two tensors.

        Raises:
            InputRefused: a shape that cannot be halved, or MXFP4 whose codes and scales do not fit
                together.
        """
        columns = self.columns
        found = dict[str, Stored]()
        for name, tensor in stored.items():
            is_scales = columns and name.endswith("_scales")
            if is_scales and f"{name.removesuffix('_scales')}_blocks" in stored:
                continue  # They are read with their blocks.
            match = _FUSED.fullmatch(name)
            if match is None or (match[3] and not columns):
                _add(found, name, tensor)
                continue
            experts, projection, suffix = match.groups()
            kind = "bias" if suffix == "_bias" else "weight"
            tensor = tensor._replace(known_as=tensor.known_as or name)
            halves: dict[str, int | None] = {"down": None}
            if projection == "gate_up":
                halves = {"gate": 0, "up": 1}
            for part_projection, half in halves.items():
                take_half = functools.partial(_half, half=half, columns=columns)
                if suffix == "_blocks":
                    part = _read_mxfp4(name, tensor, stored, take_half)
                else:
                    part = take_half(tensor, len(tensor.shape) - 1 if columns else 1)
                    if columns and kind == "weight":
                        # The decoder has rows and columns in the other order.
                        shape = (*part.shape[:1], *part.shape[:0:-1])
                        part = part._replace(shape=shape, transposed=True)
                _add(found, f"{experts}{part_projection}_proj.{kind}", part)
        return found


def _read_fused(parts: list[Plain], columns: bool) -> Tensor:
    return _fuse([part.read() for part in parts], columns)


def _fuse(parts: list[Tensor], columns: bool) -> Tensor:
    """Return gate and up, or down alone, in the form of the files."""
    if not columns:
        return torch.cat(parts, dim=1)
    rows = torch.stack(parts, dim=2).flatten(1, 2)
    # A bias has no columns.
    return rows.mT.contiguous() if rows.ndim == 3 else rows


def _add(found: dict[str, Stored], name: str, tensor: Stored) -> None:
    """Add a tensor, and raise InputRefused if another one has its name."""
    if name in found:
        first = found[name].known_as or name
        second = tensor.known_as or name
        raise InputRefused(f"{tensor.path}: {first} and {second} are one tensor of the model")
    found[name] = tensor


def _half(tensor: Stored, axis: int, half: int | None, columns: bool) -> Stored:
    """Return the part of a tensor that has gate (half = 0), up (1) or down (None) on an axis."""
    if half is None:
        return tensor
    if len(tensor.shape) <= axis or tensor.shape[axis] % 2:
        raise InputRefused(
            f"{tensor.path}: {tensor.known_as} has shape {list(tensor.shape)}, expected an even number on axis {axis}"
        )
    size = tensor.shape[axis]
    shape = (*tensor.shape[:axis], size // 2, *tensor.shape[axis + 1 :])
    if columns:
        part = (half, size, 2, axis)
    else:
        part = (half * size // 2, (half + 1) * size // 2, 1, axis)
    return tensor._replace(shape=shape, part=part)


def _read_mxfp4(
    name: str, blocks: Stored, stored: dict[str, Stored], take_half: Callable[[Stored, int], Stored]
) -> Stored:
    """Return experts' matrices in MXFP4.

    Args:
        name: the name of the tensor of codes.
        blocks: the tensor of codes.
        stored: the file's tensors, including the scales.
        take_half: returns gate, up or down of a tensor, see `_half`.
    """
    scales_name = f"{name.removesuffix('_blocks')}_scales"
    scales = stored.get(scales_name)
    if scales is None or scales.shape != blocks.shape[:-1] or blocks.shape[3:] != (16,):
        found = "is missing" if scales is None else f"has shape {list(scales.shape)}"
        raise InputRefused(
            f"{blocks.path}: {name} has shape {list(blocks.shape)} and {scales_name} {found}, expected [experts, rows, "
            "blocks, 16] and the same without the last axis"
        )
    for tensor_name, tensor in ((name, blocks), (scales_name, scales)):
        if tensor.dtype != "U8":
            raise InputRefused(
                f"{tensor.path}: {tensor_name} is stored as {tensor.dtype}, expected U8"
            )
    scales = scales._replace(known_as=scales.known_as or scales_name)
    codes = take_half(blocks, 1)
    # A block has 32 numbers.
    shape = (*codes.shape[:2], codes.shape[2] * 32)
    # Gate and up are pieces of the same two tensors, so the pieces' names also say which part.
    pieces = {f"{name} {codes.part}": codes, f"{scales_name} {codes.part}": take_half(scales, 1)}
    return Stored(blocks.path, shape, "BF16", blocks.known_as, pieces=pieces, join=from_mxfp4)


def from_mxfp4(codes_and_scales: list[Tensor]) -> Tensor:
    """Return the numbers of a tensor in MXFP4, W = fp4[code] 2^(scale - 127), each exact in bf16.

    Each block of 32 numbers has one scale.

    Args:
        codes_and_scales: two tensors. The codes are [E, R, G, 16] uint8, where a byte has two codes
            of 4 bits, the first in its lower bits. The scales are [E, R, G] uint8.

    Returns:
        [E, R, 32 G] bf16. Beside it, the memory is that of one expert.

    Source: Open Compute Project, "OCP Microscaling Formats (MX) Specification", version 1.0,
    sections 5.3 and 6.3.
    """
    codes, scales = codes_and_scales
    table = torch.tensor(_FP4)
    out = torch.empty(*codes.shape[:2], codes.shape[2] * 32, dtype=torch.bfloat16)
    for expert in range(len(codes)):
        pairs = torch.stack([codes[expert] & 15, codes[expert] >> 4], -1).flatten(-2)
        factors = torch.exp2(scales[expert].float() - 127)
        out[expert] = (table[pairs.int()] * factors[..., None]).flatten(-2)
    return out


class ApartRule(FileRule):
    """Files have a tensor for each matrix of each expert."""

    def __init__(self, config: LlamaConfig):
        """Make the rule for a model of this shape."""
        self.config = config

    def written(self, named: Iterable[Plain]) -> Iterator[Plain]:
        """Yield a model's tensors with one tensor for each matrix of each expert.

        The tensor of all experts that was read last stays in memory until another one is read.
        """
        last_read = dict[str, Tensor]()
        for tensor in named:
            match = STACK.fullmatch(tensor.name)
            if match is None:
                yield tensor
                continue
            experts, projection, kind = match.groups()
            for expert in range(len(tensor.like)):
                name = f"{experts}{expert}.{projection}_proj.{kind}"
                read = functools.partial(_read_expert, tensor, expert, last_read)
                yield Plain(name, tensor.like[expert], read)

    def read(self, stored: dict[str, Stored]) -> dict[str, Stored]:
        """Return a file's tensors in the form of the decoder, with one tensor for all experts.

        Raises:
            InputRefused: an expert's matrix is missing, or differs from the first one's in shape or
                dtype.
        """
        found = dict[str, Stored]()
        # By the name of the decoder's tensor: each expert's tensor with its name in the file.
        stacks = dict[str, dict[int, tuple[str, Stored]]]()
        for name, tensor in stored.items():
            match = _EXPERT.fullmatch(name) if self.config.family.expert_width_key else None
            if match is None:
                found[name] = tensor
            else:
                experts = stacks.setdefault(match[1] + match[3], {})
                experts[int(match[2])] = name, tensor
        for name, experts in stacks.items():
            if name in found:
                fused = found[name]
                raise InputRefused(
                    f"{fused.path}: {fused.known_as} is there, and tensors of each expert, too"
                )
            first_name, first = experts[min(experts)]
            if len(experts) != self.config.num_experts or max(experts) >= self.config.num_experts:
                raise InputRefused(
                    f"{first.path}: there are {len(experts)} tensors such as {first_name!r}, the last of expert "
                    f"{max(experts)}, but num_experts = {self.config.num_experts}"
                )
            for other_name, other in experts.values():
                if (other.shape, other.dtype) != (first.shape, first.dtype):
                    raise InputRefused(
                        f"{other.path}: {other_name} has shape {list(other.shape)} and dtype {other.dtype}, but "
                        f"{first_name} {list(first.shape)} and {first.dtype}"
                    )
            of_stack = dict(experts[expert] for expert in range(self.config.num_experts))
            found[name] = Stored(
                first.path, (self.config.num_experts, *first.shape), first.dtype, pieces=of_stack
            )
        return found


def _read_expert(stack: Plain, expert: int, last_read: dict[str, Tensor]) -> Tensor:
    """Return an expert's matrix. `last_read` keeps the tensor of all experts for the next expert."""
    if stack.name not in last_read:
        last_read.clear()
        last_read[stack.name] = stack.read()
    return last_read[stack.name][expert]
