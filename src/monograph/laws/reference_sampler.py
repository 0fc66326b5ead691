"""The reference of law 7, for one row: the sampler, computed from its definitions by brute force.

It computes in the dtype of the logits, and neither sorts nor searches. The definitions are those of
the papers and programs that docs/generate.md names.

In these functions x is the row's logits [V], where V is the size of the vocabulary. The temperature
divides them, and a filter sets the logits of the tokens that it removes to -inf.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from monograph.decode.filters import FILTERS
from monograph.decode.knobs import chain_of
from monograph.decode.sampling import Sampling

# If changing a threshold by this share changes whether a token is kept, rounding may decide about the token.
NUDGE = 1e-6


def probabilities(
    logits_V: Tensor, options: Sampling, uniform: float = 1.0, mu: float | None = None
) -> Tensor:
    """Return the probabilities of a row's draw, after temperature and filters, [V].

    Args:
        logits_V: the logits, in any floating dtype.
        options: the sampler's options.
        uniform: the row's random number that decides whether the filter XTC acts.
        mu: the surprise in bits that mirostat allows; None: that of a text's first token.
    """
    x = logits_V
    if mu is None:
        mu = 2 * options.mirostat_tau
    if options.temperature == 0:
        return torch.nn.functional.one_hot(x.argmax(), len(x)).to(x.dtype)
    for stage in chain_of([options]).stages:
        if stage.endswith("temperature"):
            x = x / _temperature(x, options)
        elif stage in FILTERS:
            acts = stage != "xtc" or uniform < options.xtc_probability
            if acts:
                x = torch.where(_kept_by(stage, x, options, mu), x, -torch.inf)
    return torch.softmax(x, 0)


def _temperature(x: Tensor, options: Sampling) -> float:
    """Return the temperature, which with a range grows with the entropy of the tokens that are left."""
    spread = options.temperature_range
    tokens_left = int((x > -torch.inf).sum())
    if spread == 0 or tokens_left < 2:
        return options.temperature
    low = max(0.0, options.temperature - spread)
    high = options.temperature + spread
    # The share of the largest entropy that this number of tokens can have.
    entropy_share = float(_entropy(x)) / math.log(tokens_left)
    return low + (high - low) * float(entropy_share**options.temperature_exponent)


def _entropy(x: Tensor) -> Tensor:
    """Return the entropy of softmax(x), a scalar."""
    p = torch.softmax(x, 0)
    return -(p * p.log())[p > 0].sum()


def _surprise_deviation(x: Tensor) -> Tensor:
    """Return how far each token's surprise -ln p is from the expected surprise, [V]."""
    return (-torch.log_softmax(x, 0) - _entropy(x)).abs()


def _kept_by(stage: str, x: Tensor, options: Sampling, mu: float) -> Tensor:
    """Return which tokens a stage keeps, bool [V]: at least `min_keep` of those that are left.

    If XTC would keep fewer, it removes none. If another stage would keep fewer, it keeps the first
    `min_keep` tokens in its own order.
    """
    kept = _kept_by_definition(stage, x, options, mu)
    is_left = x > -torch.inf
    kept_count = int((kept & is_left).sum())
    if stage == "xtc":
        return kept if kept_count >= options.min_keep else is_left
    least = min(options.min_keep, int(is_left.sum()))
    if kept_count >= least:
        return kept
    # The order is by probability, but for "typical" by how near a token's surprise is to the expected one.
    key = -_surprise_deviation(x) if stage == "typical" else x
    return torch.stack([(key > key_of_token).sum() < least for key_of_token in key])


def _kept_by_definition(stage: str, x: Tensor, options: Sampling, mu: float) -> Tensor:
    """Return which tokens a stage keeps by its definition, bool [V]."""
    p = torch.softmax(x, 0)

    def mass_above(key: Tensor) -> Tensor:
        """Return for each token the total probability of the tokens with a larger key."""
        return torch.stack([p[key > key_of_token].sum() for key_of_token in key])

    def xtc() -> Tensor:
        """Return the tokens below the threshold, and of those that reach it only the least likely."""
        reaching = p[p >= options.xtc_threshold]
        return p <= reaching.min() if len(reaching) else p >= 0

    def at_least(least: float) -> Tensor:
        """Return the tokens with at least this probability, and the likeliest token in any case."""
        return (p >= least) | (x == x.max())

    keeping: dict[str, Callable[[], Tensor]] = {
        "top_k": lambda: torch.stack([(x > logit).sum() < options.top_k for logit in x]),
        "top_p": lambda: (mass_above(x) < options.top_p) | (x == x.max()),
        "min_p": lambda: p >= options.min_p * p.max(),
        "typical": lambda: mass_above(-_surprise_deviation(x)) < options.typical_p,
        "top_n_sigma": lambda: (
            x >= x.max() - options.top_n_sigma * x[x > -torch.inf].std(correction=0)
        ),
        "xtc": xtc,
        "top_a": lambda: at_least(options.top_a * float(p.max()) ** 2),
        "epsilon": lambda: at_least(options.epsilon_cutoff),
        "eta": lambda: at_least(
            min(options.eta_cutoff, math.sqrt(options.eta_cutoff) * math.exp(-float(_entropy(x))))
        ),
        "mirostat": lambda: at_least(2.0**-mu),  # a surprise of at most mu bits
    }
    return keeping[stage]()


class Support(NamedTuple):
    """The tokens that may be drawn.

    Attributes:
        kept_V: which tokens the definitions keep, bool.
        decided_V: for which tokens this is certain, since rounding of a threshold cannot change it, bool.
    """

    kept_V: Tensor
    decided_V: Tensor


def support_of(logits_V: Tensor, options: Sampling, uniform: float = 1.0) -> Support:
    """Return the tokens that may be drawn by the definitions in float64.

    Args:
        logits_V: the logits, in any dtype.
        options: the sampler's options.
        uniform: decides whether XTC acts.
    """

    def kept_with(these_options: Sampling) -> Tensor:
        return probabilities(logits_V.double(), these_options, uniform) > 0

    kept_V = kept_with(options)
    kept_with_lower_V = kept_with(nudged(options, 1 - NUDGE))
    kept_with_higher_V = kept_with(nudged(options, 1 + NUDGE))
    decided_V = (kept_with_lower_V == kept_V) & (kept_with_higher_V == kept_V)
    return Support(kept_V, decided_V)


def nudged(options: Sampling, factor: float) -> Sampling:
    """Return the same options, with each threshold that is in use multiplied by a factor."""
    names = (
        "top_p",
        "min_p",
        "typical_p",
        "xtc_threshold",
        "top_a",
        "epsilon_cutoff",
        "eta_cutoff",
    )
    values = {name: getattr(options, name) for name in names}
    moved = {name: value * factor for name, value in values.items() if 0 < value < 1}
    return replace(options, **moved, mirostat_tau=options.mirostat_tau * factor)


def wrong_tokens(kept_V: Tensor, support: Support) -> int:
    """Count the wrong tokens of law 7: those that were kept or removed against the definitions.

    Tokens about which rounding may decide do not count.
    """
    return int(((kept_V.cpu() != support.kept_V) & support.decided_V).sum())
