"""Temperature, fixed or moving with the entropy (llama.cpp's temp and temp-ext)."""

from __future__ import annotations

import torch
from torch import Tensor

from monograph.decode.candidates import Candidates
from monograph.decode.filters.entropy import normalised_entropy

# A smaller one divides by this: the other tokens' scores are then as good as -inf, and 0 / 0 does not come up.
SMALLEST = 2.0**-100


def temperature(candidates: Candidates, knobs: dict[str, Tensor]) -> Candidates:
    """Scores x / T, from the largest score down, so that it stays 0."""
    return _divided(candidates, knobs["temperature"])


def dynamic_temperature(candidates: Candidates, knobs: dict[str, Tensor]) -> Candidates:
    """Scores x / (a + (b - a) (H / ln n)^e) with a = max(0, T - range), b = T + range; a range of 0 leaves x / T."""
    middle_B1, range_B1 = knobs["temperature"], knobs["temperature_range"]
    low_B1 = (middle_B1 - range_B1).clamp(min=0).double()
    power_B1 = normalised_entropy(candidates).pow(knobs["temperature_exponent"].double())
    moved_B1 = low_B1 + ((middle_B1 + range_B1).double() - low_B1) * power_B1
    return _divided(candidates, torch.where(range_B1 > 0, moved_B1.float(), middle_B1))


def _divided(candidates: Candidates, temperature_B1: Tensor) -> Candidates:
    scores_BN = (candidates.scores_BN - candidates.high_B1) / temperature_B1.clamp(min=SMALLEST)
    return candidates._replace(scores_BN=scores_BN, high_B1=torch.zeros_like(candidates.high_B1))
