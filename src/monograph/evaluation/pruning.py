"""Decide during training which settings cannot become the best any more, and with what error.

A setting is a combination of values that a sweep tries, and each setting is trained with the same
seeds. The settings are looked at when some share of the training is done, and when half of that share
was done. The score of a setting at the end is predicted by a straight line through both looks, over
the logarithm of the number of updates:

    f(k, s) = now(k, s) + doublings · (now(k, s) - before(k, s))

Shapes: K settings, S seeds.
"""

import math
import statistics
from collections.abc import Sequence

from monograph.evaluation.significance import tail_probability


def win_probabilities(
    before_KS: Sequence[Sequence[float]],
    now_KS: Sequence[Sequence[float]],
    doublings: float,
    comparisons: int,
) -> list[float]:
    """Return for each setting a bound of the probability that such scores come of the best setting.

        gap(k)  = mean over s of f(k, s) - the smallest such mean
        noise^2 = sum over the better half of the settings, and seeds, of
                  (f(k, s) - mean of f(k, ·) - mean of f(·, s) + mean of f)^2 / degrees
        degrees = (settings of the better half - 1) · (S - 1)
        result  = comparisons · P(T > gap(k) / (noise · sqrt(2 / S))),      T: Student's t, `degrees`

    If every setting whose result is at most P is stopped, the best setting is stopped with a
    probability of at most P, provided that

    - until the end, the best setting gains on no other less than f says on average: it catches up no
      faster in each further doubling of the updates than it did in the last one;
    - what seed and setting add to a score together is normal, and as large for the best settings as
      for those of the better half. What a seed adds to the scores of all settings cancels.

    The noise is that of an analysis of variance, so it does not depend on which settings are in the
    better half, and the statistic has exactly Student's distribution. Bonferroni's inequality covers
    the choice of the smallest mean and the number of looks.

    Args:
        before_KS: the scores when half as many updates were made; lower is better.
        now_KS: the scores now.
        doublings: how many times the number of updates is still to be doubled.
        comparisons: the number of comparisons in which the best setting may lose by chance: the
            other settings, times the number of looks after which settings are stopped.

    Returns:
        Probabilities, at most 1. All are 1 if there are fewer than two settings or two seeds.
    """
    settings = len(now_KS)
    if settings < 2 or len(now_KS[0]) < 2:
        return [1.0] * settings
    predicted_KS = [
        [last + doublings * (last - first) for first, last in zip(before, now, strict=True)]
        for before, now in zip(before_KS, now_KS, strict=True)
    ]
    means = [statistics.fmean(scores) for scores in predicted_KS]
    noise, degrees = _noise(predicted_KS, means)
    smallest = min(means)
    error = noise * math.sqrt(2 / len(now_KS[0]))
    return [_bound(mean - smallest, error, degrees, comparisons) for mean in means]


def _noise(scores_KS: Sequence[Sequence[float]], means: Sequence[float]) -> tuple[float, int]:
    """Return the standard deviation of what seed and setting add together, and its degrees of freedom."""
    by_mean = sorted(range(len(means)), key=lambda setting: means[setting])
    better = by_mean[: max(2, math.ceil(len(means) / 2))]
    seeds = len(scores_KS[0])
    seed_means = [statistics.fmean(scores_KS[k][s] for k in better) for s in range(seeds)]
    overall = statistics.fmean(seed_means)
    squares = sum(
        (scores_KS[k][s] - means[k] - seed_means[s] + overall) ** 2
        for k in better
        for s in range(seeds)
    )
    degrees = (len(better) - 1) * (seeds - 1)
    return math.sqrt(squares / degrees), degrees


def _bound(gap: float, error: float, degrees: int, comparisons: int) -> float:
    if gap <= 0:
        return 1.0
    if error == 0:
        return 0.0
    return min(1.0, comparisons * tail_probability(gap / error, degrees))
