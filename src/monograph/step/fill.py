"""Check what a loss says of rows without targets, before any are added to a micro-batch."""

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
    """Check that rows made of the loss's `fill` add nothing, before such rows are added to any
    micro-batch.

    Raises:
        InputRefused: the loss counts targets in them, or adds something, so that results would
            depend on the micro-batch.
    """
    count = step.parameters.targets(empty)
    loss_sum = torch.zeros(())
    grads = tuple[Tensor | None, ...]()
    if not isinstance(step.loss, TokenLoss) and not step.parameters.staged:
        devices = [step.device] if step.device.type == "cuda" else []
        # FSDP2 would wait for a backward pass.
        graphed = torch.set_grad_enabled(step.parameters.differentiable)
        with graphed, buffers_kept(step.model), torch.random.fork_rng(devices), step.context():
            loss_sum, own = step.parameters.sums(empty)
            if loss_sum.requires_grad:
                learned = [p for p in step.model.parameters() if p.requires_grad]
                grads = torch.autograd.grad(loss_sum.sum(), learned, allow_unused=True)
        loss_sum = loss_sum.detach()
        own = own.detach()
        count = own if count is None else torch.maximum(count, own)
    if count is None:
        return
    if bool(count.any()):
        odd = f"counts {float(count.max()):g} targets in rows that have none"
    elif bool((loss_sum != 0).any()):
        odd = f"is {float(loss_sum[loss_sum != 0].flatten()[0]):g} for rows that have no targets"
    elif any(grad is not None and not bool(grad.isfinite().all()) for grad in grads):
        odd = "has a gradient that is not finite for rows that have no targets"
    else:
        return
    remedy = "leave such rows out of sum and count, or set `fill = None` on it and none are added"
    raise InputRefused(f"the loss {odd}, by its fill {dict(fill)}: {remedy}")
