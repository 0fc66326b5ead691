"""Compute attention over a key-value cache; the bits of the result do not depend on how much of the cache is read.

Shape suffixes: B rows, H query heads, K key-value heads (H is a multiple of K), G = H / K, T queries, M = G T, E head
dimension, N blocks of the cache, C slots in a block, S = N C slots; slot s holds the key and value of position s.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128  # slots


def cached_attention(
    query_BHTE: Tensor, keys_NBKCE: Tensor, values_NBKCE: Tensor, positions_BT: Tensor, window: int | None = None
) -> Tensor:
    """Compute softmax attention of queries at given positions to the slots up to their own positions.

        out[b, h, t] = sum_s p[t, s] * value[b, h // G, s]
        p[t]         = softmax over the visible s of (query[b, h, t] . key[b, h // G, s]) / sqrt(E)
        visible      : positions[b, t] - window < s <= positions[b, t]

    Sums over slots are taken inside a block and then over blocks by halving, as if the number of blocks were padded to
    a power of two. A block that no query sees adds zeros, so more blocks, or other rows' lengths, change no bit.

    Args:
        query_BHTE: floating.
        keys_NBKCE: the first N blocks of a layer, finite everywhere.
        values_NBKCE: same shape and dtype.
        positions_BT: int64, below N C; their slots have been written.
        window: number of positions that a query sees, its own the last of them; None: all up to its own.

    Returns:
        [B, H, T, E] in the dtype of the query; scores, softmax and sums are fp32 or wider.
    """
    blocks, _, key_heads, slots, head_dim = keys_NBKCE.shape
    groups = query_BHTE.shape[1] // key_heads
    wide = torch.promote_types(query_BHTE.dtype, torch.float32)
    query_BKME = query_BHTE.unflatten(1, (key_heads, groups)).flatten(2, 3)
    scores_NBKMC = _product(query_BKME, keys_NBKCE.transpose(-1, -2), wide) * head_dim**-0.5
    slots_N111C = torch.arange(blocks * slots, device=positions_BT.device).view(blocks, 1, 1, 1, slots)
    distances_NB1MC = positions_BT.repeat(1, groups)[:, None, :, None] - slots_N111C
    seen_NB1MC = distances_NB1MC >= 0
    if window is not None:
        seen_NB1MC &= distances_NB1MC < window
    scores_NBKMC = scores_NBKMC.masked_fill(~seen_NB1MC, -torch.inf)
    weights_NBKMC = (scores_NBKMC - scores_NBKMC.amax(dim=(0, -1), keepdim=True)).exp()
    total_BKM1 = _halved(weights_NBKMC.sum(-1, keepdim=True))
    mixed_BKME = _halved(_product(weights_NBKMC.to(values_NBKCE.dtype), values_NBKCE, wide)) / total_BKM1
    return mixed_BKME.to(query_BHTE.dtype).unflatten(2, (groups, -1)).flatten(1, 2)


def _product(left: Tensor, right_NBKXY: Tensor, wide: torch.dtype) -> Tensor:
    """Return batched matrix products, summed in the dtype `wide`."""
    if left.dtype == wide or not left.is_cuda:
        return left.to(wide) @ right_NBKXY.to(wide)
    left_NBKMX = left.expand(*right_NBKXY.shape[:-2], *left.shape[-2:])
    return torch.bmm(left_NBKMX.flatten(0, 2), right_NBKXY.flatten(0, 2), out_dtype=wide).unflatten(
        0, right_NBKXY.shape[:3]
    )


def _halved(parts_N: Tensor) -> Tensor:
    """Return the sum over the first axis by repeatedly adding i and i + P / 2, where P is the next power of two."""
    while (count := parts_N.shape[0]) > 1:
        half = 1 << (count - 1).bit_length() - 1
        parts_N = torch.cat([parts_N[: count - half] + parts_N[half:], parts_N[count - half : half]])
    return parts_N[0]
