"""A request for a text, the host's record of a running request, and the transfer of sampled ids to
the host.

Shapes: R lines of a ring, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from monograph.automata import Automaton
from monograph.decode.knobs import Chain
from monograph.decode.sampling import Sampling
from monograph.decode.step import HAS_TOKEN, TOKEN_BITS, Status

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
        stop: the automaton of the stop strings; None: no stop strings.
        breaker_V: bool [V], the sequence breakers (`chain.breakers`); None: no breakers.
        seed: replaces the seed of `sampling`, so that many requests can share one `Sampling`; None:
            the seed of `sampling`.
        owner: the owner of the request, who never gets keys and values of another owner's prompts.
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
    """The host's record of a request in a row.

    Attributes:
        number: the request's number.
        request: the request.
        limit: the maximum number of tokens that it may sample.
        smallest_chain: the smallest chain that serves it.
        launched: the number of steps that were started for it, which is at least the number of
            tokens that it has sampled.
        received: the number of tokens that the host has read.
        exact: whether the request runs with the exact truncation "search". It does so after a step
            was UNDECIDED. The request then gets a new record, so that the host skips the codes of
            the steps in which the row waited.
    """

    number: int
    request: Request
    limit: int
    smallest_chain: Chain
    launched: int = 0
    received: int = 0
    exact: bool = False


class StepBlock(NamedTuple):
    """Steps that were started together.

    Attributes:
        steps: the number of steps.
        half: the half of the outbox with their codes.
        records: each row's record at the start; None for a free row.
    """

    steps: int
    half: int
    records: list[RowRecord | None]


class Pace(NamedTuple):
    """How the device's time is shared by running requests and requests that wait for a row.

    Attributes:
        steps: the number of steps of a block, between two reads of the host.
        hurried: the maximum number of steps while a request waits for a row or its first tokens.
        chunks: the maximum number of chunks of prompts that are read between two blocks. If the
            requests that can start are n times as many as those that run, the maximum is n times
            this number. None: no maximum.
    """

    steps: int
    hurried: int
    chunks: int | None


class Outbox:
    """Copies the lines of rings to the host.

    A ring is a tensor with one line for each step of a block (`monograph.decode.step.State`). It has
    two halves: the host reads one while the device writes the other. A half is written again two
    blocks later, so a block must be read before the block after the next begins.

    Attributes:
        lines: the number of lines of half a ring.
        bytes_out: the number of bytes that were copied to the host.
    """

    def __init__(self, rings: Sequence[Tensor]) -> None:
        """Take the rings, [R, ...] each, with R even."""
        self._rings = [ring.unflatten(0, (2, -1)) for ring in rings]
        self._half = 0
        self.lines = self._rings[0].shape[1]
        self.bytes_out = 0
        cuda = rings[0].is_cuda
        # Copies to pinned memory are asynchronous; the host would wait for a copy to other memory.
        self._host = [torch.empty_like(ring, device="cpu", pin_memory=cuda) for ring in self._rings]
        self._stream = torch.cuda.Stream(rings[0].device) if cuda else None
        self._events = [torch.cuda.Event() for _ in range(2)] if cuda else []

    def begin(self, line_1: Tensor) -> None:
        """Point the device at the half that the next block writes."""
        line_1.fill_(self._half * self.lines)

    def send(self, steps: int) -> int:
        """Start to copy the lines of a block of steps to the host.

        Returns:
            the number of the block's half, for `read`.
        """
        half = self._half
        self._half = 1 - self._half
        pairs = [
            (ring[half, :steps], host[half, :steps])
            for ring, host in zip(self._rings, self._host, strict=True)
        ]
        self.bytes_out += sum(source.nbytes for source, _ in pairs)
        if self._stream is None:
            for source, target in pairs:
                target.copy_(source)
            return half
        # The copy is on a separate stream, so that the next block runs at the same time.
        self._stream.wait_stream(torch.cuda.current_stream(self._rings[0].device))
        with torch.cuda.stream(self._stream):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
            self._events[half].record()
        return half

    def read(self, half: int, steps: int) -> list[Tensor]:
        """Wait for a block's lines, and return them, [steps, ...] on the host.

        They are valid until the block after the next is sent.
        """
        if self._events:
            self._events[half].synchronize()
        return [host[half, :steps] for host in self._host]


def drawn(codes: Sequence[int]) -> tuple[list[int], Status]:
    """Return the tokens that a row sampled in a block, and the row's status after it."""
    tokens = []
    status = Status.RUNNING.value
    for code in codes:
        status = code >> TOKEN_BITS
        if status in HAS_TOKEN:
            tokens.append(code & ((1 << TOKEN_BITS) - 1))
        if status != Status.RUNNING:
            break
    return tokens, Status(status)


def reported(rings: Sequence[Tensor], count: int, wanted: int) -> list[LogProbability]:
    """Return a row's log-probabilities in a block.

    Args:
        rings: the row's lines of `State.values_RBN` and `State.ids_RBN`.
        count: the number of sampled tokens.
        wanted: the number of likeliest tokens to report. Fewer are reported if others have the
            probability 0.
    """
    values_ring, ids_ring = rings
    reports = []
    for values, ids in zip(values_ring[:count].tolist(), ids_ring[:count].tolist(), strict=True):
        # The first half of a line is under the raw logits, the second half under the distribution
        # that is sampled from. A half of the values begins with the sampled token.
        half = len(ids) // 2
        reports.append(
            LogProbability(
                drawn=values[0],
                likeliest=_possible(ids[:half], values[1 : half + 1], wanted),
                processed_drawn=values[half + 1],
                processed_likeliest=_possible(ids[half:], values[half + 2 :], wanted),
            )
        )
    return reports


def _possible(ids: list[int], values: list[float], wanted: int) -> list[tuple[int, float]]:
    """Return the first `wanted` pairs of id and log-probability, without those of probability 0."""
    pairs = zip(ids[:wanted], values[:wanted], strict=True)
    return [(token, value) for token, value in pairs if value > -math.inf]
