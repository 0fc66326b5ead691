"""A request for a text, the host's record of a running request, and the transfer of sampled ids to
the host.

The device runs steps, each of which samples one token in every row. A block is several steps that
are started together. Each step leaves its results in one line of a ring, a tensor in the device's
memory, and `Outbox` copies the lines of a block to the host.

Shapes: R lines of a ring, B rows, N reported log-probabilities, V vocabulary.
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
        stop_automaton: the automaton of the stop strings; None: no stop strings.
        breaker_V: bool [V], the sequence breakers (`chain.breakers`); None: no breakers.
        seed: replaces the seed of `sampling`, so that many requests can share one `Sampling`; None:
            the seed of `sampling`.
        owner: the owner of the request. Keys and values of a prompt are reused only for requests of
            the same owner.
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
        launched: the number of steps that were started for it, including those that the host has not
            read yet.
        received: the number of its tokens that the host has read.
        needs_search: whether its steps use the exact truncation "search", which is so after a step
            with the status UNDECIDED. The record is then replaced by a new one, so that the host can
            tell blocks that were launched before, and skip their codes for this row.
    """

    number: int
    request: Request
    limit: int
    smallest_chain: Chain
    launched: int = 0
    received: int = 0
    needs_search: bool = False


class Block(NamedTuple):
    """Steps that were started together.

    Attributes:
        steps: the number of steps.
        half: the half of the rings with their results, 0 or 1.
        records: each row's record when the block was started; None for a free row.
    """

    steps: int
    half: int
    records: list[RowRecord | None]


class Pace(NamedTuple):
    """How the device's time is shared by running requests and requests that wait for a row.

    Attributes:
        steps: the maximum number of steps of a block. The host reads tokens only between blocks.
        steps_while_waiting: the maximum number of steps of a block while a request waits for a row
            or for its first token.
        max_chunks: the maximum number of chunks of prompts that are read between two blocks; None:
            no maximum. It is multiplied by n if n times as many requests can start as run.
    """

    steps: int
    steps_while_waiting: int
    max_chunks: int | None


class Outbox:
    """Copies the lines of rings to the host.

    A ring has two halves, and blocks write to them in turn: the host reads one half while the device
    writes the other. So a block must be read before the block after the next one begins.

    Attributes:
        half_lines: the number of lines of half a ring.
        bytes_out: the number of bytes that were copied to the host.
    """

    def __init__(self, rings: Sequence[Tensor]) -> None:
        """Take the rings of `monograph.decode.step.State`, [R, ...] each, with R even."""
        self._rings = [ring.unflatten(0, (2, -1)) for ring in rings]
        self._half = 0
        self.half_lines = self._rings[0].shape[1]
        self.bytes_out = 0
        cuda = rings[0].is_cuda
        # Copies to pinned memory are asynchronous; the host would wait for a copy to other memory.
        self._host = [torch.empty_like(ring, device="cpu", pin_memory=cuda) for ring in self._rings]
        self._stream = torch.cuda.Stream(rings[0].device) if cuda else None
        self._events = [torch.cuda.Event() for _ in range(2)] if cuda else []

    def begin_block(self, line_1: Tensor) -> None:
        """Set `State.line_1` to the first line of the half that the next block writes."""
        line_1.fill_(self._half * self.half_lines)

    def send(self, steps: int) -> int:
        """Start to copy the lines of a block of steps to the host.

        Returns:
            the half of the rings that has these lines, for `read`.
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
        """Wait for a block's lines, and return those of each ring, [steps, ...] on the host.

        They are valid until the block after the next is sent.
        """
        if self._events:
            self._events[half].synchronize()
        return [host[half, :steps] for host in self._host]


def read_codes(codes: Sequence[int]) -> tuple[list[int], Status]:
    """Return the tokens that a row sampled in a block, and the row's status after it.

    Args:
        codes: the row's code of each step, token + status * 2^TOKEN_BITS.
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


def read_log_probabilities(
    values_RN: Tensor, ids_RN: Tensor, tokens: int, likeliest_count: int
) -> list[LogProbability]:
    """Return the log-probabilities of the tokens that a row sampled in a block.

    Args:
        values_RN: the row's lines of `State.values_RBN`.
        ids_RN: the row's lines of `State.ids_RBN`.
        tokens: the number of sampled tokens.
        likeliest_count: the number of likeliest tokens to report. Tokens of probability 0 are left
            out.
    """
    lines = zip(values_RN[:tokens].tolist(), ids_RN[:tokens].tolist(), strict=True)
    reports = []
    for values, ids in lines:
        # The first half of a line is under the raw logits, the second half under the distribution
        # that is sampled from. Each half of `values` begins with the sampled token.
        half = len(ids) // 2
        reports.append(
            LogProbability(
                drawn=values[0],
                likeliest=_possible_tokens(ids[:half], values[1 : half + 1], likeliest_count),
                processed_drawn=values[half + 1],
                processed_likeliest=_possible_tokens(
                    ids[half:], values[half + 2 :], likeliest_count
                ),
            )
        )
    return reports


def _possible_tokens(ids: list[int], values: list[float], count: int) -> list[tuple[int, float]]:
    """Return the first `count` pairs of id and log-probability, without those of probability 0."""
    pairs = zip(ids[:count], values[:count], strict=True)
    return [(token, value) for token, value in pairs if value > -math.inf]
