"""Compute grouped-query scaled dot-product attention, by the plain equation or by fused kernels.

`attention` is for whole texts. `cached_attention`, at the end of the file, is for decoding: its keys
and values are in a key-value cache, which consists of blocks of equal length. The bits of its result
do not depend on how many blocks are read.

Shapes: B rows, H query heads, K key-value heads (H is a multiple of K), G = H / K query heads for
each key-value head, T queries, S keys, E head dimension. Over a cache: N blocks of C slots, M = G T
queries for each key-value head.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from monograph.ops.flex_options import flex_options
from monograph.ops.padded_rows import LEAST_ROWS_OF_SHORT_SUMS, least_rows, padded_count

# Queries [B, H, T, E], and keys and values, [B, K, S, E] or [N, B, K, C, E] of a cache.
Heads = tuple[Tensor, Tensor, Tensor]
Impl = Literal["auto", "reference", "sdpa", "flex", "blocks", "cached"]
AttentionKernel = Literal["torch", "repeated", "cudnn", "flash", "efficient"]
Mask = Tensor | BlockMask | None


def attention(
    query_BHTE: Tensor,
    key_BKSE: Tensor,
    value_BKSE: Tensor,
    mask: Mask,
    impl: Impl = "auto",
    kernel: AttentionKernel = "torch",
    sink_H: Tensor | None = None,
) -> Tensor:
    """Compute softmax attention in which H / K neighbouring query heads share one key-value head.

        out[b, h, t] = sum_s p[t, s] * value[b, h // (H / K), s]
        p[t]         = softmax over the visible s of (query[b, h, t] . key[b, h // (H / K), s]) / sqrt(E)

    A query that sees no key gets zeros, and zero gradients, in every implementation.

    Args:
        query_BHTE: floating.
        key_BKSE: of the same dtype.
        value_BKSE: of the same dtype.
        mask: the keys that a query sees. None: causal, key s is visible to query t if s <= t (then
            S = T). A boolean tensor of two to four axes that broadcasts to [B, H, T, S]: True is
            visible. A BlockMask: the same in blocks, for "flex".
        impl: "reference": the equation above, in fp32 or wider, with all [B, H, T, S] probabilities
            in memory.
            "sdpa": `torch.nn.functional.scaled_dot_product_attention`.
            "flex": `torch.nn.attention.flex_attention`, which skips blocks that no query sees. It
            is fused only inside a compiled graph and has no backward pass on a CPU.
            "blocks": one product for each 128 queries, with the keys up to the last of them; only
            for a causal mask. For bf16 heads it rounds scores and probabilities to bf16, as most
            eager models do. In a compiled graph on a CPU it takes half the time of the fused kernel
            (dev/log.md), but its memory grows with T^2.
            "cached": the arithmetic of `cached_attention`, as if keys and values were in a cache
            with T slots. On a CPU, in eager mode, a text at the beginning of its row then gets the same
            bits as if it were decoded token by token. All probabilities are kept for the backward pass.
            "auto": "flex" for a BlockMask; "blocks" for bf16 and up to 1,024 keys in a compiled
            graph on a CPU; else "sdpa". The choice does not depend on what the mask says. So name
            "sdpa" for a mask that is not causal, because "blocks" would ignore later keys.
        kernel: the kernel of "sdpa" without a mask. "torch": torch's own choice; "repeated": torch's
            choice after key-value heads were repeated; "cudnn", "flash", "efficient": the kernel of this
            name, on a GPU. With a dense mask torch always chooses.
        sink_H: for each query head, a score that takes part in every softmax and has no value, so
            that a query's probabilities may sum to less than 1 (Xiao et al., arXiv 2309.17453; it
            is 0 in Miller's "Off By One"). None: no sinks.

    Returns:
        [B, H, T, E] in the dtype of the query.

    Raises:
        ValueError: the mask is of a kind that `impl` cannot read.
        RuntimeError: the named kernel cannot compute this on this device; raised by torch.
    """
    heads = query_BHTE, key_BKSE, value_BKSE
    if isinstance(mask, BlockMask):
        if impl not in ("auto", "flex"):
            raise ValueError(f"impl={impl!r} reads a boolean tensor or None, not a BlockMask")
        return _flex(heads, mask, sink_H)
    if impl == "flex":
        raise ValueError("impl='flex' reads a BlockMask, not a boolean tensor or None")
    if impl == "reference":
        return _reference(heads, _visible(heads, mask), sink_H)
    if impl == "cached":
        return _as_cached(heads, _visible(heads, mask), sink_H)
    if impl == "blocks" or (impl == "auto" and _blocks_are_faster(query_BHTE, key_BKSE)):
        return _in_query_blocks(heads, _visible(heads, mask), sink_H)
    return _sdpa(heads, mask, kernel, sink_H)


def _visible(heads: Heads, mask: Tensor | None) -> Tensor:
    """Return the mask as a boolean tensor [B or 1, H or 1, T, S]; None becomes the causal mask."""
    query_BHTE, key_BKSE, _ = heads
    queries = query_BHTE.shape[2]
    keys = key_BKSE.shape[2]
    if mask is None:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=key_BKSE.device).tril()
    missing_axes = [1] * (4 - mask.ndim)
    return mask.view(*missing_axes, *mask.shape).expand(-1, -1, queries, keys)


# ── "reference" ─────────────────────────────────────────────────────────────────────────────────


def _reference(heads: Heads, mask: Tensor, sink_H: Tensor | None) -> Tensor:
    """Return attention by the equation of `attention`."""
    query_BHTE, key_BKSE, value_BKSE = heads
    wide_dtype = torch.float64 if query_BHTE.dtype == torch.float64 else torch.float32
    key_BHSE, value_BHSE = (
        _repeat_heads(each.to(wide_dtype), query_BHTE.shape[1]) for each in (key_BKSE, value_BKSE)
    )
    scores_BHTS = (
        query_BHTE.to(wide_dtype) @ key_BHSE.transpose(-1, -2) / query_BHTE.shape[-1] ** 0.5
    )
    # The score of a key that is not visible is the lowest finite number, not -inf. So the softmax of
    # a query that sees no key is finite, and `where` can make it zero. For all other queries,
    # exp(lowest - max) is exactly zero.
    scores_BHTS = scores_BHTS.masked_fill(~mask, torch.finfo(wide_dtype).min)
    if sink_H is not None:
        sink_BHT1 = sink_H.to(wide_dtype)[:, None, None].expand(*scores_BHTS.shape[:-1], 1)
        scores_BHTS = torch.cat([scores_BHTS, sink_BHT1], -1)
    keys = key_BKSE.shape[2]
    softmax_BHTS = scores_BHTS.softmax(dim=-1)[..., :keys]  # without the sink
    probabilities_BHTS = torch.where(mask, softmax_BHTS, 0.0)
    return (probabilities_BHTS @ value_BHSE).to(query_BHTE.dtype)


def _repeat_heads(heads_BKSE: Tensor, query_heads: int) -> Tensor:
    """Repeat each key-value head, so that there are as many of them as query heads."""
    groups = query_heads // heads_BKSE.shape[1]
    return heads_BKSE if groups == 1 else heads_BKSE.repeat_interleave(groups, dim=1)


# ── "sdpa" ──────────────────────────────────────────────────────────────────────────────────────

_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
# The number of channels that `_sdpa` adds to each head to compute sinks. Only the first of them is used. The
# others are zeros: fused kernels need a head dimension that is a multiple of 8.
SINK_CHANNELS = 8


def _sdpa(
    heads: Heads, mask: Tensor | None, kernel: AttentionKernel, sink_H: Tensor | None
) -> Tensor:
    """Return attention by torch's own function, which has no sinks.

    So a sink is the score of one more key. Queries and keys get one more channel, and their scores
    are products of these rows (the scale is left out):

        queries:  first   [0 ... 0,  0]        keys:  first   [0 ... 0,  1]
                  others  [query,  sink]              others  [key,      0]

    The first key has the value 0. The first query is there so that a causal mask stays square, and
    its result is dropped.
    """
    if sink_H is None:
        return _by_torch(heads, mask, kernel)
    queries, head_dim = heads[0].shape[2:]
    keys = heads[1].shape[2]
    scale = head_dim**-0.5
    # `F.pad` takes the numbers of zeros before and after the elements: for the last axis, then for the
    # second to last.
    query_BHTE, key_BKSE, value_BKSE = (F.pad(each, (0, SINK_CHANNELS, 1, 0)) for each in heads)
    # The zeros before and after the one channel that is used, on the last axis.
    around_channel = (head_dim, SINK_CHANNELS - 1)
    # torch multiplies all scores by the scale. A sink must not be scaled, so it is divided by it first.
    scaled_HT1 = (sink_H / scale).to(query_BHTE.dtype)[:, None, None].expand(-1, queries, 1)
    query_BHTE = query_BHTE + F.pad(scaled_HT1, (*around_channel, 1, 0))
    key_BKSE = key_BKSE + F.pad(key_BKSE.new_ones(1, 1), (*around_channel, 0, keys))
    if mask is not None:
        mask = mask.expand(*mask.shape[:-2], queries, keys)
        mask = F.pad(mask, (1, 0, 1, 0), value=True)
    out_BHTE = _by_torch((query_BHTE, key_BKSE, value_BKSE), mask, kernel, scale)
    return out_BHTE[:, :, 1:, :head_dim]


def _by_torch(
    heads: Heads, mask: Tensor | None, kernel: AttentionKernel, scale: float | None = None
) -> Tensor:
    """Return attention by `scaled_dot_product_attention`; `kernel` is that of `attention`."""
    query_BHTE, key_BKSE, value_BKSE = heads
    needs_efficient = query_BHTE.is_cuda and (mask is not None or not _flash_supports(query_BHTE))
    if needs_efficient or kernel in ("efficient", "repeated"):
        # torch's memory-efficient kernel is the only fused one that every card has for a dense mask,
        # for fp32, and before sm_80. It needs as many key-value heads as query heads; with fewer,
        # torch would use its unfused path.
        key_BKSE, value_BKSE = (
            _repeat_heads(each, query_BHTE.shape[1]) for each in (key_BKSE, value_BKSE)
        )
    torch_chooses = mask is not None or kernel in ("torch", "repeated")
    if torch_chooses:
        return F.scaled_dot_product_attention(
            query_BHTE,
            key_BKSE,
            value_BKSE,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=True,
        )
    with sdpa_kernel(_BACKENDS[kernel]):
        return F.scaled_dot_product_attention(
            query_BHTE, key_BKSE, value_BKSE, is_causal=True, scale=scale, enable_gqa=True
        )


def _flash_supports(query_BHTE: Tensor) -> bool:
    """Return whether flash attention can compute these queries on their GPU."""
    if query_BHTE.dtype.itemsize != 2:
        return False
    return torch.cuda.get_device_properties(query_BHTE.device).major >= 8


# ── "flex" ──────────────────────────────────────────────────────────────────────────────────────


def _flex(heads: Heads, mask: BlockMask, sink_H: Tensor | None) -> Tensor:
    """Return attention by flex attention, which has no sinks; a sink takes its share of the result afterwards."""
    # torch's type of the kernel options lists only options that both passes have. Our options also include
    # some that only one pass has, such as "bwd_BLOCK_M1".
    options: Any = flex_options(heads[0])
    aux = None if sink_H is None else AuxRequest(lse=True)
    result: Any = flex_attention(
        *heads, block_mask=mask, enable_gqa=True, kernel_options=options, return_aux=aux
    )
    if sink_H is None:
        return result
    # With a sink, the keys' probabilities sum to exp(lse) / (exp(lse) + exp(sink)), where lse is the
    # log-sum-exp of a query's scores.
    out_BHTE, aux_outputs = result
    keys_share_BHT = (aux_outputs.lse - sink_H[:, None]).sigmoid()
    return (out_BHTE * keys_share_BHT[..., None]).to(heads[0].dtype)


# ── "blocks" ────────────────────────────────────────────────────────────────────────────────────

BLOCK_QUERIES = 128  # the queries of one product of the implementation "blocks"
# Largest number of keys for which "auto" chooses "blocks". There is a limit because "blocks" keeps
# all probabilities for the backward pass.
MAX_KEYS_IN_BLOCKS = 1024


def _blocks_are_faster(query_BHTE: Tensor, key_BKSE: Tensor) -> bool:
    """Return whether "auto" chooses "blocks", where it was measured to be faster than "sdpa"."""
    in_graph_on_cpu = query_BHTE.device.type == "cpu" and torch.compiler.is_compiling()
    is_bf16 = query_BHTE.dtype == torch.bfloat16
    return in_graph_on_cpu and is_bf16 and key_BKSE.shape[2] <= MAX_KEYS_IN_BLOCKS


def _in_query_blocks(heads: Heads, mask: Tensor, sink_H: Tensor | None) -> Tensor:
    """Return causal attention with one product for each block of queries; see "blocks" above.

    Shapes: P = B K pairs of a row and a key-value head, Q queries in a block, L = G Q queries of a
    pair in a block, R keys from the first one to the last that the block may see.
    """
    query_BHTE, key_BKSE, value_BKSE = heads
    rows, key_heads = key_BKSE.shape[:2]
    length = query_BHTE.shape[2]
    # The bias of a key that a query does not see. It is half of the lowest number, so that adding a
    # score cannot overflow.
    hiding_bias = torch.finfo(query_BHTE.dtype).min / 2
    # The mask is a bias that the matrix product adds. The loop over the scores must not read a mask
    # itself, because Inductor then splits a row's softmax into several loops, which takes 1.5 times
    # as long (dev/log.md).
    bias = torch.zeros_like(mask, dtype=query_BHTE.dtype).masked_fill(~mask, hiding_bias)
    bias_BKGTS = bias.expand(rows, query_BHTE.shape[1], -1, -1).unflatten(1, (key_heads, -1))
    scaled_query_BHTE = query_BHTE * query_BHTE.shape[-1] ** -0.5
    query_PGTE = scaled_query_BHTE.unflatten(1, (key_heads, -1)).flatten(0, 1)
    key_PSE = key_BKSE.flatten(0, 1)
    value_PSE = value_BKSE.flatten(0, 1)
    outs = []
    for begin in range(0, length, BLOCK_QUERIES):
        end = min(begin + BLOCK_QUERIES, length)
        bias_PLR = bias_BKGTS[..., begin:end, :end].flatten(2, 3).flatten(0, 1)
        query_PLE = query_PGTE[..., begin:end, :].flatten(1, 2)
        scores_PLR = torch.baddbmm(bias_PLR, query_PLE, key_PSE[:, :end].transpose(-1, -2))
        scores_PLR = scores_PLR.to(torch.promote_types(scores_PLR.dtype, torch.float32))
        # The score of a hidden key is near `hiding_bias`. The score of a visible key has the bias 0, and is
        # far above half of `hiding_bias`. So a query sees no key if its largest score is below the half.
        sees_nothing_PL1 = scores_PLR.detach().amax(dim=-1, keepdim=True) <= hiding_bias / 2
        if sink_H is not None:
            sink_KL1 = _sinks_of_queries(sink_H.to(scores_PLR), key_heads, end - begin)
            scores_PLR = torch.cat([scores_PLR, sink_KL1.repeat(rows, 1, 1)], dim=-1)
        weights_PLR = scores_PLR.softmax(dim=-1)[..., :end]  # without the sink
        out_PLE = weights_PLR.to(value_PSE.dtype) @ value_PSE[:, :end]
        out_PGQE = torch.where(sees_nothing_PL1, 0.0, out_PLE).unflatten(1, (-1, end - begin))
        outs.append(out_PGQE)
    return torch.cat(outs, dim=2).unflatten(0, (rows, -1)).flatten(1, 2)


def _sinks_of_queries(sink_H: Tensor, key_heads: int, queries: int) -> Tensor:
    """Return the sink of each query's head, [K, G queries, 1]."""
    return sink_H.view(key_heads, -1, 1, 1).expand(-1, -1, queries, -1).flatten(1, 2)


# ── over a cache, and "cached" ──────────────────────────────────────────────────────────────────

BLOCK = 128  # slots of a cache's block
MIN_BLOCK = 16  # slots of a block of a cache for short texts


def slots_per_block(slots: int) -> int:
    """Return the number of slots in a block of a cache with at most `slots` slots.

    Caches for short texts have smaller blocks.
    """
    next_power_of_two = 1 << (slots - 1).bit_length()
    return min(BLOCK, max(MIN_BLOCK, next_power_of_two))


def cached_attention(
    query_BHTE: Tensor,
    keys_NBKCE: Tensor,
    values_NBKCE: Tensor,
    positions_BT: Tensor,
    window: int | None = None,
    pads_products: bool = False,
    sink_H: Tensor | None = None,
) -> Tensor:
    """Compute softmax attention of queries to the cache's slots up to their own positions.

        out[b, h, t] = sum_s p[t, s] * value[b, h // G, s]
        p[t]         = softmax over the visible s of (query[b, h, t] . key[b, h // G, s]) / sqrt(E)
        visible      : positions[b, t] - window < s <= positions[b, t]

    Slot s holds position s. The bits of a row depend neither on the number of blocks nor on the other
    rows: a sum over slots is taken inside each block first, and the sums of the blocks are then added
    in an order that blocks of zeros at the end do not change (`_sum_by_halving`). A block that a query
    does not see is such a block of zeros.

    Args:
        query_BHTE: queries, floating.
        keys_NBKCE: the first N blocks of a layer, finite everywhere.
        values_NBKCE: of the same shape and dtype.
        positions_BT: the queries' positions, int64, below N C; their slots have been written.
        window: the number of positions that a query sees, up to and including its own; None: all positions
            up to its own.
        pads_products: whether matrix products of few rows are padded with rows of zeros
            (`ops.padded_rows`). The number of rows decides how a product is rounded, so without
            padding a step of decoding, which has one query, may have other bits than a pass over the
            whole text. Padding takes 10 to 20 % more time.
        sink_H: see `attention`.

    Returns:
        [B, H, T, E] in the dtype of the query; scores, softmax and sums are fp32 or wider.
    """
    blocks, _, key_heads, slots, _ = keys_NBKCE.shape
    groups = query_BHTE.shape[1] // key_heads
    slots_N111C = torch.arange(blocks * slots, device=positions_BT.device).view(
        blocks, 1, 1, 1, slots
    )
    positions_B1M1 = positions_BT.repeat(1, groups)[:, None, :, None]
    distances_NB1MC = positions_B1M1 - slots_N111C
    is_visible_NB1MC = distances_NB1MC >= 0
    if window is not None:
        is_visible_NB1MC &= distances_NB1MC < window
    return _over_blocks(
        (query_BHTE, keys_NBKCE, values_NBKCE), is_visible_NB1MC, sink_H, pads_products
    )


def _as_cached(heads: Heads, mask: Tensor, sink_H: Tensor | None) -> Tensor:
    """Return attention by the arithmetic of `cached_attention`, over a cache that is made here.

    Args:
        heads: the queries, keys and values of whole texts.
        mask: boolean, [B or 1, H or 1, T, S].
        sink_H: see `attention`.
    """
    query_BHTE, key_BKSE, value_BKSE = heads
    key_heads, keys = key_BKSE.shape[1:3]
    block_slots = slots_per_block(keys)
    blocks = -(-keys // block_slots)  # rounded up
    padding = blocks * block_slots - keys
    # Keys and values get the axes of a cache, [N, B, K, C, E], as in decoding, because the bits of a
    # product may depend on the layout of its factors.
    keys_NBKCE, values_NBKCE = (
        F.pad(each, (0, 0, 0, padding)).unflatten(2, (blocks, block_slots)).movedim(2, 0)
        for each in (key_BKSE, value_BKSE)
    )
    # The softmax of a query that sees no key would be NaN. Such a query computes with all keys, and
    # its result is replaced by zeros, which have no gradient.
    sees_nothing = ~mask.any(dim=-1, keepdim=True)
    padded_mask = F.pad(mask | sees_nothing, (0, padding))
    mask_NBHTC = padded_mask.unflatten(3, (blocks, block_slots)).movedim(3, 0)
    # A mask of all heads is the same for each key-value head, so K's axis keeps the size 1.
    mask_heads = 1 if mask.shape[1] == 1 else key_heads
    groups = query_BHTE.shape[1] // key_heads
    is_visible_NBKGTC = mask_NBHTC.expand(-1, -1, mask_heads * groups, -1, -1).unflatten(
        2, (mask_heads, groups)
    )
    is_visible_NBKMC = is_visible_NBKGTC.flatten(3, 4).contiguous()
    out_BHTE = _over_blocks((query_BHTE, keys_NBKCE, values_NBKCE), is_visible_NBKMC, sink_H)
    return torch.where(sees_nothing, 0.0, out_BHTE)


def _over_blocks(
    heads: Heads, is_visible: Tensor, sink_H: Tensor | None, pads_products: bool = False
) -> Tensor:
    """Return the attention of queries to the blocks of a cache; see `cached_attention`.

    Args:
        heads: queries [B, H, T, E], and keys and values [N, B, K, C, E].
        is_visible: whether a query sees a slot, [N, B or 1, K or 1, M, C]. Each query sees at least one.
        sink_H: see `attention`.
        pads_products: see `cached_attention`.
    """
    query_BHTE, keys_NBKCE, values_NBKCE = heads
    key_heads, head_dim = keys_NBKCE.shape[2], keys_NBKCE.shape[-1]
    groups = query_BHTE.shape[1] // key_heads
    wide_dtype = torch.promote_types(query_BHTE.dtype, torch.float32)
    query_BKME = query_BHTE.unflatten(1, (key_heads, groups)).flatten(2, 3)
    least_queries = least_rows(head_dim) if pads_products else 0
    products_NBKMC = _wide_product(query_BKME, keys_NBKCE.mT, wide_dtype, least_queries)
    scores_NBKMC = products_NBKMC * head_dim**-0.5
    scores_NBKMC = scores_NBKMC.masked_fill(~is_visible, -torch.inf)
    largest_1BKM1 = scores_NBKMC.amax(dim=(0, -1), keepdim=True)
    if sink_H is not None:
        sink_KM1 = _sinks_of_queries(sink_H.to(wide_dtype), key_heads, query_BHTE.shape[2])
        largest_1BKM1 = largest_1BKM1.maximum(sink_KM1)
    weights_NBKMC = (scores_NBKMC - largest_1BKM1).exp()
    total_BKM1 = _sum_by_halving(weights_NBKMC.sum(-1, keepdim=True))
    if sink_H is not None:
        total_BKM1 = total_BKM1 + (sink_KM1 - largest_1BKM1[0]).exp()
    rounded_NBKMC = weights_NBKMC.to(values_NBKCE.dtype)
    # Four rows are enough here for sums of any length, because the right factor is not transposed.
    least_weights = LEAST_ROWS_OF_SHORT_SUMS if pads_products else 0
    mixed_NBKME = _wide_product(rounded_NBKMC, values_NBKCE, wide_dtype, least_weights)
    out_BKME = _sum_by_halving(mixed_NBKME) / total_BKM1
    return out_BKME.to(query_BHTE.dtype).unflatten(2, (groups, -1)).flatten(1, 2)


def _wide_product(left: Tensor, right_NBKXY: Tensor, wide_dtype: torch.dtype, least: int) -> Tensor:
    """Return the products left @ right, [N, B, K, M, Y], summed over X in the dtype `wide_dtype`.

    Args:
        left: [N, B, K, M, X], or [B, K, M, X] if all blocks have the same left factor.
        right_NBKXY: the right factors.
        wide_dtype: fp32 or wider.
        least: M is padded to this number at least, and to a multiple of four (`ops.padded_rows`); 0: it
            is not padded.
    """
    rows = left.shape[-2]
    if least and (padding := padded_count(rows, least) - rows):
        padded = F.pad(left, (0, 0, 0, padding))
        return _wide_product(padded, right_NBKXY, wide_dtype, least)[..., :rows, :]
    # On a GPU, `bmm` reads narrow numbers and sums them in fp32, so that no wide copies are needed.
    # Its `out_dtype` exists only there, and only for two factors of one narrower dtype. Under
    # autocast the dtypes differ: queries are narrower than the cache, which has the weights' dtype.
    has_one_narrow_dtype = left.dtype == right_NBKXY.dtype and left.dtype != wide_dtype
    if not (left.is_cuda and has_one_narrow_dtype):
        return left.to(wide_dtype) @ right_NBKXY.to(wide_dtype)
    left_NBKMX = left.expand(*right_NBKXY.shape[:-2], *left.shape[-2:])
    return torch.bmm(
        left_NBKMX.flatten(0, 2), right_NBKXY.flatten(0, 2), out_dtype=wide_dtype
    ).unflatten(0, right_NBKXY.shape[:3])


def _sum_by_halving(parts_N: Tensor) -> Tensor:
    """Return the sum over the first axis. Parts of zeros at the end do not change its bits.

    Let P be the smallest power of two that is at least N, and think of zeros after the N parts. Parts i
    and i + P / 2 are added, which leaves P / 2 parts, and so on until one part is left. With more zeros,
    P is larger, so there are more steps at the beginning. But these steps only add zeros.
    """
    while (count := parts_N.shape[0]) > 1:
        half = 1 << ((count - 1).bit_length() - 1)  # P / 2, the largest power of two below count
        sums_of_two = parts_N[: count - half] + parts_N[half:]
        without_partner = parts_N[count - half : half]
        parts_N = torch.cat([sums_of_two, without_partner])
    return parts_N[0]
