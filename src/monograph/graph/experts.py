"""Linear layers that hold a matrix for each of several experts, and the router that chooses among them.

Shapes: P rows, E experts, C of them for each row, N outputs, K inputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monograph.ops.grouped import grouped_linear


class ExpertLinear(nn.Module):
    """A linear layer of E experts, without biases and without initial weights.

    Attributes:
        weight: [E, N, K], each expert's matrix.
    """

    def __init__(self, experts: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.experts, self.in_features, self.out_features = experts, in_features, out_features
        self.weight = nn.Parameter(torch.empty(experts, out_features, in_features))

    def forward(self, input: Tensor, ends_E: Tensor | None) -> Tensor:
        """Map rows [P, K] that are sorted by expert to [P, N]; without `ends`, all rows [..., P, K] to [E, P, N].

        `ends` has the row after each expert's last one, see `monograph.ops.grouped`.
        """
        if ends_E is None:
            return input @ self.weight.mT
        return grouped_linear(input, self.weight, ends_E)


class Router(nn.Module):
    """The choice of experts and of their weights; it is no linear layer for adapters, as in transformers.

        p = softmax(W x);   the C = `count` experts of the highest p have the weights p, over their sum if `normalised`

    Probabilities are computed in fp32, for float64 inputs in float64.
    """

    def __init__(self, experts: int, in_features: int, count: int, normalised: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, in_features))
        self.count, self.normalised = count, normalised

    def forward(self, input_PK: Tensor) -> tuple[Tensor, Tensor]:
        """Return each row's experts, [P, C] int64, and their weights, [P, C]."""
        logits_PE = F.linear(input_PK, self.weight)
        wide = torch.float64 if logits_PE.dtype == torch.float64 else torch.float32
        weights_PC, experts_PC = logits_PE.softmax(-1, dtype=wide).topk(self.count, dim=-1)
        if self.normalised:
            weights_PC = weights_PC / weights_PC.sum(-1, keepdim=True)
        return experts_PC, weights_PC


# Modules whose weights are read by products alone, for which autocast rounds them.
MULTIPLYING = nn.Linear, ExpertLinear, Router
