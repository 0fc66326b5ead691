"""Tensors that hold gate and up of all of a layer's experts in one, as the files of some families have them.

By halves such a tensor is [E, 2 I, D], with gate's rows above up's. By columns it is [E, D, 2 I], with both in turns,
and it may be in MXFP4 (`Family.fused_experts`).

Shapes: E experts, I an expert's width, D hidden size, R rows of an expert's matrix, G blocks of 32 numbers of a row.
"""

import functools
import re
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from monograph.errors import InputRefused
from monograph.graph.lora import Plain
from monograph.model.files import Stored

STACK = re.compile(r"(.+\.mlp\.experts\.)(gate|up|down)_proj\.(weight|bias)")
_FUSED = re.compile(r"(.+\.mlp\.experts\.)(gate_up|down)_proj(_bias|_blocks)?")
# The numbers of MXFP4's codes: a sign, two bits of exponent and one of mantissa.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def fused(named: Iterable[Plain], columns: bool) -> Iterator[Plain]:
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
            like = _one([part.like for part in parts], columns)
            yield Plain(name, like, functools.partial(_read_one, parts, columns))


def _read_one(parts: list[Plain], columns: bool) -> Tensor:
    return _one([part.read() for part in parts], columns)


def _one(parts: list[Tensor], columns: bool) -> Tensor:
    """Return gate and up, or down alone, as a file has them."""
    if not columns:
        return torch.cat(parts, dim=1)
    rows = torch.stack(parts, dim=2).flatten(1, 2)
    return rows.mT.contiguous() if rows.ndim == 3 else rows


def split(stored: dict[str, Stored], columns: bool) -> dict[str, Stored]:
    """Return a file's tensors with those of `fused` taken apart.

    Raises:
        InputRefused: a shape that cannot be taken apart, or MXFP4 that is not whole.
    """
    found = dict[str, Stored]()
    for name, tensor in stored.items():
        if columns and name.endswith("_scales") and f"{name.removesuffix('_scales')}_blocks" in stored:
            continue  # read with its blocks
        if (match := _FUSED.fullmatch(name)) is None or (match[3] and not columns):
            _put(found, name, tensor)
            continue
        kind = "bias" if match[3] == "_bias" else "weight"
        tensor = tensor._replace(known_as=tensor.known_as or name)
        for part, begin in (("gate", 0), ("up", 1)) if match[2] == "gate_up" else (("down", -1),):
            taken = functools.partial(_half, begin=begin, columns=columns)
            if match[3] == "_blocks":
                made = _packed(name, tensor, stored, taken)
            else:
                made = taken(tensor, len(tensor.shape) - 1 if columns else 1)
                if columns and kind == "weight":
                    made = made._replace(shape=(*made.shape[:1], *made.shape[:0:-1]), transposed=True)
            _put(found, f"{match[1]}{part}_proj.{kind}", made)
    return found


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
    part = (begin, size, 2, axis) if columns else (begin * size // 2, (begin + 1) * size // 2, 1, axis)
    return tensor._replace(shape=shape, part=part)


def _packed(name: str, blocks: Stored, stored: dict[str, Stored], taken: Callable[[Stored, int], Stored]) -> Stored:
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
    """Return numbers in blocks of 32 with a common power of two, W = fp4[code] 2^(scale - 127), each exact in bf16.

    Args:
        codes_and_scales: [E, R, G, 16] uint8, two codes of 4 bits in each, the first in the lower bits; and [E, R, G]
            uint8.

    Returns:
        [E, R, 32 G] bf16, made expert by expert.

    Source: Open Compute Project, "OCP Microscaling Formats (MX) Specification", version 1.0, sections 5.3 and 6.3.
    """
    codes, scales = codes_and_scales
    table = torch.tensor(_FP4)
    out = torch.empty(*codes.shape[:2], codes.shape[2] * 32, dtype=torch.bfloat16)
    for expert in range(len(codes)):
        pairs = torch.stack([codes[expert] & 15, codes[expert] >> 4], -1).flatten(-2)
        factors = torch.exp2(scales[expert].float() - 127)
        out[expert] = (table[pairs.int()] * factors[..., None]).flatten(-2)
    return out
