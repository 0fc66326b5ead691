"""What becomes of a large gradient: it is scaled down, and an update that stands out is not made.

Shapes: W updates that are remembered; a leading axis of members, where there are some.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from monograph.errors import UsageError
from monograph.ranges import ABOVE_0

WINDOW = 128
SIGMAS = 6.0
# The median of distances from the median, times this, estimates a normal distribution's standard deviation.
_NORMAL = 1.4826
# Below these a deviation is none: of the norm's logarithm, and of the loss as a share of it.
_LEAST = 0.05, 0.01
_SMALLEST_NORM = 1e-300


class Clip(NamedTuple):
    """How large a gradient may be.

    An update is skipped, if `skip_spikes` says so, whose loss and whose gradient's norm both lie further above the
    medians of the last 128 applied updates than six deviations. A deviation is 1.4826 times the median distance from
    the median, of the loss and of the norm's logarithm, but at least 1 % of the loss and 5 % of the norm. Skipped
    updates are never remembered, so that no number of them, finite or not, widens what is accepted; the 128 are part of
    the state. Source of the rule by both: OLMo-core's SkipStepOptimizer, which has mean and standard deviation.

    Attributes:
        norm: largest Euclidean norm of an update's gradient; a longer one is scaled down to it.
        skip_spikes: whether updates that stand out are skipped.
    """

    norm: float
    skip_spikes: bool = False

    @classmethod
    def of(cls, given: float | Clip | None) -> Clip | None:
        """What an engine was given, checked.

        Raises:
            UsageError: a norm that is not above 0.
        """
        clip = given if isinstance(given, Clip) or given is None else cls(given)
        if clip is not None and not ABOVE_0.holds(clip.norm):
            raise UsageError(f"clip = {clip.norm!r}: expected a norm above 0, or None for no clipping")
        return clip


def looked_at(grad_norm: Tensor, loss: Tensor) -> Tensor:
    """What is remembered of an update, fp64 [2]: its norm's logarithm, and its loss."""
    return torch.stack([grad_norm.clamp_min(_SMALLEST_NORM).log(), loss], dim=-1)


def stands_out(found_2: Tensor, recent_2W: Tensor, applied: Tensor) -> Tensor:
    """Whether an update is a spike beside the last W applied ones, bool; before there are so many, none is."""
    middle_2 = _median(recent_2W)
    deviation_2 = _NORMAL * _median((recent_2W - middle_2.unsqueeze(-1)).abs())
    norm, loss = deviation_2.unbind(-1)
    least_2 = torch.stack([norm.clamp_min(_LEAST[0]), loss.maximum(_LEAST[1] * middle_2[..., 1].abs())], dim=-1)
    return (found_2 - middle_2 > SIGMAS * least_2).all(-1) & (applied >= WINDOW)


def remember_(recent_2W: Tensor, found_2: Tensor, applied: Tensor, accepted: Tensor) -> None:
    """Put an applied update, the `applied`-th from 0, in the place of the oldest."""
    here_W = torch.arange(WINDOW, device=applied.device) == (applied % WINDOW).unsqueeze(-1)
    here_1W = (here_W & accepted.unsqueeze(-1)).unsqueeze(-2)
    recent_2W.copy_(torch.where(here_1W, found_2.unsqueeze(-1), recent_2W))


def _median(values_W: Tensor) -> Tensor:
    return values_W.sort(dim=-1).values[..., (WINDOW - 1) // 2]
