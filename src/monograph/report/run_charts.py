"""Describe the charts of a run's metrics, and its peak memory."""

from collections.abc import Mapping, Sequence

from monograph.report.charts import Chart, Columns, Mark, Row, columns, limits, lines_of, present
from monograph.report.metrics import BITS_PER_BYTE, LEARNING_RATE, LOSS, SPEED, Metric, keys, shown
from monograph.report.page import Bar, Drawings, bars
from monograph.report.quantities import counted, memory

Moments = Sequence[tuple[int, str]]
Yardsticks = Mapping[str, float]


def drawings_of(metrics: Sequence[Row], yardsticks: Yardsticks, moments: Moments) -> Drawings:
    """Return the charts of what a run's rows have.

    Args:
        metrics: rows as `monograph.report.figures` describes them.
        yardsticks: bits per byte by name.
        moments: (update, words) of what the learning rate's curve shows.
    """
    table = columns(metrics, keys())
    charts = [_chart(metric, table, metrics, yardsticks, moments) for metric in shown(table)]
    ledger = next(
        (row["memory"] for row in reversed(metrics) if (row.get("memory") or {}).get("measured")),
        None,
    )
    return Drawings([table], charts, [_peak(ledger)] if ledger else [])


def _chart(
    metric: Metric, table: Columns, metrics: Sequence[Row], yardsticks: Yardsticks, moments: Moments
) -> Chart:
    levels = yardsticks if metric is BITS_PER_BYTE else {}
    marks: list[Mark] = []
    note = ""
    if metric is LEARNING_RATE:
        marks = _marks(table, sorted(moments))
    if metric is SPEED:
        skipped = [(row["update"], "") for row in metrics if row.get("skipped")]
        marks = _marks(
            table, [*skipped, *((row["update"], "slower") for row in metrics if "slower" in row)]
        )
        note = f"{counted(len(skipped), 'update')} skipped, each marked below." if skipped else ""
    named = sum(bool(mark.label) for mark in marks)
    room = 1.15 + 0.16 * named  # above the curve, for the marks' words
    return Chart(
        metric.chart,
        metric.title,
        lines_of(metric, table),
        limits(metric, [present(table, key) for key in metric.keys], levels.values(), room),
        levels=levels,
        marks=marks,
        note=note,
        is_count=metric.is_count,
        is_wide=metric.place == "first" or (metric is LOSS and BITS_PER_BYTE.held_out not in table),
    )


def _marks(table: Columns, moments: Moments) -> list[Mark]:
    """Return marks at the first row at or after each update; none for an update to which the run
    has not come.
    """
    marks = list[Mark]()
    for update, words in moments:
        row = next(
            (row for row, at in enumerate(table["update"]) if at is not None and at >= update), None
        )
        if row is not None:
            marks.append(Mark(row, words))
    return marks


def _peak(ledger: Mapping[str, Mapping[str, int]]) -> str:
    """Return the planned and the measured peak of memory as bars of their parts."""
    totals = {name: sum(ledger[name].values()) for name in ("planned", "measured")}
    longest = max(*totals.values(), 1)
    rows = []
    for name, total in totals.items():
        parts = [size / max(total, 1) for size in ledger[name].values()]
        rows.append((name, False, [Bar(memory(total), total / longest, parts)]))
    said = "; ".join(
        f"{name.capitalize()}: {', '.join(f'{part} {memory(size)}' for part, size in ledger[name].items())}"
        for name in totals
    )
    return (
        '<figure class="chart"><figcaption><h2>Peak memory</h2></figcaption>\n'
        f'{bars("Peak memory", [], rows)}<p class="note">{said}</p></figure>'
    )
