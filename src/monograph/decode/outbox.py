"""The way of the drawn ids to the host, and what they say there.

Shapes: R lines of a ring, N log-probabilities.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from monograph.decode.request import LogProbability
from monograph.decode.step import HAS_TOKEN, TOKEN_BITS, Status


class Outbox:
    """The way of the rings' lines to the host; of the two halves of a ring the host reads one, the device writes one.

    A half is written again two blocks later, so a block must be read before the block after the next begins.

    Attributes:
        lines: lines of half a ring.
        bytes_out: bytes that were copied to the host.
    """

    def __init__(self, rings: Sequence[Tensor]) -> None:
        """Take the rings, [R, ...] each, with R even."""
        self._rings, self._half = [ring.unflatten(0, (2, -1)) for ring in rings], 0
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
        """Start to copy the lines of a block of steps to the host; return the number of its half, for `read`."""
        half, self._half = self._half, 1 - self._half
        pairs = [(ring[half, :steps], host[half, :steps]) for ring, host in zip(self._rings, self._host, strict=True)]
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
        """Return a block's lines, [steps, ...] on the host, which are valid until the block after the next is sent."""
        if self._events:
            self._events[half].synchronize()
        return [host[half, :steps] for host in self._host]


def drawn(codes: Sequence[int]) -> tuple[list[int], Status]:
    """Return the tokens that a row drew in a block, and the status with which it stopped, or RUNNING."""
    tokens, status = [], Status.RUNNING.value
    for code in codes:
        status = code >> TOKEN_BITS
        if status in HAS_TOKEN:
            tokens.append(code & ((1 << TOKEN_BITS) - 1))
        if status != Status.RUNNING:
            break
    return tokens, Status(status)


def reported(rings: Sequence[Tensor], count: int, wanted: int) -> list[LogProbability]:
    """Return a row's log-probabilities in a block; a token that could not be drawn (-inf) is left out."""
    found = []
    for values, ids in zip(*(ring[:count].tolist() for ring in rings), strict=True):
        most = len(ids) // 2  # of the likeliest that are reported, under each of the two distributions
        likeliest, possible = (
            [pair for pair in zip(ids[at : at + wanted], values[at + past :], strict=False) if pair[1] > -math.inf]
            for at, past in ((0, 1), (most, 2))
        )
        found.append(LogProbability(values[0], likeliest, values[most + 1], possible))
    return found
