"""Compute the parts of gated attention that `attend` lacks, by two Triton kernels for decoding on a GPU.

    q, k = rotate(norm(q)), rotate(norm(k))      `prepare_heads`, before `attend`
    out  = x sigmoid(gate)                       `multiply_by_gates`, after `attend`

`monograph.ops.decode_kernels.attend` can normalise and rotate heads by itself. But it rotates whole heads,
and expects queries, keys and values one after another. In families with gated attention, only the first
channels of a head are rotated, and each query is followed by its gate in the columns of the projections.

    kernel                   axis 0 of the grid          axis 1   a program writes
    `_prepare_heads`         heads: H + 2 J              rows     one query, key or value
    `_multiply_by_sigmoid`   tiles of CHANNELS outputs   rows     these outputs of one row

Since a program belongs to one row, a row's bits do not depend on the other rows.

Shapes: B rows, H query heads, J key-value heads, E head dimension, F rotated pairs of channels of a
head, P = (2 H + 2 J) E columns of the projections, X = (H + 2 J) E channels of all heads, Y = H E
channels of the query heads, M columns of the tensor that has the gates.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from monograph.ops.decode_kernels import Norm

_CHANNELS_PER_PROGRAM = 256  # of `_multiply_by_sigmoid`


@triton.jit
def _gain(q_gain, k_gain, channel_E, is_read_E, is_query):
    """Return the weight of the norm of queries if `is_query`, and otherwise that of keys."""
    q_gain_E = tl.load(q_gain + channel_E, mask=is_read_E & is_query, other=0.0)
    k_gain_E = tl.load(k_gain + channel_E, mask=is_read_E & (is_query == 0), other=0.0)
    return q_gain_E.to(tl.float32) + k_gain_E.to(tl.float32)  # one of them is 0


@triton.jit
def _prepare_heads(
    projected,
    q_gain,
    k_gain,
    cos,
    sin,
    out,
    EPS: tl.constexpr,
    H: tl.constexpr,
    J: tl.constexpr,
    E: tl.constexpr,
    F: tl.constexpr,
    NORM: tl.constexpr,
    CENTRED: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Write one head of one row to `out`: a query, a key, or a value.

    NORM: queries and keys are normalised. CENTRED: the norm multiplies by 1 + gain. F is 0 if heads are
    not rotated. Tensors with the suffix _E are padded to the length CHANNELS, a power of two.

    Everything is computed for values as well, as if they were keys. At the end the values themselves are
    written.
    """
    head, row = tl.program_id(0), tl.program_id(1)
    channel_E = tl.arange(0, CHANNELS)
    is_channel_E = channel_E < E
    is_query, is_value = head < H, head >= H + J
    # The projections have H pairs of a query and its gate, then the keys and values. So query `head` is block
    # 2 head of E columns, and a key or value is block 2 H + (head - H).
    column = tl.where(is_query, 2 * head, H + head) * E
    head_of_row = projected + row * (2 * H + 2 * J) * E + column
    raw_E = tl.load(head_of_row + channel_E, mask=is_channel_E, other=0.0)
    x_E = raw_E.to(tl.float32)
    # Channel i < F is rotated together with its partner, channel i + F. Channels from 2 F on stay as they
    # are.
    is_first_E, is_rotated_E = channel_E < F, channel_E < 2 * F
    partner_channel_E = tl.where(is_first_E, channel_E + F, channel_E - F)
    is_paired_E = is_rotated_E & is_channel_E
    # `partner_E` has at each channel the element of its partner.
    partner_E = tl.load(head_of_row + partner_channel_E, mask=is_paired_E, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x_E * x_E, 0) / E + EPS)
        gain_E = _gain(q_gain, k_gain, channel_E, is_channel_E, is_query)
        partner_gain_E = _gain(q_gain, k_gain, partner_channel_E, is_paired_E, is_query)
        if CENTRED:
            gain_E += 1
            partner_gain_E += 1
        # Rounded once, as `rms_norm` rounds it.
        x_E = (x_E * scale * gain_E).to(raw_E.dtype).to(tl.float32)
        partner_E = (partner_E * scale * partner_gain_E).to(raw_E.dtype).to(tl.float32)
    if F > 0:
        # cos 1 and sin 0 leave the other channels as they are.
        pair_E = tl.where(is_first_E, channel_E, channel_E - F)
        cos_E = tl.load(cos + row * F + pair_E, mask=is_paired_E, other=1.0)
        sin_E = tl.load(sin + row * F + pair_E, mask=is_paired_E, other=0.0)
        x_E = x_E * cos_E + partner_E * tl.where(is_first_E, -sin_E, sin_E)
    x_E = tl.where(is_value, raw_E, x_E.to(raw_E.dtype))  # a value stays as it is
    out_of_head = out + (row * (H + 2 * J) + head) * E
    tl.store(out_of_head + channel_E, x_E, mask=is_channel_E)


@triton.jit
def _multiply_by_sigmoid(
    x,
    gate,
    out,
    Y,
    M,
    E: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    CHANNEL_STRIDE: tl.constexpr,
    FIRST: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Compute CHANNELS channels of one row; see `_multiply_by_sigmoid_op`.

    Tensors with the suffix _Y have the length CHANNELS.
    """
    row = tl.program_id(1)
    channel_Y = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel_Y = channel_Y < Y
    head_Y = channel_Y // E
    column_Y = FIRST + head_Y * HEAD_STRIDE + (channel_Y % E) * CHANNEL_STRIDE
    gate_Y = tl.load(gate + row * M + column_Y, mask=is_channel_Y, other=0.0).to(tl.float32)
    x_Y = tl.load(x + row * Y + channel_Y, mask=is_channel_Y, other=0.0)
    # The sigmoid is rounded, as torch's operator rounds its result.
    factor_Y = (1 / (1 + tl.exp(-gate_Y))).to(x_Y.dtype).to(tl.float32)
    result_Y = (x_Y.to(tl.float32) * factor_Y).to(x_Y.dtype)
    tl.store(out + row * Y + channel_Y, result_Y, mask=is_channel_Y)


def prepare_heads(
    projected_BP: Tensor,
    norms: tuple[Norm, Norm] | None,
    cos_BF: Tensor | None,
    sin_BF: Tensor | None,
    heads: int,
    key_heads: int,
) -> Tensor:
    """Return queries, keys and values as `attend` reads them, [B, X]: normalised and rotated.

    Args:
        projected_BP: for each query head its query and its gate, then all keys, then all values;
            fp32, fp16 or bf16, contiguous.
        norms: the norms of queries and of keys, which have the same eps; None: no norms.
        cos_BF: fp32, the cosines of the positions' angles, contiguous; None: heads are not rotated.
        sin_BF: fp32, the sines, likewise.
        heads: H.
        key_heads: J.
    """
    q_norm, k_norm = norms or (None, None)
    return torch.ops.monograph.prepare_heads(
        projected_BP,
        None if q_norm is None else q_norm.gain_K,  # K is E here
        None if k_norm is None else k_norm.gain_K,
        0.0 if q_norm is None else q_norm.eps,
        q_norm is not None and q_norm.is_centred,
        cos_BF,
        sin_BF,
        heads,
        key_heads,
    )


@torch.library.custom_op("monograph::prepare_heads", mutates_args=())
def _prepare_heads_op(
    projected_BP: Tensor,
    q_gain_E: Tensor | None,
    k_gain_E: Tensor | None,
    eps: float,
    is_centred: bool,
    cos_BF: Tensor | None,
    sin_BF: Tensor | None,
    heads: int,
    key_heads: int,
) -> Tensor:
    rows, columns = projected_BP.shape
    head_dim = columns // (2 * heads + 2 * key_heads)
    out_heads = heads + 2 * key_heads
    out_BX = projected_BP.new_empty(rows, out_heads * head_dim)
    # A kernel needs a pointer for each tensor, even for one that it does not read.
    unused = projected_BP
    _prepare_heads[(out_heads, rows)](
        projected_BP,
        unused if q_gain_E is None else q_gain_E,
        unused if k_gain_E is None else k_gain_E,
        unused if cos_BF is None else cos_BF,
        unused if sin_BF is None else sin_BF,
        out_BX,
        EPS=eps,
        H=heads,
        J=key_heads,
        E=head_dim,
        F=0 if cos_BF is None else cos_BF.shape[1],
        NORM=q_gain_E is not None,
        CENTRED=is_centred,
        CHANNELS=triton.next_power_of_2(head_dim),
        num_warps=1,
    )
    return out_BX


@_prepare_heads_op.register_fake
def _(
    projected_BP: Tensor,
    q_gain_E: Tensor | None,
    k_gain_E: Tensor | None,
    eps: float,
    is_centred: bool,
    cos_BF: Tensor | None,
    sin_BF: Tensor | None,
    heads: int,
    key_heads: int,
) -> Tensor:
    rows, columns = projected_BP.shape
    head_dim = columns // (2 * heads + 2 * key_heads)
    return projected_BP.new_empty(rows, (heads + 2 * key_heads) * head_dim)


def multiply_by_gates(x_BY: Tensor, projected_BP: Tensor, heads: int) -> Tensor:
    """Return the output of each head times the sigmoid of its gate.

    Args:
        x_BY: [B, H E], fp32, fp16 or bf16, contiguous.
        projected_BP: for each query head its query and its gate, and further columns; the same dtype,
            contiguous.
        heads: H.

    Returns:
        [B, H E] in the same dtype; the sigmoid and the product are rounded, as torch rounds them.
    """
    head_dim = x_BY.shape[1] // heads
    return torch.ops.monograph.multiply_by_sigmoid(
        x_BY,
        projected_BP,
        head_dim,
        head_stride=2 * head_dim,
        channel_stride=1,
        first=head_dim,  # the first gate follows the first query
    )


def multiply_by_gate(x_BY: Tensor, gate_B1: Tensor) -> Tensor:
    """Return x times the sigmoid of its row's gate, rounded as in `multiply_by_gates`."""
    # With strides of 0, every channel has the only gate of its row.
    return torch.ops.monograph.multiply_by_sigmoid(
        x_BY, gate_B1, x_BY.shape[1], head_stride=0, channel_stride=0, first=0
    )


@torch.library.custom_op("monograph::multiply_by_sigmoid", mutates_args=())
def _multiply_by_sigmoid_op(
    x_BY: Tensor,
    gate_BM: Tensor,
    head_dim: int,
    head_stride: int,
    channel_stride: int,
    first: int,
) -> Tensor:
    """Return x[h E + e] * sigmoid(gate[first + h head_stride + e channel_stride]) for each row.

    h is a head, and e a channel of it.
    """
    rows, columns = x_BY.shape
    out_BY = torch.empty_like(x_BY)
    _multiply_by_sigmoid[(triton.cdiv(columns, _CHANNELS_PER_PROGRAM), rows)](
        x_BY,
        gate_BM,
        out_BY,
        columns,
        gate_BM.shape[1],
        E=head_dim,
        HEAD_STRIDE=head_stride,
        CHANNEL_STRIDE=channel_stride,
        FIRST=first,
        CHANNELS=_CHANNELS_PER_PROGRAM,
        num_warps=2,
    )
    return out_BY


@_multiply_by_sigmoid_op.register_fake
def _(
    x_BY: Tensor,
    gate_BM: Tensor,
    head_dim: int,
    head_stride: int,
    channel_stride: int,
    first: int,
) -> Tensor:
    return torch.empty_like(x_BY)
