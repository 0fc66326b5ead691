"""The arithmetic of an update on tensors: clip the gradient, skip spikes, update a plane, and the update's record.

Shapes: W remembered updates; a leading axis of members in an ensemble.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from monograph.errors import UsageError
from monograph.graph.precision import Precision
from monograph.ops.materialize import materialize
from monograph.optim import Kind, Optimizer, Plane, splittable, update_
from monograph.ranges import ABOVE_0

WINDOW = 128
SIGMAS = 6.0
# The median of distances from the median, times this, estimates a normal distribution's standard deviation.
_NORMAL = 1.4826
# In a run that has converged numbers hardly vary, and any small step would stand out. So a deviation counts as at least
# this much: of the norm's logarithm, and of the loss as a share of it.
_LEAST = 0.05, 0.01
_SMALLEST_NORM = 1e-300


class Clip(NamedTuple):
    """Limits on gradients.

    With `skip_spikes` an update is skipped whose loss and whose gradient's norm both lie further above the medians of
    the last 128 applied updates than six deviations. A deviation is 1.4826 times the median distance from the median,
    of the loss and of the norm's logarithm, but at least 1 % of the loss and 5 % of the norm. Skipped updates are never
    remembered, so that no number of them, finite or not, widens what is accepted; the 128 are part of the state. The
    rule by both numbers is that of OLMo-core's SkipStepOptimizer, which takes mean and standard deviation.

    Attributes:
        norm: largest Euclidean norm of an update's gradient; a longer one is scaled down to it.
        skip_spikes: whether updates that stand out are skipped.
    """

    norm: float
    skip_spikes: bool = False

    @classmethod
    def of(cls, given: float | Clip | None) -> Clip | None:
        """Return an engine's argument as a `Clip`.

        Raises:
            UsageError: the norm is not above 0.
        """
        clip = given if isinstance(given, Clip) or given is None else cls(given)
        if clip is not None and not ABOVE_0.holds(clip.norm):
            raise UsageError(f"clip = {clip.norm!r}: expected a norm above 0, or None for no clipping")
        return clip


def looked_at(grad_norm: Tensor, loss: Tensor) -> Tensor:
    """Return the numbers remembered of an update, fp64 [2]: the logarithm of its norm, and its loss."""
    # Norms are compared by ratio: a gradient ten times as long is as unusual early in a run as late.
    return torch.stack([grad_norm.clamp_min(_SMALLEST_NORM).log(), loss], dim=-1)


def stands_out(found_2: Tensor, recent_2W: Tensor, applied: Tensor) -> Tensor:
    """Return whether an update is a spike compared with the last W applied ones, bool; false before there are W."""
    # Medians, since a spike that was let through would move a mean and a standard deviation far more.
    middle_2 = _median(recent_2W)
    deviation_2 = _NORMAL * _median((recent_2W - middle_2.unsqueeze(-1)).abs())
    norm, loss = deviation_2.unbind(-1)
    least_2 = torch.stack([norm.clamp_min(_LEAST[0]), loss.maximum(_LEAST[1] * middle_2[..., 1].abs())], dim=-1)
    # Both have to stand out: a hard batch has a high loss alone, and a rare token a long gradient alone.
    return (found_2 - middle_2 > SIGMAS * least_2).all(-1) & (applied >= WINDOW)


def remember_(recent_2W: Tensor, found_2: Tensor, applied: Tensor, accepted: Tensor) -> None:
    """Replace the oldest remembered update by the `applied`-th, counted from 0."""
    # With a mask, because `applied` is on the device: the host would have to read it to use it as an index.
    here_W = torch.arange(WINDOW, device=applied.device) == (applied % WINDOW).unsqueeze(-1)
    here_1W = (here_W & accepted.unsqueeze(-1)).unsqueeze(-2)
    recent_2W.copy_(torch.where(here_1W, found_2.unsqueeze(-1), recent_2W))


def without_spikes_(accepted: Tensor, grad_norm: Tensor, loss: Tensor, recent_2W: Tensor, applied: Tensor) -> Tensor:
    """Return whether an update is still accepted, which a spike is not; remember an accepted one."""
    numbers_2 = looked_at(grad_norm, loss)
    accepted = accepted & ~stands_out(numbers_2, recent_2W, applied)
    remember_(recent_2W, numbers_2, applied, accepted)
    return accepted


def _median(values_W: Tensor) -> Tensor:
    return values_W.sort(dim=-1).values[..., (WINDOW - 1) // 2]


def squares(plane: Plane, grad: Tensor) -> list[Tensor]:
    """Return the sum of squares of each of the plane's parts, fp64."""
    # Part by part, so that the norm has the same bits whether a plane lies in one piece or in stages.
    parts = grad.split(plane.parts, dim=-1)
    norms = (torch.linalg.vector_norm(part, dim=-1, dtype=torch.float64) for part in parts)
    return [norm.square().reshape(grad.shape[:-1]) for norm in norms]  # torch 2.11 keeps a dimension of one number


def update_plane(
    plane: Plane,
    total: Tensor,
    scale: Tensor,
    accepted: Tensor,
    *,
    optim: Optimizer,
    precision: Precision,
    lr: Tensor,
    applied: Tensor,
) -> None:
    """Update a plane by its summed gradient `total` times `scale`, if the update is `accepted`."""
    # Materialized, because compiled code would convert the fp64 factor again for every element.
    grad = total * materialize(scale.to(total.dtype)).unsqueeze(-1)
    compute = precision.products(grad.dtype)
    update_(plane, optim, grad, lr=lr, applied=applied, accepted=accepted, compute=compute)
    make_splittable_(plane.param, precision)


def make_splittable_(param: Tensor, precision: Precision) -> None:
    """Make fp32 weights that compute in bf16 splittable: `monograph.optim.split` can then keep them in 32 bits.

    Resident engines do it too, although they split nothing, so that streamed weights equal theirs to the bit.
    """
    if precision.rounds and param.dtype == torch.float32:
        param.copy_(splittable(param))


def largest(dtype: torch.dtype) -> float:
    """Return the largest number whose square is finite in the dtype of gradients and moments, at least fp32."""
    # Second moments are squares of gradients, so they overflow first.
    return math.sqrt(torch.finfo(torch.promote_types(dtype, torch.float32)).max)


def largest_rate(kinds: Iterable[Kind], largest: float) -> Tensor:
    """Return the largest learning rate of which no multiple that an update computes is above `largest`, 0-d or [N]."""
    wide = functools.partial(torch.as_tensor, dtype=torch.float64)
    factors = (wide(kind.lr) * wide(kind.weight_decay).clamp_min(1.0) for kind in kinds)
    return largest / functools.reduce(torch.maximum, factors, wide(1.0))


def reciprocal(count: Tensor) -> Tensor:
    """Return 1 / count in fp64, and 1 where the count is 0."""
    # Without targets the sum is 0 as well; 0 / 0 would put NaN into the planes for good.
    return 1.0 / torch.where(count == 0, 1.0, count)


@dataclass(frozen=True, slots=True)
class Update:
    """The record of one update; its tensors are 0-d on the device, and only reading one makes the host wait.

    For an ensemble the tensors are [N], with a number for each member, and `lr` has N numbers.

    Attributes:
        index: number of updates before this one: 0, 1, ...
        loss: mean loss per target over the whole window, fp64.
        count: sum of the loss's counts over the window, fp64: the number of targets, or the sum of their weights.
        lr: learning rate of this update.
        grad_norm: Euclidean norm of the gradient before clipping, fp64.
        tokens: targets trained on since the start, this window included, int64; sums of weights are rounded for each
            window.
        skipped: updates skipped since the start because the loss, the gradient, the count or the rate was not finite,
            or the window had no target, int64.
    """

    index: int
    loss: Tensor
    count: Tensor
    lr: float | tuple[float, ...]
    grad_norm: Tensor
    tokens: Tensor
    skipped: Tensor
