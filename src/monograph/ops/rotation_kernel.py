"""Rotate the pairs of channels of queries and keys by Triton kernels; see `monograph.ops.rotation`.

Both kernels have a grid of one axis, with a program for each of the B T tokens, which rotates all heads of
its token. It reads each channel, cosine and sine once. PyTorch's compiler would read a channel twice, once
for each of the two results that depend on it, and would have one kernel for the queries and one for the
keys.

Shapes: B rows, T positions, H query heads, K key-value heads, D = 2 F channels of a head, F pairs of
channels: i and i + F.
"""

from typing import Any, Final, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

_PAIRS_PER_THREAD: Final = 8
_THREADS_PER_WARP: Final = 32


@triton.jit
def _rotate_to(
    heads, stride_head, cos_1F, sin_1F, out, H, F, HEADS: tl.constexpr, PAIRS: tl.constexpr
):
    """Rotate the heads of one token, and write them to `out` side by side.

    `heads` points to the first head of the token. Tensors with the suffixes _H and _F have the lengths HEADS and
    PAIRS, which are the smallest powers of two that are at least H and F.
    """
    head_H1, pair_1F = tl.arange(0, HEADS)[:, None], tl.arange(0, PAIRS)[None, :]
    is_pair_HF = (head_H1 < H) & (pair_1F < F)
    left_at_HF = heads + head_H1 * stride_head + pair_1F
    left_HF = tl.load(left_at_HF, mask=is_pair_HF).to(tl.float32)
    right_HF = tl.load(left_at_HF + F, mask=is_pair_HF).to(tl.float32)
    out_at_HF = out + head_H1 * (2 * F) + pair_1F
    dtype = out.dtype.element_ty
    tl.store(out_at_HF, (left_HF * cos_1F - right_HF * sin_1F).to(dtype), mask=is_pair_HF)
    tl.store(out_at_HF + F, (right_HF * cos_1F + left_HF * sin_1F).to(dtype), mask=is_pair_HF)


@triton.jit
def _copy_to(heads, stride_head, out, K, F, KEY_HEADS: tl.constexpr, PAIRS: tl.constexpr):
    """Copy the heads of one token to `out`, side by side; for the lengths see `_rotate_to`."""
    head_K1, channel_1D = tl.arange(0, KEY_HEADS)[:, None], tl.arange(0, 2 * PAIRS)[None, :]
    is_channel_KD = (head_K1 < K) & (channel_1D < 2 * F)
    values_KD = tl.load(heads + head_K1 * stride_head + channel_1D, mask=is_channel_KD)
    tl.store(out + head_K1 * (2 * F) + channel_1D, values_KD, mask=is_channel_KD)


@triton.jit
def _rotate_queries_and_keys(
    query,
    key,
    cos,
    sin,
    query_out,
    key_out,
    query_row,
    query_position,
    query_head,
    key_row,
    key_position,
    key_head,
    angles_row,
    T,
    H,
    K,
    F,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Rotate the query and key heads of one token.

    `query_row` to `angles_row` are strides in elements: those of the axes B, T and H of `query`, of the axes
    B, T and K of `key`, and of the axis B of `cos` and `sin`.
    """
    token = tl.program_id(0)
    row, position = (token // T).to(tl.int64), token % T
    pair_1F = tl.arange(0, PAIRS)[None, :]
    angles_1F = row * angles_row + position * F + pair_1F
    cos_1F = tl.load(cos + angles_1F, mask=pair_1F < F)
    sin_1F = tl.load(sin + angles_1F, mask=pair_1F < F)
    query += row * query_row + position * query_position
    key += row * key_row + position * key_position
    query_out += token.to(tl.int64) * (H * 2 * F)
    key_out += token.to(tl.int64) * (K * 2 * F)
    _rotate_to(query, query_head, cos_1F, sin_1F, query_out, H, F, HEADS, PAIRS)
    _rotate_to(key, key_head, cos_1F, sin_1F, key_out, K, F, KEY_HEADS, PAIRS)


@triton.jit
def _rotate_gradients_back(
    query,
    key,
    value,
    cos,
    sin,
    out,
    query_row,
    query_position,
    query_head,
    key_row,
    key_position,
    key_head,
    value_row,
    value_position,
    value_head,
    angles_row,
    T,
    H,
    K,
    F,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Write the gradients of one token's query, key and value heads next to each other.

    Those of queries and keys are rotated by the negative angles. For `query_row` to `angles_row` see
    `_rotate_queries_and_keys`.
    """
    token = tl.program_id(0)
    row, position = (token // T).to(tl.int64), token % T
    pair_1F = tl.arange(0, PAIRS)[None, :]
    angles_1F = row * angles_row + position * F + pair_1F
    cos_1F = tl.load(cos + angles_1F, mask=pair_1F < F)
    sin_1F = -tl.load(sin + angles_1F, mask=pair_1F < F)
    query += row * query_row + position * query_position
    key += row * key_row + position * key_position
    value += row * value_row + position * value_position
    out += token.to(tl.int64) * ((H + 2 * K) * 2 * F)
    _rotate_to(query, query_head, cos_1F, sin_1F, out, H, F, HEADS, PAIRS)
    _rotate_to(key, key_head, cos_1F, sin_1F, out + H * 2 * F, K, F, KEY_HEADS, PAIRS)
    _copy_to(value, value_head, out + (H + K) * 2 * F, K, F, KEY_HEADS, PAIRS)


class _Sizes(NamedTuple):
    """The sizes with which both kernels are launched.

    Attributes:
        tokens: the number of programs, B T.
        numbers: the arguments T, H, K and F.
        constants: the keyword arguments HEADS, KEY_HEADS, PAIRS and num_warps.
    """

    tokens: int
    numbers: tuple[int, int, int, int]
    constants: dict[str, Any]


def _sizes(query_BTHD: Tensor, key_BTKD: Tensor) -> _Sizes:
    """Return the sizes of a launch for these queries and keys."""
    rows, positions, heads, channels = query_BTHD.shape
    key_heads = key_BTKD.shape[2]
    padded_heads = triton.next_power_of_2(heads)
    padded_pairs = triton.next_power_of_2(channels // 2)
    warps = padded_heads * padded_pairs // (_PAIRS_PER_THREAD * _THREADS_PER_WARP)
    constants = {
        "HEADS": padded_heads,
        "KEY_HEADS": triton.next_power_of_2(key_heads),
        "PAIRS": padded_pairs,
        "num_warps": min(16, max(1, warps)),
    }
    return _Sizes(rows * positions, (positions, heads, key_heads, channels // 2), constants)


def _row_stride(angles_BTF: Tensor) -> int:
    """Return the stride of the rows; 0 if all rows have the same angles."""
    return angles_BTF.stride(0) if angles_BTF.shape[0] > 1 else 0


def launch(
    query_BTHD: Tensor,
    key_BTKD: Tensor,
    cos_BTF: Tensor,
    sin_BTF: Tensor,
    rotated_query_BTHD: Tensor,
    rotated_key_BTKD: Tensor,
) -> None:
    """Rotate queries and keys.

    Args:
        query_BTHD: the queries; the channels of a head lie side by side.
        key_BTKD: the keys; their channels lie side by side, too.
        cos_BTF: fp32, contiguous; B may be 1.
        sin_BTF: the same.
        rotated_query_BTHD: contiguous; receives the rotated queries.
        rotated_key_BTKD: the same for keys.
    """
    if not query_BTHD.numel():
        return
    tokens, numbers, constants = _sizes(query_BTHD, key_BTKD)
    _rotate_queries_and_keys[(tokens,)](
        query_BTHD,
        key_BTKD,
        cos_BTF,
        sin_BTF,
        rotated_query_BTHD,
        rotated_key_BTKD,
        *query_BTHD.stride()[:3],
        *key_BTKD.stride()[:3],
        _row_stride(cos_BTF),
        *numbers,
        **constants,
    )


def launch_back(
    query_BTHD: Tensor,
    key_BTKD: Tensor,
    value_BTKD: Tensor,
    cos_BTF: Tensor,
    sin_BTF: Tensor,
    joined_BTX: Tensor,
) -> None:
    """Rotate the gradients of queries and keys back, and join them with those of values.

    Args:
        query_BTHD: the gradients of rotated queries; the channels of a head lie side by side.
        key_BTKD: the gradients of rotated keys; their channels lie side by side, too.
        value_BTKD: the gradients of values; their channels lie side by side, too.
        cos_BTF: see `launch`.
        sin_BTF: see `launch`.
        joined_BTX: contiguous, X = (H + 2 K) D; receives all gradients.
    """
    if not query_BTHD.numel():
        return
    tokens, numbers, constants = _sizes(query_BTHD, key_BTKD)
    _rotate_gradients_back[(tokens,)](
        query_BTHD,
        key_BTKD,
        value_BTKD,
        cos_BTF,
        sin_BTF,
        joined_BTX,
        *query_BTHD.stride()[:3],
        *key_BTKD.stride()[:3],
        *value_BTKD.stride()[:3],
        _row_stride(cos_BTF),
        *numbers,
        **constants,
    )
