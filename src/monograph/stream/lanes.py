"""Order copies and computations in four lanes, with exactly the waits between lanes that the data
require.

Work on one lane is done in the order in which it is given; work on different lanes is done at the
same time. Each piece of work says which spaces it reads and writes, and the lanes derive what it
has to wait for:

    a reader waits for the last writer;     a writer waits for the last writer and for all readers since

A wait is made only if no other wait implies it. A vector clock for each lane tells: it says how far
each lane is known to have come when the lane's newest work is done (Mattern 1988, "Virtual Time and
Global States of Distributed Systems"). So no wait is missing, none is superfluous, and nobody has
to write them down.

On a GPU each lane is a stream with an event after each piece of work; the host's lane is a thread.
Several streams use the same memory without `record_stream`, which would keep memory until the other
stream is seen to be done, and so take more of it than a plan counts. All memory is allocated on the
compute lane's stream, which makes this safe:

    freed memory      the compute lane has waited for all copies from it, by writing its space (`Boundaries.passed`),
                      and the allocator gives it only to later work on this lane.
    new memory        the compute lane writes its space before any copy (`Boundaries.put`, `fetch`), so that copies wait
                      for this lane's earlier use of the memory.
    all other memory  planes, slots and staging buffers live as long as the walk, whose construction
    ends in `finish`.

The host's thread waits for events of streams, but no stream waits for the host: work that needs the
host's results is launched only after the caller has waited for the host. So launched work always
ends, and no wait can last for ever. The stage that computes during such a wait was launched before
it.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Lane = Literal["compute", "in", "out", "host"]
LANES: tuple[Lane, ...] = ("compute", "in", "out", "host")
MARKS = 4096  # this many marks are kept before those that no lane can wait for any more are dropped


class Home(StrEnum):
    """The kind of memory: the device's, the host's, or a file that is mapped into the host's."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class Mark(NamedTuple):
    """The moment at which the work of a number on a lane is done."""

    lane: Lane
    number: int


@dataclass(eq=False)
class Space:
    """Memory that work reads or writes as one unit.

    Attributes:
        name: a name for messages and tests.
        home: where the memory is.
        written: the mark of its last writer.
        read: the marks of each lane's last reader since then.
    """

    name: str
    home: Home
    written: Mark | None = None
    read: dict[Lane, Mark] = field(default_factory=dict)


Spaces = tuple[Space, ...]


class LaneWork(NamedTuple):
    """One piece of work.

    Attributes:
        mark: the moment at which it is done.
        waits: marks on other lanes that must come before it.
        call: the function that does it.
        reads: the spaces that it reads.
        writes: the spaces that it writes.
        moved_bytes: bytes that it copies between homes; for work on the host, bytes that it reads
            and writes in files.
    """

    mark: Mark
    waits: tuple[Mark, ...]
    call: Callable[[], Any]
    reads: Spaces
    writes: Spaces
    moved_bytes: int


class Executor(Protocol):
    """An object that does the work, at once or later, in an order that obeys lanes and waits."""

    def run(self, work: LaneWork) -> Any:
        """Do the work or take it on; return the call's result for work on the compute lane."""

    def finish(self) -> None:
        """Wait until everything is done."""


class Immediately:
    """The executor for a CPU: it does everything at once, in the order in which it is given."""

    def run(self, work: LaneWork) -> Any:
        """Do the work now."""
        return work.call()

    def finish(self) -> None:
        """Return at once, as nothing is left to do."""


class Lanes:
    """The four lanes, which give work to an executor together with its waits.

    Attributes:
        executor: the object that does the work.
        moved_bytes: bytes copied so far, by (from, to).
        one_by_one: whether the host's work is done before anything else is begun.
    """

    def __init__(self, executor: Executor):
        """Begin with no work done."""
        self.executor = executor
        self.one_by_one = False
        self.moved_bytes: Counter[tuple[Home, Home]] = Counter()
        self._happened: dict[Lane, dict[Lane, int]] = {
            lane: dict.fromkeys(LANES, 0) for lane in LANES
        }
        self._at: dict[Mark, dict[Lane, int]] = {}
        self._most = 0

    def copy(self, target: Tensor, source: Tensor, writes: Space, reads: Space) -> None:
        """Copy a part of one space to a part of another, on lane "in" to the device or "out" from
        it.
        """
        lane: Lane = "in" if writes.home == Home.DEVICE else "out"
        self.moved_bytes[reads.home, writes.home] += source.nbytes
        self._give(
            lane,
            lambda: target.copy_(source, non_blocking=True),
            (reads,),
            (writes,),
            source.nbytes,
        )

    def compute(
        self, call: Callable[[], T], reads: Iterable[Space] = (), writes: Iterable[Space] = ()
    ) -> T:
        """Run a call on the compute lane and return its result; it reads and writes no space but
        these.
        """
        result: T = self._give("compute", call, tuple(reads), tuple(writes), 0)
        return result

    def host(
        self,
        call: Callable[[], object],
        reads: Iterable[Space] = (),
        writes: Iterable[Space] = (),
        *,
        from_disk: int = 0,
        to_disk: int = 0,
    ) -> None:
        """Run a call on the host lane; of its spaces it reads and writes this many bytes in files."""
        self.moved_bytes += Counter(
            {(Home.DISK, Home.HOST): from_disk, (Home.HOST, Home.DISK): to_disk}
        )
        self._give("host", call, tuple(reads), tuple(writes), from_disk + to_disk)
        if self.one_by_one:
            self.executor.finish()

    def finish(self) -> None:
        """Wait until everything is done; afterwards every space may be read and written without
        waits.
        """
        self.executor.finish()
        # Every lane knows of all earlier marks now, so they need not be kept.
        newest = {lane: self._happened[lane][lane] for lane in LANES}
        self._happened = {lane: dict(newest) for lane in LANES}
        self._at.clear()

    def _give(
        self, lane: Lane, call: Callable[[], Any], reads: Spaces, writes: Spaces, moved_bytes: int
    ) -> Any:
        happened = self._happened[lane]
        needed = [space.written for space in (*reads, *writes) if space.written]
        needed += [mark for space in writes for mark in space.read.values()]
        waits = []
        # The newest mark comes first, as it may imply older ones.
        for mark in sorted(set(needed), key=lambda mark: -mark.number):
            if mark.lane != lane and mark.number > happened[mark.lane]:
                waits.append(mark)
                for other, number in self._known(mark).items():
                    happened[other] = max(happened[other], number)
        # A later wait in this list may imply an earlier one, by way of a third lane.
        waits = [mark for mark in waits if not self._implied(mark, waits)]
        happened[lane] += 1
        mark = Mark(lane, happened[lane])
        # What is known to have happened when this is done: a lane that waits for it needs no
        # further wait for that.
        self._at[mark] = dict(happened)
        self._forget()
        for space in reads:
            space.read[lane] = mark
        for space in writes:
            # This work waits for all earlier readers, and the next writer waits for this work.
            space.written = mark
            space.read = {}
        return self.executor.run(LaneWork(mark, tuple(waits), call, reads, writes, moved_bytes))

    def _forget(self) -> None:
        """Drop marks that all lanes in use know to have happened, as none of them has to wait for
        these any more.
        """
        if len(self._at) < max(MARKS, self._most):
            return
        used = [happened for lane, happened in self._happened.items() if happened[lane]]
        known = {lane: min(happened[lane] for happened in used) for lane in LANES}
        self._at = {mark: at for mark, at in self._at.items() if mark.number > known[mark.lane]}
        # Marks are next looked through when their number has doubled.
        self._most = 2 * len(self._at)

    def _known(self, mark: Mark) -> dict[Lane, int]:
        """Return how far each lane has come at a mark; for a dropped mark, which a new lane may
        meet, only the mark.
        """
        return self._at.get(mark, {mark.lane: mark.number})

    def _implied(self, mark: Mark, waits: list[Mark]) -> bool:
        return any(
            self._known(other).get(mark.lane, 0) >= mark.number for other in waits if other != mark
        )


# Events of each lane; when one is used again, its earlier work is long done, or a wait is a bit
# longer.
EVENTS = 256


class HostThread:
    """A thread that does work in the order in which it is given; once a piece of work failed, it
    does no more.
    """

    def __init__(self) -> None:
        """Begin with no work; the thread starts with the first piece of it."""
        self._thread = ThreadPoolExecutor(1, "monograph-host")
        self._left: deque[Future[None]] = deque()
        self._done = 0
        self._failed: BaseException | None = None

    def give(self, wait: Sequence[Callable[[], object]], call: Callable[[], object]) -> None:
        """Do the work once all of `wait` have returned; the caller goes on at once."""
        # There is one thread, as a lane is an order; torch uses several threads inside a piece of
        # work.
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

    Every EVENTS-th piece of work of a lane shares an event. To wait for an older piece of work is
    to wait for the newest one with the same event: it comes later on the same lane, so the wait
    suffices, and it was launched before, so the wait ends.
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
        # Events are made once, as those made for each copy add up (prime-rl pull request 3200).
        # They are blocking, so that the host's thread sleeps while it waits and leaves the core to
        # others.
        self._events = {
            lane: [torch.cuda.Event(blocking=True) for _ in range(EVENTS)] for lane in self._streams
        }

    def run(self, work: LaneWork) -> Any:
        """Launch the work behind the work that it waits for; a result of computing is a tensor yet
        to be computed.
        """
        if work.mark.lane == "host":
            return self._host.give(
                [self._event(mark).synchronize for mark in work.waits], work.call
            )
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
