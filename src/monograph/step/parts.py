"""Name the parts of an update, and time them.

The profiler marks one of these parts, the optimizer, by a span that has the part's name and begins where
the part begins (`monograph.profiling.trace`).
"""

import itertools
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch

UpdatePart = Literal["forward", "backward", "optimizer"]

# The parts in their order. With several micro-batches, the first two take turns.
PARTS: tuple[UpdatePart, ...] = get_args(UpdatePart)
FORWARD, BACKWARD, OPTIMIZER = PARTS
# Forward and backward, where both are launched as one graph.
PASSES = "passes"
# The names of parts, each with the time (s, on a CPU) or the CUDA event at which the part begins.
PartMarks = Sequence[tuple[str, Any]]


class PartTimer:
    """Records when the parts of an update begin.

    On a GPU it records CUDA events, so neither the host nor the device waits.
    """

    def __init__(self, device: torch.device):
        """Start without marks, for parts that `device` computes."""
        self._cuda = device.type == "cuda"
        self._marks = list[tuple[str, Any]]()

    def begin(self, part: UpdatePart) -> None:
        """Record that `part` begins, which ends the part before it.

        Nothing is recorded while a CUDA graph is captured, so a replay is a single part.
        """
        self._mark(part)

    def end(self) -> PartMarks:
        """End the last part; return the update's marks, and start without marks again."""
        self._mark("")
        marks = self._marks
        self._marks = []
        return marks

    def _mark(self, part: str) -> None:
        if not self._cuda:
            self._marks.append((part, time.perf_counter()))
        elif not torch.cuda.is_current_stream_capturing():
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((part, event))


def seconds(marks: PartMarks) -> dict[str, float]:
    """Return the seconds of each part by `<part>_s`; the device must have finished the update.

    Forward and backward are one number, `passes_s`, if they were launched as one graph.

    Args:
        marks: what `PartTimer.end` returned.

    Returns:
        The seconds; empty if the engine does not record a forward pass.
    """
    parts = {part for part, _ in marks}
    if FORWARD not in parts:
        return {}
    seconds_of_parts = Counter[str]()
    for (part, begin), (_, end) in itertools.pairwise(marks):
        is_whole_pass = part == FORWARD and BACKWARD not in parts
        name = PASSES if is_whole_pass else part
        if isinstance(begin, float):
            seconds_of_parts[f"{name}_s"] += end - begin
        else:
            seconds_of_parts[f"{name}_s"] += begin.elapsed_time(end) / 1000  # ms to s
    return dict(seconds_of_parts)
