"""The loss of reinforcement learning: the log-probabilities of drawn tokens, each times a weight.

Shapes: B rows, T positions, N = B T.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from monograph.graph.token_rows import rows_of
from monograph.loss import IGNORE, Batch
from monograph.ops.log_probabilities import token_log_probabilities


class PolicyLoss(nn.Module):
    """The weighted negative log-probabilities of drawn tokens, for a model as `TokenLoss` takes it.

    sum = - sum over positions with targets != -100 of factors * log softmax(hidden @ head.T / temperature)[target]
    count = sum of shares

    The batch holds, all [B, T]: `tokens` and `targets`, and for packed rows `segments` and `positions`, int64; and
    `factors` and `shares` (`monograph.rl.objectives`), 0 where nothing is drawn, and `drawn`, the log-probability with
    which decoding drew each target, fp64.

    Attributes:
        difference: [3] fp64, over all micro-batches since it was last set to zero: the sum of |log-probability -
            drawn|, the largest, and the number of targets.
    """

    difference: Tensor
    fill: Mapping[str, float] = MappingProxyType({"targets": IGNORE})

    def __init__(self, temperature: float = 1.0):
        """Take the temperature with which tokens are drawn."""
        super().__init__()
        self.temperature = temperature
        self.register_buffer("difference", torch.zeros(3, dtype=torch.float64))

    def forward(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return sum and count; see the class."""
        hidden_BTD = model(batch["tokens"], segments=batch.get("segments"), positions=batch.get("positions"))
        head: Any = model.lm_head
        kept_N = (targets_N := batch["targets"].flatten()) != IGNORE
        log_N = token_log_probabilities(
            hidden_BTD.flatten(0, -2), head.weight, torch.where(kept_N, targets_N, 0), self.temperature,
            rows=rows_of(head),
        )  # fmt: skip
        apart_N = torch.where(kept_N, (log_N.detach() - batch["drawn"].flatten()).abs(), 0.0).double()
        total, largest, number = self.difference.unbind()
        now = (total + apart_N.sum(), torch.maximum(largest, apart_N.amax()), number + kept_N.sum())
        self.difference.copy_(torch.stack(now))
        return -torch.where(kept_N, log_N * batch["factors"].flatten().to(log_N.dtype), 0.0).sum(), self.count(batch)

    def count(self, batch: Batch) -> Tensor:
        """Return the sum of the shares, 0-d fp64."""
        return batch["shares"].sum()
