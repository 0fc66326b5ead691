"""Compute one token of a gated delta net by two Triton kernels, on a GPU.

    x[t]  = silu(sum over j of w[j] inputs[t - K + 1 + j])       the q, k and v of token t
    q, k  = q / (|q| sqrt(E)), k / |k|
    S     = exp(g) S                                             g = -exp(A_log) softplus(a + dt_bias)
    u     = beta (v - S^T k)                                     beta = sigmoid(b)
    S     = S + k u^T
    out   = norm(S^T q) silu(z)

The first line is `convolve_token`, and all others are `delta_rule_token`. A layer takes four launches: these
two, the product that computes the projections, and the output's product. PyTorch's operators take more than
eighty. `monograph.model.delta_net.GatedDeltaNet` is the reference.

The convolution's last inputs and the state S are changed in place. A row's count says how many tokens they
include. A step may be repeated with the same token: if its position is below the count, the token leaves
inputs, state and count as they are, and gets the same output again. The first kernel decides for both
kernels whether a token is new. The second one could not, since one of its programs changes the count while
others may not have read it yet.

    kernel                axis 0 of the grid           axis 1   a program computes
    `_convolve_token`     tiles of CHANNELS channels   rows     these channels of the convolution
    `_delta_rule_token`   value heads                  rows     one value head, whose state is in registers

Since a program belongs to one row, a row's bits do not depend on the other rows.

Shapes: B rows, P columns of the projections, C channels of the convolution, K its taps, G key heads,
H value heads, R = H / G value heads of a key head, E key dimension, V value dimension, X = H V. In kernels, K,
E and V are padded to powers of two.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# The largest key or value dimension. A head's whole state [E, V] is in registers, so that it is read once.
MAX_HEAD = 128
MAX_TAPS = 16  # the largest number of taps of the convolution
_CHANNELS_PER_PROGRAM = 128  # channels of the convolution
_STATE_PER_THREAD = 64  # elements of the state that a thread has in registers
_THREADS_PER_WARP = 32


class DeltaNetShape(NamedTuple):
    """The heads of a delta net, and the order of the columns of its projections.

    Attributes:
        key_heads: G.
        value_heads: H.
        key_dim: E.
        value_dim: V.
        by_key_head: the order of the columns. False: all queries, all keys, all values, all gates z,
            all b, all a. True: for each key head its query, its key, its R values and its R gates z;
            after all of these, for each key head its R numbers b and its R numbers a.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    by_key_head: bool

    @property
    def channels(self) -> int:
        """Return C. The convolution's channels are all queries, all keys, all values, in this order."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@triton.jit
def _convolve_token(
    projected,
    weight,
    position,
    count,
    limit,
    inputs,
    convolved,
    is_new_token,
    P,
    C: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    E: tl.constexpr,
    V: tl.constexpr,
    BY_KEY_HEAD: tl.constexpr,
    TAPS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Compute CHANNELS channels of one row, for `convolve_token`.

    `convolved` gets the outputs, and `is_new_token` whether each row's token is new. Tensors with the suffixes
    _C and _K have the lengths CHANNELS and TAPS. TAPS is the smallest power of two that is at least K.
    """
    row = tl.program_id(1)
    channel_C = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    tap_K = tl.arange(0, TAPS)
    is_channel_C = channel_C < C
    column_C = channel_C  # the column of the projections that has the channel
    if BY_KEY_HEAD:
        # The channels are all queries, all keys, all values. The columns are, for each key head, a query, a
        # key, R values and R gates.
        R: tl.constexpr = H // G
        columns_of_head: tl.constexpr = 2 * (E + R * V)
        # For queries and keys: the offset of a query or a key in its head's columns, and the channel's index
        # among all queries or among all keys.
        offset_in_head_C = tl.where(channel_C < G * E, 0, E)
        index_C = channel_C % (G * E)
        key_head_C = index_C // E
        column_C = key_head_C * columns_of_head + offset_in_head_C + index_C % E
        # For values: the channel's index among all values.
        value_index_C = channel_C - 2 * G * E
        value_key_head_C = value_index_C // (R * V)
        value_column_C = value_key_head_C * columns_of_head + 2 * E
        value_column_C += value_index_C % (R * V)
        column_C = tl.where(channel_C < 2 * G * E, column_C, value_column_C)
    position_of_row = tl.load(position + row)
    is_new = position_of_row >= tl.load(count + row)
    is_new = is_new & (position_of_row < tl.load(limit + row))
    if tl.program_id(0) == 0:
        tl.store(is_new_token + row, is_new.to(tl.int32))
    # `inputs` has the last K inputs, the newest last. A new token moves them by one place: tap k gets the
    # input that was at tap k + 1, and the last tap gets the token's own.
    old_tap_K1 = tap_K[:, None] + is_new.to(tl.int32)
    inputs_of_row = inputs + row.to(tl.int64) * (K * C)
    input_KC = tl.load(
        inputs_of_row + old_tap_K1 * C + channel_C[None, :],
        mask=(old_tap_K1 < K) & is_channel_C[None, :],
        other=0.0,
    )
    new_C = tl.load(projected + row.to(tl.int64) * P + column_C, mask=is_channel_C, other=0.0)
    is_newest_K1 = (tap_K[:, None] == K - 1) & is_new
    input_KC = tl.where(is_newest_K1, new_C[None, :].to(input_KC.dtype), input_KC)
    is_tap_KC = (tap_K[:, None] < K) & is_channel_C[None, :]
    weight_KC = tl.load(weight + channel_C[None, :] * K + tap_K[:, None], mask=is_tap_KC, other=0.0)
    total_C = tl.sum(input_KC.to(tl.float32) * weight_KC.to(tl.float32), 0)
    total_C = total_C / (1 + tl.exp(-total_C))  # silu
    tl.store(
        convolved + row * C + channel_C, total_C.to(convolved.dtype.element_ty), mask=is_channel_C
    )
    tl.debug_barrier()  # all inputs have been read before one of them is overwritten
    moved_at_KC = inputs_of_row + tap_K[:, None] * C + channel_C[None, :]
    tl.store(moved_at_KC, input_KC, mask=is_tap_KC & is_new)


@triton.jit
def _log1p(x):
    """Return ln(1 + x) for x from 0 to 1, also where 1 + x would round x away.

    It is 2 artanh(s) with s = x / (2 + x) <= 1/3, by the series artanh(s) = s + s^3 / 3 + s^5 / 5 + ...
    to s^17 / 17. The first term left out is below 2e-10 of the sum.
    """
    s = x / (2 + x)
    square = s * s
    series = 1.0 / 17
    for index in tl.static_range(8):
        series = series * square + 1.0 / (15 - 2 * index)  # 1/15, 1/13, ... 1
    return 2 * s * series


@triton.jit
def _delta_rule_token(
    convolved,
    projected,
    A_log,
    dt_bias,
    gain,
    is_new_token,
    state,
    count,
    out,
    P,
    L2_EPS: tl.constexpr,
    SCALE: tl.constexpr,
    EPS: tl.constexpr,
    C: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    E: tl.constexpr,
    V: tl.constexpr,
    BY_KEY_HEAD: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Compute one value head of one row, for `delta_rule_token`.

    Tensors with the suffixes _E and _V have the lengths KEYS and VALUES, which are the smallest powers of two
    that are at least E and V.
    """
    head, row = tl.program_id(0), tl.program_id(1)
    channel_E, channel_V = tl.arange(0, KEYS), tl.arange(0, VALUES)
    is_channel_E, is_channel_V = channel_E < E, channel_V < V
    R: tl.constexpr = H // G
    key_head = head // R
    # The first column of the head's gates z, and the columns of its b and a; see `DeltaNetShape`.
    if BY_KEY_HEAD:
        columns_of_head: tl.constexpr = 2 * (E + R * V)
        gate_column = key_head * columns_of_head + 2 * E + R * V + (head % R) * V
        b_column = G * columns_of_head + key_head * (2 * R) + head % R
        a_column = b_column + R
    else:
        gate_column = C + head * V
        b_column = C + H * V + head
        a_column = b_column + H
    dtype = out.dtype.element_ty
    projected_of_row = projected + row.to(tl.int64) * P
    convolved_of_row = convolved + row * C
    query_at_E = convolved_of_row + key_head * E + channel_E
    query_E = tl.load(query_at_E, mask=is_channel_E, other=0.0).to(tl.float32)
    key_at_E = query_at_E + G * E
    unit_key_E = tl.load(key_at_E, mask=is_channel_E, other=0.0).to(tl.float32)
    query_E = query_E * tl.rsqrt(tl.sum(query_E * query_E, 0) + L2_EPS) * SCALE
    unit_key_E = unit_key_E * tl.rsqrt(tl.sum(unit_key_E * unit_key_E, 0) + L2_EPS)
    value_at_V = convolved_of_row + 2 * G * E + head * V + channel_V
    value_V = tl.load(value_at_V, mask=is_channel_V, other=0.0).to(tl.float32)

    is_new = tl.load(is_new_token + row) != 0
    b = tl.load(projected_of_row + b_column).to(tl.float32)
    beta = (1 / (1 + tl.exp(-b))).to(dtype).to(tl.float32)  # rounded as the model rounds it
    a = tl.load(projected_of_row + a_column).to(tl.float32)
    a += tl.load(dt_bias + head).to(tl.float32)
    softplus = tl.maximum(a, 0.0) + _log1p(tl.exp(-tl.abs(a)))
    log_decay = -tl.exp(tl.load(A_log + head).to(tl.float32)) * softplus
    # A token that is not new neither decays the state nor corrects it.
    beta = tl.where(is_new, beta, 0.0)
    log_decay = tl.where(is_new, log_decay, 0.0)

    state_offset_EV = channel_E[:, None] * V + channel_V[None, :]
    state_at_EV = state + (row.to(tl.int64) * H + head) * (E * V) + state_offset_EV
    is_state_EV = is_channel_E[:, None] & is_channel_V[None, :]
    state_EV = tl.load(state_at_EV, mask=is_state_EV, other=0.0) * tl.exp(log_decay)
    stored_V = tl.sum(state_EV * unit_key_E[:, None], 0)  # S^T k
    correction_V = (value_V - stored_V) * beta  # u
    state_EV = state_EV + unit_key_E[:, None] * correction_V[None, :]
    tl.store(state_at_EV, state_EV, mask=is_state_EV & is_new)
    out_V = tl.sum(state_EV * query_E[:, None], 0)
    if head == 0:
        tl.store(count + row, tl.load(count + row) + is_new.to(tl.int64))

    # S^T q, its norm and the result are rounded as the model rounds them.
    out_V = out_V.to(dtype).to(tl.float32)
    norm_scale = tl.rsqrt(tl.sum(out_V * out_V, 0) / V + EPS)
    gain_V = tl.load(gain + channel_V, mask=is_channel_V, other=0.0).to(tl.float32)
    normed_V = (out_V * norm_scale * gain_V).to(dtype).to(tl.float32)
    gate_at_V = projected_of_row + gate_column + channel_V
    gate_V = tl.load(gate_at_V, mask=is_channel_V, other=0.0).to(tl.float32)
    result_V = normed_V * (gate_V / (1 + tl.exp(-gate_V)))
    out_at_V = out + (row * H + head) * V + channel_V
    tl.store(out_at_V, result_V.to(dtype), mask=is_channel_V)


def convolve_token(
    projected_BP: Tensor,
    weight_C1K: Tensor,
    position_B: Tensor,
    count_B: Tensor,
    limit_B: Tensor,
    inputs_BKC: Tensor,
    shape: DeltaNetShape,
) -> tuple[Tensor, Tensor]:
    """Return the convolution's outputs for a token of each row, and whether the token is new.

    A token is new if count <= position < limit. Its inputs are then added to the last K inputs.

    Args:
        projected_BP: all projections of the token; fp32, fp16 or bf16, contiguous.
        weight_C1K: the convolution's weight, the same dtype, contiguous.
        position_B: the token's position, int64.
        count_B: the number of tokens that the state includes, int64.
        limit_B: the largest number of tokens that it may include, int64.
        inputs_BKC: the last K inputs, the newest last; the same dtype, contiguous; changed in place.
        shape: the heads, and the order of the projections.

    Returns:
        convolved_BC: silu(convolution), in the same dtype.
        is_new_B: 1 for each new token and 0 for others, int32, for `delta_rule_token`.
    """
    return torch.ops.monograph.convolve_token(
        projected_BP, weight_C1K, position_B, count_B, limit_B, inputs_BKC, *shape
    )


@torch.library.custom_op("monograph::convolve_token", mutates_args=("inputs_BKC",))
def _convolve_token_op(
    projected_BP: Tensor,
    weight_C1K: Tensor,
    position_B: Tensor,
    count_B: Tensor,
    limit_B: Tensor,
    inputs_BKC: Tensor,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    by_key_head: bool,
) -> tuple[Tensor, Tensor]:
    rows, taps, channels = inputs_BKC.shape
    convolved_BC = projected_BP.new_empty(rows, channels)
    is_new_B = torch.empty_like(position_B, dtype=torch.int32)
    _convolve_token[(triton.cdiv(channels, _CHANNELS_PER_PROGRAM), rows)](
        projected_BP,
        weight_C1K,
        position_B,
        count_B,
        limit_B,
        inputs_BKC,
        convolved_BC,
        is_new_B,
        projected_BP.shape[1],
        C=channels,
        K=taps,
        G=key_heads,
        H=value_heads,
        E=key_dim,
        V=value_dim,
        BY_KEY_HEAD=by_key_head,
        TAPS=triton.next_power_of_2(taps),
        CHANNELS=_CHANNELS_PER_PROGRAM,
        num_warps=4,
    )
    return convolved_BC, is_new_B


@_convolve_token_op.register_fake
def _(
    projected_BP: Tensor,
    weight_C1K: Tensor,
    position_B: Tensor,
    count_B: Tensor,
    limit_B: Tensor,
    inputs_BKC: Tensor,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    by_key_head: bool,
) -> tuple[Tensor, Tensor]:
    rows, _, channels = inputs_BKC.shape
    is_new_B = torch.empty_like(position_B, dtype=torch.int32)
    return projected_BP.new_empty(rows, channels), is_new_B


class DeltaNetParameters(NamedTuple):
    """The parameters of a delta net apart from the matrices and the convolution's weight.

    Attributes:
        A_log_H: A_log.
        dt_bias_H: dt_bias.
        gain_V: the weight of the norm of the outputs.
        eps: the norm's eps.
        l2_eps: added to the squared lengths of queries and keys.
    """

    A_log_H: Tensor
    dt_bias_H: Tensor
    gain_V: Tensor
    eps: float
    l2_eps: float


def delta_rule_token(
    convolved_BC: Tensor,
    projected_BP: Tensor,
    parameters: DeltaNetParameters,
    is_new_B: Tensor,
    state_BHEV: Tensor,
    count_B: Tensor,
    shape: DeltaNetShape,
) -> Tensor:
    """Return norm(S^T q) silu(z) for a token of each row, and add the new tokens to the state.

    Args:
        convolved_BC: queries, keys and values, by `convolve_token`.
        projected_BP: all projections of the token; this reads z, b and a.
        parameters: in the dtype of the projections.
        is_new_B: by `convolve_token`.
        state_BHEV: S, fp32, contiguous; changed in place.
        count_B: the number of tokens that the state includes, int64; changed in place.
        shape: the heads, and the order of the projections.

    Returns:
        [B, H V] in the dtype of the projections; everything is computed in fp32.
    """
    return torch.ops.monograph.delta_rule_token(
        convolved_BC, projected_BP, *parameters, is_new_B, state_BHEV, count_B, *shape
    )


@torch.library.custom_op("monograph::delta_rule_token", mutates_args=("state_BHEV", "count_B"))
def _delta_rule_token_op(
    convolved_BC: Tensor,
    projected_BP: Tensor,
    A_log_H: Tensor,
    dt_bias_H: Tensor,
    gain_V: Tensor,
    eps: float,
    l2_eps: float,
    is_new_B: Tensor,
    state_BHEV: Tensor,
    count_B: Tensor,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    by_key_head: bool,
) -> Tensor:
    rows, channels = convolved_BC.shape
    out_BX = convolved_BC.new_empty(rows, value_heads * value_dim)
    padded_key_dim = triton.next_power_of_2(key_dim)
    padded_value_dim = triton.next_power_of_2(value_dim)
    threads = padded_key_dim * padded_value_dim // _STATE_PER_THREAD
    _delta_rule_token[(value_heads, rows)](
        convolved_BC,
        projected_BP,
        A_log_H,
        dt_bias_H,
        gain_V,
        is_new_B,
        state_BHEV,
        count_B,
        out_BX,
        projected_BP.shape[1],
        L2_EPS=l2_eps,
        SCALE=key_dim**-0.5,
        EPS=eps,
        C=channels,
        G=key_heads,
        H=value_heads,
        E=key_dim,
        V=value_dim,
        BY_KEY_HEAD=by_key_head,
        KEYS=padded_key_dim,
        VALUES=padded_value_dim,
        num_warps=max(1, threads // _THREADS_PER_WARP),
    )
    return out_BX


@_delta_rule_token_op.register_fake
def _(
    convolved_BC: Tensor,
    projected_BP: Tensor,
    A_log_H: Tensor,
    dt_bias_H: Tensor,
    gain_V: Tensor,
    eps: float,
    l2_eps: float,
    is_new_B: Tensor,
    state_BHEV: Tensor,
    count_B: Tensor,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    by_key_head: bool,
) -> Tensor:
    return convolved_BC.new_empty(len(convolved_BC), value_heads * value_dim)
