"""How one request's tokens are chosen: every option, its range, and the value at which it is off."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from monograph.errors import UsageError
from monograph.ranges import Range, between, whole

Order = Literal["hf", "llama_cpp"]
Scope = Literal["output", "all"]

# Inclusive ranges. The upper ends keep fp32 arithmetic finite; nobody means more.
_LARGEST = 1e6
_RANGES = {
    "temperature": between(0, _LARGEST),
    "temperature_range": between(0, _LARGEST),
    "temperature_exponent": between(0, 100),
    "top_p": between(0, 1),
    "min_p": between(0, 1),
    "typical_p": between(0, 1),
    "top_n_sigma": between(0, _LARGEST),
    "xtc_probability": between(0, 1),
    "xtc_threshold": between(0, 1),
    "repetition_penalty": between(1 / _LARGEST, _LARGEST),
    "frequency_penalty": between(-_LARGEST, _LARGEST),
    "presence_penalty": between(-_LARGEST, _LARGEST),
    "top_k": whole(0, 2**31 - 1),
    "min_tokens": whole(0, 2**31 - 1),
    "seed": whole(0, 2**63 - 1),
    "logprobs": whole(0, 1000),
}
_TOKEN_ID = Range("a token id, 0 or more", 0, math.inf, whole=True)
_BIAS = Range(f"a number from -{_LARGEST:g} to {_LARGEST:g}, or -inf", -_LARGEST, _LARGEST)
_CHOICES = {"penalty_scope": get_args(Scope), "order": get_args(Order)}


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. Equations and sources of all stages: docs/generate.md.

    Attributes:
        temperature: scores are divided by it; 0 takes the likeliest token (the lowest id among equals), whatever the
            filters say.
        top_k: only the k likeliest tokens, and those level with the k-th, can be drawn; 0: off.
        top_p: the likeliest tokens that together have this probability; 1: off.
        min_p: tokens of at least this probability times the likeliest one's; 0: off.
        typical_p: the tokens whose surprise is nearest the expected one, up to this probability; 1: off.
        top_n_sigma: tokens within so many standard deviations of the largest logit; 0: off.
        xtc_probability: how often a draw excludes the likeliest tokens; 0: off.
        xtc_threshold: XTC leaves, of all tokens of at least this probability, the least likely; above 0.5: off.
        temperature_range: temperature moves with the entropy between `temperature` minus and plus this; 0: off.
        temperature_exponent: how, at a normalised entropy h: by h to this power.
        repetition_penalty: divides positive and multiplies negative logits of ids in prompt and output; 1: off.
        frequency_penalty: subtracted once for every time that the id was drawn; 0: off.
        presence_penalty: subtracted if the id was drawn; 0: off.
        penalty_scope: whether the last two count the output alone or prompt and output ("all").
        min_tokens: no stop token before so many were drawn.
        logit_bias: added to the logits of ids; -inf forbids an id.
        logprobs: report the log-probabilities, under the model's raw logits, of each drawn token and of so many of the
            likeliest; None: report none.
        seed: names the draws; a row's draws depend on nothing else.
        order: "hf" filters after the temperature, "llama_cpp" before it.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    temperature_range: float = 0.0
    temperature_exponent: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_scope: Scope = "output"
    min_tokens: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    seed: int = 0
    order: Order = "hf"

    def __post_init__(self) -> None:
        """Refuse values outside their range, each in one line."""
        for name, allowed in _RANGES.items():
            if name != "logprobs" or self.logprobs is not None:
                allowed.require(name, getattr(self, name))
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise UsageError(f"{name} = {getattr(self, name)!r}: expected one of {', '.join(choices)}")
        for token, bias in self.logit_bias.items():
            if not _TOKEN_ID.holds(token):
                raise UsageError(f"logit_bias has the id {token!r}: expected {_TOKEN_ID.expected}")
            if bias != -math.inf:
                _BIAS.require(f"logit_bias[{token}]", bias)

    @classmethod
    def of(cls, given: Sampling | None) -> Sampling:
        """The options of all prompts of a call, by default `Sampling()`.

        Raises:
            UsageError: something else, such as a list of them.
        """
        if given is not None and not isinstance(given, cls):
            raise UsageError(
                f"sampling is a {type(given).__name__}: expected one monograph.Sampling(...) for all prompts; "
                "prompts with options of their own take a call each"
            )
        return given or cls()

    def check_vocabulary(self, vocabulary: int) -> None:
        """Refuse a bias for an id that a vocabulary of this size does not have.

        Raises:
            UsageError: naming the id.
        """
        for token in self.logit_bias:
            if token >= vocabulary:
                raise UsageError(f"logit_bias has the id {token}: expected an id below {vocabulary}, the vocabulary")
