"""Compute products of linear layers in a decode step by Triton kernels, on a GPU.

    y = residual + norm(x) W^T + b                              `project`
    y = act(norm(x) Wg^T) * (norm(x) Wu^T)                      `project_gated`
    y = residual + norm(x) W^T + b + s (norm(x) A^T) B^T        `multiply`
    y = act(norm(x) Wg^T + ...) * (norm(x) Wu^T + ...)          `multiply_gated`

The first two take one dense weight, which may have the rows of several layers one after another. The
last two take up to three separate layers, such as query, key and value. Each of these may have an adapter
(LoRA: A, B and the factor s), and their weights may be stored in 8 or 4 bits (`monograph.graph.frozen`).

**Kernels.** One launch of `_multiply` computes any of the four. If a layer has an adapter, a launch of
`_project_down` comes before it.

    kernel            tiles of the grid                 axis   a program writes
    `_multiply`       tiles of rows                     0      ROWS x COLUMNS outputs of one layer; if GATED,
                      tiles of columns, of all layers   1      of gate and up together
    `_project_down`   tiles of ranks, of all layers     0      ROWS x RANKS partial sums of norm(x) A^T of one
                      and SPLITS ranges of channels            layer, over one range
                      tiles of rows                     1

Programs begin in the order of axis 0. So the tiles of rows that read the same weights in `_multiply` run at
the same time, and the card's cache has the weights for all but the first of them.

`_multiply` adds up the partial sums of the SPLITS ranges, always in the same order.

**A row's bits do not depend on the other rows** if there are at most 16 rows. A tile then has 16 rows, and
its other sizes are chosen by the card and the weight's shape alone (`tile_of`).

**Weights in few bits** are dequantised in registers, so that no dense weight is ever written to memory.
Each tile of rows does this for the whole weight. So that there are few such tiles, a tile has 64 rows if
there are more than 16 rows. Dense weights with a bank of adapters have such tiles, too. All other products, and
all in fp32, have tiles of 16 rows.

**A bank of adapters** (`monograph.decode.adapter_bank`) lets each row have its own adapter. The row's
*slot* says which one; slot 0 means none. A program computes the rows of one adapter together and leaves
the other rows of its tile as they are. So an adapter is read once for all its rows in a tile, and an
adapter with NaN changes its own rows only. With DoRA an adapter also has a magnitude m for each column of
y. The column is scaled by g, which is m divided by the norm of the corresponding row of W + s B A:

    y = norm(x) W^T + b + (g - 1) (norm(x) W^T) + s (norm(x) A^T) (g B)^T

A row has the same bits as with a layer that has this adapter alone, padded with zeros to the bank's rank;
and a row without an adapter has the bits of a layer without adapters. The same kernels add the same terms
in the same order in both cases. (Padding changes no bits if both ranks have tiles of the same size, which
is the next power of two from 16 to 64.)

Shapes: B rows, P layers, K channels of x, over which products sum, N columns, M columns of gate or up, Q the
adapters' rank, Z slots of a bank. In kernels: R = ROWS and O = COLUMNS of a tile, S = CHANNELS and Q = RANKS
that are read at once, H = S / 2 bytes of two codes each, G = S / 64 blocks of codes, T the 16 numbers of
NF4. `x_at_RS` are the addresses of the elements of `x_RS`. A number at the end of a name, as in `weight_1`,
is the index of the layer. Flags in capitals that have the name of a term, such as NORM, BIAS and RESIDUAL,
say whether the product has this term; CENTRED says that the norm multiplies by 1 + gain.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from monograph.ops.decode_kernels import (
    ROWS,
    Norm,
    channels_at_once,
    normalised,
    product_precision,
    row_scale,
)

Activation = Literal["silu", "gelu"]
# How a weight is stored: dense, as an `Int8Weight` or as an `NF4Weight`.
WeightForm = Literal["dense", "int8", "nf4"]
# The number of tensors that store a weight: the weight; codes and scales; or codes, levels, steps, mean
# and table.
_STORED_TENSORS = {"dense": 1, "int8": 2, "nf4": 5}
MAX_LAYERS = 3  # of one launch
NF4_BLOCK = 64  # weights with one scale
_ROWS_OF_LARGE_TILE = 64
_MAX_RANKS_AT_ONCE = 64
_MAX_SPLITS = 16  # ranges of the channels, each with a program, for one x A^T


@triton.jit
def gated(gate_RO, up_RO, dtype: tl.constexpr, GELU: tl.constexpr):
    """Return act(gate) * up; both are rounded first, as two linear layers would round them."""
    gate_RO = gate_RO.to(dtype).to(tl.float32)
    # GELU by its tanh approximation, with sqrt(2 / pi) = 0.797... and (1 + tanh z) / 2 = 1 / (1 + exp(-2 z)).
    if GELU:
        inner_RO = 0.7978845608028654 * (gate_RO + 0.044715 * gate_RO * gate_RO * gate_RO)
        activated_RO = gate_RO / (1 + tl.exp(-2 * inner_RO))
    else:
        activated_RO = gate_RO / (1 + tl.exp(-gate_RO))
    return activated_RO.to(dtype).to(tl.float32) * up_RO.to(dtype).to(tl.float32)


@triton.jit
def _of_layer(layer, of_0, of_1, of_2, LAYERS: tl.constexpr):
    """Return `of_0`, `of_1` or `of_2`, whichever belongs to the layer with the index `layer`.

    They are pointers or numbers. A kernel cannot index a list by a number that it learns at run time.
    """
    chosen = of_0
    if LAYERS > 1:
        chosen = tl.where(layer == 1, of_1, chosen)
    if LAYERS > 2:
        chosen = tl.where(layer == 2, of_2, chosen)
    return chosen


@triton.jit
def _add_nf4(
    total_RO,
    even_RH,
    odd_RH,
    codes,
    levels,
    steps,
    mean,
    table_T,
    column_O1,
    is_column_O1,
    begin,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add the products of S channels of x, from `begin` on, with a tile of an `NF4Weight`, [O, K].

    `codes` to `mean` are what the weight is stored in: codes of 4 bits, and for each block of 64 weights
    a scale, which is itself stored as a level, int8 or fp32. `table_T` has the number of each code.

    A byte has the codes of an even channel and of the next, odd one. So `x` comes in two parts,
    `even_RH` and `odd_RH`, and each part has a product of its own.
    """
    dtype: tl.constexpr = even_RH.dtype
    BLOCKS: tl.constexpr = CHANNELS // 64
    codes_at_OH = codes + column_O1 * (K // 2) + begin // 2 + tl.arange(0, CHANNELS // 2)[None, :]
    codes_OH = tl.load(codes_at_OH, mask=is_column_O1, other=0).to(tl.int32)
    # 64 weights have one scale, which is mean + level / step; 256 blocks have the same step.
    block_OG = column_O1 * (K // 64) + begin // 64 + tl.arange(0, BLOCKS)[None, :]
    level_OG = tl.load(levels + block_OG, mask=is_column_O1, other=0).to(tl.float32)
    step_OG = tl.load(steps + block_OG // 256, mask=is_column_O1, other=1.0)
    # `div_rn` rounds as torch's division, which `NF4Weight` uses to make its dense weight.
    scale_OG1 = (tl.math.div_rn(level_OG, step_OG) + mean)[:, :, None]
    # `tl.gather` looks codes up in a flat tensor. A block has 32 even and 32 odd channels.
    flat_codes = tl.reshape(codes_OH, (COLUMNS * CHANNELS // 2,))
    even = tl.reshape(tl.gather(table_T, flat_codes >> 4, 0), (COLUMNS, BLOCKS, 32))
    odd = tl.reshape(tl.gather(table_T, flat_codes & 15, 0), (COLUMNS, BLOCKS, 32))
    even_OH = tl.reshape((even * scale_OG1).to(dtype), (COLUMNS, CHANNELS // 2))
    odd_OH = tl.reshape((odd * scale_OG1).to(dtype), (COLUMNS, CHANNELS // 2))
    total_RO = tl.dot(even_RH, even_OH.T, total_RO, input_precision=PRECISION)
    return tl.dot(odd_RH, odd_OH.T, total_RO, input_precision=PRECISION)


@triton.jit
def _slots_of_rows(slots, row_R, row_count):
    """Return the slots of a tile's rows, int32; 0, which is no adapter, for rows beyond the last one."""
    return tl.load(slots + row_R, mask=row_R < row_count, other=0).to(tl.int32)


@triton.jit
def _project_down(
    x,
    gain,
    a_0,
    a_1,
    a_2,
    partial,
    slots,
    row_count,
    EPS: tl.constexpr,
    K: tl.constexpr,
    RANK: tl.constexpr,
    NORM: tl.constexpr,
    CENTRED: tl.constexpr,
    LAYERS: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BANK: tl.constexpr,
    ROUND_ADAPTERS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute RANKS ranks of one layer's norm(x) A^T, over one of SPLITS equal ranges of the channels.

    `partial`, fp32 [SPLITS, B, LAYERS, RANK], gets the sums. `a_0` to `a_2` are the layers' A. A layer
    without an adapter has the A of another layer there, and its sums are never read.

    If BANK, axis 1 of the grid has a program for each row instead of one for each tile of rows. Of the
    rows in a tile that have the same adapter, the program of the first row computes all. The programs of
    the others do nothing.
    """
    if BANK:
        row = tl.program_id(1)
        row_R = (row // ROWS) * ROWS + tl.arange(0, ROWS)  # all rows of its tile
        slot_R = _slots_of_rows(slots, row_R, row_count)
        slot = tl.load(slots + row).to(tl.int32)
        is_own_R = slot_R == slot
        # Rows beyond the last one have slot 0, so they are not among a program's own.
        has_adapter = slot > 0
        first_own_row = tl.min(tl.where(is_own_R, row_R, row_count), 0)
        is_needed = has_adapter & (first_own_row == row)
        # `a` has the slots one after another, each of RANK rows.
        first_rank = slot * RANK
    else:
        row_R = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        is_own_R = row_R < row_count
        is_needed = True
        first_rank = 0
    if is_needed:
        # Axis 0 of the grid has a program for each tile of ranks, layer and split. Splits change fastest.
        split = tl.program_id(0) % SPLITS
        layer = (tl.program_id(0) // SPLITS) % LAYERS
        rank_Q = (tl.program_id(0) // (SPLITS * LAYERS)) * RANKS + tl.arange(0, RANKS)
        offset_S = tl.arange(0, CHANNELS)
        is_row_R1 = is_own_R[:, None]
        is_rank_Q = rank_Q < RANK
        a = _of_layer(layer, a_0, a_1, a_2, LAYERS)
        x_dtype: tl.constexpr = x.dtype.element_ty
        dtype: tl.constexpr = x_dtype if ROUND_ADAPTERS else a_0.dtype.element_ty
        scale_R = tl.full((ROWS,), 1.0, tl.float32)
        if NORM:
            scale_R = row_scale(x, row_R, row_count, EPS, K, ROWS, CHANNELS)
        total_RQ = tl.zeros((ROWS, RANKS), tl.float32)
        SPAN: tl.constexpr = K // SPLITS
        for offset in range(0, SPAN, CHANNELS):
            begin = split * SPAN + offset
            x_at_RS = x + row_R[:, None] * K + begin + offset_S[None, :]
            factor_RS = tl.load(x_at_RS, mask=is_row_R1, other=0.0)
            if NORM:
                factor_RS = normalised(factor_RS, gain + begin, scale_R, offset_S, CENTRED, x_dtype)
            a_at_QS = (
                a + (first_rank + rank_Q)[:, None].to(tl.int64) * K + begin + offset_S[None, :]
            )
            a_QS = tl.load(a_at_QS, mask=is_rank_Q[:, None], other=0.0).to(dtype)
            total_RQ = tl.dot(factor_RS.to(dtype), a_QS.T, total_RQ, input_precision=PRECISION)
        row_R1 = ((split * row_count + row_R) * LAYERS + layer)[:, None]
        partial_at_RQ = partial + row_R1 * RANK + rank_Q[None, :]
        tl.store(partial_at_RQ, total_RQ, mask=is_row_R1 & is_rank_Q[None, :])


@triton.jit
def _add_adapter(
    total_RO,
    partial,
    b,
    layer,
    row_R,
    is_row_R1,
    b_column_O1,
    is_adapted_O1,
    row_count,
    scale,
    b_rank_stride,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    SPLITS: tl.constexpr,
    LAYERS: tl.constexpr,
    dtype: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return `total_RO` with s (norm(x) A^T) B^T added; `scale` is s.

    It is added where the masks `is_row_R1` and `is_adapted_O1` are true. `_project_down` wrote the partial
    sums of norm(x) A^T to `partial`. The element of B for a column and a rank has the offset
    `b_column_O1` of the column plus the rank times `b_rank_stride`.
    """
    for first in range(0, RANK, RANKS):
        rank_Q = first + tl.arange(0, RANKS)
        is_rank_1Q = (rank_Q < RANK)[None, :]
        low_rank_RQ = tl.zeros((row_R.shape[0], RANKS), tl.float32)
        for split in range(0, SPLITS):
            row_R1 = ((split * row_count + row_R) * LAYERS + layer)[:, None]
            partial_at_RQ = partial + row_R1 * RANK + rank_Q[None, :]
            low_rank_RQ += tl.load(partial_at_RQ, mask=is_row_R1 & is_rank_1Q, other=0.0)
        b_at_OQ = b + b_column_O1 + rank_Q[None, :] * b_rank_stride
        b_OQ = tl.load(b_at_OQ, mask=is_adapted_O1 & is_rank_1Q, other=0.0).to(dtype)
        low_rank_RQ = (low_rank_RQ * scale).to(dtype)
        total_RO = tl.dot(low_rank_RQ, b_OQ.T, total_RO, input_precision=PRECISION)
    return total_RO


@triton.jit
def _add_adapters_of_rows(
    total_RO,
    bias_O,
    partial,
    b,
    scales,
    magnitude_changes,
    slot_R,
    layer,
    row_R,
    column_O1,
    is_adapted_O1,
    row_count,
    columns,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    SPLITS: tl.constexpr,
    LAYERS: tl.constexpr,
    MAGNITUDES: tl.constexpr,
    dtype: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return `total_RO` with the product of each row's adapter added; see `_add_adapter`.

    Adapters are added one after another, from the highest slot down, each to its own rows of the tile.
    `scales` has s of each slot, and `magnitude_changes` has g - 1 of each slot and column if MAGNITUDES.
    `bias_O` is the bias that `total_RO` includes already: magnitudes scale `total_RO` without it.
    """
    slot = tl.max(slot_R, 0)
    while slot > 0:
        is_own_R1 = (slot_R == slot)[:, None]
        long_slot = slot.to(tl.int64)
        added_RO = total_RO
        if MAGNITUDES:
            change_at_O1 = magnitude_changes + long_slot * columns + column_O1
            change_O1 = tl.load(change_at_O1, mask=is_adapted_O1, other=0.0).to(tl.float32)
            added_RO += (total_RO - bias_O[None, :]) * change_O1.T
        added_RO = _add_adapter(
            added_RO,
            partial,
            b + long_slot * columns * RANK,
            layer,
            row_R,
            is_own_R1,
            column_O1,
            is_adapted_O1,
            row_count,
            tl.load(scales + slot),
            columns,
            RANK,
            RANKS,
            SPLITS,
            LAYERS,
            dtype,
            PRECISION,
        )
        total_RO = tl.where(is_own_R1, added_RO, total_RO)
        # The rows that are done get slot 0, so the next slot is the highest of the others.
        slot_R = tl.where(slot_R == slot, 0, slot_R)
        slot = tl.max(slot_R, 0)
    return total_RO


@triton.jit
def _multiply(
    x,
    gain,
    residual,
    out,
    table,
    partial,
    slots,
    adapter_scales,
    weight_0,
    weight_1,
    weight_2,
    scales_0,
    scales_1,
    scales_2,
    steps_0,
    steps_1,
    steps_2,
    mean_0,
    mean_1,
    mean_2,
    bias_0,
    bias_1,
    bias_2,
    b_0,
    b_1,
    b_2,
    magnitude_changes_0,
    magnitude_changes_1,
    magnitude_changes_2,
    row_count,
    columns_0,
    columns_1,
    columns_2,
    EPS: tl.constexpr,
    K: tl.constexpr,
    FORM: tl.constexpr,
    NORM: tl.constexpr,
    CENTRED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    LAYERS: tl.constexpr,
    ADAPTED: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    SPLITS: tl.constexpr,
    SCALE: tl.constexpr,
    BANK: tl.constexpr,
    MAGNITUDES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROUND_ADAPTERS: tl.constexpr,
    PRECISION: tl.constexpr,
    ADAPTER_PRECISION: tl.constexpr,
):
    """Compute COLUMNS columns of one layer, for one tile of rows.

    If GATED, the layers are gate and up, and a program computes its columns of both: `total_RO` is the
    product of gate, and `up_RO` that of up. Otherwise each program has one layer, and `up_RO` is not used.

    FORM is how weights are stored. For "int8" and "nf4", `weight_0` and so on are codes, and `scales_0` and
    so on are the scales of columns ("int8") or the levels of blocks ("nf4"). Only "nf4" has `steps_0` to
    `mean_2`.

    Bit p of ADAPTED says whether layer p has an adapter; if BANK, it is a bank of adapters, whose scales
    are in `adapter_scales`, and otherwise SCALE is s. ROUND_ADAPTERS: A, B and norm(x) A^T are rounded to
    the dtype of x; otherwise their products are in the dtype of A and B.
    """
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    # Find the program's layer and its tile in that layer. The tiles of layer 0 come first on axis 1 of the
    # grid, then those of layer 1, then those of layer 2. CHOICES is the number of layers that have tiles: if
    # GATED it is 1, since the tiles of gate stand for those of up as well.
    CHOICES: tl.constexpr = 1 if GATED else LAYERS
    tile = tl.program_id(1)
    layer = 0
    first_column = 0  # the layer's first column in the output
    out_columns = columns_0
    if CHOICES > 1:
        tiles_0 = tl.cdiv(columns_0, COLUMNS)
        layer = tl.where(tile >= tiles_0, 1, 0)
        first_column = tl.where(layer > 0, columns_0, 0)
        tile -= tl.where(layer > 0, tiles_0, 0)
        out_columns += columns_1
    if CHOICES > 2:
        tiles_1 = tl.cdiv(columns_1, COLUMNS)
        is_last = (layer > 0) & (tile >= tiles_1)
        layer += tl.where(is_last, 1, 0)
        first_column += tl.where(is_last, columns_1, 0)
        tile -= tl.where(is_last, tiles_1, 0)
        out_columns += columns_2
    column_O = tile * COLUMNS + tl.arange(0, COLUMNS)
    columns = _of_layer(layer, columns_0, columns_1, columns_2, CHOICES)
    weight = _of_layer(layer, weight_0, weight_1, weight_2, CHOICES)
    scales = _of_layer(layer, scales_0, scales_1, scales_2, CHOICES)
    offset_S = tl.arange(0, CHANNELS)
    is_row_R1 = (row_R < row_count)[:, None]
    is_column_O = column_O < columns
    is_column_O1 = is_column_O[:, None]
    # A weight may have more elements than 32 bits can count.
    column_O1 = column_O[:, None].to(tl.int64)
    dtype: tl.constexpr = out.dtype.element_ty
    if FORM == "nf4":
        table_T = tl.load(table + tl.arange(0, 16))
        steps = _of_layer(layer, steps_0, steps_1, steps_2, CHOICES)
        mean = tl.load(_of_layer(layer, mean_0, mean_1, mean_2, CHOICES))
        up_mean = tl.load(mean_1)
    scale_R = tl.full((ROWS,), 1.0, tl.float32)
    if NORM:
        scale_R = row_scale(x, row_R, row_count, EPS, K, ROWS, CHANNELS)
    total_RO = tl.zeros((ROWS, COLUMNS), tl.float32)
    up_RO = tl.zeros((ROWS, COLUMNS), tl.float32)
    for begin in range(0, K, CHANNELS):
        x_at_RS = x + row_R[:, None] * K + begin + offset_S[None, :]
        factor_RS = tl.load(x_at_RS, mask=is_row_R1, other=0.0)
        if NORM:
            factor_RS = normalised(factor_RS, gain + begin, scale_R, offset_S, CENTRED, dtype)
        if FORM == "nf4":
            even_RH, odd_RH = tl.split(tl.reshape(factor_RS, (ROWS, CHANNELS // 2, 2)))
            total_RO = _add_nf4(
                total_RO,
                even_RH,
                odd_RH,
                weight,
                scales,
                steps,
                mean,
                table_T,
                column_O1,
                is_column_O1,
                begin,
                K,
                COLUMNS,
                CHANNELS,
                PRECISION,
            )
            if GATED:
                up_RO = _add_nf4(
                    up_RO,
                    even_RH,
                    odd_RH,
                    weight_1,
                    scales_1,
                    steps_1,
                    up_mean,
                    table_T,
                    column_O1,
                    is_column_O1,
                    begin,
                    K,
                    COLUMNS,
                    CHANNELS,
                    PRECISION,
                )
        else:
            offset_OS = column_O1 * K + begin + offset_S[None, :]
            # 16 bits represent the codes of int8 exactly; their scales follow after the sum.
            weight_OS = tl.load(weight + offset_OS, mask=is_column_O1, other=0).to(dtype)
            total_RO = tl.dot(factor_RS, weight_OS.T, total_RO, input_precision=PRECISION)
            if GATED:
                up_weight_OS = tl.load(weight_1 + offset_OS, mask=is_column_O1, other=0).to(dtype)
                up_RO = tl.dot(factor_RS, up_weight_OS.T, up_RO, input_precision=PRECISION)
    if FORM == "int8":
        total_RO *= tl.load(scales + column_O, mask=is_column_O, other=0.0)[None, :]
        if GATED:
            up_RO *= tl.load(scales_1 + column_O, mask=is_column_O, other=0.0)[None, :]
    bias_O = tl.zeros((COLUMNS,), tl.float32)
    if BIAS:
        bias = _of_layer(layer, bias_0, bias_1, bias_2, CHOICES)
        bias_O = tl.load(bias + column_O, mask=is_column_O, other=0.0).to(dtype).to(tl.float32)
        total_RO += bias_O[None, :]
    if ADAPTED:
        adapter_dtype: tl.constexpr = dtype if ROUND_ADAPTERS else b_0.dtype.element_ty
        b = _of_layer(layer, b_0, b_1, b_2, CHOICES)
        is_adapted_O1 = is_column_O1 & ((ADAPTED >> layer) % 2 == 1)
        is_up_adapted_O1 = is_column_O1 & (ADAPTED >= 2)  # bit 1 is set
        if BANK:
            slot_R = _slots_of_rows(slots, row_R, row_count)
            magnitude_changes = _of_layer(
                layer, magnitude_changes_0, magnitude_changes_1, magnitude_changes_2, CHOICES
            )
            total_RO = _add_adapters_of_rows(
                total_RO,
                bias_O,
                partial,
                b,
                adapter_scales,
                magnitude_changes,
                slot_R,
                layer,
                row_R,
                column_O1,
                is_adapted_O1,
                row_count,
                columns,
                RANK,
                RANKS,
                SPLITS,
                LAYERS,
                MAGNITUDES,
                adapter_dtype,
                ADAPTER_PRECISION,
            )
            if GATED:
                up_RO = _add_adapters_of_rows(
                    up_RO,
                    bias_O,
                    partial,
                    b_1,
                    adapter_scales,
                    magnitude_changes_1,
                    slot_R,
                    1,
                    row_R,
                    column_O1,
                    is_up_adapted_O1,
                    row_count,
                    columns,
                    RANK,
                    RANKS,
                    SPLITS,
                    LAYERS,
                    MAGNITUDES,
                    adapter_dtype,
                    ADAPTER_PRECISION,
                )
        else:
            total_RO = _add_adapter(
                total_RO,
                partial,
                b,
                layer,
                row_R,
                is_row_R1,
                column_O1 * RANK,
                is_adapted_O1,
                row_count,
                SCALE,
                1,
                RANK,
                RANKS,
                SPLITS,
                LAYERS,
                adapter_dtype,
                ADAPTER_PRECISION,
            )
            if GATED:
                up_RO = _add_adapter(
                    up_RO,
                    partial,
                    b_1,
                    1,
                    row_R,
                    is_row_R1,
                    column_O1 * RANK,
                    is_up_adapted_O1,
                    row_count,
                    SCALE,
                    1,
                    RANK,
                    RANKS,
                    SPLITS,
                    LAYERS,
                    adapter_dtype,
                    ADAPTER_PRECISION,
                )
    if GATED:
        total_RO = gated(total_RO, up_RO, dtype, GELU)
    out_offset_RO = row_R[:, None] * out_columns + first_column + column_O[None, :]
    is_output_RO = is_row_R1 & is_column_O[None, :]
    result_RO = total_RO.to(dtype)
    if RESIDUAL:
        result_RO = tl.load(residual + out_offset_RO, mask=is_output_RO, other=0.0) + result_RO
    tl.store(out + out_offset_RO, result_RO, mask=is_output_RO)


class Tile(NamedTuple):
    """How much of a weight a program of `_multiply` reads, and how.

    Attributes:
        columns: how many columns it computes.
        channels: the largest number of channels that it reads at once.
        warps: its number of warps, of 32 threads each.
        stages: how many of these reads are under way at the same time (Triton's `num_stages`).
        registers: the maximum number of registers of a thread; None: the assembler chooses.
    """

    columns: int
    channels: int
    warps: int
    stages: int
    registers: int | None = None


# Tiles of 16 rows of dense weights in 16 bits, from the narrowest to the widest. They are the fastest of
# 516 tiles for the weights of a 1B model on an H200 (dev/log.md): the products of a step take 850 us, and
# 1,240 us with the tile for small shared memory. A gated product needs up to 144 KiB of shared memory.
_TILES = (
    Tile(columns=16, channels=512, warps=2, stages=4),
    Tile(columns=32, channels=256, warps=4, stages=4),
    Tile(columns=64, channels=128, warps=8, stages=4),
)
# The same for nf4. A thread has half as many weights at once, because its registers also hold the codes
# and the scales.
_NF4_TILES = (
    Tile(columns=16, channels=256, warps=2, stages=4),
    Tile(columns=32, channels=256, warps=4, stages=4),
)
# On cards with less shared memory than this, the tiles whose names end in `FOR_LESS_MEMORY` are used.
_SHARED_BYTES_OF_TILES = 147_456
_TILE_FOR_LESS_MEMORY = Tile(columns=16, channels=256, warps=4, stages=4)
_NF4_TILE_FOR_LESS_MEMORY = Tile(columns=16, channels=128, warps=2, stages=4)
# For fp32 on all cards: four stages would need 115 KiB of shared memory, and consumer cards have 99.
_FP32_TILE = Tile(columns=16, channels=256, warps=4, stages=2)
# For codes if x is fp32. The exact products of fp32 need both operands in registers, and a wider tile would
# need more registers than there are.
_FP32_TILE_OF_CODES = Tile(columns=16, channels=64, warps=4, stages=2)
# For tiles of 64 rows: weights in few bits, or dense weights with a bank. With 64 rows, the tile of x needs
# much shared memory, too, so the tile of the weight has fewer channels and stages.
_LARGE_TILE = Tile(columns=32, channels=128, warps=4, stages=3)
# The same on cards with less shared memory. At most two of its programs fit a multiprocessor, so their
# threads may use all of its registers. By default, the assembler would leave registers for a third
# program, and spill.
_LARGE_TILE_FOR_LESS_MEMORY = _LARGE_TILE._replace(registers=255)
# On these cards, a gated product of dense weights would need more than 255 registers for each thread. Only
# one of its programs fits a multiprocessor, so the program has twice as many threads. Each thread
# computes fewer numbers, and adds up the terms of a number in the same order.
_LARGE_GATED_TILE_FOR_LESS_MEMORY = _LARGE_TILE._replace(warps=8)


# On cards of these compute capabilities, products with a bank of adapters may use all registers. By default,
# the assembler would leave registers for more programs on a multiprocessor, and spill one or two.
_SPILL_WITH_A_BANK = ((8, 0), (10, 0))


def tile_of(
    form: str,
    columns: int,
    is_gated: bool,
    tile_rows: int,
    dtype: torch.dtype,
    device: Any,
    has_bank: bool = False,
) -> Tile:
    """Return the tile of a product.

    It is never chosen by timing, and does not depend on how many of the tile's rows are used: otherwise
    two steps or two processes could have different tiles, and compute different bits.

    Args:
        form: how the weight is stored.
        columns: the number of columns of all layers together.
        is_gated: whether it is the gated product of two layers.
        tile_rows: the number of rows of the tile, used or not.
        dtype: the dtype of x.
        device: the card.
        has_bank: whether a bank of adapters is added.
    """
    tile = _tile_without_bank(form, columns, is_gated, tile_rows, dtype, device)
    if has_bank and torch.cuda.get_device_capability(device) in _SPILL_WITH_A_BANK:
        # The number of registers changes no bits.
        return tile._replace(registers=255)
    return tile


def _tile_without_bank(
    form: str, columns: int, is_gated: bool, tile_rows: int, dtype: torch.dtype, device: Any
) -> Tile:
    """Return the tile of a product without a bank of adapters; see `tile_of`."""
    card: Any = torch.cuda.get_device_properties(device)  # torch's types lack an attribute
    has_less_memory = card.shared_memory_per_block_optin < _SHARED_BYTES_OF_TILES
    if tile_rows > ROWS:
        if not has_less_memory:
            return _LARGE_TILE
        is_dense_gated = form == "dense" and is_gated
        return _LARGE_GATED_TILE_FOR_LESS_MEMORY if is_dense_gated else _LARGE_TILE_FOR_LESS_MEMORY
    if dtype == torch.float32:
        return _FP32_TILE if form == "dense" else _FP32_TILE_OF_CODES
    if has_less_memory:
        return _NF4_TILE_FOR_LESS_MEMORY if form == "nf4" else _TILE_FOR_LESS_MEMORY
    # Take the narrowest tile that lets all programs run at once, one on each multiprocessor. With wider tiles
    # some multiprocessors would have no work. With narrower tiles some programs would have to wait for
    # others.
    tiles = _NF4_TILES if form == "nf4" else _TILES
    for tile in tiles:
        if triton.cdiv(columns, tile.columns) <= card.multi_processor_count:
            return tile
    return tiles[-1]


class LowRank(NamedTuple):
    """The tensors of an adapter, which adds s B A to a weight.

    Attributes:
        a_QK: A.
        b_NQ: B, in the dtype of A.
        scale: s.
    """

    a_QK: Tensor
    b_NQ: Tensor
    scale: float


class LowRankBank(NamedTuple):
    """The tensors of a layer's bank of adapters. Each row uses one adapter of the bank, or none.

    Attributes:
        a_ZQK: A of each slot.
        b_ZQN: B^T of each slot, or (g B)^T, in the dtype of A.
        scale_Z: s of each slot, fp32.
        magnitude_change_ZN: g - 1 of each slot, which is 0 without magnitudes; None: no slot has magnitudes.
        slot_B: the slots of the rows, int64; 0: none.
    """

    a_ZQK: Tensor
    b_ZQN: Tensor
    scale_Z: Tensor
    magnitude_change_ZN: Tensor | None
    slot_B: Tensor


class StoredLayer(NamedTuple):
    """The tensors of a linear layer.

    Attributes:
        form: how its weight is stored.
        stored: the weight [N, K]; or, in the order of `stored_tensors` of an `Int8Weight` or an
            `NF4Weight`, the tensors that store it.
        bias_N: the bias, or None.
        adapter: the adapter, the bank of adapters, or None.
    """

    form: WeightForm
    stored: tuple[Tensor, ...]
    bias_N: Tensor | None = None
    adapter: LowRank | LowRankBank | None = None


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
    layer = StoredLayer("dense", (weight_NK,), bias_N)
    return multiply(x_BK, [layer], [len(weight_NK)], norm, residual_BN)


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
    gate_MK, up_MK = weight_NK.chunk(2)
    gate = StoredLayer("dense", (gate_MK,))
    up = StoredLayer("dense", (up_MK,))
    return multiply_gated(x_BK, gate, up, len(gate_MK), norm, activation)


def multiply(
    x_BK: Tensor,
    layers: Sequence[StoredLayer],
    columns: Sequence[int],
    norm: Norm | None = None,
    residual_BN: Tensor | None = None,
    rounds_adapters: bool = False,
) -> Tensor:
    """Return residual + norm(x) W^T + b + s (norm(x) A^T) B^T of layers, one after another.

    Args:
        x_BK: fp32, fp16 or bf16, contiguous; K is a multiple of 16, and of 64 with `nf4`.
        layers: at most three layers of the same form, which all have a bias or none. Dense weights
            have the dtype of x. Some may have an adapter, all of the same rank, scale and dtype; or
            some may have a bank, all of the same shape, slots, scales and dtype, and all or none of them
            with magnitudes.
        columns: the number of outputs of each layer.
        norm: the norm of x; None: no norm.
        residual_BN: the residual; None: no residual.
        rounds_adapters: whether A, B and norm(x) A^T are rounded to the dtype of x, as autocast does;
            otherwise their products are in the dtype of A and B.

    Returns:
        [B, N] in the dtype of x, where N is the sum of `columns`. Products are summed in fp32, and
        rounded once before the residual is added.
    """
    return _multiply_layers(x_BK, layers, columns, norm, residual_BN, None, rounds_adapters)


def multiply_gated(
    x_BK: Tensor,
    gate: StoredLayer,
    up: StoredLayer,
    columns: int,
    norm: Norm,
    activation: Activation,
    rounds_adapters: bool = False,
) -> Tensor:
    """Return act(gate(norm(x))) * up(norm(x)), [B, columns]; see `multiply`. Biases are not added."""
    return _multiply_layers(x_BK, (gate, up), (columns,), norm, None, activation, rounds_adapters)


def _multiply_layers(
    x_BK: Tensor,
    layers: Sequence[StoredLayer],
    columns: Sequence[int],
    norm: Norm | None,
    residual_BN: Tensor | None,
    activation: Activation | None,
    rounds_adapters: bool,
) -> Tensor:
    """Call the operator, whose arguments can only be tensors, numbers and lists of them."""
    gain_K, eps, is_centred = norm or (None, 0.0, False)
    scale = 0.0
    scale_Z: Tensor | None = None
    slot_B: Tensor | None = None
    a: list[Tensor | None] = [None] * len(layers)
    b: list[Tensor | None] = [None] * len(layers)
    magnitude_changes: list[Tensor | None] = [None] * len(layers)
    for index, layer in enumerate(layers):
        adapter = layer.adapter
        if isinstance(adapter, LowRank):
            a[index], b[index], scale = adapter
        elif adapter is not None:
            a[index], b[index], scale_Z, magnitude_changes[index], slot_B = adapter
    return torch.ops.monograph.multiply(
        x_BK,
        layers[0].form,
        [tensor for layer in layers for tensor in layer.stored],
        [layer.bias_N for layer in layers if layer.bias_N is not None],
        a,
        b,
        magnitude_changes,
        scale,
        scale_Z,
        slot_B,
        list(columns),
        gain_K,
        eps,
        is_centred,
        residual_BN,
        activation or "",
        rounds_adapters,
    )


@torch.library.custom_op("monograph::multiply", mutates_args=())
def _multiply_op(
    x_BK: Tensor,
    form: str,
    stored: list[Tensor],
    biases: list[Tensor],
    a: Sequence[Tensor | None],
    b: Sequence[Tensor | None],
    magnitude_changes: Sequence[Tensor | None],
    scale: float,
    scale_Z: Tensor | None,
    slot_B: Tensor | None,
    columns: list[int],
    gain_K: Tensor | None,
    eps: float,
    is_centred: bool,
    residual_BN: Tensor | None,
    activation: str,
    rounds_adapters: bool,
) -> Tensor:
    """Launch the kernels; see `_multiply_layers`.

    `stored` has the tensors of the first layer, then those of the second, and so on. `a`, `b` and
    `magnitude_changes` have an element for each layer, which is None where the layer has no such tensor.
    """
    rows, channels = x_BK.shape
    layers = len(a)
    out_BN = x_BK.new_empty(rows, sum(columns))
    has_bank = slot_B is not None
    # With fp32, 64 rows would need more registers than a thread has.
    can_be_large = (form != "dense" or has_bank) and x_BK.dtype != torch.float32
    tile_rows = _ROWS_OF_LARGE_TILE if can_be_large and rows > ROWS else ROWS
    adapted_layers = [index for index in range(layers) if a[index] is not None]
    # A kernel needs a pointer for each tensor, even for one that it does not read. `unused` stands for
    # these. In the place of a missing A or B there is one of another layer, which has the same dtype.
    unused: Any = x_BK
    gain: Any = unused if gain_K is None else gain_K
    any_a: Any = a[adapted_layers[0]] if adapted_layers else unused
    any_b: Any = b[adapted_layers[0]] if adapted_layers else unused
    adapter_precision = product_precision(x_BK.dtype if rounds_adapters else any_a.dtype)
    partial = unused
    rank = splits = ranks_at_once = 1
    if adapted_layers:
        rank = any_a.shape[-2]
        ranks_at_once = min(_MAX_RANKS_AT_ONCE, max(ROWS, triton.next_power_of_2(rank)))
        channels_read = channels_at_once(channels)
        splits = _split_count(channels // channels_read)
        partial = x_BK.new_empty(splits * rows * layers * rank, dtype=torch.float32)
        # The tiles of this launch always have ROWS rows, since the products are small.
        row_programs = rows if has_bank else triton.cdiv(rows, ROWS)
        grid = (splits * layers * triton.cdiv(rank, ranks_at_once), row_programs)
        _project_down[grid](
            x_BK,
            gain,
            *_for_three_layers([any_a if each is None else each for each in a]),
            partial,
            unused if slot_B is None else slot_B,
            rows,
            EPS=eps,
            K=channels,
            RANK=rank,
            NORM=gain_K is not None,
            CENTRED=is_centred,
            LAYERS=layers,
            SPLITS=splits,
            ROWS=ROWS,
            RANKS=ranks_at_once,
            CHANNELS=channels_read,
            BANK=has_bank,
            ROUND_ADAPTERS=rounds_adapters,
            PRECISION=adapter_precision,
            num_warps=4,
            num_stages=2,
        )
    weights, scales, steps, means, tables = _grouped_by_tensor(stored, form)
    tile = tile_of(
        form, sum(columns), bool(activation), tile_rows, x_BK.dtype, x_BK.device, has_bank
    )
    column_tiles = sum(triton.cdiv(each, tile.columns) for each in columns)
    _multiply[(triton.cdiv(rows, tile_rows), column_tiles)](
        x_BK,
        gain,
        unused if residual_BN is None else residual_BN,
        out_BN,
        tables[0] if tables else unused,
        partial,
        unused if slot_B is None else slot_B,
        unused if scale_Z is None else scale_Z,
        *_for_three_layers(weights),
        *_for_three_layers(scales or [unused]),
        *_for_three_layers(steps or [unused]),
        *_for_three_layers(means or [unused]),
        *_for_three_layers(biases or [unused]),
        *_for_three_layers([any_b if each is None else each for each in b]),
        *_for_three_layers([unused if each is None else each for each in magnitude_changes]),
        rows,
        *_for_three_layers(columns),
        EPS=eps,
        K=channels,
        FORM=form,
        NORM=gain_K is not None,
        CENTRED=is_centred,
        BIAS=bool(biases),
        RESIDUAL=residual_BN is not None,
        GATED=bool(activation),
        GELU=activation == "gelu",
        LAYERS=layers,
        ADAPTED=sum(1 << index for index in adapted_layers),
        RANK=rank,
        RANKS=ranks_at_once,
        SPLITS=splits,
        SCALE=scale,
        BANK=has_bank,
        MAGNITUDES=any(each is not None for each in magnitude_changes),
        ROWS=tile_rows,
        COLUMNS=tile.columns,
        CHANNELS=channels_at_once(channels, tile.channels),
        ROUND_ADAPTERS=rounds_adapters,
        PRECISION=product_precision(x_BK.dtype),
        ADAPTER_PRECISION=adapter_precision,
        num_warps=tile.warps,
        num_stages=tile.stages,
        maxnreg=tile.registers,
    )
    return out_BN


@_multiply_op.register_fake
def _(
    x_BK: Tensor,
    form: str,
    stored: list[Tensor],
    biases: list[Tensor],
    a: Sequence[Tensor | None],
    b: Sequence[Tensor | None],
    magnitude_changes: Sequence[Tensor | None],
    scale: float,
    scale_Z: Tensor | None,
    slot_B: Tensor | None,
    columns: list[int],
    gain_K: Tensor | None,
    eps: float,
    is_centred: bool,
    residual_BN: Tensor | None,
    activation: str,
    rounds_adapters: bool,
) -> Tensor:
    return x_BK.new_empty(x_BK.shape[0], sum(columns))


def _split_count(chunks: int) -> int:
    """Return the largest number of programs that can share this number of chunks equally."""
    return max(count for count in range(1, _MAX_SPLITS + 1) if chunks % count == 0)


def _grouped_by_tensor(stored: list[Tensor], form: str) -> list[list[Tensor]]:
    """Return five lists with a tensor of each layer: weights or codes, scales or levels, steps, means, tables.

    A list is empty if the form has no such tensors.

    Args:
        stored: the tensors of the first layer, then those of the second, and so on.
        form: how weights are stored.
    """
    count = _STORED_TENSORS[form]
    groups = [stored[index::count] for index in range(count)]
    missing: list[list[Tensor]] = [[]] * (_STORED_TENSORS["nf4"] - count)
    return groups + missing


def _for_three_layers(by_layer: Sequence[Any]) -> list[Any]:
    """Return `by_layer` as three elements, which the kernels always take.

    The first element is repeated in the place of missing layers, where it is never read.
    """
    added = [by_layer[0]] * (MAX_LAYERS - len(by_layer))
    return [*by_layer, *added]


def fits(form: str, channels: int) -> bool:
    """Return whether the kernels can multiply weights in this form with x of this number of channels."""
    return channels_at_once(channels) >= (NF4_BLOCK if form == "nf4" else ROWS)
