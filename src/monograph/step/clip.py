"""Do the arithmetic of an update: clip the gradient, skip spikes, update a plane, report the result.

Shapes: W remembered updates (`WINDOW`); 2 numbers of an update, its log-norm and its loss; N members
of an ensemble, whose tensors have a leading member axis.
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
from monograph.optim import Optimizer, ParameterKind, Plane, splittable, update_
from monograph.ranges import ABOVE_0
from monograph.step.parts import PartMarks

WINDOW = 128  # the number of updates with which a new one is compared
SIGMAS = 6.0  # a spike lies this many deviations above the median
# For normally distributed numbers, 1.4826 times the median absolute deviation from the median
# estimates the standard deviation.
_STD_PER_MAD = 1.4826
# Minimum deviations: of the log-norm, and of the loss as a share of the loss. A converged run hardly
# varies, so without a minimum any small change would be a spike.
_MIN_LOG_NORM_DEVIATION = 0.05
_MIN_RELATIVE_LOSS_DEVIATION = 0.01
_SMALLEST_NORM = 1e-300  # keeps the logarithm of a norm of 0 finite


class Clip(NamedTuple):
    """Which gradients are scaled down, and which updates are skipped.

    With `skip_spikes`, an update is skipped if its loss and the logarithm of its gradient's norm
    both lie more than six deviations above their medians over the last 128 applied updates. A
    deviation is 1.4826 times the median distance from the median, but at least 1 % of the loss and
    5 % of the norm. Skipped updates are not remembered, so they never widen the limit, however many
    there are. The remembered numbers are part of a run's state. OLMo-core's SkipStepOptimizer
    applies the same rule to both numbers, with mean and standard deviation.

    Attributes:
        norm: largest Euclidean norm of an update's gradient; a larger gradient is scaled down to
            this norm.
        skip_spikes: whether spikes are skipped.
    """

    norm: float
    skip_spikes: bool = False

    @classmethod
    def of(cls, given: float | Self | None) -> Self | None:
        """Return an engine's argument `clip` as a `Clip`; None stays None.

        Raises:
            UsageError: the norm is not above 0.
        """
        clip = given if isinstance(given, Clip) or given is None else cls(given)
        if clip is not None and not ABOVE_0.holds(clip.norm):
            raise UsageError(
                f"clip = {clip.norm!r}: expected a norm above 0, or None for no clipping"
            )
        return clip


def log_norm_and_loss(grad_norm: Tensor, loss: Tensor) -> Tensor:
    """Return the two numbers of an update by which spikes are detected, fp64 [2]."""
    # The logarithm compares norms by their ratio: a norm ten times the usual one is as suspicious
    # early in a run, where norms are large, as late.
    return torch.stack([grad_norm.clamp_min(_SMALLEST_NORM).log(), loss], dim=-1)


def is_spike(numbers_2: Tensor, recent_2W: Tensor, applied: Tensor) -> Tensor:
    """Return whether an update is a spike compared with the last W applied updates, bool.

    Args:
        numbers_2: the update's log-norm and loss.
        recent_2W: those of the last W applied updates, in any order.
        applied: the number of applied updates; the result is false while there are fewer than W.
    """
    # Medians, because a spike that was let through would move a mean and a standard deviation far more.
    median_2 = _median(recent_2W)
    deviation_2 = _STD_PER_MAD * _median((recent_2W - median_2.unsqueeze(-1)).abs())
    log_norm_deviation, loss_deviation = deviation_2.unbind(-1)
    median_loss = median_2[..., 1]
    floored_deviation_2 = torch.stack(
        [
            log_norm_deviation.clamp_min(_MIN_LOG_NORM_DEVIATION),
            loss_deviation.maximum(_MIN_RELATIVE_LOSS_DEVIATION * median_loss.abs()),
        ],
        dim=-1,
    )
    is_high_2 = numbers_2 - median_2 > SIGMAS * floored_deviation_2
    # Both numbers must be high: a hard batch has only a high loss, a rare token only a large
    # gradient.
    return is_high_2.all(-1) & (applied >= WINDOW)


def remember_(recent_2W: Tensor, numbers_2: Tensor, applied: Tensor, accepted: Tensor) -> None:
    """Write an accepted update's numbers over those of the oldest remembered update.

    Args:
        recent_2W: the remembered numbers, a ring buffer that is written in place.
        numbers_2: the update's log-norm and loss.
        applied: the number of updates applied before this one.
        accepted: whether the update is applied, bool; if not, nothing is written.
    """
    # A mask selects the column: `applied` is on the device, and the host would have to read it to
    # use it as an index.
    is_oldest_W = torch.arange(WINDOW, device=applied.device) == (applied % WINDOW).unsqueeze(-1)
    is_written_1W = (is_oldest_W & accepted.unsqueeze(-1)).unsqueeze(-2)
    recent_2W.copy_(torch.where(is_written_1W, numbers_2.unsqueeze(-1), recent_2W))


def without_spikes_(
    accepted: Tensor, grad_norm: Tensor, loss: Tensor, recent_2W: Tensor, applied: Tensor
) -> Tensor:
    """Reject an accepted update that is a spike, and remember it otherwise.

    Returns:
        Whether the update is still accepted, bool.
    """
    numbers_2 = log_norm_and_loss(grad_norm, loss)
    accepted = accepted & ~is_spike(numbers_2, recent_2W, applied)
    remember_(recent_2W, numbers_2, applied, accepted)
    return accepted


def _median(values_W: Tensor) -> Tensor:
    return values_W.sort(dim=-1).values[..., (WINDOW - 1) // 2]


def squares(plane: Plane, grad: Tensor) -> list[Tensor]:
    """Return the sum of squares of each of the plane's sections, fp64."""
    # Squares are summed section by section, so that the norm has the same bits whether a plane is in
    # one piece or in stages.
    sections = grad.split(plane.section_sizes, dim=-1)
    # `_foreach_norm` needs a few kernels for all sections, and sums each section by itself.
    if grad.is_cuda and grad.ndim == 1:
        return [norm.square() for norm in torch._foreach_norm(sections, dtype=torch.float64)]
    norms = (torch.linalg.vector_norm(section, dim=-1, dtype=torch.float64) for section in sections)
    # The reshape is for torch 2.11, which keeps the reduced dimension if it has one element.
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
    """Update a plane's weights and optimizer state in place.

    Args:
        plane: the plane.
        total: the summed gradient, [size].
        scale: factor of `total`, fp64.
        accepted: whether the update is applied, bool; if not, nothing changes.
        optim: the optimizer.
        precision: the compute dtype.
        lr: the learning rate.
        applied: the number of updates applied so far, this one included.
    """
    # Without `materialize` a compiled update would convert the fp64 factor once per element.
    grad = total * materialize(scale.to(total.dtype)).unsqueeze(-1)
    compute = precision.product_dtype(grad.dtype)
    update_(plane, optim, grad, lr=lr, applied=applied, accepted=accepted, compute=compute)
    # Weights of a block format are never streamed, and keep the numbers of the format.
    if plane.kind.block_format is None:
        make_splittable_(plane.param, precision)


def make_splittable_(param: Tensor, precision: Precision) -> None:
    """Round fp32 weights, if bf16 computes with them, to values that `optim.split` can represent.

    Only a streamed engine splits weights. A resident engine rounds them as well, so that the weights
    of both are equal to the bit.
    """
    if precision.rounds_weights and param.dtype == torch.float32:
        param.copy_(splittable(param))


def largest_squarable(dtype: torch.dtype) -> float:
    """Return the largest number whose square does not overflow in `dtype`, or in fp32 if that is
    wider.

    Args:
        dtype: the dtype of gradients and moments.
    """
    # Second moments are squares of gradients, so they are the first to overflow.
    return math.sqrt(torch.finfo(torch.promote_types(dtype, torch.float32)).max)


def largest_lr(kinds: Iterable[ParameterKind], largest: float) -> Tensor:
    """Return the largest learning rate with which no factor of an update overflows.

    Its product with each kind's factor and weight decay is within `largest`.

    Args:
        kinds: the kinds of the planes, each with a factor of the learning rate and a weight decay.
        largest: the limit of a product.

    Returns:
        The learning rate, fp64, 0-d or [N].
    """
    as_fp64 = functools.partial(torch.as_tensor, dtype=torch.float64)
    factors = (as_fp64(kind.lr) * as_fp64(kind.weight_decay).clamp_min(1.0) for kind in kinds)
    return largest / functools.reduce(torch.maximum, factors, as_fp64(1.0))


def reciprocal(count: Tensor) -> Tensor:
    """Return 1 / count in fp64, and 1 where the count is 0."""
    # Without targets the loss sum is 0 as well, and 0 / 0 would leave NaN in the planes for good.
    return 1.0 / torch.where(count == 0, 1.0, count)


@dataclass(frozen=True, slots=True)
class Update:
    """The numbers of one update.

    Tensors are 0-d and on the device; the host waits for the device only when it reads one. For an
    ensemble, tensors are [N], one number for each member, and `lr` is a tuple of N rates.

    Attributes:
        index: the number of updates before this one.
        loss: mean loss per target over the whole window, fp64.
        count: sum of the loss's counts over the window, fp64: the number of targets, or the sum of
            their weights.
        lr: learning rate of this update.
        grad_norm: Euclidean norm of the gradient before clipping, fp64.
        tokens: targets trained on since the start, including this window, int64; a window's sum of
            weights is rounded.
        skipped: updates skipped since the start, int64: the loss, gradient, count or rate was not
            finite or too large, the window had no target, or the update was a spike.
        marks: when the parts of the update began; see `monograph.step.parts`.
    """

    index: int
    loss: Tensor
    count: Tensor
    lr: float | tuple[float, ...]
    grad_norm: Tensor
    tokens: Tensor
    skipped: Tensor
    marks: PartMarks = field(default=(), repr=False, compare=False)
