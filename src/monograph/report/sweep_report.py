"""Write a sweep's report: its figures as PNG files, and one HTML page that loads no other file.

A knob is a key that the sweep varies, such as "optim.lr". A setting is one combination of values of
the knobs. The members of a setting are its runs, one for each seed. The figures show the held-out
score against each knob, with error bars, and the curves of all members.

A setting is a mapping with these keys:

- `knobs`: the value of each knob.
- `values`: the held-out score of each member; None for a member that diverged.
- `mean`: the mean of the scores; None if there is no score.
- `standard_error`: the mean's standard error; None for one seed.
- `standing`: "best", "tied" (with the best), "stopped" or "". A member may be stopped early; then its
  score is the last one before that.

The curve of a member is a `MemberCurve`: its knobs, and the rows of its metrics, one row for each
update. Rows of updates after which the member was evaluated have its score.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monograph.report import quantities
from monograph.report.figures import ACCENT, GRID, INK, MUTED, WARN, Picture, single_picture, style
from monograph.report.in_progress import refresh_s
from monograph.report.knobs import knobs_text, short_key, value_text
from monograph.report.markup import escaped
from monograph.report.page import (
    Drawings,
    TableCell,
    config_of,
    number,
    page,
    pairs,
    section,
    table,
)
from monograph.report.run_report import write_pages
from monograph.report.sweep_charts import (
    MemberCurve,
    SettingSummary,
    SweepScore,
    axis_of,
    comparable_rows,
    limits_of,
    limits_of_curves,
    sweep_drawings,
    varied_in,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

JsonObjects = Sequence[Mapping[str, Any]]
MAX_TICK_LABELS = 10


def sweep_pictures(
    settings: Sequence[SettingSummary], curves: Sequence[MemberCurve], score: SweepScore
) -> list[Picture]:
    """Return a PNG picture for each knob that varies, and one with the curves of all members.

    Args:
        settings: settings as this module's docstring describes them.
        curves: the members' curves.
        score: what the members are compared by.
    """
    varied = varied_in(settings)
    panels: dict[str, Callable[[Axes], None]] = {}
    for knob in varied:
        panels[f"against_{short_key(knob)}"] = partial(
            _draw_against_knob, settings=settings, knob=knob, score=score
        )
    if any(row.get(score.key) is not None for _, rows in curves for row in rows):
        panels["curves"] = lambda axes: _draw_curves(axes, curves, score, varied)
    with style():
        return [single_picture(name, panel, size=(7.3, 3.4)) for name, panel in panels.items()]


def _draw_against_knob(
    axes: Axes, settings: Sequence[SettingSummary], knob: str, score: SweepScore
) -> None:
    """Draw the scores against one knob.

    Each member is a dot, and each setting a mean with its standard error. A cross at the top marks
    a value of the knob at which a member diverged.
    """
    # `places` has the place of each setting, and `ticks` the (place, text) of each distinct value.
    knob_axis = axis_of([setting["knobs"].get(knob) for setting in settings])
    label_step = math.ceil(len(knob_axis.ticks) / MAX_TICK_LABELS)
    labels = [
        text if index % label_step == 0 else "" for index, (_, text) in enumerate(knob_axis.ticks)
    ]
    axes.set_title(f"Held out, {score.unit}, by {knob}")
    if knob_axis.is_log:
        axes.set_xscale("log")
    # A logarithmic axis would have minor ticks between the sweep's values.
    axes.set_xticks([], minor=True)
    axes.set_xticks([place for place, _ in knob_axis.ticks], labels)
    scored = [setting for setting in settings if setting["mean"] is not None]
    scores = [value for setting in scored for value in setting["values"] if value is not None]
    low, high = limits_of(scores, score)
    axes.set_ylim(low, high)
    for setting, place in zip(settings, knob_axis.places, strict=True):
        _draw_setting(axes, setting, place)
        if None in setting["values"]:
            axes.plot([place], [high], "x", color=WARN, markersize=6, clip_on=False)
    # A line connects the means if there are as many means as places. There are more if other knobs
    # vary, too, and fewer if all members of a setting diverged.
    if len(scored) == len(set(knob_axis.places)):
        points = [
            (place, setting["mean"])
            for setting, place in zip(settings, knob_axis.places, strict=True)
            if setting["mean"] is not None
        ]
        points.sort(key=lambda point: point[0])
        places = [place for place, _ in points]
        means = [mean for _, mean in points]
        axes.plot(places, means, color=GRID, linewidth=1.4, zorder=0)
    words = "filled: best; blue: tied with it"
    if any(None in setting["values"] for setting in settings):
        words += "; x: a member diverged"
    if any(setting["standing"] == "stopped" for setting in settings):
        words += "; square: stopped early"
    axes.text(0.01, 0.98, words, transform=axes.transAxes, va="top", fontsize=7.5, color=MUTED)


def _draw_setting(axes: Axes, setting: SettingSummary, place: float) -> None:
    """Draw a setting's members as pale dots, and its mean with an error bar."""
    is_best = setting["standing"] == "best"
    marker = "s" if setting["standing"] == "stopped" else "o"
    colour = ACCENT if setting["standing"] in ("best", "tied") else MUTED
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
    if setting["mean"] is None:
        return
    axes.errorbar(
        place,
        setting["mean"],
        yerr=setting["standard_error"] or 0.0,
        fmt=marker,
        color=colour,
        markersize=5 if is_best else 4,
        capsize=3,
        elinewidth=1.2,
        markerfacecolor=colour if is_best else "none",
    )


def _draw_curves(
    axes: Axes, curves: Sequence[MemberCurve], score: SweepScore, varied: Sequence[str]
) -> None:
    """Draw each member's held-out scores over training, each setting in a shade of its own.

    Later settings have darker shades.
    """
    axes.set_title(f"Held out, {score.unit}, all members")
    # The distinct settings in order. The members of one setting have the same text.
    setting_texts = list(dict.fromkeys(_varied_knobs_text(knobs, varied) for knobs, _ in curves))
    last_scores = []
    for knobs, rows in curves:
        # A last score on more held-out data is left out, since it would look like a step in the curve.
        scored = comparable_rows(rows, score.key)
        if not scored:
            continue
        scores = [row[score.key] for row in scored]
        setting_index = setting_texts.index(_varied_knobs_text(knobs, varied))
        darkness = (setting_index + 1) / len(setting_texts)
        axes.plot(
            [row["tokens"] for row in scored],
            scores,
            color=ACCENT,
            alpha=0.15 + 0.85 * darkness,
            linewidth=1.2,
        )
        last_scores.append(scores[-1])
    # The first scores are far worse. An axis with them would show the last ones as one line.
    axes.set_ylim(*limits_of_curves(last_scores, score))
    axes.xaxis.set_major_formatter(lambda value, _: quantities.count(value))
    axes.set_xlabel("tokens", fontsize=8, loc="right", labelpad=1)
    if len(setting_texts) > 1:
        words = f"pale: {setting_texts[0]}   dark: {setting_texts[-1]}"
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


def _varied_knobs_text(knobs: Mapping[str, Any], varied: Sequence[str]) -> str:
    return knobs_text({name: knobs.get(name) for name in varied})


def write_sweep_report(
    folder: Path,
    results: Mapping[str, Any],
    settings: Sequence[SettingSummary],
    curves: Sequence[MemberCurve],
    origin: Sequence[tuple[str, str]] = (),
) -> None:
    """Write `folder`/figures/*.png and `folder`/report.html.

    Each file is written completely or not at all.

    Args:
        folder: the sweep's folder.
        results: the object that `monograph sweep --json` prints.
        settings: settings as this module describes them.
        curves: the members' curves.
        origin: (name, text) pairs that say how the sweep was started.

    Raises:
        DiskFull: the disk has no space for a file.
    """
    score = _score_of(results)
    page_drawings = sweep_drawings(settings, curves, score)
    html_page = sweep_page(folder, results, settings, page_drawings, origin)
    write_pages(folder, html_page, sweep_pictures(settings, curves, score))


def write_page_so_far(
    folder: Path,
    results: Mapping[str, Any],
    settings: Sequence[SettingSummary],
    curves: Sequence[MemberCurve],
    origin: Sequence[tuple[str, str]],
    state: str,
) -> None:
    """Write the page of a sweep that has not ended, without figures.

    The arguments are those of `write_sweep_report`, and `state`, which the page shows, such as
    "in progress".

    Raises:
        DiskFull: the disk has no space for the page.
    """
    page_drawings = sweep_drawings(settings, curves, _score_of(results))
    html_page = sweep_page(folder, results, settings, page_drawings, origin, state)
    write_pages(folder, html_page, pictures=[])


def _score_of(results: Mapping[str, Any]) -> SweepScore:
    """Return what the members are compared by, which `--json` calls "measure"."""
    return SweepScore(**results["measure"])


def sweep_page(
    folder: Path,
    results: Mapping[str, Any],
    settings: Sequence[SettingSummary],
    drawings: Drawings,
    origin: Sequence[tuple[str, str]] = (),
    state: str = "",
) -> str:
    """Return a sweep's page as HTML; see `write_sweep_report` and `write_page_so_far`."""
    best = results["best"]
    sentences = [advice["text"] for advice in results["advice"]]
    if state:
        sentences = [f"{results['finished']} of {len(results['members'])} members have finished."]
    return page(
        kind=f"Sweep, {state}" if state else "Sweep",
        title=folder.name,
        headline=_headline(best, settings, so_far=bool(state)),
        assessment=" ".join(sentences),
        key_figures=_key_figures(results),
        drawings=drawings,
        sections=[
            section("What to run next", *_command_blocks(results["advice"]), full_width=True),
            section(
                "Settings",
                _settings_table(settings, _score_of(results).unit),
                full_width=True,
            ),
            section(
                "Members", _members_table(results["members"], _score_of(results)), full_width=True
            ),
            section("How it was run", pairs(origin), config_of(folder), full_width=True),
        ],
        refresh_s=refresh_s(state),
    )


def _command_blocks(advice: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the markup of each command that the sweep's advice has."""
    commands = [entry["command"] for entry in advice if entry["command"]]
    return [f"<pre>{escaped(command)}</pre>" for command in commands]


def _headline(
    best: Mapping[str, Any] | None, settings: Sequence[SettingSummary], *, so_far: bool
) -> str:
    """Return the best setting's score and knobs in a few words."""
    if best is None:
        return "No score yet" if so_far else "Every member diverged"
    knobs = ", ".join(
        f"{short_key(key)} {value_text(value)}" for key, value in best["knobs"].items()
    )
    headline = f"{best['mean']:.3f} {best['unit']}"
    # If all settings have the same score, no one is marked as the best.
    if all(setting["standing"] != "best" for setting in settings):
        headline += ": none is better"
    elif knobs:
        headline += f" at {knobs}"
    if so_far:
        headline += " so far"
    return headline


def _key_figures(results: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (name, text) pairs of the numbers to read first."""
    diverged = sum(member["diverged"] is not None for member in results["members"])
    figures = [("members", str(len(results["members"]))), ("diverged", str(diverged))]
    stopped = sum(member.get("stopped") is not None for member in results["members"])
    if stopped:
        figures.append(("stopped early", str(stopped)))
    if results["wall_s"]:
        figures.append(("time", quantities.duration(results["wall_s"])))
    if results["tokens_per_s"]:
        figures.append(("tokens/s, all", quantities.count(results["tokens_per_s"])))
    return figures


def _settings_table(settings: Sequence[SettingSummary], unit: str) -> str:
    """Return a table of the settings' means over seeds, and how each compares with the best."""
    rows: list[list[TableCell]] = []  # a number is a cell (text, number to sort by)
    for setting in settings:
        diverged = setting["values"].count(None)
        rows.append(
            [
                number(setting["mean"], "{:.4f}"),
                number(setting["standard_error"], "{:.4f}"),
                (f"{diverged} of {len(setting['values'])}", diverged),
                setting["standing"],
            ]
        )
    heads = [unit, "standard error", "diverged", "standing"]
    knobs = [setting["knobs"] for setting in settings]
    return _table_with_knobs("Settings of the sweep", knobs, heads, rows)


# {key of a score: head of its column} for members that learn from texts. Such a member has several
# scores. The table shows all of them, no matter by which one the members are compared.
_SCORES_OF_TEXTS = {
    "eval_bits_per_byte": "bits per byte",
    "eval_loss": "held-out loss, nats",
    "train_loss": "training loss, nats",
}


def _members_table(members: JsonObjects, score: SweepScore) -> str:
    """Return a table of the members: their knobs, scores, and whether they diverged or were stopped."""
    heads_of_scores = {score.key: f"held-out {score.unit}"}
    if score.key in _SCORES_OF_TEXTS:
        heads_of_scores = _SCORES_OF_TEXTS
    rows: list[list[TableCell]] = []
    for member in members:
        rows.append(
            [
                *(number(member.get(key), "{:.4f}") for key in heads_of_scores),
                number(member["diverged"], "at update {:,}"),
                number(member.get("stopped"), "at update {:,}"),
                member.get("run", ""),
            ]
        )
    heads = [*heads_of_scores.values(), "diverged", "stopped", "run"]
    knobs = [member["knobs"] for member in members]
    return _table_with_knobs("Members of the sweep", knobs, heads, rows)


def _table_with_knobs(
    name: str, knobs: JsonObjects, heads: Sequence[str], rows: Sequence[Sequence[TableCell]]
) -> str:
    """Return a table whose first columns are the knobs, and whose other columns are `rows`."""
    keys = list(dict.fromkeys(key for values_by_key in knobs for key in values_by_key))
    full_rows = []
    for values_by_key, cells in zip(knobs, rows, strict=True):
        knob_cells = [_knob_cell(values_by_key.get(key)) for key in keys]
        full_rows.append([*knob_cells, *cells])
    return table(name, [*map(short_key, keys), *heads], full_rows)


def _knob_cell(value: object) -> TableCell:
    if value is None:
        return ""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value_text(value), value
    return value_text(value)
