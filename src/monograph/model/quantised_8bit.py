"""Read weights of 8 bits, floats or integers, with scales of blocks, of rows or of the whole weight.

Shapes: N outputs, K inputs, R rows and S columns of a block.

Sources: Dettmers et al. 2022, "LLM.int8()", arXiv 2208.07339, section 2.1; DeepSeek-AI 2024, "DeepSeek-V3", arXiv
2412.19437, section 3.3.2. The names of the tensors are those of bitsandbytes 0.50, transformers 5 and
compressed-tensors 0.20.
"""

import functools
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from monograph.errors import InputRefused
from monograph.graph.stored_codes import StoredCodes
from monograph.model import stored_parts
from monograph.model.files import DTYPES, StoredTensor, read_tensors
from monograph.model.quantisation import Quantisation
from monograph.model.stored_parts import described, name_in_file, refuse_missing, require

BYTE_DTYPES = ("F8_E4M3", "F8_E5M2", "I8")  # of codes that have a byte each
SCALES = ("_scale_inv", "_scale")  # endings of the names of scales that codes are multiplied by
# Endings of the names of tensors that only say how a layer's inputs were rounded, or how rows are ordered.
UNUSED = ("input_scale", "activation_scale", "weight_format")


def int8_weights(
    stored: Mapping[str, StoredTensor], dtype: str, _quantisation: Quantisation
) -> dict[str, StoredTensor]:
    """Return the weights of bitsandbytes in 8 bits, by name; see `quantised.fold`."""
    weights = dict[str, StoredTensor]()
    _require_row_order(stored)
    for name, tensor in stored.items():
        if tensor.dtype != "I8":
            continue
        if len(tensor.shape) < 2:
            raise InputRefused(f"{described(name, tensor)}, expected a matrix with these codes")
        scales_name = f"{name.removesuffix('weight')}SCB"
        require(scales_name, "F32", tensor.shape[:-1], stored, name)
        pieces = {name: tensor, scales_name: stored[scales_name]}
        weights[name] = StoredTensor(
            tensor.path,
            tensor.shape,
            dtype,
            name_in_file(name, tensor),
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
            raise InputRefused(f"{described(name, each)}, expected one byte, U8")
    for name, value in read_tensors(formats, None).items():
        if value.item() != 0:
            file = formats[name].path
            raise InputRefused(
                f"{file}: {name_in_file(name, formats[name])} = {value.item()}: expected 0, rows in order; load the "
                "model in bitsandbytes and save it again"
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


def scaled_weights(
    stored: Mapping[str, StoredTensor], dtype: str, quantisation: Quantisation
) -> dict[str, StoredTensor]:
    """Return weights of 8 bits with scales of blocks, of rows or of the whole weight, by name; see `quantised.fold`."""
    weights = dict[str, StoredTensor]()
    for name, tensor in stored.items():
        if tensor.dtype not in BYTE_DTYPES:
            continue
        scales_name = next((name + end for end in SCALES if name + end in stored), None)
        if scales_name is None:
            refuse_missing(" or ".join(name + end for end in SCALES), stored, name)
        scales = stored[scales_name]
        block = _block_of(tensor, name, scales, scales_name, quantisation.block)
        has_codes = tensor.dtype == "I8" and block == (1, tensor.shape[-1])
        weights[name] = StoredTensor(
            tensor.path,
            tensor.shape,
            dtype,
            name_in_file(name, tensor),
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
    by_shape = {(): whole, (1,): whole}
    if block is None:
        by_shape |= {(*experts, 1, 1): whole, (*experts, rows, 1): (1, columns)}
    else:
        counts = (math.ceil(rows / block[0]), math.ceil(columns / block[1]))
        by_shape |= {(*experts, *counts): block}
    is_float = scales.dtype in DTYPES
    if not rows or not is_float or scales.shape not in by_shape:
        expected = " or ".join(str(list(shape)) for shape in by_shape)
        blocks = f" in blocks of {block[0]} x {block[1]}" if block else ""
        raise InputRefused(
            f"{described(scales_name, scales)}, expected one of {', '.join(DTYPES)} of shape {expected}, for "
            f"{name_in_file(name, tensor)} of shape {list(tensor.shape)}{blocks}"
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
    block_columns = min(block[1], columns)  # a file may say any size
    rows_at_once = max(1, stored_parts.NUMBERS_AT_ONCE // columns)
    for matrix, grid, output in zip(matrices, grids, outputs, strict=True):
        for begin in range(0, rows, rows_at_once):
            end = min(begin + rows_at_once, rows)
            blocks_of_rows = torch.arange(begin, end) // block[0]
            scales_RK = grid[blocks_of_rows].repeat_interleave(block_columns, 1)[:, :columns]
            output[begin:end] = matrix[begin:end].float() * scales_RK
    return weight


def _codes_of_scaled(parts: list[Tensor]) -> StoredCodes:
    """Return the codes of a weight of 8-bit integers with a scale for each row."""
    codes_NK, scale_N1 = parts
    return StoredCodes(codes_NK, scale_N1.float().squeeze(-1))
