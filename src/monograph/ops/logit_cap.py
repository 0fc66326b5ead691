"""Bound logits by a smooth cap.

    y = cap tanh(z / cap),        dy / dz = 1 - (y / cap)^2

Source: Gemma Team, "Gemma 2", arXiv 2408.00118, section 2 (logit soft-capping).
"""

import torch
from torch import Tensor, nn


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """Return cap tanh(logits / cap), or the logits themselves if `cap` is None.

    It is computed in fp32 (fp64 for fp64) and rounded once.
    """
    if cap is None:
        return logits
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (torch.tanh(wide / cap) * cap).to(logits.dtype)


def cap_slope(capped_logits: Tensor, cap: float) -> Tensor:
    """Return the derivative of `capped` with respect to the logits, given its result."""
    return 1 - (capped_logits / cap).square()


def cap_of(head: nn.Module) -> float | None:
    """Return the cap of a head's logits, its attribute `logit_cap`; None: it has none."""
    cap: float | None = getattr(head, "logit_cap", None)
    return cap
