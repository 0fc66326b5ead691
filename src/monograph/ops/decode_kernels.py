"""The attention of a decode step by one Triton kernel, and what all kernels of a decode step share.

A decode step computes one new token of each row, on a GPU. A layer takes five launches:

    qkv   = norm(x) [Wq; Wk; Wv]^T + b       `project`, of `monograph.ops.layer_kernels`
    mixed = attention over the cache         `attend`: normalises heads, rotates, writes the cache
    x     = x + mixed Wo^T                   `project`
    inner = act(norm(x) Wg^T) * norm(x) Wu^T `project_gated`
    x     = x + inner Wd^T                   `project`

A step reads every weight once. So its time is the time to read the weights, plus that of its launches,
each of which takes about as long as reading ten megabytes. PyTorch's own operators need 19 launches per
layer.

**The grid of attention** is (rows, key-value heads, blocks). A *block* is C slots of the key-value cache,
and a slot has the key and the value of one position. If few blocks are read, axis 2 has one program, which
computes all blocks of its row and head. Otherwise it has a program for each block, and the program that
finishes last adds up the sums of all blocks.

**A row's bits do not depend on the other rows**, nor on how the blocks are shared among programs. A
product with a dense weight always has tiles of 16 rows, and rows beyond the batch are zeros, so the terms
of a row's sums are always added in the same order. Attention begins with the new token, sums each block of the cache by
itself, and adds the blocks' sums one by one, from the first block to the last. A block that the row does
not see adds nothing.

The kernels are custom operators, which a compiler does not look into.

Shapes: B rows, K channels of x, over which products sum, H query heads, J key-value heads, G = H / J
query heads per key-value head, E head dimension, F = E / 2, L blocks of the cache, C slots of a block,
X = (H + 2 J) E. In kernels, R = ROWS of a tile, S = CHANNELS that are read at once, Q = QUERIES of a
program, which are the G of its key-value head and padding. `x_at_RS` are the addresses of the elements of
`x_RS`, and `x_offset_RS` are their distances from the tensor's first element.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16  # rows of a tile: the minimum that tensor cores multiply


@triton.jit
def row_scale(
    x,
    row_R,
    row_count,
    EPS: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Return 1 / rms of each row of x, [R], by which `normalised` multiplies."""
    offset_S = tl.arange(0, CHANNELS)
    squares_RS = tl.zeros((ROWS, CHANNELS), tl.float32)
    for begin in range(0, K, CHANNELS):
        x_at_RS = x + row_R[:, None] * K + begin + offset_S[None, :]
        x_RS = tl.load(x_at_RS, mask=(row_R < row_count)[:, None], other=0.0).to(tl.float32)
        squares_RS += x_RS * x_RS
    return tl.rsqrt(tl.sum(squares_RS, 1) / K + EPS)


@triton.jit
def normalised(x_RS, gain, scale_R, offset_S, CENTRED: tl.constexpr, dtype: tl.constexpr):
    """Return x * scale * gain in `dtype`, rounded once, as `monograph.ops.rms_norm` rounds it.

    CENTRED: the norm multiplies by 1 + gain.
    """
    gain_S = tl.load(gain + offset_S).to(tl.float32)
    if CENTRED:
        gain_S += 1
    return (x_RS.to(tl.float32) * scale_R[:, None] * gain_S[None, :]).to(dtype)


@triton.jit
def _head_scale(first, second, E: tl.constexpr, EPS: tl.constexpr):
    """Return 1 / rms of each head. `first` and `second` are the two halves of a head's channels."""
    return tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / E + EPS)


@triton.jit
def _add_block(
    max_Q, weight_sum_Q, sum1_QF, sum2_QF, block_max_Q, block_weight_sum_Q, block1_QF, block2_QF
):
    """Return the softmax's running sums, with those of one more block added.

    Running sums are the largest score so far, the sum of the weights exp(score - largest score), and the
    sum of the weighted values, in two halves of the channels. If the block has a larger score, the sums so
    far are rescaled.

    `_attend` calls this in two places: with a block's sums in registers, and with a block's sums that it
    reads from memory. Both must give the same bits. A compiler might fuse a product and an addition in
    only one of the two places, so `fma` fuses them here.
    """
    new_max_Q = tl.maximum(max_Q, block_max_Q)
    old_factor_Q = tl.exp(max_Q - new_max_Q)
    factor_Q = tl.exp(block_max_Q - new_max_Q)
    weight_sum_Q = tl.fma(factor_Q, block_weight_sum_Q, weight_sum_Q * old_factor_Q)
    factor_QF = tl.broadcast_to(factor_Q[:, None], block1_QF.shape)
    sum1_QF = tl.fma(factor_QF, block1_QF, sum1_QF * old_factor_Q[:, None])
    sum2_QF = tl.fma(factor_QF, block2_QF, sum2_QF * old_factor_Q[:, None])
    return new_max_Q, weight_sum_Q, sum1_QF, sum2_QF


@triton.jit
def _load_token(q_at_QF, k_at_1F, v_at_1F, is_query_Q1, F: tl.constexpr):
    """Load the new token's queries, key and value, each in two halves of the channels."""
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
    QUERIES: tl.constexpr,
    BLOCKS: tl.constexpr,
    NORM: tl.constexpr,
    CENTRED: tl.constexpr,
    ROTATE: tl.constexpr,
    SINKS: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    FEW_BLOCKS: tl.constexpr,
):
    """Attend to the cache for one row and one key-value head; see `attend`.

    BLOCKS is the number of blocks that are read, and B the number of rows. If the row sees at most FEW_BLOCKS
    blocks, one program computes them all and adds them up in registers. Otherwise each block has a program,
    which writes the block's weighted sum of values to `partial`, and its largest score and sum of weights to
    `sums`. `counters` has the number of programs of this row and head that have finished, so that the last
    one knows that it is the last.

    Heads are loaded as two halves of F channels, which rotation mixes: q1 has the first half of the
    queries and q2 the second, and likewise k1 and k2, v1 and v2, sum1 and sum2. SINKS: each query head has a
    sink, a score without a value that takes part in the softmax. WINDOW: a query sees only `window`
    positions.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    own_block = tl.program_id(2)  # the block of this program, if each block has one
    G: tl.constexpr = H // J
    E: tl.constexpr = 2 * F
    position = tl.load(positions + row).to(tl.int32)
    query_Q, channel_F, slot_C = tl.arange(0, QUERIES), tl.arange(0, F), tl.arange(0, C)
    is_query_Q = query_Q < G
    is_query_Q1 = is_query_Q[:, None]
    # The offsets of this row's and head's keys in block 0 of the cache, and the distance to the next block.
    slot_index_C = (row * J + head).to(tl.int64) * C + slot_C
    cache_offset_CF = slot_index_C[:, None] * E + channel_F[None, :]
    block_stride = tl.cast(B, tl.int64) * (J * C * E)

    qkv_of_row = qkv + row * (H + 2 * J) * E
    q_at_QF = qkv_of_row + (head * G + query_Q[:, None]) * E + channel_F[None, :]
    # A key is a tile of one row, so that heads and keys are normalised by the same functions.
    k_at_1F = qkv_of_row + (H + head) * E + channel_F[None, :]
    v_at_1F = qkv_of_row + (H + J + head) * E + channel_F[None, :]
    if BLOCKS <= FEW_BLOCKS:
        # No program can be idle, so these loads need not wait until the position is read. Otherwise they
        # are below, where idle programs are left out.
        new_q1, new_q2, new_k1, new_k2, v1, v2 = _load_token(
            q_at_QF, k_at_1F, v_at_1F, is_query_Q1, F
        )
        if ROTATE:
            cos_1F = tl.load(cos + row * F + channel_F)[None, :]
            sin_1F = tl.load(sin + row * F + channel_F)[None, :]

    # The blocks with slots that the new token sees: from first_block up to, but without, end_block.
    oldest_seen = tl.maximum(position - window + 1, 0) if WINDOW else 0
    first_block = oldest_seen // C
    # A row that has no request may have a position beyond the BLOCKS blocks that are read.
    end_block = tl.minimum((position + C - 1) // C, BLOCKS)
    # With a window of one position, the new token sees only itself, and no block.
    end_block = tl.where(oldest_seen < position, end_block, first_block)
    # The blocks that this program computes: from begin up to, but without, end.
    if BLOCKS <= FEW_BLOCKS:
        is_alone = True  # whether one program computes all blocks of this row and head
        is_idle = False
        begin = first_block
        end = end_block
    else:
        is_alone = end_block - first_block <= FEW_BLOCKS
        begin = tl.where(is_alone, first_block, own_block)
        end = tl.where(is_alone, end_block, own_block + 1)
        is_unseen = (own_block < first_block) | (own_block >= end_block)
        is_idle = tl.where(is_alone, own_block > 0, is_unseen)  # program 0 is the one that is alone
    # The program of the first block writes the new token's key and value to the cache.
    writes_token = (begin == first_block) & (position // C < BLOCKS)
    if not is_idle:
        dtype = keys.dtype.element_ty
        if BLOCKS > FEW_BLOCKS:
            new_q1, new_q2, new_k1, new_k2, v1, v2 = _load_token(
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

        if writes_token:
            # No program reads this slot in this launch: the token's key and value are in registers.
            new_at_1F = (position // C) * block_stride + (row * J + head).to(tl.int64) * (C * E)
            new_at_1F += position % C * E + channel_F[None, :]
            tl.store(keys + new_at_1F, k1)
            tl.store(keys + new_at_1F + F, k2)
            tl.store(values + new_at_1F, v1)
            tl.store(values + new_at_1F + F, v2)

        # The running sums begin with the new token and the sink, which has a weight and no value.
        new_score_Q = tl.sum(q1.to(tl.float32) * k1.to(tl.float32), 1)
        new_score_Q = (new_score_Q + tl.sum(q2.to(tl.float32) * k2.to(tl.float32), 1)) * SCALE
        start_max_Q = new_score_Q
        new_weight_Q = tl.full((QUERIES,), 1.0, tl.float32)  # exp(new_score - start_max)
        if SINKS:
            sink_Q = tl.load(sinks + head * G + query_Q, mask=is_query_Q, other=0.0).to(tl.float32)
            start_max_Q = tl.maximum(new_score_Q, sink_Q)
            new_weight_Q = tl.exp(new_score_Q - start_max_Q)
        start1_QF = new_weight_Q[:, None] * v1.to(tl.float32)
        start2_QF = new_weight_Q[:, None] * v2.to(tl.float32)
        start_weight_sum_Q = new_weight_Q
        if SINKS:
            start_weight_sum_Q += tl.exp(sink_Q - start_max_Q)
        # A program of one block begins with empty sums. The program that finishes last begins with the new
        # token and the sink, and adds the blocks' sums to them.
        max_Q = tl.where(is_alone, start_max_Q, float("-inf"))
        weight_sum_Q = tl.where(is_alone, start_weight_sum_Q, 0.0)
        sum1_QF = tl.where(is_alone, start1_QF, 0.0)
        sum2_QF = tl.where(is_alone, start2_QF, 0.0)
        # `disable_licm`: for heads of 256 channels, values that are the same for all blocks are computed
        # anew for each block. If they were kept, a card of compute capability 8.0 would have too few
        # registers.
        for block in tl.range(begin, end, disable_licm=F > 64):
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
            block_weight_sum_Q = tl.sum(weights_QC, 1)
            block1_QF = tl.dot(rounded_QC, value1_CF, input_precision=PRECISION)
            block2_QF = tl.dot(rounded_QC, value2_CF, input_precision=PRECISION)
            max_Q, weight_sum_Q, sum1_QF, sum2_QF = _add_block(
                max_Q,
                weight_sum_Q,
                sum1_QF,
                sum2_QF,
                block_max_Q,
                block_weight_sum_Q,
                block1_QF,
                block2_QF,
            )
        writes_output = is_alone
        if BLOCKS > FEW_BLOCKS:
            if not is_alone:
                # `partial` and `sums` have a row for each query of each block of each row and head.
                block_0 = (row * J + head) * BLOCKS
                own_query_0 = (block_0 + own_block) * G
                partial_offset_QF = (own_query_0 + query_Q[:, None]) * E + channel_F[None, :]
                tl.store(partial + partial_offset_QF, sum1_QF, mask=is_query_Q1)
                tl.store(partial + partial_offset_QF + F, sum2_QF, mask=is_query_Q1)
                sums_offset_Q = (own_query_0 + query_Q) * 2
                tl.store(sums + sums_offset_Q, max_Q, mask=is_query_Q)
                tl.store(sums + sums_offset_Q + 1, weight_sum_Q, mask=is_query_Q)

                # The program that finishes last adds up the blocks.
                tl.debug_barrier()  # all threads have written before one of them counts
                counter = counters + row * J + head
                finished_before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
                if finished_before == end_block - first_block - 1:
                    writes_output = True
                    tl.store(counter, 0)  # for the next launch
                    max_Q, weight_sum_Q = start_max_Q, start_weight_sum_Q
                    # The new token's value is read again, and not kept in registers until here.
                    v1, v2 = tl.load(v_at_1F), tl.load(v_at_1F + F)
                    sum1_QF = new_weight_Q[:, None] * v1.to(tl.float32)
                    sum2_QF = new_weight_Q[:, None] * v2.to(tl.float32)
                    # `.cg` reads from the L2 cache: other multiprocessors wrote these numbers, so this
                    # one's L1 cache may have older ones. The loop is unrolled, so that the sums of the
                    # next blocks are read while earlier sums are still being added.
                    for block in tl.range(first_block, end_block, loop_unroll_factor=4):
                        query_0 = (block_0 + block) * G
                        sums_at_Q = sums + (query_0 + query_Q) * 2
                        partial_at_QF = (
                            partial + (query_0 + query_Q[:, None]) * E + channel_F[None, :]
                        )
                        block_max_Q = tl.load(
                            sums_at_Q, mask=is_query_Q, other=0.0, cache_modifier=".cg"
                        )
                        block_weight_sum_Q = tl.load(
                            sums_at_Q + 1, mask=is_query_Q, other=0.0, cache_modifier=".cg"
                        )
                        block1_QF = tl.load(
                            partial_at_QF, mask=is_query_Q1, other=0.0, cache_modifier=".cg"
                        )
                        block2_QF = tl.load(
                            partial_at_QF + F, mask=is_query_Q1, other=0.0, cache_modifier=".cg"
                        )
                        max_Q, weight_sum_Q, sum1_QF, sum2_QF = _add_block(
                            max_Q,
                            weight_sum_Q,
                            sum1_QF,
                            sum2_QF,
                            block_max_Q,
                            block_weight_sum_Q,
                            block1_QF,
                            block2_QF,
                        )
        if writes_output:
            out_at_QF = out + (row * H + head * G + query_Q[:, None]) * E + channel_F[None, :]
            tl.store(out_at_QF, (sum1_QF / weight_sum_Q[:, None]).to(dtype), mask=is_query_Q1)
            tl.store(out_at_QF + F, (sum2_QF / weight_sum_Q[:, None]).to(dtype), mask=is_query_Q1)


def attend_fits(device: torch.device, slots: int, head_dim: int, dtype: torch.dtype) -> bool:
    """Return whether a block's keys and values, and the queries, fit a card's shared memory.

    With blocks of 128 slots, heads of 128 channels in fp32 and heads of 256 in 16 bits need 136 KiB.
    Cards of data centers have 163 KiB and more, and consumer cards have 99.
    """
    needed_bytes = (2 * slots + ROWS) * head_dim * dtype.itemsize
    card: Any = torch.cuda.get_device_properties(device)  # torch's types lack this attribute
    return bool(needed_bytes <= card.shared_memory_per_block_optin)


def product_precision(dtype: torch.dtype) -> str:
    """Return the `input_precision` of `tl.dot`: "ieee" for exact products of fp32.

    `tl.dot` ignores it for operands of 16 bits, so "tf32" stands for any of its values.
    """
    return "ieee" if dtype == torch.float32 else "tf32"


@functools.cache
def channels_at_once(channels: int, most: int = 256) -> int:
    """Return how many of the channels over which a product sums are read at once by a program.

    It is the largest power of two from ROWS to `most` that divides the number of channels. If there is
    none, it is 0, and no kernel can compute the product.
    """
    step = most
    while channels % step:
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


class AttendForm(NamedTuple):
    """How `attend` shares its work among programs; all forms give the same bits.

    Attributes:
        few_blocks: the largest number of blocks that one program computes for a row and a key-value head.
            A row that sees more blocks has a program for each of them.
        stages: the number of blocks that a program has in its memory at the same time: one that it
            computes, and others that are still being loaded.
    """

    few_blocks: int
    stages: int


# Up to this number of programs, the latency of memory decides the time, and not its bandwidth.
_FEW_PROGRAMS = 128
# A block of 128 slots of heads of 256 channels in 16 bits.
_BYTES_OF_WIDE_BLOCK = 131_072
# A constant, because the order in which a block's weights are summed depends on it, and so do the bits.
_ATTEND_WARPS = 4


def attend_form(
    programs: int, blocks: int, block_bytes: int, shared_bytes: int, capability: tuple[int, int]
) -> AttendForm:
    """Return the form for these shapes; it has fewer stages if their blocks would not fit the memory.

    Args:
        programs: the rows times the key-value heads.
        blocks: how many blocks are read.
        block_bytes: the size of one head's keys and values of a block.
        shared_bytes: the size of the card's shared memory that a program has for blocks.
        capability: the card's compute capability.
    """
    # These numbers were measured on an H200 with heads of 64 and 128 in bf16 (dev/log.md). With few
    # programs, 3 stages were the fastest for 2 and 3 blocks; and for 8 and 32 blocks, in most shapes, it was
    # fastest to have a program for each block. With many programs, 2 stages were the fastest, and one
    # program for 8 blocks took 0.8 times as long as eight programs.
    is_latency_bound = programs <= _FEW_PROGRAMS
    few_blocks = 4 if is_latency_bound else 8
    stages = 3 if is_latency_bound and blocks <= few_blocks else 2
    if blocks == 1:
        # With 1 stage, some kernels spill registers: on Ampere and Ada with heads of 64, and on compute
        # capability 10 with heads of 256. With 2 stages they need fewer registers (counted in machine code,
        # not timed).
        spills = capability[0] == 8 or (capability[0] == 10 and block_bytes >= _BYTES_OF_WIDE_BLOCK)
        stages = 2 if spills else 1
    # One stage computes from registers, and the other stages' blocks are in shared memory.
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
        blocks: how many blocks of the cache are read, from the first on. A row whose position is beyond
            them gets numbers without meaning.
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
    # Shared memory also has the queries, the weights of a block's slots, and 1 KiB for sums over warps.
    other_bytes = queries * (head_dim + slots) * itemsize + 1024
    form = attend_form(
        rows * key_heads,
        blocks,
        2 * slots * head_dim * itemsize,
        card.shared_memory_per_block_optin - other_bytes,
        (card.major, card.minor),
    )
    is_split = blocks > form.few_blocks  # whether each block has a program
    programs_per_head = blocks if is_split else 1
    # What programs of one block write: for each block and query a weighted sum of values, and two numbers.
    block_queries = rows * key_heads * blocks * group if is_split else 0
    partial = qkv_BX.new_empty(block_queries * head_dim, dtype=torch.float32)
    sums = qkv_BX.new_empty(block_queries * 2, dtype=torch.float32)
    # A kernel needs a pointer for each tensor, even for one that it does not read.
    unused = position_B
    _attend[(rows, key_heads, programs_per_head)](
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
        QUERIES=queries,
        BLOCKS=blocks,
        NORM=q_gain_E is not None,
        CENTRED=is_centred,
        ROTATE=cos_BF is not None,
        SINKS=sink_H is not None,
        WINDOW=window is not None,
        PRECISION=product_precision(qkv_BX.dtype),
        FEW_BLOCKS=form.few_blocks,
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
