"""Describe charts as data, which a page's script draws (`monograph.report.chart_markup`).

A page has tables and charts. A table is a dictionary of columns, such as the metrics of a run. The
lines of a chart are columns of these tables. A chart without an axis of its own is drawn over the
horizontal axis that the reader chooses: tokens, updates or time.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from monograph.report.metrics import Metric

MetricsRow = Mapping[str, Any]
Yardsticks = Mapping[str, float]  # bits per byte to compare a run with, by name, such as "gzip -9"
Columns = dict[str, list[float | None]]
Floats = NDArray[np.float64]

POINTS = 1200  # maximum of evenly spaced rows in a table; a chart is fewer pixels wide

# How a line is drawn.
#   trend:   all values pale, and their moving median strong
#   line:    a line without dots
#   points:  a line with a dot at each value
#   dots:    dots without a line
#   star:    large dots without a line, for the best value
#   edge:    not drawn; the column is only the lower or upper border of a coloured band (`Chart.band`)
LineStyle = Literal["trend", "line", "points", "dots", "star", "edge"]


@dataclass(frozen=True)
class Line:
    """A column drawn in a chart.

    Attributes:
        key: the column's key.
        label: the line's name for the reader; "" for a line that has none.
        style: how it is drawn.
        table: the index of its table.
        shade: the index of its colour. In the chart of a sweep, the lines of runs that differ only in
            the seed have the same colour.
    """

    key: str
    label: str
    style: LineStyle = "trend"
    table: int = 0
    shade: int = 0


@dataclass(frozen=True)
class ChartMark:
    """A moment of a run: a vertical line with words, or a short tick in the colour of a warning.

    Attributes:
        row: the index of the row of table 0.
        label: the words; "" for a tick.
    """

    row: int
    label: str = ""


@dataclass(frozen=True)
class ChartAxis:
    """A chart's own horizontal axis, for a chart that does not show a run's progress.

    Attributes:
        key: the column with the places on the axis.
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
        name: its name in the page, which is unique.
        title: what it shows, with the unit.
        lines: its lines.
        limits: the lowest and highest value shown before the reader zooms.
        levels: values to compare the lines with, by name.
        marks: moments of the run.
        note: a sentence below it; "" for none.
        is_count: whether values are written with SI prefixes.
        is_wide: whether it takes two thirds of the page's width.
        axis: its own horizontal axis; None for the axis that the reader chooses.
        band: the keys of the lower and the upper column of a coloured band; None for no band.
    """

    name: str
    title: str
    lines: Sequence[Line]
    limits: tuple[float, float]
    levels: Mapping[str, float] = field(default_factory=dict)
    marks: Sequence[ChartMark] = ()
    note: str = ""
    is_count: bool = False
    is_wide: bool = False
    axis: ChartAxis | None = None
    band: tuple[str, str] | None = None


def last_memory_ledger(rows: Sequence[MetricsRow]) -> Mapping[str, Mapping[str, int]] | None:
    """Return the last ledger of peak memory that has a measurement, or None.

    A ledger has bytes by part, under "planned" and "measured".
    """
    for row in reversed(rows):
        ledger: Mapping[str, Mapping[str, int]] = row.get("memory") or {}
        if ledger.get("measured"):
            return ledger
    return None


def columns(rows: Sequence[MetricsRow], keys: Sequence[str]) -> Columns:
    """Return the rows of a run's metrics as columns, with one row for each update.

    A run of more than `POINTS` updates keeps every n-th update, and each update that was evaluated,
    skipped or slow.

    Args:
        rows: rows of metrics.jsonl; several may be of one update.
        keys: the columns to make, in addition to `tokens`, `update` and `time`, which has the seconds of
            training so far. A column without values is left out.
    """
    row_by_update: dict[int, dict[str, Any]] = {}
    for row in rows:
        if "update" not in row:
            continue
        # A row without tokens cannot be placed on the axis, unless an earlier row of its update has
        # been placed.
        if "tokens" in row or row["update"] in row_by_update:
            row_by_update.setdefault(row["update"], {}).update(row)
    kept = _thinned(list(row_by_update.values()))
    seconds_so_far = 0.0
    table: Columns = {key: [] for key in ("tokens", "update", "time", *keys)}
    for row in kept:
        # `wall_s` is the seconds of training up to the row's update. An update of which there is only an
        # evaluation has no `wall_s`, and takes the one of the update before it.
        seconds_so_far = row.get("wall_s") or seconds_so_far
        for key, values in table.items():
            value = seconds_so_far if key == "time" else row.get(key)
            values.append(rounded(value))
    return without_empty_columns(table)


def without_empty_columns(table: Columns) -> Columns:
    """Return the columns that have a value."""
    return {
        key: values for key, values in table.items() if any(value is not None for value in values)
    }


def _thinned(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return evenly spaced rows, at most `POINTS`, with the last row and all events (`_is_event`)."""
    step = math.ceil(len(rows) / POINTS)
    return [
        row
        for index, row in enumerate(rows)
        if index % step == 0 or row is rows[-1] or _is_event(row)
    ]


def _is_event(row: MetricsRow) -> bool:
    """Return whether the update was skipped, slow or evaluated."""
    is_evaluated = any(key.startswith("eval_") for key in row)
    return bool(row.get("skipped")) or "slower" in row or is_evaluated


def rounded(value: float | None) -> float | None:
    """Return a number with five digits, or None for None, NaN and infinity.

    Five digits are more than a chart can show, and make a smaller page.
    """
    if value is None or not math.isfinite(value):
        return None
    # An int, such as a number of tokens, stays exact.
    return float(f"{value:.5g}") if isinstance(value, float) else value


def known_values(table: Columns, key: str) -> Floats:
    """Return a column's values without None; no values if the table has no such column."""
    return np.array([value for value in table.get(key, []) if value is not None], dtype=np.float64)


def limits(
    metric: Metric, lines: Sequence[Floats], levels: Iterable[float] = (), headroom: float = 1.15
) -> tuple[float, float]:
    """Return the lower and the upper end of a metric's vertical axis.

    Args:
        metric: the metric; its `limits` say how the ends are chosen (`monograph.report.metrics.AxisLimits`).
        lines: the values of each line. Some may be empty, but not all.
        levels: values to compare the lines with, which must be visible, too.
        headroom: the axis's upper end as a multiple of the highest value, if the axis begins at 0.
    """
    values = np.concatenate([*lines, np.array(list(levels), dtype=np.float64)])
    low = float(values.min())
    high = float(values.max())
    # An axis must have a height. `or 1.0` gives one to values that are all 0.
    if metric.limits == "zero":
        return min(0.0, low), (headroom * high) or 1.0
    if metric.limits == "spikes":
        return min(0.0, low), (headroom * float(np.quantile(values, 0.995))) or 1.0
    if metric.limits == "late":
        # An untrained model's first values are cut off at 2.2 times the largest last value of a line.
        # Levels are not cut off.
        cut = 2.2 * max(float(line[-1]) for line in lines if len(line))
        line_tops = [min(float(line.max()), cut) for line in lines if len(line)]
        high = max(line_tops + list(levels))
    # If all values are equal, the margin is 5 % of the value, or 1 if that is 0.
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    return low - margin, high + margin


def lines_of(
    metric: Metric, table: Columns, table_index: int = 0, run_name: str = "", shade: int = 0
) -> list[Line]:
    """Return the lines of a metric: its training values and its held-out values.

    Args:
        metric: the metric.
        table: the columns of a run; a line whose column is missing is left out.
        table_index: the table's index in the page.
        run_name: the run's name, if the chart shows several runs; "" if it shows one.
        shade: the index of the run's colour. If the chart shows one run, held-out values have a
            colour of their own, other than that of training values.
    """
    lines = list[Line]()
    if metric.key in table:
        style: LineStyle = "line" if metric.is_line else "trend"
        label = run_name or metric.label
        lines.append(Line(metric.key, label, style=style, table=table_index, shade=shade))
    if metric.held_out in table:
        if not run_name:
            label = "held out"
        elif lines:
            label = f"{run_name}, held out"
        else:
            label = run_name
        held_out_shade = shade
        if not run_name:
            held_out_shade = 1 if lines else 0  # 0 is the colour of training values
        line = Line(metric.held_out, label, style="points", table=table_index, shade=held_out_shade)
        lines.append(line)
    return lines


def moving_median(
    values: Floats, windows: int = 40, points: int = 300
) -> tuple[NDArray[np.int64], Floats]:
    """Return the moving median of values at some of their indices.

    Unlike a mean, a median does not turn a spike into a plateau.

    Args:
        values: the values.
        windows: each median is over about len(values) / windows values, with its index in the middle.
        points: the maximum number of indices, which are evenly spaced.

    Returns:
        The indices, and the median at each.
    """
    half = len(values) // (2 * windows)
    indices = np.unique(
        np.linspace(0, len(values) - 1, min(len(values), points)).round().astype(np.int64)
    )
    medians = [np.median(values[max(0, i - half) : i + half + 1]) for i in indices]
    return indices, np.array(medians)
