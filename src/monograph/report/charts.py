"""Describe charts as data, which a page's script draws with uPlot, and draw a still picture of each
for other readers.

A page has tables of columns, such as the metrics of a run, and charts, whose lines are columns of
these tables. A chart that names no axis of its own is drawn over the axis that the reader chooses:
tokens, updates or time.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monograph.report.markup import escaped
from monograph.report.metrics import Metric
from monograph.report.quantities import count

Row = Mapping[str, Any]
Columns = dict[str, list[float | None]]
Floats = NDArray[np.float64]

# What a chart of a run can be drawn over.
AXES = {"tokens": "tokens", "update": "updates", "time": "time"}
POINTS = 1200  # the most rows of a table: more than a chart is pixels wide
STILL_POINTS = 150
STILL_WIDTH, STILL_HEIGHT = 600, 200


@dataclass(frozen=True)
class Line:
    """A column drawn in a chart.

    Attributes:
        key: the column's name.
        label: what the reader calls it.
        style: "trend" (all values pale, their moving median strong), "line", "points" (a line with
            a dot at each value) or "dots" (no line).
        table: the number of its table.
        shade: the number of its colour; lines of one setting share it.
    """

    key: str
    label: str
    style: str = "trend"
    table: int = 0
    shade: int = 0


@dataclass(frozen=True)
class Mark:
    """A moment of a run: a vertical line with words, or without words a short tick in the colour of
    a warning.

    Attributes:
        row: the number of the row of table 0.
        label: the words; "" for a tick.
    """

    row: int
    label: str = ""


@dataclass(frozen=True)
class Axis:
    """The horizontal axis of a chart that is not of a run's progress.

    Attributes:
        key: the column of table 0 with the places.
        name: the axis's name.
        ticks: (place, text) pairs.
        is_log: whether it is logarithmic.
    """

    key: str
    name: str
    ticks: Sequence[tuple[float, str]]
    is_log: bool = False


@dataclass(frozen=True)
class Chart:
    """A chart.

    Attributes:
        name: its name in the page.
        title: what it shows, with the unit.
        lines: its lines.
        limits: the least and largest value shown before the reader zooms.
        levels: values to compare with, by name.
        marks: moments of the run.
        note: a sentence below it.
        is_count: whether values have SI prefixes.
        is_wide: whether it takes two thirds of the page's width.
        axis: its own horizontal axis; None for the one that the reader chooses.
        band: the keys of the columns between which the ground is coloured.
    """

    name: str
    title: str
    lines: Sequence[Line]
    limits: tuple[float, float]
    levels: Mapping[str, float] = field(default_factory=dict)
    marks: Sequence[Mark] = ()
    note: str = ""
    is_count: bool = False
    is_wide: bool = False
    axis: Axis | None = None
    band: tuple[str, str] | None = None


def columns(rows: Sequence[Row], keys: Sequence[str]) -> Columns:
    """Return the rows of a run's metrics as columns, one row for each update, at most `POINTS` of
    them.

    `time` is the seconds of training so far. An evaluation, which has none, gets those of the
    update before it. Of a long run every n-th update is kept, and every one that was evaluated,
    skipped or slow.
    """
    merged: dict[int, dict[str, Any]] = {}
    for row in rows:
        if "update" in row and ("tokens" in row or row["update"] in merged):
            merged.setdefault(row["update"], {}).update(row)
    kept = _thinned(list(merged.values()))
    seconds = 0.0
    found: Columns = {key: [] for key in ("tokens", "update", "time", *keys)}
    for row in kept:
        seconds = row.get("wall_s") or seconds
        for key, values in found.items():
            values.append(rounded(seconds if key == "time" else row.get(key)))
    return {
        key: values for key, values in found.items() if any(value is not None for value in values)
    }


def _thinned(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    step = -(-len(rows) // POINTS)
    return [
        row
        for index, row in enumerate(rows)
        if index % step == 0 or row is rows[-1] or _is_event(row)
    ]


def _is_event(row: Row) -> bool:
    return (
        bool(row.get("skipped")) or "slower" in row or any(key.startswith("eval_") for key in row)
    )


def rounded(value: float | None) -> float | None:
    """Return a number with five digits, more than a chart can show; None if it is none or not
    finite.
    """
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.5g}") if isinstance(value, float) else value


def present(table: Columns, key: str) -> Floats:
    """Return the values that a column has; no values if there is no such column."""
    return np.array([value for value in table.get(key, []) if value is not None], dtype=np.float64)


def limits(
    metric: Metric, lines: Sequence[Floats], levels: Iterable[float] = (), room: float = 1.15
) -> tuple[float, float]:
    """Return the ends of a metric's axis, with room around the values.

    Args:
        metric: says how; see `monograph.report.metrics.Limits`.
        lines: the values of each line, at least one value in all.
        levels: values to compare with, which are shown, too.
        room: how much higher the axis is than its values, if it begins at 0.
    """
    values = np.concatenate([*lines, np.array(list(levels), dtype=np.float64)])
    low = float(values.min())
    high = float(values.max())
    if metric.limits == "zero":
        return min(0.0, low), room * high or 1.0
    if metric.limits == "spikes":
        return min(0.0, low), room * float(np.quantile(values, 0.995)) or 1.0
    if metric.limits == "late":
        last = max(float(line[-1]) for line in lines if len(line))
        high = max(
            [min(float(line.max()), 2.2 * last) for line in lines if len(line)] + list(levels)
        )
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    return low - margin, high + margin


def lines_of(
    metric: Metric, table: Columns, at: int = 0, name: str = "", shade: int = 0
) -> list[Line]:
    """Return the lines of a metric that a table has columns for.

    Args:
        metric: the metric.
        table: the columns.
        at: the table's number.
        name: the run's name, if the chart shows several; "" for one run.
        shade: the number of the run's colour; of one run, held-out values have their own.
    """
    lines = list[Line]()
    if metric.key in table:
        lines.append(
            Line(metric.key, name or metric.label, "line" if metric.is_line else "trend", at, shade)
        )
    if metric.held_out in table:
        label = "held out"
        if name:
            label = f"{name}, held out" if lines else name
        lines.append(Line(metric.held_out, label, "points", at, shade if name else len(lines)))
    return lines


def moving_median(
    values: Floats, share: int = 40, points: int = 300
) -> tuple[NDArray[np.int64], Floats]:
    """Return up to `points` indices and the medians of one `share`-th of the values around them.

    A median, unlike a mean, does not turn a spike into a plateau.
    """
    half = len(values) // (2 * share)
    at = np.unique(
        np.linspace(0, len(values) - 1, min(len(values), points)).round().astype(np.int64)
    )
    return at, np.array([np.median(values[max(0, i - half) : i + half + 1]) for i in at])


# ---- markup --------------------------------------------------------------------------------------


def payload(tables: Sequence[Columns], charts: Sequence[Chart]) -> str:
    """Return tables and charts as JSON that can stand inside a page."""
    described = {"axes": AXES, "tables": tables, "charts": [asdict(chart) for chart in charts]}
    return json.dumps(described, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def figure(chart: Chart, tables: Sequence[Columns]) -> str:
    """Return a chart's place in the page, with a still picture and the first and last values in
    words.
    """
    size = ' class="chart wide"' if chart.is_wide else ' class="chart"'
    note = f'<p class="note">{escaped(chart.note)}</p>' if chart.note else ""
    words = _ends(chart, tables)
    return (
        f'<figure{size} id="chart-{chart.name}"><figcaption><h2>{escaped(chart.title)}</h2></figcaption>\n'
        f'<div class="plot">{_still(chart, tables, words)}</div><p class="readout">{escaped(words)}</p>{note}</figure>'
    )


def _ends(chart: Chart, tables: Sequence[Columns]) -> str:
    """Return the values at both ends of the chart's first lines, and its levels, in words."""
    words = []
    for line in chart.lines[:4]:
        values = present(tables[line.table], line.key)
        if len(values):
            first, last = (count(value) for value in (values[0], values[-1]))
            words.append(
                f"{line.label}: {first} at first, {last} at last"
                if len(values) > 1
                else f"{line.label}: {last}"
            )
    words += [f"{name}: {count(level)}" for name, level in chart.levels.items()]
    return "; ".join(words)


def _still(chart: Chart, tables: Sequence[Columns], words: str) -> str:
    """Return a picture without words, which any width can stretch, for readers without JavaScript."""
    key = chart.axis.key if chart.axis else "tokens"
    places = [present(tables[line.table], key) for line in chart.lines]
    begin = min((float(each.min()) for each in places if len(each)), default=0.0)
    end = max((float(each.max()) for each in places if len(each)), default=1.0)
    paths = [_path(line, tables[line.table], key, (begin, end), chart) for line in chart.lines]
    paths += [
        _drawn([(0.0, level), (1.0, level)], chart.limits, "level")
        for level in chart.levels.values()
    ]
    return (
        f'<svg viewBox="0 0 {STILL_WIDTH} {STILL_HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escaped(chart.title)}: {escaped(words)}">{"".join(paths)}</svg>'
    )


def _path(line: Line, table: Columns, key: str, ends: tuple[float, float], chart: Chart) -> str:
    pairs = zip(table[key], table.get(line.key, []), strict=False)
    known = [(x, y) for x, y in pairs if x is not None and y is not None]
    if not known:
        return ""
    at, values = moving_median(np.array([y for _, y in known]), points=STILL_POINTS)
    begin, end = ends
    shares = [
        ((known[i][0] - begin) / ((end - begin) or 1.0), float(y))
        for i, y in zip(at, values, strict=True)
    ]
    return _drawn(shares, chart.limits, f"shade{line.shade}")


def _drawn(points: Sequence[tuple[float, float]], limits: tuple[float, float], role: str) -> str:
    low, high = limits
    height = (high - low) or 1.0
    inside = [(x, min(max((high - y) / height, 0.0), 1.0)) for x, y in points]
    corners = " ".join(f"{STILL_WIDTH * x:.0f},{STILL_HEIGHT * y:.0f}" for x, y in inside)
    return f'<polyline class="{role}" points="{corners}"/>'
