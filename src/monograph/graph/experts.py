"""Linear layers that hold a matrix for each of several experts, and the router that chooses among them.

Shapes: P rows, E experts, C of them for each row, N outputs, K inputs.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monograph.graph.balance import Balance, balanced
from monograph.graph.frozen import FrozenWeight, Int8Weight, NF4Weight, dense_of
from monograph.graph.grouped import added, grouped_linear, product, product_dtype


class ExpertLinear(nn.Module):
    """A linear layer of E experts, without initial weights.

    Attributes:
        weight: [E, N, K], each expert's matrix.
        bias: [E, N], or None.
    """

    def __init__(self, experts: int, in_features: int, out_features: int, bias: bool = False, **like: Any) -> None:
        super().__init__()
        self.experts, self.in_features, self.out_features = experts, in_features, out_features
        self.weight = nn.Parameter(torch.empty(experts, out_features, in_features, **like))
        self.bias = nn.Parameter(torch.empty(experts, out_features, **like)) if bias else None

    def forward(self, input: Tensor, ends_E: Tensor | None) -> Tensor:
        """Map rows [P, K] that are sorted by expert to [P, N]; without `ends`, all rows [..., P, K] to [E, P, N].

        `ends` has the row after each expert's last one, see `monograph.graph.grouped`.
        """
        product = input @ self.weight.mT if ends_E is None else grouped_linear(input, self.weight, ends_E)
        return self._biased(product, ends_E)

    def _biased(self, product: Tensor, ends_E: Tensor | None) -> Tensor:
        if self.bias is None:
            return product
        bias_EN = self.bias.to(product.dtype)
        return product + bias_EN[:, None] if ends_E is None else added(product, bias_EN, ends_E)


class _Dequantised(torch.autograd.Function):
    """Compute y = W x and dx = W^T dy of `ExpertLinear`; both make W from its codes, and none is kept in between."""

    generate_vmap_rule = True

    # Dynamo counts a forward pass's arguments, so there can be no *held.
    @staticmethod
    def forward(
        input: Tensor, ends_E: Tensor | None, shape: tuple[int, ...],
        codes: Tensor, scales: Tensor, steps: Tensor | None, mean: Tensor | None, table: Tensor | None,
    ) -> Tensor:  # fmt: skip
        weight_ENK = dense_of(shape, codes, scales, steps, mean, table).to(input.dtype)
        return input @ weight_ENK.mT if ends_E is None else product(input, weight_ENK, ends_E)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1], *inputs[3:])
        ctx.shape, ctx.shared = inputs[2], inputs[0].ndim < output.ndim

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        ends_E, *held = ctx.saved_tensors
        weight_ENK = dense_of(ctx.shape, *held).to(grad.dtype)
        if ends_E is not None:
            of_input = product(grad, weight_ENK.mT, ends_E)
        else:
            of_input = (grad @ weight_ENK).sum(0) if ctx.shared else grad @ weight_ENK
        return of_input, *[None] * 7


class FrozenExperts(FrozenWeight, ExpertLinear):
    """An `ExpertLinear` whose weight is kept in few bits."""

    def forward(self, input: Tensor, ends_E: Tensor | None) -> Tensor:
        """Map rows as `ExpertLinear` does, in the dtype of products."""
        held = (*self.held(), None, None, None)[:5]
        output: Tensor = _Dequantised.apply(input.to(product_dtype(input)), ends_E, self.shape, *held)
        return self._biased(output, ends_E)


class Int8Experts(Int8Weight, FrozenExperts):
    """Experts with weights of 8-bit integers, and a scale for each expert's output."""


class NF4Experts(NF4Weight, FrozenExperts):
    """Experts with weights of 4 bits."""


class Router(nn.Module):
    """The choice of experts and of their weights; it is no linear layer for adapters, as in transformers.

        p = softmax(W x + b);   the C = `count` experts of the highest p have the weights p, over their sum if
        `normalised`

    Probabilities are computed in fp32, for float64 inputs in float64.
    """

    def __init__(self, experts: int, in_features: int, count: int, normalised: bool, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, in_features))
        self.bias = nn.Parameter(torch.empty(experts)) if bias else None
        self.count, self.normalised = count, normalised

    def forward(self, input_PK: Tensor, balance: Balance | None = None) -> tuple[Tensor, Tensor]:
        """Return each row's experts, [P, C] int64, and their weights, [P, C]."""
        logits_PE = F.linear(input_PK, self.weight, self.bias)
        wide = torch.float64 if logits_PE.dtype == torch.float64 else torch.float32
        probabilities_PE = logits_PE.softmax(-1, dtype=wide)
        weights_PC, experts_PC = probabilities_PE.topk(self.count, dim=-1)
        if balance is not None:
            weights_PC = balanced(weights_PC, probabilities_PE, experts_PC, balance)
        if self.normalised:
            weights_PC = weights_PC / weights_PC.sum(-1, keepdim=True)
        return experts_PC, weights_PC


# Modules whose weights are read by products alone, for which autocast rounds them.
MULTIPLYING = nn.Linear, ExpertLinear, Router
