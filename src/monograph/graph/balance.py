"""The balance loss of a mixture of experts; only its gradient is computed.

The loss grows as experts are used unevenly. Its value is not added to the training loss; only its
gradient is added, to that of the router's probabilities p:

    aux_t = E sum over e of f_de p_te        for token t of document d
    loss  = sum over t of share_t aux_t

p_te is the probability of expert e before any is chosen. f_de is how often the tokens of document d
chose expert e, divided by the number of these tokens; it is a constant in the backward pass. The
caller gives share_t, a token's factor. Tokens with a share of 0, such as padding, do not count in f.

No term depends on another document or layer, so the loss does not depend on how documents are
packed into rows or split into micro-batches. The mean of aux over a document is the loss of the
Switch Transformer (Fedus et al., arXiv 2101.03961) for that document alone, as in DeepSeek-V3's
sequence-wise balance (arXiv 2412.19437).

Shapes: B rows of T positions, N = B T tokens, E experts, C chosen experts of each token.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

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

    It is added to the gradient of the probabilities; the equation is at the top of this file.

    Args:
        weights_NC: the weights of the chosen experts.
        probabilities_NE: the router's probabilities.
        experts_NC: the chosen experts, int64.
        balance: each token's document, and its share of the loss.

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
    # The derivative of the loss with respect to p_te: share_t E f_de, where f_de is choices / tokens.
    added_grad_NE = share_N1 * zeros_NE.shape[1] / document_tokens_N1 * choices_NE
    return _with_added_grad(weights_NC, probabilities_NE, added_grad_NE)
