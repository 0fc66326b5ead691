"""Round weights to the numbers that a GGUF file in Q4_0 or Q8_0 can hold.

A *block* is 32 consecutive weights of a row, which share a scale d in fp16. The formats and their
rounding are those of ggml-org/llama.cpp, `quantize_row_q4_0_ref` and `quantize_row_q8_0_ref` of
ggml-quants.c (MIT). The results here are the fp32 numbers that llama.cpp reads in such a file.

Rounding twice gives what rounding once gives. So a file of rounded weights holds exactly these weights,
even if a device has computed a quotient or a product below with another last bit.

Shapes: W weights of a block, 32; 1 an axis of length 1.
"""

from collections.abc import Callable

import torch
from torch import Tensor

BLOCK = 32  # weights that share a scale
# fp16 has 13 bits fewer than fp32 after the point.
_DROPPED_BITS = 13
_SMALLEST_NORMAL = 2.0**-14  # of fp16
_SUBNORMAL_STEP = 2.0**-24  # of fp16


def round_to_blocks(weights: Tensor, block_format: str) -> Tensor:
    """Return weights rounded to a format of `BLOCK_FORMATS`.

        Q4_0:  d = fp16(m / -8),       m the weight of the largest magnitude in the block, with its sign
               q = min(15, trunc(w / (m / -8) + 8.5)) - 8,              from -8 to 7
        Q8_0:  d = fp16(a / 127),      a the largest magnitude
               q = round(w / (a / 127)), halves away from zero,         from -127 to 127
        w' = d q

    The quotient is computed as w (1 / d), as llama.cpp does, with d before its rounding to fp16.

    Args:
        weights: finite, [..., a multiple of 32] in fp32 or fp64. The blocks are along the last axis.
            fp64 is first rounded to fp32.
        block_format: a name of `BLOCK_FORMATS`.

    Returns:
        A new tensor in the dtype of the weights. Where d would be above 65,504, the largest number of
        fp16, it keeps the range of fp32. An export refuses such weights.
    """
    blocks_W = weights.to(torch.float32).unflatten(-1, (-1, BLOCK))
    rounded_W = BLOCK_FORMATS[block_format](blocks_W)
    return rounded_W.flatten(-2).to(weights.dtype)


def _round_q4_0(blocks_W: Tensor) -> Tensor:
    largest_1 = blocks_W.gather(-1, blocks_W.abs().argmax(dim=-1, keepdim=True))
    scale_1 = largest_1 / -8
    stored_scale_1 = _round_to_fp16(scale_1)
    codes_W = (blocks_W * _reciprocal(scale_1, stored_scale_1) + 8.5).trunc()
    return stored_scale_1 * (codes_W.clamp(0, 15) - 8)


def _round_q8_0(blocks_W: Tensor) -> Tensor:
    scale_1 = blocks_W.abs().amax(dim=-1, keepdim=True) / 127
    stored_scale_1 = _round_to_fp16(scale_1)
    quotient_W = blocks_W * _reciprocal(scale_1, stored_scale_1)
    # `torch.round` rounds halves to even integers.
    whole_W = quotient_W.trunc()
    codes_W = whole_W + (2 * (quotient_W - whole_W)).trunc()
    return stored_scale_1 * codes_W


def _reciprocal(scale_1: Tensor, stored_scale_1: Tensor) -> Tensor:
    """Return 1 / scale. It is 0 where the scale is stored as 0, since all weights are then read as 0."""
    return torch.where(stored_scale_1 == 0, 0.0, 1 / scale_1)


def _round_to_fp16(values: Tensor) -> Tensor:
    """Return fp32 numbers rounded to the nearest numbers of fp16, ties to even, in fp32.

    `values.half().float()` would not do: Inductor removes such a pair of conversions, and with it the
    rounding.
    """
    bits = values.view(torch.int32)
    half = (1 << (_DROPPED_BITS - 1)) - 1
    last_kept_bit = (bits >> _DROPPED_BITS) & 1
    rounded_bits = (bits + (half + last_kept_bit)) >> _DROPPED_BITS << _DROPPED_BITS
    # Subnormal numbers of fp16 are multiples of one step. Both factors are powers of two, so only
    # `round` rounds.
    rounded_subnormals = (values / _SUBNORMAL_STEP).round() * _SUBNORMAL_STEP
    is_normal = values.abs() >= _SMALLEST_NORMAL
    return torch.where(is_normal, rounded_bits.view(torch.float32), rounded_subnormals)


# By gguf's names of the types.
BLOCK_FORMATS: dict[str, Callable[[Tensor], Tensor]] = {"Q4_0": _round_q4_0, "Q8_0": _round_q8_0}
