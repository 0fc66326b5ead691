"""Grouped-query scaled dot-product attention: the plain softmax beside the fused kernels.

Shape suffixes: B batch, H query heads, K key-value heads (H is a multiple of K), T queries, S keys, D head dimension.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

Impl = Literal["auto", "reference", "sdpa", "flex"]
Mask = Tensor | BlockMask | None


def attention(query_BHTD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, mask: Mask, impl: Impl = "auto") -> Tensor:
    """Softmax attention in which H / K neighbouring query heads share one key-value head.

        out[b, h, t] = sum_s p[t, s] * value[b, h // (H / K), s]
        p[t]         = softmax over the visible s of (query[b, h, t] . key[b, h // (H / K), s]) / sqrt(D)

    A query that sees no key at all gets zeros, and passes back zero gradients, in every implementation.

    Args:
        query_BHTD: floating.
        key_BKSD: same dtype.
        value_BKSD: same dtype.
        mask: which keys a query sees. None: causal, key s is visible to query t if s <= t (then S = T). A boolean
            tensor that broadcasts to [B, H, T, S]: True is visible. A BlockMask: the same in blocks, for "flex".
        impl: "reference": the equation above, in fp32 or wider, with all [B, H, T, S] probabilities in memory.
            "sdpa": `torch.nn.functional.scaled_dot_product_attention`.
            "flex": `torch.nn.attention.flex_attention`, which skips blocks that no query sees; it is fused only inside
            a compiled graph and has no backward on a CPU.
            "auto": what the mask is made for: "flex" for a BlockMask, else "sdpa".

    Returns:
        [B, H, T, D] in the dtype of the query.

    Raises:
        ValueError: the mask is of a kind that `impl` cannot read.
    """
    if isinstance(mask, BlockMask):
        if impl not in ("auto", "flex"):
            raise ValueError(f"impl={impl!r} reads a boolean tensor or None, not a BlockMask")
        out = flex_attention(query_BHTD, key_BKSD, value_BKSD, block_mask=mask, enable_gqa=True)
        assert isinstance(out, Tensor)  # a tuple only when the log-sum-exp is asked for
        return out
    if impl == "flex":
        raise ValueError("impl='flex' reads a BlockMask, not a boolean tensor or None")
    if impl == "reference":
        return _reference(query_BHTD, key_BKSD, value_BKSD, mask)
    if mask is not None and query_BHTD.is_cuda:
        # The one CUDA kernel that reads a dense mask (memory-efficient) wants as many key-value heads as query heads;
        # with fewer, PyTorch would take the unfused path.
        key_BKSD, value_BKSD = (_expand(heads, query_BHTD.shape[1]) for heads in (key_BKSD, value_BKSD))
    return F.scaled_dot_product_attention(
        query_BHTD, key_BKSD, value_BKSD, attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )


def _expand(heads_BKSD: Tensor, query_heads: int) -> Tensor:
    return heads_BKSD.repeat_interleave(query_heads // heads_BKSD.shape[1], dim=1)


def _reference(query_BHTD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, mask: Tensor | None) -> Tensor:
    wide = torch.float64 if query_BHTD.dtype == torch.float64 else torch.float32
    key_BHSD, value_BHSD = (_expand(heads.to(wide), query_BHTD.shape[1]) for heads in (key_BKSD, value_BKSD))
    scores_BHTS = query_BHTD.to(wide) @ key_BHSD.transpose(-1, -2) / query_BHTD.shape[-1] ** 0.5
    if mask is None:
        mask = torch.ones(scores_BHTS.shape[-2:], dtype=torch.bool, device=scores_BHTS.device).tril()
    # The lowest finite number instead of -inf: the softmax of a row that sees nothing stays finite, and `where` makes
    # it zero; exp(lowest - max) is exactly zero in every other row.
    scores_BHTS = scores_BHTS.masked_fill(~mask, torch.finfo(wide).min)
    probabilities_BHTS = torch.where(mask, scores_BHTS.softmax(dim=-1), 0.0)
    return (probabilities_BHTS @ value_BHSD).to(query_BHTD.dtype)
