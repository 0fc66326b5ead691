"""Describe the charts of a sweep: its score against each knob, and the curves of all members.

A knob is a key that the sweep varies, such as "optim.lr". A setting is one combination of values of
the knobs, and its members are the runs of this setting, one for each seed. The mappings that
describe settings and curves are those of `monograph.report.sweep_report`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from monograph.report.charts import (
    Chart,
    ChartAxis,
    Columns,
    Line,
    MetricsRow,
    columns,
    rounded,
    without_empty_columns,
)
from monograph.report.knobs import knobs_text, short_key, value_text
from monograph.report.page import Drawings

SettingSummary = Mapping[str, Any]
SHADES = 4  # the page has this many colours that can be told apart


class SweepScore(NamedTuple):
    """What the members of a sweep are compared by.

    Attributes:
        key: its key in a row of metrics.
        unit: its unit.
        higher_is_better: whether a higher score is better.
    """

    key: str
    unit: str
    higher_is_better: bool = False


class MemberCurve(NamedTuple):
    """A member of a sweep, and the data of its curve.

    Attributes:
        knobs: the member's values of the knobs.
        rows: its rows of metrics.
    """

    knobs: Mapping[str, Any]
    rows: Sequence[MetricsRow]


def sweep_drawings(
    settings: Sequence[SettingSummary], curves: Sequence[MemberCurve], score: SweepScore
) -> Drawings:
    """Return a chart for each knob that varies, and a chart with the curves of all members.

    Args:
        settings: the settings.
        curves: the members' curves.
        score: what the members are compared by.
    """
    tables: list[Columns] = []
    charts = [_chart_against_knob(settings, name, score, tables) for name in varied_in(settings)]
    curve_chart = _chart_of_curves(curves, score, tables)
    if curve_chart:
        charts.append(curve_chart)
    return Drawings(tables, charts, halves=True)


def varied_in(settings: Sequence[SettingSummary]) -> list[str]:
    """Return the names of the knobs that have several values."""
    names = list(dict.fromkeys(name for setting in settings for name in setting["knobs"]))
    varied = []
    for name in names:
        values = {repr(setting["knobs"].get(name)) for setting in settings}
        if len(values) > 1:
            varied.append(name)
    return varied


def _chart_against_knob(
    settings: Sequence[SettingSummary], knob: str, score: SweepScore, tables: list[Columns]
) -> Chart:
    """Return a chart of the settings' means over the values of one knob, and append its tables.

    There is a line of means for each combination of the other knobs, and a dot for each member. A
    chart with a single line of means also has a band of one standard error.

    Args:
        settings: the settings.
        knob: the knob's key.
        score: what the members are compared by.
        tables: the page's tables; each line's table is appended.
    """
    axis = axis_of([setting["knobs"].get(knob) for setting in settings])
    groups: dict[str, list[tuple[float, SettingSummary]]] = {}  # by the values of the other knobs
    for place, setting in zip(axis.places, settings, strict=True):
        other_knobs = {key: value for key, value in setting["knobs"].items() if key != knob}
        groups.setdefault(knobs_text(other_knobs), []).append((place, setting))
    has_band = len(groups) == 1
    lines: list[Line] = []
    for group_index, (other_knobs_text, group) in enumerate(groups.items()):
        shade = group_index % SHADES
        table_index = len(tables)
        by_place = sorted(group, key=lambda place_and_setting: place_and_setting[0])
        table = _columns_by_place(by_place)
        tables.append(table)
        if has_band:
            lines.append(Line("low", "mean - standard error", style="edge", table=table_index))
            lines.append(Line("high", "mean + standard error", style="edge", table=table_index))
        label = f"mean, {other_knobs_text}" if other_knobs_text else "mean"
        lines.append(Line("mean", label, style="line", table=table_index, shade=shade))
        for key in sorted(key for key in table if key.startswith("seed")):
            lines.append(Line(key, label="", style="dots", table=table_index, shade=shade))
    # The star of the best setting comes last, so that no line is drawn over it.
    for table_index in {line.table for line in lines}:
        if "best" in tables[table_index]:
            lines.append(Line("best", label="best", style="star", table=table_index, shade=1))
    note = "Small dots are members."
    if has_band:
        note = "Small dots are members, the band is one standard error."
    diverged = [setting for setting in settings if None in setting["values"]]
    if diverged:
        note += f" Members diverged at {knob} {_values_text(diverged, knob)}."
    stopped = [setting for setting in settings if setting["standing"] == "stopped"]
    if stopped:
        note += f" Stopped early, with the scores of that moment: {_values_text(stopped, knob)}."
    scores = [value for setting in settings for value in setting["values"] if value is not None]
    return Chart(
        name=f"against_{short_key(knob)}",
        title=f"Held-out {score.unit} by {knob}",
        lines=lines,
        limits=limits_of(scores, score),
        note=note,
        axis=ChartAxis(key="place", name=knob, ticks=axis.ticks, is_log=axis.is_log),
        band=("low", "high") if has_band else None,
    )


def _values_text(settings: Sequence[SettingSummary], knob: str) -> str:
    """Return the values of a knob in some settings, each value once, as "0.01, 0.02"."""
    values = [value_text(setting["knobs"].get(knob)) for setting in settings]
    return ", ".join(dict.fromkeys(values))


def _columns_by_place(group: Sequence[tuple[float, SettingSummary]]) -> Columns:
    """Return (place on the axis, setting) pairs, sorted by place, as columns.

    The columns are the place, the mean score, the mean less and plus its standard error ("low" and "high"),
    the score of each member ("seed0" and so on), and the mean of the best setting alone ("best").
    """
    seeds = max(len(setting["values"]) for _, setting in group)
    seed_keys = [f"seed{seed}" for seed in range(seeds)]
    table: Columns = {key: [] for key in ("place", "mean", "low", "high", *seed_keys, "best")}
    for place, setting in group:
        mean = setting["mean"]
        error = setting["standard_error"] or 0.0
        table["place"].append(rounded(place))
        table["mean"].append(rounded(mean))
        table["low"].append(rounded(None if mean is None else mean - error))
        table["high"].append(rounded(None if mean is None else mean + error))
        table["best"].append(rounded(mean) if setting["standing"] == "best" else None)
        for seed, key in enumerate(seed_keys):
            # A setting may have fewer seeds than another.
            value = setting["values"][seed] if seed < len(setting["values"]) else None
            table[key].append(rounded(value))
    return without_empty_columns(table)


class KnobAxis(NamedTuple):
    """A horizontal axis for the values of a knob.

    Attributes:
        places: each value's place.
        ticks: (place, text) for each distinct value.
        is_log: whether the axis is logarithmic.
    """

    places: list[float]
    ticks: list[tuple[float, str]]
    is_log: bool


def axis_of(values: Sequence[Any]) -> KnobAxis:
    """Return an axis for a knob's values.

    Numbers above 0 whose maximum is at least 8 times their minimum are on a logarithmic axis. Other
    values are at 0, 1, 2 and so on: numbers in rising order, texts in the order of `values`.
    """
    are_numbers = all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in values
    )
    distinct = list(dict.fromkeys(values))
    if are_numbers:
        distinct = sorted(distinct)
        if distinct[0] > 0 and distinct[-1] >= 8 * distinct[0]:
            places = [float(value) for value in values]
            ticks = [(float(value), value_text(value)) for value in distinct]
            return KnobAxis(places, ticks, is_log=True)
    places = [float(distinct.index(value)) for value in values]
    ticks = [(float(index), value_text(value)) for index, value in enumerate(distinct)]
    return KnobAxis(places, ticks, is_log=False)


def limits_of(values: Sequence[float], score: SweepScore) -> tuple[float, float]:
    """Return the lower and the upper end of the scores' axis.

    If a low score is good, the axis leaves out scores above 1.6 times the best score. With them, the others
    would look like one flat line.
    """
    finite = sorted(value for value in values if math.isfinite(value)) or [0.0, 1.0]
    low = finite[0]
    high = finite[-1]
    if not score.higher_is_better:
        high = min(high, 1.6 * low)
    margin = max(0.08 * (high - low), 0.005)
    return low - margin, high + 2 * margin


def limits_of_curves(last_scores: Sequence[float], score: SweepScore) -> tuple[float, float]:
    """Return the lower and the upper end of the axis of the members' curves.

    The ends of the curves decide it, since their beginnings are far worse.
    """
    low, high = limits_of(last_scores, score)
    height = 1.6 * (high - low)
    if score.higher_is_better:
        return high - height, high
    return low, low + height


def _chart_of_curves(
    curves: Sequence[MemberCurve], score: SweepScore, tables: list[Columns]
) -> Chart | None:
    """Return a chart of each member's held-out scores over training, and append its tables.

    Returns:
        The chart; None if no member has a score.
    """
    settings = list(dict.fromkeys(knobs_text(knobs, without="seed") for knobs, _ in curves))
    key = score.key
    lines = list[Line]()
    last_scores = list[float]()
    for knobs, rows in curves:
        table = columns(comparable_rows(rows, key), [key])
        if key not in table:
            continue
        line = Line(
            key,
            label=knobs_text(knobs) or "member",
            style="line",
            table=len(tables),  # the index of the table that is appended now
            shade=settings.index(knobs_text(knobs, without="seed")) % SHADES,
        )
        lines.append(line)
        tables.append(table)
        last_score = table[key][-1]
        if last_score is not None:  # it is None if the score was not finite
            last_scores.append(last_score)
    if not lines:
        return None
    return Chart(
        name="curves",
        title=f"Held-out {score.unit}, all members",
        lines=lines,
        limits=limits_of_curves(last_scores, score),
    )


def comparable_rows(rows: Sequence[MetricsRow], key: str) -> list[MetricsRow]:
    """Return the rows with comparable scores: those evaluated on the smallest number of held-out
    records.

    The last evaluation of a member may use more held-out records than the earlier ones. Its score would
    then make a step in the curve that training did not cause.
    """

    def record_count(row: MetricsRow) -> int:
        """Rewards are evaluated on prompts, other scores on rows."""
        return row.get("eval_rows") or row.get("eval_prompts") or 0

    scored = [row for row in rows if row.get(key) is not None and record_count(row)]
    fewest = min(map(record_count, scored), default=0)
    return [row for row in scored if record_count(row) == fewest]
