"""The lanes of a GPU: a stream each, and an event after each piece of work; the host's lane is a thread.

Memory crosses streams here without `record_stream`, whose holder frees memory only once the other stream was seen to be
done, and so keeps more of it than a plan counts. It is not needed, as the compute lane's stream is the one that memory
is allocated on:

    what is freed     the compute lane has waited for all copies of it before: by writing its space (see
                      `Boundaries.passed`). The allocator hands it on to work that comes later in that lane.
    what is new       its space is written by the compute lane before it is copied from or to (`Boundaries.put`,
                      `fetch`), so copies wait for what that lane did with the memory before.
    all the rest      planes, slots and staging buffers live as long as the walk, whose construction ends in `finish`.

The host's thread waits for events of streams. No stream waits for the host: what has to is launched when the host is
done, by a caller that waits for it. So what was launched ends whatever the host does, and nobody waits for ever. The
stage that is computed with meanwhile was launched before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from monograph.stream.lanes import Executor, Immediately, Lane, Mark, Work

EVENTS = 256  # of each lane; the work that used one before is by then long done, or waited for a little longer


class HostThread:
    """Does work in the order in which it was given, while its giver goes on; once some has failed, none any more."""

    def __init__(self) -> None:
        """The thread begins with the first work."""
        self._thread = ThreadPoolExecutor(1, "monograph-host")
        self._left: deque[Future[None]] = deque()
        self._done = 0
        self._failed: BaseException | None = None

    def give(self, wait: Sequence[Callable[[], object]], call: Callable[[], object]) -> None:
        """Do it when all of `wait` have returned."""
        # One thread, as lanes are orders; torch uses several for the arithmetic inside of a piece of work.
        self._left.append(self._thread.submit(self._do, wait, call))

    def until(self, number: int | None = None) -> None:
        """Return when so many pieces of work are done, or all that were given.

        Raises:
            BaseException: what one of them, or one before, has raised.
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
        except BaseException as error:  # noqa: BLE001 - for who waits
            self._failed = error


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
        self._host = HostThread()
        # Made once: events that are made for each copy were seen to add up (prime-rl pull request 3200). Blocking: the
        # host's thread sleeps while it waits, and leaves the core to the others.
        self._events = {lane: [torch.cuda.Event(blocking=True) for _ in range(EVENTS)] for lane in self._streams}

    def run(self, work: Work) -> Any:
        """Launch it behind what it waits for; the result of computing is a tensor to come."""
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
        finally:  # what was launched before something failed reads and writes too
            self._event(work.mark).record(stream)

    def finish(self) -> None:
        """Wait until host and device have nothing left to do."""
        # The host first, which waits for streams itself; no stream waits for it.
        self._host.until()
        torch.cuda.synchronize(self.device)

    def _event(self, mark: Mark) -> torch.cuda.Event:
        return self._events[mark.lane][mark.number % EVENTS]


def executor(device: torch.device) -> Executor:
    """What does the work of lanes whose device is this one."""
    return Streams(device) if device.type == "cuda" else Immediately()
