"""A request for a text, what the host keeps of it while it runs, and the way of its drawn ids to
the host.

Shapes: R lines of a ring, N log-probabilities.
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
        prompt_ids: at least one id.
        sampling: how tokens are chosen; its seed decides the draws.
        max_tokens: most tokens to write, at least 1; fewer are written where the row's positions
            end before.
        stop_ids: ids that end the text.
        constraint: the automaton of the allowed texts; None: any text.
        stop: the automaton of the stop strings; None: there are none.
        breaker_V: bool, the ids that no repetition goes across (`chain.breakers`); None: there are
            none.
        seed: the seed of the draws in place of the sampling's, so that many requests can have one;
            None: that one.
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
    """Natural logarithms of the probabilities of a drawn token and of the likeliest tokens at its
    place.

    Attributes:
        drawn: of the drawn token under the model's raw logits, before any stage.
        likeliest: (id, value) of the likeliest tokens under the raw logits.
        processed_drawn: of the drawn token under the distribution drawn from, after all stages; 0
            at temperature 0.
        processed_likeliest: (id, value) of the likeliest tokens under that; fewer where fewer
            tokens were left.
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


FINISHES: dict[Status, Finish] = {
    Status.STOP: "stop",
    Status.LENGTH: "length",
    Status.NOT_FINITE: "not_finite",
    Status.NOTHING_ALLOWED: "nothing_allowed",
}


@dataclass
class Record:
    """The host's record of a request in a row.

    Attributes:
        number: the request's number.
        request: the request.
        limit: most tokens that it may draw.
        least: the smallest chain that serves it.
        launched: steps that were started for it, and so the most tokens that it can have drawn.
        received: tokens that the host has read.
        exact: whether the fast truncation once could not decide a draw. From then on the request
            runs with the exact one, with a new record, so that the host skips the codes of the
            steps in which the row waited.
    """

    number: int
    request: Request
    limit: int
    least: Chain
    launched: int = 0
    received: int = 0
    exact: bool = False


class Block(NamedTuple):
    """Steps that were started together: how many, the half of the outbox with their codes, and each
    row's record.
    """

    steps: int
    half: int
    records: list[Record | None]


class Pace(NamedTuple):
    """How long running requests and those that wait for a row wait for each other.

    Attributes:
        steps: of a block, between two reads of the host.
        hurried: most steps of a block while a request waits for a row, or for its first tokens.
        chunks: most chunks of prompts that are read between two blocks if as many requests run as
            can begin; more where more can begin, as all of them wait for few; None: all.
    """

    steps: int
    hurried: int
    chunks: int | None


class Outbox:
    """The way of the rings' lines to the host; of the two halves of a ring the host reads one, the
    device writes one.

    A half is written again two blocks later, so a block must be read before the block after the
    next begins.

    Attributes:
        lines: lines of half a ring.
        bytes_out: bytes that were copied to the host.
    """

    def __init__(self, rings: Sequence[Tensor]) -> None:
        """Take the rings, [R, ...] each, with R even."""
        self._rings = [ring.unflatten(0, (2, -1)) for ring in rings]
        self._half = 0
        self.lines = self._rings[0].shape[1]
        self.bytes_out = 0
        cuda = rings[0].is_cuda
        # Page-locked, since the host would wait for a copy to other memory.
        self._host = [torch.empty_like(ring, device="cpu", pin_memory=cuda) for ring in self._rings]
        self._stream = torch.cuda.Stream(rings[0].device) if cuda else None
        self._events = [torch.cuda.Event() for _ in range(2)] if cuda else []

    def begin(self, line_1: Tensor) -> None:
        """Point the device at the half that the next block writes."""
        line_1.fill_(self._half * self.lines)

    def send(self, steps: int) -> int:
        """Start to copy the lines of a block of steps to the host; return the number of its half,
        for `read`.
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
        # On a separate stream, so that the next block runs while this one's lines are copied.
        self._stream.wait_stream(torch.cuda.current_stream(self._rings[0].device))
        with torch.cuda.stream(self._stream):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
            self._events[half].record()
        return half

    def read(self, half: int, steps: int) -> list[Tensor]:
        """Return a block's lines, [steps, ...] on the host, which are valid until the block after
        the next is sent.
        """
        if self._events:
            self._events[half].synchronize()
        return [host[half, :steps] for host in self._host]


def drawn(codes: Sequence[int]) -> tuple[list[int], Status]:
    """Return the tokens that a row drew in a block, and the status with which it stopped, or
    RUNNING.
    """
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
    """Return a row's log-probabilities in a block; a token that could not be drawn (-inf) is left
    out.
    """
    found = []
    for values, ids in zip(*(ring[:count].tolist() for ring in rings), strict=True):
        # Of the likeliest that are reported, under each of the two distributions.
        most = len(ids) // 2
        likeliest, possible = (
            [
                pair
                for pair in zip(ids[at : at + wanted], values[at + past :], strict=False)
                if pair[1] > -math.inf
            ]
            for at, past in ((0, 1), (most, 2))
        )
        found.append(LogProbability(values[0], likeliest, values[most + 1], possible))
    return found
