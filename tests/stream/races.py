"""An independent judge of a schedule: from the order of each lane and the waits alone, what happens
before what.

It knows nothing of how the waits were found. A schedule is free of races if any two works that
touch the same space, at least one of them writing, are ordered.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from monograph.stream.lanes import Immediately, Lane, LaneMark, LaneWork, Space
from tape import memory, tensors


class Race(NamedTuple):
    """Two works on one space that nothing orders, by their places in the schedule."""

    space: str
    earlier: int
    later: int


class Recorder(Immediately):
    """Does everything at once, and writes down what it was.

    Attributes:
        works: in the order in which they were given.
        barriers: before which of them the host waited for everything.
    """

    def __init__(self) -> None:
        self.works: list[LaneWork] = []
        self.barriers: list[int] = []

    def run(self, work: LaneWork) -> Any:
        self.works.append(work._replace(call=_forgotten))  # or what it holds would never be freed
        return super().run(work)

    def finish(self) -> None:
        self.barriers.append(len(self.works))


def _forgotten() -> None:
    raise AssertionError("written down, and not to be done again")


Dropped = tuple[LaneMark, LaneMark]  # (who waits, for what)


def before(recorder: Recorder, dropped: Dropped | None = None) -> list[int]:
    """For each work the set of works that happen before it, as bits."""
    place: dict[LaneMark, int] = {}
    newest: dict[Lane, int] = {}
    barriers, done, found = set(recorder.barriers), 0, list[int]()
    for at, work in enumerate(recorder.works):
        if at in barriers:
            done = (1 << at) - 1
        known = done
        edges = [place[mark] for mark in work.waits if (work.mark, mark) != dropped]
        if work.mark.lane in newest:
            edges.append(newest[work.mark.lane])
        for edge in edges:
            known |= found[edge] | 1 << edge
        found.append(known)
        place[work.mark] = newest[work.mark.lane] = at
    return found


def races(recorder: Recorder, dropped: Dropped | None = None) -> Iterator[Race]:
    """All pairs of works that touch one space, at least one writing, in no order."""
    happened = before(recorder, dropped)
    touched, written = defaultdict[Space, int](int), defaultdict[Space, int](int)
    for at, work in enumerate(recorder.works):
        for spaces, conflicting in ((work.reads, written), (work.writes, touched)):
            for space in spaces:
                unordered = conflicting[space] & ~happened[at]
                while unordered:
                    earlier = unordered.bit_length() - 1
                    unordered ^= 1 << earlier
                    yield Race(space.name, earlier, at)
        for space in work.reads:
            touched[space] |= 1 << at
        for space in work.writes:
            touched[space] |= 1 << at
            written[space] |= 1 << at


def waits(recorder: Recorder, begin: int = 0) -> list[Dropped]:
    """Every wait of the works from a place on."""
    return [(work.mark, mark) for work in recorder.works[begin:] for mark in work.waits]


def touched(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[int, bool]]:
    """(memory, whether it is written) of an operator's tensors; of a view nothing, which reads
    nothing yet.
    """
    if any(
        each.alias_info is not None and not each.alias_info.is_write
        for each in func._schema.returns
    ):
        return
    schema = {each.name: each.alias_info for each in func._schema.arguments}
    for name, value in (dict(zip(schema, args, strict=False)) | kwargs).items():
        info = schema[name]
        for tensor in tensors(value):
            yield memory(tensor), info is not None and info.is_write


def poison_(tensor: Tensor) -> None:
    """Make it useless: NaN, or what is no likely number."""
    tensor.fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)
