"""Write the page of a comparison of models.

It has the models' scores, the differences between scores with their standard errors, the settings
that differ, and the curves of all runs. A side of a comparison is one model or several runs of one
setting, one for each seed.
"""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from monograph.report.charts import (
    Chart,
    Columns,
    Line,
    MetricsRow,
    columns,
    known_values,
    limits,
    lines_of,
)
from monograph.report.metrics import metric_keys, shown_metrics
from monograph.report.page import Drawings, TableCell, number, page, section, table
from monograph.report.quantities import count

SHADES = 4  # the page has this many colours that can be told apart


@dataclass(frozen=True)
class Compared:
    """A side of a comparison.

    Attributes:
        name: the name that the user gave.
        params: the number of parameters.
        score: bits per byte, or the share of questions answered correctly.
        tokens_per_s: the training speed; None if unknown.
        curves: the rows of metrics of each run; empty for a folder with a model, which has no
            metrics.
        config: the text of the first run's config.toml; "" for a folder with a model.
        difference: the score minus the first side's score; None for the first side.
        standard_error: the difference's standard error; None if there is none.
        averaged_over: what the difference is a mean over, such as "412 documents"; "" for the first
            side.
        verdict: whether this side or the first one is better; "" for the first side.
    """

    name: str
    params: int
    score: float
    tokens_per_s: float | None
    curves: Sequence[Sequence[MetricsRow]] = ()
    config: str = ""
    difference: float | None = None
    standard_error: float | None = None
    averaged_over: str = ""
    verdict: str = ""


def compare_page(title: str, unit: str, sides: Sequence[Compared], printed: Sequence[str]) -> str:
    """Return a comparison's page as HTML.

    Args:
        title: what was compared, and on which text.
        unit: the score's unit.
        sides: the sides; all others are compared with the first one.
        printed: the lines that the command prints, one about each side but the first.
    """
    first, *others = sides
    verdicts = {side.verdict for side in others}
    headline = verdicts.pop() if len(verdicts) == 1 else f"{len(sides)} models compared"
    return page(
        kind="Comparison",
        title=title,
        headline=headline[0].upper() + headline[1:],
        assessment=printed[0] if len(printed) == 1 else f"Each is compared with {first.name}.",
        key_figures=[(f"{side.name}, {unit}", f"{side.score:.4f}") for side in sides],
        drawings=_drawings(sides),
        sections=[
            section(f"Scores, {unit}", _scores_table(sides, unit), full_width=True),
            section("Settings that differ", _settings_table(sides), full_width=True),
        ],
    )


def _drawings(sides: Sequence[Compared]) -> Drawings:
    """Return a chart for each metric that is compared, with the lines of all runs."""
    # tables[i] has the metrics of run i as columns, and side_indices[i] is the index of its side.
    tables = list[Columns]()
    side_indices = list[int]()
    for side_index, side in enumerate(sides):
        for rows in side.curves:
            tables.append(columns(rows, metric_keys()))
            side_indices.append(side_index)
    keys_with_values = {key for run_table in tables for key in run_table}
    charts = list[Chart]()
    for metric in shown_metrics(keys_with_values):
        if not metric.is_compared:
            continue
        lines = list[Line]()
        for run_index, side_index in enumerate(side_indices):
            lines += lines_of(
                metric,
                tables[run_index],
                table_index=run_index,
                run_name=sides[side_index].name,
                shade=side_index % SHADES,
            )
        # `line.table` is the line's `table_index`, and so the index of its run.
        values_of_lines = [known_values(tables[line.table], line.key) for line in lines]
        chart = Chart(
            name=metric.chart,
            title=metric.title,
            lines=lines,
            limits=limits(metric, values_of_lines),
            is_count=metric.is_count,
        )
        charts.append(chart)
    return Drawings(tables, charts, halves=True)  # each chart has half of the page's width


def _scores_table(sides: Sequence[Compared], unit: str) -> str:
    """Return a table of the sides: their scores, and how each compares with the first side."""
    rows: list[list[TableCell]] = []
    for side in sides:
        rows.append(
            [
                side.name,
                number(side.score, "{:.4f}"),
                number(side.difference, "{:+.4f}"),
                number(side.standard_error, "{:.4f}"),
                side.averaged_over,
                (count(side.params), side.params),  # the text, and the number to sort by
                number(side.tokens_per_s, "{:,.0f}"),
                number(len(side.curves) or None, "{:,}"),
                side.verdict,
            ]
        )
    heads = [
        "model",
        unit,
        "difference",
        "standard error",
        "over",
        "parameters",
        "tokens/s",
        "runs",
        "verdict",
    ]
    return table("Scores", heads, rows)


def _settings_table(sides: Sequence[Compared]) -> str:
    """Return a table of the settings that are not the same in all runs."""
    names = [side.name for side in sides if side.config]
    configs = [_flat_config(side.config) for side in sides if side.config]
    keys = list(dict.fromkeys(key for config in configs for key in config))
    rows: list[list[TableCell]] = []
    for key in keys:
        values = [config.get(key) for config in configs]
        # A set of texts: a list cannot be in a set, and a set would take 1 and True for the same value.
        if len({repr(value) for value in values}) > 1:
            rows.append([key, *map(_setting_text, values)])
    return table("Settings that differ", ["key", *names], rows)


def _flat_config(config: str) -> dict[str, Any]:
    """Return the values of a config.toml by "section.key"; empty if it is not valid TOML."""
    try:
        document = tomllib.loads(config)
    except tomllib.TOMLDecodeError:
        return {}
    flat = {}
    for section_name, section_values in document.items():
        if not isinstance(section_values, dict):
            continue
        for key, value in section_values.items():
            flat[f"{section_name}.{key}"] = value
    return flat


def _setting_text(value: object) -> str:
    """Return a value as Python writes it, without the quotes of a string; "" for None."""
    return "" if value is None else re.sub(r"^'|'$", "", repr(value))
