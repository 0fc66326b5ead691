"""Style figures for a reader's light or dark theme, turn them into files, and draw those of a run.

A run's figures show its held-out score against its yardsticks, loss, learning rate, gradient norm, speed and memory. A
metrics row is a dictionary with these keys: `tokens` (seen so far), `train_loss` (nats per token), `lr`, `grad_norm`,
`tokens_per_s`, `skipped` (true if the update was skipped), `eval_bits_per_byte`, `memory`
(`monograph.profiling.memory.ledger`), and `slower` and a card's numbers (`monograph.session.gauges`); with rewards also
`reward`, `eval_reward` and `entropy`, and then the score and the loss give their places to the reward and the entropy.
A figure shows the rows in which its key has a value.
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
from monograph.report.charts import moving_median

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
    import matplotlib  # imported here, as it takes a good part of a second, and most commands draw nothing

    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="constrained_layout not applied")  # labels can fill an early figure
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
    """Return an SVG with this file's colours replaced by variables, which follow the reader's light or dark theme."""
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

_FIRST, _SECOND = ("held_out", "reward", "accuracy"), ("loss", "entropy", "margin")  # a run has one of each
_SIZES = dict.fromkeys(_FIRST, (7.3, 3.2)) | dict.fromkeys(_SECOND, (3.5, 3.2))  # inches; the others are smaller
_POINTS = 1200  # the most points of a line: more than a figure is pixels wide


class Picture(NamedTuple):
    """A finished figure as a PNG file."""

    name: str
    png: bytes


def draw(metrics: Sequence[Row], yardsticks: Yardsticks, title: str, subtitle: str) -> tuple[bytes, list[Picture]]:
    """Return a PNG sheet of all figures for which `metrics` has rows, under `title` and `subtitle`, and each figure."""
    panels: dict[str, tuple[str, Callable[..., None]]] = {
        "held_out": ("eval_bits_per_byte", partial(_held_out, yardsticks=yardsticks)),
        "reward": ("reward", partial(_numbers, title="Mean reward of an update's answers", held="eval_reward")),
        "accuracy": ("accuracy", partial(_numbers, title="Share of answers ahead", held="eval_accuracy")),
        "loss": ("train_loss", partial(_numbers, title="Training loss, nats per token")),
        "entropy": ("entropy", partial(_numbers, title="Entropy of the draws, nats per token", from_0=True)),
        "margin": ("margin", partial(_numbers, title="Margin of the chosen answers, nats")),
        "learning_rate": ("lr", _learning_rate),
        "gradient_norm": ("grad_norm", _gradient_norm),
        "speed": ("tokens_per_s", _speed),
        "utilization": ("gpu_utilization_percent", partial(_gauge, title="GPU utilisation, %")),
        "power": ("gpu_power_w", partial(_gauge, title="GPU power, W")),
        "temperature": ("gpu_temperature_c", partial(_gauge, title="GPU temperature, °C")),
        "clock": ("gpu_clock_hz", partial(_gauge, title="GPU clock, Hz")),
        "device_memory": ("gpu_memory_bytes", partial(_gauge, title="GPU memory of all programs, bytes")),
    }
    present: dict[str, Callable[[Axes], None]] = {
        name: partial(panel, metrics=metrics, key=key)
        for name, (key, panel) in panels.items()
        if any(row.get(key) is not None for row in metrics)
    }
    if {"reward", "accuracy"} & present.keys():  # such a loss is of advantages, or of pairs, and no nats a token
        del present["loss"]
    if ledger := next((row["memory"] for row in reversed(metrics) if (row.get("memory") or {}).get("measured")), None):
        present["memory"] = partial(_memory, ledger=ledger)
    with style():
        sheet = _sheet(present, title, subtitle)
        return sheet, [single(name, panel, _SIZES.get(name, (3.5, 2.5))) for name, panel in present.items()]


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
        figure = Figure(figsize=_SIZES["held_out"], layout="constrained")
        _held_out(figure.add_subplot(), metrics, "eval_bits_per_byte", yardsticks)
        return svg(figure)


def _sheet(panels: Mapping[str, Callable[[Axes], None]], title: str, subtitle: str) -> bytes:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 8.2))
    figure.text(0.045, 0.955, title, fontsize=17, fontweight="bold", va="center")
    figure.text(0.045, 0.915, subtitle, fontsize=9.5, color=MUTED, va="center")
    sides = {"left": 0.045, "right": 0.965}
    upper = figure.add_gridspec(1, 2, width_ratios=[1.9, 1], **sides, top=0.835, bottom=0.455, wspace=0.30)
    lower = figure.add_gridspec(1, 4 if "memory" in panels else 3, **sides, top=0.325, bottom=0.065, wspace=0.28)
    places = dict.fromkeys(_FIRST, upper[0]) | dict.fromkeys(_SECOND, upper[1])
    places |= {"learning_rate": lower[0], "gradient_norm": lower[1], "speed": lower[2], "memory": lower[-1]}
    for name in filter(places.get, panels):
        panels[name](figure.add_subplot(places[name]))
    return png(figure, dpi=160)


def _held_out(axes: Axes, metrics: Sequence[Row], key: str, yardsticks: Yardsticks) -> None:
    tokens, bits = _series(axes, metrics, key, "Held-out text, bits per byte")
    low = min([float(bits.min()), *yardsticks.values()])
    # The first value is an untrained model's. On its scale all later ones would be one flat line.
    high = max([min(float(bits.max()), 2.2 * float(bits[-1])), *yardsticks.values()])
    margin = max(0.06 * (high - low), 0.02)
    axes.set_ylim(low - margin, high + margin)
    for level in yardsticks.values():
        axes.axhline(level, color=MUTED, linewidth=0.9, linestyle=(0, (1, 2.5)))
    axes.plot(tokens, bits, color=ACCENT, linewidth=2)
    axes.plot(tokens[-1:], bits[-1:], "o", color=ACCENT, markersize=5, clip_on=False)
    names = [(level, f"{name}  {level:.2f}", MUTED, "normal") for name, level in yardsticks.items()]
    _labels_at_right(axes, [*names, (float(bits[-1]), f"this run  {bits[-1]:.2f}", ACCENT, "bold")])


def _numbers(axes: Axes, metrics: Sequence[Row], key: str, title: str, held: str = "", from_0: bool = False) -> None:
    """Draw the values under `key` and their trend, and as points those under `held`."""
    tokens, values = _series(axes, metrics, key, title)
    if from_0:
        axes.set_ylim(0, 1.15 * float(values.max()) or 1)
    _trend(axes, tokens, values, lambda value: f"{value:.2f}")
    points = np.array([(row["tokens"], row[held]) for row in metrics if row.get(held) is not None])
    if len(points):
        axes.plot(*points.T, "o-", color=INK, linewidth=1, markersize=3.5)
        axes.text(0.01, 0.98, "points: held out", transform=axes.transAxes, va="top", fontsize=8, color=MUTED)


def _learning_rate(axes: Axes, metrics: Sequence[Row], key: str) -> None:
    tokens, lr = _series(axes, metrics, key, "Learning rate")
    step = _thinning(lr)
    axes.plot(tokens[::step], lr[::step], color=ACCENT, linewidth=1.8)
    axes.set_ylim(0, 1.18 * float(lr.max()) or 1)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    peak = int(lr.argmax())
    axes.annotate(
        f"peak {lr[peak]:.3g}", (tokens[peak], lr[peak]), (2, 5), textcoords="offset points", fontsize=8, color=ACCENT
    )


def _gradient_norm(axes: Axes, metrics: Sequence[Row], key: str) -> None:
    tokens, norm = _series(axes, metrics, key, "Gradient norm, before clipping")
    # One spike would flatten the rest, so the top 0.5 % may leave the frame.
    axes.set_ylim(0, 1.15 * float(np.quantile(norm, 0.995)) or 1)
    _trend(axes, tokens, norm, lambda value: f"{value:.2g}")


def _speed(axes: Axes, metrics: Sequence[Row], key: str) -> None:
    tokens, speed = _series(axes, metrics, key, "Tokens per second")
    axes.set_ylim(0, 1.3 * float(speed.max()) or 1)
    axes.yaxis.set_major_formatter(lambda value, _: quantities.count(value))
    _trend(axes, tokens, speed, quantities.count)
    skipped = [row["tokens"] for row in metrics if row.get("skipped")]
    axes.plot(
        skipped, np.full(len(skipped), 0.035 * axes.get_ylim()[1]), "|", color=WARN, markersize=9, markeredgewidth=1.6
    )
    words = f"{quantities.counted(len(skipped), 'update')} skipped"
    slower = np.array([(row["tokens"], row["slower"]["tokens_per_s"]) for row in metrics if "slower" in row])
    if len(slower):
        axes.plot(*slower.T, "v", color=WARN, markersize=6)
        words += ", slower at each triangle"
    # The words stand above the curve, where the limit leaves room, and away from the last value at the right.
    color = WARN if skipped or len(slower) else MUTED
    axes.text(0.01, 0.98, words, transform=axes.transAxes, va="top", fontsize=8, color=color)


def _gauge(axes: Axes, metrics: Sequence[Row], key: str, title: str) -> None:
    tokens, values = _series(axes, metrics, key, title)
    axes.set_ylim(0, 1.15 * float(values.max()) or 1)
    axes.yaxis.set_major_formatter(lambda value, _: quantities.count(value))
    _trend(axes, tokens, values, quantities.count)


def _memory(axes: Axes, ledger: Mapping[str, Mapping[str, int]]) -> None:
    """Draw the planned memory above the measured memory, each as one bar made of its parts."""
    axes.set_title("Peak memory, GiB")
    for place, name in enumerate(("measured", "planned")):
        left = 0.0
        for index, size in enumerate(ledger[name].values()):
            axes.barh(place, size / 2**30, left=left, height=0.5, color=ACCENT, alpha=max(0.2, 1 - 0.17 * index))
            left += size / 2**30
        axes.annotate(f"{name}  {left:.2f}", (0, place), (0, 19), textcoords="offset points", fontsize=8.5, color=INK)
    axes.set_ylim(-0.6, 1.8)
    axes.set_yticks([])
    axes.set_xlabel(", ".join(ledger["planned"]), fontsize=7, color=MUTED, loc="left")


def _series(axes: Axes, metrics: Sequence[Row], key: str, title: str) -> tuple[Floats, Floats]:
    """Set up the axes of a key; return the tokens and the values of the rows that have it."""
    rows = [(row["tokens"], row[key]) for row in metrics if row.get(key) is not None]
    tokens, values = np.array(rows, dtype=np.float64).reshape(-1, 2).T
    axes.set_title(title)
    axes.set_xlim(0, float(tokens[-1]) or 1)
    axes.locator_params(nbins=5, steps=[1, 2, 2.5, 5, 10])
    axes.xaxis.set_major_formatter(lambda value, _: quantities.count(value))
    axes.set_xlabel("tokens", fontsize=8, loc="right", labelpad=1)
    return tokens, values


def _trend(axes: Axes, tokens: Floats, values: Floats, written: Callable[[float], str]) -> None:
    """Draw all values in a pale colour, and their moving median with its last value written above the line's end."""
    step = _thinning(values)
    axes.plot(tokens[::step], values[::step], color=ACCENT, alpha=0.25, linewidth=0.8)
    at, medians = moving_median(values)
    axes.plot(tokens[at], medians, color=ACCENT, linewidth=1.8)
    # The label is about as wide as the panel's last fifth, and stands above all lines there.
    begin = 0.8 * tokens[-1]
    near_end = max(float(values[tokens >= begin].max()), float(np.interp(begin, tokens, values)))
    place = (tokens[-1], min(near_end, axes.get_ylim()[1]))
    axes.annotate(
        written(float(medians[-1])),
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
    """Write each label (level, text, colour, font weight) at the right of its level; labels that touch move apart."""
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
