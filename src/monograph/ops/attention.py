"""Compute grouped-query scaled dot-product attention, by the plain equation or by fused kernels.

Over a key-value cache the bits of the result do not depend on how much of the cache is read (`cached_attention`).
`time_kernels` and `fastest` find torch's fastest kernel for causal attention on a GPU, by timing a run's own shapes.

Shape suffixes: B batch, H query heads, K key-value heads (H is a multiple of K), G = H / K, T queries, S keys, D head
dimension, Q queries in a block, R keys that they may see, N = B K, M = G Q.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from monograph.device import clock, synchronize

BLOCK = 128  # slots
LEAST_BLOCK = 16
# On the CPUs that were measured a row of a product has the same bits whatever the number of rows, from so many on
# (docs/log.md).
SAME_ROWS = 4


def cached_attention(
    query_BHTE: Tensor,
    keys_NBKCE: Tensor,
    values_NBKCE: Tensor,
    positions_BT: Tensor,
    window: int | None = None,
    least: int = 1,
) -> Tensor:
    """Compute softmax attention of queries at given positions to the slots up to their own positions.

        out[b, h, t] = sum_s p[t, s] * value[b, h // G, s]
        p[t]         = softmax over the visible s of (query[b, h, t] . key[b, h // G, s]) / sqrt(E)
        visible      : positions[b, t] - window < s <= positions[b, t]

    Sums over slots are taken inside a block and then over blocks by halving, as if the number of blocks were padded to
    a power of two. A block that no query sees adds zeros, so more blocks, or other rows' lengths, change no bit.
    Here B are rows, M = G T, E the head dimension, N blocks and C slots of a block; slot s holds position s.

    Args:
        query_BHTE: floating.
        keys_NBKCE: the first N blocks of a layer, finite everywhere.
        values_NBKCE: same shape and dtype.
        positions_BT: int64, below N C; their slots have been written.
        window: number of positions that a query sees, its own the last of them; None: all up to its own.
        least: if M is smaller, products are computed several times. With SAME_ROWS a step of decoding has the bits of a
            pass over the whole text; it takes a tenth more time or two.

    Returns:
        [B, H, T, E] in the dtype of the query; scores, softmax and sums are fp32 or wider.
    """
    blocks, _, key_heads, slots, _ = keys_NBKCE.shape
    groups = query_BHTE.shape[1] // key_heads
    slots_N111C = torch.arange(blocks * slots, device=positions_BT.device).view(blocks, 1, 1, 1, slots)
    distances_NB1MC = positions_BT.repeat(1, groups)[:, None, :, None] - slots_N111C
    seen_NB1MC = distances_NB1MC >= 0
    if window is not None:
        seen_NB1MC &= distances_NB1MC < window
    return _over_blocks(query_BHTE, keys_NBKCE, values_NBKCE, seen_NB1MC, least)


def _over_blocks(
    query_BHTE: Tensor, keys_NBKCE: Tensor, values_NBKCE: Tensor, seen_NB1MC: Tensor, least: int = 1
) -> Tensor:
    key_heads, head_dim = keys_NBKCE.shape[2], keys_NBKCE.shape[-1]
    groups = query_BHTE.shape[1] // key_heads
    wide = torch.promote_types(query_BHTE.dtype, torch.float32)
    query_BKME = query_BHTE.unflatten(1, (key_heads, groups)).flatten(2, 3)
    scores_NBKMC = _product(query_BKME, keys_NBKCE.transpose(-1, -2), wide, least) * head_dim**-0.5
    scores_NBKMC = scores_NBKMC.masked_fill(~seen_NB1MC, -torch.inf)
    weights_NBKMC = (scores_NBKMC - scores_NBKMC.amax(dim=(0, -1), keepdim=True)).exp()
    total_BKM1 = _halved(weights_NBKMC.sum(-1, keepdim=True))
    mixed_BKME = _halved(_product(weights_NBKMC.to(values_NBKCE.dtype), values_NBKCE, wide, least)) / total_BKM1
    return mixed_BKME.to(query_BHTE.dtype).unflatten(2, (groups, -1)).flatten(1, 2)


def _product(left: Tensor, right_NBKXY: Tensor, wide: torch.dtype, least: int) -> Tensor:
    """Return batched matrix products, summed in the dtype `wide`, of at least so many rows at once."""
    if (rows := left.shape[-2]) < least:
        again = left.repeat(*[1] * (left.ndim - 2), -(-least // rows), 1)
        return _product(again, right_NBKXY, wide, 1)[..., :rows, :]
    # Autocast makes queries narrower than the cache, which has the weights' dtype.
    if left.dtype == wide or left.dtype != right_NBKXY.dtype or not left.is_cuda:
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


Impl = Literal["auto", "reference", "sdpa", "flex", "blocks", "cached"]
Kernel = Literal["torch", "repeated", "cudnn", "flash", "efficient"]
Mask = Tensor | BlockMask | None

_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}

QUERIES = 128  # queries in a block of "blocks"
MOST_KEYS = 1024  # largest number of keys at which "auto" takes "blocks", which keeps probabilities for backward


def attention(
    query_BHTD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, mask: Mask, impl: Impl = "auto", kernel: Kernel = "torch"
) -> Tensor:
    """Compute softmax attention in which H / K neighbouring query heads share one key-value head.

        out[b, h, t] = sum_s p[t, s] * value[b, h // (H / K), s]
        p[t]         = softmax over the visible s of (query[b, h, t] . key[b, h // (H / K), s]) / sqrt(D)

    A query that sees no key gets zeros, and zero gradients, in every implementation.

    Args:
        query_BHTD: floating.
        key_BKSD: same dtype.
        value_BKSD: same dtype.
        mask: the keys that a query sees. None: causal, key s is visible to query t if s <= t (then S = T). A boolean
            tensor that broadcasts to [B, H, T, S]: True is visible. A BlockMask: the same in blocks, for "flex".
        impl: "reference": the equation above, in fp32 or wider, with all [B, H, T, S] probabilities in memory.
            "sdpa": `torch.nn.functional.scaled_dot_product_attention`.
            "flex": `torch.nn.attention.flex_attention`, which skips blocks that no query sees; it is fused only inside
            a compiled graph and has no backward on a CPU.
            "blocks": one product for each 128 queries, with the keys up to the last of them, for a causal mask. For
            bf16 heads it rounds scores and probabilities to bf16, as most eager models do. In a compiled graph on a CPU
            it takes half the time of the fused kernel (docs/log.md), and memory that grows with T^2.
            "cached": the arithmetic of `cached_attention` over a cache with T slots. On a CPU, in eager mode, a
            document that begins its row has the bits that decoding gives it, token by token. It keeps all probabilities
            for the backward pass.
            "auto": "flex" for a BlockMask, else "sdpa", but "blocks" for bf16 and up to 1,024 keys in a compiled graph
            on a CPU, where a mask that is not causal needs "sdpa".
        kernel: the torch kernel of "sdpa" if there is no mask: torch's own choice, its choice for "repeated" key-value
            heads, or one by name on a GPU. For a dense mask it is always torch's choice.

    Returns:
        [B, H, T, D] in the dtype of the query.

    Raises:
        ValueError: the mask is of a kind that `impl` cannot read.
        RuntimeError: raised by torch: the named kernel cannot compute this on this device.
    """
    if isinstance(mask, BlockMask):
        if impl not in ("auto", "flex"):
            raise ValueError(f"impl={impl!r} reads a boolean tensor or None, not a BlockMask")
        # Without gradients and for fewer than 128 queries, torch 2.13 would take its kernel for decoding, which reads
        # these queries with wrong strides, or find none for grouped heads.
        options: Any = {"FORCE_USE_FLEX_ATTENTION": True}
        out = flex_attention(query_BHTD, key_BKSD, value_BKSD, block_mask=mask, enable_gqa=True, kernel_options=options)
        assert isinstance(out, Tensor)  # a tuple only when the log-sum-exp is asked for
        return out
    if impl == "flex":
        raise ValueError("impl='flex' reads a BlockMask, not a boolean tensor or None")
    if impl == "reference":
        return _reference(query_BHTD, key_BKSD, value_BKSD, mask)
    if impl == "cached":
        return _as_cached(query_BHTD, key_BKSD, value_BKSD, mask)
    if impl == "blocks" or (impl == "auto" and _blocks_are_faster(query_BHTD, key_BKSD)):
        return _in_blocks(query_BHTD, key_BKSD, value_BKSD, mask)
    return _sdpa(query_BHTD, key_BKSD, value_BKSD, mask, kernel)


def block_of(slots: int) -> int:
    """Return the slots of a block of a cache that never has more than so many: fewer than BLOCK for short texts."""
    return min(BLOCK, max(LEAST_BLOCK, 1 << (slots - 1).bit_length()))


def _as_cached(query_BHTD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, mask: Tensor | None) -> Tensor:
    length = key_BKSD.shape[2]
    block = block_of(length)
    blocks = -(-length // block)
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool, device=key_BKSD.device).tril()
    mask = mask.view(*[1] * (4 - mask.ndim), *mask.shape)
    # In the memory layout of the cache, on which the bits of a product may depend.
    keys_NBKCD, values_NBKCD = (
        F.pad(heads, (0, 0, 0, blocks * block - length)).unflatten(2, (blocks, block)).movedim(2, 0)
        for heads in (key_BKSD, value_BKSD)
    )
    seen_NB1TC = F.pad(mask, (0, blocks * block - length)).unflatten(3, (blocks, block)).movedim(3, 0)
    seen_NB1MC = seen_NB1TC.repeat(1, 1, 1, query_BHTD.shape[1] // key_BKSD.shape[1], 1)
    return _over_blocks(query_BHTD, keys_NBKCD, values_NBKCD, seen_NB1MC)


def _sdpa(query_BHTD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, mask: Tensor | None, kernel: Kernel) -> Tensor:
    own_keys = query_BHTD.is_cuda and (mask is not None or not _flash_reads(query_BHTD))
    if own_keys or kernel in ("efficient", "repeated"):
        # The only fused kernel that every card has for a dense mask, for fp32, and before sm_80 (memory-efficient)
        # needs as many key-value heads as query heads; with fewer, torch would take the unfused path.
        key_BKSD, value_BKSD = (_expand(heads, query_BHTD.shape[1]) for heads in (key_BKSD, value_BKSD))
    if kernel in ("torch", "repeated") or mask is not None:
        return F.scaled_dot_product_attention(
            query_BHTD, key_BKSD, value_BKSD, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
    with sdpa_kernel(_BACKENDS[kernel]):
        out = F.scaled_dot_product_attention(query_BHTD, key_BKSD, value_BKSD, is_causal=True, enable_gqa=True)
    return out


def _flash_reads(query_BHTD: Tensor) -> bool:
    return query_BHTD.dtype.itemsize == 2 and torch.cuda.get_device_properties(query_BHTD.device).major >= 8


def _blocks_are_faster(query_BHTD: Tensor, key_BKSD: Tensor) -> bool:
    on_cpu = query_BHTD.device.type == "cpu" and torch.compiler.is_compiling()
    return on_cpu and query_BHTD.dtype == torch.bfloat16 and key_BKSD.shape[2] <= MOST_KEYS


def _in_blocks(query_BHTD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, mask: Tensor | None) -> Tensor:
    (rows, key_heads), length = key_BKSD.shape[:2], query_BHTD.shape[2]
    if mask is None:
        mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=query_BHTD.device).tril()
    mask = mask.view(*[1] * (4 - mask.ndim), *mask.shape)
    # Half of the lowest number, so that adding a score cannot overflow. It is added in the product, because a mask that
    # a loop over scores reads keeps Inductor from computing a row's softmax in one loop (docs/log.md).
    unseen = torch.finfo(query_BHTD.dtype).min / 2
    bias = torch.zeros_like(mask, dtype=query_BHTD.dtype).masked_fill(~mask, unseen)
    bias_BKGTS = bias.expand(rows, query_BHTD.shape[1], -1, -1).unflatten(1, (key_heads, -1))
    query_NGTD = (query_BHTD * query_BHTD.shape[-1] ** -0.5).unflatten(1, (key_heads, -1)).flatten(0, 1)
    key_NSD, value_NSD = key_BKSD.flatten(0, 1), value_BKSD.flatten(0, 1)
    outs = []
    for begin in range(0, length, QUERIES):
        end = min(begin + QUERIES, length)
        bias_NMR = bias_BKGTS[..., begin:end, :end].flatten(2, 3).flatten(0, 1)
        query_NMD = query_NGTD[..., begin:end, :].flatten(1, 2)
        scores_NMR = torch.baddbmm(bias_NMR, query_NMD, key_NSD[:, :end].transpose(-1, -2))
        scores_NMR = scores_NMR.to(torch.promote_types(scores_NMR.dtype, torch.float32))
        sees_nothing_NM1 = scores_NMR.detach().amax(dim=-1, keepdim=True) <= unseen / 2
        out_NMD = scores_NMR.softmax(dim=-1).to(value_NSD.dtype) @ value_NSD[:, :end]
        outs.append(torch.where(sees_nothing_NM1, 0.0, out_NMD).unflatten(1, (-1, end - begin)))
    return torch.cat(outs, dim=2).unflatten(0, (rows, -1)).flatten(1, 2)


def _expand(heads_BKSD: Tensor, query_heads: int) -> Tensor:
    groups = query_heads // heads_BKSD.shape[1]
    return heads_BKSD if groups == 1 else heads_BKSD.repeat_interleave(groups, dim=1)


def _reference(query_BHTD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, mask: Tensor | None) -> Tensor:
    wide = torch.float64 if query_BHTD.dtype == torch.float64 else torch.float32
    key_BHSD, value_BHSD = (_expand(heads.to(wide), query_BHTD.shape[1]) for heads in (key_BKSD, value_BKSD))
    scores_BHTS = query_BHTD.to(wide) @ key_BHSD.transpose(-1, -2) / query_BHTD.shape[-1] ** 0.5
    if mask is None:
        mask = torch.ones(scores_BHTS.shape[-2:], dtype=torch.bool, device=scores_BHTS.device).tril()
    # The lowest finite number instead of -inf keeps the softmax of a row that sees nothing finite, for `where` to make
    # it zero; in every other row exp(lowest - max) is exactly zero.
    scores_BHTS = scores_BHTS.masked_fill(~mask, torch.finfo(wide).min)
    probabilities_BHTS = torch.where(mask, scores_BHTS.softmax(dim=-1), 0.0)
    return (probabilities_BHTS @ value_BHSD).to(query_BHTD.dtype)


# torch's unfused kernel is left out: it keeps the scores of all pairs, for which no memory plan has room.
KERNELS: tuple[Kernel, ...] = ("torch", "cudnn", "flash", "efficient")
ROUNDS, CALLS = 5, 4
MARGIN = 1.05  # a kernel must be this many times as fast as torch's own choice, so that noise does not choose


def timed(
    attempt: Callable[[Kernel], object], finish: Callable[[], object], now: Callable[[], float] = clock
) -> dict[Kernel, float]:
    """Return the shortest time of a call of `attempt` in seconds, by kernel, without kernels that fail.

    Args:
        attempt: runs one kernel; raises RuntimeError if it cannot, also if it is out of memory.
        finish: waits until the work that `attempt` began is done.
        now: the clock.
    """
    able: list[Kernel] = []
    for kernel in KERNELS:
        try:
            attempt(kernel)
            finish()
        except RuntimeError:
            continue
        able.append(kernel)
    times = dict.fromkeys(able, float("inf"))
    for _ in range(ROUNDS):  # kernels take turns, so that other load on the machine affects all alike
        for kernel in able:
            began = now()
            for _ in range(CALLS):
                attempt(kernel)
            finish()
            times[kernel] = min(times[kernel], (now() - began) / CALLS)
    return times


def fastest(times: Mapping[Kernel, float]) -> Kernel:
    """Return the fastest kernel; "torch" unless another one is faster by MARGIN."""
    if not times:
        return "torch"
    best = min(times, key=times.__getitem__)
    return best if MARGIN * times[best] <= times.get("torch", float("inf")) else "torch"


def compared(times: Mapping[Kernel, float], kernel: Kernel) -> str:
    """Return a text that names the chosen kernel and the speed of each kernel over torch's choice."""
    if "torch" not in times:
        return f"{kernel}, as torch's choice cannot run here"
    speeds = {name: times["torch"] / seconds for name, seconds in times.items() if name != "torch"}
    listed = ", ".join(f"{name} {speed:.2f}" for name, speed in speeds.items())
    used = "torch's choice" if kernel == "torch" else kernel
    return f"{used}; times as fast as torch's choice: {listed or 'no other can run here'}"


def time_kernels(
    batch: int, heads: tuple[int, int], length: int, size: int, dtype: torch.dtype, device: torch.device
) -> dict[Kernel, float]:
    """Return the seconds of causal attention, forward and backward, by kernel; empty without memory for its inputs.

    Args:
        batch: rows, B.
        heads: H and K.
        length: T.
        size: D.
        dtype: dtype of queries, keys and values.
        device: the device to time on.
    """
    generator = torch.Generator(device).manual_seed(0)  # leaves the run's own random state as it is

    def drawn(heads: int) -> Tensor:
        return torch.randn(batch, length, heads, size, device=device, dtype=dtype, generator=generator).transpose(1, 2)

    try:
        query_BHTD, key_BKTD, value_BKTD = (drawn(count).requires_grad_() for count in (heads[0], heads[1], heads[1]))
        cotangent_BHTD = drawn(heads[0])
    except torch.OutOfMemoryError:
        return {}

    def attempt(kernel: Kernel) -> None:
        out_BHTD = attention(query_BHTD, key_BKTD, value_BKTD, None, "sdpa", kernel)
        torch.autograd.grad(out_BHTD, (query_BHTD, key_BKTD, value_BKTD), cotangent_BHTD)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about every kernel that cannot run
        return timed(attempt, lambda: synchronize(device))
