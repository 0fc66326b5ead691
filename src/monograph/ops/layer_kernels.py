"""Apply linear layers with adapters, or with weights in 8 or 4 bits, by Triton kernels on a GPU.

    y = residual + norm(x) W^T + b + s (norm(x) A^T) B^T      `multiply`
    y = act(norm(x) Wg^T + ...) * (norm(x) Wu^T + ...)        `multiply_gated`

They are for decode steps, as those of `monograph.ops.decode_kernels`, and up to 16 rows have tiles of
the same 16 rows, so that a row has the same bits beside any others. A step reads each stored weight
once: `int8` codes and `nf4` codes (`monograph.graph.frozen`) become numbers in registers, tile by
tile, and a dense weight is never in memory. So they are made for more rows, too, in tiles of 64:
there the codes are read and made numbers once for 64 rows, while a dense weight that is made for one
product is written and read again. In fp32 all tiles have 16 rows.

Layers that read the same x, such as query, key and value, are one launch, although their weights do
not lie side by side: each program belongs to one layer. If a layer has an adapter, x A^T of all of
them is one launch before it. Several programs share its sum over the channels, and every program
of the second launch adds up their parts in the same order.

Shapes: B rows, P layers, K summed channels, N columns, Q the adapters' rank; in kernels: R rows and O
columns of a tile, S summed channels and Q ranks that are read at once, H = S / 2 bytes of two codes
each, G = S / 64 blocks of codes, T numbers of NF4. `x_at_RS` are the addresses of the elements of `x_RS`.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from monograph.ops.decode_kernels import (
    ROWS,
    SHARED_BYTES_OF_TILES,
    Activation,
    Norm,
    Tile,
    channels_at_once,
    gated,
    normalised,
    product_precision,
    row_scale,
    tile_of,
)

# How a weight is stored: dense, as an `Int8Weight` or as an `NF4Weight`.
Form = Literal["dense", "int8", "nf4"]
# How many tensors store it.
_STORED = {"dense": 1, "int8": 2, "nf4": 5}
MAX_LAYERS = 3
NF4_BLOCK = 64  # weights with one scale


@triton.jit
def _of_layer(layer, of_0, of_1, of_2, LAYERS: tl.constexpr):
    """Return what belongs to the program's layer: a pointer, or a number."""
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
    STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add the products of S channels with a tile of an `NF4Weight`, [O, K].

    Channels are in two halves, the even ones and the odd ones, because a byte has a code of each.
    """
    dtype: tl.constexpr = even_RH.dtype
    BLOCKS: tl.constexpr = STEP // 64
    codes_at_OH = codes + column_O1 * (K // 2) + begin // 2 + tl.arange(0, STEP // 2)[None, :]
    codes_OH = tl.load(codes_at_OH, mask=is_column_O1, other=0).to(tl.int32)
    block_OG = column_O1 * (K // 64) + begin // 64 + tl.arange(0, BLOCKS)[None, :]
    level_OG = tl.load(levels + block_OG, mask=is_column_O1, other=0).to(tl.float32)
    step_OG = tl.load(steps + block_OG // 256, mask=is_column_O1, other=1.0)
    scale_OG1 = (tl.math.div_rn(level_OG, step_OG) + mean)[:, :, None]
    flat_codes = tl.reshape(codes_OH, (COLUMNS * STEP // 2,))
    even = tl.reshape(tl.gather(table_T, flat_codes >> 4, 0), (COLUMNS, BLOCKS, 32))
    odd = tl.reshape(tl.gather(table_T, flat_codes & 15, 0), (COLUMNS, BLOCKS, 32))
    even_OH = tl.reshape((even * scale_OG1).to(dtype), (COLUMNS, STEP // 2))
    odd_OH = tl.reshape((odd * scale_OG1).to(dtype), (COLUMNS, STEP // 2))
    total_RO = tl.dot(even_RH, even_OH.T, total_RO, input_precision=PRECISION)
    return tl.dot(odd_RH, odd_OH.T, total_RO, input_precision=PRECISION)


@triton.jit
def _add_adapter(
    total_RO,
    partial,
    b,
    layer,
    row_R,
    is_row_R1,
    column_O1,
    is_column_O1,
    row_count,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    SPLITS: tl.constexpr,
    LAYERS: tl.constexpr,
    SCALE: tl.constexpr,
    dtype: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add s t B^T, where `partial` has the terms of t, [SPLITS, B, LAYERS, RANK]."""
    for first in range(0, RANK, RANKS):
        rank_Q = first + tl.arange(0, RANKS)
        is_rank_1Q = (rank_Q < RANK)[None, :]
        low_RQ = tl.zeros((row_R.shape[0], RANKS), tl.float32)
        for split in range(0, SPLITS):
            row_R1 = ((split * row_count + row_R) * LAYERS + layer)[:, None]
            partial_at_RQ = partial + row_R1 * RANK + rank_Q[None, :]
            low_RQ += tl.load(partial_at_RQ, mask=is_row_R1 & is_rank_1Q, other=0.0)
        b_at_OQ = b + column_O1 * RANK + rank_Q[None, :]
        b_OQ = tl.load(b_at_OQ, mask=is_column_O1 & is_rank_1Q, other=0.0).to(dtype)
        low_RQ = (low_RQ * SCALE).to(dtype)
        total_RO = tl.dot(low_RQ, b_OQ.T, total_RO, input_precision=PRECISION)
    return total_RO


@triton.jit
def _low_rank(
    x,
    gain,
    a_0,
    a_1,
    a_2,
    partial,
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
    STEP: tl.constexpr,
    NARROW: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute one layer's norm(x) A^T over one of SPLITS equal parts of the channels.

    A layer without an adapter has the product of another one, which nobody reads.
    """
    row_R = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(0) % SPLITS
    layer = tl.program_id(0) // SPLITS % LAYERS
    rank_Q = tl.program_id(0) // (SPLITS * LAYERS) * RANKS + tl.arange(0, RANKS)
    offset_S = tl.arange(0, STEP)
    is_row_R1 = (row_R < row_count)[:, None]
    is_rank_Q = rank_Q < RANK
    a = _of_layer(layer, a_0, a_1, a_2, LAYERS)
    x_dtype: tl.constexpr = x.dtype.element_ty
    dtype: tl.constexpr = x_dtype if NARROW else a_0.dtype.element_ty
    scale_R = tl.full((ROWS,), 1.0, tl.float32)
    if NORM:
        scale_R = row_scale(x, row_R, row_count, EPS, K, ROWS, STEP)
    total_RQ = tl.zeros((ROWS, RANKS), tl.float32)
    SPAN: tl.constexpr = K // SPLITS
    for offset in range(0, SPAN, STEP):
        begin = split * SPAN + offset
        x_at_RS = x + row_R[:, None] * K + begin + offset_S[None, :]
        factor_RS = tl.load(x_at_RS, mask=is_row_R1, other=0.0)
        if NORM:
            factor_RS = normalised(factor_RS, gain + begin, scale_R, offset_S, CENTRED, x_dtype)
        a_at_QS = a + rank_Q[:, None] * K + begin + offset_S[None, :]
        a_QS = tl.load(a_at_QS, mask=is_rank_Q[:, None], other=0.0).to(dtype)
        total_RQ = tl.dot(factor_RS.to(dtype), a_QS.T, total_RQ, input_precision=PRECISION)
    row_R1 = ((split * row_count + row_R) * LAYERS + layer)[:, None]
    partial_at_RQ = partial + row_R1 * RANK + rank_Q[None, :]
    tl.store(partial_at_RQ, total_RQ, mask=is_row_R1 & is_rank_Q[None, :])


@triton.jit
def _multiply(
    x,
    gain,
    residual,
    out,
    table,
    partial,
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
    ADD: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    LAYERS: tl.constexpr,
    ADAPTED: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    SPLITS: tl.constexpr,
    SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    NARROW: tl.constexpr,
    PRECISION: tl.constexpr,
    LOW_PRECISION: tl.constexpr,
):
    """Compute COLUMNS columns of one layer, for one tile of rows.

    Bit p of ADAPTED says whether layer p has an adapter. If GATED, the columns are those of the first
    layer, gate, with those of the second one, up.
    """
    row_R = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    # A program of a gated product belongs to both layers.
    CHOICES: tl.constexpr = 1 if GATED else LAYERS
    tile = tl.program_id(0)
    layer = 0
    first_column = 0  # of the output
    width = columns_0
    if CHOICES > 1:
        tiles_0 = tl.cdiv(columns_0, COLUMNS)
        layer = tl.where(tile >= tiles_0, 1, 0)
        first_column = tl.where(layer > 0, columns_0, 0)
        tile -= tl.where(layer > 0, tiles_0, 0)
        width += columns_1
    if CHOICES > 2:
        tiles_1 = tl.cdiv(columns_1, COLUMNS)
        is_last = (layer > 0) & (tile >= tiles_1)
        layer += tl.where(is_last, 1, 0)
        first_column += tl.where(is_last, columns_1, 0)
        tile -= tl.where(is_last, tiles_1, 0)
        width += columns_2
    column_O = tile * COLUMNS + tl.arange(0, COLUMNS)
    columns = _of_layer(layer, columns_0, columns_1, columns_2, CHOICES)
    weight = _of_layer(layer, weight_0, weight_1, weight_2, CHOICES)
    scales = _of_layer(layer, scales_0, scales_1, scales_2, CHOICES)
    offset_S = tl.arange(0, STEP)
    is_row_R1 = (row_R < row_count)[:, None]
    is_column_O = column_O < columns
    is_column_O1 = is_column_O[:, None]
    column_O1 = column_O[:, None].to(tl.int64)
    dtype: tl.constexpr = out.dtype.element_ty
    if FORM == "nf4":
        table_T = tl.load(table + tl.arange(0, 16))
        steps = _of_layer(layer, steps_0, steps_1, steps_2, CHOICES)
        mean = tl.load(_of_layer(layer, mean_0, mean_1, mean_2, CHOICES))
        up_mean = tl.load(mean_1)
    scale_R = tl.full((ROWS,), 1.0, tl.float32)
    if NORM:
        scale_R = row_scale(x, row_R, row_count, EPS, K, ROWS, STEP)
    total_RO = tl.zeros((ROWS, COLUMNS), tl.float32)
    up_RO = tl.zeros((ROWS, COLUMNS), tl.float32)
    for begin in range(0, K, STEP):
        x_at_RS = x + row_R[:, None] * K + begin + offset_S[None, :]
        factor_RS = tl.load(x_at_RS, mask=is_row_R1, other=0.0)
        if NORM:
            factor_RS = normalised(factor_RS, gain + begin, scale_R, offset_S, CENTRED, dtype)
        if FORM == "nf4":
            even_RH, odd_RH = tl.split(tl.reshape(factor_RS, (ROWS, STEP // 2, 2)))
            total_RO = _add_nf4(
                total_RO, even_RH, odd_RH, weight, scales, steps, mean, table_T,
                column_O1, is_column_O1, begin, K, COLUMNS, STEP, PRECISION,
            )  # fmt: skip
            if GATED:
                up_RO = _add_nf4(
                    up_RO, even_RH, odd_RH, weight_1, scales_1, steps_1, up_mean, table_T,
                    column_O1, is_column_O1, begin, K, COLUMNS, STEP, PRECISION,
                )  # fmt: skip
        else:
            offset_OS = column_O1 * K + begin + offset_S[None, :]
            # The codes of int8 are exact in 16 bits.
            weight_OS = tl.load(weight + offset_OS, mask=is_column_O1, other=0).to(dtype)
            total_RO = tl.dot(factor_RS, weight_OS.T, total_RO, input_precision=PRECISION)
            if GATED:
                weight_OS = tl.load(weight_1 + offset_OS, mask=is_column_O1, other=0).to(dtype)
                up_RO = tl.dot(factor_RS, weight_OS.T, up_RO, input_precision=PRECISION)
    if FORM == "int8":
        total_RO *= tl.load(scales + column_O, mask=is_column_O, other=0.0)[None, :]
        if GATED:
            up_RO *= tl.load(scales_1 + column_O, mask=is_column_O, other=0.0)[None, :]
    if BIAS:
        bias = _of_layer(layer, bias_0, bias_1, bias_2, CHOICES)
        bias_O = tl.load(bias + column_O, mask=is_column_O, other=0.0).to(dtype)
        total_RO += bias_O.to(tl.float32)[None, :]
    if ADAPTED:
        low_dtype: tl.constexpr = dtype if NARROW else b_0.dtype.element_ty
        b = _of_layer(layer, b_0, b_1, b_2, CHOICES)
        has_adapter_O1 = is_column_O1 & ((ADAPTED >> layer) % 2 == 1)
        total_RO = _add_adapter(
            total_RO, partial, b, layer, row_R, is_row_R1, column_O1, has_adapter_O1, row_count,
            RANK, RANKS, SPLITS, LAYERS, SCALE, low_dtype, LOW_PRECISION,
        )  # fmt: skip
        if GATED:
            has_adapter_O1 = is_column_O1 & (ADAPTED >= 2)
            up_RO = _add_adapter(
                up_RO, partial, b_1, 1, row_R, is_row_R1, column_O1, has_adapter_O1, row_count,
                RANK, RANKS, SPLITS, LAYERS, SCALE, low_dtype, LOW_PRECISION,
            )  # fmt: skip
    if GATED:
        total_RO = gated(total_RO, up_RO, dtype, GELU)
    out_offset_RO = row_R[:, None] * width + first_column + column_O[None, :]
    is_output_RO = is_row_R1 & is_column_O[None, :]
    result_RO = total_RO.to(dtype)
    if ADD:
        result_RO = tl.load(residual + out_offset_RO, mask=is_output_RO, other=0.0) + result_RO
    tl.store(out + out_offset_RO, result_RO, mask=is_output_RO)


class LowRank(NamedTuple):
    """An adapter: s B A.

    Attributes:
        a_QK: A.
        b_NQ: B, in the dtype of A.
        scale: s.
    """

    a_QK: Tensor
    b_NQ: Tensor
    scale: float


class Layer(NamedTuple):
    """The tensors of a linear layer.

    Attributes:
        form: how its weight is stored.
        stored: the weight [N, K]; or the codes and what they are scaled by, in the order of
            `stored_tensors` of an `Int8Weight` or an `NF4Weight`.
        bias_N: the bias, or None.
        adapter: the adapter, or None.
    """

    form: Form
    stored: tuple[Tensor, ...]
    bias_N: Tensor | None = None
    adapter: LowRank | None = None


def multiply(
    x_BK: Tensor,
    layers: Sequence[Layer],
    columns: Sequence[int],
    norm: Norm | None = None,
    residual_BN: Tensor | None = None,
    is_narrow: bool = False,
) -> Tensor:
    """Return residual + norm(x) W^T + b + s (norm(x) A^T) B^T of layers, one after another.

    Args:
        x_BK: fp32, fp16 or bf16, contiguous; K is a multiple of 16, and of 64 with `nf4`.
        layers: at most three layers of the same form, which all have a bias or none. Dense weights
            have the dtype of x. Adapters have the same rank, scale and dtype, and may be missing.
        columns: the number of outputs of each layer.
        norm: the norm of x; None: no norm.
        residual_BN: the residual; None: no residual.
        is_narrow: whether adapters are rounded to the dtype of x, as autocast does, and not computed
            in their own dtype.

    Returns:
        [B, N] in the dtype of x, where N is the sum of `columns`. Products are summed in fp32, and
        rounded once before the residual is added.
    """
    return _multiply_layers(x_BK, layers, columns, norm, residual_BN, None, is_narrow)


def multiply_gated(
    x_BK: Tensor,
    gate: Layer,
    up: Layer,
    columns: int,
    norm: Norm,
    activation: Activation,
    is_narrow: bool = False,
) -> Tensor:
    """Return act(gate(norm(x))) * up(norm(x)), [B, columns]; see `multiply`. Biases are not added."""
    return _multiply_layers(x_BK, (gate, up), (columns,), norm, None, activation, is_narrow)


def _multiply_layers(
    x_BK: Tensor,
    layers: Sequence[Layer],
    columns: Sequence[int],
    norm: Norm | None,
    residual_BN: Tensor | None,
    activation: Activation | None,
    is_narrow: bool,
) -> Tensor:
    gain_K, eps, is_centred = norm or (None, 0.0, False)
    scales = [layer.adapter.scale for layer in layers if layer.adapter]
    return torch.ops.monograph.multiply(
        x_BK,
        layers[0].form,
        [tensor for layer in layers for tensor in layer.stored],
        [layer.bias_N for layer in layers if layer.bias_N is not None],
        [layer.adapter and layer.adapter.a_QK for layer in layers],
        [layer.adapter and layer.adapter.b_NQ for layer in layers],
        scales[0] if scales else 0.0,
        list(columns),
        gain_K,
        eps,
        is_centred,
        residual_BN,
        activation or "",
        is_narrow,
    )


@torch.library.custom_op("monograph::multiply", mutates_args=())
def _multiply_op(
    x_BK: Tensor,
    form: str,
    stored: list[Tensor],
    biases: list[Tensor],
    a: Sequence[Tensor | None],
    b: Sequence[Tensor | None],
    scale: float,
    columns: list[int],
    gain_K: Tensor | None,
    eps: float,
    is_centred: bool,
    residual_BN: Tensor | None,
    activation: str,
    is_narrow: bool,
) -> Tensor:
    rows, summed = x_BK.shape
    out_BN = x_BK.new_empty(rows, sum(columns))
    # The adapters' kernel, whose sums are short, always has tiles of ROWS rows.
    row_tiles = triton.cdiv(rows, ROWS)
    # Exact products of 64 rows of fp32 would not fit a thread's registers.
    takes_many = form != "dense" and x_BK.dtype != torch.float32
    tile_rows = _MANY_ROWS if takes_many and rows > ROWS else ROWS
    layers = len(a)
    adapters = [index for index in range(layers) if a[index] is not None]
    adapted = sum(1 << index for index in adapters)
    # A kernel needs a pointer for each tensor, even for one that it does not read.
    unused: Any = x_BK
    some_a: Any = a[adapters[0]] if adapters else x_BK
    some_b: Any = b[adapters[0]] if adapters else x_BK
    partial = unused
    rank = splits = ranks = 1
    low_precision = product_precision(x_BK.dtype if is_narrow else some_a.dtype)
    if adapters:
        rank = len(some_a)
        ranks = min(_RANKS, max(ROWS, triton.next_power_of_2(rank)))
        step = channels_at_once(summed)
        splits = _splits(summed // step)
        partial = x_BK.new_empty(splits * rows * layers * rank, dtype=torch.float32)
        _low_rank[(splits * layers * triton.cdiv(rank, ranks), row_tiles)](
            x_BK,
            unused if gain_K is None else gain_K,
            *_three([some_a if each is None else each for each in a]),
            partial,
            rows,
            EPS=eps,
            K=summed,
            RANK=rank,
            NORM=gain_K is not None,
            CENTRED=is_centred,
            LAYERS=layers,
            SPLITS=splits,
            ROWS=ROWS,
            RANKS=ranks,
            STEP=step,
            NARROW=is_narrow,
            PRECISION=low_precision,
            num_warps=4,
            num_stages=2,
        )
    weights, scales, steps, means, tables = _by_kind(stored, form)
    tile = _tile_of(form, sum(columns), tile_rows, x_BK)
    column_tiles = sum(triton.cdiv(each, tile.columns) for each in columns)
    _multiply[(column_tiles, triton.cdiv(rows, tile_rows))](
        x_BK,
        unused if gain_K is None else gain_K,
        unused if residual_BN is None else residual_BN,
        out_BN,
        tables[0] if tables else unused,
        partial,
        *_three(weights),
        *_three(scales or [unused]),
        *_three(steps or [unused]),
        *_three(means or [unused]),
        *_three(biases or [unused]),
        *_three([some_b if each is None else each for each in b]),
        rows,
        *_three(columns),
        EPS=eps,
        K=summed,
        FORM=form,
        NORM=gain_K is not None,
        CENTRED=is_centred,
        BIAS=bool(biases),
        ADD=residual_BN is not None,
        GATED=bool(activation),
        GELU=activation == "gelu",
        LAYERS=layers,
        ADAPTED=adapted,
        RANK=rank,
        RANKS=ranks,
        SPLITS=splits,
        SCALE=scale,
        ROWS=tile_rows,
        COLUMNS=tile.columns,
        STEP=channels_at_once(summed, tile.channels),
        NARROW=is_narrow,
        PRECISION=product_precision(x_BK.dtype),
        LOW_PRECISION=low_precision,
        num_warps=tile.warps,
        num_stages=tile.stages,
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
    scale: float,
    columns: list[int],
    gain_K: Tensor | None,
    eps: float,
    is_centred: bool,
    residual_BN: Tensor | None,
    activation: str,
    is_narrow: bool,
) -> Tensor:
    return x_BK.new_empty(x_BK.shape[0], sum(columns))


# The most ranks that a program reads at once, and the most programs that share a layer's A.
_RANKS = 64
_MOST_SPLITS = 16


def _splits(steps: int) -> int:
    """Return among how many programs the steps of a sum are shared equally."""
    return max(count for count in range(1, _MOST_SPLITS + 1) if steps % count == 0)


# The rows of a tile where 16 are too few, and its columns and channels. The tile of x, which is as
# large as that of a dense weight, leaves less memory for codes.
_MANY_ROWS = 64
_TILE_OF_MANY_ROWS = Tile(32, 128, 4, 3)
# For weights of 4 bits, from the narrowest to the widest. A thread has half as many of them at once as
# of others, since its registers hold the codes, the numbers and the scales.
_NF4_TILES = (Tile(16, 256, 2, 4), Tile(32, 256, 4, 4))
_SMALL_NF4_TILE = Tile(16, 128, 2, 4)  # for cards with less shared memory
# Exact products of fp32 hold both operands in registers, which wider tiles would spill.
_FROZEN_TILE_FP32 = Tile(16, 64, 4, 2)


def _tile_of(form: str, columns: int, tile_rows: int, x_BK: Tensor) -> Tile:
    """Return the tile of a product; like `tile_of`, it depends on the card and the shape alone."""
    is_fp32 = x_BK.dtype == torch.float32
    if tile_rows > ROWS:
        return _TILE_OF_MANY_ROWS
    if is_fp32 and form != "dense":
        return _FROZEN_TILE_FP32
    if form != "nf4":
        return tile_of(columns, x_BK.dtype, x_BK.device)
    card: Any = torch.cuda.get_device_properties(x_BK.device)  # torch's types lack an attribute
    if card.shared_memory_per_block_optin < SHARED_BYTES_OF_TILES:
        return _SMALL_NF4_TILE
    narrow, wide = _NF4_TILES
    programs = triton.cdiv(columns, narrow.columns)
    return narrow if programs <= card.multi_processor_count else wide


def _by_kind(stored: list[Tensor], form: str) -> list[list[Tensor]]:
    """Return the weights or codes of all layers, their scales or levels, steps, means and tables."""
    kinds = [stored[kind :: _STORED[form]] for kind in range(_STORED[form])]
    return kinds + [[]] * (_STORED["nf4"] - len(kinds))


def _three(given: Sequence[Any]) -> list[Any]:
    """Return three of what the kernel has for each layer; it does not read those after the last."""
    return [*given, *[given[0]] * (MAX_LAYERS - len(given))]


def fits(form: str, summed: int) -> bool:
    """Return whether the kernels can compute sums of so many channels of weights in this form."""
    return channels_at_once(summed) >= (NF4_BLOCK if form == "nf4" else ROWS)
