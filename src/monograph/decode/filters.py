"""The stages after the penalties: each drops candidates or scales their scores.

The decorator of each function declares which request needs it, and which numbers it reads of each
row.

In the equations x is a score, high is the score of the likeliest token, S is the sum of
exp(x - high), and p = exp(x - high) / S is the probability of a token among those that are left.

Shapes: B rows, N tokens of each row.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from monograph.decode.candidates import Candidates, one_each, reach
from monograph.decode.reproducible import UNIT, log
from monograph.decode.sampling import Sampling
from monograph.decode.stages import SamplerKnob, SamplerStage, options

Apply = Callable[[Candidates, dict[str, Tensor]], Candidates]


@dataclass(frozen=True)
class Filter(SamplerStage):
    """A stage that drops candidates or scales their scores.

    Attributes:
        apply: returns the candidates that are left, given those before the stage and the numbers of
            each row, [B, 1].
        is_temperature: whether the stage scales scores; otherwise it drops candidates.
    """

    apply: Apply
    is_temperature: bool = False


# All filters by name. At temperature 0 the likeliest token is taken, so no filter is needed.
FILTERS: dict[str, Filter] = {}


def declared(
    is_on: Callable[[Sampling], bool],
    knobs: Mapping[str, SamplerKnob],
    example: Mapping[str, Any],
    is_temperature: bool = False,
) -> Callable[[Apply], Apply]:
    """Return a decorator that registers a function as the stage of its name.

    Args:
        is_on: returns whether a request that samples at random needs the stage.
        knobs: see `SamplerStage`.
        example: see `SamplerStage`.
        is_temperature: see `Filter`.
    """

    def declare(function: Apply) -> Apply:
        name = function.__name__

        def is_needed(sampling: Sampling) -> bool:
            return sampling.temperature > 0 and is_on(sampling)

        FILTERS[name] = Filter(name, is_needed, knobs, example, function, is_temperature)
        return function

    return declare


def kept_at_most(sampling: Sampling) -> int:
    """Return the k of top-k; 0: it is off.

    It is at least min_keep, since the filters after top-k read only the tokens that it keeps.
    """
    if not sampling.top_k:
        return 0
    return max(sampling.top_k, sampling.min_keep)


def _log_of(option: str) -> SamplerKnob:
    def value(sampling: Sampling) -> float:
        # A filter with the minimum log-probability -inf drops no token.
        probability = getattr(sampling, option)
        return math.log(probability) if probability else -math.inf

    return SamplerKnob(value)


def mean_surprise(candidates: Candidates) -> tuple[Tensor, Tensor]:
    """Return the mean of y = high - x over the tokens that are left, and the sum of their weights.

    The sums are of integers, so their bits do not depend on the order. The products w y fit the
    fixed point of the weights w = exp(-y), since w y <= 1/e.

    Returns:
        mean_B1: fp32.
        total_B1: int64.
    """
    weight_BN = candidates.weigh(candidates.scores_BN)
    y_BN = torch.where(weight_BN > 0, candidates.high_B1 - candidates.scores_BN, 0.0)
    moment_B1 = (weight_BN.double() * y_BN.double()).long().sum(-1, keepdim=True)
    total_B1 = weight_BN.sum(-1, keepdim=True)
    return (moment_B1.double() / total_B1.double()).float(), total_B1


def normalised_entropy(candidates: Candidates) -> Tensor:
    """Return H / ln n, where H is the entropy of the n tokens that are left; fp64 [B, 1].

    It is in [0, 1], and 0 for a single token.
    """
    mean_B1, total_B1 = mean_surprise(candidates)
    entropy_B1 = mean_B1.double() + (total_B1.double() / UNIT).log()
    left_B1 = candidates.count_left()
    normalised_B1 = entropy_B1 / left_B1.clamp(min=2).double().log()
    return torch.where(left_B1 > 1, normalised_B1, 0.0).clamp(0.0, 1.0)


def _least_weight(share_B1: Tensor, total_B1: Tensor) -> Tensor:
    """Return the smallest integer weight that has this share of the total, at least 1; int64 [B, 1]."""
    return (share_B1.double() * total_B1.double()).ceil().long().clamp(min=1)


# Temperature, fixed or dependent on the entropy (llama.cpp's temp and temp-ext).

# The smallest divisor of scores, which avoids 0 / 0. The scores of all but the likeliest tokens are
# then so low that their weights are 0.
SMALLEST = 2.0**-100


@declared(lambda s: True, options("temperature"), {"temperature": 1.0}, is_temperature=True)
def temperature(candidates: Candidates, knobs: dict[str, Tensor]) -> Candidates:
    """Divide the scores by T after subtracting the largest, so that the largest is 0."""
    return _divided(candidates, knobs["temperature"])


@declared(
    lambda s: s.temperature_range > 0,
    options("temperature", "temperature_range", "temperature_exponent"),
    {"temperature_range": 0.1},
    is_temperature=True,
)
def dynamic_temperature(candidates: Candidates, knobs: dict[str, Tensor]) -> Candidates:
    """Divide the scores by a + (b - a) (H / ln n)^e, a = max(0, T - range), b = T + range.

    With the range 0 the divisor is T.
    """
    fixed_B1 = knobs["temperature"]
    range_B1 = knobs["temperature_range"]
    low_B1 = (fixed_B1 - range_B1).clamp(min=0).double()
    high_B1 = (fixed_B1 + range_B1).double()
    power_B1 = normalised_entropy(candidates).pow(knobs["temperature_exponent"].double())
    dynamic_B1 = low_B1 + (high_B1 - low_B1) * power_B1
    return _divided(candidates, torch.where(range_B1 > 0, dynamic_B1.float(), fixed_B1))


def _divided(candidates: Candidates, temperature_B1: Tensor) -> Candidates:
    scores_BN = (candidates.scores_BN - candidates.high_B1) / temperature_B1.clamp(min=SMALLEST)
    return candidates._replace(scores_BN=scores_BN, high_B1=torch.zeros_like(candidates.high_B1))


# Top-k (Fan et al. 2018, Hierarchical Neural Story Generation).


@declared(lambda s: s.top_k > 0, {"top_k": SamplerKnob(kept_at_most, is_whole=True)}, {"top_k": 40})
def top_k(candidates: Candidates, knobs: dict[str, Tensor]) -> Candidates:
    """Keep the tokens with the k largest logits, and others that equal the k-th.

    k = 0 and k >= V are off. If fewer than k tokens are left, all of them are kept.
    """
    k_B1 = knobs["top_k"]
    vocabulary = candidates.logits_BN.shape[-1]
    used_B1 = (k_B1 > 0) & (k_B1 < vocabulary)
    likeliest = candidates.shortened()
    target_B1 = k_B1.minimum(likeliest.count_left()).clamp(min=1)
    kept = likeliest.likeliest(one_each, target_B1, used_B1)
    return kept._replace(sufficed_B1=kept.sufficed_B1 & ~kept.may_miss_tokens())


# Top-p, or nucleus (Holtzman et al. 2020, The Curious Case of Neural Text Degeneration).


@declared(lambda s: s.top_p < 1, options("top_p"), {"top_p": 0.9})
def top_p(candidates: Candidates, knobs: dict[str, Tensor]) -> Candidates:
    """Keep a token if all likelier tokens together have less than the probability p.

    p >= 1 is off. p = 0 keeps the likeliest token and others that equal it.
    """
    p_B1 = knobs["top_p"]
    return candidates.likeliest(candidates.weigh, _least_weight(p_B1, candidates.total()), p_B1 < 1)


# Min-p (Nguyen et al. 2024, Turning Up the Heat: Min-p Sampling for Creative and Coherent LLM
# Outputs).


@declared(lambda s: s.min_p > 0, {"log_min_p": _log_of("min_p")}, {"min_p": 0.1})
def min_p(candidates: Candidates, knobs: dict[str, Tensor]) -> Candidates:
    """Keep x >= high + ln p, the tokens with at least p times the likeliest token's probability.

    p = 0 is off. p = 1 keeps the likeliest token and others that equal it.
    """
    log_p_B1 = knobs["log_min_p"]
    return candidates.keep(
        candidates.scores_BN >= candidates.high_B1 + log_p_B1, log_p_B1 > -torch.inf
    )


# Top-n-sigma (Tang et al. 2024, Top-nσ: Not All Logits Are You Need; maths as in llama.cpp).


@declared(lambda s: s.top_n_sigma > 0, options("top_n_sigma"), {"top_n_sigma": 1.0})
def top_n_sigma(candidates: Candidates, knobs: dict[str, Tensor]) -> Candidates:
    """Keep x >= high - n s, where s is the population standard deviation of the scores left.

    n = 0 is off. The sums are fp64, so their order rarely changes s in fp32, and then by its last
    bit.
    """
    n_B1 = knobs["top_n_sigma"]
    left_BN = candidates.scores_BN > -torch.inf
    count_B1 = left_BN.sum(-1, keepdim=True)
    scores_BN = torch.where(left_BN, candidates.scores_BN.double(), 0.0)
    mean_B1 = scores_BN.sum(-1, keepdim=True) / count_B1
    squares_BN = torch.where(left_BN, (candidates.scores_BN.double() - mean_B1).square(), 0.0)
    sigma_B1 = (squares_BN.sum(-1, keepdim=True) / count_B1).sqrt().float()
    return candidates.keep(candidates.scores_BN >= candidates.high_B1 - n_B1 * sigma_B1, n_B1 > 0)


# Locally typical sampling (Meister et al. 2023).


@declared(lambda s: s.typical_p < 1, options("typical_p"), {"typical_p": 0.9})
def typical(candidates: Candidates, knobs: dict[str, Tensor]) -> Candidates:
    """Keep the tokens with the smallest |-ln p - H| until they have the probability `typical_p`.

    H is the entropy. `typical_p` = 1 is off. With y = high - x, the surprise -ln p is y + ln S, and
    H is E[y] + ln S, so |-ln p - H| is |y - E[y]|. This increases on both sides of E[y], so the kept
    tokens are an interval of scores. The likeliest tokens may be dropped.
    """
    p_B1 = knobs["typical_p"]
    high_B1 = candidates.high_B1
    used_B1 = p_B1 < 1
    mean_B1, total_B1 = mean_surprise(candidates)

    def distance(scores_BN: Tensor) -> Tensor:
        return ((high_B1 - scores_BN) - mean_B1).abs()

    radius_B1, sufficed_B1 = reach(
        candidates, candidates.weigh, _least_weight(p_B1, total_B1), distance
    )
    if "min_keep" in knobs:
        min_keep_B1 = knobs["min_keep"].minimum(candidates.count_left())
        min_keep_radius_B1, min_keep_sufficed_B1 = reach(
            candidates, one_each, min_keep_B1, distance
        )
        radius_B1 = radius_B1.maximum(min_keep_radius_B1)
        sufficed_B1 = sufficed_B1 & min_keep_sufficed_B1
    kept = candidates.keep(distance(candidates.scores_BN) <= radius_B1, used_B1)
    kept = kept.combine_sufficed(sufficed_B1, used_B1)
    return kept._replace(
        high_B1=torch.where(used_B1, kept.scores_BN.amax(-1, keepdim=True), high_B1)
    )


# Filters that keep tokens of a minimum probability, which may depend on the row's distribution. The
# likeliest token is always kept.
#
# Top-a; the epsilon and eta cut-offs (Hewitt et al. 2022, Truncation Sampling as Language Model
# Desmoothing); the cut of mirostat 2 (Basu et al. 2021, Mirostat: A Neural Text Decoding Algorithm
# that Directly Controls Perplexity; maths as in llama.cpp).


@declared(lambda s: s.top_a > 0, {"log_top_a": _log_of("top_a")}, {"top_a": 0.1})
def top_a(candidates: Candidates, knobs: dict[str, Tensor]) -> Candidates:
    """Keep p >= a q^2, where q is the likeliest token's probability; a = 0 is off (ln a = -inf)."""
    log_a_B1 = knobs["log_top_a"]
    log_total_B1 = log_total(candidates)
    return _at_least(candidates, log_a_B1 - 2 * log_total_B1, log_total_B1, log_a_B1 > -torch.inf)


@declared(
    lambda s: s.epsilon_cutoff > 0,
    {"log_epsilon": _log_of("epsilon_cutoff")},
    {"epsilon_cutoff": 0.1},
)
def epsilon(candidates: Candidates, knobs: dict[str, Tensor]) -> Candidates:
    """Keep p >= epsilon; 0 is off (ln epsilon = -inf)."""
    log_epsilon_B1 = knobs["log_epsilon"]
    return _at_least(candidates, log_epsilon_B1, log_total(candidates), log_epsilon_B1 > -torch.inf)


@declared(lambda s: s.eta_cutoff > 0, {"log_eta": _log_of("eta_cutoff")}, {"eta_cutoff": 0.1})
def eta(candidates: Candidates, knobs: dict[str, Tensor]) -> Candidates:
    """Keep p >= min(epsilon, sqrt(epsilon) exp(-H)), where H is the entropy; epsilon = 0 is off."""
    log_epsilon_B1 = knobs["log_eta"]
    log_total_B1 = log_total(candidates)
    mean_B1, _ = mean_surprise(candidates)
    entropy_B1 = mean_B1 + log_total_B1
    log_min_B1 = torch.minimum(log_epsilon_B1, 0.5 * log_epsilon_B1 - entropy_B1)
    return _at_least(candidates, log_min_B1, log_total_B1, log_epsilon_B1 > -torch.inf)


@declared(
    lambda s: s.mirostat_tau > 0, options("mirostat_tau", "mirostat_eta"), {"mirostat_tau": 1.0}
)
def mirostat(candidates: Candidates, knobs: dict[str, Tensor]) -> Candidates:
    """Keep -log2 p <= mu, where mu is `State.mu_B` of the row; `mirostat_tau` = 0 is off."""
    return _at_least(
        candidates, -math.log(2) * knobs["mu"], log_total(candidates), knobs["mirostat_tau"] > 0
    )


def log_total(candidates: Candidates) -> Tensor:
    """Return ln S = -ln of the likeliest token's probability; fp32 [B, 1]."""
    return log((candidates.total().double() / UNIT).float())


def _at_least(
    candidates: Candidates, log_min_B1: Tensor, log_total_B1: Tensor, used_B1: Tensor
) -> Candidates:
    """Keep ln p >= log_min, and always the likeliest token."""
    min_score_B1 = candidates.high_B1 + (log_min_B1 + log_total_B1).clamp(max=0)
    return candidates.keep(candidates.scores_BN >= min_score_B1, used_B1)


# XTC, "exclude top choices" (P. E. Weidmann 2024, oobabooga/text-generation-webui#6335; maths as in
# llama.cpp).


@declared(
    lambda s: s.xtc_probability > 0 and s.xtc_threshold <= 0.5,
    options("xtc_probability", "xtc_threshold"),
    {"xtc_probability": 0.5},
)
def xtc(candidates: Candidates, knobs: dict[str, Tensor]) -> Candidates:
    """Drop the likeliest tokens, with the probability `xtc_probability`.

    Of the tokens whose probability reaches the threshold, only the least likely one is kept, and
    others that equal it. Tokens below the threshold are kept. A threshold above 0.5 is off, since
    two tokens cannot reach it. "xtc_uniform" is a function of the row's seed and position,
    independent of its noise (`reproducible.row_uniform`).
    """
    used_B1 = (knobs["xtc_uniform"] < knobs["xtc_probability"]) & (knobs["xtc_threshold"] <= 0.5)
    weight_BN = candidates.weigh(candidates.scores_BN)
    min_weight_B1 = _least_weight(knobs["xtc_threshold"], weight_BN.sum(-1, keepdim=True))
    reaching_BN = torch.where(weight_BN >= min_weight_B1, candidates.scores_BN, torch.inf)
    high_B1 = reaching_BN.amin(-1, keepdim=True)
    kept_BN = candidates.scores_BN <= high_B1
    if "min_keep" in knobs:
        left_BN = kept_BN & (candidates.scores_BN > -torch.inf)
        used_B1 &= left_BN.sum(-1, keepdim=True) >= knobs["min_keep"]
    kept = candidates.keep(kept_BN, used_B1)
    return kept._replace(
        high_B1=torch.where(used_B1, candidates.high_B1.minimum(high_B1), candidates.high_B1)
    )
