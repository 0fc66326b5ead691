"""Balance the use of experts: give a router's probabilities the gradient of a loss that grows with uneven use.

For each token t of a document d, with p the router's probabilities before any choice, C choices a token, and f_de the
number of choices of expert e by the tokens of d that have a share, over the number of these tokens,

    aux_t = E sum over e of f_de p_te;    the gradient of  sum over t of share_t aux_t  is added to that of p

f is a constant. No term depends on another document or layer, so the sum does not depend on how rows are cut or packed.
The mean of aux over a document is the loss of the Switch Transformer (Fedus et al., arXiv 2101.03961) of that document
alone, as in DeepSeek-V3's sequence-wise balance (arXiv 2412.19437).

Shapes: B rows, T positions, N = B T tokens, E experts, C of them for each token.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Balance(NamedTuple):
    """What the balance of a batch needs to know of its tokens.

    Attributes:
        document_N: the number of each token's document, int64 below N.
        share_N: each token's factor in the sum that is differentiated; a token with 0 does not count.
    """

    document_N: Tensor
    share_N: Tensor


def balance_of(segments_BT: Tensor | None, shares_BT: Tensor) -> Balance:
    """Return the balance of packed rows, or without segments of rows of one document."""
    rows, length = shares_BT.shape
    document_BT = torch.arange(0, rows * length, length, device=shares_BT.device)[:, None].expand(-1, length)
    if segments_BT is not None:
        document_BT = document_BT + F.pad(segments_BT[:, 1:] != segments_BT[:, :-1], (1, 0)).cumsum(1)
    return Balance(document_BT.flatten(), shares_BT.flatten())


# An operator, because Dynamo traces the forward pass alone of an `autograd.Function` inside of vmap.
@torch.library.custom_op("monograph::balanced", mutates_args=())
def _balanced(weights: Tensor, probabilities: Tensor, further: Tensor) -> Tensor:
    """Return the weights as they are; the backward pass gives the probabilities a further gradient."""
    return weights.clone()


@_balanced.register_fake
def _(weights: Tensor, probabilities: Tensor, further: Tensor) -> Tensor:
    return torch.empty_like(weights)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[2])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    return grad, ctx.saved_tensors[0], None


@_balanced.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], *tensors: Tensor) -> tuple[Tensor, int]:
    dims = zip(tensors, in_dims, strict=True)
    return _balanced(*(t.expand(info.batch_size, *t.shape) if d is None else t.movedim(d, 0) for t, d in dims)), 0


_balanced.register_autograd(_backward, setup_context=_save)


def balanced(weights_NC: Tensor, probabilities_NE: Tensor, experts_NC: Tensor, balance: Balance) -> Tensor:
    """Return the weights of the chosen experts, from which the loss's gradient, see the module, reaches the router."""
    share_N1, document_N1 = balance.share_N[:, None].to(probabilities_NE.dtype), balance.document_N[:, None]
    none_NE = torch.zeros_like(probabilities_NE)
    chosen_NE = none_NE.scatter(1, experts_NC, (share_N1 != 0).to(none_NE.dtype).expand_as(experts_NC))
    choices_NE = none_NE.scatter_add(0, document_N1.expand_as(none_NE), chosen_NE)[balance.document_N]
    # A token has C choices, so that a document's tokens are its choices / C.
    tokens_N1 = choices_NE.sum(-1, keepdim=True).clamp_min(1) / experts_NC.shape[1]
    further_NE = share_N1 * none_NE.shape[1] / tokens_N1 * choices_NE
    return _balanced(weights_NC, probabilities_NE, further_NE)
