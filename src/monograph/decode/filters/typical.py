"""Locally typical sampling (Meister et al. 2023)."""

from __future__ import annotations

import torch
from torch import Tensor

from monograph.decode.candidates import Candidates, one_each, reach
from monograph.decode.filters.entropy import mean_surprise


def typical(candidates: Candidates, knobs: dict[str, Tensor]) -> Candidates:
    """Keep the tokens nearest to the expected surprise, |-ln p - H|, until they have the probability p; p = 1 is off.

    With y = high - x, the surprise is y + ln S and the entropy H = E[y] + ln S: the distance is |y - E[y]|. It rises on
    both sides of E[y], so what is kept is an interval of scores. The likeliest tokens may go.
    """
    p_B1, high_B1 = knobs["typical_p"], candidates.high_B1
    used_B1 = p_B1 < 1
    mean_B1, total_B1 = mean_surprise(candidates)

    def distance(scores_BN: Tensor) -> Tensor:
        return ((high_B1 - scores_BN) - mean_B1).abs()

    target_B1 = (p_B1.double() * total_B1.double()).ceil().long().clamp(min=1)
    radius_B1, held_B1 = reach(candidates, candidates.weigh, target_B1, distance)
    if "min_keep" in knobs:
        most_B1, held_too_B1 = reach(candidates, one_each, knobs["min_keep"].minimum(candidates.left()), distance)
        radius_B1, held_B1 = radius_B1.maximum(most_B1), held_B1 & held_too_B1
    kept = candidates.keep(distance(candidates.scores_BN) <= radius_B1, used_B1).flag(held_B1, used_B1)
    return kept._replace(high_B1=torch.where(used_B1, kept.scores_BN.amax(-1, keepdim=True), high_B1))
