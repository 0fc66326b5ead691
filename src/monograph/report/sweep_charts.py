"""Describe the charts of a sweep: its score against each setting that varies, and the curves of all
members.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from monograph.report.charts import Axis, Chart, Columns, Line, Row, columns, rounded
from monograph.report.page import Drawings

Setting = Mapping[str, Any]
Curve = tuple[Mapping[str, Any], Sequence[Row]]
SHADES = 4  # colours that can be told apart


def drawings_of(
    settings: Sequence[Setting], curves: Sequence[Curve], key: str, unit: str
) -> Drawings:
    """Return a chart for each setting that has several values, and one with the curves of all
    members.

    Args:
        settings: settings as `monograph.report.sweep_report` describes them.
        curves: the members' curves.
        key: the score's key in a row of metrics.
        unit: the score's unit.
    """
    tables: list[Columns] = []
    charts = [_against(settings, name, unit, tables) for name in varied_in(settings)]
    if shown := _curves(curves, key, unit, tables):
        charts.append(shown)
    return Drawings(tables, charts, halves=True)


def varied_in(settings: Sequence[Setting]) -> list[str]:
    """Return the names of the settings that have several values."""
    names = list(dict.fromkeys(name for setting in settings for name in setting["knobs"]))
    return [
        name
        for name in names
        if len({repr(setting["knobs"].get(name)) for setting in settings}) > 1
    ]


def _against(settings: Sequence[Setting], name: str, unit: str, tables: list[Columns]) -> Chart:
    """Return a chart of means over one setting: a line for each combination of the others, a dot
    for each member.
    """
    places, ticks, is_log = placed([setting["knobs"].get(name) for setting in settings])
    groups: dict[str, list[tuple[float, Setting]]] = {}
    for place, setting in zip(places, settings, strict=True):
        others = {key: value for key, value in setting["knobs"].items() if key != name}
        groups.setdefault(described(others), []).append((place, setting))
    lines: list[Line] = []
    for number, (words, members) in enumerate(groups.items()):
        shade = number % SHADES
        at = len(tables)
        tables.append(_table(sorted(members, key=lambda pair: pair[0])))
        if len(groups) == 1:
            lines += [
                Line("low", "mean - standard error", "edge", at),
                Line("high", "mean + standard error", "edge", at),
            ]
        lines.append(Line("mean", f"mean, {words}" if words else "mean", "line", at, shade))
        values = sorted(key for key in tables[at] if key.startswith("seed"))
        lines += [Line(key, "", "dots", at, shade) for key in values]
    lines += [
        Line("best", "best", "star", at, 1)
        for at in {line.table for line in lines}
        if "best" in tables[at]
    ]
    lost = [setting for setting in settings if None in setting["values"]]
    where = ", ".join(dict.fromkeys(text_of(setting["knobs"].get(name)) for setting in lost))
    note = (
        "Small dots are members, the band is one standard error."
        if len(groups) == 1
        else "Small dots are members."
    )
    if lost:
        note += f" Members diverged at {name} {where}."
    scores = [value for setting in settings for value in setting["values"] if value is not None]
    return Chart(
        f"against_{name.rpartition('.')[2]}",
        f"Held-out {unit} by {name}",
        lines,
        limits_of(scores),
        note=note,
        axis=Axis("place", name, ticks, is_log),
        band=("low", "high") if len(groups) == 1 else None,
    )


def _table(members: Sequence[tuple[float, Setting]]) -> Columns:
    """Return (place, setting) pairs, in the order of their places, as columns."""
    found: Columns = {"place": [], "mean": [], "low": [], "high": []}
    most = max(len(setting["values"]) for _, setting in members)
    found |= {f"seed{number}": [] for number in range(most)}
    found["best"] = []
    for place, setting in members:
        mean = setting["mean"]
        error = setting["standard_error"] or 0.0
        found["place"].append(rounded(place))
        found["mean"].append(rounded(mean))
        found["low"].append(rounded(None if mean is None else mean - error))
        found["high"].append(rounded(None if mean is None else mean + error))
        found["best"].append(rounded(mean) if setting["standing"] == "best" else None)
        for number in range(most):
            value = setting["values"][number] if number < len(setting["values"]) else None
            found[f"seed{number}"].append(rounded(value))
    return {
        key: values for key, values in found.items() if any(value is not None for value in values)
    }


def placed(values: Sequence[Any]) -> tuple[list[float], list[tuple[float, str]], bool]:
    """Return where values go on an axis, its ticks, and whether it is logarithmic.

    It is if the values are numbers above 0 that span a factor of 8 or more; else values are placed
    in order.
    """
    numbers = [
        value for value in values if isinstance(value, int | float) and not isinstance(value, bool)
    ]
    distinct = list(dict.fromkeys(values))
    if len(numbers) == len(values):
        distinct = sorted(distinct)
        if min(numbers) > 0 and max(numbers) >= 8 * min(numbers):
            return (
                [float(value) for value in numbers],
                [(float(one), text_of(one)) for one in distinct],
                True,
            )
    ticks = [(float(index), text_of(value)) for index, value in enumerate(distinct)]
    return [float(distinct.index(value)) for value in values], ticks, False


def limits_of(values: Sequence[float]) -> tuple[float, float]:
    """Return the limits of the scores' axis, without scores so far off that the rest would be one
    flat line.
    """
    finite = sorted(value for value in values if math.isfinite(value)) or [0.0, 1.0]
    low = finite[0]
    high = min(finite[-1], 1.6 * finite[0])
    margin = max(0.08 * (high - low), 0.005)
    return low - margin, high + 2 * margin


def _curves(curves: Sequence[Curve], key: str, unit: str, tables: list[Columns]) -> Chart | None:
    """Return a chart of each member's held-out scores over training, from evaluations on equally
    many rows.
    """
    settings = list(dict.fromkeys(described(knobs, but="seed") for knobs, _ in curves))
    lines = list[Line]()
    ends = list[float]()
    for knobs, rows in curves:
        scored = [row for row in rows if row.get(key) is not None and row.get("eval_rows")]
        fewest = min((row["eval_rows"] for row in scored), default=0)
        table = columns([row for row in scored if row["eval_rows"] == fewest], [key])
        if key not in table:
            continue
        shade = settings.index(described(knobs, but="seed")) % SHADES
        lines.append(Line(key, described(knobs) or "member", "line", len(tables), shade))
        tables.append(table)
        ends += [value for value in table[key][-1:] if value is not None]
    if not lines:
        return None
    low, high = limits_of(ends)
    return Chart("curves", f"Held-out {unit}, all members", lines, (low, low + 1.6 * (high - low)))


def described(knobs: Mapping[str, Any], but: str = "") -> str:
    """Return settings as "lr=0.01 seed=1", without the one called `but`."""
    named = ((name.rpartition(".")[2], value) for name, value in knobs.items())
    return " ".join(f"{name}={text_of(value)}" for name, value in named if name != but)


def text_of(value: object) -> str:
    """Return a setting's value in at most four digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
