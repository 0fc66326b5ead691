"""Compute updates in place, as free functions of tensors that every engine calls.

They have no state. Tensors may have leading dimensions (members of an ensemble), and every knob may
be a tensor that broadcasts against the parameters. Where `accepted` is false nothing changes,
whatever the gradient is. The host reads no value.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from monograph.ops.materialize import materialize
from monograph.optim.optimizer import Knob

# Keller Jordan's quintic (https://kellerjordan.github.io/posts/muon/) is so steep at 0 that five
# iterations are enough. Singular values then end between 0.68 and 1.21 instead of at 1, which does
# not harm training.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
MIN_NORM = 1e-7
# The usual RMS of AdamW's update, divided by the learning rate (Liu et al. 2025, "Muon is Scalable
# for LLM Training", arXiv 2502.16982, eq. 4).
ADAMW_RMS = 0.2


def adamw_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    lr: Tensor,
    applied: Tensor,
    accepted: Tensor,
    betas: tuple[Knob, Knob],
    eps: Knob,
    weight_decay: Knob,
) -> None:
    """Make one AdamW update, with the arithmetic of `torch.optim.AdamW`.

    Source: Loshchilov and Hutter, arXiv 1711.05101.

        m <- b1 m + (1 - b1) g          v <- b2 v + (1 - b2) g^2
        p <- p (1 - lr wd) - lr * (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

    Args:
        param: the parameters, any shape.
        grad: g, of the same shape.
        exp_avg: the first moment m, of the same shape.
        exp_avg_sq: the second moment v, of the same shape.
        lr: the learning rate, 0-d or broadcastable.
        applied: t, the number of updates applied, including this one, int64.
        accepted: whether the update is made, bool.
        betas: (b1, b2).
        eps: added to the root of the second moment.
        weight_decay: wd.
    """
    beta1, beta2 = betas
    m, v = next_moments(grad, exp_avg, exp_avg_sq, betas)
    t = applied.to(torch.float64)  # 1 - b2^t loses digits in fp32
    step_size = materialize((lr / (1 - beta1**t)).to(param.dtype))
    root_correction = materialize((1 - beta2**t).sqrt().to(param.dtype))
    # lr wd p is subtracted, because p (1 - lr wd) would round the factor in the same way at every
    # update, and these errors would add up.
    decay = materialize((lr * weight_decay).to(param.dtype))
    new = param - (decay * param + step_size * m / (v.sqrt() / root_correction + _like(eps, param)))
    param.copy_(torch.where(accepted, new, param))
    exp_avg.copy_(torch.where(accepted, m, exp_avg))
    exp_avg_sq.copy_(torch.where(accepted, v, exp_avg_sq))


def next_moments(
    grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, betas: tuple[Knob, Knob]
) -> tuple[Tensor, Tensor]:
    """Return AdamW's next moments m and v; see `adamw_`."""
    beta1, beta2 = betas
    # `lerp`, because torch.optim computes m so; where m = g the result is exactly g.
    m = torch.lerp(exp_avg, grad, _like(1 - beta1, grad))
    return m, exp_avg_sq * _like(beta2, grad) + grad * grad * _like(1 - beta2, grad)


def newton_schulz(matrices: Tensor, compute: torch.dtype) -> Tensor:
    """Return approximately the nearest semi-orthogonal matrices.

        X <- G / |G| (Frobenius);   5 times:   A = X X^T,   X <- 3.4445 X + (-4.7750 A + 2.0315 A^2) X

    With U S V^T = G / |G|, the result is U f(S) V^T. For s > 0.002, 0.68 < f(s) < 1.21; smaller
    values stay small, with f(s) ~ 3.4445^5 s. A tall G is transposed first, so that A has the
    smaller side. |G| counts as at least 1e-7, so that a zero gradient gives zeros.

    Args:
        matrices: G, [..., rows, cols].
        compute: the dtype of the products; norms have the dtype of `matrices`.

    Returns:
        Of the same shape and dtype.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    wide = matrices.mT if is_tall else matrices
    norms = torch.linalg.vector_norm(wide, dim=(-2, -1), keepdim=True)
    # The iteration needs singular values up to 1, and the Frobenius norm is at least the largest.
    X = (wide / norms.clamp_min(MIN_NORM)).flatten(0, -3).to(compute)
    for _ in range(ITERATIONS):
        A = X @ X.mT
        X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)
    orthogonal: Tensor = X.to(matrices.dtype).view(wide.shape)
    return orthogonal.mT if is_tall else orthogonal


def nesterov(grad: Tensor, momentum_buffer: Tensor, momentum: Knob) -> tuple[Tensor, Tensor]:
    """Return Muon's next momentum m and the direction u that is then orthogonalised; see `muon_`."""
    m = torch.lerp(momentum_buffer, grad, _like(1 - momentum, grad))
    return m, torch.lerp(grad, m, _like(momentum, grad))


def muon_(
    param: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor,
    *,
    lr: Tensor,
    accepted: Tensor,
    momentum: Knob,
    weight_decay: Knob,
    compute: torch.dtype,
    orthogonal: Tensor | None = None,
    sides: Sequence[int] = (),
) -> None:
    """Make one Muon update with Nesterov momentum, scaled to AdamW's RMS.

    Source: Jordan et al. 2024; Liu et al. 2025, arXiv 2502.16982.

        m <- mu m + (1 - mu) g          u = mu m + (1 - mu) g
        p <- p (1 - lr wd) - lr * 0.2 sqrt(max(rows, cols)) * newton_schulz(u)

    A matrix of rank min(rows, cols) with singular values 1 has an RMS of 1 / sqrt(max(rows, cols)).
    So the update's RMS is about 0.2 lr, like that of AdamW, and one learning rate serves both.

    Args:
        param: matrices of one shape, [..., rows, cols] with at least one leading dimension.
        grad: g, of the same shape.
        momentum_buffer: m, of the same shape.
        lr: the learning rate, 0-d or broadcastable.
        accepted: whether the update is made, bool.
        momentum: mu.
        weight_decay: wd.
        compute: the dtype of the matrix products in `newton_schulz`.
        orthogonal: newton_schulz(u), if it was computed before; then all tensors may be flat parts
            of matrices. None: it is computed here.
        sides: (rows, cols) of whole matrices; (): those of `param`.
    """
    m, direction = nesterov(grad, momentum_buffer, momentum)
    update = newton_schulz(direction, compute) if orthogonal is None else orthogonal
    decay = materialize((lr * weight_decay).to(param.dtype))
    rms_factor = ADAMW_RMS * math.sqrt(max(sides or param.shape[-2:]))
    step_size = materialize((lr * rms_factor).to(param.dtype))
    param.copy_(torch.where(accepted, param - (decay * param + step_size * update), param))
    momentum_buffer.copy_(torch.where(accepted, m, momentum_buffer))


def ema_(average: Tensor, param: Tensor, *, decay: Knob, applied: Tensor, accepted: Tensor) -> None:
    """Update the exponential moving average of parameters, with bias correction.

        w = (1 - d) / (1 - d^t)         average <- average + w (p - average)

    The average is sum_i d^(t-i) p_i / sum_i d^(t-i). So initial weights have no part in it, and it
    is a mean of weights from the first update on. Source: Kingma and Ba 2015, section 3.

    Args:
        average: any shape.
        param: p, the parameters after their update, of the same shape.
        decay: d.
        applied: t, the number of updates applied, including this one, int64.
        accepted: whether the update was made, bool.
    """
    # In fp64, like AdamW's bias correction: with d = 0.9999, fp32 has only three digits of 1 - d^t
    # in the first updates.
    weight = materialize(((1 - decay) / (1 - decay ** applied.to(torch.float64))).to(param.dtype))
    average.copy_(torch.where(accepted, torch.lerp(average, param, weight), average))


def _like(knob: Knob, param: Tensor) -> Knob:
    """Return a knob; if it is a tensor, in the dtype of the parameters."""
    return materialize(knob.to(param.dtype)) if isinstance(knob, Tensor) else knob
