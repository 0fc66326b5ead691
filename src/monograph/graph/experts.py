"""Linear layers of a mixture of experts, the router that chooses experts, and the balance loss.

The balance loss grows as experts are used unevenly. Its value is not added to the training loss;
only its gradient is added, to that of the router's probabilities p:

    aux_t = E sum over e of f_de p_te        for token t of document d
    loss  = sum over t of share_t aux_t

p_te is the probability of expert e before any is chosen. f_de is how often the tokens of document d
chose expert e, divided by the number of these tokens; it is a constant in the backward pass. The
caller gives share_t, a token's factor. Tokens with a share of 0, such as padding, do not count in f.

No term depends on another document or layer, so the loss does not depend on how documents are
packed into rows or split into micro-batches. The mean of aux over a document is the loss of the
Switch Transformer (Fedus et al., arXiv 2101.03961) for that document alone, as in DeepSeek-V3's
sequence-wise balance (arXiv 2412.19437).

Shapes: P rows, E experts, C chosen experts of each row, N outputs, K inputs. In the balance loss: B
rows of T positions, N = B T tokens.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monograph.graph.frozen import FrozenWeight, Int8Weight, NF4Weight, dequantise
from monograph.graph.grouped import add_bias, grouped_linear, product, product_dtype
from monograph.ops.autograd import Context, VmapInfo


class Balance(NamedTuple):
    """What the balance loss needs to know about each token of a batch.

    Attributes:
        document_N: the number of each token's document, int64 below N.
        share_N: each token's factor in the loss; 0: the token does not count.
    """

    document_N: Tensor
    share_N: Tensor


def balance_of(segments_BT: Tensor | None, shares_BT: Tensor) -> Balance:
    """Return what the balance loss needs to know about each token of a batch.

    Args:
        segments_BT: for packed rows, numbers that change where a new document begins; None: each
            row is one document.
        shares_BT: each token's factor in the loss.
    """
    rows, length = shares_BT.shape
    # Row b numbers its documents from b T. It has at most T, so no two rows share a number.
    first_B1 = torch.arange(0, rows * length, length, device=shares_BT.device)[:, None]
    document_BT = first_B1.expand(-1, length)
    if segments_BT is not None:
        is_first_BT = F.pad(segments_BT[:, 1:] != segments_BT[:, :-1], (1, 0))
        document_BT = document_BT + is_first_BT.cumsum(1)
    return Balance(document_BT.flatten(), shares_BT.flatten())


# This is an operator, because inside of vmap Dynamo traces only the forward pass of an
# `autograd.Function`.
@torch.library.custom_op("monograph::balanced", mutates_args=())
def _with_added_grad(weights: Tensor, probabilities: Tensor, added_grad: Tensor) -> Tensor:
    """Return a copy of the weights; the backward pass gives `added_grad` to the probabilities."""
    return weights.clone()


@_with_added_grad.register_fake
def _(weights: Tensor, probabilities: Tensor, added_grad: Tensor) -> Tensor:
    return torch.empty_like(weights)


def _save_added_grad(ctx: Context, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    _weights, _probabilities, added_grad = inputs
    ctx.save_for_backward(added_grad)


def _give_added_grad(ctx: Context, weights_grad: Tensor) -> tuple[Tensor, Tensor, None]:
    (added_grad,) = ctx.saved_tensors
    return weights_grad, added_grad, None


_with_added_grad.register_autograd(_give_added_grad, setup_context=_save_added_grad)


@_with_added_grad.register_vmap
def _(info: VmapInfo, in_dims: tuple[int | None, ...], *tensors: Tensor) -> tuple[Tensor, int]:
    with_member_axis = (
        tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip(tensors, in_dims, strict=True)
    )
    return _with_added_grad(*with_member_axis), 0


def balanced(
    weights_NC: Tensor, probabilities_NE: Tensor, experts_NC: Tensor, balance: Balance
) -> Tensor:
    """Return a copy of the weights whose backward pass adds the gradient of the balance loss.

    It is added to the gradient of the probabilities. The module's docstring has the equation.

    Args:
        weights_NC: the weights of the chosen experts.
        probabilities_NE: the router's probabilities.
        experts_NC: the chosen experts, int64.
        balance: each token's document and share.

    Returns:
        [N, C], the weights.
    """
    share_N1 = balance.share_N[:, None].to(probabilities_NE.dtype)
    document_N1 = balance.document_N[:, None]
    zeros_NE = torch.zeros_like(probabilities_NE)
    is_counted_N1 = (share_N1 != 0).to(zeros_NE.dtype)
    is_chosen_NE = zeros_NE.scatter(1, experts_NC, is_counted_N1.expand_as(experts_NC))
    # Row d counts the choices of document d. A batch has at most N documents, so they fit.
    choices_by_document_NE = zeros_NE.scatter_add(0, document_N1.expand_as(zeros_NE), is_chosen_NE)
    choices_NE = choices_by_document_NE[balance.document_N]  # of each token's document
    # Each token chooses C experts, so a document of n tokens has C n choices.
    document_tokens_N1 = choices_NE.sum(-1, keepdim=True).clamp_min(1) / experts_NC.shape[1]
    added_grad_NE = share_N1 * zeros_NE.shape[1] / document_tokens_N1 * choices_NE
    return _with_added_grad(weights_NC, probabilities_NE, added_grad_NE)


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
            input: [P, K], rows sorted by expert. If `ends_E` is None: [P, K], the same rows for
                every expert, or [E, P, K], each expert's own.
            ends_E: the index of the row after each expert's last one, see `monograph.graph.grouped`;
                None: every expert is applied to all rows.

        Returns:
            [P, N]; if `ends_E` is None, [E, P, N].
        """
        if ends_E is None:
            output = input @ self.weight.mT
        else:
            output = grouped_linear(input, self.weight, ends_E)
        return self._plus_bias(output, ends_E)

    def _plus_bias(self, output: Tensor, ends_E: Tensor | None) -> Tensor:
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

    # Every stored tensor is an argument of its own, because Dynamo counts the arguments of a
    # forward pass, so it cannot end in `*stored`.
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
        # An `Int8Weight` stores two tensors, an `NF4Weight` five; the product takes five.
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

    The experts with the C highest p are chosen, with their p as weights. If `normalised`, these are
    divided by their sum. Probabilities are fp32, or float64 for float64 inputs. As in transformers,
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
            balance: the rows' documents and shares; None: without the balance loss.
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
