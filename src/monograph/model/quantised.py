"""Read weights that files have in few bits, of the programs that `monograph.model.quantisation` names.

A quantised weight is several tensors of the files: codes, scales, and what describes them. Here they become one
`StoredTensor`, which dequantises the weight when it is read. No numbers are read before, except the descriptions of
4-bit weights. The dequantised weight is computed in fp32 and rounded once to the dtype that the folder's largest
other tensor has, which is usually the embedding.

Shapes: N outputs, K inputs, C blocks of S numbers, G groups of blocks whose scales share a scale.

Sources: Dettmers et al. 2023, "QLoRA", arXiv 2305.14314, section 3, for 4 bits and their doubly quantised scales;
Dettmers et al. 2022, "LLM.int8()", arXiv 2208.07339, section 2.1; DeepSeek-AI 2024, "DeepSeek-V3", arXiv 2412.19437,
section 3.3.2, for scales of blocks; and the names that bitsandbytes 0.50, transformers 5 and compressed-tensors 0.20
give to tensors.
"""

import functools
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from monograph.errors import InputRefused
from monograph.graph.stored_codes import BLOCK, StoredCodes
from monograph.model.files import DTYPES, StoredTensor, read_tensors
from monograph.model.quantisation import Quantisation

# The name of the tensor that describes a 4-bit weight. The groups are the weight's name and the kind of codes.
_STATE = re.compile(r"(.+)\.quant_state\.bitsandbytes__(nf4|fp4)")
_MAX_STATE_BYTES = 4096  # such a description has about 150
_BYTE_DTYPES = ("F8_E4M3", "F8_E5M2", "I8")  # of codes that have a byte each
_NUMBERS_AT_ONCE = 1 << 22  # that are dequantised at once, so that fp32 copies stay small
_ITEM_BYTES = {"U8": 1, "I8": 1, "BF16": 2, "F16": 2, "F32": 4, "F64": 8}
# Endings of the names of scales that weights of 8 bits are multiplied by.
_SCALES = ("_scale_inv", "_scale")
# Endings of the names of all tensors that only describe a quantised weight.
_DESCRIPTIONS = (*_SCALES, ".SCB", ".absmax", ".nested_absmax", ".quant_map", ".nested_quant_map")
# Tensors next to a weight of 8 bits that only say how its inputs were rounded.
_INPUT_SCALES = ("input_scale", "activation_scale", "weight_format")


def fold(
    stored: Mapping[str, StoredTensor], quantisation: Quantisation | None
) -> dict[str, StoredTensor]:
    """Return a folder's tensors with one tensor in place of those that are a quantised weight together.

    Args:
        stored: the folder's tensors, with the names that they have in the files, except for prefixes.
        quantisation: what config.json says of them.

    Raises:
        InputRefused: a part of a quantised weight is missing, or has a wrong shape or dtype. The message has
            its name.
    """
    if (
        quantisation is None or quantisation.format == "mxfp4"
    ):  # a `FileRule` of its family reads the latter
        return dict(stored)
    dtype = _dtype_of_others(stored)
    find = {"4bit": _four_bit_weights, "int8": _int8_weights, "scaled": _scaled_weights}
    weights = find[quantisation.format](stored, dtype, quantisation)
    parts = {name for weight in weights.values() for name in weight.pieces}
    kept = dict[str, StoredTensor]()
    for name, tensor in stored.items():
        if name in weights:
            kept[name] = weights[name]
        elif name not in parts and not name.endswith(_INPUT_SCALES):
            kept[name] = tensor
    for name, tensor in kept.items():
        if tensor.dtype in (*_BYTE_DTYPES, "U8"):
            raise InputRefused(
                f"{tensor.path}: {_name(name, tensor)} is {tensor.dtype}, and no scales of {quantisation.label} belong "
                "to it: the folder is not complete"
            )
    return kept


def _dtype_of_others(stored: Mapping[str, StoredTensor]) -> str:
    """Return the dtype of the largest tensor that is not quantised, by its name in safetensors."""
    sizes = {
        (math.prod(tensor.shape), tensor.dtype)
        for name, tensor in stored.items()
        if tensor.dtype in DTYPES and not name.endswith(_DESCRIPTIONS)
    }
    return max(sizes, default=(0, "BF16"))[1]


def _name(name: str, tensor: StoredTensor) -> str:
    """Return the name that a tensor has in its file."""
    return tensor.name_in_file or name


def _described(name: str, tensor: StoredTensor) -> str:
    """Return the beginning of an error about a tensor: its file, its name, its dtype and its shape."""
    return f"{tensor.path}: {_name(name, tensor)} is {tensor.dtype} of shape {list(tensor.shape)}"


# ---------------------------------------------------------------------------------------- 4 bits


class _State(NamedTuple):
    """The description of a 4-bit weight.

    Attributes:
        shape: the weight's shape.
        block: S.
        group: blocks of a group; 0: the scales are not quantised.
        offset: the number that was subtracted from scales before they were quantised.
    """

    shape: tuple[int, ...]
    block: int
    group: int
    offset: float


def _four_bit_weights(
    stored: Mapping[str, StoredTensor], dtype: str, _quantisation: Quantisation
) -> dict[str, StoredTensor]:
    """Return the weights of bitsandbytes in 4 bits, by name; see `fold`."""
    described = {match[1]: name for name in stored if (match := _STATE.fullmatch(name))}
    states = _read_states({name: stored[name] for name in described.values()})
    return {
        weight: _four_bit_weight(weight, states[state_name], stored, state_name, dtype)
        for weight, state_name in described.items()
    }


def _read_states(headers: dict[str, StoredTensor]) -> dict[str, _State]:
    """Return the descriptions of 4-bit weights, by the names of the tensors that have them."""
    for name, header in headers.items():
        if header.dtype != "U8" or len(header.shape) != 1 or header.shape[0] > _MAX_STATE_BYTES:
            raise InputRefused(
                f"{_described(name, header)}, expected at most {_MAX_STATE_BYTES} bytes, U8"
            )
    contents = read_tensors(headers, None)
    return {
        name: _parsed_state(bytes(content.tolist()), headers[name].path, _name(name, headers[name]))
        for name, content in contents.items()
    }


def _parsed_state(content: bytes, path: Path, name: str) -> _State:
    """Return the description in a tensor's bytes, which are JSON.

    Raises:
        InputRefused: a value is missing or wrong.
    """
    try:
        values: Any = json.loads(content)
    except (ValueError, RecursionError):
        raise InputRefused(f"{path}: {name} is not JSON: the folder is damaged") from None
    if not isinstance(values, dict):
        raise InputRefused(f"{path}: {name} is not a table: the folder is damaged")
    shape = values.get("shape")
    block = values.get("blocksize")
    group = values.get("nested_blocksize", 0)
    offset = values.get("nested_offset", 0.0)
    has_shape = (
        isinstance(shape, list)
        and 2 <= len(shape) <= 3
        and all(type(size) is int and 1 <= size < 2**31 for size in shape)
    )
    has_sizes = type(block) is int and 1 <= block <= 2**20
    has_sizes = has_sizes and type(group) is int and 0 <= group <= 2**20
    has_offset = type(offset) in (int, float) and abs(offset) <= torch.finfo(torch.float32).max
    if not isinstance(shape, list) or not (has_shape and has_sizes and has_offset):
        raise InputRefused(
            f"{path}: {name} says shape = {shape!r}, blocksize = {block!r}, nested_blocksize = {group!r}, "
            f"nested_offset = {offset!r}; expected two or three sizes, two whole numbers and a number"
        )
    return _State(tuple(shape), block, group, float(offset))


def _four_bit_weight(
    weight: str, state: _State, stored: Mapping[str, StoredTensor], state_name: str, dtype: str
) -> StoredTensor:
    """Return the description of a 4-bit weight, which is made of its codes and scales."""
    count = math.prod(state.shape)
    blocks = math.ceil(count / state.block)
    is_nested = state.group > 0
    wanted = {
        weight: (None, math.ceil(count / 2)),
        f"{weight}.absmax": ("U8" if is_nested else "F32", blocks),
        f"{weight}.quant_map": ("F32", 16),
    }
    if is_nested:
        wanted[f"{weight}.nested_absmax"] = ("F32", math.ceil(blocks / state.group))
        wanted[f"{weight}.nested_quant_map"] = ("F32", 256)
    for name, (part_dtype, numbers) in wanted.items():
        if part_dtype is None:
            _require_bytes(name, numbers, stored, state_name)
        else:
            _require(name, part_dtype, (numbers,), stored, state_name)
    pieces = {name: stored[name] for name in wanted}
    # The description is a piece, too, so that it is no tensor of its own. It is not read again.
    pieces[state_name] = stored[state_name]
    has_codes = state.block % BLOCK == 0
    return StoredTensor(
        stored[weight].path,
        state.shape,
        dtype,
        _name(weight, stored[weight]),
        pieces=pieces,
        join=functools.partial(from_four_bits, state, DTYPES[dtype]),
        codes_form="nf4" if has_codes else "",
        read_codes=functools.partial(_codes_of_four_bits, state) if has_codes else None,
    )


def _require_bytes(name: str, count: int, stored: Mapping[str, StoredTensor], owner: str) -> None:
    """Require a tensor of so many bytes, of any dtype: bitsandbytes may store codes as other numbers."""
    tensor = stored.get(name)
    if tensor is None:
        _refuse_missing(name, stored, owner)
    itemsize = _ITEM_BYTES.get(tensor.dtype, 0)
    if math.prod(tensor.shape) * itemsize != count:
        raise InputRefused(
            f"{_described(name, tensor)}, expected {count} bytes by {_name(owner, stored[owner])}"
        )


def _require(
    name: str, dtype: str, shape: tuple[int, ...], stored: Mapping[str, StoredTensor], owner: str
) -> None:
    """Require a tensor of this dtype and shape, which the tensor `owner` needs."""
    tensor = stored.get(name)
    if tensor is None:
        _refuse_missing(name, stored, owner)
    if tensor.dtype != dtype or tensor.shape != shape:
        raise InputRefused(
            f"{_described(name, tensor)}, expected {dtype} of shape {list(shape)} by {_name(owner, stored[owner])}"
        )


def _refuse_missing(name: str, stored: Mapping[str, StoredTensor], owner: str) -> NoReturn:
    """Raise InputRefused for a tensor that is missing, and that the tensor `owner` needs."""
    tensor = stored[owner]
    raise InputRefused(
        f"{tensor.path}: {name} is missing, which {_name(owner, tensor)} needs: the folder is not complete"
    )


def from_four_bits(state: _State, dtype: torch.dtype, parts: list[Tensor]) -> Tensor:
    """Return a dequantised weight in 4 bits.

        W[i] = map[code[i]] scale[c],          block c is S consecutive numbers i of the flattened weight
        scale[c] = absmax[c],                  or, if scales are quantised,
        scale[c] = nested_map[absmax[c]] nested_absmax[g] + offset,      group g is consecutive blocks c

    Args:
        state: the description.
        dtype: the dtype of the result; the equations are computed in fp32.
        parts: the codes, two in a byte, the first in the upper bits; absmax [C]; map [16]; and
            nested_absmax [G] and nested_map [256] if scales are quantised.
    """
    codes, table = _bytes(parts[0]), parts[2]
    scale_C = _scales_of_four_bits(state, parts)
    count = math.prod(state.shape)
    weight = torch.empty(count, dtype=dtype)
    blocks_at_once = 2 * max(
        1, _NUMBERS_AT_ONCE // (2 * state.block)
    )  # even, so that no byte is cut in two
    for first in range(0, len(scale_C), blocks_at_once):
        begin = first * state.block
        end = min(begin + blocks_at_once * state.block, count)
        pairs = codes[begin // 2 : -(-end // 2)]
        numbers = table[torch.stack([pairs >> 4, pairs & 15], -1).flatten().int()][: end - begin]
        scales = scale_C[first : first + blocks_at_once].repeat_interleave(state.block)
        weight[begin:end] = numbers * scales[: end - begin]
    return weight.view(state.shape)


def _scales_of_four_bits(state: _State, parts: list[Tensor]) -> Tensor:
    """Return the scales of blocks, [C] fp32; `parts` are those of `from_four_bits`."""
    absmax_C = parts[1]
    if not state.group:
        return absmax_C.clone()  # since the file may be mapped
    nested_absmax_G, nested_map = parts[3], parts[4]
    group_scale_C = nested_absmax_G.repeat_interleave(state.group)[: len(absmax_C)]
    return nested_map[absmax_C.int()] * group_scale_C + state.offset


def _codes_of_four_bits(state: _State, parts: list[Tensor]) -> StoredCodes:
    """Return the codes of a 4-bit weight whose blocks have a multiple of 64 numbers."""
    count = math.prod(state.shape)
    scale_C = _scales_of_four_bits(state, parts).repeat_interleave(state.block // BLOCK)
    return StoredCodes(_bytes(parts[0]), scale_C[: math.ceil(count / BLOCK)], parts[2])


def _bytes(codes: Tensor) -> Tensor:
    """Return codes, which may be stored as other numbers, as bytes, [N K / 2] uint8."""
    return codes.reshape(-1).view(torch.uint8)


# ---------------------------------------------------------------------------------------- 8 bits


def _int8_weights(
    stored: Mapping[str, StoredTensor], dtype: str, quantisation: Quantisation
) -> dict[str, StoredTensor]:
    """Return the weights of bitsandbytes in 8 bits, by name; see `fold`."""
    weights = dict[str, StoredTensor]()
    _require_row_order(stored)
    for name, tensor in stored.items():
        if tensor.dtype != "I8":
            continue
        scales_name = f"{name.removesuffix('weight')}SCB"
        _require(scales_name, "F32", tensor.shape[:-1], stored, name)
        pieces = {name: tensor, scales_name: stored[scales_name]}
        weights[name] = StoredTensor(
            tensor.path,
            tensor.shape,
            dtype,
            _name(name, tensor),
            pieces=pieces,
            join=functools.partial(from_int8, DTYPES[dtype]),
            codes_form="int8",
            read_codes=_codes_of_int8,
        )
    return weights


def _require_row_order(stored: Mapping[str, StoredTensor]) -> None:
    """Require that codes of bitsandbytes have their rows in order, as all newer files have."""
    formats = {name: each for name, each in stored.items() if name.endswith(".weight_format")}
    for name, each in formats.items():
        if each.dtype != "U8" or math.prod(each.shape) != 1:
            raise InputRefused(f"{_described(name, each)}, expected one byte, U8")
    for name, value in read_tensors(formats, None).items():
        if value.item() != 0:
            raise InputRefused(
                f"{formats[name].path}: {_name(name, formats[name])} = {value.item()}: expected 0, rows in order; load "
                "the model in bitsandbytes and save it again"
            )


def from_int8(dtype: torch.dtype, parts: list[Tensor]) -> Tensor:
    """Return a dequantised weight of bitsandbytes in 8 bits, W[n, k] = codes[n, k] (SCB[n] / 127).

    Args:
        dtype: the dtype of the result; the product is computed in fp32.
        parts: the codes, [N, K] int8, and SCB, [N], the largest magnitude of each row.
    """
    codes_NK, scale_N, _ = _codes_of_int8(parts)
    return _scaled(codes_NK, scale_N[..., None], (1, codes_NK.shape[-1]), dtype)


def _codes_of_int8(parts: list[Tensor]) -> StoredCodes:
    """Return the codes of a weight of bitsandbytes in 8 bits; `parts` are those of `from_int8`."""
    codes_NK, largest_N = parts
    return StoredCodes(codes_NK, largest_N * (1 / 127))


def _scaled_weights(
    stored: Mapping[str, StoredTensor], dtype: str, quantisation: Quantisation
) -> dict[str, StoredTensor]:
    """Return weights of 8 bits with scales of blocks, of rows or of the whole weight, by name; see `fold`."""
    weights = dict[str, StoredTensor]()
    for name, tensor in stored.items():
        if tensor.dtype not in _BYTE_DTYPES:
            continue
        scales_name = next((name + end for end in _SCALES if name + end in stored), None)
        if scales_name is None:
            _refuse_missing(" or ".join(name + end for end in _SCALES), stored, name)
        scales = stored[scales_name]
        block = _block_of(tensor, name, scales, scales_name, quantisation.block)
        has_codes = tensor.dtype == "I8" and block == (1, tensor.shape[-1])
        weights[name] = StoredTensor(
            tensor.path,
            tensor.shape,
            dtype,
            _name(name, tensor),
            pieces={name: tensor, scales_name: scales},
            join=functools.partial(from_scaled, block, DTYPES[dtype]),
            codes_form="int8" if has_codes else "",
            read_codes=_codes_of_scaled if has_codes else None,
        )
    return weights


def _block_of(
    tensor: StoredTensor,
    name: str,
    scales: StoredTensor,
    scales_name: str,
    block: tuple[int, int] | None,
) -> tuple[int, int]:
    """Return rows and columns of the part of a weight that shares a scale.

    Args:
        tensor: the weight, [..., N, K].
        name: its name.
        scales: the scales.
        scales_name: their name.
        block: the part by config.json; None: a row or the whole weight.

    Raises:
        InputRefused: the scales do not fit the weight.
    """
    *experts, rows, columns = tensor.shape if len(tensor.shape) >= 2 else (0, 0)
    whole = (rows, columns)
    # What shares a scale, by the shapes that the scales may have.
    if block is None:
        by_shape = {
            (): whole,
            (1,): whole,
            (*experts, 1, 1): whole,
            (*experts, rows, 1): (1, columns),
        }
    else:
        counts = (math.ceil(rows / block[0]), math.ceil(columns / block[1]))
        by_shape = {(*experts, *counts): block}
    is_float = scales.dtype in DTYPES
    if not rows or not is_float or scales.shape not in by_shape:
        expected = " or ".join(str(list(shape)) for shape in by_shape)
        blocks = f" in blocks of {block[0]} x {block[1]}" if block else ""
        raise InputRefused(
            f"{_described(scales_name, scales)}, expected one of {', '.join(DTYPES)} of shape {expected}, for "
            f"{_name(name, tensor)} of shape {list(tensor.shape)}{blocks}"
        )
    return by_shape[scales.shape]


def from_scaled(block: tuple[int, int], dtype: torch.dtype, parts: list[Tensor]) -> Tensor:
    """Return a dequantised weight of 8 bits, W[n, k] = codes[n, k] scales[n // R, k // S].

    The last blocks of rows and of columns may be smaller.

    Args:
        block: R rows and S columns of a block.
        dtype: the dtype of the result; the product is computed in fp32.
        parts: the codes, [..., N, K], floats or integers of 8 bits; and scales, [..., ceil(N / R), ceil(K / S)],
            or one number.
    """
    codes, scales = parts
    return _scaled(codes, scales.float(), block, dtype)


def _scaled(codes: Tensor, scales: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return codes times the scales of their blocks, in a dtype, with few rows at once in fp32.

    Args:
        codes: [..., N, K].
        scales: fp32, [..., ceil(N / R), ceil(K / S)], or one number.
        block: R and S.
        dtype: the dtype of the result.
    """
    rows, columns = codes.shape[-2:]
    scale_rows, scale_columns = (math.ceil(rows / block[0]), math.ceil(columns / block[1]))
    matrices = codes.reshape(-1, rows, columns)
    grids = scales.reshape(-1, 1, 1) if scales.numel() == 1 else scales
    grids = grids.reshape(-1, scale_rows, scale_columns)
    grids = grids.expand(len(matrices), -1, -1)
    weight = torch.empty(codes.shape, dtype=dtype)
    outputs = weight.view(-1, rows, columns)
    rows_at_once = max(1, _NUMBERS_AT_ONCE // columns)
    for matrix, grid, output in zip(matrices, grids, outputs, strict=True):
        for begin in range(0, rows, rows_at_once):
            end = min(begin + rows_at_once, rows)
            blocks_of_rows = torch.arange(begin, end) // block[0]
            scales_RK = grid[blocks_of_rows].repeat_interleave(block[1], 1)[:, :columns]
            output[begin:end] = matrix[begin:end].float() * scales_RK
    return weight


def _codes_of_scaled(parts: list[Tensor]) -> StoredCodes:
    """Return the codes of a weight of 8-bit integers with a scale for each row."""
    codes_NK, scale_N1 = parts
    return StoredCodes(codes_NK, scale_N1.float().squeeze(-1))
