"""Style figures for a reader's light or dark theme, turn them into files, and draw those of a run.

A run's figures show the metrics of `monograph.report.metrics` of which its rows have values, and
its peak memory. A row is a dictionary of metrics.jsonl: `tokens` (seen so far), metrics by their
names, `skipped` (true if the update was skipped), `slower` (`monograph.session.gauges`) and
`memory` (`monograph.profiling.memory.ledger`).
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from monograph.report import quantities
from monograph.report.charts import limits, moving_median
from monograph.report.metrics import BITS_PER_BYTE, SPEED, Metric, shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Each role has a colour of its own, so that a page can replace it by the page's colour in an SVG.
INK = "#1c1d21"
MUTED = "#6e7079"
GRID = "#e4e5ea"
ACCENT = "#2457c5"
WARN = "#c2460e"
PAPER = "#fffffe"
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.facecolor": "none",
    "axes.axisbelow": True,
    "axes.titlecolor": INK,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": MUTED,
    "xtick.labelsize": 8,
    "xtick.major.size": 3,
    "xtick.major.width": 0.7,
    "ytick.color": MUTED,
    "ytick.labelsize": 8,
    "ytick.major.size": 0,
    "lines.solid_capstyle": "round",
    "lines.solid_joinstyle": "round",
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "svg.fonttype": "none",
    "svg.hashsalt": "monograph",  # equal runs give equal files
}


@contextmanager
def style() -> Iterator[None]:
    """Draw the figures of the block in this project's style."""
    # Imported here, as it takes a good part of a second, and most commands draw nothing.
    import matplotlib

    with matplotlib.rc_context(), warnings.catch_warnings():
        # Labels can fill an early figure.
        warnings.filterwarnings("ignore", message="constrained_layout not applied")
        matplotlib.rcdefaults()  # a person's own matplotlibrc must not change these pages
        matplotlib.rcParams.update(STYLE)
        yield


def png(figure: Figure, dpi: int) -> bytes:
    """Return a figure as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()


def svg(figure: Figure) -> str:
    """Return a figure as an SVG element, with a transparent background and no metadata."""
    buffer = io.StringIO()
    none = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(buffer, format="svg", transparent=True, metadata=none)
    text = buffer.getvalue()
    return text[text.index("<svg") :]


# (colour in a drawing, its name, its replacement on a dark page)
COLOURS = (
    (INK, "ink", "#e9eaee"),
    (MUTED, "muted", "#9a9da8"),
    (GRID, "rule", "#30333a"),
    (ACCENT, "accent", "#84a9ff"),
    (WARN, "warn", "#ff9a6b"),
)


def themed(svg: str) -> str:
    """Return an SVG with this file's colours replaced by variables, which follow the reader's light
    or dark theme.
    """
    there = [pair for pair in COLOURS if pair[0] in svg]
    light = " ".join(f"--{name}: {colour};" for colour, name, _ in there)
    dark = " ".join(f"--{name}: {colour};" for _, name, colour in there)
    for colour, name, _ in there:
        svg = svg.replace(colour, f"var(--{name})")
    svg = svg.replace("'DejaVu Sans'", "system-ui, sans-serif")
    style = f"<style>svg {{ {light} }} @media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}</style>"
    head = svg.index(">") + 1
    return svg[:head] + style + svg[head:]


Row = Mapping[str, Any]
Yardsticks = Mapping[str, float]  # values to compare a run with, by name
Floats = NDArray[np.float64]

_SIZES = {"first": (7.3, 3.2), "second": (3.5, 3.2), "lower": (3.5, 2.5), "": (3.5, 2.5)}  # inches
# Tokens and values of a number that no row has.
_NONE: tuple[Floats, Floats] = (np.empty(0), np.empty(0))
_POINTS = 1200  # the most points of a line: more than a figure is pixels wide


class Picture(NamedTuple):
    """A finished figure as a PNG file."""

    name: str
    png: bytes


def draw(
    metrics: Sequence[Row], yardsticks: Yardsticks, title: str, subtitle: str
) -> tuple[bytes, list[Picture]]:
    """Return a PNG sheet of all figures for which `metrics` has rows, under `title` and `subtitle`,
    and each figure.
    """
    there = {key for row in metrics for key, value in row.items() if value is not None}
    panels: dict[Metric, Callable[[Axes], None]] = {
        metric: partial(_panel, metrics=metrics, metric=metric, yardsticks=yardsticks)
        for metric in shown(there)
    }
    memory: Callable[[Axes], None] | None = None
    if ledger := next(
        (row["memory"] for row in reversed(metrics) if (row.get("memory") or {}).get("measured")),
        None,
    ):
        memory = partial(_memory, ledger=ledger)
    with style():
        sheet = _sheet(panels, memory, title, subtitle)
        pictures = [
            single(metric.chart, panel, _SIZES[metric.place]) for metric, panel in panels.items()
        ]
        if memory:
            pictures.append(single("memory", memory, _SIZES[""]))
        return sheet, pictures


def single(name: str, panel: Callable[[Axes], None], size: tuple[float, float]) -> Picture:
    """Return a figure of one panel; `size` is its width and height in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    panel(figure.add_subplot())
    return Picture(name, png(figure, dpi=200))


def held_out_svg(metrics: Sequence[Row], yardsticks: Yardsticks) -> str:
    """Return the figure of the held-out score as an SVG element."""
    from matplotlib.figure import Figure

    with style():
        figure = Figure(figsize=_SIZES[BITS_PER_BYTE.place], layout="constrained")
        _panel(figure.add_subplot(), metrics, BITS_PER_BYTE, yardsticks)
        return svg(figure)


def _sheet(
    panels: Mapping[Metric, Callable[[Axes], None]],
    memory: Callable[[Axes], None] | None,
    title: str,
    subtitle: str,
) -> bytes:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 8.2))
    figure.text(0.045, 0.955, title, fontsize=17, fontweight="bold", va="center")
    figure.text(0.045, 0.915, subtitle, fontsize=9.5, color=MUTED, va="center")
    sides = {"left": 0.045, "right": 0.965}
    upper = figure.add_gridspec(
        1, 2, width_ratios=[1.9, 1], **sides, top=0.835, bottom=0.455, wspace=0.30
    )
    last = {metric.place: panel for metric, panel in panels.items()}
    for place, where in (("first", upper[0]), ("second", upper[1])):
        if place in last:
            last[place](figure.add_subplot(where))
    row = [panel for metric, panel in panels.items() if metric.place == "lower"]
    if memory:
        row.append(memory)
    lower = figure.add_gridspec(1, max(3, len(row)), **sides, top=0.325, bottom=0.065, wspace=0.28)
    for number, panel in enumerate(row):
        panel(figure.add_subplot(lower[number]))
    return png(figure, dpi=160)


def _panel(axes: Axes, metrics: Sequence[Row], metric: Metric, yardsticks: Yardsticks) -> None:
    """Draw a metric: its values in training with their trend, and those on held-out records as
    points.
    """
    axes.set_title(metric.title)
    axes.locator_params(nbins=5, steps=[1, 2, 2.5, 5, 10])
    axes.xaxis.set_major_formatter(lambda value, _: quantities.count(value))
    axes.set_xlabel("tokens", fontsize=8, loc="right", labelpad=1)
    series = {key: _series(metrics, key) for key in metric.keys}
    levels = yardsticks if metric is BITS_PER_BYTE else {}
    axes.set_xlim(0, max(float(tokens[-1]) for tokens, _ in series.values() if len(tokens)) or 1)
    axes.set_ylim(
        *limits(metric, [values for _, values in series.values()], levels.values(), room=1.25)
    )
    if metric.is_count or metric.is_line:
        axes.yaxis.set_major_formatter(lambda value, _: quantities.count(value))
    tokens, values = series.get(metric.key, _NONE)
    if len(values) and metric.is_line:
        _curve(axes, tokens, values)
    elif len(values):
        _trend(axes, tokens, values)
    at, held = series.get(metric.held_out, _NONE)
    if len(held) and len(values):
        axes.plot(at, held, "o-", color=INK, linewidth=1, markersize=3.5)
        axes.set_xlabel("points: held out   ·   tokens")
    elif len(held):
        _among_levels(axes, at, held, levels)
    if metric is SPEED:
        _slow_moments(axes, metrics)


def _among_levels(axes: Axes, tokens: Floats, values: Floats, levels: Yardsticks) -> None:
    """Draw a curve among the levels that it is compared with, each with its name at the right."""
    for level in levels.values():
        axes.axhline(level, color=MUTED, linewidth=0.9, linestyle=(0, (1, 2.5)))
    axes.plot(tokens, values, color=ACCENT, linewidth=2)
    axes.plot(tokens[-1:], values[-1:], "o", color=ACCENT, markersize=5, clip_on=False)
    names = [(level, f"{name}  {level:.2f}", MUTED, "normal") for name, level in levels.items()]
    _labels_at_right(
        axes, [*names, (float(values[-1]), f"this run  {values[-1]:.2f}", ACCENT, "bold")]
    )


def _curve(axes: Axes, tokens: Floats, values: Floats) -> None:
    """Draw values that lie on a curve, with the highest written at its place."""
    step = _thinning(values)
    axes.plot(tokens[::step], values[::step], color=ACCENT, linewidth=1.8)
    peak = int(values.argmax())
    place = (tokens[peak], values[peak])
    words = f"peak {values[peak]:.3g}"
    axes.annotate(words, place, (2, 5), textcoords="offset points", fontsize=8, color=ACCENT)


def _slow_moments(axes: Axes, metrics: Sequence[Row]) -> None:
    """Mark the updates that were skipped, and those at which the run became slower."""
    skipped = [row["tokens"] for row in metrics if row.get("skipped")]
    axes.plot(
        skipped,
        np.full(len(skipped), 0.035 * axes.get_ylim()[1]),
        "|",
        color=WARN,
        markersize=9,
        markeredgewidth=1.6,
    )
    words = f"{quantities.counted(len(skipped), 'update')} skipped"
    slower = np.array(
        [(row["tokens"], row["slower"]["tokens_per_s"]) for row in metrics if "slower" in row]
    )
    if len(slower):
        axes.plot(*slower.T, "v", color=WARN, markersize=6)
        words += ", slower at each triangle"
    # The words stand above the curve, where the limit leaves room, and away from the last value at
    # the right.
    color = WARN if skipped or len(slower) else MUTED
    axes.text(0.01, 0.98, words, transform=axes.transAxes, va="top", fontsize=8, color=color)


def _memory(axes: Axes, ledger: Mapping[str, Mapping[str, int]]) -> None:
    """Draw the planned memory above the measured memory, each as one bar made of its parts."""
    axes.set_title("Peak memory, GiB")
    for place, name in enumerate(("measured", "planned")):
        left = 0.0
        for index, size in enumerate(ledger[name].values()):
            axes.barh(
                place,
                size / 2**30,
                left=left,
                height=0.5,
                color=ACCENT,
                alpha=max(0.2, 1 - 0.17 * index),
            )
            left += size / 2**30
        axes.annotate(
            f"{name}  {left:.2f}",
            (0, place),
            (0, 19),
            textcoords="offset points",
            fontsize=8.5,
            color=INK,
        )
    axes.set_ylim(-0.6, 1.8)
    axes.set_yticks([])
    axes.set_xlabel(", ".join(ledger["planned"]), fontsize=7, color=MUTED, loc="left")


def _series(metrics: Sequence[Row], key: str) -> tuple[Floats, Floats]:
    """Return the tokens and the values of the rows that have a key."""
    rows = [(row["tokens"], row[key]) for row in metrics if row.get(key) is not None]
    tokens, values = np.array(rows, dtype=np.float64).reshape(-1, 2).T
    return tokens, values


def _trend(axes: Axes, tokens: Floats, values: Floats) -> None:
    """Draw all values in a pale colour, and their moving median with its last value written above
    the line's end.
    """
    step = _thinning(values)
    axes.plot(tokens[::step], values[::step], color=ACCENT, alpha=0.25, linewidth=0.8)
    at, medians = moving_median(values)
    axes.plot(tokens[at], medians, color=ACCENT, linewidth=1.8)
    # The label is about as wide as the panel's last fifth, and stands above all lines there.
    begin = 0.8 * tokens[-1]
    near_end = max(float(values[tokens >= begin].max()), float(np.interp(begin, tokens, values)))
    place = (tokens[-1], min(near_end, axes.get_ylim()[1]))
    axes.annotate(
        quantities.count(float(medians[-1])),
        place,
        (0, 5),
        textcoords="offset points",
        ha="right",
        fontsize=8.5,
        fontweight="bold",
        color=ACCENT,
        annotation_clip=False,
    )


def _thinning(values: Floats) -> int:
    return -(-len(values) // _POINTS)


def _labels_at_right(axes: Axes, labels: Sequence[tuple[float, str, str, str]]) -> None:
    """Write each label (level, text, colour, font weight) at the right of its level; labels that
    touch move apart.
    """
    low, high = axes.get_ylim()
    gap = 0.062 * (high - low)
    place = -np.inf
    for level, text, colour, weight in sorted(labels):
        place = max(level, place + gap)
        axes.annotate(
            text,
            (1, place),
            (8, 0),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
            color=colour,
            fontweight=weight,
            annotation_clip=False,
        )
