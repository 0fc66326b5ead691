"""Lanes: four queues of work, and between them exactly the waits that the data require.

Work on one lane is done in order, work on different lanes at the same time. Each piece of work says which spaces it
reads and writes, and the lanes derive its waits:

    a reader waits for the last writer;     a writer waits for the last writer and for all readers since

A wait is made only if no earlier one implies it. To know that, each lane has a vector clock: how much of every lane has
happened before its own newest work (Mattern 1988, "Virtual Time and Global States of Distributed Systems"). So no wait
is superfluous, and nobody has to write waits down.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor

Lane = Literal["compute", "in", "out", "host"]
LANES: tuple[Lane, ...] = ("compute", "in", "out", "host")
MARKS = 4096  # marks that are kept until those that nothing can wait for are dropped


class Home(StrEnum):
    """The kind of memory: the device's, the host's, or a file that is mapped into the host's."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class Mark(NamedTuple):
    """The moment at which a lane's work of this number is done."""

    lane: Lane
    number: int


@dataclass(eq=False)
class Space:
    """Memory that work reads and writes as a whole.

    Attributes:
        name: its name in messages.
        home: the kind of memory.
        written: the moment of the last write.
        read: for each lane the moment of its last read since that write.
    """

    name: str
    home: Home
    written: Mark | None = None
    read: dict[Lane, Mark] = field(default_factory=dict)


class Work(NamedTuple):
    """One piece of work.

    Attributes:
        mark: the moment at which it is done.
        waits: the moments on other lanes that have to come before it.
        call: the function that does it.
        reads: the spaces that it reads; `writes`: those that it writes.
        moved_bytes: bytes copied between kinds of memory; for work on the host, bytes read and written in files.
    """

    mark: Mark
    waits: tuple[Mark, ...]
    call: Callable[[], Any]
    reads: tuple[Space, ...]
    writes: tuple[Space, ...]
    moved_bytes: int


class Executor(Protocol):
    """Does the work, now or later, in the order of lanes and waits."""

    def run(self, work: Work) -> Any:
        """Do the work or queue it; return a computation's result, which may be a tensor that is not ready yet."""
        ...

    def finish(self) -> None:
        """Return when all work is done."""
        ...


class Immediately:
    """An executor for a CPU, which does all work at once, in the order in which it comes."""

    def run(self, work: Work) -> Any:
        """Do the work."""
        return work.call()

    def finish(self) -> None:
        """Do nothing: all work is done."""


class Lanes:
    """Gives an executor work with its waits.

    Attributes:
        executor: does the work.
        moved_bytes: bytes copied so far, by (from, to).
    """

    def __init__(self, executor: Executor):
        """Begin without any work."""
        self.executor = executor
        self.moved_bytes: Counter[tuple[Home, Home]] = Counter()
        self._happened: dict[Lane, dict[Lane, int]] = {lane: dict.fromkeys(LANES, 0) for lane in LANES}
        self._at: dict[Mark, dict[Lane, int]] = {}
        self._most = 0

    def copy(self, target: Tensor, source: Tensor, writes: Space, reads: Space) -> None:
        """Copy a part of one space to a part of another: `in` to the device, `out` from it."""
        lane: Lane = "in" if writes.home == Home.DEVICE else "out"
        moved = source.numel() * source.element_size()
        self.moved_bytes[reads.home, writes.home] += moved
        self._give(lane, lambda: target.copy_(source, non_blocking=True), (reads,), (writes,), moved)

    def compute(self, call: Callable[[], Any], reads: Iterable[Space] = (), writes: Iterable[Space] = ()) -> Any:
        """Call a function that reads and writes these spaces alone, and return its result."""
        return self._give("compute", call, tuple(reads), tuple(writes), 0)

    def host(
        self,
        call: Callable[[], object],
        reads: Iterable[Space] = (),
        writes: Iterable[Space] = (),
        *,
        from_disk: int = 0,
        to_disk: int = 0,
    ) -> None:
        """Compute on the host, with the host's memory, of which so many bytes lie in files."""
        self.moved_bytes += Counter({(Home.DISK, Home.HOST): from_disk, (Home.HOST, Home.DISK): to_disk})
        self._give("host", call, tuple(reads), tuple(writes), from_disk + to_disk)

    def finish(self) -> None:
        """Return when all work is done; afterwards every space may be read and written without a wait."""
        self.executor.finish()
        # Earlier marks are in every lane's past now, so they need not be kept.
        newest = {lane: self._happened[lane][lane] for lane in LANES}
        self._happened = {lane: dict(newest) for lane in LANES}
        self._at.clear()

    def _give(
        self, lane: Lane, call: Callable[[], Any], reads: tuple[Space, ...], writes: tuple[Space, ...], moved_bytes: int
    ) -> Any:
        happened = self._happened[lane]
        needed = [space.written for space in (*reads, *writes) if space.written]
        needed += [mark for space in writes for mark in space.read.values()]
        waits = []
        # The newest first, because it may imply the older ones.
        for mark in sorted(set(needed), key=lambda mark: -mark.number):
            if mark.lane != lane and mark.number > happened[mark.lane]:
                waits.append(mark)
                for other, number in self._known(mark).items():
                    happened[other] = max(happened[other], number)
        # A wait found later may imply one found before, by way of a third lane.
        waits = [mark for mark in waits if not self._implied(mark, waits)]
        happened[lane] += 1
        mark = Mark(lane, happened[lane])
        # The vector clock of the moment at which this is done: work that waits for it needs no further wait for these.
        self._at[mark] = dict(happened)
        self._forget()
        for space in reads:
            space.read[lane] = mark
        for space in writes:
            # Earlier readers have been waited for, and the next writer waits for this one.
            space.written, space.read = mark, {}
        return self.executor.run(Work(mark, tuple(waits), call, reads, writes, moved_bytes))

    def _forget(self) -> None:
        """Drop the marks in the past of every lane that is used, since none has to wait for them any more."""
        if len(self._at) < max(MARKS, self._most):
            return
        used = [happened for lane, happened in self._happened.items() if happened[lane]]
        known = {lane: min(happened[lane] for happened in used) for lane in LANES}
        self._at = {mark: at for mark, at in self._at.items() if mark.number > known[mark.lane]}
        self._most = 2 * len(self._at)  # not again before the number has doubled: the cost for each mark is bounded

    def _known(self, mark: Mark) -> dict[Lane, int]:
        """Return the vector clock of a mark; for a dropped one, which a new lane may meet, the mark alone."""
        return self._at.get(mark, {mark.lane: mark.number})

    def _implied(self, mark: Mark, waits: list[Mark]) -> bool:
        return any(self._known(other).get(mark.lane, 0) >= mark.number for other in waits if other != mark)
