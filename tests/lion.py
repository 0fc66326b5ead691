"""Lion, as somebody would add it: what a file of `monograph.optim` would have, such as `adamw.py`.
Tests add its row of `monograph.optim_table`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from monograph.optim.kinds import Elementwise, cast_like
from monograph.optim.optimizer import Hyperparameters, Rule
from monograph.optim.state_format import Moment


def lion_(param: Tensor, grad: Tensor, moments: Sequence[Tensor], hyper: Hyperparameters) -> None:
    """p <- p (1 - lr wd) - lr sign(b1 m + (1 - b1) g), m <- b2 m + (1 - b2) g (Chen et al. 2023,
    arXiv 2302.06675).
    """
    [m] = moments
    direction = torch.lerp(m, grad, cast_like(1 - hyper.betas[0], grad)).sign()
    [new_m] = lion_moments(grad, moments, hyper)
    decay = (hyper.lr * hyper.weight_decay).to(param.dtype)
    new = param - (decay * param + hyper.lr.to(param.dtype) * direction)
    param.copy_(torch.where(hyper.accepted, new, param))
    m.copy_(torch.where(hyper.accepted, new_m, m))


def lion_moments(grad: Tensor, moments: Sequence[Tensor], hyper: Hyperparameters) -> tuple[Tensor]:
    return (torch.lerp(moments[0], grad, cast_like(1 - hyper.betas[1], grad)),)


# The moment has a name that no other rule has.
LION = Rule((Moment("sign_momentum"),), lion_, lion_moments)


@dataclass(frozen=True)
class Lion(Elementwise):
    """Lion for all parameters, with betas and a rate of its own."""

    betas: tuple[float, float] = (0.9, 0.99)

    rules: ClassVar[tuple[Rule, ...]] = (LION,)
    rate_factor: ClassVar[float] = 0.1
