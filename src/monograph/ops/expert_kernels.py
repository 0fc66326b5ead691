"""Compute a mixture of experts for a few tokens by three Triton kernels, on a GPU.

    e, w  = the router's experts of a token, and their weights            `route`
    inner = combine(norm(x) Wg[e]^T + bg[e], norm(x) Wu[e]^T + bu[e])     `expert_inner`
    x     = x + sum over e of w[e] (inner[e] Wd[e]^T + bd[e])             `expert_sum`

A *pair* is a token and one of its experts. PyTorch's operators sort the pairs by expert and multiply all
pairs of an expert at once. They need fourteen launches, and read a weight once for all its pairs.
These kernels read a weight once for each pair, so they are fast only for the few tokens of a decode
step.

    kernel            axis 0 of the grid                 axis 1   a program writes
    `_route`          tokens                                      the C experts of a token, and their weights
    `_expert_inner`   tiles of COLUMNS inner channels    pairs    these channels of inner, of one pair
    `_expert_sum`     tiles of COLUMNS hidden channels   tokens   these channels of x, of one token

A pair is computed by itself, and a token's experts are added in the router's order. So a token's
bits do not depend on the other tokens.

Shapes: B tokens, C experts of a token, E experts, D hidden size, M inner size of an expert. In
kernels: O = COLUMNS columns of a program, S = CHANNELS that are read at once, over which products sum.
"""

from typing import Final, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from monograph.ops.decode_kernels import Norm, channels_at_once

Combination = Literal["silu", "gelu", "clamped"]
_COMBINATIONS: Final = ("silu", "gelu", "clamped")
# Columns of a program. With so few, even one token has enough programs for all multiprocessors.
COLUMNS = 16


@triton.jit
def _route(
    logits,
    experts,
    weights,
    E,
    C: tl.constexpr,
    EXPERTS: tl.constexpr,
    RANKS: tl.constexpr,
    NORMALISED: tl.constexpr,
):
    """Choose a token's C experts, those with the highest probabilities.

    Tensors with the suffixes _E and _C have the lengths EXPERTS and RANKS, which are the smallest powers of
    two that are at least E and C.
    """
    row = tl.program_id(0)
    expert_E = tl.arange(0, EXPERTS)
    logit_E = tl.load(logits + row * E + expert_E, mask=expert_E < E, other=float("-inf"))
    logit_E = logit_E.to(tl.float32)
    exp_E = tl.exp(logit_E - tl.max(logit_E, 0))
    probability_E = exp_E / tl.sum(exp_E, 0)
    # Each expert gets an int64 to sort by. Its upper half has the bits of the expert's probability: the bits
    # of floats that are not negative have the order of the floats. Its lower half has a number that is
    # larger for earlier experts, so that of equal probabilities the first one wins.
    bits_E = probability_E.to(tl.int32, bitcast=True).to(tl.int64)
    sort_key_C = tl.topk((bits_E << 32) | (0xFFFFFFFF - expert_E.to(tl.int64)), RANKS)
    rank_C = tl.arange(0, RANKS)
    weight_C = (sort_key_C >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    if NORMALISED:
        weight_C = weight_C / tl.sum(tl.where(rank_C < C, weight_C, 0.0), 0)
    offset_C = row * C + rank_C
    tl.store(experts + offset_C, 0xFFFFFFFF - (sort_key_C & 0xFFFFFFFF), mask=rank_C < C)
    tl.store(weights + offset_C, weight_C, mask=rank_C < C)


@triton.jit
def _expert_inner(
    x,
    gain,
    experts,
    gate_weight,
    up_weight,
    gate_bias,
    up_bias,
    out,
    M,
    EPS: tl.constexpr,
    D: tl.constexpr,
    C: tl.constexpr,
    CENTRED: tl.constexpr,
    BIAS: tl.constexpr,
    COMBINATION: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Compute COLUMNS inner channels of one pair of a token and an expert.

    CENTRED: the norm multiplies by 1 + gain. BIAS: the layers have biases. COMBINATION is an index of
    `_COMBINATIONS`.
    """
    pair = tl.program_id(1)
    row, expert = pair // C, tl.load(experts + pair)
    column_O = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    offset_S = tl.arange(0, CHANNELS)
    is_column_O = column_O < M
    dtype = out.dtype.element_ty
    squares_S = tl.zeros((CHANNELS,), tl.float32)
    for begin in range(0, D, CHANNELS):
        x_S = tl.load(x + row * D + begin + offset_S).to(tl.float32)
        squares_S += x_S * x_S
    scale = tl.rsqrt(tl.sum(squares_S, 0) / D + EPS)
    gates_OS = tl.zeros((COLUMNS, CHANNELS), tl.float32)
    ups_OS = tl.zeros((COLUMNS, CHANNELS), tl.float32)
    weight_offset_OS = (expert * M + column_O)[:, None] * D + offset_S[None, :]
    for begin in range(0, D, CHANNELS):
        gain_S = tl.load(gain + begin + offset_S).to(tl.float32)
        if CENTRED:
            gain_S += 1
        norm_S = tl.load(x + row * D + begin + offset_S).to(tl.float32) * scale * gain_S
        norm_1S = norm_S.to(dtype).to(tl.float32)[None, :]  # rounded as `rms_norm` rounds it
        gate_weight_at_OS = gate_weight + weight_offset_OS + begin
        gate_weight_OS = tl.load(gate_weight_at_OS, mask=is_column_O[:, None], other=0.0)
        gates_OS += gate_weight_OS.to(tl.float32) * norm_1S
        up_weight_at_OS = up_weight + weight_offset_OS + begin
        up_weight_OS = tl.load(up_weight_at_OS, mask=is_column_O[:, None], other=0.0)
        ups_OS += up_weight_OS.to(tl.float32) * norm_1S
    # Products and sums with a bias are rounded, as the layers of an expert round them.
    gate_O = tl.sum(gates_OS, 1).to(dtype).to(tl.float32)
    up_O = tl.sum(ups_OS, 1).to(dtype).to(tl.float32)
    if BIAS:
        gate_bias_O = tl.load(gate_bias + expert * M + column_O, mask=is_column_O, other=0.0)
        gate_O = (gate_O + gate_bias_O.to(tl.float32)).to(dtype).to(tl.float32)
        up_bias_O = tl.load(up_bias + expert * M + column_O, mask=is_column_O, other=0.0)
        up_O = (up_O + up_bias_O.to(tl.float32)).to(dtype).to(tl.float32)
    if COMBINATION == 2:  # clamped, see `monograph.model.layers.gating`
        gate_O = tl.minimum(gate_O, 7.0)
        up_O = tl.minimum(tl.maximum(up_O, -7.0), 7.0) + 1
        gate_O = gate_O / (1 + tl.exp(-1.702 * gate_O))
    elif COMBINATION == 1:  # gelu, by its tanh approximation
        inner_O = 0.7978845608028654 * (gate_O + 0.044715 * gate_O * gate_O * gate_O)
        gate_O = gate_O / (1 + tl.exp(-2 * inner_O))
    else:  # silu
        gate_O = gate_O / (1 + tl.exp(-gate_O))
    result_O = gate_O.to(dtype).to(tl.float32) * up_O.to(dtype).to(tl.float32)
    tl.store(out + pair * M + column_O, result_O.to(dtype), mask=is_column_O)


@triton.jit
def _expert_sum(
    inner,
    experts,
    weights,
    down_weight,
    down_bias,
    residual,
    out,
    D,
    M: tl.constexpr,
    C: tl.constexpr,
    BIAS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Compute COLUMNS channels of one token: the residual plus the weighted sum of its experts."""
    row = tl.program_id(1)
    column_O = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    offset_S = tl.arange(0, CHANNELS)
    is_column_O = column_O < D
    dtype = out.dtype.element_ty
    total_O = tl.zeros((COLUMNS,), tl.float32)
    for rank in range(0, C):
        pair = row * C + rank
        expert = tl.load(experts + pair)
        products_OS = tl.zeros((COLUMNS, CHANNELS), tl.float32)
        weight_offset_OS = (expert * D + column_O)[:, None] * M + offset_S[None, :]
        for begin in range(0, M, CHANNELS):
            inner_1S = tl.load(inner + pair * M + begin + offset_S).to(tl.float32)[None, :]
            weight_at_OS = down_weight + weight_offset_OS + begin
            weight_OS = tl.load(weight_at_OS, mask=is_column_O[:, None], other=0.0)
            products_OS += weight_OS.to(tl.float32) * inner_1S
        output_O = tl.sum(products_OS, 1).to(dtype).to(tl.float32)  # of this expert
        if BIAS:
            bias_O = tl.load(down_bias + expert * D + column_O, mask=is_column_O, other=0.0)
            output_O = (output_O + bias_O.to(tl.float32)).to(dtype).to(tl.float32)
        total_O += output_O * tl.load(weights + pair)
    out_offset_O = row * D + column_O
    result_O = total_O.to(dtype) + tl.load(residual + out_offset_O, mask=is_column_O, other=0.0)
    tl.store(out + out_offset_O, result_O, mask=is_column_O)


@torch.library.custom_op("monograph::route", mutates_args=())
def route(logits_BE: Tensor, count: int, is_normalised: bool) -> tuple[Tensor, Tensor]:
    """Return each token's experts, int64 [B, C], and their weights, fp32 [B, C].

    It computes `monograph.graph.experts.Router` from its logits; of experts with the same
    probability the first one is chosen.

    Args:
        logits_BE: fp32, fp16 or bf16, contiguous.
        count: C.
        is_normalised: whether the weights are divided by their sum.
    """
    rows, experts = logits_BE.shape
    experts_BC = logits_BE.new_empty(rows, count, dtype=torch.int64)
    weights_BC = logits_BE.new_empty(rows, count, dtype=torch.float32)
    _route[(rows,)](
        logits_BE,
        experts_BC,
        weights_BC,
        experts,
        C=count,
        EXPERTS=max(2, triton.next_power_of_2(experts)),
        RANKS=max(2, triton.next_power_of_2(count)),
        NORMALISED=is_normalised,
        num_warps=1,
    )
    return experts_BC, weights_BC


@route.register_fake
def _(logits_BE: Tensor, count: int, is_normalised: bool) -> tuple[Tensor, Tensor]:
    shape = (len(logits_BE), count)
    experts_BC = logits_BE.new_empty(shape, dtype=torch.int64)
    return experts_BC, logits_BE.new_empty(shape, dtype=torch.float32)


def expert_inner(
    x_BD: Tensor,
    norm: Norm,
    experts_BC: Tensor,
    weights: tuple[Tensor, Tensor],
    biases: tuple[Tensor, Tensor] | None,
    combination: Combination,
) -> Tensor:
    """Return the inner channels of each token's experts, [B, C, M]; see the module.

    Args:
        x_BD: fp32, fp16 or bf16, contiguous; D is a multiple of 16.
        norm: the norm before the experts.
        experts_BC: int64.
        weights: Wg and Wu, [E, M, D] of the same dtype, contiguous.
        biases: bg and bu, [E, M]; None: there are none.
        combination: how gate and up projection are combined. "silu", or "gelu" by its tanh
            approximation: the gate's activation times the up projection. "clamped": as in gpt-oss.
    """
    gate_bias, up_bias = biases or (None, None)
    return torch.ops.monograph.expert_inner(
        x_BD, *norm, experts_BC, *weights, gate_bias, up_bias, _COMBINATIONS.index(combination)
    )


@torch.library.custom_op("monograph::expert_inner", mutates_args=())
def _expert_inner_op(
    x_BD: Tensor,
    gain_D: Tensor,
    eps: float,
    is_centred: bool,
    experts_BC: Tensor,
    gate_EMD: Tensor,
    up_EMD: Tensor,
    gate_bias_EM: Tensor | None,
    up_bias_EM: Tensor | None,
    combination: int,
) -> Tensor:
    width, hidden = gate_EMD.shape[1:]
    # A kernel needs a pointer for each bias, even if there is none and it reads none.
    out_BCM = x_BD.new_empty(*experts_BC.shape, width)
    _expert_inner[(triton.cdiv(width, COLUMNS), experts_BC.numel())](
        x_BD,
        gain_D,
        experts_BC,
        gate_EMD,
        up_EMD,
        gate_EMD if gate_bias_EM is None else gate_bias_EM,
        up_EMD if up_bias_EM is None else up_bias_EM,
        out_BCM,
        width,
        EPS=eps,
        D=hidden,
        C=experts_BC.shape[1],
        CENTRED=is_centred,
        BIAS=gate_bias_EM is not None,
        COMBINATION=combination,
        COLUMNS=COLUMNS,
        CHANNELS=channels_at_once(hidden),
        num_warps=4,
    )
    return out_BCM


@_expert_inner_op.register_fake
def _(
    x_BD: Tensor,
    gain_D: Tensor,
    eps: float,
    is_centred: bool,
    experts_BC: Tensor,
    gate_EMD: Tensor,
    up_EMD: Tensor,
    gate_bias_EM: Tensor | None,
    up_bias_EM: Tensor | None,
    combination: int,
) -> Tensor:
    return x_BD.new_empty(*experts_BC.shape, gate_EMD.shape[1])


@torch.library.custom_op("monograph::expert_sum", mutates_args=())
def expert_sum(
    inner_BCM: Tensor,
    experts_BC: Tensor,
    weights_BC: Tensor,
    down_EDM: Tensor,
    down_bias_ED: Tensor | None,
    residual_BD: Tensor,
) -> Tensor:
    """Return the residual plus the weighted sum of each token's experts, [B, D]; see the module.

    Args:
        inner_BCM: fp32, fp16 or bf16, contiguous; M is a multiple of 16.
        experts_BC: int64.
        weights_BC: fp32.
        down_EDM: Wd, the same dtype as `inner_BCM`, contiguous.
        down_bias_ED: bd; None: there is none.
        residual_BD: the same dtype.
    """
    hidden, width = down_EDM.shape[1:]
    # A kernel needs a pointer for the bias, even if there is none and it reads none.
    out_BD = torch.empty_like(residual_BD)
    _expert_sum[(triton.cdiv(hidden, COLUMNS), len(residual_BD))](
        inner_BCM,
        experts_BC,
        weights_BC,
        down_EDM,
        down_EDM if down_bias_ED is None else down_bias_ED,
        residual_BD,
        out_BD,
        hidden,
        M=width,
        C=experts_BC.shape[1],
        BIAS=down_bias_ED is not None,
        COLUMNS=COLUMNS,
        CHANNELS=channels_at_once(width),
        num_warps=4,
    )
    return out_BD


@expert_sum.register_fake
def _(
    inner_BCM: Tensor,
    experts_BC: Tensor,
    weights_BC: Tensor,
    down_EDM: Tensor,
    down_bias_ED: Tensor | None,
    residual_BD: Tensor,
) -> Tensor:
    return torch.empty_like(residual_BD)
