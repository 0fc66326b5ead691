"""What a row is asked to write, and the news of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from monograph.decode.automata import Automaton
from monograph.decode.sampling import Sampling

Finish = Literal["stop", "length", "not_finite", "nothing_allowed"]


@dataclass(frozen=True)
class Request:
    """What one row is to write.

    Attributes:
        prompt_ids: at least one.
        sampling: how tokens are chosen; its seed names the draws.
        max_tokens: most tokens to write, at least 1; the cache's end comes first if it is nearer.
        stop_ids: ids that end the text.
        constraint: what may be written; None: anything.
        stop: stop strings; None: none.
        breaker_V: bool, the ids that no repetition goes across (`penalties.breakers`); None: none.
    """

    prompt_ids: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    stop_ids: tuple[int, ...] = ()
    constraint: Automaton | None = None
    stop: Automaton | None = None
    breaker_V: Tensor | None = None


class LogProbability(NamedTuple):
    """Natural logarithms of a drawn token's probability, and (id, value) of the likeliest tokens.

    Attributes:
        drawn: under the model's raw logits, before any stage.
        likeliest: likewise.
        processed_drawn: under the distribution that was drawn from, after all stages; 0 at temperature 0.
        processed_likeliest: likewise; fewer where fewer tokens were left.
    """

    drawn: float
    likeliest: list[tuple[int, float]]
    processed_drawn: float
    processed_likeliest: list[tuple[int, float]]


class Event(NamedTuple):
    """News of a request: its number, the ids drawn since the last event, and how it ended, None while it runs.

    `logprobs` has an entry for each id if the request asks for them.
    """

    number: int
    token_ids: list[int]
    finish: Finish | None
    logprobs: list[LogProbability]
