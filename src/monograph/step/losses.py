"""Ask of a loss, and of a model's balance of experts, what a step has to know before it calls them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from monograph.errors import UsageError
from monograph.loss import Loss, TokenLoss


def balances(model: nn.Module, loss: Loss) -> bool:
    """Return whether the model balances its experts, which needs the share of each token.

    Raises:
        UsageError: it does, and the shares of the loss's tokens are unknown.
    """
    factors = [getattr(module, "balance_factor", 0.0) for module in model.modules()]
    if any(factors) and not (factors[0] and isinstance(loss, TokenLoss)):
        raise UsageError(
            "output_router_logits = true adds the balance of experts to the cross-entropy of texts alone, and this "
            "trains by another loss: set it to false in the config.json of the model, or of the run's export"
        )
    return any(factors)


def put_(loss: Loss, device: torch.device) -> None:
    """Move a loss that has buffers to the step's device."""
    if isinstance(loss, nn.Module):
        loss.to(device)


@contextmanager
def of_the_update(
    loss: Loss,
    index: int,
    batches: Sequence[object],
    score: Callable[[Sequence[object]], None],
    sum_over_ranks: Callable[[Tensor], Tensor],
) -> Iterator[None]:
    """Tell the loss in the block of which update it is a part, if it has `update_of`: see
    `monograph.loss`.
    """
    update_of = getattr(loss, "update_of", None)
    with update_of(index, batches, score, sum_over_ranks) if callable(update_of) else nullcontext():
        yield
