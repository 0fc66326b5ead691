"""Compute a decode step with five Triton kernels per layer, for up to 16 rows on a GPU.

    qkv   = norm(x) [Wq; Wk; Wv]^T + b       `project`
    mixed = attention over the cache         `attend`: normalises heads, rotates, writes the cache
    x     = x + mixed Wo^T                   `project`
    inner = act(norm(x) Wg^T) * norm(x) Wu^T `project_gated`
    x     = x + inner Wd^T                   `project`

One token per row reads every weight once, so a step costs the bytes of the weights, and beyond that
each kernel launch about as much as ten megabytes of them. PyTorch's own operators need 19 launches
per layer.

**A row's bits do not depend on the other rows.** A tile always has 16 rows, and rows beyond the
batch are zeros, so every sum of a row is taken in one order for 1 to 16 rows. Attention sums each
block of the cache by itself and adds the blocks one by one from the first, where a block that the
row does not see adds nothing. Tile sizes are constants: a size that was chosen by timing could
differ between two processes, and so could the bits.

The kernels are custom operators, which a compiler does not look into.

Shapes: B rows, K summed, N columns, H query heads, J key-value heads, G = H / J query heads per
key-value head, E head dimension, F = E / 2, L blocks of the cache, C slots of a block, X = (H + 2 J) E.
"""

import functools
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16  # of a tile: the fewest that tensor cores multiply
Activation = Literal["silu", "gelu"]


@triton.jit
def _normalised(part, gain, scale, offset, CENTRED: tl.constexpr, dtype: tl.constexpr):
    """Return x * scale * gain, rounded as `rms_norm` rounds it."""
    gains = tl.load(gain + offset).to(tl.float32)
    if CENTRED:
        gains += 1
    return (part.to(tl.float32) * scale[:, None] * gains[None, :]).to(dtype)


@triton.jit
def _project(
    x,
    gain,
    weight,
    bias,
    residual,
    out,
    rows_in_all,
    N,
    EPS: tl.constexpr,
    K: tl.constexpr,
    NORM: tl.constexpr,
    CENTRED: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute COLUMNS columns of one tile of rows."""
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    offset = tl.arange(0, STEP)
    has = (rows < rows_in_all)[:, None]
    fits = (columns < N)[:, None]
    dtype: tl.constexpr = weight.dtype.element_ty
    scale = tl.full((ROWS,), 1.0, tl.float32)
    if NORM:
        squares = tl.zeros((ROWS, STEP), tl.float32)
        for begin in range(0, K, STEP):
            at = x + rows[:, None] * K + begin + offset[None, :]
            part = tl.load(at, mask=has, other=0.0).to(tl.float32)
            squares += part * part
        scale = tl.rsqrt(tl.sum(squares, 1) / K + EPS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = tl.zeros((ROWS, COLUMNS), tl.float32)
    for begin in range(0, K, STEP):
        at = x + rows[:, None] * K + begin + offset[None, :]
        part = tl.load(at, mask=has, other=0.0)
        if NORM:
            part = _normalised(part, gain + begin, scale, offset, CENTRED, dtype)
        place = weight + columns[:, None].to(tl.int64) * K + begin + offset[None, :]
        tile = tl.load(place, mask=fits, other=0.0)
        total = tl.dot(part, tile.T, total, input_precision=PRECISION)
        if GATED:  # the second half of the weight's rows
            tile = tl.load(place + N.to(tl.int64) * K, mask=fits, other=0.0)
            up = tl.dot(part, tile.T, up, input_precision=PRECISION)
    kind = out.dtype.element_ty
    inside = columns < N
    if BIAS:
        total += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    if GATED:
        # Both products are rounded first, as two linear layers would round them.
        gate = total.to(kind).to(tl.float32)
        if GELU:
            inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
            total = gate / (1 + tl.exp(-2 * inner))
        else:
            total = gate / (1 + tl.exp(-gate))
        total = total.to(kind).to(tl.float32) * up.to(kind).to(tl.float32)
    where = rows[:, None] * N + columns[None, :]
    mask = has & inside[None, :]
    total = total.to(kind)
    if ADD:
        total = tl.load(residual + where, mask=mask, other=0.0) + total
    tl.store(out + where, total, mask=mask)


@triton.jit
def _head_scale(first, second, E: tl.constexpr, EPS: tl.constexpr):
    """Return 1 / rms of each head, whose channels are in two halves."""
    return tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / E + EPS)


@triton.jit
def _attend(
    qkv,
    q_gain,
    k_gain,
    cos,
    sin,
    positions,
    keys,
    values,
    sinks,
    partial,
    sums,
    counters,
    out,
    B,
    window,
    SCALE: tl.constexpr,
    EPS: tl.constexpr,
    H: tl.constexpr,
    J: tl.constexpr,
    F: tl.constexpr,
    C: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCKS: tl.constexpr,
    NORM: tl.constexpr,
    CENTRED: tl.constexpr,
    ROTATE: tl.constexpr,
    SINKS: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend to one block of the cache; the last program of a row's head adds up its blocks."""
    row, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    G: tl.constexpr = H // J
    E: tl.constexpr = 2 * F
    position = tl.load(positions + row).to(tl.int32)
    first = tl.maximum(position - window + 1, 0) // C if WINDOW else 0
    # A row without a request may stand behind the blocks that are read.
    last = tl.minimum(position // C, BLOCKS - 1)
    if (block >= first) & (block <= last):
        kind = keys.dtype.element_ty
        group, channel, slot = tl.arange(0, GROUP), tl.arange(0, F), tl.arange(0, C)
        mine = (group < G)[:, None]
        start = qkv + row * (H + 2 * J) * E
        q = start + (head * G + group[:, None]) * E + channel[None, :]
        q1 = tl.load(q, mask=mine, other=0.0).to(tl.float32)
        q2 = tl.load(q + F, mask=mine, other=0.0).to(tl.float32)
        # A key is a tile of one row, so that heads and keys have one way to be normalised.
        k = start + (H + head) * E + channel[None, :]
        k1, k2 = tl.load(k).to(tl.float32), tl.load(k + F).to(tl.float32)
        if NORM:
            q_scale = _head_scale(q1, q2, E, EPS)
            k_scale = _head_scale(k1, k2, E, EPS)
            q1 = _normalised(q1, q_gain, q_scale, channel, CENTRED, kind).to(tl.float32)
            q2 = _normalised(q2, q_gain + F, q_scale, channel, CENTRED, kind).to(tl.float32)
            k1 = _normalised(k1, k_gain, k_scale, channel, CENTRED, kind).to(tl.float32)
            k2 = _normalised(k2, k_gain + F, k_scale, channel, CENTRED, kind).to(tl.float32)
        if ROTATE:
            c = tl.load(cos + row * F + channel)[None, :]
            s = tl.load(sin + row * F + channel)[None, :]
            q1, q2 = q1 * c - q2 * s, q2 * c + q1 * s
            k1, k2 = k1 * c - k2 * s, k2 * c + k1 * s
        q1, q2, k1, k2 = q1.to(kind), q2.to(kind), k1.to(kind), k2.to(kind)
        v = start + (H + J + head) * E + channel[None, :]
        v1, v2 = tl.load(v), tl.load(v + F)
        slots = block * C + slot
        place = ((block.to(tl.int64) * B + row) * J + head) * C
        here = (place + slot[:, None]) * E + channel[None, :]
        seen = slots <= position
        if WINDOW:
            seen = seen & (slots > position - window)
        # The new key and value are not read from memory, where another thread writes them.
        is_new = (slots == position)[:, None]
        load = (seen & (slots != position))[:, None]
        key1 = tl.where(is_new, k1, tl.load(keys + here, mask=load, other=0.0))
        key2 = tl.where(is_new, k2, tl.load(keys + here + F, mask=load, other=0.0))
        value1 = tl.where(is_new, v1, tl.load(values + here, mask=load, other=0.0))
        value2 = tl.where(is_new, v2, tl.load(values + here + F, mask=load, other=0.0))
        if block == position // C:  # only this program reads this slot
            at = (place + position % C) * E + channel[None, :]
            tl.store(keys + at, k1)
            tl.store(keys + at + F, k2)
            tl.store(values + at, v1)
            tl.store(values + at + F, v2)
        scores = tl.dot(q1, key1.T, input_precision=PRECISION)
        scores = tl.dot(q2, key2.T, scores, input_precision=PRECISION) * SCALE
        scores = tl.where(seen[None, :], scores, float("-inf"))
        largest = tl.max(scores, 1)
        weights = tl.exp(scores - largest[:, None])
        total = tl.sum(weights, 1)
        weights = weights.to(kind)
        mixed1 = tl.dot(weights, value1, input_precision=PRECISION)
        mixed2 = tl.dot(weights, value2, input_precision=PRECISION)
        pair = (row * J + head) * BLOCKS
        lines = ((pair + block) * G + group[:, None]) * E + channel[None, :]
        tl.store(partial + lines, mixed1, mask=mine)
        tl.store(partial + lines + F, mixed2, mask=mine)
        line = ((pair + block) * G + group) * 2
        tl.store(sums + line, largest, mask=group < G)
        tl.store(sums + line + 1, total, mask=group < G)
        tl.debug_barrier()  # all threads have written before one of them says so
        done = tl.atomic_add(counters + row * J + head, 1, sem="acq_rel", scope="gpu")
        if done == last - first:
            tl.store(counters + row * J + head, 0)  # for the next launch
            most = tl.full((GROUP,), float("-inf"), tl.float32)
            if SINKS:
                sink = tl.load(sinks + head * G + group, mask=group < G, other=float("-inf"))
                most = sink.to(tl.float32)
            # `.cg`: other multiprocessors wrote these lines, which this one's L1 may not know.
            for other in range(first, last + 1):
                at_sums = ((pair + other) * G + group) * 2
                one = tl.load(sums + at_sums, mask=group < G, other=0.0, cache_modifier=".cg")
                most = tl.maximum(most, one)
            whole = tl.zeros((GROUP,), tl.float32)
            if SINKS:
                sink = tl.load(sinks + head * G + group, mask=group < G, other=0.0)
                whole = tl.exp(sink.to(tl.float32) - most)
            sum1 = tl.zeros((GROUP, F), tl.float32)
            sum2 = tl.zeros((GROUP, F), tl.float32)
            for other in range(first, last + 1):
                at_sums = ((pair + other) * G + group) * 2
                one = tl.load(sums + at_sums, mask=group < G, other=0.0, cache_modifier=".cg")
                share = tl.exp(one - most)
                one = tl.load(sums + at_sums + 1, mask=group < G, other=0.0, cache_modifier=".cg")
                whole += share * one
                at_parts = ((pair + other) * G + group[:, None]) * E + channel[None, :]
                part = tl.load(partial + at_parts, mask=mine, other=0.0, cache_modifier=".cg")
                sum1 += share[:, None] * part
                part = tl.load(partial + at_parts + F, mask=mine, other=0.0, cache_modifier=".cg")
                sum2 += share[:, None] * part
            to = out + (row * H + head * G + group[:, None]) * E + channel[None, :]
            tl.store(to, (sum1 / whole[:, None]).to(kind), mask=mine)
            tl.store(to + F, (sum2 / whole[:, None]).to(kind), mask=mine)


def attend_fits(device: torch.device, slots: int, head_dim: int, dtype: torch.dtype) -> bool:
    """Return whether a block's keys and values, and the queries, fit a card's shared memory.

    With blocks of 128 slots, heads of 128 channels in fp32 and heads of 256 in 16 bits need 136 KiB.
    Data centers' cards have 163 KiB and more, and others 99.
    """
    needed_bytes = (2 * slots + ROWS) * head_dim * dtype.itemsize
    card: Any = torch.cuda.get_device_properties(device)  # torch's types lack this attribute
    return bool(needed_bytes <= card.shared_memory_per_block_optin)


def _precision(dtype: torch.dtype) -> str:
    """Return how `tl.dot` multiplies: exact products of fp32; for 16-bit operands it says nothing."""
    return "ieee" if dtype == torch.float32 else "tf32"


@functools.cache
def step_of(summed: int) -> int:
    """Return how many channels a loop of `project` takes at once; 0 if it cannot divide so many."""
    step = 256
    while summed % step:
        step //= 2
    return step if step >= ROWS else 0


class Norm(NamedTuple):
    """An RMS norm before a product.

    Attributes:
        gain_K: its weight.
        eps: added to the mean square.
        is_centred: whether it multiplies by 1 + gain.
    """

    gain_K: Tensor
    eps: float
    is_centred: bool = False


def project(
    x_BK: Tensor,
    weight_NK: Tensor,
    norm: Norm | None = None,
    bias_N: Tensor | None = None,
    residual_BN: Tensor | None = None,
) -> Tensor:
    """Return residual + norm(x) W^T + b.

    Args:
        x_BK: fp32, fp16 or bf16, contiguous; K is a multiple of 16.
        weight_NK: the same dtype, contiguous.
        norm: None: x itself.
        bias_N: None: no bias.
        residual_BN: None: nothing is added.

    Returns:
        [B, N] in the same dtype; products are summed in fp32 and rounded once before the residual is
        added, as a linear layer does.
    """
    gain_K, eps, is_centred = norm or Norm(weight_NK, 0.0)
    return torch.ops.monograph.project(
        x_BK, weight_NK, None if norm is None else gain_K, eps, is_centred, bias_N, residual_BN
    )


def project_gated(x_BK: Tensor, weight_NK: Tensor, norm: Norm, activation: Activation) -> Tensor:
    """Return act(norm(x) Wg^T) * (norm(x) Wu^T), where W has the rows of Wg and then those of Wu.

    Args:
        x_BK: see `project`.
        weight_NK: [2 M, K].
        norm: the norm before both.
        activation: "silu", or "gelu" by its tanh approximation.

    Returns:
        [B, M] in the same dtype.
    """
    return torch.ops.monograph.project_gated(x_BK, weight_NK, *norm, activation == "gelu")


@torch.library.custom_op("monograph::project", mutates_args=())
def _project_op(
    x_BK: Tensor,
    weight_NK: Tensor,
    gain_K: Tensor | None,
    eps: float,
    is_centred: bool,
    bias_N: Tensor | None,
    residual_BN: Tensor | None,
) -> Tensor:
    out_BN = x_BK.new_empty(x_BK.shape[0], weight_NK.shape[0])
    _launch(x_BK, weight_NK, gain_K, eps, is_centred, bias_N, residual_BN, out_BN)
    return out_BN


@_project_op.register_fake
def _(
    x_BK: Tensor,
    weight_NK: Tensor,
    gain_K: Tensor | None,
    eps: float,
    is_centred: bool,
    bias_N: Tensor | None,
    residual_BN: Tensor | None,
) -> Tensor:
    return x_BK.new_empty(x_BK.shape[0], weight_NK.shape[0])


@torch.library.custom_op("monograph::project_gated", mutates_args=())
def _project_gated_op(
    x_BK: Tensor, weight_NK: Tensor, gain_K: Tensor, eps: float, is_centred: bool, is_gelu: bool
) -> Tensor:
    out_BM = x_BK.new_empty(x_BK.shape[0], weight_NK.shape[0] // 2)
    _launch(x_BK, weight_NK, gain_K, eps, is_centred, None, None, out_BM, True, is_gelu)
    return out_BM


@_project_gated_op.register_fake
def _(
    x_BK: Tensor, weight_NK: Tensor, gain_K: Tensor, eps: float, is_centred: bool, is_gelu: bool
) -> Tensor:
    return x_BK.new_empty(x_BK.shape[0], weight_NK.shape[0] // 2)


COLUMNS = 16  # of a tile: many tiles keep all multiprocessors busy even where N is small


def _launch(
    x_BK: Tensor,
    weight_NK: Tensor,
    gain_K: Tensor | None,
    eps: float,
    is_centred: bool,
    bias_N: Tensor | None,
    residual_BN: Tensor | None,
    out_BN: Tensor,
    is_gated: bool = False,
    is_gelu: bool = False,
) -> None:
    rows, summed = x_BK.shape
    columns = out_BN.shape[1]
    grid = (triton.cdiv(columns, COLUMNS), triton.cdiv(rows, ROWS))
    _project[grid](
        x_BK,
        weight_NK if gain_K is None else gain_K,
        weight_NK,
        weight_NK if bias_N is None else bias_N,
        x_BK if residual_BN is None else residual_BN,
        out_BN,
        rows,
        columns,
        EPS=eps,
        K=summed,
        NORM=gain_K is not None,
        CENTRED=is_centred,
        BIAS=bias_N is not None,
        ADD=residual_BN is not None,
        GATED=is_gated,
        GELU=is_gelu,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        STEP=step_of(summed),
        PRECISION=_precision(x_BK.dtype),
        num_warps=4,
        # Four stages of fp32 tiles are 115 KiB of shared memory, and consumer cards have 99.
        num_stages=2 if x_BK.dtype == torch.float32 else 4,
    )


@torch.library.custom_op(
    "monograph::attend", mutates_args=("keys_LBJCE", "values_LBJCE", "counters_BJ")
)
def attend(
    qkv_BX: Tensor,
    keys_LBJCE: Tensor,
    values_LBJCE: Tensor,
    position_B: Tensor,
    counters_BJ: Tensor,
    blocks: int,
    heads: int,
    scale: float,
    cos_BF: Tensor | None = None,
    sin_BF: Tensor | None = None,
    q_gain_E: Tensor | None = None,
    k_gain_E: Tensor | None = None,
    eps: float = 0.0,
    is_centred: bool = False,
    sink_H: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Return the attention of one new token per row, and write its key and value to the cache.

        q, k = rotate(norm(q)), rotate(norm(k));  keys[p], values[p] = k, v
        out[h] = sum over slots s <= p of softmax(q[h] . keys[s] * scale) values[s]

    It is `monograph.ops.attention.cached_attention` for one position per row, with the steps before
    it (`rotate` and norms of heads).

    Args:
        qkv_BX: queries, then keys, then values of all heads; fp32, fp16 or bf16, contiguous.
        keys_LBJCE: the cache, the same dtype, contiguous; written in place.
        values_LBJCE: likewise.
        position_B: int64, the new token's position p.
        counters_BJ: int32 zeros, which are zeros again afterwards.
        blocks: how many blocks are read, the first ones. A row that stands behind them gets numbers
            without meaning.
        heads: H.
        scale: of the scores.
        cos_BF: fp32, of the positions' angles; None: heads are not rotated.
        sin_BF: likewise.
        q_gain_E: weight of the queries' norm; None: no norm.
        k_gain_E: likewise of the keys'.
        eps: of both norms.
        is_centred: whether these norms multiply by 1 + weight.
        sink_H: a score for each head that takes part in the softmax; None: none does.
        window: how many positions a query sees, its own among them; None: all.

    Returns:
        [B, H E] in the same dtype; scores, softmax and sums are fp32.
    """
    _, rows, pairs, slots, head_dim = keys_LBJCE.shape
    group = heads // pairs
    out_BX = qkv_BX.new_empty(rows, heads * head_dim)
    partial = qkv_BX.new_empty(rows * pairs * blocks * group * head_dim, dtype=torch.float32)
    sums = qkv_BX.new_empty(rows * pairs * blocks * group * 2, dtype=torch.float32)
    nothing = position_B
    _attend[(rows, pairs, blocks)](
        qkv_BX,
        nothing if q_gain_E is None else q_gain_E,
        nothing if k_gain_E is None else k_gain_E,
        nothing if cos_BF is None else cos_BF,
        nothing if sin_BF is None else sin_BF,
        position_B,
        keys_LBJCE,
        values_LBJCE,
        nothing if sink_H is None else sink_H,
        partial,
        sums,
        counters_BJ,
        out_BX,
        rows,
        window or 0,
        SCALE=scale,
        EPS=eps,
        H=heads,
        J=pairs,
        F=head_dim // 2,
        C=slots,
        GROUP=max(ROWS, triton.next_power_of_2(group)),
        BLOCKS=blocks,
        NORM=q_gain_E is not None,
        CENTRED=is_centred,
        ROTATE=cos_BF is not None,
        SINKS=sink_H is not None,
        WINDOW=window is not None,
        PRECISION=_precision(qkv_BX.dtype),
        num_warps=4,
        num_stages=1,
    )
    return out_BX


@attend.register_fake
def _(
    qkv_BX: Tensor,
    keys_LBJCE: Tensor,
    values_LBJCE: Tensor,
    position_B: Tensor,
    counters_BJ: Tensor,
    blocks: int,
    heads: int,
    scale: float,
    cos_BF: Tensor | None = None,
    sin_BF: Tensor | None = None,
    q_gain_E: Tensor | None = None,
    k_gain_E: Tensor | None = None,
    eps: float = 0.0,
    is_centred: bool = False,
    sink_H: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    return qkv_BX.new_empty(qkv_BX.shape[0], heads * keys_LBJCE.shape[4])
