"""Where a loss is smallest, between the learning rates that were tried."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from monograph.errors import UsageError


class Vertex(NamedTuple):
    """The minimum of a parabola.

    Attributes:
        lr: where it is.
        loss: what the parabola has there; at most the smallest loss that was measured.
        bracketed: whether a finite loss was measured on either side of the best rate. If not, `lr` is that rate itself
            and the minimum may lie beyond it, or nearer to a rate that diverged.
    """

    lr: float
    loss: float
    bracketed: bool

    @property
    def log2(self) -> float:
        """Its place in factor-2 steps."""
        return math.log2(self.lr)


def vertex(lrs: Sequence[float], losses: Sequence[float]) -> Vertex:
    """The minimum of the parabola in log2(lr) through the best rate and its two neighbours.

    With x = log2(lr), best point 0 and slopes s- = (L0 - L-) / (x0 - x-), s+ = (L+ - L0) / (x+ - x0), s- <= 0 <= s+:

        x = (x- + x0) / 2 + (x+ - x-) / 2 * -s- / (s+ - s-)

    which lies between the middles of the two intervals: less than a step away from the best rate, never outside of what
    was tried. It resolves what the best of a grid cannot: of two neighbours with nearly the same loss, a grid's best is
    a coin flip, the vertex lies between them.

    Args:
        lrs: learning rates, in any order, each once.
        losses: of each, the mean over seeds where there are several; nan or inf where training diverged.

    Raises:
        UsageError: the two differ in length, a rate is given twice or is not above 0, or no loss is finite.
    """
    if len(lrs) != len(losses) or len({*lrs}) != len(lrs) or not all(0 < lr < math.inf for lr in lrs):
        raise UsageError(
            f"a vertex needs one loss for each learning rate, each above 0 and once: {[*lrs]}, {[*losses]}"
        )
    points = sorted(zip(lrs, losses, strict=True))
    finite = [index for index, (_, loss) in enumerate(points) if math.isfinite(loss)]
    if not finite:
        raise UsageError(f"no vertex: no loss is finite at any of the learning rates {[lr for lr, _ in points]}")
    best = min(finite, key=lambda index: points[index][1])
    lr, loss = points[best]
    if not {best - 1, best + 1} <= {*finite}:
        return Vertex(lr, loss, False)
    three = points[best - 1 : best + 2]
    (left, x, right), (above_left, y, above_right) = [math.log2(lr) for lr, _ in three], [each for _, each in three]
    down, up = (y - above_left) / (x - left), (above_right - y) / (right - x)
    if up == down:  # all three the same
        return Vertex(lr, loss, True)
    place = (left + x) / 2 - (right - left) / 2 * down / (up - down)
    curvature = (up - down) / (right - left)
    slope = (down * (right - x) + up * (x - left)) / (right - left)
    return Vertex(2.0**place, y + slope * (place - x) + curvature * (place - x) ** 2, True)
