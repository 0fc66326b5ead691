"""The sampling options of a request, with their ranges and the values that turn them off."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self, get_args

from monograph.errors import UsageError
from monograph.ranges import Range, between, whole

PenaltyScope = Literal["output", "all"]

# The orders of the temperature and the filters in transformers ("hf"), where the temperature is first,
# and in llama.cpp, where it is last. A stage that one of them lacks is placed next to a similar stage.
ORDERS = {
    "hf": (
        "temperature",
        "top_n_sigma",
        "top_k",
        "top_p",
        "min_p",
        "top_a",
        "typical",
        "epsilon",
        "eta",
        "xtc",
    ),
    "llama_cpp": (
        "top_n_sigma",
        "top_k",
        "typical",
        "top_p",
        "min_p",
        "top_a",
        "epsilon",
        "eta",
        "xtc",
        "temperature",
    ),
}
# Inclusive ranges. The upper ends keep fp32 arithmetic finite, and no useful value is above them.
_LARGEST = 1e6
RANGES = {
    **dict.fromkeys(("temperature", "temperature_range"), between(0, _LARGEST)),
    "temperature_exponent": between(0, 100),
    **dict.fromkeys(
        ("top_p", "min_p", "typical_p", "top_a", "epsilon_cutoff", "eta_cutoff"), between(0, 1)
    ),
    "top_n_sigma": between(0, _LARGEST),
    **dict.fromkeys(("xtc_probability", "xtc_threshold"), between(0, 1)),
    # Positive logits are divided by it, so it is not 0.
    "repetition_penalty": between(1 / _LARGEST, _LARGEST),
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), between(-_LARGEST, _LARGEST)),
    "dry_multiplier": between(0, _LARGEST),
    # Below 1 the penalty of a longer repetition would be smaller.
    "dry_base": between(1, _LARGEST),
    **dict.fromkeys(("mirostat_tau", "mirostat_eta"), between(0, _LARGEST)),
    **dict.fromkeys(("top_k", "min_keep"), whole(0, 2**31 - 1)),
    "penalty_last_n": whole(-1, 2**31 - 1),
    "dry_allowed_length": whole(0, 2**31 - 1),
    "dry_penalty_last_n": whole(-1, 2**31 - 1),
    "min_tokens": whole(0, 2**31 - 1),
    # The seed is an int64 on the device.
    "seed": whole(0, 2**63 - 1),
    "logprobs": whole(0, 1000),
}
_TOKEN_ID = Range("a token id, 0 or more", 0, math.inf, whole=True)
BIAS = Range(f"a number from -{_LARGEST:g} to {_LARGEST:g}, or -inf", -_LARGEST, _LARGEST)


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. docs/generate.md has the equations and sources of all stages.

    Attributes:
        temperature: divides the scores; 0 takes the likeliest token (the lowest id among equals)
            and ignores filters.
        top_k: keeps the k likeliest tokens, and others that are as likely as the k-th; 0: off.
        top_p: keeps the likeliest tokens that together have this probability; 1: off.
        min_p: keeps tokens of at least this times the likeliest one's probability; 0: off.
        typical_p: keeps the tokens whose surprise is nearest to the expected one, until together
            they have this probability; 1: off.
        top_a: keeps tokens of at least this times the square of the likeliest one's probability; 0:
            off.
        epsilon_cutoff: keeps tokens of at least this probability; 0: off.
        eta_cutoff: keeps tokens of at least this probability, or of a lower one where the entropy
            is high; 0: off.
        top_n_sigma: keeps tokens whose logit is at most this many standard deviations below the
            largest; 0: off.
        xtc_probability: the probability that XTC is applied when a token is chosen; 0: off.
        xtc_threshold: XTC removes all tokens of at least this probability but the least likely one of
            them. Above 0.5 there is at most one, so nothing is removed.
        min_keep: every filter leaves at least this many tokens. If there are no more than that before
            it, it removes none.
        mirostat_tau: the surprise per token, in bits, that mirostat aims at; 0: off. It filters after
            all other filters.
        mirostat_eta: after each token, mirostat's limit moves by this times the difference between the
            token's surprise and `mirostat_tau`.
        temperature_range: the temperature depends on the entropy, and is at most this far from
            `temperature`; 0: off.
        temperature_exponent: the normalised entropy is raised to this power before it moves the
            temperature.
        repetition_penalty: divides positive and multiplies negative logits of ids in prompt and
            output; 1: off.
        frequency_penalty: is subtracted from an id's logit once for every time that it was sampled;
            0: off.
        presence_penalty: is subtracted from an id's logit if it was sampled; 0: off.
        penalty_scope: what the frequency and presence penalties count: "output", the sampled tokens
            alone, or "all", prompt and output.
        penalty_last_n: the number of last tokens that the repetition, frequency and presence
            penalties see; -1: all, 0: none.
        dry_multiplier: a token that would continue a repetition of n tokens of earlier text has
            `dry_multiplier` * `dry_base`^(n - `dry_allowed_length`) subtracted from its logit; 0: off.
        dry_base: see `dry_multiplier`.
        dry_allowed_length: a repetition of fewer tokens has no penalty.
        dry_penalty_last_n: the number of last tokens in which repetitions are searched; -1: all, 0:
            none.
        dry_sequence_breakers: no repetition goes across a token that contains one of these texts.
        min_tokens: no stop token is sampled before this number of tokens has been sampled.
        logit_bias: what is added to the logits, by id; -inf forbids an id.
        logprobs: with each sampled token, its log-probabilities and those of this many likeliest tokens
            are reported. Each token has two: by the model's raw logits, and by the distribution that is
            sampled from. None: no report.
        seed: the seed of the random numbers, which depend only on it and on a token's position and id.
        order: "hf" filters after the temperature, "llama_cpp" before it. Or the names of stages
            (`ORDERS`) in their order, separated by commas; these must include all that are on.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    top_a: float = 0.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    min_keep: int = 1
    mirostat_tau: float = 0.0
    mirostat_eta: float = 0.1
    temperature_range: float = 0.0
    temperature_exponent: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_scope: PenaltyScope = "output"
    penalty_last_n: int = -1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: Sequence[str] = ("\n", ":", '"', "*")
    min_tokens: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    seed: int = 0
    order: str = "hf"

    def __post_init__(self) -> None:
        """Refuse values outside their range.

        Raises:
            UsageError: a value is refused; the message names the option.
        """
        for name, allowed in RANGES.items():
            if name == "logprobs" and self.logprobs is None:
                continue
            value = getattr(self, name)
            allowed.require(name, value)
            if allowed.whole:
                # The value may be an integer of numpy.
                object.__setattr__(self, name, int(value))
        if self.penalty_scope not in get_args(PenaltyScope):
            raise UsageError(
                f"penalty_scope = {self.penalty_scope!r}: expected one of {', '.join(get_args(PenaltyScope))}"
            )
        breakers = self.dry_sequence_breakers
        # A plain string is refused, since it would be read as a sequence of its letters.
        is_list = isinstance(breakers, list | tuple)
        if not is_list or not all(isinstance(text, str) and text for text in breakers):
            raise UsageError(
                f"dry_sequence_breakers = {breakers!r}: expected a list of texts, none of them empty"
            )
        self._check_order()
        self._check_bias()

    @property
    def stages(self) -> tuple[str, ...]:
        """The temperature and the filters in their order, including those that are off."""
        if self.order in ORDERS:
            return ORDERS[self.order]
        return tuple(name.strip() for name in self.order.split(","))

    def _check_order(self) -> None:
        known = f"{' or '.join(ORDERS)}, or with commas any of {', '.join(ORDERS['hf'])}"
        if not isinstance(self.order, str):
            raise UsageError(f"order = {self.order!r}: expected {known}")
        for index, name in enumerate(self.stages):
            if name not in ORDERS["hf"]:
                raise UsageError(
                    f"order = {self.order!r}: there is no stage {name!r}; expected {known}"
                )
            if name in self.stages[:index]:
                raise UsageError(
                    f"order = {self.order!r}: {name} is named twice; name each stage once"
                )

    def _check_bias(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise UsageError(f"logit_bias = {self.logit_bias!r}: expected biases by token id")
        for token, bias in self.logit_bias.items():
            if not _TOKEN_ID.holds(token):
                raise UsageError(f"logit_bias has the id {token!r}: expected {_TOKEN_ID.expected}")
            if bias != -math.inf:
                BIAS.require(f"logit_bias[{token}]", bias)

    @classmethod
    def of_each(
        cls, given: Self | Sequence[Self] | None, count: int, vocabulary: int
    ) -> list[Self]:
        """Return the options of each of `count` prompts.

        Args:
            given: the options for all prompts, or a list with those of each; None: `Sampling()`.
            count: the number of prompts.
            vocabulary: the size of the vocabulary.

        Raises:
            UsageError: `given` is something else, or a list of another length, or `check_vocabulary`
                refuses an option.
        """
        options: Any = cls() if given is None else given
        if isinstance(options, cls):
            options = [options] * count
        is_list = isinstance(options, list | tuple)
        if not is_list or not all(isinstance(each, cls) for each in options):
            raise UsageError(
                f"sampling = {given!r}: expected one monograph.Sampling(...), or a list with one for each prompt"
            )
        if len(options) != count:
            raise UsageError(
                f"sampling: {len(options)} for {count} prompts; give one, or one for each prompt"
            )
        for each in options:
            each.check_vocabulary(vocabulary)
        return list(options)

    def check_vocabulary(self, vocabulary: int) -> None:
        """Refuse options that do not fit a vocabulary of this size.

        Raises:
            UsageError: a bias is for an id outside the vocabulary, or more log-probabilities are
                asked for than it has ids.
        """
        if self.logprobs is not None and self.logprobs > vocabulary:
            raise UsageError(
                f"logprobs = {self.logprobs}: expected at most {vocabulary}, the vocabulary"
            )
        for token in self.logit_bias:
            if token >= vocabulary:
                raise UsageError(
                    f"logit_bias has the id {token}: expected an id below {vocabulary}, the vocabulary"
                )
