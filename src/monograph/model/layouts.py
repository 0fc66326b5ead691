"""Tensors that families' files hold in other forms than the decoder: joined ones, and the matrices
of experts.

A joined tensor is several of the decoder's, one below another (`Family.joined`). The decoder's
tensors hold all experts' matrices; files hold each expert's own, or gate and up of all of a layer's
experts in one. By halves such a tensor is [E, 2 I, D], with gate's rows above up's. By columns it
is [E, D, 2 I], with both in turns, and it may be in MXFP4 (`Family.fused_experts`).

Each of these forms is a rule that is read in both directions, and a family's files have a list of
them.

Shapes: E experts, I an expert's width, D hidden size, R rows of an expert's matrix, G blocks of 32
numbers of a row.
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
# The numbers of MXFP4's codes: a sign, two bits of exponent and one of mantissa.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class FileRule(ABC):
    """A form in which files hold some of the decoder's tensors."""

    @abstractmethod
    def written(self, named: Iterable[Plain]) -> Iterator[Plain]:
        """Yield the decoder's tensors as files have them."""

    @abstractmethod
    def read(self, stored: dict[str, Stored]) -> dict[str, Stored]:
        """Return a file's tensors as the decoder's parameters; raises InputRefused if they have not
        this form.
        """


def rules_of(config: LlamaConfig) -> list[FileRule]:
    """Return the rules of a family's files, in the order in which they are followed in both
    directions.
    """
    family = config.family
    rules: list[FileRule] = [JoinedRule(config)] if family.joined else []
    if family.fused_experts:
        rules.append(FusedRule(columns=family.fused_experts == "columns"))
    if family.experts:  # transformers 5 reads and writes fused ones apart, too, if the model sees
        rules.append(ApartRule(config))
    return rules


def in_files(named: Iterable[Plain], config: LlamaConfig) -> Iterator[Plain]:
    """Return a model's tensors as its family's files have them."""
    tensors = iter(named)
    for rule in rules_of(config):
        tensors = rule.written(tensors)
    return tensors


def in_decoder(stored: dict[str, Stored], config: LlamaConfig) -> dict[str, Stored]:
    """Return a file's tensors as the decoder's parameters.

    Raises:
        InputRefused: tensors do not fit together.
    """
    for rule in rules_of(config):
        stored = rule.read(stored)
    return stored


class JoinedRule(FileRule):
    """Several of the decoder's tensors are one of a file's, one below another."""

    def __init__(self, config: LlamaConfig):
        """Take the model's shape."""
        self.config = config

    def written(self, named: Iterable[Plain]) -> Iterator[Plain]:
        """Yield a model's tensors as its family's files have them; a joined one comes where its
        last part came.
        """
        whole_of = {
            part: (name, parts)
            for name, parts in self.config.family.joined.items()
            for part in parts
        }
        waiting: dict[str, Plain] = {}
        for tensor in named:
            block, inner, kind = _place(tensor.name)
            if inner not in whole_of:
                yield tensor
                continue
            whole, parts = whole_of[inner]
            waiting[tensor.name] = tensor
            if inner == parts[-1]:
                taken = [waiting.pop(f"{block}{part}{kind}") for part in parts]
                like = torch.cat([each.like for each in taken])
                yield Plain(f"{block}{whole}{kind}", like, functools.partial(_below, taken))

    def read(self, stored: dict[str, Stored]) -> dict[str, Stored]:
        """Return a file's tensors as the decoder's parameters, each with its rows of a joined one.

        Raises:
            InputRefused: a joined tensor has not as many rows as its parts.
        """
        # The layers of a family that joins tensors are alike.
        shapes = layer_shapes(self.config, 0)
        found = dict[str, Stored]()
        for name, tensor in stored.items():
            block, inner, kind = _place(name)
            parts = self.config.family.joined.get(inner, ())
            sizes = [shapes[f"{part}{kind}"][0] for part in parts if f"{part}{kind}" in shapes]
            if not sizes:
                found[name] = tensor
                continue
            if tensor.shape[:1] != (sum(sizes),):
                raise InputRefused(
                    f"{tensor.path}: {name} has shape {list(tensor.shape)}, expected {' + '.join(map(str, sizes))} "
                    f"rows, those of {', '.join(parts)} by config.json"
                )
            begin = 0
            tensor = tensor._replace(known_as=tensor.known_as or name)
            for part, rows in zip(parts, sizes, strict=True):
                if (own := f"{block}{part}{kind}") in stored:
                    raise InputRefused(
                        f"{tensor.path}: {tensor.known_as} and {own} are one tensor of the model"
                    )
                shape = (rows, *tensor.shape[1:])
                found[f"{block}{part}{kind}"] = tensor._replace(
                    shape=shape, part=(begin, begin + rows, 1, 0)
                )
                begin += rows
        return found


def _below(parts: list[Plain]) -> Tensor:
    return torch.cat([part.read() for part in parts])


def _place(name: str) -> tuple[str, str, str]:
    """Return the block, the module in it, and ".weight" or ".bias" of a parameter's name."""
    module, _, kind = name.rpartition(".")
    inner = ".".join(module.split(".")[-2:])
    return module.removesuffix(inner), inner, f".{kind}"


class FusedRule(FileRule):
    """All experts' matrices of a layer are two tensors of a file, of which one has gate and up."""

    def __init__(self, columns: bool):
        """Take whether gate and up are columns in turns; else one's rows are above the other's."""
        self.columns = columns

    def written(self, named: Iterable[Plain]) -> Iterator[Plain]:
        """Yield a model's tensors with those of gate and up as one."""
        gates = dict[str, Plain]()
        for tensor in named:
            if (match := STACK.fullmatch(tensor.name)) is None:
                yield tensor
            elif match[2] == "gate":
                gates[match[3]] = tensor
            else:
                parts = [gates.pop(match[3]), tensor] if match[2] == "up" else [tensor]
                name = f"{match[1]}{'gate_up' if match[2] == 'up' else 'down'}_proj{'_bias' * (match[3] == 'bias')}"
                like = _one([part.like for part in parts], self.columns)
                yield Plain(name, like, functools.partial(_read_one, parts, self.columns))

    def read(self, stored: dict[str, Stored]) -> dict[str, Stored]:
        """Return a file's tensors with those of gate and up taken apart.

        Raises:
            InputRefused: a shape that cannot be taken apart, or MXFP4 that is not whole.
        """
        columns = self.columns
        found = dict[str, Stored]()
        for name, tensor in stored.items():
            if (
                columns
                and name.endswith("_scales")
                and f"{name.removesuffix('_scales')}_blocks" in stored
            ):
                continue  # read with its blocks
            if (match := _FUSED.fullmatch(name)) is None or (match[3] and not columns):
                _put(found, name, tensor)
                continue
            kind = "bias" if match[3] == "_bias" else "weight"
            tensor = tensor._replace(known_as=tensor.known_as or name)
            for part, begin in (
                (("gate", 0), ("up", 1)) if match[2] == "gate_up" else (("down", -1),)
            ):
                taken = functools.partial(_half, begin=begin, columns=columns)
                if match[3] == "_blocks":
                    made = _packed(name, tensor, stored, taken)
                else:
                    made = taken(tensor, len(tensor.shape) - 1 if columns else 1)
                    if columns and kind == "weight":
                        made = made._replace(
                            shape=(*made.shape[:1], *made.shape[:0:-1]), transposed=True
                        )
                _put(found, f"{match[1]}{part}_proj.{kind}", made)
        return found


def _read_one(parts: list[Plain], columns: bool) -> Tensor:
    return _one([part.read() for part in parts], columns)


def _one(parts: list[Tensor], columns: bool) -> Tensor:
    """Return gate and up, or down alone, as a file has them."""
    if not columns:
        return torch.cat(parts, dim=1)
    rows = torch.stack(parts, dim=2).flatten(1, 2)
    return rows.mT.contiguous() if rows.ndim == 3 else rows


def _put(found: dict[str, Stored], name: str, tensor: Stored) -> None:
    if name in found:
        both = " and ".join(each.known_as or name for each in (found[name], tensor))
        raise InputRefused(f"{tensor.path}: {both} are one tensor of the model")
    found[name] = tensor


def _half(tensor: Stored, axis: int, begin: int, columns: bool) -> Stored:
    """Return the gate's places of an axis (begin = 0), those of up (1), or all of them (-1)."""
    if begin < 0:
        return tensor
    if len(tensor.shape) <= axis or tensor.shape[axis] % 2:
        actual = f"{tensor.known_as} has shape {list(tensor.shape)}"
        raise InputRefused(f"{tensor.path}: {actual}, expected an even number on axis {axis}")
    size = tensor.shape[axis]
    shape = (*tensor.shape[:axis], size // 2, *tensor.shape[axis + 1 :])
    part = (
        (begin, size, 2, axis) if columns else (begin * size // 2, (begin + 1) * size // 2, 1, axis)
    )
    return tensor._replace(shape=shape, part=part)


def _packed(
    name: str, blocks: Stored, stored: dict[str, Stored], taken: Callable[[Stored, int], Stored]
) -> Stored:
    """Return experts' matrices in MXFP4, whose codes and scales are two tensors of a file."""
    scales_name = f"{name.removesuffix('_blocks')}_scales"
    scales = stored.get(scales_name)
    if scales is None or scales.shape != blocks.shape[:-1] or blocks.shape[3:] != (16,):
        there = "is missing" if scales is None else f"has shape {list(scales.shape)}"
        raise InputRefused(
            f"{blocks.path}: {name} has shape {list(blocks.shape)} and {scales_name} {there}, expected [experts, rows, "
            "blocks, 16] and the same without the last axis"
        )
    for each_name, each in ((name, blocks), (scales_name, scales)):
        if each.dtype != "U8":
            raise InputRefused(f"{each.path}: {each_name} is stored as {each.dtype}, expected U8")
    scales = scales._replace(known_as=scales.known_as or scales_name)
    codes = taken(blocks, 1)
    shape = (*codes.shape[:2], codes.shape[2] * 32)
    # Gate and up are read from the same two tensors, so their pieces have names of their own.
    pieces = {f"{name} {codes.part}": codes, f"{scales_name} {codes.part}": taken(scales, 1)}
    return Stored(blocks.path, shape, "BF16", blocks.known_as, pieces=pieces, join=from_mxfp4)


def from_mxfp4(codes_and_scales: list[Tensor]) -> Tensor:
    """Return numbers in blocks of 32 with a common power of two, W = fp4[code] 2^(scale - 127),
    each exact in bf16.

    Args:
        codes_and_scales: [E, R, G, 16] uint8, two codes of 4 bits in each, the first in the lower
            bits; and [E, R, G] uint8.

    Returns:
        [E, R, 32 G] bf16, made expert by expert.

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
    """Each expert's matrices are tensors of their own."""

    def __init__(self, config: LlamaConfig):
        """Take the model's shape."""
        self.config = config

    def written(self, named: Iterable[Plain]) -> Iterator[Plain]:
        """Yield a model's tensors with each expert's matrices as tensors of their own.

        A stack that is read stays in memory until another one is.
        """
        last = dict[str, Tensor]()
        for tensor in named:
            if (match := STACK.fullmatch(tensor.name)) is None:
                yield tensor
                continue
            for expert in range(len(tensor.like)):
                read = functools.partial(_expert, tensor, expert, last)
                yield Plain(
                    f"{match[1]}{expert}.{match[2]}_proj.{match[3]}", tensor.like[expert], read
                )

    def read(self, stored: dict[str, Stored]) -> dict[str, Stored]:
        """Return a file's tensors as the decoder's parameters, in which all experts' matrices are
        one.

        Raises:
            InputRefused: an expert's matrix is missing, or differs from the first one's in shape or
                dtype.
        """
        found = dict[str, Stored]()
        stacks = dict[str, dict[int, tuple[str, Stored]]]()
        for name, tensor in stored.items():
            if self.config.family.experts and (match := _EXPERT.fullmatch(name)):
                stacks.setdefault(match[1] + match[3], {})[int(match[2])] = name, tensor
            else:
                found[name] = tensor
        for name, experts in stacks.items():
            if name in found:
                whole = found[name]
                raise InputRefused(
                    f"{whole.path}: {whole.known_as} is there, and tensors of each expert, too"
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


def _expert(stack: Plain, expert: int, last: dict[str, Tensor]) -> Tensor:
    if stack.name not in last:
        last.clear()
        last[stack.name] = stack.read()
    return last[stack.name][expert]
