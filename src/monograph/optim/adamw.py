"""AdamW: its formula, its rule, and the optimizer that applies it to all parameters."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from monograph.ops.materialize import materialize
from monograph.optim.kinds import Elementwise, cast_like
from monograph.optim.optimizer import Hyperparameters, Rule
from monograph.optim.state_format import Moment


def adamw_(param: Tensor, grad: Tensor, moments: Sequence[Tensor], hyper: Hyperparameters) -> None:
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
    # `materialize` keeps compiled code from computing these numbers again for each element.
    step_size = materialize((hyper.lr / (1 - beta1**t)).to(param.dtype))
    root_correction = materialize((1 - beta2**t).sqrt().to(param.dtype))
    # lr wd p is subtracted from p. In p (1 - lr wd) the factor would be rounded in the same way at every
    # update, and these errors would add up.
    decay = materialize((hyper.lr * hyper.weight_decay).to(param.dtype))
    denominator = v.sqrt() / root_correction + cast_like(hyper.eps, param)
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
    # torch.optim computes m by `lerp`, too. Where m = g the result is exactly g.
    m = torch.lerp(exp_avg, grad, cast_like(1 - beta1, grad))
    return m, exp_avg_sq * cast_like(beta2, grad) + grad * grad * cast_like(1 - beta2, grad)


ADAMW = Rule((Moment("exp_avg"), Moment("exp_avg_sq", never_negative=True)), adamw_, adamw_moments)


@dataclass(frozen=True)
class AdamW(Elementwise):
    """AdamW with weight decay on matrices only. It has the fields of `Optimizer`."""

    rules: ClassVar[tuple[Rule, ...]] = (ADAMW,)
