"""Decide during training which settings of a sweep can no longer become the best, and with what
probability that is wrong.

A setting is a combination of values that a sweep tries, and each setting is trained with the same
seeds. Each run is scored twice: before, after some number of updates, and now, after twice as many. A
straight line through both scores, over the logarithm of the number of updates, predicts the score f at
the end. For setting k and seed s:

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
    """Return for each setting an upper bound of the probability that the best setting would have such
    scores.

        gap(k)  = mean over s of f(k, s) - the smallest such mean
        noise^2 = sum over the better half of the settings, and seeds, of
                  (f(k, s) - mean of f(k, ·) - mean of f(·, s) + mean of f)^2 / degrees
        degrees = (settings of the better half - 1) · (S - 1)
        result  = comparisons · P(T > gap(k) / (noise · sqrt(2 / S))),      T: Student's t, `degrees`

    If every setting whose result is at most P is stopped, the best setting is stopped with a
    probability of at most P, provided that

    - the predictions are not unfair to the best setting: what it gains on another setting in each
      further doubling of the updates is on average no more than what it gained in the last one;
    - the interaction of seed and setting is normally distributed, and the best settings have the same
      variance as the rest of the better half. What a seed adds to the scores of all settings cancels.

    The noise is computed as in an analysis of variance. So it does not depend on which settings are in
    the better half, and the statistic has exactly Student's distribution. Bonferroni's inequality covers
    the choice of the smallest mean and the number of times at which settings are stopped.

    Args:
        before_KS: the scores when half as many updates were made; lower is better.
        now_KS: the scores now.
        doublings: how many times the number of updates is still to be doubled.
        comparisons: the number of comparisons in which the best setting may lose by chance. It is the
            number of other settings times the number of times at which settings are stopped.

    Returns:
        Probabilities, at most 1. All are 1 if there are fewer than two settings or two seeds.
    """
    settings = len(now_KS)
    if settings < 2 or len(now_KS[0]) < 2:
        return [1.0] * settings
    predicted_KS = []
    for before_S, now_S in zip(before_KS, now_KS, strict=True):
        pairs = zip(before_S, now_S, strict=True)
        predicted_KS.append([now + doublings * (now - before) for before, now in pairs])
    means = [statistics.fmean(predicted_S) for predicted_S in predicted_KS]
    noise, degrees = _noise(predicted_KS, means)
    smallest = min(means)
    error = noise * math.sqrt(2 / len(now_KS[0]))
    return [_bound(mean - smallest, error, degrees, comparisons) for mean in means]


def _noise(scores_KS: Sequence[Sequence[float]], means: Sequence[float]) -> tuple[float, int]:
    """Return the standard deviation of the interaction of seed and setting, and its degrees of
    freedom.
    """
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
    """Return the bound for a setting, given its gap and the standard error of a difference of two means."""
    if gap <= 0:
        return 1.0
    if error == 0:
        return 0.0
    return min(1.0, comparisons * tail_probability(gap / error, degrees))
