"""Time the parts of an update."""

import itertools
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

# The names of parts, each with the time or the event at which it begins.
Marks = Sequence[tuple[str, Any]]


class Parts:
    """When the parts of an update begin. On a GPU events are noted there, so neither the host nor
    the device waits.
    """

    def __init__(self, device: torch.device):
        """Take the device that computes."""
        self._cuda = device.type == "cuda"
        self._now = list[tuple[str, Any]]()

    def begin(self, part: str) -> None:
        """End the part before and begin another; parts that begin inside a replayed graph are not
        told apart.
        """
        if not self._cuda:
            self._now.append((part, time.perf_counter()))
        elif not torch.cuda.is_current_stream_capturing():
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._now.append((part, event))

    def end(self) -> Marks:
        """End the update; return its parts."""
        self.begin("")
        ended = self._now
        self._now = []
        return ended


def seconds(marks: Marks) -> dict[str, float]:
    """Return the seconds of each part, `passes_s` where forward and backward are one launch; the
    device must be done.

    Empty if the engine does not go through these parts.
    """
    parts = {part for part, _ in marks}
    found = Counter[str]()
    for (part, begun), (_, ended) in itertools.pairwise(marks) if "forward" in parts else ():
        name = part if "backward" in parts or part != "forward" else "passes"
        found[f"{name}_s"] += (
            ended - begun if isinstance(begun, float) else begun.elapsed_time(ended) / 1000
        )
    return dict(found)
