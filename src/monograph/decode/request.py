"""A request for a text, the events that tell its progress, and the host's records of what runs.

The device runs steps, each of which samples one token in every row. A block is several steps that
are started together.

Shapes: V vocabulary.
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torch import Tensor

from monograph.automata import Automaton
from monograph.automata.on_host import HostConstraint
from monograph.decode.draft_budget import DraftBudget
from monograph.decode.knobs import Chain
from monograph.decode.sampling import Sampling
from monograph.decode.step import Status

Finish = Literal["stop", "length", "not_finite", "nothing_allowed"]


class Request(NamedTuple):
    """A prompt and the options of one text to write after it.

    Attributes:
        prompt_ids: the prompt, at least one id.
        sampling: how tokens are sampled.
        max_tokens: the maximum number of tokens to write, at least 1; the row's positions may end
            earlier.
        stop_ids: the ids that end the text.
        constraint: the automaton of the allowed texts; None: any text.
        stop_automaton: the automaton of the stop strings; None: no stop strings.
        breaker_V: bool [V], the sequence breakers (`chain.breakers`); None: no breakers.
        seed: replaces the seed of `sampling`, so that many requests can share one `Sampling`; None:
            the seed of `sampling`.
        owner: the owner of the request. Keys and values of a prompt are reused only for requests of
            the same owner.
        adapter: the slot of its adapter in the model's bank (`monograph.decode.adapter_bank`); 0: none.
        keeps_row: whether the row is kept after this request has ended, so that a later request can
            continue there. Other requests get it only after `Generator.cancel`.
        continues: the number of the ended request, with `keeps_row` and the same adapter, whose row this
            one continues. The prompt of this request begins with the prompt and the tokens of that one.
            Of these, the model reads only the last token again. None: it begins in a free row.
        host_constraint: what the host follows instead of an automaton; None: the host follows nothing.
    """

    prompt_ids: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    stop_ids: tuple[int, ...] = ()
    constraint: Automaton | None = None
    stop_automaton: Automaton | None = None
    breaker_V: Tensor | None = None
    seed: int | None = None
    owner: str = ""
    adapter: int = 0
    keeps_row: bool = False
    continues: int | None = None
    host_constraint: HostConstraint | None = None


class LogProbability(NamedTuple):
    """Natural log-probabilities of a sampled token and of the likeliest tokens at its position.

    Attributes:
        drawn: of the sampled token under the model's raw logits, before any stage.
        likeliest: (id, value) of the likeliest tokens under the raw logits.
        processed_drawn: of the sampled token under the distribution that it is sampled from, after
            all stages; 0 at temperature 0.
        processed_likeliest: (id, value) of the likeliest tokens under that distribution; fewer if
            filters left fewer tokens.
    """

    drawn: float
    likeliest: list[tuple[int, float]]
    processed_drawn: float
    processed_likeliest: list[tuple[int, float]]


class Event(NamedTuple):
    """Progress of a request.

    Attributes:
        number: the request's number, from `Generator.submit`.
        token_ids: the ids that were sampled since the request's last event.
        finish: how the request ended; None while it runs.
        logprobs: one for each id if the request asks for them, else empty.
    """

    number: int
    token_ids: list[int]
    finish: Finish | None
    logprobs: list[LogProbability]


FINISHES: dict[Status, Finish] = {
    Status.STOP: "stop",
    Status.LENGTH: "length",
    Status.NOT_FINITE: "not_finite",
    Status.NOTHING_ALLOWED: "nothing_allowed",
}


@dataclass
class RowRecord:
    """The host's record of the request that runs in a row.

    Attributes:
        number: the request's number.
        request: the request.
        limit: the maximum number of tokens that it may sample.
        smallest_chain: the smallest chain (`monograph.decode.knobs`) that serves it.
        launched: the number of its tokens that the host has read, plus the number of lines (of the rings
            on the device) that steps write for it and that the host has not read yet. A line has at most
            one token.
        received: the number of its tokens that the host has read.
        automaton_state: the state of its constraint after the tokens that the host has read. It is not
            kept up to date if the host reads a block while the next one runs (`Generator.reads_behind`).
        is_ahead: whether `automaton_state` is further than the row's state on the device.
        draft_budget: what drafts have cost this text.
        token_ids: the tokens that the host has read, kept only where there is a draft model, which may have
            to read them later.
        needs_search: whether its steps use the exact truncation "search". They do after a step with the
            status UNDECIDED. The record is then replaced by a new one, so that the host recognises blocks
            that were launched before, and skips their codes for this row.
    """

    number: int
    request: Request
    limit: int
    smallest_chain: Chain
    launched: int = 0
    received: int = 0
    automaton_state: int = 0
    is_ahead: bool = False
    draft_budget: DraftBudget = field(default_factory=DraftBudget)
    token_ids: list[int] = field(default_factory=list)
    needs_search: bool = False


class StepBlock(NamedTuple):
    """Steps that were started together.

    Attributes:
        lines: the number of lines of the rings that they wrote.
        lines_of_step: how many of these a step writes, more than one with drafts.
        half: the half of the rings that has their results, 0 or 1 (`monograph.decode.outbox`).
        records: each row's record when the block was started; None for a free row.
    """

    lines: int
    lines_of_step: int
    half: int
    records: list[RowRecord | None]


class Pace(NamedTuple):
    """How the device's time is divided between running requests and requests that wait for a row.

    Attributes:
        steps: the maximum number of steps of a block. The host reads tokens only between blocks. With
            drafts, a block has as many passes over proposed tokens as take the time of these steps, by
            count, and at least one.
        steps_while_waiting: the maximum number of steps of a block while a request waits for a row
            or for its first token.
        max_chunks: the maximum number of chunks of prompts that are read between two blocks, those of a
            draft model included; None: no maximum. If n times as many requests can start as are running, it
            is multiplied by n.
    """

    steps: int
    steps_while_waiting: int
    max_chunks: int | None
