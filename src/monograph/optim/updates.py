"""Compute updates in place, as free functions of tensors that every engine calls.

They have no state. Tensors may have leading dimensions (members of an ensemble), and every number
of `Hyperparameters` may be a tensor that broadcasts against the parameters. Where `accepted` is
false nothing changes, whatever the gradient is. The host reads no value.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from monograph.ops.materialize import materialize
from monograph.optim.optimizer import Hyperparameters, Knob

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
    param: Tensor, grad: Tensor, moments: Sequence[Tensor], hyper: Hyperparameters
) -> None:
    """Make one AdamW update, with the arithmetic of `torch.optim.AdamW`.

    Source: Loshchilov and Hutter, arXiv 1711.05101.

        m <- b1 m + (1 - b1) g          v <- b2 v + (1 - b2) g^2
        p <- p (1 - lr wd) - lr * (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

    Args:
        param: the parameters p, any shape.
        grad: g, of the same shape.
        moments: the first moment m and the second moment v, of the same shape.
        hyper: lr, betas (b1, b2), eps, weight_decay wd, applied t, and whether it is accepted.
    """
    beta1, beta2 = hyper.betas
    exp_avg, exp_avg_sq = moments
    m, v = adamw_moments(grad, moments, hyper)
    t = hyper.applied.to(torch.float64)  # 1 - b2^t loses digits in fp32
    step_size = materialize((hyper.lr / (1 - beta1**t)).to(param.dtype))
    root_correction = materialize((1 - beta2**t).sqrt().to(param.dtype))
    # lr wd p is subtracted, because p (1 - lr wd) would round the factor in the same way at every
    # update, and these errors would add up.
    decay = materialize((hyper.lr * hyper.weight_decay).to(param.dtype))
    denominator = v.sqrt() / root_correction + _like(hyper.eps, param)
    new = param - (decay * param + step_size * m / denominator)
    param.copy_(torch.where(hyper.accepted, new, param))
    exp_avg.copy_(torch.where(hyper.accepted, m, exp_avg))
    exp_avg_sq.copy_(torch.where(hyper.accepted, v, exp_avg_sq))


def adamw_moments(
    grad: Tensor, moments: Sequence[Tensor], hyper: Hyperparameters
) -> tuple[Tensor, Tensor]:
    """Return AdamW's next moments m and v; see `adamw_`."""
    exp_avg, exp_avg_sq = moments
    beta1, beta2 = hyper.betas
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


def muon_(
    param: Tensor, grad: Tensor, moments: Sequence[Tensor], hyper: Hyperparameters
) -> None:
    """Make one Muon update with Nesterov momentum, scaled to AdamW's RMS.

    Source: Jordan et al. 2024; Liu et al. 2025, arXiv 2502.16982.

        m <- mu m + (1 - mu) g          u = mu m + (1 - mu) g
        p <- p (1 - lr wd) - lr * 0.2 sqrt(max(rows, cols)) * newton_schulz(u)

    A matrix of rank min(rows, cols) with singular values 1 has an RMS of 1 / sqrt(max(rows, cols)).
    So the update's RMS is about 0.2 lr, like that of AdamW, and one learning rate serves both.

    Args:
        param: matrices p of one shape, [..., rows, cols] with at least one leading dimension; flat
            parts of them if `hyper` has newton_schulz(u).
        grad: g, of the same shape.
        moments: the momentum m, of the same shape.
        hyper: lr, betas (mu,), weight_decay wd, whether it is accepted, the dtype of products, and
            the matrices' shape.
    """
    (momentum_buffer,) = moments
    m, direction = _nesterov(grad, moments, hyper)
    orthogonal = hyper.orthogonal
    if orthogonal is None:
        orthogonal = newton_schulz(direction, hyper.compute)
    decay = materialize((hyper.lr * hyper.weight_decay).to(param.dtype))
    rms_factor = ADAMW_RMS * math.sqrt(max((hyper.matrix or param.shape)[-2:]))
    step_size = materialize((hyper.lr * rms_factor).to(param.dtype))
    new = param - (decay * param + step_size * orthogonal)
    param.copy_(torch.where(hyper.accepted, new, param))
    momentum_buffer.copy_(torch.where(hyper.accepted, m, momentum_buffer))


def muon_moments(
    grad: Tensor, moments: Sequence[Tensor], hyper: Hyperparameters
) -> tuple[Tensor]:
    """Return Muon's next momentum m; see `muon_`."""
    return (_nesterov(grad, moments, hyper)[0],)


def muon_direction(grad: Tensor, moments: Sequence[Tensor], hyper: Hyperparameters) -> Tensor:
    """Return the direction u that Muon orthogonalises; see `muon_`."""
    return _nesterov(grad, moments, hyper)[1]


def _nesterov(
    grad: Tensor, moments: Sequence[Tensor], hyper: Hyperparameters
) -> tuple[Tensor, Tensor]:
    (momentum_buffer,) = moments
    (momentum,) = hyper.betas
    m = torch.lerp(momentum_buffer, grad, _like(1 - momentum, grad))
    return m, torch.lerp(grad, m, _like(momentum, grad))


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
