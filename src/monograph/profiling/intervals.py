"""Split the time of a stretch of work into shares that add up: the device's busy intervals, and
gaps by their cause.

This needs no torch: intervals come from a profiler's trace (`monograph.profiling.trace`) or from a
test. On a CPU, host and device are one: in a busy interval an operator computes, and a gap is spent
in Python, guards
and dispatch.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal, NamedTuple, Self, get_args

Part = Literal[
    "matmul",
    "attention",
    "loss head",
    "optimizer",
    "elementwise",
    "data wait",
    "host gaps",
    "transfers",
    "other",
]
Cause = Literal["data", "sync", "launch", "kernel gap", "transfer", "other"]

PARTS: tuple[Part, ...] = get_args(Part)
# The part that a gap counts towards, by its cause.
OF_CAUSE: Mapping[Cause, Part] = {
    "data": "data wait",
    "sync": "host gaps",
    "launch": "host gaps",
    "kernel gap": "host gaps",
    "transfer": "transfers",
    "other": "other",
}
# Shape and strides of each operand.
Operands = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
# Longest gap that the device itself leaves between two kernels that were both launched long before.
KERNEL_GAP_S = 2e-6


@dataclass(frozen=True, slots=True)
class Kernel:
    """A busy interval of the device, in seconds on the trace's clock.

    Attributes:
        part: the part that it computes; "transfers" is a copy from or to the host.
        begin_s: the time at which it begins.
        end_s: the time at which it ends.
        flops: its FLOPs; None where unknown.
        moved_bytes: bytes read and written; None where unknown.
        launched_s: the time at which the host launched it; None where the trace does not say.
        name: the name of its operator or kernel.
        operands: shape and strides of a product's two operands, None where unknown.
    """

    part: Part
    begin_s: float
    end_s: float
    flops: float | None = None
    moved_bytes: float | None = None
    launched_s: float | None = None
    name: str = ""
    operands: Operands | None = None

    @property
    def seconds(self) -> float:
        """Return the seconds that it runs."""
        return self.end_s - self.begin_s


class Span(NamedTuple):
    """A wait of the host: "data", waiting for a window; "sync", waiting for the device."""

    kind: Literal["data", "sync"]
    begin_s: float
    end_s: float


class Timeline(NamedTuple):
    """A stretch of work on the host's clock.

    Attributes:
        begin_s: the time at which it begins.
        end_s: the time at which it ends.
        kernels: the device's busy intervals.
        spans: the host's waits.
        updates: the intervals in which the optimizer worked, in order.
        events: the number of events that a profiler recorded outside updates, by the part in whose
            kernels they lie; events between kernels count as "host gaps".
        update_events: the same for events inside updates.
    """

    begin_s: float
    end_s: float
    kernels: Sequence[Kernel]
    spans: Sequence[Span] = ()
    updates: Sequence[tuple[float, float]] = ()
    events: Mapping[Part, int] = {}  # noqa: RUF012 (never written to)
    update_events: Mapping[Part, int] = {}  # noqa: RUF012

    @property
    def rest(self) -> list[tuple[float, float]]:
        """Return the intervals before, between and after updates."""
        edges = [self.begin_s, *chain.from_iterable(self.updates), self.end_s]
        return list(zip(edges[::2], edges[1::2], strict=True))


@dataclass(frozen=True)
class Spent:
    """Seconds of a stretch, by part.

    Attributes:
        parts: all of `PARTS`; they add up to the stretch.
        gaps: the seconds in which nothing was computed, by cause.
    """

    parts: Mapping[Part, float]
    gaps: Mapping[Cause, float] = field(default_factory=dict)

    @property
    def total_s(self) -> float:
        """Return the seconds of the whole stretch."""
        return sum(self.parts.values())

    def share(self, part: Part) -> float:
        """Return the part's share of the stretch, 0 to 1; all of an empty stretch is "other"."""
        return self.parts[part] / self.total_s if self.total_s else float(part == "other")

    def __add__(self, other: Self) -> Self:
        gaps = {
            cause: self.gaps.get(cause, 0.0) + other.gaps.get(cause, 0.0)
            for cause in (*self.gaps, *other.gaps)
        }
        return type(self)({part: self.parts[part] + other.parts[part] for part in PARTS}, gaps)


def spent(timeline: Timeline, within: Iterable[tuple[float, float]] | None = None) -> Spent:
    """Attribute every moment of the stretch, or of the intervals `within` it, to one part.

    A moment in which kernels run belongs to their parts, in equal shares; a copy at the same time
    is hidden and does not count. A moment in which only copies run is a transfer. A moment in which
    nothing runs is a gap, with the first cause that applies: "data" or "sync" where the host was in
    such a span; "launch" if the next kernel was launched after the one before had ended, or if none
    follows; "kernel gap" if the whole gap is shorter than `KERNEL_GAP_S`; "other".
    """
    stretches = [(timeline.begin_s, timeline.end_s)] if within is None else within
    return sum(
        (_spent(timeline, *stretch) for stretch in stretches), Spent(dict.fromkeys(PARTS, 0.0))
    )


def _spent(timeline: Timeline, begin: float, end: float) -> Spent:
    parts: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
    gaps: defaultdict[Cause, float] = defaultdict(float)
    kernels = [kernel for kernel in timeline.kernels if kernel.end_s > kernel.begin_s]
    kernels.sort(key=lambda kernel: kernel.begin_s)
    edges = sorted({begin, end, *_edges(kernels, begin, end), *_edges(timeline.spans, begin, end)})
    running: list[Kernel] = []
    following = 0
    last_end = begin
    for left, right in zip(edges, edges[1:], strict=False):
        running = [kernel for kernel in running if kernel.end_s > left]
        while following < len(kernels) and kernels[following].begin_s <= left:
            if kernels[following].end_s > left:
                running.append(kernels[following])
            last_end = max(last_end, kernels[following].end_s)
            following += 1
        if computing := [kernel for kernel in running if kernel.part != "transfers"]:
            for kernel in computing:
                parts[kernel.part] += (right - left) / len(computing)
            continue
        coming = kernels[following] if following < len(kernels) else None
        cause: Cause = (
            "transfer" if running else _cause(timeline.spans, left, right, coming, last_end)
        )
        gaps[cause] += right - left
        parts[OF_CAUSE[cause]] += right - left
    return Spent(parts, dict(gaps))


def _edges(intervals: Iterable[Kernel | Span], begin: float, end: float) -> list[float]:
    return [
        min(max(edge, begin), end)
        for interval in intervals
        for edge in (interval.begin_s, interval.end_s)
    ]


def _cause(
    spans: Sequence[Span], left: float, right: float, coming: Kernel | None, last_end: float
) -> Cause:
    """Return why nothing runs between `left` and `right`; no span begins or ends between them."""
    over = {span.kind for span in spans if span.begin_s <= left and span.end_s >= right}
    if "data" in over:
        return "data"
    if "sync" in over:
        return "sync"
    if coming is None or (coming.launched_s is not None and coming.launched_s > last_end):
        return "launch"
    return "kernel gap" if coming.begin_s - last_end < KERNEL_GAP_S else "other"


def unwatched(
    watched: Timeline, event_s: float, whole_s: float, optimizer_s: float, overlaps: bool
) -> Spent:
    """Return the time of one unprofiled update by part, estimated from a few profiled ones.

    Args:
        watched: a few profiled updates.
        event_s: see `undisturbed`.
        whole_s: seconds of an unprofiled update.
        optimizer_s: seconds of its optimizer.
        overlaps: whether the device still runs earlier work when the host begins the optimizer, so
            that the two cannot be timed apart.
    """
    if overlaps:
        return undisturbed(
            spent(watched),
            Counter(watched.events) + Counter(watched.update_events),
            event_s,
            whole_s,
        )
    optimizer = spent(watched, watched.updates)
    rest = spent(watched, watched.rest)
    in_updates = undisturbed(optimizer, watched.update_events, event_s, optimizer_s)
    return in_updates + undisturbed(rest, watched.events, event_s, whole_s - optimizer_s)


def undisturbed(
    profiled: Spent, events: Mapping[Part, int], event_s: float, measured_s: float
) -> Spent:
    """Return a profiled stretch's time by part, corrected to an unprofiled one that took
    `measured_s`.

    Args:
        profiled: the seconds of the profiled stretch.
        events: the number of events that the profiler recorded in it, by part: see `Timeline`.
        event_s: seconds to record one event, which the trace shows outside the event, in its
            caller.
        measured_s: the total to which the remaining time is scaled.
    """
    parts = {part: max(0.0, profiled.parts[part] - events.get(part, 0) * event_s) for part in PARTS}
    if not (left := sum(parts.values())):
        parts = dict(profiled.parts)
        left = profiled.total_s
    scale = measured_s / left if left else 0.0
    gaps = {
        cause: seconds * scale * parts[OF_CAUSE[cause]] / profiled.parts[OF_CAUSE[cause]]
        if seconds
        else 0.0
        for cause, seconds in profiled.gaps.items()
    }
    return Spent({part: parts[part] * scale for part in PARTS}, gaps)
