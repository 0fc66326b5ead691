"""What one update did."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Update:
    """What one update did; tensors are 0-d on the device, and reading one is the only host sync.

    Of an ensemble the tensors are [N], one number for each member, and so many are the learning rates.

    Attributes:
        index: 0, 1, ...: how many updates came before.
        loss: mean loss per target over the whole window, fp64.
        count: sum of the loss's counts over the window, fp64: how many targets, or the sum of their weights.
        lr: learning rate of this update.
        grad_norm: Euclidean norm of the gradient before clipping, fp64.
        tokens: targets trained on since the start, this window included, int64; where counts are sums of weights, each
            window's is rounded.
        skipped: updates skipped since the start because the loss, the gradient, the count or the rate was not finite,
            or the window had no target, int64.
    """

    index: int
    loss: Tensor
    count: Tensor
    lr: float | tuple[float, ...]
    grad_norm: Tensor
    tokens: Tensor
    skipped: Tensor
