"""The sampler by its definitions, brute force, in the dtype that it is given: no sort, no
threshold, one row.

Facts from the papers and programs that docs/generate.md names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from monograph.decode.filters import FILTERS
from monograph.decode.knobs import chain_of
from monograph.decode.sampling import Sampling


def probabilities(
    logits_V: Tensor, options: Sampling, uniform: float = 1.0, mu: float | None = None
) -> Tensor:
    """What a row is drawn from after temperature and truncations, [V].

    `uniform` decides whether XTC acts; `mu` is mirostat's number, by default its first.
    """
    x, mu = logits_V, 2 * options.mirostat_tau if mu is None else mu
    if options.temperature == 0:
        return torch.nn.functional.one_hot(x.argmax(), len(x)).to(x.dtype)
    for stage in chain_of([options]).stages:
        if stage.endswith("temperature"):
            x = x / _temperature(x, options)
        elif stage in FILTERS and (stage != "xtc" or uniform < options.xtc_probability):
            x = torch.where(_keeps_enough(stage, x, options, mu), x, -torch.inf)
    return torch.softmax(x, 0)


def _temperature(x: Tensor, options: Sampling) -> float:
    spread, left = options.temperature_range, int((x > -torch.inf).sum())
    if spread == 0 or left < 2:
        return options.temperature
    low, high = max(0.0, options.temperature - spread), options.temperature + spread
    return (
        low + (high - low) * (float(_entropy(x)) / math.log(left)) ** options.temperature_exponent
    )


def _entropy(x: Tensor) -> Tensor:
    p = torch.softmax(x, 0)
    return -(p * p.log())[p > 0].sum()


def _surprise(x: Tensor) -> Tensor:
    """How far a token's surprise is from the expected one."""
    return (-torch.log_softmax(x, 0) - _entropy(x)).abs()


def _keeps_enough(stage: str, x: Tensor, options: Sampling, mu: float) -> Tensor:
    """What the stage keeps, at least min_keep of the tokens; XTC does nothing where it would leave
    fewer.
    """
    kept, left = _keeps(stage, x, options, mu), x > -torch.inf
    least = min(options.min_keep, int(left.sum()))
    if (kept & left).sum() >= (options.min_keep if stage == "xtc" else least):
        return kept
    if stage == "xtc":
        return left
    nearer = -_surprise(x) if stage == "typical" else x
    return torch.stack([(nearer > own).sum() < least for own in nearer])


def _keeps(stage: str, x: Tensor, options: Sampling, mu: float) -> Tensor:
    p = torch.softmax(x, 0)

    def mass_above(key: Tensor) -> Tensor:
        return torch.stack([p[key > own].sum() for own in key])

    def xtc() -> Tensor:
        reaching = p[p >= options.xtc_threshold]
        return p <= reaching.min() if len(reaching) else p >= 0

    def at_least(least: float) -> Tensor:
        return (p >= least) | (x == x.max())

    keeping: dict[str, Callable[[], Tensor]] = {
        "top_k": lambda: torch.stack([(x > own).sum() < options.top_k for own in x]),
        "top_p": lambda: (mass_above(x) < options.top_p) | (x == x.max()),
        "min_p": lambda: p >= options.min_p * p.max(),
        "typical": lambda: mass_above(-_surprise(x)) < options.typical_p,
        "top_n_sigma": lambda: (
            x >= x.max() - options.top_n_sigma * x[x > -torch.inf].std(correction=0)
        ),
        "xtc": xtc,
        "top_a": lambda: at_least(options.top_a * float(p.max()) ** 2),
        "epsilon": lambda: at_least(options.epsilon_cutoff),
        "eta": lambda: at_least(
            min(options.eta_cutoff, math.sqrt(options.eta_cutoff) * math.exp(-float(_entropy(x))))
        ),
        "mirostat": lambda: at_least(2.0**-mu),
    }
    return keeping[stage]()


def edited(
    logits_V: Tensor,
    options: Sampling,
    prompt: Sequence[int],
    output: Sequence[int],
    breakers: Collection[int] = (),
) -> Tensor:
    """Logits after bias, penalties and DRY, [V]."""
    x, text = logits_V.clone(), [*prompt, *output]
    for token, bias in options.logit_bias.items():
        x[token] += bias
    first = max(0, len(text) - options.penalty_last_n) if options.penalty_last_n >= 0 else 0
    for token in set(text[first:]):
        x[token] = (
            x[token] / options.repetition_penalty
            if x[token] > 0
            else x[token] * options.repetition_penalty
        )
    counted = text[first:] if options.penalty_scope == "all" else text[max(first, len(prompt)) :]
    for token in set(counted):
        x[token] -= counted.count(token) * options.frequency_penalty + options.presence_penalty
    for token, length in repetitions(_last(text, options.dry_penalty_last_n), breakers).items():
        if options.dry_multiplier and length >= options.dry_allowed_length:
            power = options.dry_base ** (length - options.dry_allowed_length)
            x[token] -= min(options.dry_multiplier * power, torch.finfo(torch.float32).max)
    return x


def _last(text: list[int], n: int) -> list[int]:
    return text if n < 0 else text[max(0, len(text) - n) :]


def repetitions(text: list[int], breakers: Collection[int]) -> dict[int, int]:
    """By the token that would go on with it: the longest end of the text that stands before an
    earlier such token.
    """
    found: dict[int, int] = {}
    for place in range(1, len(text)):
        length = 0
        while length < place and text[place - 1 - length] == text[-1 - length] not in breakers:
            length += 1
        if text[place] not in breakers:
            found[text[place]] = max(length, found.get(text[place], 0))
    return found
