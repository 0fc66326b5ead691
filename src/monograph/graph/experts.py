"""Linear layers of a mixture of experts, and the router that chooses experts.

Shapes: P rows, E experts, C chosen experts of each row, N outputs, K inputs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monograph.graph.balance import Balance, balanced
from monograph.graph.frozen import FrozenWeight, Int8Weight, NF4Weight, dequantise
from monograph.graph.grouped import add_bias, grouped_linear, product, product_dtype
from monograph.ops.autograd import Context


class ExpertLinear(nn.Module):
    """A linear layer with a matrix for each of E experts; its weights are not initialised.

    Attributes:
        weight: [E, N, K], each expert's matrix.
        bias: [E, N], or None.
    """

    def __init__(
        self,
        experts: int,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.experts = experts
        self.in_features = in_features
        self.out_features = out_features
        self.weight = nn.Parameter(
            torch.empty(experts, out_features, in_features, device=device, dtype=dtype)
        )
        self.bias = (
            nn.Parameter(torch.empty(experts, out_features, device=device, dtype=dtype))
            if bias
            else None
        )

    def forward(self, input: Tensor, ends_E: Tensor | None) -> Tensor:
        """Apply each expert to its rows, or to all rows.

        Args:
            input: with `ends_E`, [P, K], rows sorted by expert. Without it, either [P, K], rows to
                which every expert is applied, or [E, P, K], the rows of each expert.
            ends_E: the index of the row after each expert's last one, see `monograph.graph.grouped`.
                None: rows are not sorted by expert.

        Returns:
            [P, N]; if `ends_E` is None, [E, P, N].
        """
        if ends_E is None:
            output = input @ self.weight.mT
        else:
            output = grouped_linear(input, self.weight, ends_E)
        return self._plus_bias(output, ends_E)

    def _plus_bias(self, output: Tensor, ends_E: Tensor | None) -> Tensor:
        """Add each expert's bias to its rows, if there are biases."""
        if self.bias is None:
            return output
        bias_EN = self.bias.to(output.dtype)
        if ends_E is None:
            return output + bias_EN[:, None]
        return add_bias(output, bias_EN, ends_E)


class _DequantisedContext(Context):
    shape: tuple[int, ...]  # of the dense weight
    is_grouped: bool  # rows are sorted by expert, and the first saved tensor is `ends_E`
    is_input_shared: bool  # every expert is applied to the same [P, K]


class _DequantisedProduct(torch.autograd.Function):
    """Compute y = W x and dx = W^T dy, where W is stored in few bits.

    The forward and the backward pass each dequantise W, so no dense W is kept in between.
    """

    generate_vmap_rule = True

    # Every stored tensor is an argument of its own, and not a part of `*stored`, because Dynamo counts
    # the arguments in the signature of `forward`.
    @staticmethod
    def forward(
        input: Tensor,
        ends_E: Tensor | None,
        shape: tuple[int, ...],
        codes: Tensor,
        scales: Tensor,
        steps: Tensor | None,
        mean: Tensor | None,
        table: Tensor | None,
    ) -> Tensor:
        weight_ENK = dequantise(shape, codes, scales, steps, mean, table).to(input.dtype)
        return input @ weight_ENK.mT if ends_E is None else product(input, weight_ENK, ends_E)

    @staticmethod
    def setup_context(
        ctx: _DequantisedContext,
        inputs: tuple[
            Tensor,
            Tensor | None,
            tuple[int, ...],
            Tensor,
            Tensor,
            Tensor | None,
            Tensor | None,
            Tensor | None,
        ],
        output: Tensor,
    ) -> None:
        input, ends_E, shape, *stored = inputs
        ctx.save_for_backward(ends_E, *stored)
        ctx.shape = shape
        ctx.is_grouped = ends_E is not None
        ctx.is_input_shared = input.ndim < output.ndim

    @staticmethod
    def backward(ctx: _DequantisedContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        ends_E, *stored = ctx.saved_tensors
        weight_ENK = dequantise(ctx.shape, *stored).to(grad.dtype)
        if ctx.is_grouped:
            input_grad = product(grad, weight_ENK.mT, ends_E)
        elif ctx.is_input_shared:
            input_grad = (grad @ weight_ENK).sum(0)
        else:
            input_grad = grad @ weight_ENK
        no_grads = [None] * 7  # of the arguments after the input
        return input_grad, *no_grads


class FrozenExperts(FrozenWeight, ExpertLinear):
    """An `ExpertLinear` whose weight is frozen and stored in few bits."""

    def forward(self, input: Tensor, ends_E: Tensor | None) -> Tensor:
        """Apply each expert as `ExpertLinear` does, in the dtype of `product_dtype`."""
        # The product takes five tensors. An `NF4Weight` stores five, and an `Int8Weight` two, so that
        # None stands for the other three.
        stored = (*self.stored_tensors(), None, None, None)[:5]
        output: Tensor = _DequantisedProduct.apply(
            input.to(product_dtype(input)), ends_E, self.shape, *stored
        )
        return self._plus_bias(output, ends_E)


class Int8Experts(Int8Weight, FrozenExperts):
    """Experts with weights of 8-bit integers, and a scale for each output of each expert."""


class NF4Experts(NF4Weight, FrozenExperts):
    """Experts with weights of 4 bits."""


class Router(nn.Module):
    """Choose C experts for each row, and weight them.

        p = softmax(W x + b)

    The C experts with the highest p are chosen, and their p are their weights. If `normalised`, the
    weights are divided by their sum. Probabilities are fp32, or float64 for float64 inputs. As in transformers,
    this is not an `nn.Linear`, so "all-linear" adapters leave it out.

    Attributes:
        weight: [E, K].
        bias: [E], or None.
        top_k: C.
        normalised: whether the weights are divided by their sum.
    """

    def __init__(
        self, experts: int, in_features: int, top_k: int, normalised: bool, bias: bool = False
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, in_features))
        self.bias = nn.Parameter(torch.empty(experts)) if bias else None
        self.top_k = top_k
        self.normalised = normalised

    def forward(self, input_PK: Tensor, balance: Balance | None = None) -> tuple[Tensor, Tensor]:
        """Return each row's experts, [P, C] int64, and their weights, [P, C].

        Args:
            input_PK: rows.
            balance: each row's document and share, for the gradient of the balance loss
                (`monograph.graph.balance`); None: that loss is not trained.
        """
        logits_PE = F.linear(input_PK, self.weight, self.bias)
        dtype = torch.float64 if logits_PE.dtype == torch.float64 else torch.float32
        probabilities_PE = logits_PE.softmax(-1, dtype=dtype)
        weights_PC, experts_PC = probabilities_PE.topk(self.top_k, dim=-1)
        if balance is not None:
            weights_PC = balanced(weights_PC, probabilities_PE, experts_PC, balance)
        if self.normalised:
            weights_PC = weights_PC / weights_PC.sum(-1, keepdim=True)
        return experts_PC, weights_PC


# Modules that use their weight only in matrix products, in which autocast rounds it.
MATMUL_MODULES = nn.Linear, ExpertLinear, Router
