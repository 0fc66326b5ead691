"""The lanes of a GPU: a stream each, and an event after each piece of work.

Memory crosses streams here without `record_stream`, whose holder frees memory only once the other stream was seen to be
done, and so keeps more of it than a plan counts. It is not needed, as the compute lane's stream is the one that memory
is allocated on:

    what is freed     the compute lane has waited for all copies of it before: by writing its space (see
                      `Boundaries.passed`). The allocator hands it on to work that comes later in that lane.
    what is new       its space is written by the compute lane before it is copied from or to (`Boundaries.put`,
                      `fetch`), so copies wait for what that lane did with the memory before.
    all the rest      planes, slots and desks live as long as the walk, whose construction ends in `finish`.
"""

from __future__ import annotations

from typing import Any

import torch

from monograph.stream.lanes import LANES, Executor, Immediately, Lane, Mark, Work

EVENTS = 256  # of each lane; the work that used one before is by then long done, or waited for a little longer


class Streams:
    """Gives work to a GPU: what is asked for is under way, and only `finish` waits for it.

    An event stands for every EVENTS-th work of its lane. Who waits for an older one waits for the newest of them, which
    was given before and comes later on the same lane: so the wait holds, and can block nothing for ever.
    """

    def __init__(self, device: torch.device):
        """Computing goes on where it does now, on the device's current stream."""
        self.device = device
        self._streams: dict[Lane, torch.cuda.Stream] = {
            "compute": torch.cuda.current_stream(device),
            "in": torch.cuda.Stream(device),
            "out": torch.cuda.Stream(device),
        }
        # Made once: events that are made for each copy were seen to add up (prime-rl pull request 3200).
        self._events = {lane: [torch.cuda.Event() for _ in range(EVENTS)] for lane in LANES}

    def run(self, work: Work) -> Any:
        """Launch it behind what it waits for; the result of computing is a tensor to come."""
        stream = self._streams[work.mark.lane]
        for mark in work.waits:
            stream.wait_event(self._event(mark))
        try:
            with torch.cuda.stream(stream):
                return work.call()
        finally:  # what was launched before something failed reads and writes too
            self._event(work.mark).record(stream)

    def finish(self) -> None:
        """Wait until the device has nothing left to do."""
        torch.cuda.synchronize(self.device)

    def _event(self, mark: Mark) -> torch.cuda.Event:
        return self._events[mark.lane][mark.number % EVENTS]


def executor(device: torch.device) -> Executor:
    """What does the work of lanes whose device is this one."""
    return Streams(device) if device.type == "cuda" else Immediately()
