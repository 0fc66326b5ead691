"""Draw the figures of a run.

A run has one figure for each metric of `monograph.report.metrics` that its rows have values of, and
one for its peak memory. A row is a dictionary of metrics.jsonl. The keys that are read here:

- `tokens`: the tokens trained on so far.
- the keys of metrics, with their values.
- `skipped`: whether the update was skipped.
- `slower`: a slowdown that was noticed at this update (`monograph.session.gauges`).
- `memory`: the planned and the measured peak memory (`monograph.profiling.memory.ledger`).

A panel draws a chart's own figure, and also its part of the sheet, which is one figure with the most
important charts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from monograph.report import quantities
from monograph.report.charts import (
    Floats,
    MetricsRow,
    Yardsticks,
    last_memory_ledger,
    limits,
    moving_median,
)
from monograph.report.figures import (
    ACCENT,
    INK,
    MUTED,
    WARN,
    Panel,
    Picture,
    png,
    single_picture,
    style,
    svg,
)
from monograph.report.metrics import BITS_PER_BYTE, SPEED, Metric, shown_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MemoryLedger = Mapping[str, Mapping[str, int]]  # bytes by part, under "planned" and "measured"

# Width and height of a metric's figure in inches, by `Metric.place`.
_SIZES = {"first": (7.3, 3.2), "second": (3.5, 3.2), "lower": (3.5, 2.5), "": (3.5, 2.5)}
_NO_SERIES: tuple[Floats, Floats] = (np.empty(0), np.empty(0))  # tokens and values of a missing key
_MAX_POINTS = 1200  # of a line; a figure has fewer pixels than this from left to right


def draw(
    rows: Sequence[MetricsRow], yardsticks: Yardsticks, title: str, subtitle: str
) -> tuple[bytes, list[Picture]]:
    """Draw all figures of a run.

    Args:
        rows: rows as this module describes them.
        yardsticks: names and values in bits per byte, which are drawn in the chart of held-out bits
            per byte.
        title: the sheet's title.
        subtitle: the line below the title.

    Returns:
        The sheet as a PNG file, and each figure by itself. Metrics without values are left out.
    """
    keys_with_values = {key for row in rows for key, value in row.items() if value is not None}
    panels: dict[Metric, Panel] = {
        metric: partial(_draw_metric, rows=rows, metric=metric, yardsticks=yardsticks)
        for metric in shown_metrics(keys_with_values)
    }
    memory_panel: Panel | None = None
    ledger = last_memory_ledger(rows)
    if ledger:
        memory_panel = partial(_draw_memory, ledger=ledger)
    with style():
        sheet = _sheet_png(panels, memory_panel, title, subtitle)
        pictures = [
            single_picture(metric.chart, panel, _SIZES[metric.place])
            for metric, panel in panels.items()
        ]
        if memory_panel:
            pictures.append(single_picture("memory", memory_panel, _SIZES[""]))
        return sheet, pictures


def held_out_svg(rows: Sequence[MetricsRow], yardsticks: Yardsticks) -> str:
    """Return the figure of held-out bits per byte as an SVG element."""
    from matplotlib.figure import Figure

    with style():
        figure = Figure(figsize=_SIZES[BITS_PER_BYTE.place], layout="constrained")
        _draw_metric(figure.add_subplot(), rows, BITS_PER_BYTE, yardsticks)
        return svg(figure)


def _sheet_png(
    panels: Mapping[Metric, Panel], memory_panel: Panel | None, title: str, subtitle: str
) -> bytes:
    """Draw the sheet: the panels with place "first" and "second" above, the lower ones below.

    Positions are shares of the figure's width and height.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 8.2))
    figure.text(0.045, 0.955, title, fontsize=17, fontweight="bold", va="center")
    figure.text(0.045, 0.915, subtitle, fontsize=9.5, color=MUTED, va="center")
    sides = {"left": 0.045, "right": 0.965}
    upper_grid = figure.add_gridspec(
        1, 2, width_ratios=[1.9, 1], **sides, top=0.835, bottom=0.455, wspace=0.30
    )
    # If several metrics have the same place, the dict keeps the last one, as `Metric.place` says.
    panel_by_place = {metric.place: panel for metric, panel in panels.items()}
    if "first" in panel_by_place:
        panel_by_place["first"](figure.add_subplot(upper_grid[0]))
    if "second" in panel_by_place:
        panel_by_place["second"](figure.add_subplot(upper_grid[1]))
    lower_panels = [panel for metric, panel in panels.items() if metric.place == "lower"]
    if memory_panel:
        lower_panels.append(memory_panel)
    # One or two panels are as wide as if there were three.
    columns = max(3, len(lower_panels))
    lower_grid = figure.add_gridspec(1, columns, **sides, top=0.325, bottom=0.065, wspace=0.28)
    for column, panel in enumerate(lower_panels):
        panel(figure.add_subplot(lower_grid[column]))
    return png(figure, dpi=160)


def _draw_metric(
    axes: Axes, rows: Sequence[MetricsRow], metric: Metric, yardsticks: Yardsticks
) -> None:
    """Draw a metric over tokens: its training values as a line, its held-out values as points.

    A metric with held-out values alone is drawn as a line among the yardsticks.
    """
    axes.set_title(metric.title)
    axes.locator_params(nbins=5, steps=[1, 2, 2.5, 5, 10])
    axes.xaxis.set_major_formatter(lambda value, _: quantities.count(value))
    axes.set_xlabel("tokens", fontsize=8, loc="right", labelpad=1)
    # For each key the tokens and the values of its points.
    series_by_key = {key: _series(rows, key) for key in metric.keys}
    # Levels to compare the values with. Only the chart of bits per byte has them.
    levels = yardsticks if metric is BITS_PER_BYTE else {}
    last_tokens = max(float(tokens[-1]) for tokens, _ in series_by_key.values() if len(tokens))
    axes.set_xlim(0, last_tokens or 1)  # a run that has not trained yet needs a width, too
    values_by_line = [values for _, values in series_by_key.values()]
    axes.set_ylim(*limits(metric, values_by_line, levels.values(), headroom=1.25))
    # Matplotlib would write a small learning rate's ticks with one factor for all, such as "1e-4".
    if metric.is_count or metric.is_line:
        axes.yaxis.set_major_formatter(lambda value, _: quantities.count(value))
    tokens, values = series_by_key.get(metric.key, _NO_SERIES)
    if len(values) and metric.is_line:
        _draw_curve(axes, tokens, values)
    elif len(values):
        _draw_trend(axes, tokens, values)
    held_out_tokens, held_out_values = series_by_key.get(metric.held_out, _NO_SERIES)
    if len(held_out_values) and len(values):
        axes.plot(held_out_tokens, held_out_values, "o-", color=INK, linewidth=1, markersize=3.5)
        axes.set_xlabel("points: held out   ·   tokens")
    elif len(held_out_values):
        _draw_among_levels(axes, held_out_tokens, held_out_values, levels)
    if metric is SPEED:
        _mark_slow_updates(axes, rows)


def _draw_among_levels(axes: Axes, tokens: Floats, values: Floats, levels: Yardsticks) -> None:
    """Draw a curve and the levels that it is compared with; write each one's name at its right."""
    for level in levels.values():
        axes.axhline(level, color=MUTED, linewidth=0.9, linestyle=(0, (1, 2.5)))
    axes.plot(tokens, values, color=ACCENT, linewidth=2)
    axes.plot(tokens[-1:], values[-1:], "o", color=ACCENT, markersize=5, clip_on=False)
    labels = [_Label(level, f"{name}  {level:.2f}", MUTED) for name, level in levels.items()]
    last_value = float(values[-1])
    labels.append(_Label(last_value, f"this run  {last_value:.2f}", ACCENT, weight="bold"))
    _write_labels_at_right(axes, labels)


def _draw_curve(axes: Axes, tokens: Floats, values: Floats) -> None:
    """Draw values that lie on a smooth curve, and write the peak next to it."""
    step = _thinning_step(values)
    axes.plot(tokens[::step], values[::step], color=ACCENT, linewidth=1.8)
    peak = int(values.argmax())
    axes.annotate(
        f"peak {values[peak]:.3g}",
        xy=(tokens[peak], values[peak]),
        xytext=(2, 5),
        textcoords="offset points",
        fontsize=8,
        color=ACCENT,
    )


def _mark_slow_updates(axes: Axes, rows: Sequence[MetricsRow]) -> None:
    """Mark the updates that were skipped, and the updates at which the run became slower."""
    skipped = [row["tokens"] for row in rows if row.get("skipped")]
    axes.plot(
        skipped,
        np.full(len(skipped), 0.035 * axes.get_ylim()[1]),  # just above the horizontal axis
        "|",
        color=WARN,
        markersize=9,
        markeredgewidth=1.6,
    )
    words = f"{quantities.counted(len(skipped), 'update')} skipped"
    slower = np.array(
        [(row["tokens"], row["slower"]["tokens_per_s"]) for row in rows if "slower" in row]
    )
    if len(slower):
        axes.plot(*slower.T, "v", color=WARN, markersize=6)
        words += ", slower at each triangle"
    # The words are at the upper left, where they hide nothing: `limits` leaves room above the curve, and the
    # last value is written at the right.
    color = WARN if skipped or len(slower) else MUTED
    axes.text(0.01, 0.98, words, transform=axes.transAxes, va="top", fontsize=8, color=color)


def _draw_memory(axes: Axes, ledger: MemoryLedger) -> None:
    """Draw a bar of planned memory above a bar of measured memory, each made of its parts."""
    axes.set_title("Peak memory, GiB")
    for y, name in enumerate(("measured", "planned")):  # from below
        left_gib = 0.0
        for index, size_bytes in enumerate(ledger[name].values()):
            axes.barh(
                y,
                size_bytes / 2**30,
                left=left_gib,
                height=0.5,
                color=ACCENT,
                alpha=max(0.2, 1 - 0.17 * index),  # each part is paler than the one before
            )
            left_gib += size_bytes / 2**30
        axes.annotate(
            f"{name}  {left_gib:.2f}",
            xy=(0, y),
            xytext=(0, 19),
            textcoords="offset points",
            fontsize=8.5,
            color=INK,
        )
    axes.set_ylim(-0.6, 1.8)
    axes.set_yticks([])
    # The names of the parts, in the order of the planned bar from left to right.
    axes.set_xlabel(", ".join(ledger["planned"]), fontsize=7, color=MUTED, loc="left")


def _series(rows: Sequence[MetricsRow], key: str) -> tuple[Floats, Floats]:
    """Return the tokens and the values of the rows that have a value of a key."""
    points = [(row["tokens"], row[key]) for row in rows if row.get(key) is not None]
    # The reshape gives an array of no points its two columns.
    tokens, values = np.array(points, dtype=np.float64).reshape(-1, 2).T
    return tokens, values


def _draw_trend(axes: Axes, tokens: Floats, values: Floats) -> None:
    """Draw all values in a pale colour, and their moving median in a strong one.

    The last median is written above the end of the line.
    """
    step = _thinning_step(values)
    axes.plot(tokens[::step], values[::step], color=ACCENT, alpha=0.25, linewidth=0.8)
    indices, medians = moving_median(values)
    axes.plot(tokens[indices], medians, color=ACCENT, linewidth=1.8)
    # The label is about as wide as the last fifth of the panel, so it stands above the highest value there.
    # One of these values is that of the line where it enters this fifth, which is interpolated.
    begin = 0.8 * tokens[-1]
    highest = max(float(values[tokens >= begin].max()), float(np.interp(begin, tokens, values)))
    axes.annotate(
        quantities.count(float(medians[-1])),
        xy=(tokens[-1], min(highest, axes.get_ylim()[1])),
        xytext=(0, 5),
        textcoords="offset points",
        ha="right",
        fontsize=8.5,
        fontweight="bold",
        color=ACCENT,
        annotation_clip=False,
    )


def _thinning_step(values: Floats) -> int:
    """Return n such that every n-th value makes at most `_MAX_POINTS` points."""
    return math.ceil(len(values) / _MAX_POINTS)


class _Label(NamedTuple):
    """Words at the right of a panel.

    Attributes:
        level: the value next to which they stand.
        text: the words.
        colour: their colour.
        weight: their font weight.
    """

    level: float
    text: str
    colour: str
    weight: str = "normal"


def _write_labels_at_right(axes: Axes, labels: Sequence[_Label]) -> None:
    """Write each label at the right of its level; labels that would touch move up."""
    low, high = axes.get_ylim()
    line_height = 0.062 * (high - low)
    y = -np.inf
    for label in sorted(labels):  # by their levels, which are their first fields
        y = max(label.level, y + line_height)
        axes.annotate(
            label.text,
            xy=(1, y),
            xytext=(8, 0),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
            color=label.colour,
            fontweight=label.weight,
            annotation_clip=False,
        )
