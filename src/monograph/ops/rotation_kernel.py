"""Rotate the pairs of channels of heads by one Triton kernel; see `monograph.ops.rotation`.

A program rotates all heads of one token. It reads each channel once. PyTorch's compiler would read it
twice, once for each of the two results that depend on it.

Shapes: B rows, T positions, H heads, D = 2 F channels of a head, F pairs of channels: i and i + F.
"""

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

_PAIRS_PER_THREAD: Final = 8
_THREADS_PER_WARP: Final = 32


@triton.jit
def _rotate_heads(
    heads, cos, sin, out, stride_row, stride_position, stride_head, stride_angles, T, H, F,
    HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Rotate the heads of one token.

    HEADS and PAIRS are the smallest powers of two that are at least H and F. In the names of tensors, they
    are the sizes of H and F.
    """
    token = tl.program_id(0)
    row, position = token // T, token % T
    head_H1, pair_1F = tl.arange(0, HEADS)[:, None], tl.arange(0, PAIRS)[None, :]
    is_pair_HF = (head_H1 < H) & (pair_1F < F)
    angles_1F = row * stride_angles + position * F + pair_1F
    cos_1F = tl.load(cos + angles_1F, mask=pair_1F < F)
    sin_1F = tl.load(sin + angles_1F, mask=pair_1F < F)
    heads_of_token = heads + row.to(tl.int64) * stride_row + position * stride_position
    left_at_HF = heads_of_token + head_H1 * stride_head + pair_1F
    left_HF = tl.load(left_at_HF, mask=is_pair_HF).to(tl.float32)
    right_HF = tl.load(left_at_HF + F, mask=is_pair_HF).to(tl.float32)
    out_at_HF = out + token.to(tl.int64) * (H * 2 * F) + head_H1 * (2 * F) + pair_1F
    dtype = out.dtype.element_ty
    tl.store(out_at_HF, (left_HF * cos_1F - right_HF * sin_1F).to(dtype), mask=is_pair_HF)
    tl.store(out_at_HF + F, (right_HF * cos_1F + left_HF * sin_1F).to(dtype), mask=is_pair_HF)


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
    padded_heads = triton.next_power_of_2(heads)
    padded_pairs = triton.next_power_of_2(channels // 2)
    warps = padded_heads * padded_pairs // (_PAIRS_PER_THREAD * _THREADS_PER_WARP)
    _rotate_heads[(rows * positions,)](
        heads_BTHD,
        cos_BTF,
        sin_BTF,
        out_BTHD,
        *heads_BTHD.stride()[:3],
        cos_BTF.stride(0) if cos_BTF.shape[0] > 1 else 0,  # 0: all rows have the same angles
        positions,
        heads,
        channels // 2,
        HEADS=padded_heads,
        PAIRS=padded_pairs,
        num_warps=min(16, max(1, warps)),
    )
