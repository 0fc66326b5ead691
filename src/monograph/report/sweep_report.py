"""Write a sweep's report: its figures as PNG files and one HTML page that needs nothing but itself.

The figures show the held-out score against each knob, with error bars, and the curves of all
members. A setting is a mapping with `knobs`, `mean`, `standard_error` (null for one seed), `values`
(a score for each member; null if it diverged) and `standing` ("best", "tied" or ""). A curve is a
pair of its member's knobs and rows of metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from monograph.report import quantities
from monograph.report.figures import ACCENT, GRID, INK, MUTED, WARN, Picture, single_picture, style
from monograph.report.in_progress import refresh_s
from monograph.report.markup import escaped
from monograph.report.page import Cell, Drawings, config_of, number, page, pairs, section, table
from monograph.report.run_report import write_pages
from monograph.report.sweep_charts import (
    Curve,
    Setting,
    described,
    drawings_of,
    limits_of,
    placed,
    text_of,
    varied_in,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = Sequence[Mapping[str, Any]]
MOST_TICKS = 10


def draw_sweep(
    settings: Sequence[Setting], curves: Sequence[Curve], key: str, unit: str
) -> list[Picture]:
    """Return a figure for each knob that has several values, and one with the curves of all
    members.

    Args:
        settings: settings as described above.
        curves: the members' curves.
        key: the score's key in a row of metrics.
        unit: the score's unit.
    """
    varied = varied_in(settings)
    panels: dict[str, Callable[[Axes], None]] = {
        f"against_{name.rpartition('.')[2]}": partial(
            _against, settings=settings, name=name, unit=unit
        )
        for name in varied
    }
    if any(row.get(key) is not None for _, rows in curves for row in rows):
        panels["curves"] = lambda axes: _curves(axes, curves, key, unit, varied)
    with style():
        return [single_picture(name, panel, (7.3, 3.4)) for name, panel in panels.items()]


def _against(axes: Axes, settings: Sequence[Setting], name: str, unit: str) -> None:
    """Draw a dot for every member, mean and standard error for every setting, and a mark where a
    member diverged.
    """
    places, ticks, is_log = placed([setting["knobs"].get(name) for setting in settings])
    step = -(-len(ticks) // MOST_TICKS)
    labels = [text if index % step == 0 else "" for index, (_, text) in enumerate(ticks)]
    axes.set_title(f"Held out, {unit}, by {name}")
    if is_log:
        axes.set_xscale("log")
    axes.set_xticks([], minor=True)
    axes.set_xticks([at for at, _ in ticks], labels)
    scored = [setting for setting in settings if setting["mean"] is not None]
    low, high = limits_of(
        [value for setting in scored for value in setting["values"] if value is not None]
    )
    axes.set_ylim(low, high)
    for setting, place in zip(settings, places, strict=True):
        best, tied = setting["standing"] == "best", setting["standing"] == "tied"
        colour = ACCENT if best or tied else MUTED
        values = [value for value in setting["values"] if value is not None]
        axes.plot(
            [place] * len(values),
            values,
            "o",
            color=colour,
            alpha=0.35,
            markersize=3,
            markeredgewidth=0,
        )
        if setting["mean"] is not None:
            error = setting["standard_error"] or 0.0
            axes.errorbar(
                place,
                setting["mean"],
                yerr=error,
                fmt="o",
                color=colour,
                markersize=5 if best else 4,
                capsize=3,
                elinewidth=1.2,
                markerfacecolor=colour if best else "none",
            )
        if len(values) < len(setting["values"]):
            axes.plot([place], [high], "x", color=WARN, markersize=6, clip_on=False)
    if len({repr(setting["knobs"]) for setting in scored}) == len(set(places)):
        order = [index for index in np.argsort(places) if settings[index]["mean"] is not None]
        means = [settings[index]["mean"] for index in order]
        axes.plot([places[index] for index in order], means, color=GRID, linewidth=1.4, zorder=0)
    words = "filled: best; blue: tied with it"
    if any(None in setting["values"] for setting in settings):
        words += "; x: a member diverged"
    axes.text(0.01, 0.98, words, transform=axes.transAxes, va="top", fontsize=7.5, color=MUTED)


def _curves(
    axes: Axes, curves: Sequence[Curve], key: str, unit: str, varied: Sequence[str]
) -> None:
    """Draw each member's held-out scores over training, from evaluations on equally many rows, a
    shade per setting.
    """
    axes.set_title(f"Held out, {unit}, all members")
    shades = list(dict.fromkeys(_shown(knobs, varied) for knobs, _ in curves))
    ends = []
    for knobs, rows in curves:
        scored = [row for row in rows if row.get(key) is not None and row.get("eval_rows")]
        fewest = min((row["eval_rows"] for row in scored), default=0)
        points = [(row["tokens"], row[key]) for row in scored if row["eval_rows"] == fewest]
        if not points:
            continue
        share = (shades.index(_shown(knobs, varied)) + 1) / len(shades)
        axes.plot(
            *zip(*points, strict=True), color=ACCENT, alpha=0.15 + 0.85 * share, linewidth=1.2
        )
        ends.append(points[-1][1])
    low, high = limits_of(ends)
    axes.set_ylim(low, low + 1.6 * (high - low))
    axes.xaxis.set_major_formatter(lambda value, _: quantities.count(value))
    axes.set_xlabel("tokens", fontsize=8, loc="right", labelpad=1)
    if len(shades) > 1:
        words = f"pale: {shades[0]}   dark: {shades[-1]}"
        axes.text(
            0.99,
            0.98,
            words,
            transform=axes.transAxes,
            va="top",
            ha="right",
            fontsize=7.5,
            color=INK,
        )


def _shown(knobs: Mapping[str, Any], varied: Sequence[str]) -> str:
    return described({name: knobs.get(name) for name in varied})


def write_sweep_report(
    folder: Path,
    results: Mapping[str, Any],
    settings: Sequence[Setting],
    curves: Sequence[Curve],
    origin: Sequence[tuple[str, str]] = (),
) -> None:
    """Write `folder`/figures/*.png and `folder`/report.html, each whole or not at all.

    Args:
        folder: the sweep's folder.
        results: the object that `monograph sweep --json` prints.
        settings: settings as this file's docstring describes them.
        curves: the members' curves.
        origin: (name, text) pairs on how the sweep was started.

    Raises:
        DiskFull: there is no space for them.
    """
    key, unit = _measured(results)
    text = sweep_page(folder, results, settings, drawings_of(settings, curves, key, unit), origin)
    write_pages(folder, text, draw_sweep(settings, curves, key, unit))


def write_page_so_far(
    folder: Path,
    results: Mapping[str, Any],
    settings: Sequence[Setting],
    curves: Sequence[Curve],
    origin: Sequence[tuple[str, str]],
    state: str,
) -> None:
    """Write the page of a sweep that has not ended, without figures; `state` says what it is, such
    as "in progress".

    Raises:
        DiskFull: there is no space for it.
    """
    drawings = drawings_of(settings, curves, *_measured(results))
    write_pages(folder, sweep_page(folder, results, settings, drawings, origin, state), [])


def _measured(results: Mapping[str, Any]) -> tuple[str, str]:
    """Return the score's key in a row of metrics, and its unit."""
    unit = results["best"]["unit"] if results["best"] else "nats"
    return "eval_bits_per_byte" if unit == "bits/byte" else "eval_loss", unit


def sweep_page(
    folder: Path,
    results: Mapping[str, Any],
    settings: Sequence[Setting],
    drawings: Drawings,
    origin: Sequence[tuple[str, str]] = (),
    state: str = "",
) -> str:
    """Return a sweep's page as HTML; see `write_sweep_report` and `write_page_so_far`."""
    best = results["best"]
    standing = [advice["text"] for advice in results["advice"]]
    if state:
        standing = [f"{results['finished']} of {len(results['members'])} members have finished."]
    return page(
        kind=f"Sweep, {state}" if state else "Sweep",
        title=folder.name,
        headline=_headline(best, so_far=bool(state)),
        standing=" ".join(standing),
        figures=_key_figures(results),
        drawings=drawings,
        sections=[
            section("What to run next", *_commands(results["advice"]), whole=True),
            section("Settings", _settings(settings, best["unit"] if best else "nats"), whole=True),
            section("Members", _members(results["members"]), whole=True),
            section("How it was run", pairs(origin), config_of(folder), whole=True),
        ],
        refresh_s=refresh_s(state),
    )


def _commands(advice: Sequence[Mapping[str, Any]]) -> list[str]:
    return [f"<pre>{escaped(each['command'])}</pre>" for each in advice if each["command"]]


def _headline(best: Mapping[str, Any] | None, *, so_far: bool) -> str:
    if best is None:
        return "No score yet" if so_far else "Every member diverged"
    knobs = ", ".join(
        f"{key.rpartition('.')[2]} {text_of(value)}" for key, value in best["knobs"].items()
    )
    return f"{best['mean']:.3f} {best['unit']}{' at ' + knobs if knobs else ''}{' so far' if so_far else ''}"


def _key_figures(results: Mapping[str, Any]) -> list[tuple[str, str]]:
    rate, spent = results["tokens_per_s"], results["wall_s"]
    known = [
        ("members", str(len(results["members"]))),
        ("diverged", str(sum(member["diverged"] is not None for member in results["members"]))),
        ("time", quantities.duration(spent) if spent else ""),
        ("tokens/s, all", quantities.count(rate) if rate else ""),
    ]
    return [(name, value) for name, value in known if value]


def _settings(settings: Sequence[Setting], unit: str) -> str:
    """Return a table of the settings' means over seeds, and how each compares with the best."""
    rows: list[list[Cell]] = []
    for setting in settings:
        lost = setting["values"].count(None)
        of = len(setting["values"])
        score, error = (number(setting[key], "{:.4f}") for key in ("mean", "standard_error"))
        rows.append([score, error, (f"{lost} of {of}", lost), setting["standing"]])
    heads = [unit, "standard error", "diverged", "standing"]
    return _with_knobs(
        "Settings of the sweep", [setting["knobs"] for setting in settings], heads, rows
    )


def _members(members: Rows) -> str:
    rows: list[list[Cell]] = []
    for member in members:
        at = member["diverged"]
        scores = [
            number(member.get(key), "{:.4f}")
            for key in ("eval_bits_per_byte", "eval_loss", "train_loss")
        ]
        rows.append(
            [
                *scores,
                ("", None) if at is None else (f"at update {at:,}", at),
                member.get("run", ""),
            ]
        )
    heads = ["bits per byte", "held-out loss, nats", "training loss, nats", "diverged", "run"]
    return _with_knobs("Members of the sweep", [member["knobs"] for member in members], heads, rows)


def _with_knobs(
    name: str, knobs: Rows, heads: Sequence[str], rows: Sequence[Sequence[Cell]]
) -> str:
    """Return a table whose first columns are the knobs."""
    keys = list(dict.fromkeys(key for point in knobs for key in point))
    cells = ([_knob(point.get(key)) for key in keys] for point in knobs)
    whole = [[*of_knobs, *rest] for of_knobs, rest in zip(cells, rows, strict=True)]
    return table(name, [*(key.rpartition(".")[2] for key in keys), *heads], whole)


def _knob(value: object) -> Cell:
    if value is None:
        return ""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return text_of(value), value
    return str(value)
