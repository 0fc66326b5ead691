"""Linear layers that hold a matrix for each of several experts, the router that chooses among them,
and its balance.

The balance gives a router's probabilities the gradient of a loss that grows with uneven use. For
each token t of a document d, with p the router's probabilities before any choice, C choices a
token, and f_de the number of choices of expert e by the tokens of d that have a share, over the
number of these tokens,

    aux_t = E sum over e of f_de p_te;    the gradient of  sum over t of share_t aux_t  is added to that of p

f is a constant. No term depends on another document or layer, so the sum does not depend on how
rows are cut or packed. The mean of aux over a document is the loss of the Switch Transformer (Fedus
et al., arXiv 2101.03961) of that document alone, as in DeepSeek-V3's sequence-wise balance (arXiv
2412.19437).

Shapes: P rows, E experts, C of them for each row, N outputs, K inputs; of the balance B rows of T
positions, and N = B T tokens.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monograph.graph.frozen import FrozenWeight, Int8Weight, NF4Weight, dense_of
from monograph.graph.grouped import add_bias, grouped_linear, product, product_dtype
from monograph.ops.autograd import Batched, Context


class Balance(NamedTuple):
    """What the balance of a batch needs to know of its tokens.

    Attributes:
        document_N: the number of each token's document, int64 below N.
        share_N: each token's factor in the sum that is differentiated; a token with 0 does not
            count.
    """

    document_N: Tensor
    share_N: Tensor


def balance_of(segments_BT: Tensor | None, shares_BT: Tensor) -> Balance:
    """Return the balance of packed rows, or without segments of rows of one document."""
    rows, length = shares_BT.shape
    document_BT = torch.arange(0, rows * length, length, device=shares_BT.device)[:, None].expand(
        -1, length
    )
    if segments_BT is not None:
        document_BT = document_BT + F.pad(segments_BT[:, 1:] != segments_BT[:, :-1], (1, 0)).cumsum(
            1
        )
    return Balance(document_BT.flatten(), shares_BT.flatten())


# An operator, because Dynamo traces the forward pass alone of an `autograd.Function` inside of
# vmap.
@torch.library.custom_op("monograph::balanced", mutates_args=())
def _balanced(weights: Tensor, probabilities: Tensor, further: Tensor) -> Tensor:
    """Return the weights as they are; the backward pass gives the probabilities a further gradient."""
    return weights.clone()


@_balanced.register_fake
def _(weights: Tensor, probabilities: Tensor, further: Tensor) -> Tensor:
    return torch.empty_like(weights)


def _save(ctx: Context, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[2])


def _backward(ctx: Context, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    return grad, ctx.saved_tensors[0], None


@_balanced.register_vmap
def _(info: Batched, in_dims: tuple[int | None, ...], *tensors: Tensor) -> tuple[Tensor, int]:
    members = (
        tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip(tensors, in_dims, strict=True)
    )
    return _balanced(*members), 0


_balanced.register_autograd(_backward, setup_context=_save)


def balanced(
    weights_NC: Tensor, probabilities_NE: Tensor, experts_NC: Tensor, balance: Balance
) -> Tensor:
    """Return the weights of the chosen experts, from which the loss's gradient, see the module,
    reaches the router.
    """
    share_N1 = balance.share_N[:, None].to(probabilities_NE.dtype)
    document_N1 = balance.document_N[:, None]
    none_NE = torch.zeros_like(probabilities_NE)
    chosen_NE = none_NE.scatter(
        1, experts_NC, (share_N1 != 0).to(none_NE.dtype).expand_as(experts_NC)
    )
    choices_NE = none_NE.scatter_add(0, document_N1.expand_as(none_NE), chosen_NE)[
        balance.document_N
    ]
    # A token has C choices, so that a document's tokens are its choices / C.
    tokens_N1 = choices_NE.sum(-1, keepdim=True).clamp_min(1) / experts_NC.shape[1]
    further_NE = share_N1 * none_NE.shape[1] / tokens_N1 * choices_NE
    return _balanced(weights_NC, probabilities_NE, further_NE)


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
        """Map rows [P, K] that are sorted by expert to [P, N]; without `ends`, all rows [..., P, K]
        to [E, P, N].

        `ends` has the row after each expert's last one, see `monograph.graph.grouped`.
        """
        product = (
            input @ self.weight.mT if ends_E is None else grouped_linear(input, self.weight, ends_E)
        )
        return self._biased(product, ends_E)

    def _biased(self, product: Tensor, ends_E: Tensor | None) -> Tensor:
        if self.bias is None:
            return product
        bias_EN = self.bias.to(product.dtype)
        return product + bias_EN[:, None] if ends_E is None else add_bias(product, bias_EN, ends_E)


class _DequantisedContext(Context):
    shape: tuple[int, ...]
    grouped: bool  # rows are sorted by expert, and the first saved tensor is `ends_E`
    shared: bool


class _Dequantised(torch.autograd.Function):
    """Compute y = W x and dx = W^T dy of `ExpertLinear`; both make W from its codes, and none is
    kept in between.
    """

    generate_vmap_rule = True

    # Dynamo counts a forward pass's arguments, so there can be no *held.
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
        input, ends_E, shape, *held = inputs
        ctx.save_for_backward(ends_E, *held)
        ctx.shape = shape
        ctx.grouped = ends_E is not None
        ctx.shared = input.ndim < output.ndim

    @staticmethod
    def backward(ctx: _DequantisedContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        ends_E, *held = ctx.saved_tensors
        weight_ENK = dense_of(ctx.shape, *held).to(grad.dtype)
        if ctx.grouped:
            of_input = product(grad, weight_ENK.mT, ends_E)
        else:
            of_input = (grad @ weight_ENK).sum(0) if ctx.shared else grad @ weight_ENK
        return of_input, *[None] * 7


class FrozenExperts(FrozenWeight, ExpertLinear):
    """An `ExpertLinear` whose weight is kept in few bits."""

    def forward(self, input: Tensor, ends_E: Tensor | None) -> Tensor:
        """Map rows as `ExpertLinear` does, in the dtype of products."""
        held = (*self.held(), None, None, None)[:5]
        output: Tensor = _Dequantised.apply(
            input.to(product_dtype(input)), ends_E, self.shape, *held
        )
        return self._biased(output, ends_E)


class Int8Experts(Int8Weight, FrozenExperts):
    """Experts with weights of 8-bit integers, and a scale for each expert's output."""


class NF4Experts(NF4Weight, FrozenExperts):
    """Experts with weights of 4 bits."""


class Router(nn.Module):
    """The choice of experts and of their weights; it is no linear layer for adapters, as in
    transformers.

        p = softmax(W x + b);   the C = `count` experts of the highest p have the weights p, over their sum if
        `normalised`

    Probabilities are computed in fp32, for float64 inputs in float64.
    """

    def __init__(
        self, experts: int, in_features: int, count: int, normalised: bool, bias: bool = False
    ) -> None:
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
