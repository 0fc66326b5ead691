"""Learning-rate schedules: pure functions of the update's index, as a factor of the optimizer's learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable

Schedule = Callable[[int], float]


def constant(warmup: int = 0) -> Schedule:
    """factor(i) = min(1, (i + 1) / warmup), for i = 0, 1, ... counting updates."""

    def factor(index: int) -> float:
        return min(1.0, (index + 1) / warmup) if warmup else 1.0

    return factor


def warmup_cosine(warmup: int, total: int, final: float = 0.1) -> Schedule:
    """Linear warm-up, then half a cosine down to `final` (Loshchilov and Hutter 2017, without restarts).

    factor(i) = (i + 1) / warmup                                   for i < warmup
              = final + (1 - final) * (1 + cos(pi * p)) / 2        after it
    p         = (i - warmup) / (total - 1 - warmup), at most 1

    Args:
        warmup: updates of warm-up (0 for none).
        total: updates of the whole run; later indices keep `final`.
        final: the last factor.
    """

    def factor(index: int) -> float:
        if index < warmup:
            return (index + 1) / warmup
        progress = min(1.0, (index - warmup) / max(1, total - 1 - warmup))
        return final + (1.0 - final) * (1.0 + math.cos(math.pi * progress)) / 2.0

    return factor


def cool_down(schedule: Schedule, first: int, total: int, final: float) -> Schedule:
    """Another schedule up to update `first`, then a straight line to `final` at update `total` - 1."""

    def factor(index: int) -> float:
        if index < first:
            return schedule(index)
        progress = min(1.0, (index - first + 1) / max(1, total - first))
        return schedule(max(0, first - 1)) * (1.0 - progress) + final * progress

    return factor
