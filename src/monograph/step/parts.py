"""Time the parts of an update."""

import itertools
import time
from collections import Counter
from typing import Any

import torch


class Parts:
    """When the parts of an update begin. On a GPU events are noted there, so neither the host nor the device waits."""

    def __init__(self, device: torch.device):
        """Take the device that computes."""
        self._cuda, self._now, self._last = device.type == "cuda", list[tuple[str, Any]](), list[tuple[str, Any]]()

    def begin(self, part: str) -> None:
        """End the part before and begin another; parts that begin inside a replayed graph are not told apart."""
        if not self._cuda:
            self._now.append((part, time.perf_counter()))
        elif not torch.cuda.is_current_stream_capturing():
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._now.append((part, event))

    def end(self) -> None:
        """End the update."""
        self.begin("")
        self._last, self._now = self._now, []

    def read(self) -> dict[str, float]:
        """Return the seconds of each part of the last update, `passes_s` where forward and backward are one launch.

        Empty if the device has not done them yet, or if the engine does not go through these parts.
        """
        parts = {part for part, _ in self._last}
        if "forward" not in parts or (self._cuda and not self._last[-1][1].query()):
            return {}
        seconds = Counter[str]()
        for (part, begun), (_, ended) in itertools.pairwise(self._last):
            name = part if "backward" in parts or part != "forward" else "passes"
            seconds[f"{name}_s"] += begun.elapsed_time(ended) / 1000 if self._cuda else ended - begun
        return dict(seconds)
