"""Check that rows without targets add nothing to a loss, before micro-batches are padded with them."""

from collections.abc import Mapping

import torch
from torch import Tensor

from monograph.errors import InputRefused
from monograph.graph.inspect import buffers_kept
from monograph.loss import TokenLoss
from monograph.step.step import Step


def require_nothing_added(
    step: Step, empty: Mapping[str, Tensor], fill: Mapping[str, float]
) -> None:
    """Check that rows made of the loss's `fill` add nothing to sum, count and gradient.

    Otherwise results would depend on the size of micro-batches, which are padded with such rows.

    Args:
        step: the step.
        empty: a micro-batch of such rows.
        fill: the loss's `fill`, for the message.

    Raises:
        InputRefused: the loss counts targets in the rows, its sum is not 0, or a gradient is not
            finite.
    """
    count = step.parameters.targets(empty)
    loss_sum = torch.zeros(())
    grads: tuple[Tensor | None, ...] = ()
    # `TokenLoss` is known to add nothing. A loss cannot be called on a model that runs stage by stage.
    if not isinstance(step.loss, TokenLoss) and not step.parameters.staged:
        devices = [step.device] if step.device.type == "cuda" else []
        # Gradients are off where the sums cannot be differentiated: after a forward pass with gradients,
        # FSDP2 would wait for a backward pass.
        grad_mode = torch.set_grad_enabled(step.parameters.differentiable)
        with grad_mode, buffers_kept(step.model), torch.random.fork_rng(devices), step.context():
            loss_sum, summed_count = step.parameters.sums(empty)
            if loss_sum.requires_grad:
                trainable = [p for p in step.model.parameters() if p.requires_grad]
                grads = torch.autograd.grad(loss_sum.sum(), trainable, allow_unused=True)
        loss_sum = loss_sum.detach()
        summed_count = summed_count.detach()
        count = summed_count if count is None else torch.maximum(count, summed_count)
    if count is None:
        return
    if bool(count.any()):
        problem = f"counts {float(count.max()):g} targets in rows that have none"
    elif bool((loss_sum != 0).any()):
        problem = (
            f"is {float(loss_sum[loss_sum != 0].flatten()[0]):g} for rows that have no targets"
        )
    elif any(grad is not None and not bool(grad.isfinite().all()) for grad in grads):
        problem = "has a gradient that is not finite for rows that have no targets"
    else:
        return
    raise InputRefused(
        f"the loss {problem}, by its fill {dict(fill)}: leave such rows out of sum and count, or set `fill = None` on "
        "the loss, so that no rows are added"
    )
