"""The transfer of the results of decode steps to the host, and their meaning.

Each step writes its results to one line of a ring, a tensor in the device's memory
(`monograph.decode.step.State`). `Outbox` copies the lines of a block, which is several steps that are
started together, to the host.

Shapes: R lines of a ring, B rows, N reported log-probabilities.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from monograph.decode.request import LogProbability
from monograph.decode.step import HAS_TOKEN, TOKEN_BITS, Status


class Outbox:
    """Copies the lines of rings to the host.

    A ring has two halves, and blocks write to them in turn: the host reads one half while the device
    writes the other. A block must be read before the block after the next one begins, which writes to
    the same half.

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

    def send(self, lines: int) -> int:
        """Start to copy the lines of a block to the host.

        Args:
            lines: the number of lines that the block writes: one for each step, or several with drafts.

        Returns:
            the half of the rings that has these lines, for `read`.
        """
        half = self._half
        self._half = 1 - self._half
        pairs = [
            (ring[half, :lines], host[half, :lines])
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

    def read(self, half: int, lines: int) -> list[Tensor]:
        """Wait for a block's lines, and return those of each ring, [lines, ...] on the host.

        They are valid until two more blocks have been sent: the second one overwrites the host's copy of
        this half.
        """
        if self._events:
            self._events[half].synchronize()
        return [host[half, :lines] for host in self._host]


class RowTokens(NamedTuple):
    """What a row sampled in a block.

    Attributes:
        ids: the tokens.
        lines: the line of each token, counted from the block's first line.
        status: the row's status after the block.
    """

    ids: list[int]
    lines: list[int]
    status: Status


def read_codes(codes: Sequence[int]) -> RowTokens:
    """Return the tokens that a row sampled in a block, and the row's status after it.

    If the row only waits for the next pass over proposed tokens (`monograph.decode.draft`), the status
    is RUNNING, since it goes on then.

    Args:
        codes: the row's code of each line, token + status * 2^TOKEN_BITS.
    """
    ids = []
    lines = []
    status = Status.RUNNING.value
    for line, code in enumerate(codes):
        if code >> TOKEN_BITS == Status.WAITING:
            continue
        status = code >> TOKEN_BITS
        if status in HAS_TOKEN:
            ids.append(code & ((1 << TOKEN_BITS) - 1))
            lines.append(line)
        if status != Status.RUNNING:
            break
    return RowTokens(ids, lines, Status(status))


def read_log_probabilities(
    values: Sequence[Sequence[float]], ids: Sequence[Sequence[int]], likeliest_count: int
) -> list[LogProbability]:
    """Return the log-probabilities of the tokens that a row sampled in a block.

    Args:
        values: the lines of `State.values_RBN` in which the row has a token.
        ids: the row's lines of `State.ids_RBN`, likewise.
        likeliest_count: the number of likeliest tokens to report. Tokens of probability 0 are left
            out.
    """
    reports = []
    for line_values, line_ids in zip(values, ids, strict=True):
        # The first half of a line is under the raw logits, the second half under the distribution
        # that is sampled from. A half of `line_ids` has the k likeliest tokens. A half of `line_values`
        # has the sampled token's value and then those of the k likeliest, 1 + k in all.
        k = len(line_ids) // 2
        raw_values = line_values[: 1 + k]
        processed_values = line_values[1 + k :]
        likeliest: list[tuple[int, float]] = []
        processed_likeliest: list[tuple[int, float]] = []
        if likeliest_count:
            likeliest = _possible_tokens(line_ids[:k], raw_values[1:], likeliest_count)
            processed_likeliest = _possible_tokens(
                line_ids[k:], processed_values[1:], likeliest_count
            )
        reports.append(
            LogProbability(
                drawn=raw_values[0],
                likeliest=likeliest,
                processed_drawn=processed_values[0],
                processed_likeliest=processed_likeliest,
            )
        )
    return reports


def _possible_tokens(
    ids: Sequence[int], values: Sequence[float], count: int
) -> list[tuple[int, float]]:
    """Return the first `count` pairs of id and log-probability, without those of probability 0."""
    pairs = zip(ids[:count], values[:count], strict=True)
    return [(token, value) for token, value in pairs if value > -math.inf]
