"""Prepare a loss for a step: move it to the step's device, check that it fits a model that balances its
experts, and tell it of each update.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from monograph.errors import UsageError
from monograph.loss import Loss, TokenLoss


def balances(model: nn.Module, loss: Loss) -> bool:
    """Return whether the model balances its experts, so that it needs each token's share of the loss.

    Raises:
        UsageError: the model balances its experts, but the loss is not a `TokenLoss`, so the tokens'
            shares are unknown.
    """
    factors = [getattr(module, "balance_factor", 0.0) for module in model.modules()]
    own_factor = factors[0]  # `modules` yields the model itself first, and then its submodules
    if any(factors) and not (own_factor and isinstance(loss, TokenLoss)):
        raise UsageError(
            "output_router_logits = true adds the balance of experts to the cross-entropy of texts alone, and this "
            "run trains by another loss: set it to false in the config.json of the model, or of the run's export"
        )
    return any(factors)


def move_loss_(loss: Loss, device: torch.device) -> None:
    """Move a loss that is a module, and so may have buffers, to the step's device."""
    if isinstance(loss, nn.Module):
        loss.to(device)


@contextmanager
def loss_update_context(
    loss: Loss,
    index: int,
    batches: Sequence[object],
    score: Callable[[Sequence[object]], None],
    sum_over_ranks: Callable[[Tensor], Tensor],
) -> Iterator[None]:
    """Enter the loss's `update_of` for the block, if the loss has it; see `monograph.loss`.

    Args:
        loss: the step's loss.
        index: the index of the update.
        batches: the micro-batches of the update's window.
        score: passes micro-batches through the loss without gradients.
        sum_over_ranks: sums a 0-d tensor over all ranks.
    """
    update_of = getattr(loss, "update_of", None)
    if not callable(update_of):
        yield
        return
    with update_of(index, batches, score, sum_over_ranks):
        yield
