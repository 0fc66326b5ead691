"""Order copies and computations in four lanes, with exactly the waits between lanes that the data
require.

A lane is a queue. Work on one lane runs in the order in which it is given; work on different lanes
may run at the same time. A space is a piece of memory that work reads or writes. Each piece of work
says which spaces it reads and writes, and the lanes derive what the work has to wait for:

    a reader waits for the last writer
    a writer waits for the last writer, and for all readers since then

A wait is left out if another wait implies it. To find out, each lane has a vector clock (Mattern
1988, "Virtual Time and Global States of Distributed Systems"). It says, for each other lane, how many
pieces of that lane's work are certain to be finished once this lane's newest piece is finished.

On a GPU, three lanes are streams, with an event after each piece of work, and the host's lane is a
thread. `record_stream` is not called, although several streams use the same memory. With it, the
allocator would hold freed memory until it sees that the other streams have finished their work, and
the peak would exceed what `monograph plan` predicts. Without it, memory is safe because all of it
is allocated on the stream of the compute lane:

    freed memory: Before memory is freed, the compute lane is given work that counts as a write to
        the memory's space, but does nothing (`Lanes.declare_written`). So this lane first waits for
        all copies from the memory. The allocator gives freed memory only to later work on this lane.
    new memory: The compute lane is given such work before any copy to the memory. So copies wait for
        this lane's earlier use of the same memory.
    all other memory: The walk (`monograph.stream.walk`) allocates its long-lived buffers in its
        constructor, which ends by calling `finish`.

The host's thread waits for events of streams, but no stream waits for the host. Work that needs the
host's results is launched only after the calling thread has waited for the host. So launched work
always ends, and no wait can last for ever. When the calling thread waits for the host, little time
is lost, because the device still has launched work to do.
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
# "compute": computations on the device. "in": copies to the device. "out": copies from the device.
# "host": work on the host.
Lane = Literal["compute", "in", "out", "host"]
LANES: tuple[Lane, ...] = ("compute", "in", "out", "host")
# Once this many marks are stored, `Lanes` drops the marks that no lane can still have to wait for.
MARKS_BEFORE_FIRST_CLEANUP = 4096


class Home(StrEnum):
    """Where memory is: on the device, on the host, or in a file that is mapped into memory."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class LaneMark(NamedTuple):
    """The moment at which piece `number` of a lane's work is finished, counted from 1."""

    lane: Lane
    number: int


@dataclass(eq=False)
class Space:
    """Memory that work reads or writes as one unit.

    Attributes:
        name: a name for messages and tests.
        home: where the memory is.
        last_write: the mark of its last writer; None: nothing has written it.
        last_reads: for each lane, the mark of its last reader since `last_write`.
    """

    name: str
    home: Home
    last_write: LaneMark | None = None
    last_reads: dict[Lane, LaneMark] = field(default_factory=dict)


Spaces = tuple[Space, ...]


class LaneWork(NamedTuple):
    """One piece of work.

    Attributes:
        mark: the moment at which the work is finished.
        waits: marks of other lanes; the work must not begin before them.
        call: the function that does the work.
        reads: the spaces that the work reads.
        writes: the spaces that the work writes.
        moved_bytes: for a copy, the bytes copied; for work on the host, the bytes read and written
            in files; for a computation 0.
    """

    mark: LaneMark
    waits: tuple[LaneMark, ...]
    call: Callable[[], Any]
    reads: Spaces
    writes: Spaces
    moved_bytes: int


class Executor(Protocol):
    """Runs work, now or later, in an order that respects lanes and waits."""

    def run(self, work: LaneWork) -> Any:
        """Run the work, or queue it; return the call's result for work on the compute lane."""

    def finish(self) -> None:
        """Wait until all work is finished."""


class Immediately:
    """The executor for a CPU: it runs each piece of work as soon as it is given."""

    def run(self, work: LaneWork) -> Any:
        """Run the work now."""
        return work.call()

    def finish(self) -> None:
        """Do nothing: all work is finished."""


class Lanes:
    """The four lanes. They derive the waits of each piece of work, and give both to an executor.

    Attributes:
        executor: runs the work.
        moved_bytes: bytes copied so far, by (home of the source, home of the target).
        host_blocks: whether `host` returns only after all work is finished. It is set while the
            step is compiled, because torch refuses to call a compiled function in the host's thread
            while the calling thread traces.
    """

    def __init__(self, executor: Executor):
        """Begin without work."""
        self.executor = executor
        self.host_blocks = False
        self.moved_bytes: Counter[tuple[Home, Home]] = Counter()
        # The vector clocks: `_clock_of[lane][other]` is how many pieces of work of `other` are certain to
        # be finished once the newest piece of `lane` is finished.
        self._clock_of: dict[Lane, dict[Lane, int]] = {
            lane: dict.fromkeys(LANES, 0) for lane in LANES
        }
        # The vector clock of each mark's lane, as it was at the mark.
        self._clock_at: dict[LaneMark, dict[Lane, int]] = {}
        # When this many marks are stored, `_drop_old_marks` looks again for marks to drop.
        self._next_cleanup = 0

    def copy(self, target: Tensor, source: Tensor, writes: Space, reads: Space) -> None:
        """Copy a tensor on lane "in" if the target is on the device, otherwise on lane "out".

        Args:
            target: the tensor that is written, a part of the space `writes`.
            source: the tensor that is read, a part of the space `reads`.
            writes: the space of the target.
            reads: the space of the source.
        """
        lane: Lane = "in" if writes.home == Home.DEVICE else "out"
        self.moved_bytes[reads.home, writes.home] += source.nbytes
        self._submit(
            lane,
            lambda: target.copy_(source, non_blocking=True),
            (reads,),
            (writes,),
            source.nbytes,
        )

    def compute(
        self, call: Callable[[], T], reads: Iterable[Space] = (), writes: Iterable[Space] = ()
    ) -> T:
        """Run a call on the compute lane and return its result.

        Args:
            call: the call; it must not use spaces that are not given here.
            reads: the spaces that it reads.
            writes: the spaces that it writes, or reads and writes.
        """
        result: T = self._submit("compute", call, tuple(reads), tuple(writes), 0)
        return result

    def declare_written(self, space: Space) -> None:
        """Give the compute lane work that counts as a write to a space, but does nothing.

        The lane waits for all earlier work that uses the space, and later users wait for the lane.
        """
        self.compute(lambda: None, writes=[space])

    def host(
        self,
        call: Callable[[], object],
        reads: Iterable[Space] = (),
        writes: Iterable[Space] = (),
        *,
        from_disk: int = 0,
        to_disk: int = 0,
    ) -> None:
        """Run a call on the host lane.

        Args:
            call: the call; it must not use spaces that are not given here.
            reads: the spaces that it reads.
            writes: the spaces that it writes, or reads and writes.
            from_disk: bytes that it reads from files.
            to_disk: bytes that it writes to files.
        """
        self.moved_bytes += Counter(
            {(Home.DISK, Home.HOST): from_disk, (Home.HOST, Home.DISK): to_disk}
        )
        self._submit("host", call, tuple(reads), tuple(writes), from_disk + to_disk)
        if self.host_blocks:
            self.executor.finish()

    def finish(self) -> None:
        """Wait until all work is finished. Work that is given later waits for none of it."""
        self.executor.finish()
        # Every lane's clock now says that all work is finished, so no mark is waited for again.
        newest = {lane: self._clock_of[lane][lane] for lane in LANES}
        self._clock_of = {lane: dict(newest) for lane in LANES}
        self._clock_at.clear()

    def _submit(
        self, lane: Lane, call: Callable[[], Any], reads: Spaces, writes: Spaces, moved_bytes: int
    ) -> Any:
        """Derive the waits of a piece of work, and give both to the executor."""
        # This is the stored dict itself, not a copy. Each wait below advances it, so that the loop skips
        # marks which the wait implies.
        clock = self._clock_of[lane]
        needed = [space.last_write for space in (*reads, *writes) if space.last_write]
        needed += [mark for space in writes for mark in space.last_reads.values()]
        waits = []
        # Large numbers come first, because a wait for late work often implies other waits.
        for mark in sorted(set(needed), key=lambda mark: -mark.number):
            if mark.lane != lane and mark.number > clock[mark.lane]:
                waits.append(mark)
                for other, number in self._clock(mark).items():
                    clock[other] = max(clock[other], number)
        # Numbers of different lanes say nothing about order, so a later wait in the list may still
        # imply an earlier one. Two waits never imply each other, because the loop has skipped each
        # mark that an earlier wait implies.
        waits = [mark for mark in waits if not self._implied(mark, waits)]
        clock[lane] += 1
        mark = LaneMark(lane, clock[lane])
        self._clock_at[mark] = dict(clock)
        self._drop_old_marks()
        for space in reads:
            space.last_reads[lane] = mark
        for space in writes:
            # This work waits for all earlier readers, and the next writer waits for this work, so
            # the next writer need not wait for these readers.
            space.last_write = mark
            space.last_reads = {}
        return self.executor.run(LaneWork(mark, tuple(waits), call, reads, writes, moved_bytes))

    def _drop_old_marks(self) -> None:
        """Drop the marks that every lane in use knows to be finished, according to its clock.

        No lane in use has to wait for such a mark again.
        """
        if len(self._clock_at) < max(MARKS_BEFORE_FIRST_CLEANUP, self._next_cleanup):
            return
        # A lane is in use once it has been given work, so that its own entry is above 0. The clock
        # of an unused lane stays at 0, and would keep every mark.
        clocks_in_use = [clock for lane, clock in self._clock_of.items() if clock[lane]]
        finished = {lane: min(clock[lane] for clock in clocks_in_use) for lane in LANES}
        self._clock_at = {
            mark: clock
            for mark, clock in self._clock_at.items()
            if mark.number > finished[mark.lane]
        }
        # Clean up again when the number of marks has doubled.
        self._next_cleanup = 2 * len(self._clock_at)

    def _clock(self, mark: LaneMark) -> dict[Lane, int]:
        """Return the vector clock at a mark.

        A lane that is used for the first time may need a mark that was dropped. The clock returned
        then counts only the mark's own lane, so the new lane may wait more often than necessary.
        """
        return self._clock_at.get(mark, {mark.lane: mark.number})

    def _implied(self, mark: LaneMark, waits: list[LaneMark]) -> bool:
        """Return whether one of the other waits implies the wait for a mark."""
        others = [other for other in waits if other != mark]
        return any(self._clock(other).get(mark.lane, 0) >= mark.number for other in others)


class HostThread:
    """A thread that runs work in the order in which it is given.

    After a piece of work has failed, later pieces are not run.
    """

    def __init__(self) -> None:
        """Begin without work; the thread starts with the first piece of work."""
        # One thread, because the order of a lane must hold. torch uses several threads within a
        # piece of work.
        self._thread = ThreadPoolExecutor(1, "monograph-host")
        # Pieces of work that the calling thread has not waited for yet, and how many it has.
        self._uncollected: deque[Future[None]] = deque()
        self._collected_count = 0
        self._failed: BaseException | None = None

    def submit(self, waits: Sequence[Callable[[], object]], call: Callable[[], object]) -> None:
        """Queue a piece of work, and return without waiting for it.

        Args:
            waits: functions that the thread calls before the work; each waits for an event.
            call: the work.
        """
        self._uncollected.append(self._thread.submit(self._run, waits, call))

    def wait_for(self, number: int | None = None) -> None:
        """Wait until the first `number` pieces of work since the start are finished.

        Args:
            number: the number of pieces; None: all pieces that were given.

        Raises:
            BaseException: the error that the thread's work has raised.
        """
        while self._uncollected and (number is None or self._collected_count < number):
            self._uncollected.popleft().result()
            self._collected_count += 1
        if self._failed:
            raise self._failed

    def _run(self, waits: Sequence[Callable[[], object]], call: Callable[[], object]) -> None:
        if self._failed:
            return
        try:
            for wait_for_event in waits:
                wait_for_event()
            call()
        except BaseException as error:  # noqa: BLE001 - `wait_for` raises it
            self._failed = error


# Each lane of `Streams` reuses this many CUDA events. This is enough for an event's earlier work to
# be usually finished when the event is reused.
EVENTS = 256


class Streams:
    """An executor that launches work on a GPU, or queues it for the host's thread.

    A lane has EVENTS events, and piece number n of its work uses event n mod EVENTS. A wait for an
    old piece of work may therefore wait for a newer piece with the same event. The wait is still
    long enough, because the newer piece comes later on the same lane. And the wait does end,
    because the newer piece was already launched.
    """

    def __init__(self, device: torch.device):
        """Take the device's current stream for computations, and new streams for copies."""
        self.device = device
        self._streams: dict[Lane, torch.cuda.Stream] = {
            "compute": torch.cuda.current_stream(device),
            "in": torch.cuda.Stream(device),
            "out": torch.cuda.Stream(device),
        }
        self._host = HostThread()
        # Events are created once and reused. A new event for each piece of work would have to be
        # kept for as long as a lane may still wait for it. They are `blocking`, so that the
        # host's thread sleeps while it waits, and its core is free.
        self._events = {
            lane: [torch.cuda.Event(blocking=True) for _ in range(EVENTS)] for lane in self._streams
        }

    def run(self, work: LaneWork) -> Any:
        """Launch the work, ordered after its `waits`.

        Returns:
            The call's result; the device may still be computing a tensor in it.
        """
        if work.mark.lane == "host":
            waits = [self._event(mark).synchronize for mark in work.waits]
            return self._host.submit(waits, work.call)
        # A lane is one stream, so the order within a lane needs no event.
        stream = self._streams[work.mark.lane]
        for mark in work.waits:
            if mark.lane == "host":
                self._host.wait_for(mark.number)
            else:
                stream.wait_event(self._event(mark))
        try:
            with torch.cuda.stream(stream):
                return work.call()
        finally:
            # Record the event even if the call failed, because a part of it may have been launched.
            self._event(work.mark).record(stream)

    def finish(self) -> None:
        """Wait until the host and the device have finished all work."""
        # The host comes first, because its work waits for streams; no stream waits for the host.
        self._host.wait_for()
        torch.cuda.synchronize(self.device)

    def _event(self, mark: LaneMark) -> torch.cuda.Event:
        return self._events[mark.lane][mark.number % EVENTS]


def executor(device: torch.device) -> Executor:
    """Return the executor for lanes of a device."""
    return Streams(device) if device.type == "cuda" else Immediately()
