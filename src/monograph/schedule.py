"""Make learning-rate schedules.

A schedule is a pure function that gets an update's index and returns the factor of the learning rate.
`SCHEDULES` has those that the key `optim.schedule` can name.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from monograph.errors import UsageError
from monograph.ranges import NOT_NEGATIVE, between

Schedule = Callable[[int], float]


def factor_at(schedule: Schedule, index: int) -> float:
    """Return the schedule's factor for update `index`.

    Raises:
        UsageError: the factor is not a finite number of at least 0.
    """
    factor = schedule(index)
    if not NOT_NEGATIVE.holds(factor):
        raise UsageError(
            f"the schedule returned {factor!r} for update {index}: expected a factor of the learning rate, "
            f"{NOT_NEGATIVE.expected}; the weights are those of before this update"
        )
    return factor


def constant(warmup: int = 0) -> Schedule:
    """Warm up linearly, then stay at the peak.

    factor(i) = min(1, (i + 1) / warmup), where i = 0, 1, ... is the update's index

    Args:
        warmup: updates of warm-up (0 for none).
    """
    _require(warmup=warmup)

    def factor(index: int) -> float:
        return min(1.0, (index + 1) / warmup) if warmup else 1.0

    return factor


def warmup_cosine(warmup: int, total: int, final: float = 0.1) -> Schedule:
    """Warm up linearly, then decay by half a cosine to `final`.

    Loshchilov and Hutter 2017, arXiv 1608.03983, without restarts.

    factor(i) = (i + 1) / warmup                                   for i < warmup
              = final + (1 - final) * (1 + cos(pi * p)) / 2        afterwards
    p         = (i - warmup) / (total - warmup), at most 1

    Args:
        warmup: updates of warm-up (0 for none).
        total: updates of the whole run.
        final: the factor from index `total` on, where the decay ends. The last update of the run has
            the index `total - 1` and a larger factor, so it changes the weights even if `final` is 0.

    Raises:
        UsageError: a value is below 0 or not a number.
    """
    _require(warmup=warmup, total=total, final=final)
    return _decaying(
        warmup,
        decay_begin=warmup,
        total=total,
        final=final,
        remaining=lambda progress: (1.0 + math.cos(math.pi * progress)) / 2.0,
    )


def warmup_stable_decay(
    warmup: int, total: int, decay: float = 0.2, final: float = 0.0
) -> Schedule:
    """Warm up linearly, keep the peak, and decay to `final` at the end.

    Hu et al. 2024, MiniCPM, arXiv 2404.06395.

    factor(i) = (i + 1) / warmup                                   for i < warmup
              = 1                                                  for warmup <= i < begin
              = final + (1 - final) * (1 - sqrt(p))                afterwards
    length    = decay * total, rounded, at least 1
    begin     = total - length, at least warmup
    p         = (i - begin) / (total - begin), at most 1

    1 - sqrt(p) gives a lower loss than a linear decay and, over a fifth of the run, the same as
    cosine: Haegele et al. 2024, "Scaling Laws and Compute-Optimal Training Beyond Fixed Training
    Durations", arXiv 2405.18392.

    Args:
        warmup: updates of warm-up (0 for none).
        total: updates of the whole run.
        decay: share of the run for the decay. If warm-up and decay do not both fit into the run, the
            decay is shorter.
        final: the factor from index `total` on, where the decay ends.

    Raises:
        UsageError: a value is below 0 or not a number, or the decay is above 1.
    """
    _require(warmup=warmup, total=total, final=final)
    between(0, 1).require("decay", decay)
    # With a length of 0, the factor at index `total` would be 1 instead of `final`.
    decay_length = max(1, round(decay * total))
    return _decaying(
        warmup,
        decay_begin=max(warmup, total - decay_length),
        total=total,
        final=final,
        remaining=lambda progress: 1.0 - math.sqrt(progress),
    )


def _decaying(
    warmup: float,
    decay_begin: float,
    total: float,
    final: float,
    remaining: Callable[[float], float],
) -> Schedule:
    """Warm up linearly, keep the peak before update `decay_begin`, and decay to `final` at `total`.

    Args:
        warmup: updates of warm-up. The public functions ask for an int, but do not refuse a fraction,
            such as 0.05 * total.
        decay_begin: the first update of the decay.
        total: the index from which on the factor is `final`.
        final: the factor at the end.
        remaining: gets the decay's progress and returns the share of the decay that is left, both
            from 0 to 1.
    """

    def factor(index: int) -> float:
        if index < warmup:
            # At most 1, because a warm-up of 2.5 updates has the ratio 3 / 2.5 at index 2.
            return min(1.0, (index + 1) / warmup)
        # Before `decay_begin` the progress is 0, so the factor is the peak. The length would be 0 or less
        # if the warm-up is as long as the run.
        length = max(1, total - decay_begin)
        progress = min(1.0, max(0, index - decay_begin) / length)
        return final + (1.0 - final) * remaining(progress)

    return factor


def cool_down(schedule: Schedule, begin: int, total: int, final: float) -> Schedule:
    """Follow another schedule before update `begin`, then decay linearly to `final` at `total`.

    A run with a time limit uses this if the run turns out to be too slow for the planned number of
    updates.

    Args:
        schedule: the schedule to follow.
        begin: the first update of the decay.
        total: the number of updates of the run, and so the index from which on the factor is `final`.
        final: the factor at the end.
    """

    def factor(index: int) -> float:
        if index < begin:
            return schedule(index)
        # The decay is a straight line from update `begin` - 1, which still has the schedule's factor,
        # to index `total`. So update `begin` has a smaller factor already. If `begin` is 0, the factor
        # of update 0 takes the place of the one before.
        factor_before = schedule(max(0, begin - 1))
        progress = min(1.0, (index - (begin - 1)) / max(1, total - (begin - 1)))
        return factor_before * (1.0 - progress) + final * progress

    return factor


def _require(**numbers: float) -> None:
    """Refuse numbers that are negative or not finite. The message has the name of the argument."""
    for name, value in numbers.items():
        NOT_NEGATIVE.require(name, value)


class NamedSchedule(NamedTuple):
    """A schedule that `optim.schedule` can name. Its first updates are a linear warm-up.

    Attributes:
        meaning: what the learning rate does after the warm-up, in the words of pages and errors.
        make: a function of three numbers that returns the schedule of a run: the number of updates of
            the warm-up, the number of all updates, and the factor at the end.
        falls: whether it falls to the factor at the end. If not, `optim.min_lr_ratio` has no effect.
    """

    meaning: str
    make: Callable[[int, int, float], Schedule]
    falls: bool = True


# By the values of the key `optim.schedule`.
SCHEDULES = {
    "cosine": NamedSchedule("falls along half a cosine to min_lr_ratio", warmup_cosine),
    "wsd": NamedSchedule(
        "stays, and falls to min_lr_ratio over the last 20 %",
        lambda warmup, total, final: warmup_stable_decay(warmup, total, final=final),
    ),
    "constant": NamedSchedule("stays", lambda warmup, total, final: constant(warmup), falls=False),
}
