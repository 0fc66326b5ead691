"""What leaves the device: the ring's lines of a block of steps, in one copy that nobody waits for until it is read.

Shape suffixes: R lines of the ring, B rows.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Outbox:
    """Two halves of a ring in turn: while the host reads one, the device writes the other."""

    def __init__(self, ring_RB: Tensor) -> None:
        """Of a ring with an even number of lines."""
        self._ring_RB, self._half = ring_RB, 0
        self.lines = ring_RB.shape[0] // 2
        self.bytes_out = 0
        self._cuda = ring_RB.is_cuda
        self._host = torch.empty_like(ring_RB, device="cpu", pin_memory=self._cuda)
        self._stream = torch.cuda.Stream(ring_RB.device) if self._cuda else None
        self._events = [torch.cuda.Event() for _ in range(2)] if self._cuda else []

    def begin(self, line_1: Tensor) -> None:
        """Point the device at the half that the next block writes."""
        line_1.fill_(self._half * self.lines)

    def send(self, steps: int) -> int:
        """Copy the lines of a block of steps; the half's number, for `read`."""
        half, self._half = self._half, 1 - self._half
        begin = half * self.lines
        source, target = (ring[begin : begin + steps] for ring in (self._ring_RB, self._host))
        self.bytes_out += source.numel() * source.element_size()
        if self._stream is None:
            target.copy_(source)
            return half
        self._stream.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            self._events[half].record()
        # The half is written again two blocks later: not before it has left.
        torch.cuda.current_stream(source.device).wait_event(self._events[1 - half])
        return half

    def read(self, half: int, steps: int) -> list[list[int]]:
        """The codes of a block that was sent, [steps][rows]."""
        if self._events:
            self._events[half].synchronize()
        lines: list[list[int]] = self._host[half * self.lines : half * self.lines + steps].tolist()
        return lines
