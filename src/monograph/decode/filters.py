"""The temperature and the filters, which are the stages after the penalties.

Each filter drops candidates, and the temperature scales their scores. The decorator of each function
declares which requests need the stage, and which numbers of a row, its knobs, the stage reads.

In the equations x is a score, m is the score of the likeliest token, S is the sum of exp(x - m), and
p = exp(x - m) / S is the probability of a token among those that are left.

Shapes: B rows, N tokens of each row; 1 an axis of length 1.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from monograph.decode.candidates import Candidates, find_radius, unit_weights
from monograph.decode.reproducible import UNIT, log
from monograph.decode.sampling import Sampling
from monograph.decode.stages import SamplerKnob, SamplerStage, options

ApplyStage = Callable[[Candidates, dict[str, Tensor]], Candidates]


@dataclass(frozen=True)
class Filter(SamplerStage):
    """A stage that drops candidates or scales their scores.

    Attributes:
        apply: returns the candidates that are left, given those before the stage and the knobs by
            name, [B, 1] each.
        is_temperature: whether the stage scales scores; otherwise it drops candidates.
    """

    apply: ApplyStage
    is_temperature: bool = False


# All filters by name; `sampler_stage` adds them.
FILTERS: dict[str, Filter] = {}


def sampler_stage(
    is_on: Callable[[Sampling], bool],
    knobs: Mapping[str, SamplerKnob],
    example: Mapping[str, Any],
    is_temperature: bool = False,
) -> Callable[[ApplyStage], ApplyStage]:
    """Return a decorator that adds a function to FILTERS, as the stage of the function's name.

    Args:
        is_on: returns whether a request needs the stage, unless its temperature is 0. At temperature
            0 the likeliest token is taken, so no filter is needed.
        knobs: see `SamplerStage`.
        example: see `SamplerStage`.
        is_temperature: see `Filter`.
    """

    def register(function: ApplyStage) -> ApplyStage:
        name = function.__name__

        def is_needed(sampling: Sampling) -> bool:
            return sampling.temperature > 0 and is_on(sampling)

        FILTERS[name] = Filter(name, is_needed, knobs, example, function, is_temperature)
        return function

    return register


def top_k_of(sampling: Sampling) -> int:
    """Return the number of tokens that top-k keeps for a request; 0: top-k is off.

    It is at least min_keep, since tokens that top-k drops may no longer be there for min_keep to restore.
    """
    if not sampling.top_k:
        return 0
    return max(sampling.top_k, sampling.min_keep)


def _log_of(option: str) -> SamplerKnob:
    """Return a knob whose value is the logarithm of an option that is a probability."""

    def value(sampling: Sampling) -> float:
        # A filter with the minimum log-probability -inf drops no token.
        probability = getattr(sampling, option)
        return math.log(probability) if probability else -math.inf

    return SamplerKnob(value)


def mean_relative_surprise(candidates: Candidates) -> tuple[Tensor, Tensor]:
    """Return the mean of y = m - x, and the sum of the weights.

    y is a token's surprise -ln p minus that of the likeliest token, which is ln S. The mean over the
    tokens that are left is sum(w y) / sum(w), with the weights w = exp(-y). Both sums are of integers, w
    and w y in fixed point, so their bits do not depend on the order. They do not overflow, since
    w y <= 1/e.

    Returns:
        mean_B1: fp32.
        total_B1: int64.
    """
    weight_BN = candidates.weigh(candidates.scores_BN)
    y_BN = torch.where(weight_BN > 0, candidates.max_score_B1 - candidates.scores_BN, 0.0)
    weighted_y_BN = (weight_BN.double() * y_BN.double()).long()
    sum_B1 = weighted_y_BN.sum(-1, keepdim=True)
    total_B1 = weight_BN.sum(-1, keepdim=True)
    return (sum_B1.double() / total_B1.double()).float(), total_B1


def normalised_entropy(candidates: Candidates) -> Tensor:
    """Return H / ln n, where H is the entropy of the n tokens that are left; fp64 [B, 1].

    It is in [0, 1], and 0 for a single token.
    """
    mean_B1, total_B1 = mean_relative_surprise(candidates)
    # H is the mean of -ln p = y + ln S.
    entropy_B1 = mean_B1.double() + (total_B1.double() / UNIT).log()
    left_B1 = candidates.count_left()
    normalised_B1 = entropy_B1 / left_B1.clamp(min=2).double().log()
    return torch.where(left_B1 > 1, normalised_B1, 0.0).clamp(0.0, 1.0)


def _weight_of_share(share_B1: Tensor, total_B1: Tensor) -> Tensor:
    """Return share * total as a fixed-point weight, rounded up and at least 1; int64 [B, 1]."""
    return (share_B1.double() * total_B1.double()).ceil().long().clamp(min=1)


# Temperature, fixed or dependent on the entropy (llama.cpp's temp and temp-ext).

# The smallest divisor of scores, which avoids 0 / 0. With it, the weights of all but the likeliest
# tokens are 0.
MIN_TEMPERATURE = 2.0**-100


@sampler_stage(lambda s: True, options("temperature"), {"temperature": 1.0}, is_temperature=True)
def temperature(candidates: Candidates, knobs: dict[str, Tensor]) -> Candidates:
    """Divide the scores by T after subtracting the largest, so that the largest is 0."""
    return _divided(candidates, knobs["temperature"])


@sampler_stage(
    lambda s: s.temperature_range > 0,
    options("temperature", "temperature_range", "temperature_exponent"),
    {"temperature_range": 0.1},
    is_temperature=True,
)
def dynamic_temperature(candidates: Candidates, knobs: dict[str, Tensor]) -> Candidates:
    """Divide the scores by a + (b - a) (H / ln n)^e, a = max(0, T - range), b = T + range.

    H / ln n is the normalised entropy, and e is "temperature_exponent". With the range 0 the divisor
    is T.
    """
    fixed_B1 = knobs["temperature"]
    range_B1 = knobs["temperature_range"]
    min_B1 = (fixed_B1 - range_B1).clamp(min=0).double()
    max_B1 = (fixed_B1 + range_B1).double()
    power_B1 = normalised_entropy(candidates).pow(knobs["temperature_exponent"].double())
    dynamic_B1 = min_B1 + (max_B1 - min_B1) * power_B1
    return _divided(candidates, torch.where(range_B1 > 0, dynamic_B1.float(), fixed_B1))


def _divided(candidates: Candidates, temperature_B1: Tensor) -> Candidates:
    """Subtract the largest score, and divide by the temperature."""
    max_score_B1 = candidates.max_score_B1
    divisor_B1 = temperature_B1.clamp(min=MIN_TEMPERATURE)
    return candidates._replace(
        scores_BN=(candidates.scores_BN - max_score_B1) / divisor_B1,
        max_score_B1=torch.zeros_like(max_score_B1),
    )


# Top-k (Fan et al. 2018, Hierarchical Neural Story Generation).


@sampler_stage(
    lambda s: s.top_k > 0, {"top_k": SamplerKnob(top_k_of, is_whole=True)}, {"top_k": 40}
)
def top_k(candidates: Candidates, knobs: dict[str, Tensor]) -> Candidates:
    """Keep the tokens with the k largest logits, and others that equal the k-th.

    k = 0 and k >= V are off. If fewer than k tokens are left, all of them are kept.
    """
    k_B1 = knobs["top_k"]
    vocabulary = candidates.logits_BN.shape[-1]
    is_used_B1 = (k_B1 > 0) & (k_B1 < vocabulary)
    shorter = candidates.shorten()
    target_B1 = k_B1.minimum(shorter.count_left()).clamp(min=1)
    kept = shorter.keep_likeliest(unit_weights, target_B1, is_used_B1)
    return kept._replace(sufficed_B1=kept.sufficed_B1 & ~kept.may_miss_tokens())


# Top-p, or nucleus (Holtzman et al. 2020, The Curious Case of Neural Text Degeneration).


@sampler_stage(lambda s: s.top_p < 1, options("top_p"), {"top_p": 0.9})
def top_p(candidates: Candidates, knobs: dict[str, Tensor]) -> Candidates:
    """Keep a token if all likelier tokens together have less than the probability p.

    p >= 1 is off. p = 0 keeps the likeliest token and others that equal it.
    """
    p_B1 = knobs["top_p"]
    target_B1 = _weight_of_share(p_B1, candidates.total_weight())
    return candidates.keep_likeliest(candidates.weigh, target_B1, p_B1 < 1)


# Min-p (Nguyen et al. 2024, Turning Up the Heat: Min-p Sampling for Creative and Coherent LLM
# Outputs).


@sampler_stage(lambda s: s.min_p > 0, {"log_min_p": _log_of("min_p")}, {"min_p": 0.1})
def min_p(candidates: Candidates, knobs: dict[str, Tensor]) -> Candidates:
    """Keep x >= m + ln p, the tokens with at least p times the likeliest token's probability.

    p = 0 is off. p = 1 keeps the likeliest token and others that equal it.
    """
    log_p_B1 = knobs["log_min_p"]
    return candidates.keep(
        candidates.scores_BN >= candidates.max_score_B1 + log_p_B1, log_p_B1 > -torch.inf
    )


# Top-n-sigma (Tang et al. 2024, Top-nσ: Not All Logits Are You Need; maths as in llama.cpp).


@sampler_stage(lambda s: s.top_n_sigma > 0, options("top_n_sigma"), {"top_n_sigma": 1.0})
def top_n_sigma(candidates: Candidates, knobs: dict[str, Tensor]) -> Candidates:
    """Keep x >= m - n s, where s is the population standard deviation of the remaining scores.

    n = 0 is off. The sums are in fp64, so the order in which they are added rarely changes s in fp32, and
    then only its last bit.
    """
    n_B1 = knobs["top_n_sigma"]
    is_left_BN = candidates.scores_BN > -torch.inf
    count_B1 = is_left_BN.sum(-1, keepdim=True)
    scores_BN = torch.where(is_left_BN, candidates.scores_BN.double(), 0.0)
    mean_B1 = scores_BN.sum(-1, keepdim=True) / count_B1
    squares_BN = torch.where(is_left_BN, (candidates.scores_BN.double() - mean_B1).square(), 0.0)
    sigma_B1 = (squares_BN.sum(-1, keepdim=True) / count_B1).sqrt().float()
    return candidates.keep(
        candidates.scores_BN >= candidates.max_score_B1 - n_B1 * sigma_B1, n_B1 > 0
    )


# Locally typical sampling (Meister et al. 2023).


@sampler_stage(lambda s: s.typical_p < 1, options("typical_p"), {"typical_p": 0.9})
def typical(candidates: Candidates, knobs: dict[str, Tensor]) -> Candidates:
    """Keep the tokens with the smallest |-ln p - H| until they have the probability `typical_p`.

    H is the entropy, the mean of the surprise -ln p. `typical_p` = 1 is off. With y = m - x, the
    surprise is y + ln S, and H is E[y] + ln S, so the distance |-ln p - H| is |y - E[y]|. This
    increases on both sides of E[y], so the kept tokens are an interval of scores. The likeliest
    tokens may be dropped.
    """
    p_B1 = knobs["typical_p"]
    max_score_B1 = candidates.max_score_B1
    is_used_B1 = p_B1 < 1
    mean_B1, total_B1 = mean_relative_surprise(candidates)

    def distance(scores_BN: Tensor) -> Tensor:
        return ((max_score_B1 - scores_BN) - mean_B1).abs()

    target_B1 = _weight_of_share(p_B1, total_B1)
    radius_B1, sufficed_B1 = find_radius(candidates, candidates.weigh, target_B1, distance)
    if "min_keep" in knobs:
        min_keep_B1 = knobs["min_keep"].minimum(candidates.count_left())
        min_keep_radius_B1, min_keep_sufficed_B1 = find_radius(
            candidates, unit_weights, min_keep_B1, distance
        )
        radius_B1 = radius_B1.maximum(min_keep_radius_B1)
        sufficed_B1 = sufficed_B1 & min_keep_sufficed_B1
    kept = candidates.keep(distance(candidates.scores_BN) <= radius_B1, is_used_B1)
    kept = kept.combine_sufficed(sufficed_B1, is_used_B1)
    kept_max_score_B1 = kept.scores_BN.amax(-1, keepdim=True)
    return kept._replace(max_score_B1=torch.where(is_used_B1, kept_max_score_B1, max_score_B1))


# Filters that keep tokens of a minimum probability, which may depend on the row's distribution. The
# likeliest token is always kept.
#
# Top-a; the epsilon and eta cut-offs (Hewitt et al. 2022, Truncation Sampling as Language Model
# Desmoothing); the cut of mirostat 2 (Basu et al. 2021, Mirostat: A Neural Text Decoding Algorithm
# that Directly Controls Perplexity; maths as in llama.cpp).


@sampler_stage(lambda s: s.top_a > 0, {"log_top_a": _log_of("top_a")}, {"top_a": 0.1})
def top_a(candidates: Candidates, knobs: dict[str, Tensor]) -> Candidates:
    """Keep p >= a q^2, where q is the likeliest token's probability; a = 0 is off (ln a = -inf)."""
    log_a_B1 = knobs["log_top_a"]
    log_total_B1 = log_total(candidates)
    log_min_B1 = log_a_B1 - 2 * log_total_B1  # ln q = -ln S
    return _keep_at_least(candidates, log_min_B1, log_total_B1, log_a_B1 > -torch.inf)


@sampler_stage(
    lambda s: s.epsilon_cutoff > 0,
    {"log_epsilon": _log_of("epsilon_cutoff")},
    {"epsilon_cutoff": 0.1},
)
def epsilon(candidates: Candidates, knobs: dict[str, Tensor]) -> Candidates:
    """Keep p >= epsilon; 0 is off (ln epsilon = -inf)."""
    log_epsilon_B1 = knobs["log_epsilon"]
    is_used_B1 = log_epsilon_B1 > -torch.inf
    return _keep_at_least(candidates, log_epsilon_B1, log_total(candidates), is_used_B1)


@sampler_stage(lambda s: s.eta_cutoff > 0, {"log_eta": _log_of("eta_cutoff")}, {"eta_cutoff": 0.1})
def eta(candidates: Candidates, knobs: dict[str, Tensor]) -> Candidates:
    """Keep p >= min(epsilon, sqrt(epsilon) exp(-H)), where H is the entropy; epsilon = 0 is off."""
    log_epsilon_B1 = knobs["log_eta"]
    log_total_B1 = log_total(candidates)
    mean_B1, _ = mean_relative_surprise(candidates)
    entropy_B1 = mean_B1 + log_total_B1
    log_min_B1 = torch.minimum(log_epsilon_B1, 0.5 * log_epsilon_B1 - entropy_B1)
    return _keep_at_least(candidates, log_min_B1, log_total_B1, log_epsilon_B1 > -torch.inf)


@sampler_stage(
    lambda s: s.mirostat_tau > 0, options("mirostat_tau", "mirostat_eta"), {"mirostat_tau": 1.0}
)
def mirostat(candidates: Candidates, knobs: dict[str, Tensor]) -> Candidates:
    """Keep -log2 p <= mu, where mu is `State.mu_B` of the row; `mirostat_tau` = 0 is off."""
    log_min_B1 = -math.log(2) * knobs["mu"]
    return _keep_at_least(candidates, log_min_B1, log_total(candidates), knobs["mirostat_tau"] > 0)


def log_total(candidates: Candidates) -> Tensor:
    """Return ln S = -ln of the likeliest token's probability; fp32 [B, 1]."""
    return log((candidates.total_weight().double() / UNIT).float())


def _keep_at_least(
    candidates: Candidates, log_min_B1: Tensor, log_total_B1: Tensor, is_used_B1: Tensor
) -> Candidates:
    """Keep ln p >= log_min, and always the likeliest token, where ln p = x - m - log_total."""
    min_score_B1 = candidates.max_score_B1 + (log_min_B1 + log_total_B1).clamp(max=0)
    return candidates.keep(candidates.scores_BN >= min_score_B1, is_used_B1)


# XTC, "exclude top choices" (P. E. Weidmann 2024, oobabooga/text-generation-webui#6335; maths as in
# llama.cpp).


@sampler_stage(
    lambda s: s.xtc_probability > 0 and s.xtc_threshold <= 0.5,
    options("xtc_probability", "xtc_threshold"),
    {"xtc_probability": 0.5},
)
def xtc(candidates: Candidates, knobs: dict[str, Tensor]) -> Candidates:
    """With the probability `xtc_probability`, drop all likely tokens but the least likely of them.

    A token is likely if its probability is at least the threshold. Other tokens are kept, and so are
    likely ones that equal the least likely of them. A threshold above 0.5 is off, since two tokens
    cannot reach it. "xtc_uniform" is a function of the row's seed and position, independent of its
    noise (`reproducible.row_uniform`).
    """
    is_used_B1 = (knobs["xtc_uniform"] < knobs["xtc_probability"]) & (knobs["xtc_threshold"] <= 0.5)
    weight_BN = candidates.weigh(candidates.scores_BN)
    min_weight_B1 = _weight_of_share(knobs["xtc_threshold"], weight_BN.sum(-1, keepdim=True))
    likely_scores_BN = torch.where(weight_BN >= min_weight_B1, candidates.scores_BN, torch.inf)
    # If no token is likely, this is inf, and all tokens are kept.
    least_likely_score_B1 = likely_scores_BN.amin(-1, keepdim=True)
    is_kept_BN = candidates.scores_BN <= least_likely_score_B1
    if "min_keep" in knobs:
        is_left_BN = is_kept_BN & (candidates.scores_BN > -torch.inf)
        is_used_B1 &= is_left_BN.sum(-1, keepdim=True) >= knobs["min_keep"]
    kept = candidates.keep(is_kept_BN, is_used_B1)
    max_score_B1 = candidates.max_score_B1
    kept_max_score_B1 = max_score_B1.minimum(least_likely_score_B1)
    return kept._replace(max_score_B1=torch.where(is_used_B1, kept_max_score_B1, max_score_B1))
