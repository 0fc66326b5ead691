"""A request for a text, and what a decoder tells of it."""

from typing import Literal, NamedTuple

from torch import Tensor

from monograph.decode.automata import Automaton
from monograph.decode.sampling import Sampling

Finish = Literal["stop", "length", "not_finite", "nothing_allowed"]


class Request(NamedTuple):
    """A prompt and the options of one text to write after it.

    Attributes:
        prompt_ids: at least one id.
        sampling: how tokens are chosen; its seed decides the draws.
        max_tokens: most tokens to write, at least 1; fewer are written where the row's positions end before.
        stop_ids: ids that end the text.
        constraint: the automaton of the allowed texts; None: any text.
        stop: the automaton of the stop strings; None: there are none.
        breaker_V: bool, the ids that no repetition goes across (`penalties.breakers`); None: there are none.
        seed: the seed of the draws in place of the sampling's, so that many requests can have one; None: that one.
        owner: who asks; keys and values of another owner's prompts are not read again for it.
    """

    prompt_ids: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    stop_ids: tuple[int, ...] = ()
    constraint: Automaton | None = None
    stop: Automaton | None = None
    breaker_V: Tensor | None = None
    seed: int | None = None
    owner: str = ""


class LogProbability(NamedTuple):
    """Natural logarithms of the probabilities of a drawn token and of the likeliest tokens at its place.

    Attributes:
        drawn: of the drawn token under the model's raw logits, before any stage.
        likeliest: (id, value) of the likeliest tokens under the raw logits.
        processed_drawn: of the drawn token under the distribution drawn from, after all stages; 0 at temperature 0.
        processed_likeliest: (id, value) of the likeliest tokens under that; fewer where fewer tokens were left.
    """

    drawn: float
    likeliest: list[tuple[int, float]]
    processed_drawn: float
    processed_likeliest: list[tuple[int, float]]


class Event(NamedTuple):
    """Progress of a request.

    Attributes:
        number: the request's number, from `Generator.submit`.
        token_ids: the ids drawn since its last event.
        finish: how the request ended; None while it runs.
        logprobs: one for each id if the request asks for them, else none.
    """

    number: int
    token_ids: list[int]
    finish: Finish | None
    logprobs: list[LogProbability]
