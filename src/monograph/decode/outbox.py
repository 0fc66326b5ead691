"""What leaves the device: a block's lines of some rings, in one copy each that nobody waits for until it is read.

Shape suffixes: R lines of a ring.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Outbox:
    """Two halves of rings in turn: while the host reads one, the device writes the other."""

    def __init__(self, rings: Sequence[Tensor]) -> None:
        """Of rings with the same even number of lines, [R, ...] each."""
        self._rings, self._half = rings, 0
        self.lines = rings[0].shape[0] // 2
        self.bytes_out = 0
        cuda = rings[0].is_cuda
        self._host = [torch.empty_like(ring, device="cpu", pin_memory=cuda) for ring in rings]
        self._stream = torch.cuda.Stream(rings[0].device) if cuda else None
        self._events = [torch.cuda.Event() for _ in range(2)] if cuda else []

    def begin(self, line_1: Tensor) -> None:
        """Point the device at the half that the next block writes."""
        line_1.fill_(self._half * self.lines)

    def send(self, steps: int) -> int:
        """Copy the lines of a block of steps; the half's number, for `read`."""
        half, self._half = self._half, 1 - self._half
        begin = half * self.lines
        pairs = [(ring[begin : begin + steps], host[begin : begin + steps]) for ring, host in self._paired()]
        self.bytes_out += sum(source.numel() * source.element_size() for source, _ in pairs)
        if self._stream is None:
            for source, target in pairs:
                target.copy_(source)
            return half
        device = self._rings[0].device
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
            self._events[half].record()
        # The half is written again two blocks later: not before it has left.
        torch.cuda.current_stream(device).wait_event(self._events[1 - half])
        return half

    def read(self, half: int, steps: int) -> list[Tensor]:
        """The lines of a block, [steps, ...] on the host; they are there until the block after the next is sent."""
        if self._events:
            self._events[half].synchronize()
        return [host[half * self.lines : half * self.lines + steps] for host in self._host]

    def _paired(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self._rings, self._host, strict=True))
