"""Run the lanes on a GPU: each lane is a stream with an event after each piece of work; the host's lane is a thread.

Several streams use the same memory without `record_stream`, which would keep memory until the other stream is seen to
be done, and so take more of it than a plan counts. All memory is allocated on the compute lane's stream, which makes
this safe:

    freed memory      the compute lane has waited for all copies from it, by writing its space (`Boundaries.passed`),
                      and the allocator gives it only to later work on this lane.
    new memory        the compute lane writes its space before any copy (`Boundaries.put`, `fetch`), so that copies wait
                      for this lane's earlier use of the memory.
    all other memory  planes, slots and staging buffers live as long as the walk, whose construction ends in `finish`.

The host's thread waits for events of streams, but no stream waits for the host: work that needs the host's results is
launched only after the caller has waited for the host. So launched work always ends, and no wait can last for ever. The
stage that computes during such a wait was launched before it.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from monograph.stream.lanes import Executor, Immediately, Lane, Mark, Work

EVENTS = 256  # events of each lane; when one is used again, its earlier work is long done, or a wait is a bit longer


class HostThread:
    """A thread that does work in the order in which it is given; once a piece of work failed, it does no more."""

    def __init__(self) -> None:
        """Begin with no work; the thread starts with the first piece of it."""
        self._thread = ThreadPoolExecutor(1, "monograph-host")
        self._left: deque[Future[None]] = deque()
        self._done = 0
        self._failed: BaseException | None = None

    def give(self, wait: Sequence[Callable[[], object]], call: Callable[[], object]) -> None:
        """Do the work once all of `wait` have returned; the caller goes on at once."""
        # There is one thread, as a lane is an order; torch uses several threads inside a piece of work.
        self._left.append(self._thread.submit(self._do, wait, call))

    def until(self, number: int | None = None) -> None:
        """Wait until `number` pieces of work are done in all, or all that were given.

        Raises:
            BaseException: the error that one of them, or an earlier one, has raised.
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
    """An executor that launches work on a GPU; only `finish` waits until it is done.

    Every EVENTS-th piece of work of a lane shares an event. To wait for an older piece of work is to wait for the
    newest one with the same event: it comes later on the same lane, so the wait suffices, and it was launched before,
    so the wait ends.
    """

    def __init__(self, device: torch.device):
        """Take the device's current stream for computing, and new streams for copies."""
        self.device = device
        self._streams: dict[Lane, torch.cuda.Stream] = {
            "compute": torch.cuda.current_stream(device),
            "in": torch.cuda.Stream(device),
            "out": torch.cuda.Stream(device),
        }
        self._host = HostThread()
        # Events are made once, as those made for each copy add up (prime-rl pull request 3200). They are blocking, so
        # that the host's thread sleeps while it waits and leaves the core to others.
        self._events = {lane: [torch.cuda.Event(blocking=True) for _ in range(EVENTS)] for lane in self._streams}

    def run(self, work: Work) -> Any:
        """Launch the work behind the work that it waits for; a result of computing is a tensor yet to be computed."""
        if work.mark.lane == "host":
            return self._host.give([self._event(mark).synchronize for mark in work.waits], work.call)
        # A lane is one stream, so the order within a lane needs no event.
        stream = self._streams[work.mark.lane]
        for mark in work.waits:
            if mark.lane == "host":
                self._host.until(mark.number)
            else:
                stream.wait_event(self._event(mark))
        try:
            with torch.cuda.stream(stream):
                return work.call()
        finally:  # if the call failed, a part of its work may have been launched
            self._event(work.mark).record(stream)

    def finish(self) -> None:
        """Wait until host and device have nothing left to do."""
        # The host comes first, as it waits for streams itself; no stream waits for the host.
        self._host.until()
        torch.cuda.synchronize(self.device)

    def _event(self, mark: Mark) -> torch.cuda.Event:
        return self._events[mark.lane][mark.number % EVENTS]


def executor(device: torch.device) -> Executor:
    """Return the executor for lanes of a device."""
    return Streams(device) if device.type == "cuda" else Immediately()
