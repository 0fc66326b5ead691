"""Executors that do copies as late as they may, or in any order that they may: what a device is
free to do.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any

from monograph.stream.lanes import LANES, Lane, LaneMark, LaneWork
from stream.races import Dropped


class Late:
    """Does a copy only when somebody waits for it.

    Attributes:
        dropped: a wait that it does not obey.
    """

    def __init__(self, dropped: Dropped | None = None) -> None:
        self.dropped = dropped
        self.left: dict[Lane, deque[LaneWork]] = {lane: deque() for lane in LANES}
        self.done: dict[Lane, int] = dict.fromkeys(LANES, 0)

    def run(self, work: LaneWork) -> Any:
        if work.mark.lane == "compute":
            return self._do(work)
        self.left[work.mark.lane].append(work)
        return None

    def finish(self) -> None:
        for lane, left in self.left.items():
            while left:
                self._next(lane)

    def _next(self, lane: Lane) -> None:
        self._do(self.left[lane].popleft())

    def _do(self, work: LaneWork) -> Any:
        for mark in work.waits:
            if (work.mark, mark) != self.dropped:
                self._reach(mark)
        result = work.call()
        self.done[work.mark.lane] = work.mark.number
        return result

    def _reach(self, mark: LaneMark) -> None:
        while self.done[mark.lane] < mark.number:
            self._next(mark.lane)


class AnyOrder(Late):
    """Does a random number of copies, on random lanes, before each piece of work."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)

    def run(self, work: LaneWork) -> Any:
        while self.random.random() < 0.6 and (
            busy := [lane for lane, left in self.left.items() if left]
        ):
            self._next(self.random.choice(busy))
        return super().run(work)
