"""Split the time of a stretch of work into parts that add up: what the device computes, and gaps by
their cause.

A gap is a time in which the device computes nothing. On a CPU, host and device are the same: the device
is busy while an operator computes, and a gap is spent in Python, in the guards of compiled code and in
torch's dispatcher.

Nothing here needs torch. Intervals come from a profiler's trace (`monograph.profiling.trace`) or
from a test.
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
# The cause of a gap.
# "data": the host waits for a window of rows. "sync": the host waits for the device. "launch": the
# host has not launched the next kernel yet. "kernel gap": the device's own gap between two kernels.
# "transfer": the device only copies. "other": unknown.
Cause = Literal["data", "sync", "launch", "kernel gap", "transfer", "other"]

PARTS: tuple[Part, ...] = get_args(Part)
# The part to which a gap's time is added.
PART_OF_CAUSE: Mapping[Cause, Part] = {
    "data": "data wait",
    "sync": "host gaps",
    "launch": "host gaps",
    "kernel gap": "host gaps",
    "transfer": "transfers",
    "other": "other",
}
# The (shape, strides) of each operand of a product.
Operands = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
# The longest gap that the device itself leaves between two kernels that were both launched long before.
KERNEL_GAP_S = 2e-6


@dataclass(frozen=True, slots=True)
class Kernel:
    """A busy interval of the device, in seconds on the trace's clock.

    Attributes:
        part: the part that it computes; "transfers" is a copy from or to the host.
        begin_s: the time at which it begins.
        end_s: the time at which it ends.
        flops: its FLOPs; None: unknown.
        moved_bytes: bytes read and written; None: unknown.
        launched_s: the time at which the host launched it; None: unknown.
        name: the name of its operator or kernel.
        operands: the two operands of a product; None: unknown, or not a product.
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
        """Return the kernel's duration."""
        return self.end_s - self.begin_s


class Span(NamedTuple):
    """An interval in which the host waits: "data", for a window of rows; "sync", for the device."""

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
        updates: (begin, end) of the intervals in which the optimizer worked, in order.
        event_counts: the number of events that a profiler recorded outside `updates`, by the part of
            the kernel around them; events between kernels count as "host gaps".
        update_event_counts: the number of events inside `updates`, by part.
    """

    begin_s: float
    end_s: float
    kernels: Sequence[Kernel]
    spans: Sequence[Span] = ()
    updates: Sequence[tuple[float, float]] = ()
    event_counts: Mapping[Part, int] = {}  # noqa: RUF012 (never written to)
    update_event_counts: Mapping[Part, int] = {}  # noqa: RUF012

    @property
    def rest(self) -> list[tuple[float, float]]:
        """Return (begin, end) of the intervals before, between and after updates."""
        # The end of one update begins an interval of the rest, and the beginning of the next one ends it.
        edges = [self.begin_s, *chain.from_iterable(self.updates), self.end_s]
        return list(zip(edges[::2], edges[1::2], strict=True))


@dataclass(frozen=True)
class Spent:
    """The seconds of a stretch of work, by part.

    Attributes:
        parts: the seconds of each of `PARTS`; they add up to the stretch.
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
        if not self.total_s:
            return 1.0 if part == "other" else 0.0
        return self.parts[part] / self.total_s

    def __add__(self, other: Self) -> Self:
        gaps = {
            cause: self.gaps.get(cause, 0.0) + other.gaps.get(cause, 0.0)
            for cause in (*self.gaps, *other.gaps)
        }
        return type(self)({part: self.parts[part] + other.parts[part] for part in PARTS}, gaps)


def time_by_part(timeline: Timeline, within: Iterable[tuple[float, float]] | None = None) -> Spent:
    """Return the seconds of each part in a stretch of work.

    A moment in which several kernels compute is divided equally between them; a copy at the same time does
    not count. A moment in which only copies run is a transfer. A moment in which nothing runs is a gap, and
    has the first of these causes that applies:

    - "data" or "sync": the host is in such a span.
    - "launch": the next kernel was launched after the previous kernel had ended, or no kernel
      follows.
    - "kernel gap": the whole gap is shorter than `KERNEL_GAP_S`.
    - "other".

    Args:
        timeline: the stretch.
        within: (begin, end) of intervals of the stretch; None: all of it.
    """
    stretches = [(timeline.begin_s, timeline.end_s)] if within is None else within
    zero = Spent(dict.fromkeys(PARTS, 0.0))
    return sum((_time_by_part_between(timeline, begin, end) for begin, end in stretches), zero)


def _time_by_part_between(timeline: Timeline, begin: float, end: float) -> Spent:
    """Return the seconds of each part in one interval of a stretch."""
    parts: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
    gaps: defaultdict[Cause, float] = defaultdict(float)
    kernels = [kernel for kernel in timeline.kernels if kernel.end_s > kernel.begin_s]
    kernels.sort(key=lambda kernel: kernel.begin_s)
    # All times at which something begins or ends. Between two neighbouring edges nothing changes.
    edges = sorted({begin, end, *_edges(kernels, begin, end), *_edges(timeline.spans, begin, end)})
    running: list[Kernel] = []
    # The index of the first kernel that has not begun, and the latest end of those that have.
    next_index = 0
    last_end = begin
    for left, right in zip(edges, edges[1:], strict=False):
        running = [kernel for kernel in running if kernel.end_s > left]
        while next_index < len(kernels) and kernels[next_index].begin_s <= left:
            kernel = kernels[next_index]
            if kernel.end_s > left:
                running.append(kernel)
            last_end = max(last_end, kernel.end_s)
            next_index += 1
        computing = [kernel for kernel in running if kernel.part != "transfers"]
        if computing:
            for kernel in computing:
                parts[kernel.part] += (right - left) / len(computing)
            continue
        cause: Cause = "transfer"
        if not running:
            next_kernel = kernels[next_index] if next_index < len(kernels) else None
            cause = _cause(timeline.spans, left, right, next_kernel, last_end)
        gaps[cause] += right - left
        parts[PART_OF_CAUSE[cause]] += right - left
    return Spent(parts, dict(gaps))


def _edges(intervals: Iterable[Kernel | Span], begin: float, end: float) -> list[float]:
    """Return the beginnings and ends of intervals, clamped to [begin, end]."""
    return [
        min(max(edge, begin), end)
        for interval in intervals
        for edge in (interval.begin_s, interval.end_s)
    ]


def _cause(
    spans: Sequence[Span], left: float, right: float, next_kernel: Kernel | None, last_end: float
) -> Cause:
    """Return why nothing runs between `left` and `right`.

    Args:
        spans: the host's waits; none begins or ends between `left` and `right`.
        left: the beginning.
        right: the end.
        next_kernel: the first kernel after `right`; None: there is none.
        last_end: the end of the last kernel before `left`.
    """
    waits = {span.kind for span in spans if span.begin_s <= left and span.end_s >= right}
    if "data" in waits:
        return "data"
    if "sync" in waits:
        return "sync"
    if next_kernel is None:
        return "launch"
    if next_kernel.launched_s is not None and next_kernel.launched_s > last_end:
        return "launch"
    return "kernel gap" if next_kernel.begin_s - last_end < KERNEL_GAP_S else "other"


def estimate_update(
    profiled: Timeline, event_s: float, update_s: float, optimizer_s: float, overlaps: bool
) -> Spent:
    """Estimate the seconds of each part in an unprofiled update, from a few profiled updates.

    Args:
        profiled: the profiled updates.
        event_s: the profiler's seconds to record one event.
        update_s: seconds of an unprofiled update.
        optimizer_s: seconds of the optimizer in an unprofiled update.
        overlaps: whether the device still runs earlier work when the host begins the optimizer. Then
            `optimizer_s` says nothing about the device, and is not used.
    """
    if overlaps:
        event_counts = Counter(profiled.event_counts) + Counter(profiled.update_event_counts)
        return estimate_unprofiled(time_by_part(profiled), event_counts, event_s, update_s)
    optimizer = time_by_part(profiled, profiled.updates)
    rest = time_by_part(profiled, profiled.rest)
    in_optimizer = estimate_unprofiled(
        optimizer, profiled.update_event_counts, event_s, optimizer_s
    )
    in_rest = estimate_unprofiled(rest, profiled.event_counts, event_s, update_s - optimizer_s)
    return in_optimizer + in_rest


def estimate_unprofiled(
    profiled: Spent, event_counts: Mapping[Part, int], event_s: float, measured_s: float
) -> Spent:
    """Estimate the seconds of each part in an unprofiled stretch, from a profiled stretch.

    Args:
        profiled: the seconds of the profiled stretch.
        event_counts: the number of events that the profiler recorded in it, by part (see `Timeline`).
        event_s: the profiler's seconds to record one event. In the trace, this time is not in the event
            itself, but in the event around it.
        measured_s: the seconds of the unprofiled stretch.
    """
    parts = {
        part: max(0.0, profiled.parts[part] - event_counts.get(part, 0) * event_s) for part in PARTS
    }
    remaining_s = sum(parts.values())
    if not remaining_s:
        # If the estimated cost of events exceeds all of the time, it is ignored.
        parts = dict(profiled.parts)
        remaining_s = profiled.total_s
    scale = measured_s / remaining_s if remaining_s else 0.0
    # The gaps of a part shrink by the same factor as the part.
    gaps = dict.fromkeys(profiled.gaps, 0.0)
    for cause, seconds in profiled.gaps.items():
        if seconds:
            part = PART_OF_CAUSE[cause]
            gaps[cause] = seconds * scale * parts[part] / profiled.parts[part]
    return Spent({part: parts[part] * scale for part in PARTS}, gaps)
