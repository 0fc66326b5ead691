"""Rotate the pairs of heads by one Triton kernel; see `monograph.ops.rotation`.

A program rotates all heads of one token. It reads each channel once, where PyTorch's compiler reads it
for each of the two channels that depend on it.

Shapes: B rows, T positions, H heads, D = 2 F channels of a head, F pairs.
"""

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

# A thread rotates so many pairs.
_PAIRS_OF_THREAD: Final = 8
_THREADS_OF_WARP: Final = 32


@triton.jit
def _rotate_heads(
    heads, cos, sin, out, stride_row, stride_position, stride_head, stride_angles, T, H, F,
    HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    row, position = token // T, token % T
    head_H1, pair_1F = tl.arange(0, HEADS)[:, None], tl.arange(0, PAIRS)[None, :]
    exists = (head_H1 < H) & (pair_1F < F)
    angles_1F = row * stride_angles + position * F + pair_1F
    cos_1F = tl.load(cos + angles_1F, mask=pair_1F < F)
    sin_1F = tl.load(sin + angles_1F, mask=pair_1F < F)
    first = heads + row.to(tl.int64) * stride_row + position * stride_position
    first_HF = first + head_H1 * stride_head + pair_1F
    left_HF = tl.load(first_HF, mask=exists).to(tl.float32)
    right_HF = tl.load(first_HF + F, mask=exists).to(tl.float32)
    out_HF = out + token.to(tl.int64) * (H * 2 * F) + head_H1 * (2 * F) + pair_1F
    dtype = out.dtype.element_ty
    tl.store(out_HF, (left_HF * cos_1F - right_HF * sin_1F).to(dtype), mask=exists)
    tl.store(out_HF + F, (right_HF * cos_1F + left_HF * sin_1F).to(dtype), mask=exists)


def launch(heads_BTHD: Tensor, cos_BTF: Tensor, sin_BTF: Tensor, out_BTHD: Tensor) -> None:
    """Launch the kernel.

    Args:
        heads_BTHD: the heads; the channels of a head lie side by side.
        cos_BTF: fp32, contiguous; B may be 1.
        sin_BTF: the same.
        out_BTHD: contiguous; receives the rotated heads.
    """
    rows, positions, heads, channels = heads_BTHD.shape
    if not heads_BTHD.numel():
        return
    padded = triton.next_power_of_2(heads), triton.next_power_of_2(channels // 2)
    warps = padded[0] * padded[1] // (_PAIRS_OF_THREAD * _THREADS_OF_WARP)
    _rotate_heads[(rows * positions,)](
        heads_BTHD,
        cos_BTF,
        sin_BTF,
        out_BTHD,
        *heads_BTHD.stride()[:3],
        cos_BTF.stride(0) if cos_BTF.shape[0] > 1 else 0,
        positions,
        heads,
        channels // 2,
        HEADS=padded[0],
        PAIRS=padded[1],
        num_warps=min(16, max(1, warps)),
    )
