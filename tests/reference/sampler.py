"""The sampler by its definitions, brute force, in the dtype that it is given: no sort, no threshold, one row.

Facts from the papers and programs that docs/generate.md names.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from monograph.decode.knobs import chain_of
from monograph.decode.sampling import Sampling


def probabilities(logits_V: Tensor, options: Sampling, uniform: float = 1.0) -> Tensor:
    """What a row is drawn from after temperature and truncations, [V]; `uniform` decides whether XTC acts."""
    x = logits_V
    for stage in chain_of([options]).stages:
        if stage.endswith("temperature"):
            x = x / _temperature(x, options)
        elif stage != "xtc" or uniform < options.xtc_probability:
            x = torch.where(_keeps(stage, x, options), x, -torch.inf)
    return torch.softmax(x, 0)


def _temperature(x: Tensor, options: Sampling) -> float:
    spread, left = options.temperature_range, int((x > -torch.inf).sum())
    if spread == 0 or left < 2:
        return options.temperature
    low, high = max(0.0, options.temperature - spread), options.temperature + spread
    return low + (high - low) * (float(_entropy(x)) / math.log(left)) ** options.temperature_exponent


def _entropy(x: Tensor) -> Tensor:
    p = torch.softmax(x, 0)
    return -(p * p.log())[p > 0].sum()


def _keeps(stage: str, x: Tensor, options: Sampling) -> Tensor:
    p = torch.softmax(x, 0)

    def mass_above(key: Tensor) -> Tensor:
        return torch.stack([p[key > own].sum() for own in key])

    if stage == "top_k":
        return torch.stack([(x > own).sum() < options.top_k for own in x])
    if stage == "top_p":
        return (mass_above(x) < options.top_p) | (x == x.max())
    if stage == "min_p":
        return p >= options.min_p * p.max()
    if stage == "typical":
        return mass_above(-(-p.log() - _entropy(x)).abs()) < options.typical_p
    if stage == "top_n_sigma":
        return x >= x.max() - options.top_n_sigma * x[x > -torch.inf].std(correction=0)
    reaching = p[p >= options.xtc_threshold]
    return p <= reaching.min() if len(reaching) else p >= 0
