"""Compute a decode step with five Triton kernels per layer, for up to 16 rows on a GPU.

    qkv   = norm(x) [Wq; Wk; Wv]^T + b       `project`
    mixed = attention over the cache         `attend`: normalises heads, rotates, writes the cache
    x     = x + mixed Wo^T                   `project`
    inner = act(norm(x) Wg^T) * norm(x) Wu^T `project_gated`
    x     = x + inner Wd^T                   `project`

A step reads every weight once, so its time is that of reading the weights, and of the launches of its
kernels. A launch takes about as long as reading ten megabytes. PyTorch's own operators need 19
launches per layer.

**A row's bits do not depend on the other rows.** A tile always has 16 rows, and rows beyond the
batch are zeros, so the terms of a row's sums are always added in the same order. Attention begins with
the new token, sums each block of the cache by itself and adds the blocks one by one from the first; a
block that the row does not see adds nothing. One program does all of this if the blocks are few, and
otherwise each block has a program: the sums are the same. The sizes of a tile depend on the card and
on the weight's shape alone (`tile_of`): a size that was chosen by timing could differ between two
processes, and so could the bits.

The kernels are custom operators, which a compiler does not look into.

Shapes: B rows, K summed channels, N columns, H query heads, J key-value heads, G = H / J query heads
per key-value head, E head dimension, F = E / 2, L blocks of the cache, C slots of a block,
X = (H + 2 J) E. In kernels, `x_at_RS` are the addresses of the elements of `x_RS`.
"""

import functools
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16  # rows of a tile: the minimum that tensor cores multiply
Activation = Literal["silu", "gelu"]


@triton.jit
def row_scale(
    x,
    row_R,
    row_count,
    EPS: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Return 1 / rms of rows of x, [R]; `normalised` multiplies by it."""
    offset_S = tl.arange(0, STEP)
    squares_RS = tl.zeros((ROWS, STEP), tl.float32)
    for begin in range(0, K, STEP):
        x_at_RS = x + row_R[:, None] * K + begin + offset_S[None, :]
        x_RS = tl.load(x_at_RS, mask=(row_R < row_count)[:, None], other=0.0).to(tl.float32)
        squares_RS += x_RS * x_RS
    return tl.rsqrt(tl.sum(squares_RS, 1) / K + EPS)


@triton.jit
def normalised(x_RS, gain, scale_R, offset_S, CENTRED: tl.constexpr, dtype: tl.constexpr):
    """Return x * scale * gain, rounded as `rms_norm` rounds it."""
    gain_S = tl.load(gain + offset_S).to(tl.float32)
    if CENTRED:
        gain_S += 1
    return (x_RS.to(tl.float32) * scale_R[:, None] * gain_S[None, :]).to(dtype)


@triton.jit
def gated(gate_RO, up_RO, dtype: tl.constexpr, GELU: tl.constexpr):
    """Return act(gate) * up; both are rounded first, as two linear layers would round them."""
    gate_RO = gate_RO.to(dtype).to(tl.float32)
    if GELU:  # by its tanh approximation
        inner_RO = 0.7978845608028654 * (gate_RO + 0.044715 * gate_RO * gate_RO * gate_RO)
        activated_RO = gate_RO / (1 + tl.exp(-2 * inner_RO))
    else:
        activated_RO = gate_RO / (1 + tl.exp(-gate_RO))
    return activated_RO.to(dtype).to(tl.float32) * up_RO.to(dtype).to(tl.float32)


@triton.jit
def _project(
    x,
    gain,
    weight,
    bias,
    residual,
    out,
    row_count,
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
    """Compute COLUMNS columns of one tile of rows, for `project` and `project_gated`.

    Shapes: R = ROWS, O = COLUMNS, S = STEP summed channels that are read at once.
    """
    row_R = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column_O = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    offset_S = tl.arange(0, STEP)
    is_row_R1 = (row_R < row_count)[:, None]
    is_column_O = column_O < N
    is_column_O1 = is_column_O[:, None]
    product_dtype: tl.constexpr = weight.dtype.element_ty
    scale_R = tl.full((ROWS,), 1.0, tl.float32)
    if NORM:
        scale_R = row_scale(x, row_R, row_count, EPS, K, ROWS, STEP)
    total_RO = tl.zeros((ROWS, COLUMNS), tl.float32)
    up_RO = tl.zeros((ROWS, COLUMNS), tl.float32)
    for begin in range(0, K, STEP):
        x_at_RS = x + row_R[:, None] * K + begin + offset_S[None, :]
        factor_RS = tl.load(x_at_RS, mask=is_row_R1, other=0.0)
        if NORM:
            factor_RS = normalised(
                factor_RS, gain + begin, scale_R, offset_S, CENTRED, product_dtype
            )
        weight_at_OS = weight + column_O[:, None].to(tl.int64) * K + begin + offset_S[None, :]
        weight_OS = tl.load(weight_at_OS, mask=is_column_O1, other=0.0)
        total_RO = tl.dot(factor_RS, weight_OS.T, total_RO, input_precision=PRECISION)
        if GATED:  # the second half of the weight's rows
            up_weight_at_OS = weight_at_OS + N.to(tl.int64) * K
            weight_OS = tl.load(up_weight_at_OS, mask=is_column_O1, other=0.0)
            up_RO = tl.dot(factor_RS, weight_OS.T, up_RO, input_precision=PRECISION)
    dtype = out.dtype.element_ty
    if BIAS:
        bias_O = tl.load(bias + column_O, mask=is_column_O, other=0.0)
        total_RO += bias_O.to(tl.float32)[None, :]
    if GATED:
        total_RO = gated(total_RO, up_RO, dtype, GELU)
    out_offset_RO = row_R[:, None] * N + column_O[None, :]
    is_output_RO = is_row_R1 & is_column_O[None, :]
    result_RO = total_RO.to(dtype)
    if ADD:
        result_RO = tl.load(residual + out_offset_RO, mask=is_output_RO, other=0.0) + result_RO
    tl.store(out + out_offset_RO, result_RO, mask=is_output_RO)


@triton.jit
def _head_scale(first, second, E: tl.constexpr, EPS: tl.constexpr):
    """Return 1 / rms of each head, whose channels are in two halves."""
    return tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / E + EPS)


@triton.jit
def _with_block(
    max_Q, weight_Q, sum1_QF, sum2_QF, block_max_Q, block_weight_Q, block1_QF, block2_QF
):
    """Add a block's weights and weighted values to the sums of the blocks before it.

    Sums are relative to the largest score so far, and are rescaled if the block has a larger one.
    The kernel adds blocks in registers or from memory, and both must give the same bits. So a product
    is fused with its sum here, and not where a compiler likes to.
    """
    new_max_Q = tl.maximum(max_Q, block_max_Q)
    before_Q = tl.exp(max_Q - new_max_Q)
    factor_Q = tl.exp(block_max_Q - new_max_Q)
    weight_Q = tl.fma(factor_Q, block_weight_Q, weight_Q * before_Q)
    factor_QF = tl.broadcast_to(factor_Q[:, None], block1_QF.shape)
    sum1_QF = tl.fma(factor_QF, block1_QF, sum1_QF * before_Q[:, None])
    sum2_QF = tl.fma(factor_QF, block2_QF, sum2_QF * before_Q[:, None])
    return new_max_Q, weight_Q, sum1_QF, sum2_QF


@triton.jit
def _heads_of_row(q_at_QF, k_at_1F, v_at_1F, is_query_Q1, F: tl.constexpr):
    """Load the new token's queries, key and value, each in two halves."""
    q1 = tl.load(q_at_QF, mask=is_query_Q1, other=0.0).to(tl.float32)
    q2 = tl.load(q_at_QF + F, mask=is_query_Q1, other=0.0).to(tl.float32)
    k1, k2 = tl.load(k_at_1F).to(tl.float32), tl.load(k_at_1F + F).to(tl.float32)
    return q1, q2, k1, k2, tl.load(v_at_1F), tl.load(v_at_1F + F)


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
    FEW: tl.constexpr,
):
    """Attend to the cache for one row and one key-value head.

    If the row sees at most FEW blocks, its first program adds them up in registers. Otherwise each
    block has a program: `partial` and `sums` get its weighted sum of values, and its largest score and
    sum of weights; and the program that finishes last, by `counters`, adds up the blocks.

    Heads are loaded as two halves of F channels, which rotation mixes: q1 and q2, and so on.

    Shapes: Q = GROUP queries, the G of the key-value head and padding; C, F as in the module.
    """
    row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    G: tl.constexpr = H // J
    E: tl.constexpr = 2 * F
    position = tl.load(positions + row).to(tl.int32)
    query_Q, channel_F, slot_C = tl.arange(0, GROUP), tl.arange(0, F), tl.arange(0, C)
    is_query_Q = query_Q < G
    is_query_Q1 = is_query_Q[:, None]
    # The offset of the cache's block 0, and how far it is to the next block.
    slot_index_C = (row * J + head).to(tl.int64) * C + slot_C
    cache_offset_CF = slot_index_C[:, None] * E + channel_F[None, :]
    block_stride = tl.cast(B, tl.int64) * (J * C * E)

    qkv_of_row = qkv + row * (H + 2 * J) * E
    q_at_QF = qkv_of_row + (head * G + query_Q[:, None]) * E + channel_F[None, :]
    # A key is a tile of one row, so that heads and keys are normalised by the same functions.
    k_at_1F = qkv_of_row + (H + head) * E + channel_F[None, :]
    v_at_1F = qkv_of_row + (H + J + head) * E + channel_F[None, :]
    if BLOCKS <= FEW:
        # No program is idle, so these loads need not wait for the position.
        new_q1, new_q2, new_k1, new_k2, v1, v2 = _heads_of_row(
            q_at_QF, k_at_1F, v_at_1F, is_query_Q1, F
        )
        if ROTATE:
            cos_1F = tl.load(cos + row * F + channel_F)[None, :]
            sin_1F = tl.load(sin + row * F + channel_F)[None, :]

    # The blocks with old slots that the new token sees: from first_block, below end_block.
    oldest = tl.maximum(position - window + 1, 0) if WINDOW else 0
    first_block = oldest // C
    # A row without a request may have a position behind the blocks that are read.
    end_block = tl.minimum((position + C - 1) // C, BLOCKS)
    end_block = tl.where(oldest < position, end_block, first_block)
    if BLOCKS <= FEW:
        is_whole = True
        is_idle = False
        begin = first_block
        end = end_block
    else:
        is_whole = end_block - first_block <= FEW
        begin = tl.where(is_whole, first_block, part)
        end = tl.where(is_whole, end_block, part + 1)
        is_idle = tl.where(is_whole, part > 0, (part < first_block) | (part >= end_block))
    writes = (begin == first_block) & (position // C < BLOCKS)
    if not is_idle:
        dtype = keys.dtype.element_ty
        if BLOCKS > FEW:
            new_q1, new_q2, new_k1, new_k2, v1, v2 = _heads_of_row(
                q_at_QF, k_at_1F, v_at_1F, is_query_Q1, F
            )
            if ROTATE:
                cos_1F = tl.load(cos + row * F + channel_F)[None, :]
                sin_1F = tl.load(sin + row * F + channel_F)[None, :]
        q1, q2, k1, k2 = new_q1, new_q2, new_k1, new_k2
        if NORM:
            q_scale = _head_scale(q1, q2, E, EPS)
            k_scale = _head_scale(k1, k2, E, EPS)
            q1 = normalised(q1, q_gain, q_scale, channel_F, CENTRED, dtype).to(tl.float32)
            q2 = normalised(q2, q_gain + F, q_scale, channel_F, CENTRED, dtype).to(tl.float32)
            k1 = normalised(k1, k_gain, k_scale, channel_F, CENTRED, dtype).to(tl.float32)
            k2 = normalised(k2, k_gain + F, k_scale, channel_F, CENTRED, dtype).to(tl.float32)
        if ROTATE:
            q1, q2 = q1 * cos_1F - q2 * sin_1F, q2 * cos_1F + q1 * sin_1F
            k1, k2 = k1 * cos_1F - k2 * sin_1F, k2 * cos_1F + k1 * sin_1F
        q1, q2, k1, k2 = q1.to(dtype), q2.to(dtype), k1.to(dtype), k2.to(dtype)

        if writes:  # no program reads this slot
            new_at_1F = (position // C) * block_stride + (row * J + head).to(tl.int64) * (C * E)
            new_at_1F += position % C * E + channel_F[None, :]
            tl.store(keys + new_at_1F, k1)
            tl.store(keys + new_at_1F + F, k2)
            tl.store(values + new_at_1F, v1)
            tl.store(values + new_at_1F + F, v2)

        # The sum begins with the new token, and the sink.
        new_score_Q = tl.sum(q1.to(tl.float32) * k1.to(tl.float32), 1)
        new_score_Q = (new_score_Q + tl.sum(q2.to(tl.float32) * k2.to(tl.float32), 1)) * SCALE
        start_max_Q = new_score_Q
        start_weight_Q = tl.full((GROUP,), 1.0, tl.float32)
        if SINKS:
            sink_Q = tl.load(sinks + head * G + query_Q, mask=is_query_Q, other=0.0).to(tl.float32)
            start_max_Q = tl.maximum(new_score_Q, sink_Q)
            start_weight_Q = tl.exp(new_score_Q - start_max_Q)
        new_weight_Q = start_weight_Q
        start1_QF = new_weight_Q[:, None] * v1.to(tl.float32)
        start2_QF = new_weight_Q[:, None] * v2.to(tl.float32)
        if SINKS:
            start_weight_Q += tl.exp(sink_Q - start_max_Q)
        # Where several programs compute the blocks, the one that adds them up begins with it.
        max_Q = tl.where(is_whole, start_max_Q, float("-inf"))
        weight_Q = tl.where(is_whole, start_weight_Q, 0.0)
        sum1_QF = tl.where(is_whole, start1_QF, 0.0)
        sum2_QF = tl.where(is_whole, start2_QF, 0.0)
        for block in range(begin, end):
            position_C = block * C + slot_C
            offset_CF = cache_offset_CF + block * block_stride
            is_old_C = position_C < position
            if WINDOW:
                is_old_C = is_old_C & (position_C > position - window)
            is_old_C1 = is_old_C[:, None]
            key1_CF = tl.load(keys + offset_CF, mask=is_old_C1, other=0.0)
            key2_CF = tl.load(keys + offset_CF + F, mask=is_old_C1, other=0.0)
            value1_CF = tl.load(values + offset_CF, mask=is_old_C1, other=0.0)
            value2_CF = tl.load(values + offset_CF + F, mask=is_old_C1, other=0.0)
            scores_QC = tl.dot(q1, key1_CF.T, input_precision=PRECISION)
            scores_QC = tl.dot(q2, key2_CF.T, scores_QC, input_precision=PRECISION) * SCALE
            scores_QC = tl.where(is_old_C[None, :], scores_QC, float("-inf"))
            block_max_Q = tl.max(scores_QC, 1)
            weights_QC = tl.exp(scores_QC - block_max_Q[:, None])
            rounded_QC = weights_QC.to(dtype)
            max_Q, weight_Q, sum1_QF, sum2_QF = _with_block(
                max_Q,
                weight_Q,
                sum1_QF,
                sum2_QF,
                block_max_Q,
                tl.sum(weights_QC, 1),
                tl.dot(rounded_QC, value1_CF, input_precision=PRECISION),
                tl.dot(rounded_QC, value2_CF, input_precision=PRECISION),
            )
        adds = is_whole
        if BLOCKS > FEW:
            if not is_whole:
                first_part = (row * J + head) * BLOCKS  # the index of this row's and head's block 0
                own_part = (first_part + part) * G  # the index of this block's first query
                partial_offset_QF = (own_part + query_Q[:, None]) * E + channel_F[None, :]
                tl.store(partial + partial_offset_QF, sum1_QF, mask=is_query_Q1)
                tl.store(partial + partial_offset_QF + F, sum2_QF, mask=is_query_Q1)
                sums_offset_Q = (own_part + query_Q) * 2
                tl.store(sums + sums_offset_Q, max_Q, mask=is_query_Q)
                tl.store(sums + sums_offset_Q + 1, weight_Q, mask=is_query_Q)

                # The program that finishes last adds up the blocks.
                tl.debug_barrier()  # all threads have written before one of them says so
                counter = counters + row * J + head
                finished_before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
                if finished_before == end_block - first_block - 1:
                    adds = True
                    tl.store(counter, 0)  # for the next launch
                    max_Q, weight_Q = start_max_Q, start_weight_Q
                    # The new token's value is read again, and not kept in registers until here.
                    v1, v2 = tl.load(v_at_1F), tl.load(v_at_1F + F)
                    sum1_QF = new_weight_Q[:, None] * v1.to(tl.float32)
                    sum2_QF = new_weight_Q[:, None] * v2.to(tl.float32)
                    # `.cg` reads from the L2 cache: other multiprocessors wrote these numbers, which
                    # this one's L1 cache may not know. No block waits for the sum of those before.
                    for other in tl.range(first_block, end_block, loop_unroll_factor=4):
                        other_part = (first_part + other) * G
                        sums_at_Q = sums + (other_part + query_Q) * 2
                        part_at_QF = (
                            partial + (other_part + query_Q[:, None]) * E + channel_F[None, :]
                        )
                        max_Q, weight_Q, sum1_QF, sum2_QF = _with_block(
                            max_Q,
                            weight_Q,
                            sum1_QF,
                            sum2_QF,
                            tl.load(sums_at_Q, mask=is_query_Q, other=0.0, cache_modifier=".cg"),
                            tl.load(
                                sums_at_Q + 1, mask=is_query_Q, other=0.0, cache_modifier=".cg"
                            ),
                            tl.load(part_at_QF, mask=is_query_Q1, other=0.0, cache_modifier=".cg"),
                            tl.load(
                                part_at_QF + F, mask=is_query_Q1, other=0.0, cache_modifier=".cg"
                            ),
                        )
        if adds:
            out_at_QF = out + (row * H + head * G + query_Q[:, None]) * E + channel_F[None, :]
            tl.store(out_at_QF, (sum1_QF / weight_Q[:, None]).to(dtype), mask=is_query_Q1)
            tl.store(out_at_QF + F, (sum2_QF / weight_Q[:, None]).to(dtype), mask=is_query_Q1)


def attend_fits(device: torch.device, slots: int, head_dim: int, dtype: torch.dtype) -> bool:
    """Return whether a block's keys and values, and the queries, fit a card's shared memory.

    With blocks of 128 slots, heads of 128 channels in fp32 and heads of 256 in 16 bits need 136 KiB.
    Data centers' cards have 163 KiB and more, and others 99.
    """
    needed_bytes = (2 * slots + ROWS) * head_dim * dtype.itemsize
    card: Any = torch.cuda.get_device_properties(device)  # torch's types lack this attribute
    return bool(needed_bytes <= card.shared_memory_per_block_optin)


def product_precision(dtype: torch.dtype) -> str:
    """Return how `tl.dot` multiplies: "ieee" for exact products of fp32; it ignores 16-bit operands."""
    return "ieee" if dtype == torch.float32 else "tf32"


@functools.cache
def channels_at_once(summed: int, most: int = 256) -> int:
    """Return how many of the summed channels a program reads at once; 0 if it cannot compute them.

    It is the largest power of two from ROWS to `most` that divides their number.
    """
    step = most
    while summed % step:
        step //= 2
    return step if step >= ROWS else 0


class Tile(NamedTuple):
    """How much of a weight a program of `_project` computes.

    Attributes:
        columns: its columns.
        channels: how many of the summed channels it reads at once, at most.
        warps: its warps.
        stages: how many of these reads are under way at once.
    """

    columns: int
    channels: int
    warps: int
    stages: int


# The fastest of 516 tiles for the weights of a 1B model on an H200 (dev/log.md), where the step's
# products take 850 us, and 1,240 us with the tile for small shared memory. They need up to 144 KiB of
# shared memory, if the product is gated. From the narrowest to the widest:
_TILES = (Tile(16, 512, 2, 4), Tile(32, 256, 4, 4), Tile(64, 128, 8, 4))
SHARED_BYTES_OF_TILES = 147_456
# For cards with less shared memory.
_SMALL_TILE = Tile(16, 256, 4, 4)
# Four stages of fp32 tiles are 115 KiB, and consumer cards have 99.
_SMALL_TILE_FP32 = Tile(16, 256, 4, 2)


def tile_of(columns: int, dtype: torch.dtype, device: torch.device) -> Tile:
    """Return the tile for a weight with so many columns.

    It is the narrowest with which all programs run at once, one on each multiprocessor. Programs
    with wider tiles would leave multiprocessors without work, and of narrower ones a part would run
    after the others.
    """
    card: Any = torch.cuda.get_device_properties(device)  # torch's types lack an attribute
    if dtype == torch.float32:
        return _SMALL_TILE_FP32
    if card.shared_memory_per_block_optin < SHARED_BYTES_OF_TILES:
        return _SMALL_TILE
    for tile in _TILES:
        if triton.cdiv(columns, tile.columns) <= card.multi_processor_count:
            return tile
    return _TILES[-1]


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
        norm: the norm of x; None: no norm.
        bias_N: b; None: no bias.
        residual_BN: the residual; None: no residual.

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
        norm: the norm of x, before both products.
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
    tile = tile_of(columns, x_BK.dtype, x_BK.device)
    grid = (triton.cdiv(columns, tile.columns), triton.cdiv(rows, ROWS))
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
        COLUMNS=tile.columns,
        STEP=channels_at_once(summed, tile.channels),
        PRECISION=product_precision(x_BK.dtype),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


class AttendForm(NamedTuple):
    """How `attend` computes; all forms give the same bits.

    Attributes:
        few_blocks: if a row sees at most this number of blocks, one program per key-value head adds
            them up; nothing waits until several programs have finished.
        stages: how many blocks a program has under way at once.
    """

    few_blocks: int
    stages: int


# Up to this number of programs, memory's latency takes the time, and not its bandwidth.
_FEW_PROGRAMS = 128
# The order in which a block's weights are summed depends on it.
_ATTEND_WARPS = 4


def attend_form(
    programs: int, blocks: int, block_bytes: int, shared_bytes: int, capability: tuple[int, int]
) -> AttendForm:
    """Return the form for these shapes, as far as it fits the card's shared memory.

    Args:
        programs: the rows times the key-value heads.
        blocks: how many blocks are read.
        block_bytes: the size of one head's keys and values of a block.
        shared_bytes: the shared memory that a program has for blocks.
        capability: the card's compute capability.
    """
    # Measured on an H200 with heads of 64 and 128 in bf16 (dev/log.md). With few programs, 3 stages
    # were the fastest for 2 and for 3 blocks, and in most shapes a program for each of 8 and of 32
    # blocks. With many, 2 stages were, and one program for 8 blocks took 0.8 times as long as eight.
    is_latency_bound = programs <= _FEW_PROGRAMS
    few_blocks = 4 if is_latency_bound else 8
    stages = 3 if is_latency_bound and blocks <= few_blocks else 2
    if blocks == 1:
        # Ampere's and Ada's kernels need fewer registers with 2 stages, and spill some of heads of 64
        # with 1 (counted in machine code, not timed).
        stages = 2 if capability[0] == 8 else 1
    # Shared memory holds one block less than there are stages.
    while stages > 1 and (stages - 1) * block_bytes > shared_bytes:
        stages -= 1
    return AttendForm(few_blocks, stages)


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
        blocks: attention reads this number of first blocks. A row whose position is not in them gets
            numbers without meaning.
        heads: H.
        scale: multiplies the scores.
        cos_BF: fp32, the cosines of the positions' angles; None: heads are not rotated.
        sin_BF: fp32, the sines; None: heads are not rotated.
        q_gain_E: the weight of the queries' norm; None: no norm.
        k_gain_E: the weight of the keys' norm; None: no norm.
        eps: the eps of both norms.
        is_centred: whether these norms multiply by 1 + weight.
        sink_H: for each head, a score without a value that takes part in the softmax; None: no sinks.
        window: how many positions a query sees, including its own; None: all.

    Returns:
        [B, H E] in the same dtype; scores, softmax and sums are fp32.
    """
    _, rows, key_heads, slots, head_dim = keys_LBJCE.shape
    group = heads // key_heads
    out_BX = qkv_BX.new_empty(rows, heads * head_dim)
    queries = max(ROWS, triton.next_power_of_2(group))
    itemsize = qkv_BX.element_size()
    card: Any = torch.cuda.get_device_properties(qkv_BX.device)  # torch's types lack an attribute
    # Queries, weights of a block's slots, and what sums over several warps need are there, too.
    other_bytes = queries * (head_dim + slots) * itemsize + 1024
    form = attend_form(
        rows * key_heads,
        blocks,
        2 * slots * head_dim * itemsize,
        card.shared_memory_per_block_optin - other_bytes,
        (card.major, card.minor),
    )
    is_split = blocks > form.few_blocks
    parts = rows * key_heads * blocks * group if is_split else 0
    partial = qkv_BX.new_empty(parts * head_dim, dtype=torch.float32)
    sums = qkv_BX.new_empty(parts * 2, dtype=torch.float32)
    # A kernel needs a pointer for each tensor, even for one that it does not read.
    unused = position_B
    _attend[(rows, key_heads, blocks if is_split else 1)](
        qkv_BX,
        unused if q_gain_E is None else q_gain_E,
        unused if k_gain_E is None else k_gain_E,
        unused if cos_BF is None else cos_BF,
        unused if sin_BF is None else sin_BF,
        position_B,
        keys_LBJCE,
        values_LBJCE,
        unused if sink_H is None else sink_H,
        partial,
        sums,
        counters_BJ,
        out_BX,
        rows,
        window or 0,
        SCALE=scale,
        EPS=eps,
        H=heads,
        J=key_heads,
        F=head_dim // 2,
        C=slots,
        GROUP=queries,
        BLOCKS=blocks,
        NORM=q_gain_E is not None,
        CENTRED=is_centred,
        ROTATE=cos_BF is not None,
        SINKS=sink_H is not None,
        WINDOW=window is not None,
        PRECISION=product_precision(qkv_BX.dtype),
        FEW=form.few_blocks,
        num_warps=_ATTEND_WARPS,
        num_stages=form.stages,
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
