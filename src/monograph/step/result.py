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
        count: targets in the window, int64.
        lr: learning rate of this update.
        grad_norm: Euclidean norm of the gradient before clipping, fp64.
        tokens: targets trained on since the start, this window included, int64.
        skipped: updates skipped since the start because loss or gradient was not finite or the window had no target,
            int64.
    """

    index: int
    loss: Tensor
    count: Tensor
    lr: float | tuple[float, ...]
    grad_norm: Tensor
    tokens: Tensor
    skipped: Tensor
