"""Write the page of a comparison: scores, differences with their errors, settings that differ, curves of all runs."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from monograph.report.charts import Chart, Columns, Line, Row, columns, present
from monograph.report.page import Cell, Drawings, number, page, section, table
from monograph.report.quantities import count

SHADES = 4  # colours that can be told apart

# (the chart's name, its title, what is drawn as a trend, what as points)
_CHARTS = (
    ("held_out", "Held-out text, bits per byte", "", "eval_bits_per_byte"),
    ("reward", "Mean reward of each update's answers", "reward", "eval_reward"),
    ("accuracy", "Accuracy: the chosen answer scores higher", "accuracy", "eval_accuracy"),
    ("train_loss", "Training loss, nats per token", "train_loss", ""),
    ("eval_loss", "Held-out loss, nats per token", "", "eval_loss"),
    ("learning_rate", "Learning rate", "lr", ""),
    ("gradient_norm", "Gradient norm, before clipping", "grad_norm", ""),
    ("speed", "Tokens per second", "tokens_per_s", ""),
)
_FROM_ZERO = ("learning_rate", "gradient_norm", "speed")


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
    keys = list(filter(None, chain.from_iterable((trend, points) for _, _, trend, points in _CHARTS)))
    runs = [(place, rows) for place, side in enumerate(sides) for rows in side.curves]
    tables = [columns(rows, keys) for _, rows in runs]
    judged = any({"reward", "accuracy"} & found.keys() for found in tables)  # such losses are no nats per token
    charts = []
    for name, title, trend, points in _CHARTS:
        if judged and name in ("train_loss", "eval_loss"):
            continue
        lines = []
        for at, (place, _) in enumerate(runs):
            lines += _lines(tables[at], at, sides[place].name, place, trend, points)
        if lines:
            charts.append(Chart(name, title, lines, _limits(tables, lines, name), is_count=name == "speed"))
    return Drawings(tables, charts, halves=True)


def _lines(found: Columns, at: int, name: str, place: int, trend: str, points: str) -> list[Line]:
    shade = place % SHADES
    lines = list[Line]()
    if trend in found:
        style = "line" if trend == "lr" else "trend"
        lines.append(Line(trend, name, style, at, shade))
    if points in found:
        label = f"{name}, held out" if lines else name
        lines.append(Line(points, label, "points", at, shade))
    return lines


def _limits(tables: Sequence[Columns], lines: Sequence[Line], name: str) -> tuple[float, float]:
    values = sorted(value for line in lines for value in present(tables[line.table], line.key).tolist())
    if name in _FROM_ZERO:
        most = values[min(len(values) - 1, int(0.995 * len(values)))]  # one spike would flatten the rest
        return 0.0, 1.15 * most or 1.0
    low, high = values[0], values[-1]
    if name in ("held_out", "eval_loss"):  # an untrained model's value would flatten the rest
        ends = [float(present(tables[line.table], line.key)[-1]) for line in lines]
        high = min(high, 2.2 * max(ends))
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    return low - margin, high + margin


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
    heads = ["model", unit, "difference", "standard error", "over", "parameters", "tokens/s", "runs", "verdict"]
    return table("Scores", heads, rows)


def _settings(sides: Sequence[Compared]) -> str:
    """Return a table of the settings that are not the same in all runs."""
    settings = [(side.name, _flat(side.config)) for side in sides if side.config]
    keys = list(dict.fromkeys(key for _, values in settings for key in values))
    differ = [key for key in keys if len({repr(values.get(key)) for _, values in settings}) > 1]
    rows: list[list[Cell]] = [[key, *(_text(values.get(key)) for _, values in settings)] for key in differ]
    return table("Settings that differ", ["key", *(name for name, _ in settings)], rows)


def _flat(config: str) -> dict[str, Any]:
    """Return the keys of a config.toml as "section.key"; none of a file that cannot be read."""
    try:
        found = tomllib.loads(config)
    except tomllib.TOMLDecodeError:
        return {}
    sections: dict[str, Mapping[str, Any]] = {key: value for key, value in found.items() if isinstance(value, dict)}
    return {f"{name}.{key}": value for name, values in sections.items() for key, value in values.items()}


def _text(value: Any) -> str:
    return "" if value is None else re.sub(r"^'|'$", "", repr(value))
