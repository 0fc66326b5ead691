"""Compute grouped-query scaled dot-product attention, by the plain equation or by fused kernels.

Over a key-value cache the bits of the result do not depend on how much of the cache is read
(`cached_attention`).

Shapes: B rows, H query heads, K key-value heads (H is a multiple of K), G = H / K query heads of
each, T queries, S keys, D head dimension. Over a cache: E head dimension, N blocks of C slots,
M = G T. In `_in_query_blocks`: Q queries in a block, R keys that they may see, N = B K, M = G Q.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from monograph.ops.flex_options import flex_options
from monograph.ops.padded_rows import padded_count

BLOCK = 128  # slots of a cache's block
MIN_BLOCK = 16  # slots of a block of a cache for short texts
# Queries [B, H, T, D], and keys and values, [B, K, S, D] or [N, B, K, C, E] of a cache.
Heads = tuple[Tensor, Tensor, Tensor]
# Channels that are added to a head for its sink: one is used, and fused kernels need a multiple of 8.
SINK_CHANNELS = 8


def cached_attention(
    query_BHTE: Tensor,
    keys_NBKCE: Tensor,
    values_NBKCE: Tensor,
    positions_BT: Tensor,
    window: int | None = None,
    is_filled: bool = False,
    sink_H: Tensor | None = None,
) -> Tensor:
    """Compute softmax attention of queries to the cache's slots up to their own positions.

        out[b, h, t] = sum_s p[t, s] * value[b, h // G, s]
        p[t]         = softmax over the visible s of (query[b, h, t] . key[b, h // G, s]) / sqrt(E)
        visible      : positions[b, t] - window < s <= positions[b, t]

    Slot s holds position s. Sums over slots are taken inside each block, and these are added by
    halving (`_sum_by_halving`), as if the number of blocks were padded to a power of two. A block
    that no query sees adds zeros. So the bits of a row depend neither on the number of blocks nor on
    the other rows.

    Args:
        query_BHTE: queries, floating.
        keys_NBKCE: the first N blocks of a layer, finite everywhere.
        values_NBKCE: of the same shape and dtype.
        positions_BT: the queries' positions, int64, below N C; their slots have been written.
        window: the number of positions that a query sees, the last of which is its own; None: all
            positions up to its own.
        is_filled: whether the rows of products are filled up to `padded_count(M)`, so that a step of
            decoding has the bits of a pass over the whole text. This takes 10 to 20 % more time.
        sink_H: see `attention`.

    Returns:
        [B, H, T, E] in the dtype of the query; scores, softmax and sums are fp32 or wider.
    """
    blocks, _, key_heads, slots, _ = keys_NBKCE.shape
    groups = query_BHTE.shape[1] // key_heads
    slots_N111C = torch.arange(blocks * slots, device=positions_BT.device).view(
        blocks, 1, 1, 1, slots
    )
    distances_NB1MC = positions_BT.repeat(1, groups)[:, None, :, None] - slots_N111C
    is_visible_NB1MC = distances_NB1MC >= 0
    if window is not None:
        is_visible_NB1MC &= distances_NB1MC < window
    return _over_blocks((query_BHTE, keys_NBKCE, values_NBKCE), is_visible_NB1MC, sink_H, is_filled)


def _over_blocks(
    heads: Heads, is_visible_NB1MC: Tensor, sink_H: Tensor | None, is_filled: bool = False
) -> Tensor:
    """Return the attention of queries to the blocks of a cache; see `cached_attention`."""
    query_BHTE, keys_NBKCE, values_NBKCE = heads
    key_heads, head_dim = keys_NBKCE.shape[2], keys_NBKCE.shape[-1]
    groups = query_BHTE.shape[1] // key_heads
    wide_dtype = torch.promote_types(query_BHTE.dtype, torch.float32)
    query_BKME = query_BHTE.unflatten(1, (key_heads, groups)).flatten(2, 3)
    products_NBKMC = _wide_product(query_BKME, keys_NBKCE.mT, wide_dtype, is_filled)
    scores_NBKMC = products_NBKMC * head_dim**-0.5
    scores_NBKMC = scores_NBKMC.masked_fill(~is_visible_NB1MC, -torch.inf)
    largest_1BKM1 = scores_NBKMC.amax(dim=(0, -1), keepdim=True)
    if sink_H is not None:
        sink_KM1 = _sinks_of_queries(sink_H.to(wide_dtype), key_heads, query_BHTE.shape[2])
        largest_1BKM1 = largest_1BKM1.maximum(sink_KM1)
    weights_NBKMC = (scores_NBKMC - largest_1BKM1).exp()
    total_BKM1 = _sum_by_halving(weights_NBKMC.sum(-1, keepdim=True))
    if sink_H is not None:
        total_BKM1 = total_BKM1 + (sink_KM1 - largest_1BKM1[0]).exp()
    rounded_NBKMC = weights_NBKMC.to(values_NBKCE.dtype)
    mixed_NBKME = _wide_product(rounded_NBKMC, values_NBKCE, wide_dtype, is_filled)
    out_BKME = _sum_by_halving(mixed_NBKME) / total_BKM1
    return out_BKME.to(query_BHTE.dtype).unflatten(2, (groups, -1)).flatten(1, 2)


def _sinks_of_queries(sink_H: Tensor, key_heads: int, queries: int) -> Tensor:
    """Return the sink of each query's head, [K, M, 1]."""
    return sink_H.view(key_heads, -1, 1, 1).expand(-1, -1, queries, -1).flatten(1, 2)


def _wide_product(
    left: Tensor, right_NBKXY: Tensor, wide_dtype: torch.dtype, is_filled: bool
) -> Tensor:
    """Return batched matrix products, summed in the dtype `wide_dtype`.

    See `cached_attention` for `is_filled`.
    """
    rows = left.shape[-2]
    if is_filled and padded_count(rows) > rows:
        padded = F.pad(left, (0, 0, 0, padded_count(rows) - rows))
        return _wide_product(padded, right_NBKXY, wide_dtype, is_filled)[..., :rows, :]
    # The dtypes differ under autocast: queries are narrower than the cache, which has the weights'
    # dtype.
    if left.dtype == wide_dtype or left.dtype != right_NBKXY.dtype or not left.is_cuda:
        return left.to(wide_dtype) @ right_NBKXY.to(wide_dtype)
    left_NBKMX = left.expand(*right_NBKXY.shape[:-2], *left.shape[-2:])
    return torch.bmm(
        left_NBKMX.flatten(0, 2), right_NBKXY.flatten(0, 2), out_dtype=wide_dtype
    ).unflatten(0, right_NBKXY.shape[:3])


def _sum_by_halving(parts_N: Tensor) -> Tensor:
    """Return the sum over the first axis, by halving.

    With P the power of two from N on, elements i and i + P / 2 are added, until one is left.
    """
    while (count := parts_N.shape[0]) > 1:
        half = 1 << (count - 1).bit_length() - 1
        parts_N = torch.cat(
            [parts_N[: count - half] + parts_N[half:], parts_N[count - half : half]]
        )
    return parts_N[0]


Impl = Literal["auto", "reference", "sdpa", "flex", "blocks", "cached"]
AttentionKernel = Literal["torch", "repeated", "cudnn", "flash", "efficient"]
Mask = Tensor | BlockMask | None

_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}

BLOCK_QUERIES = 128  # the queries of one product of the implementation "blocks"
# Largest number of keys for which "auto" chooses "blocks". There is a limit because "blocks" keeps
# all probabilities for the backward pass.
MAX_KEYS_IN_BLOCKS = 1024


def attention(
    query_BHTD: Tensor,
    key_BKSD: Tensor,
    value_BKSD: Tensor,
    mask: Mask,
    impl: Impl = "auto",
    kernel: AttentionKernel = "torch",
    sink_H: Tensor | None = None,
) -> Tensor:
    """Compute softmax attention in which H / K neighbouring query heads share one key-value head.

        out[b, h, t] = sum_s p[t, s] * value[b, h // (H / K), s]
        p[t]         = softmax over the visible s of (query[b, h, t] . key[b, h // (H / K), s]) / sqrt(D)

    A query that sees no key gets zeros, and zero gradients, in every implementation.

    Args:
        query_BHTD: floating.
        key_BKSD: of the same dtype.
        value_BKSD: of the same dtype.
        mask: the keys that a query sees. None: causal, key s is visible to query t if s <= t (then
            S = T). A boolean tensor that broadcasts to [B, H, T, S]: True is visible. A BlockMask:
            the same in blocks, for "flex".
        impl: "reference": the equation above, in fp32 or wider, with all [B, H, T, S] probabilities
            in memory.
            "sdpa": `torch.nn.functional.scaled_dot_product_attention`.
            "flex": `torch.nn.attention.flex_attention`, which skips blocks that no query sees. It
            is fused only inside a compiled graph and has no backward pass on a CPU.
            "blocks": one product for each 128 queries, with the keys up to the last of them; only
            for a causal mask. For bf16 heads it rounds scores and probabilities to bf16, as most
            eager models do. In a compiled graph on a CPU it takes half the time of the fused kernel
            (dev/log.md), but its memory grows with T^2.
            "cached": the arithmetic of `cached_attention` over a cache with T slots. On a CPU, in
            eager mode, a document at the beginning of its row has the bits that decoding gives it
            token by token. This keeps all probabilities for the backward pass.
            "auto": "flex" for a BlockMask; "blocks" for bf16 and up to 1,024 keys in a compiled
            graph on a CPU; else "sdpa". "auto" does not look at the mask: in the case of "blocks", a
            mask that is not causal needs impl="sdpa".
        kernel: the kernel of "sdpa" without a mask. "torch": torch's own choice; "repeated": torch's
            choice after key-value heads were repeated; "cudnn", "flash", "efficient": this kernel,
            on a GPU. With a dense mask it is always torch's choice.
        sink_H: for each query head, a score that takes part in every softmax and has no value, so
            that a query's probabilities may sum to less than 1 (Xiao et al., arXiv 2309.17453; it
            is 0 in Miller's "Off By One"). None: no sinks.

    Returns:
        [B, H, T, D] in the dtype of the query.

    Raises:
        ValueError: the mask is of a kind that `impl` cannot read.
        RuntimeError: the named kernel cannot compute this on this device; raised by torch.
    """
    heads = query_BHTD, key_BKSD, value_BKSD
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
    if impl == "blocks" or (impl == "auto" and _blocks_are_faster(query_BHTD, key_BKSD)):
        return _in_query_blocks(heads, _visible(heads, mask), sink_H)
    return _sdpa(heads, mask, kernel, sink_H)


def _visible(heads: Heads, mask: Tensor | None) -> Tensor:
    """Return the mask with four axes, as a boolean tensor for causal attention too."""
    if mask is None:
        query_BHTD, key_BKSD, _ = heads
        mask = torch.ones(
            query_BHTD.shape[2], key_BKSD.shape[2], dtype=torch.bool, device=key_BKSD.device
        ).tril()
    return mask.view(*[1] * (4 - mask.ndim), *mask.shape)


def _flex(heads: Heads, mask: BlockMask, sink_H: Tensor | None) -> Tensor:
    # torch's type of the options lacks those of one direction.
    options: Any = flex_options(heads[0])
    aux = None if sink_H is None else AuxRequest(lse=True)
    result: Any = flex_attention(
        *heads, block_mask=mask, enable_gqa=True, kernel_options=options, return_aux=aux
    )
    if sink_H is None:
        return result
    # With a sink, the keys' probabilities sum to exp(lse) / (exp(lse) + exp(sink)), where lse is the
    # log-sum-exp of a query's scores.
    out_BHTD, aux_outputs = result
    keys_share_BHT = (aux_outputs.lse - sink_H[:, None]).sigmoid()
    return (out_BHTD * keys_share_BHT[..., None]).to(heads[0].dtype)


def block_of(slots: int) -> int:
    """Return the number of slots in a block of a cache with at most `slots` slots.

    Caches for short texts have smaller blocks.
    """
    next_power_of_two = 1 << (slots - 1).bit_length()
    return min(BLOCK, max(MIN_BLOCK, next_power_of_two))


def _as_cached(heads: Heads, mask: Tensor, sink_H: Tensor | None) -> Tensor:
    """Return attention by the arithmetic of `cached_attention`; N blocks of C slots, M = G T."""
    query_BHTD, key_BKSD, value_BKSD = heads
    length = key_BKSD.shape[2]
    block = block_of(length)
    blocks = -(-length // block)
    padding = blocks * block - length
    # Keys and values get the memory layout of a cache, because the bits of a product may depend on it.
    keys_NBKCD, values_NBKCD = (
        F.pad(each, (0, 0, 0, padding)).unflatten(2, (blocks, block)).movedim(2, 0)
        for each in (key_BKSD, value_BKSD)
    )
    is_visible_NB1TC = F.pad(mask, (0, padding)).unflatten(3, (blocks, block)).movedim(3, 0)
    is_visible_NB1MC = is_visible_NB1TC.repeat(1, 1, 1, query_BHTD.shape[1] // key_BKSD.shape[1], 1)
    return _over_blocks((query_BHTD, keys_NBKCD, values_NBKCD), is_visible_NB1MC, sink_H)


def _sdpa(
    heads: Heads, mask: Tensor | None, kernel: AttentionKernel, sink_H: Tensor | None
) -> Tensor:
    if sink_H is None:
        return _by_torch(heads, mask, kernel)
    # torch's kernels have no sinks. So a first key is added, whose score is the sink and whose value is
    # 0: in an added channel, this key is 1 and each query is the sink of its head. A first query is
    # added, too, so that a causal mask stays square.
    head_dim = heads[0].shape[-1]
    queries = heads[0].shape[2]
    keys = heads[1].shape[2]
    scale = head_dim**-0.5
    query_BHTD, key_BKSD, value_BKSD = (F.pad(x, (0, SINK_CHANNELS, 1, 0)) for x in heads)
    scaled_HT1 = (sink_H / scale).to(query_BHTD.dtype)[:, None, None].expand(-1, queries, 1)
    query_BHTD = query_BHTD + F.pad(scaled_HT1, (head_dim, SINK_CHANNELS - 1, 1, 0))
    key_BKSD = key_BKSD + F.pad(key_BKSD.new_ones(1, 1), (head_dim, SINK_CHANNELS - 1, 0, keys))
    if mask is not None:
        mask = F.pad(mask.expand(*mask.shape[:-2], queries, keys), (1, 0, 1, 0), value=True)
    return _by_torch((query_BHTD, key_BKSD, value_BKSD), mask, kernel, scale)[:, :, 1:, :head_dim]


def _by_torch(
    heads: Heads, mask: Tensor | None, kernel: AttentionKernel, scale: float | None = None
) -> Tensor:
    query_BHTD, key_BKSD, value_BKSD = heads
    needs_efficient = query_BHTD.is_cuda and (mask is not None or not _flash_supports(query_BHTD))
    if needs_efficient or kernel in ("efficient", "repeated"):
        # torch's memory-efficient kernel is the only fused one that every card has for a dense mask,
        # for fp32, and before sm_80. It needs as many key-value heads as query heads; with fewer,
        # torch would use its unfused path.
        key_BKSD, value_BKSD = (
            _repeat_heads(each, query_BHTD.shape[1]) for each in (key_BKSD, value_BKSD)
        )
    if kernel in ("torch", "repeated") or mask is not None:
        return F.scaled_dot_product_attention(
            query_BHTD,
            key_BKSD,
            value_BKSD,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=True,
        )
    with sdpa_kernel(_BACKENDS[kernel]):
        return F.scaled_dot_product_attention(
            query_BHTD, key_BKSD, value_BKSD, is_causal=True, scale=scale, enable_gqa=True
        )


def _flash_supports(query_BHTD: Tensor) -> bool:
    """Return whether flash attention can compute these queries on their GPU."""
    if query_BHTD.dtype.itemsize != 2:
        return False
    return torch.cuda.get_device_properties(query_BHTD.device).major >= 8


def _blocks_are_faster(query_BHTD: Tensor, key_BKSD: Tensor) -> bool:
    in_graph_on_cpu = query_BHTD.device.type == "cpu" and torch.compiler.is_compiling()
    is_bf16 = query_BHTD.dtype == torch.bfloat16
    return in_graph_on_cpu and is_bf16 and key_BKSD.shape[2] <= MAX_KEYS_IN_BLOCKS


def _in_query_blocks(heads: Heads, mask: Tensor, sink_H: Tensor | None) -> Tensor:
    """Return causal attention with one product for each block of queries; see "blocks" above."""
    query_BHTD, key_BKSD, value_BKSD = heads
    rows, key_heads = key_BKSD.shape[:2]
    length = query_BHTD.shape[2]
    # The bias of a key that a query does not see. It is half of the lowest number, so that adding a
    # score cannot overflow.
    hiding_bias = torch.finfo(query_BHTD.dtype).min / 2
    # The mask is a bias that the product adds: if a loop over scores reads a mask, Inductor does not
    # compute a row's softmax in one loop (dev/log.md).
    bias = torch.zeros_like(mask, dtype=query_BHTD.dtype).masked_fill(~mask, hiding_bias)
    bias_BKGTS = bias.expand(rows, query_BHTD.shape[1], -1, -1).unflatten(1, (key_heads, -1))
    query_NGTD = (
        (query_BHTD * query_BHTD.shape[-1] ** -0.5).unflatten(1, (key_heads, -1)).flatten(0, 1)
    )
    key_NSD = key_BKSD.flatten(0, 1)
    value_NSD = value_BKSD.flatten(0, 1)
    outs = []
    for begin in range(0, length, BLOCK_QUERIES):
        end = min(begin + BLOCK_QUERIES, length)
        bias_NMR = bias_BKGTS[..., begin:end, :end].flatten(2, 3).flatten(0, 1)
        query_NMD = query_NGTD[..., begin:end, :].flatten(1, 2)
        scores_NMR = torch.baddbmm(bias_NMR, query_NMD, key_NSD[:, :end].transpose(-1, -2))
        scores_NMR = scores_NMR.to(torch.promote_types(scores_NMR.dtype, torch.float32))
        # Only a query that sees no key has no score above half of that bias.
        sees_nothing_NM1 = scores_NMR.detach().amax(dim=-1, keepdim=True) <= hiding_bias / 2
        if sink_H is not None:
            sink_KM1 = _sinks_of_queries(sink_H.to(scores_NMR), key_heads, end - begin)
            scores_NMR = torch.cat([scores_NMR, sink_KM1.repeat(rows, 1, 1)], dim=-1)
        weights_NMR = scores_NMR.softmax(dim=-1)[..., :end]
        out_NMD = weights_NMR.to(value_NSD.dtype) @ value_NSD[:, :end]
        outs.append(torch.where(sees_nothing_NM1, 0.0, out_NMD).unflatten(1, (-1, end - begin)))
    return torch.cat(outs, dim=2).unflatten(0, (rows, -1)).flatten(1, 2)


def _repeat_heads(heads_BKSD: Tensor, query_heads: int) -> Tensor:
    """Return as many key-value heads as query heads, by repetition."""
    groups = query_heads // heads_BKSD.shape[1]
    return heads_BKSD if groups == 1 else heads_BKSD.repeat_interleave(groups, dim=1)


def _reference(heads: Heads, mask: Tensor, sink_H: Tensor | None) -> Tensor:
    """Return attention by the equation of `attention`."""
    query_BHTD, key_BKSD, value_BKSD = heads
    wide_dtype = torch.float64 if query_BHTD.dtype == torch.float64 else torch.float32
    key_BHSD, value_BHSD = (
        _repeat_heads(each.to(wide_dtype), query_BHTD.shape[1]) for each in (key_BKSD, value_BKSD)
    )
    scores_BHTS = (
        query_BHTD.to(wide_dtype) @ key_BHSD.transpose(-1, -2) / query_BHTD.shape[-1] ** 0.5
    )
    # The score of a key that is not visible is the lowest finite number, not -inf. So the softmax of
    # a query that sees no key is finite, and `where` can make it zero. For all other queries,
    # exp(lowest - max) is exactly zero.
    scores_BHTS = scores_BHTS.masked_fill(~mask, torch.finfo(wide_dtype).min)
    if sink_H is not None:
        sink_BHT1 = sink_H.to(wide_dtype)[:, None, None].expand(*scores_BHTS.shape[:-1], 1)
        scores_BHTS = torch.cat([scores_BHTS, sink_BHT1], -1)
    keys = key_BKSD.shape[2]
    softmax_BHTS = scores_BHTS.softmax(dim=-1)[..., :keys]  # without the sink
    probabilities_BHTS = torch.where(mask, softmax_BHTS, 0.0)
    return (probabilities_BHTS @ value_BHSD).to(query_BHTD.dtype)
