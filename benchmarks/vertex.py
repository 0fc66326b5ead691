"""Estimate the learning rate of the smallest loss, between the rates that were tried; used by
transfer.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from monograph.errors import UsageError


class Vertex(NamedTuple):
    """The minimum of a parabola through three losses.

    Attributes:
        lr: the learning rate of the minimum.
        loss: the parabola's value there, at most the smallest measured loss.
        bracketed: whether a finite loss was measured on both sides of the best rate. If not, `lr`
            is the best rate itself, and the minimum may lie beyond it or nearer to a rate that
            diverged.
    """

    lr: float
    loss: float
    bracketed: bool

    @property
    def log2(self) -> float:
        """The log2 of the rate, its position in factor-2 steps."""
        return math.log2(self.lr)


def vertex(lrs: Sequence[float], losses: Sequence[float]) -> Vertex:
    """Return the minimum of the parabola in log2(lr) through the best rate and its two neighbours.

    With x = log2(lr), x0 the best rate, and slopes s- = (L0 - L-) / (x0 - x-) <= 0 <= s+ = (L+ -
    L0) / (x+ - x0):

        x = (x- + x0) / 2 + (x+ - x-) / 2 * -s- / (s+ - s-)

    which lies between the middles of the two intervals: less than a step from the best rate and
    never outside the range tried. It is finer than the best rate of a grid: chance decides which of
    two neighbours with nearly the same loss is a grid's best, while the vertex lies between them.

    Args:
        lrs: distinct learning rates, in any order.
        losses: the loss of each rate, the mean over seeds where there are several; nan or inf where
            training diverged.

    Raises:
        UsageError: the two differ in length, a rate is given twice or is not above 0, or no loss is
            finite.
    """
    if (
        len(lrs) != len(losses)
        or len({*lrs}) != len(lrs)
        or not all(0 < lr < math.inf for lr in lrs)
    ):
        raise UsageError(
            f"a vertex needs one loss for each learning rate, each above 0 and once: {[*lrs]}, {[*losses]}"
        )
    points = sorted(zip(lrs, losses, strict=True))
    finite = [index for index, (_, loss) in enumerate(points) if math.isfinite(loss)]
    if not finite:
        raise UsageError(
            f"no vertex: no loss is finite at any of the learning rates {[lr for lr, _ in points]}"
        )
    best = min(finite, key=lambda index: points[index][1])
    lr, loss = points[best]
    if not {best - 1, best + 1} <= {*finite}:
        return Vertex(lr, loss, False)
    three = points[best - 1 : best + 2]
    (left, x, right), (above_left, y, above_right) = (
        [math.log2(lr) for lr, _ in three],
        [value for _, value in three],
    )
    down, up = (y - above_left) / (x - left), (above_right - y) / (right - x)
    if up == down:  # all three losses are equal
        return Vertex(lr, loss, True)
    place = (left + x) / 2 - (right - left) / 2 * down / (up - down)
    curvature = (up - down) / (right - left)
    slope = (down * (right - x) + up * (x - left)) / (right - left)
    return Vertex(2.0**place, y + slope * (place - x) + curvature * (place - x) ** 2, True)
