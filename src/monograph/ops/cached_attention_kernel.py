"""Compute the attention of several new positions per row to a cache, by one Triton kernel.

It computes what `monograph.ops.attention.cached_attention` computes. PyTorch's operators need four or more
launches for that, and have all scores in memory. A *slot* of the cache has the key and the value
of one position, and a *block* has C slots.

The grid is (tiles of M queries, key-value heads, rows). The G query heads that share a key-value head are
computed together, so the M queries of a program are those of M / G positions. The program goes through the
slots that any of its queries sees, SLOTS at a time, and keeps a running softmax.

A query's bits depend neither on the other rows nor on how many blocks are read, because tiles of slots
always begin at multiples of SLOTS, and a slot that a query does not see adds exact zeros.

Shapes: B rows, H query heads, K key-value heads, G = H / K query heads per key-value head, T
positions of a row, E head dimension, N blocks of the cache, C slots of a block, M queries of a
program, S = SLOTS, the slots that are read at once.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

SLOTS: Final = 32  # slots that a program reads at once


def _queries_of(head_dim: int, dtype: torch.dtype) -> int:
    """Return how many queries a program has, M. Its [M, E] sums must fit the registers of four warps."""
    if dtype == torch.float32:
        return 16
    return 64 if head_dim <= 128 else 32


@triton.jit
def _attend_chunk(
    query,
    keys,
    values,
    positions,
    sinks,
    out,
    B,
    T,
    window,
    row_stride,
    head_stride,
    position_stride,
    SCALE: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    C: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
    S: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute the attention of the queries of M / G positions and one key-value head.

    `keys` and `values` are [N, B, K, C, E], and M is a multiple of G.
    `row_stride`, `head_stride` and `position_stride` are those of `query`, in elements. WINDOW: a query sees
    only `window` positions. SINKS: heads have sinks.
    """
    tile, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    index_M = tile * M + tl.arange(0, M)
    # Which of the row's T positions a query has, and which of the G heads of this key-value head.
    time_M, head_in_group_M = index_M // G, index_M % G
    is_query_M = time_M < T
    channel_E, slot_S = tl.arange(0, E), tl.arange(0, S)
    position_M = tl.load(positions + row * T + time_M, mask=is_query_M, other=-1).to(tl.int32)
    head_M = head * G + head_in_group_M
    query_at_M = (
        query + row.to(tl.int64) * row_stride + head_M * head_stride + time_M * position_stride
    )
    query_ME = tl.load(
        query_at_M[:, None] + channel_E[None, :], mask=is_query_M[:, None], other=0.0
    )
    # The first and the last slot that any of the queries sees. The first is rounded down to a multiple of S.
    last_slot = tl.minimum(tl.max(position_M, 0), N * C - 1)
    first_slot = 0
    if WINDOW:
        first_position = tl.min(tl.where(is_query_M, position_M, last_slot), 0)
        first_slot = tl.maximum(first_position - window + 1, 0)
        first_slot = (first_slot // S) * S
    # If there is a sink, the softmax begins with its score. The score is the largest so far, so its weight is
    # exp(0) = 1. It has no value to add.
    if SINKS:
        largest_M = tl.load(sinks + head_M).to(tl.float32)
        total_M = tl.full((M,), 1.0, tl.float32)
    else:
        largest_M = tl.full((M,), float("-inf"), tl.float32)
        total_M = tl.zeros((M,), tl.float32)
    mixed_ME = tl.zeros((M, E), tl.float32)
    for begin in range(first_slot, last_slot + 1, S):
        position_S = begin + slot_S
        # The last tile does not reach beyond the last block, since S divides C.
        block_S = ((position_S // C).to(tl.int64) * B + row) * K + head
        cache_offset_S = (block_S * C + position_S % C) * E
        key_SE = tl.load(keys + cache_offset_S[:, None] + channel_E[None, :])
        scores_MS = tl.dot(query_ME, key_SE.T, input_precision=PRECISION) * SCALE
        distance_MS = position_M[:, None] - position_S[None, :]
        is_seen_MS = distance_MS >= 0
        if WINDOW:
            is_seen_MS = is_seen_MS & (distance_MS < window)
        scores_MS = tl.where(is_seen_MS, scores_MS, float("-inf"))
        new_largest_M = tl.maximum(largest_M, tl.max(scores_MS, 1))
        # Before a query has seen a slot, its largest score is -inf, and -inf - -inf would be NaN.
        base_M = tl.where(new_largest_M == float("-inf"), 0.0, new_largest_M)
        rescale_M = tl.exp(largest_M - base_M)
        weights_MS = tl.exp(scores_MS - base_M[:, None])
        total_M = total_M * rescale_M + tl.sum(weights_MS, 1)
        value_SE = tl.load(values + cache_offset_S[:, None] + channel_E[None, :])
        mixed_ME = mixed_ME * rescale_M[:, None]
        mixed_ME = tl.dot(
            weights_MS.to(value_SE.dtype), value_SE, mixed_ME, input_precision=PRECISION
        )
        largest_M = new_largest_M
    result_ME = (mixed_ME / total_M[:, None]).to(out.dtype.element_ty)
    out_offset_M = ((row.to(tl.int64) * T + time_M) * (G * K) + head_M) * E
    tl.store(out + out_offset_M[:, None] + channel_E[None, :], result_ME, mask=is_query_M[:, None])


@torch.library.custom_op("monograph::attend_cache", mutates_args=())
def attend_cache(
    query_BHTE: Tensor,
    keys_NBKCE: Tensor,
    values_NBKCE: Tensor,
    positions_BT: Tensor,
    window: int | None = None,
    sink_H: Tensor | None = None,
) -> Tensor:
    """Compute `monograph.ops.attention.cached_attention` by the kernel.

    Args:
        query_BHTE: fp32, fp16 or bf16; E is a power of two, from 16 to 256.
        keys_NBKCE: the first blocks of a layer's cache, in the same dtype, contiguous; C is a multiple of
            SLOTS, and N C is at most 2^31.
        values_NBKCE: likewise.
        positions_BT: the positions of the queries, int64, ascending in each row.
        window: how many positions a query sees, including its own; None: all up to its own.
        sink_H: for each head, a score without a value that takes part in the softmax; None: no sinks.

    Returns:
        [B, T, H, E] in the same dtype; scores, softmax and sums are fp32.
    """
    blocks, rows, key_heads, slots, head_dim = keys_NBKCE.shape
    heads, length = query_BHTE.shape[1:3]
    group = heads // key_heads
    if query_BHTE.stride(-1) != 1:
        query_BHTE = query_BHTE.contiguous()
    out_BTHE = query_BHTE.new_empty(rows, length, heads, head_dim)
    queries = _queries_of(head_dim, query_BHTE.dtype)
    # A kernel needs a pointer for each tensor, even for one that it does not read.
    unused = positions_BT
    _attend_chunk[(triton.cdiv(length * group, queries), key_heads, rows)](
        query_BHTE,
        keys_NBKCE,
        values_NBKCE,
        positions_BT.contiguous(),
        unused if sink_H is None else sink_H,
        out_BTHE,
        rows,
        length,
        window or 0,
        query_BHTE.stride(0),
        query_BHTE.stride(1),
        query_BHTE.stride(2),
        SCALE=head_dim**-0.5,
        G=group,
        K=key_heads,
        E=head_dim,
        C=slots,
        N=blocks,
        M=queries,
        S=SLOTS,
        WINDOW=window is not None,
        SINKS=sink_H is not None,
        PRECISION="ieee" if query_BHTE.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=2,
    )
    return out_BTHE


@attend_cache.register_fake
def _(
    query_BHTE: Tensor,
    keys_NBKCE: Tensor,
    values_NBKCE: Tensor,
    positions_BT: Tensor,
    window: int | None = None,
    sink_H: Tensor | None = None,
) -> Tensor:
    rows, heads, length, head_dim = query_BHTE.shape
    return query_BHTE.new_empty(rows, length, heads, head_dim)
