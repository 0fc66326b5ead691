"""Compute a mixture of experts for a few tokens by three Triton kernels, on a GPU.

    e, w  = the router's experts of a token, and their weights     `route`
    inner = combine(norm(x) Wg[e]^T + bg[e], norm(x) Wu[e]^T + bu[e])     `expert_inner`
    x     = x + sum over e of w[e] (inner[e] Wd[e]^T + bd[e])             `expert_sum`

A pair is a token and one of its experts. PyTorch's operators sort the pairs by expert and multiply all
pairs of an expert at once. They need fourteen launches, and read a weight once for all its pairs.
These kernels read a weight once for each pair, so they are fast only for the few tokens of a decode
step.

A pair is computed by itself, and a token's experts are added in the router's order. So a token's
bits do not depend on the other tokens.

Shapes: B tokens, C experts of a token, E experts, D hidden size, M inner size of an expert.
"""

from typing import Final, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from monograph.ops.decode_kernels import Norm, step_of

Combination = Literal["silu", "gelu", "clamped"]
_COMBINATIONS: Final = ("silu", "gelu", "clamped")
COLUMNS = 16  # columns of a program; with so few, there are programs for all multiprocessors


@triton.jit
def _route(
    logits,
    experts,
    weights,
    E,
    COUNT: tl.constexpr,
    WIDE: tl.constexpr,
    C: tl.constexpr,
    NORMALISED: tl.constexpr,
):
    """Choose a token's experts; WIDE and C are powers of two, at least E and COUNT."""
    row = tl.program_id(0)
    expert = tl.arange(0, WIDE)
    logit = tl.load(logits + row * E + expert, mask=expert < E, other=float("-inf"))
    logit = logit.to(tl.float32)
    shifted = tl.exp(logit - tl.max(logit, 0))
    probability = shifted / tl.sum(shifted, 0)
    # One number has the order of the probabilities and then the reverse order of the experts. A
    # float that is not negative has the order of its bits.
    bits = probability.to(tl.int32, bitcast=True).to(tl.int64)
    key = tl.topk((bits << 32) | (0xFFFFFFFF - expert.to(tl.int64)), C)
    place = tl.arange(0, C)
    weight = (key >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    if NORMALISED:
        weight = weight / tl.sum(tl.where(place < COUNT, weight, 0.0), 0)
    here = row * COUNT + place
    tl.store(experts + here, 0xFFFFFFFF - (key & 0xFFFFFFFF), mask=place < COUNT)
    tl.store(weights + here, weight, mask=place < COUNT)


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
    STEP: tl.constexpr,
):
    """Compute COLUMNS inner channels of one pair of a token and an expert."""
    pair = tl.program_id(1)
    row, expert = pair // C, tl.load(experts + pair)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    offset = tl.arange(0, STEP)
    is_there = column < M
    kind = out.dtype.element_ty
    squares = tl.zeros((STEP,), tl.float32)
    for begin in range(0, D, STEP):
        part = tl.load(x + row * D + begin + offset).to(tl.float32)
        squares += part * part
    scale = tl.rsqrt(tl.sum(squares, 0) / D + EPS)
    gates = tl.zeros((COLUMNS, STEP), tl.float32)
    ups = tl.zeros((COLUMNS, STEP), tl.float32)
    line = (expert * M + column)[:, None] * D + offset[None, :]
    for begin in range(0, D, STEP):
        gains = tl.load(gain + begin + offset).to(tl.float32)
        if CENTRED:
            gains += 1
        part = tl.load(x + row * D + begin + offset).to(tl.float32) * scale * gains
        part = part.to(kind).to(tl.float32)[None, :]  # rounded as `rms_norm` rounds it
        tile = tl.load(gate_weight + line + begin, mask=is_there[:, None], other=0.0)
        gates += tile.to(tl.float32) * part
        tile = tl.load(up_weight + line + begin, mask=is_there[:, None], other=0.0)
        ups += tile.to(tl.float32) * part
    # Products and sums with a bias are rounded, as the layers of an expert round them.
    gate = tl.sum(gates, 1).to(kind).to(tl.float32)
    up = tl.sum(ups, 1).to(kind).to(tl.float32)
    if BIAS:
        biases = tl.load(gate_bias + expert * M + column, mask=is_there, other=0.0)
        gate = (gate + biases.to(tl.float32)).to(kind).to(tl.float32)
        biases = tl.load(up_bias + expert * M + column, mask=is_there, other=0.0)
        up = (up + biases.to(tl.float32)).to(kind).to(tl.float32)
    if COMBINATION == 2:  # clamped, see `monograph.model.layers.gating`
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0) + 1
        gate = gate / (1 + tl.exp(-1.702 * gate))
    elif COMBINATION == 1:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        gate = gate / (1 + tl.exp(-2 * inner))
    else:
        gate = gate / (1 + tl.exp(-gate))
    result = gate.to(kind).to(tl.float32) * up.to(kind).to(tl.float32)
    tl.store(out + pair * M + column, result.to(kind), mask=is_there)


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
    STEP: tl.constexpr,
):
    """Compute COLUMNS channels of one token."""
    row = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    offset = tl.arange(0, STEP)
    is_there = column < D
    kind = out.dtype.element_ty
    total = tl.zeros((COLUMNS,), tl.float32)
    for place in range(0, C):
        pair = row * C + place
        expert = tl.load(experts + pair)
        sums = tl.zeros((COLUMNS, STEP), tl.float32)
        line = (expert * D + column)[:, None] * M + offset[None, :]
        for begin in range(0, M, STEP):
            part = tl.load(inner + pair * M + begin + offset).to(tl.float32)[None, :]
            tile = tl.load(down_weight + line + begin, mask=is_there[:, None], other=0.0)
            sums += tile.to(tl.float32) * part
        one = tl.sum(sums, 1).to(kind).to(tl.float32)
        if BIAS:
            biases = tl.load(down_bias + expert * D + column, mask=is_there, other=0.0)
            one = (one + biases.to(tl.float32)).to(kind).to(tl.float32)
        total += one * tl.load(weights + pair)
    here = row * D + column
    total = total.to(kind) + tl.load(residual + here, mask=is_there, other=0.0)
    tl.store(out + here, total, mask=is_there)


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
        COUNT=count,
        WIDE=max(2, triton.next_power_of_2(experts)),
        C=max(2, triton.next_power_of_2(count)),
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
        combination: "silu", or "gelu" by its tanh approximation, of the gate, times the other; or
            "clamped", that of gpt-oss.
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
        STEP=step_of(hidden),
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
        STEP=step_of(width),
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
