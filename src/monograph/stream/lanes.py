"""Lanes: four orders of work, and between them exactly the waits that the data ask for.

Work on one lane is done in the order in which it was given; work on different lanes at the same time. Each piece of
work says which spaces it reads and writes, and the lanes find out what it has to wait for:

    a reader waits for the last writer;     a writer waits for the last writer and for all readers since

A wait is made only if no earlier one implies it, which a clock for each lane knows: how far of every lane has happened
before the lane's newest work (Mattern 1988, "Virtual Time and Global States of Distributed Systems"). So none of them
could be left out, and nobody has to write them down.
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
MARKS = 4096  # kept before those that nobody can wait for are dropped


class Home(StrEnum):
    """Where memory is: on the device, in the host's memory, or in a file that is mapped into it."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class Mark(NamedTuple):
    """A moment: when the work of that number on that lane is done."""

    lane: Lane
    number: int


@dataclass(eq=False)
class Space:
    """Memory that work reads and writes as one.

    Attributes:
        name: for people.
        home: where it is.
        written: when it was written last.
        read: when each lane has read it last, since it was written.
    """

    name: str
    home: Home
    written: Mark | None = None
    read: dict[Lane, Mark] = field(default_factory=dict)


class Work(NamedTuple):
    """One piece of work.

    Attributes:
        mark: when it is done.
        waits: what has to be done before, on other lanes.
        call: does it.
        reads: and `writes`: the spaces.
        moved_bytes: that it copies between homes; of work on the host what it reads and writes in files.
    """

    mark: Mark
    waits: tuple[Mark, ...]
    call: Callable[[], Any]
    reads: tuple[Space, ...]
    writes: tuple[Space, ...]
    moved_bytes: int


class Executor(Protocol):
    """What does the work: it may do later what it is given now, as long as lanes and waits are obeyed."""

    def run(self, work: Work) -> Any:
        """Do it, or take it on; the result of computing is there at once, if only as a tensor to come."""
        ...

    def finish(self) -> None:
        """Return when everything is done."""
        ...


class Immediately:
    """Does everything in the order in which it was given: what a CPU does."""

    def run(self, work: Work) -> Any:
        """Do it now."""
        return work.call()

    def finish(self) -> None:
        """Nothing is left to do."""


class Lanes:
    """Gives work to an executor, with its waits.

    Attributes:
        executor: what does it.
        moved_bytes: copied so far, by (from, to).
    """

    def __init__(self, executor: Executor):
        """Nothing has happened yet."""
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
        """What the call returns; it reads and writes no space but these."""
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
        """Compute on the host, with what is at home; so many bytes of it lie in files."""
        self.moved_bytes += Counter({(Home.DISK, Home.HOST): from_disk, (Home.HOST, Home.DISK): to_disk})
        self._give("host", call, tuple(reads), tuple(writes), from_disk + to_disk)

    def finish(self) -> None:
        """Return when everything is done; afterwards every space may be read and written by anybody."""
        self.executor.finish()
        # All lanes are level: marks of before are in every lane's past, and need not be kept.
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
        # The newest first: it may imply the older ones.
        for mark in sorted(set(needed), key=lambda mark: -mark.number):
            if mark.lane != lane and mark.number > happened[mark.lane]:
                waits.append(mark)
                for other, number in self._known(mark).items():
                    happened[other] = max(happened[other], number)
        # One found later may imply one found before, by way of a third lane.
        waits = [mark for mark in waits if not self._implied(mark, waits)]
        happened[lane] += 1
        mark = Mark(lane, happened[lane])
        # What is known when this is done: whoever waits for it learns all of that without a further wait.
        self._at[mark] = dict(happened)
        self._forget()
        for space in reads:
            space.read[lane] = mark
        for space in writes:
            # Readers of before have been waited for, and the next writer waits for this one.
            space.written, space.read = mark, {}
        return self.executor.run(Work(mark, tuple(waits), call, reads, writes, moved_bytes))

    def _forget(self) -> None:
        """Drop what every lane that is used knows to have happened: none of them has to wait for it any more."""
        if len(self._at) < max(MARKS, self._most):
            return
        used = [happened for lane, happened in self._happened.items() if happened[lane]]
        known = {lane: min(happened[lane] for happened in used) for lane in LANES}
        self._at = {mark: at for mark, at in self._at.items() if mark.number > known[mark.lane]}
        self._most = 2 * len(self._at)  # looked through as often as it doubles, whatever is left

    def _known(self, mark: Mark) -> dict[Lane, int]:
        """What has happened when the mark is reached; of a dropped one, which a new lane may meet, itself."""
        return self._at.get(mark, {mark.lane: mark.number})

    def _implied(self, mark: Mark, waits: list[Mark]) -> bool:
        return any(self._known(other).get(mark.lane, 0) >= mark.number for other in waits if other != mark)
