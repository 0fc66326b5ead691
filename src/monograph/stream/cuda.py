"""The lanes of a GPU: a stream for each, with an event after each piece of work; the host's lane is a thread.

Memory crosses streams here without `record_stream`, with which the allocator frees memory only once it has seen that
the other stream is done, and so keeps more memory than a plan counts. It is not needed, because memory is allocated on
the compute lane's stream:

    freed memory      the compute lane has waited for all copies of it before: by writing its space (see
                      `Boundaries.passed`). The allocator hands it on to work that comes later in that lane.
    new memory        its space is written by the compute lane before it is copied from or to (`Boundaries.put`,
                      `fetch`), so copies wait for what that lane did with the memory before.
    other memory      planes, slots and staging buffers live as long as the walk, whose construction ends in `finish`.

The host's thread waits for events of streams. No stream waits for the host: work that depends on the host is launched
when the host is done, by a caller that waits for it. So all work that was launched ends whatever the host does, and
nothing waits for ever. The stage that is computed meanwhile was launched before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from monograph.stream.lanes import Executor, Immediately, Lane, Mark, Work

EVENTS = 256  # of each lane; by its next use an event's work is long done, or is waited for a little longer


class HostThread:
    """A thread that does work in order while the caller goes on; after a failure it does no more."""

    def __init__(self) -> None:
        """Begin without a thread; it starts with the first piece of work."""
        self._thread = ThreadPoolExecutor(1, "monograph-host")
        self._left: deque[Future[None]] = deque()
        self._done = 0
        self._failed: BaseException | None = None

    def give(self, wait: Sequence[Callable[[], object]], call: Callable[[], object]) -> None:
        """Add work: call it when all of `wait` have returned."""
        # One thread, because a lane has an order; inside of a piece of work torch uses several for its arithmetic.
        self._left.append(self._thread.submit(self._do, wait, call))

    def until(self, number: int | None = None) -> None:
        """Return when the first `number` pieces of work are done; None: all of them.

        Raises:
            BaseException: the exception that one of them, or an earlier one, raised.
        """
        while self._left and (number is None or self._done < number):
            self._left.popleft().result()
            self._done += 1
        if self._failed:
            raise self._failed

    def _do(self, wait: Sequence[Callable[[], object]], call: Callable[[], object]) -> None:
        if self._failed:
            return
        try:
            for arrived in wait:
                arrived()
            call()
        except BaseException as error:  # noqa: BLE001 - `until` raises it
            self._failed = error


class Streams:
    """An executor on a GPU: it launches work without waiting, and only `finish` waits.

    An event stands for every EVENTS-th piece of work of its lane. A wait for an older piece waits for the newest one of
    that event, which was launched before and comes later on the same lane: so the wait holds, and always ends.
    """

    def __init__(self, device: torch.device):
        """Use the device's current stream for the compute lane."""
        self.device = device
        self._streams: dict[Lane, torch.cuda.Stream] = {
            "compute": torch.cuda.current_stream(device),
            "in": torch.cuda.Stream(device),
            "out": torch.cuda.Stream(device),
        }
        self._host = HostThread()
        # Events are made once: made for each copy they were seen to add up (prime-rl pull request 3200). They block:
        # the host's thread sleeps while it waits, and leaves the core to others.
        self._events = {lane: [torch.cuda.Event(blocking=True) for _ in range(EVENTS)] for lane in self._streams}

    def run(self, work: Work) -> Any:
        """Launch work behind the events that it waits for; a computation's result is a tensor that is not ready yet."""
        if work.mark.lane == "host":
            return self._host.give([self._event(mark).synchronize for mark in work.waits], work.call)
        # Each lane is one stream, so the order within a lane needs no event.
        stream = self._streams[work.mark.lane]
        for mark in work.waits:
            if mark.lane == "host":
                self._host.until(mark.number)
            else:
                stream.wait_event(self._event(mark))
        try:
            with torch.cuda.stream(stream):
                return work.call()
        finally:  # a call that failed may have launched work that reads and writes
            self._event(work.mark).record(stream)

    def finish(self) -> None:
        """Wait until host and device have done all work."""
        # The host first: it waits for streams, and no stream waits for it.
        self._host.until()
        torch.cuda.synchronize(self.device)

    def _event(self, mark: Mark) -> torch.cuda.Event:
        return self._events[mark.lane][mark.number % EVENTS]


def executor(device: torch.device) -> Executor:
    """Return an executor for lanes of this device."""
    return Streams(device) if device.type == "cuda" else Immediately()
