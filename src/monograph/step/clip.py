"""Do the arithmetic of an update: clip the gradient, skip spikes, update a plane, and report the
result.

Shapes: W remembered updates. Tensors of an ensemble have a leading member axis.
"""

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import torch
from torch import Tensor

from monograph.errors import UsageError
from monograph.graph.precision import Precision
from monograph.ops.materialize import materialize
from monograph.optim import Kind, Optimizer, Plane, splittable, update_
from monograph.ranges import ABOVE_0
from monograph.step.parts import Marks

WINDOW = 128
SIGMAS = 6.0
# The median of distances from the median, times this, estimates a normal distribution's standard
# deviation.
_NORMAL = 1.4826
# The smallest deviations of the norm's logarithm, and of the loss as a share of the loss. A
# converged run hardly varies, so that without them any small step would stand out.
_LEAST = 0.05, 0.01
_SMALLEST_NORM = 1e-300


class Clip(NamedTuple):
    """The largest gradient of an update.

    With `skip_spikes`, an update is skipped if its loss and its gradient's norm both lie more than
    six deviations above the medians of the last 128 applied updates. A deviation, of the loss and
    of the norm's logarithm, is 1.4826 times the median distance from the median, but at least 1 %
    of the loss and 5 % of the norm. Skipped updates are never remembered, so that no number of
    them, finite or not, widens the limit; the 128 are part of the state. OLMo-core's
    SkipStepOptimizer has the same rule for both numbers, with mean and standard deviation.

    Attributes:
        norm: largest Euclidean norm of an update's gradient; a longer gradient is scaled down to
            it.
        skip_spikes: whether updates that stand out are skipped.
    """

    norm: float
    skip_spikes: bool = False

    @classmethod
    def of(cls, given: float | Self | None) -> Self | None:
        """Return an engine's argument `clip` as a `Clip`.

        Raises:
            UsageError: the norm is not above 0.
        """
        clip = given if isinstance(given, Clip) or given is None else cls(given)
        if clip is not None and not ABOVE_0.holds(clip.norm):
            raise UsageError(
                f"clip = {clip.norm!r}: expected a norm above 0, or None for no clipping"
            )
        return clip


def looked_at(grad_norm: Tensor, loss: Tensor) -> Tensor:
    """Return the two numbers that are remembered of an update, fp64 [2]: the logarithm of its norm,
    and its loss.
    """
    # Norms are compared by ratio: a gradient ten times as long is as odd early in a run as it is
    # late.
    return torch.stack([grad_norm.clamp_min(_SMALLEST_NORM).log(), loss], dim=-1)


def stands_out(numbers_2: Tensor, recent_2W: Tensor, applied: Tensor) -> Tensor:
    """Return whether an update is a spike compared with the last W applied ones, bool; false before
    there are W.
    """
    # They are medians, as a spike that was let through would move a mean and a standard deviation
    # far more.
    middle_2 = _median(recent_2W)
    deviation_2 = _NORMAL * _median((recent_2W - middle_2.unsqueeze(-1)).abs())
    norm, loss = deviation_2.unbind(-1)
    least_2 = torch.stack(
        [norm.clamp_min(_LEAST[0]), loss.maximum(_LEAST[1] * middle_2[..., 1].abs())], dim=-1
    )
    # Both must stand out, as a hard batch has only a high loss, and a rare token only a long
    # gradient.
    return (numbers_2 - middle_2 > SIGMAS * least_2).all(-1) & (applied >= WINDOW)


def remember_(recent_2W: Tensor, numbers_2: Tensor, applied: Tensor, accepted: Tensor) -> None:
    """Put an applied update, the `applied`-th from 0, in the place of the oldest."""
    # A mask takes the place of an index: `applied` is on the device, and indexing by it would be a
    # read by the host.
    here_W = torch.arange(WINDOW, device=applied.device) == (applied % WINDOW).unsqueeze(-1)
    here_1W = (here_W & accepted.unsqueeze(-1)).unsqueeze(-2)
    recent_2W.copy_(torch.where(here_1W, numbers_2.unsqueeze(-1), recent_2W))


def without_spikes_(
    accepted: Tensor, grad_norm: Tensor, loss: Tensor, recent_2W: Tensor, applied: Tensor
) -> Tensor:
    """Return whether an accepted update is still accepted, as it does not stand out; if so,
    remember it.
    """
    numbers_2 = looked_at(grad_norm, loss)
    accepted = accepted & ~stands_out(numbers_2, recent_2W, applied)
    remember_(recent_2W, numbers_2, applied, accepted)
    return accepted


def _median(values_W: Tensor) -> Tensor:
    return values_W.sort(dim=-1).values[..., (WINDOW - 1) // 2]


def squares(plane: Plane, grad: Tensor) -> list[Tensor]:
    """Return the sum of squares of each of the plane's parts, fp64."""
    # Squares are summed part by part, so that the norm has the same bits whether a plane is one
    # piece or in stages.
    parts = grad.split(plane.parts, dim=-1)
    # Few kernels for all parts, in each of which a part's sum is its own.
    if grad.is_cuda and grad.ndim == 1:
        return [norm.square() for norm in torch._foreach_norm(parts, dtype=torch.float64)]
    norms = (torch.linalg.vector_norm(part, dim=-1, dtype=torch.float64) for part in parts)
    # Torch 2.11 keeps a dimension of one number.
    return [norm.square().reshape(grad.shape[:-1]) for norm in norms]


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
    """Update a plane by its summed gradient `total`, times `scale`, where the update is `accepted`."""
    # The fp64 factor is materialized, as a compiler would otherwise convert it again for every
    # element.
    grad = total * materialize(scale.to(total.dtype)).unsqueeze(-1)
    compute = precision.products(grad.dtype)
    update_(plane, optim, grad, lr=lr, applied=applied, accepted=accepted, compute=compute)
    make_splittable_(plane.param, precision)


def make_splittable_(param: Tensor, precision: Precision) -> None:
    """Move fp32 weights that are computed with in bf16 to values that `monograph.optim.split` can
    keep in 32 bits.

    Resident engines do so too, although they split nothing, so that streamed weights equal theirs
    to the bit.
    """
    if precision.rounds and param.dtype == torch.float32:
        param.copy_(splittable(param))


def largest(dtype: torch.dtype) -> float:
    """Return the largest number whose square is finite in the dtype of gradients and moments, at
    least fp32.
    """
    # Second moments are squares of gradients, so they overflow first.
    return math.sqrt(torch.finfo(torch.promote_types(dtype, torch.float32)).max)


def largest_rate(kinds: Iterable[Kind], largest: float) -> Tensor:
    """Return the largest learning rate, 0-d or [N], whose products with factors and decays are not
    above `largest`.
    """
    wide = functools.partial(torch.as_tensor, dtype=torch.float64)
    factors = (wide(kind.lr) * wide(kind.weight_decay).clamp_min(1.0) for kind in kinds)
    return largest / functools.reduce(torch.maximum, factors, wide(1.0))


def reciprocal(count: Tensor) -> Tensor:
    """Return 1 / count in fp64, and 1 where the count is 0."""
    # Without targets the sum is 0 as well, and 0 / 0 would put NaN into the planes for good.
    return 1.0 / torch.where(count == 0, 1.0, count)


@dataclass(frozen=True, slots=True)
class Update:
    """The numbers of one update; tensors are 0-d on the device, and reading one is the only wait of
    the host.

    For an ensemble, tensors are [N], one number for each member, and `lr` is a tuple of N rates.

    Attributes:
        index: the number of updates before this one.
        loss: mean loss per target over the whole window, fp64.
        count: sum of the loss's counts over the window, fp64: the number of targets, or the sum of
            their weights.
        lr: learning rate of this update.
        grad_norm: Euclidean norm of the gradient before clipping, fp64.
        tokens: targets trained on since the start, this window included, int64; sums of weights are
            rounded for each window.
        skipped: updates skipped since the start because the loss, the gradient, the count or the
            rate was not finite, or the window had no target, int64.
        marks: when the parts of the update began; see `monograph.step.parts`.
    """

    index: int
    loss: Tensor
    count: Tensor
    lr: float | tuple[float, ...]
    grad_norm: Tensor
    tokens: Tensor
    skipped: Tensor
    marks: Marks = field(default=(), repr=False, compare=False)
