"""Read weights of bitsandbytes in 4 bits, nf4 or fp4.

Shapes: N outputs, K inputs, C blocks of S numbers, G groups of blocks.

Sources: Dettmers et al. 2023, "QLoRA", arXiv 2305.14314, section 3; the names of the tensors are those of
bitsandbytes 0.50.
"""

import functools
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from monograph.errors import InputRefused
from monograph.graph.stored_codes import BLOCK, StoredCodes
from monograph.model import stored_parts
from monograph.model.files import DTYPES, StoredTensor, read_tensors
from monograph.model.quantisation import Quantisation
from monograph.model.stored_parts import described, name_in_file, refuse_missing, require
from monograph.storage.reading import parse_json

# The name of the tensor that describes a 4-bit weight. The groups are the weight's name and the kind of codes.
_STATE = re.compile(r"(.+)\.quant_state\.bitsandbytes__(nf4|fp4)")
_MAX_STATE_BYTES = 4096  # such a description has about 150
_ITEM_BYTES = {"U8": 1, "I8": 1, "BF16": 2, "F16": 2, "F32": 4, "F64": 8}


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


def four_bit_weights(
    stored: Mapping[str, StoredTensor], dtype: str, _quantisation: Quantisation
) -> dict[str, StoredTensor]:
    """Return the weights of bitsandbytes in 4 bits, by name; see `quantised.fold`."""
    state_names = {match[1]: name for name in stored if (match := _STATE.fullmatch(name))}
    states = _read_states({name: stored[name] for name in state_names.values()})
    return {
        weight: _four_bit_weight(weight, states[state_name], stored, state_name, dtype)
        for weight, state_name in state_names.items()
    }


def _read_states(headers: dict[str, StoredTensor]) -> dict[str, _State]:
    """Return the descriptions of 4-bit weights, by the names of the tensors that have them."""
    for name, header in headers.items():
        if header.dtype != "U8" or len(header.shape) != 1 or header.shape[0] > _MAX_STATE_BYTES:
            raise InputRefused(
                f"{described(name, header)}, expected at most {_MAX_STATE_BYTES} bytes, U8"
            )
    contents = read_tensors(headers, None)
    return {
        name: _parsed_state(
            bytes(content.tolist()), headers[name].path, name_in_file(name, headers[name])
        )
        for name, content in contents.items()
    }


def _parsed_state(content: bytes, path: Path, name: str) -> _State:
    """Return the description in a tensor's bytes, which are JSON.

    Raises:
        InputRefused: a value is missing or wrong.
    """
    try:
        values = parse_json(content)
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
    has_block = type(block) is int and 1 <= block <= 2**20
    has_sizes = has_block and type(group) is int and 0 <= group <= 2**20
    has_offset = type(offset) in (int, float) and abs(offset) <= torch.finfo(torch.float32).max
    if not (
        isinstance(shape, list)
        and has_shape
        and isinstance(block, int)
        and has_sizes
        and has_offset
    ):
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
    _require_bytes(weight, math.ceil(count / 2), stored, state_name)
    wanted = {
        f"{weight}.absmax": ("U8" if is_nested else "F32", blocks),
        f"{weight}.quant_map": ("F32", 16),
    }
    if is_nested:
        wanted[f"{weight}.nested_absmax"] = ("F32", math.ceil(blocks / state.group))
        wanted[f"{weight}.nested_quant_map"] = ("F32", 256)
    for name, (part_dtype, numbers) in wanted.items():
        require(name, part_dtype, (numbers,), stored, state_name)
    pieces = {name: stored[name] for name in (weight, *wanted)}
    # The description is a piece, too, so that it is no tensor of its own. It is not read again.
    pieces[state_name] = stored[state_name]
    has_codes = state.block % BLOCK == 0
    return StoredTensor(
        stored[weight].path,
        state.shape,
        dtype,
        name_in_file(weight, stored[weight]),
        pieces=pieces,
        join=functools.partial(from_four_bits, state, DTYPES[dtype]),
        codes_form="nf4" if has_codes else "",
        read_codes=functools.partial(_codes_of_four_bits, state) if has_codes else None,
    )


def _require_bytes(name: str, count: int, stored: Mapping[str, StoredTensor], owner: str) -> None:
    """Require a tensor of so many bytes, of any dtype: bitsandbytes may store codes as other numbers."""
    tensor = stored.get(name)
    if tensor is None:
        refuse_missing(name, stored, owner)
    itemsize = _ITEM_BYTES.get(tensor.dtype, 0)
    if math.prod(tensor.shape) * itemsize != count:
        raise InputRefused(
            f"{described(name, tensor)}, expected {count} bytes by {name_in_file(owner, stored[owner])}"
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
        1, stored_parts.NUMBERS_AT_ONCE // (2 * state.block)
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
