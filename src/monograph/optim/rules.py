"""The rules of optimizers: each applies a formula of `monograph.optim.updates` to a plane."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from monograph.optim.optimizer import Kind, Knob, Optimizer, Rule
from monograph.optim.updates import adamw_, muon_, nesterov, next_moments


class AdamWRule(Rule):
    """AdamW, element by element; see `adamw_`."""

    moments = ("exp_avg", "exp_avg_sq")

    def update_(
        self,
        param: Tensor,
        grad: Tensor,
        *moments: Tensor,
        kind: Kind,
        optim: Optimizer,
        lr: Tensor,
        weight_decay: Knob,
        applied: Tensor,
        accepted: Tensor,
        compute: torch.dtype,
        orthogonal: Tensor | None,
        over: Callable[[Any], Any],
    ) -> None:
        """See Rule."""
        beta1, beta2 = optim.betas
        adamw_(
            param,
            grad,
            *moments,
            lr=lr,
            applied=applied,
            accepted=accepted,
            betas=(over(beta1), over(beta2)),
            eps=over(optim.eps * kind.eps),
            weight_decay=weight_decay,
        )

    def next_moments(
        self, grad: Tensor, moments: Sequence[Tensor], kind: Kind, optim: Optimizer
    ) -> Sequence[Tensor]:
        """See Rule."""
        exp_avg, exp_avg_sq = moments
        return next_moments(grad, exp_avg, exp_avg_sq, optim.betas)


class MuonRule(Rule):
    """Muon, matrix by matrix; see `muon_`."""

    moments = ("momentum_buffer",)

    def update_(
        self,
        param: Tensor,
        grad: Tensor,
        *moments: Tensor,
        kind: Kind,
        optim: Optimizer,
        lr: Tensor,
        weight_decay: Knob,
        applied: Tensor,
        accepted: Tensor,
        compute: torch.dtype,
        orthogonal: Tensor | None,
        over: Callable[[Any], Any],
    ) -> None:
        """See Rule."""
        assert kind.matrix is not None
        muon_(
            param,
            grad,
            *moments,
            lr=lr,
            accepted=accepted,
            momentum=over(kind.momentum),
            weight_decay=weight_decay,
            compute=compute,
            orthogonal=orthogonal,
            sides=kind.matrix[-2:],
        )

    def next_moments(
        self, grad: Tensor, moments: Sequence[Tensor], kind: Kind, optim: Optimizer
    ) -> Sequence[Tensor]:
        """See Rule."""
        momentum, _ = nesterov(grad, moments[0], kind.momentum)
        return (momentum,)

    def direction(self, grad: Tensor, moments: Sequence[Tensor], kind: Kind) -> Tensor:
        """See Rule."""
        _, direction = nesterov(grad, moments[0], kind.momentum)
        return direction


ADAMW = AdamWRule()
MUON = MuonRule()
