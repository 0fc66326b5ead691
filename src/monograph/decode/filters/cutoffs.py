"""Filters that keep the tokens of at least some probability, which each row's distribution moves; the likeliest stays.

Top-a; the epsilon and eta cut-offs (Hewitt et al. 2022, Truncation Sampling as Language Model Desmoothing); the cut of
mirostat 2 (Basu et al. 2021, Mirostat: A Neural Text Decoding Algorithm that Directly Controls Perplexity; maths as in
llama.cpp).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from monograph.decode.candidates import Candidates
from monograph.decode.elementary import UNIT, log
from monograph.decode.filters.entropy import mean_surprise


def top_a(candidates: Candidates, knobs: dict[str, Tensor]) -> Candidates:
    """Keep p >= a q^2, q the likeliest token's probability; a = 0 is off (ln a = -inf)."""
    total_B1 = log_total(candidates)
    return _at_least(candidates, knobs["log_top_a"] - 2 * total_B1, total_B1, knobs["log_top_a"] > -torch.inf)


def epsilon(candidates: Candidates, knobs: dict[str, Tensor]) -> Candidates:
    """Keep p >= epsilon; 0 is off (ln epsilon = -inf)."""
    log_epsilon_B1 = knobs["log_epsilon"]
    return _at_least(candidates, log_epsilon_B1, log_total(candidates), log_epsilon_B1 > -torch.inf)


def eta(candidates: Candidates, knobs: dict[str, Tensor]) -> Candidates:
    """Keep p >= min(epsilon, sqrt(epsilon) exp(-H)), H the entropy of what is left; 0 is off."""
    log_epsilon_B1, total_B1 = knobs["log_eta"], log_total(candidates)
    entropy_B1 = mean_surprise(candidates)[0] + total_B1
    log_least_B1 = torch.minimum(log_epsilon_B1, 0.5 * log_epsilon_B1 - entropy_B1)
    return _at_least(candidates, log_least_B1, total_B1, log_epsilon_B1 > -torch.inf)


def mirostat(candidates: Candidates, knobs: dict[str, Tensor]) -> Candidates:
    """Keep a surprise -log2 p of at most mu, the row's own number (`State.mu_B`); a target of 0 is off."""
    return _at_least(candidates, -math.log(2) * knobs["mu"], log_total(candidates), knobs["mirostat_tau"] > 0)


def log_total(candidates: Candidates) -> Tensor:
    """The natural logarithm of the sum of exp(score - high), fp32 [B, 1]: minus that of the likeliest's probability."""
    return log((candidates.total().double() / UNIT).float())


def _at_least(candidates: Candidates, log_least_B1: Tensor, log_total_B1: Tensor, used_B1: Tensor) -> Candidates:
    least_B1 = candidates.high_B1 + (log_least_B1 + log_total_B1).clamp(max=0)
    return candidates.keep(candidates.scores_BN >= least_B1, used_B1)
