"""Linear layers with a matrix for each of several experts, the router that chooses, its balance.

The balance adds to the gradient of a router's probabilities that of a loss that grows with uneven
use of experts. Token t of document d has the term

    aux_t = E sum over e of f_de p_te;    the gradient of  sum over t of share_t aux_t  is added to that of p

p are the router's probabilities before any choice. f_de is the number of choices of expert e by the
tokens of d, over the number of these tokens; only tokens with a share other than 0 count. f is a
constant in the backward pass.

No term depends on another document or layer, so the sum does not depend on how rows are cut or
packed. The mean of aux over a document is the loss of the Switch Transformer (Fedus et al., arXiv
2101.03961) for that document alone, as in DeepSeek-V3's sequence-wise balance (arXiv 2412.19437).

Shapes: P rows, E experts, C of them for each row, N outputs, K inputs. In the balance: B rows of T
positions, N = B T tokens.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monograph.graph.frozen import FrozenWeight, Int8Weight, NF4Weight, dense_of
from monograph.graph.grouped import add_bias, grouped_linear, product, product_dtype
from monograph.ops.autograd import Batched, Context


class Balance(NamedTuple):
    """The tokens of a batch, for the balance.

    Attributes:
        document_N: the number of each token's document, int64 below N.
        share_N: each token's factor in the sum that is differentiated; 0: the token does not count.
    """

    document_N: Tensor
    share_N: Tensor


def balance_of(segments_BT: Tensor | None, shares_BT: Tensor) -> Balance:
    """Return the tokens of a batch for the balance.

    Args:
        segments_BT: packed rows: numbers that change where a document ends; None: each row is one
            document.
        shares_BT: each token's share.
    """
    rows, length = shares_BT.shape
    # A row's documents are numbered from the row's first position, so no other row has them.
    first_B1 = torch.arange(0, rows * length, length, device=shares_BT.device)[:, None]
    document_BT = first_B1.expand(-1, length)
    if segments_BT is not None:
        is_first_BT = F.pad(segments_BT[:, 1:] != segments_BT[:, :-1], (1, 0))
        document_BT = document_BT + is_first_BT.cumsum(1)
    return Balance(document_BT.flatten(), shares_BT.flatten())


# An operator, because inside of vmap Dynamo traces only the forward pass of an `autograd.Function`.
@torch.library.custom_op("monograph::balanced", mutates_args=())
def _balanced(weights: Tensor, probabilities: Tensor, added_grad: Tensor) -> Tensor:
    """Return a copy of the weights; the backward pass gives the probabilities `added_grad`."""
    return weights.clone()


@_balanced.register_fake
def _(weights: Tensor, probabilities: Tensor, added_grad: Tensor) -> Tensor:
    return torch.empty_like(weights)


def _save(ctx: Context, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[2])


def _backward(ctx: Context, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    return grad, ctx.saved_tensors[0], None


@_balanced.register_vmap
def _(info: Batched, in_dims: tuple[int | None, ...], *tensors: Tensor) -> tuple[Tensor, int]:
    of_members = (
        tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip(tensors, in_dims, strict=True)
    )
    return _balanced(*of_members), 0


_balanced.register_autograd(_backward, setup_context=_save)


def balanced(
    weights_NC: Tensor, probabilities_NE: Tensor, experts_NC: Tensor, balance: Balance
) -> Tensor:
    """Return a copy of the weights, and add the balance to the gradient of the probabilities.

    The backward pass adds it; the equation is in the module's docstring.

    Args:
        weights_NC: the weights of the chosen experts.
        probabilities_NE: the router's probabilities.
        experts_NC: the chosen experts, int64.
        balance: the tokens.

    Returns:
        [N, C], the weights.
    """
    share_N1 = balance.share_N[:, None].to(probabilities_NE.dtype)
    document_N1 = balance.document_N[:, None]
    zeros_NE = torch.zeros_like(probabilities_NE)
    counts_N1 = (share_N1 != 0).to(zeros_NE.dtype)
    chosen_NE = zeros_NE.scatter(1, experts_NC, counts_N1.expand_as(experts_NC))
    # First of each document, by its number; then of each token's document.
    choices_NE = zeros_NE.scatter_add(0, document_N1.expand_as(zeros_NE), chosen_NE)
    choices_NE = choices_NE[balance.document_N]
    # Each token has C choices, so a document has as many tokens as choices / C.
    tokens_N1 = choices_NE.sum(-1, keepdim=True).clamp_min(1) / experts_NC.shape[1]
    added_grad_NE = share_N1 * zeros_NE.shape[1] / tokens_N1 * choices_NE
    return _balanced(weights_NC, probabilities_NE, added_grad_NE)


class ExpertLinear(nn.Module):
    """A linear layer of E experts, without initial weights.

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
            input: [P, K], rows that are sorted by expert; if `ends_E` is None, [P, K] for all
                experts or [E, P, K].
            ends_E: the row after each expert's last one, see `monograph.graph.grouped`; None: every
                expert maps all rows.

        Returns:
            [P, N]; if `ends_E` is None, [E, P, N].
        """
        if ends_E is None:
            product = input @ self.weight.mT
        else:
            product = grouped_linear(input, self.weight, ends_E)
        return self._plus_bias(product, ends_E)

    def _plus_bias(self, product: Tensor, ends_E: Tensor | None) -> Tensor:
        if self.bias is None:
            return product
        bias_EN = self.bias.to(product.dtype)
        return product + bias_EN[:, None] if ends_E is None else add_bias(product, bias_EN, ends_E)


class _DequantisedContext(Context):
    shape: tuple[int, ...]
    is_grouped: bool  # rows are sorted by expert, and the first saved tensor is `ends_E`
    is_input_shared: bool  # by all experts


class _DequantisedProduct(torch.autograd.Function):
    """Compute y = W x and dx = W^T dy of `ExpertLinear`.

    Each dequantises W from its codes, and no dense W is kept in between.
    """

    generate_vmap_rule = True

    # Each tensor is an argument, because Dynamo counts the arguments of a forward pass.
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
        weight_ENK = dense_of(shape, codes, scales, steps, mean, table).to(input.dtype)
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
        weight_ENK = dense_of(ctx.shape, *stored).to(grad.dtype)
        if ctx.is_grouped:
            input_grad = product(grad, weight_ENK.mT, ends_E)
        elif ctx.is_input_shared:
            input_grad = (grad @ weight_ENK).sum(0)
        else:
            input_grad = grad @ weight_ENK
        return input_grad, *[None] * 7


class FrozenExperts(FrozenWeight, ExpertLinear):
    """An `ExpertLinear` whose weight is kept in few bits."""

    def forward(self, input: Tensor, ends_E: Tensor | None) -> Tensor:
        """Map rows as `ExpertLinear` does, in the dtype of products."""
        # An `Int8Weight` stores two tensors, an `NF4Weight` five.
        stored = (*self.stored(), None, None, None)[:5]
        output: Tensor = _DequantisedProduct.apply(
            input.to(product_dtype(input)), ends_E, self.shape, *stored
        )
        return self._plus_bias(output, ends_E)


class Int8Experts(Int8Weight, FrozenExperts):
    """Experts with weights of 8-bit integers, and a scale for each expert's output."""


class NF4Experts(NF4Weight, FrozenExperts):
    """Experts with weights of 4 bits."""


class Router(nn.Module):
    """The choice of experts and of their weights.

        p = softmax(W x + b);   the C experts of the highest p have the weights p, over their sum if `normalised`

    Probabilities are fp32, or float64 for float64 inputs. As in transformers, this is not an
    `nn.Linear`, so "all-linear" adapters leave it out.

    Attributes:
        weight: [E, K].
        bias: [E], or None.
        count: C.
        normalised: whether the weights are divided by their sum.
    """

    def __init__(
        self, experts: int, in_features: int, count: int, normalised: bool, bias: bool = False
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, in_features))
        self.bias = nn.Parameter(torch.empty(experts)) if bias else None
        self.count = count
        self.normalised = normalised

    def forward(self, input_PK: Tensor, balance: Balance | None = None) -> tuple[Tensor, Tensor]:
        """Return each row's experts, [P, C] int64, and their weights, [P, C].

        Args:
            input_PK: rows.
            balance: the rows as tokens, for the balance; None: without it.
        """
        logits_PE = F.linear(input_PK, self.weight, self.bias)
        dtype = torch.float64 if logits_PE.dtype == torch.float64 else torch.float32
        probabilities_PE = logits_PE.softmax(-1, dtype=dtype)
        weights_PC, experts_PC = probabilities_PE.topk(self.count, dim=-1)
        if balance is not None:
            weights_PC = balanced(weights_PC, probabilities_PE, experts_PC, balance)
        if self.normalised:
            weights_PC = weights_PC / weights_PC.sum(-1, keepdim=True)
        return experts_PC, weights_PC


# Modules whose weights are read by products only, for which autocast rounds them.
MULTIPLYING = nn.Linear, ExpertLinear, Router
