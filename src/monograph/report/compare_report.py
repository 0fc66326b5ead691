"""Write the page of a comparison: scores, differences with their errors, settings that differ,
curves of all runs.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from monograph.report.charts import Chart, Line, Row, columns, limits, lines_of, present
from monograph.report.metrics import keys, shown
from monograph.report.page import Cell, Drawings, number, page, section, table
from monograph.report.quantities import count

SHADES = 4  # colours that can be told apart


@dataclass(frozen=True)
class Compared:
    """One of the compared.

    Attributes:
        name: the name that the user gave.
        params: the number of parameters.
        score: bits per byte, or the share of questions answered correctly.
        tokens_per_s: the training speed; None if it is not known.
        curves: the rows of each of its runs, one for each seed; none for a model's folder.
        config: the config.toml of the first of its runs; "" for a model's folder.
        difference: the difference from the first of the compared; None for the first.
        standard_error: the difference's standard error; None if there is none.
        pairs: what the difference is a mean over, such as "412 documents".
        verdict: which of the two is better.
    """

    name: str
    params: int
    score: float
    tokens_per_s: float | None
    curves: Sequence[Sequence[Row]] = ()
    config: str = ""
    difference: float | None = None
    standard_error: float | None = None
    pairs: str = ""
    verdict: str = ""


def compare_page(title: str, unit: str, sides: Sequence[Compared], lines: Sequence[str]) -> str:
    """Return a comparison's page as HTML.

    Args:
        title: what was compared on which text.
        unit: the score's unit.
        sides: the compared, the one that the others are compared with first.
        lines: what the command prints of the others, a line each.
    """
    first, *others = sides
    verdicts = list(dict.fromkeys(side.verdict for side in others))
    headline = verdicts[0] if len(verdicts) == 1 else f"{len(sides)} models compared"
    return page(
        kind="Comparison",
        title=title,
        headline=headline[0].upper() + headline[1:],
        standing="; ".join(lines) if len(lines) == 1 else f"Each is compared with {first.name}.",
        figures=[(f"{side.name}, {unit}", f"{side.score:.4f}") for side in sides],
        drawings=_drawings(sides),
        sections=[
            section(f"Scores, {unit}", _scores(sides, unit), whole=True),
            section("Settings that differ", _settings(sides), whole=True),
        ],
    )


def _drawings(sides: Sequence[Compared]) -> Drawings:
    runs = [(place, rows) for place, side in enumerate(sides) for rows in side.curves]
    tables = [columns(rows, keys()) for _, rows in runs]
    charts = list[Chart]()
    for metric in shown({key for found in tables for key in found}):
        if not metric.is_compared:
            continue
        lines = list[Line]()
        for at, (place, _) in enumerate(runs):
            lines += lines_of(metric, tables[at], at, sides[place].name, place % SHADES)
        values = [present(tables[line.table], line.key) for line in lines]
        charts.append(
            Chart(
                metric.chart, metric.title, lines, limits(metric, values), is_count=metric.is_count
            )
        )
    return Drawings(tables, charts, halves=True)


def _scores(sides: Sequence[Compared], unit: str) -> str:
    rows: list[list[Cell]] = []
    for side in sides:
        rows.append(
            [
                side.name,
                number(side.score, "{:.4f}"),
                number(side.difference, "{:+.4f}"),
                number(side.standard_error, "{:.4f}"),
                side.pairs,
                (count(side.params), side.params),
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


def _settings(sides: Sequence[Compared]) -> str:
    """Return a table of the settings that are not the same in all runs."""
    settings = [(side.name, _flat(side.config)) for side in sides if side.config]
    keys = list(dict.fromkeys(key for _, values in settings for key in values))
    differ = [key for key in keys if len({repr(values.get(key)) for _, values in settings}) > 1]
    rows: list[list[Cell]] = [
        [key, *(_text(values.get(key)) for _, values in settings)] for key in differ
    ]
    return table("Settings that differ", ["key", *(name for name, _ in settings)], rows)


def _flat(config: str) -> dict[str, Any]:
    """Return the keys of a config.toml as "section.key"; none of a file that cannot be read."""
    try:
        found = tomllib.loads(config)
    except tomllib.TOMLDecodeError:
        return {}
    sections: dict[str, Mapping[str, Any]] = {
        key: value for key, value in found.items() if isinstance(value, dict)
    }
    return {
        f"{name}.{key}": value for name, values in sections.items() for key, value in values.items()
    }


def _text(value: object) -> str:
    return "" if value is None else re.sub(r"^'|'$", "", repr(value))
