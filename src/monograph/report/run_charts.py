"""Describe the charts of a run: one for each metric, and bars of its peak memory."""

from collections.abc import Mapping, Sequence

from monograph.report.charts import (
    Chart,
    ChartMark,
    Columns,
    MetricsRow,
    Yardsticks,
    columns,
    known_values,
    last_memory_ledger,
    limits,
    lines_of,
)
from monograph.report.metrics import (
    BITS_PER_BYTE,
    LEARNING_RATE,
    LOSS,
    SPEED,
    Metric,
    metric_keys,
    shown_metrics,
)
from monograph.report.page import Bar, BarRow, Drawings, bars
from monograph.report.quantities import counted, memory

Moments = Sequence[tuple[int, str]]  # (update, what happened then)


def run_drawings(
    metrics: Sequence[MetricsRow], yardsticks: Yardsticks, moments: Moments
) -> Drawings:
    """Return the charts of the metrics that a run's rows have values of, and its peak memory.

    Args:
        metrics: rows as `monograph.report.run_figures` describes them.
        yardsticks: bits per byte to draw in the chart of held-out bits per byte.
        moments: moments to mark in the chart of the learning rate, such as the end of the warm-up.
    """
    table = columns(metrics, metric_keys())
    charts = [
        _chart(metric, table, metrics, yardsticks, moments) for metric in shown_metrics(table)
    ]
    ledger = last_memory_ledger(metrics)
    return Drawings([table], charts, [_memory_bars(ledger)] if ledger else [])


def _chart(
    metric: Metric,
    table: Columns,
    metrics: Sequence[MetricsRow],
    yardsticks: Yardsticks,
    moments: Moments,
) -> Chart:
    """Return the chart of a metric. The arguments are those of `run_drawings`, and the run's columns."""
    levels = yardsticks if metric is BITS_PER_BYTE else {}
    marks: list[ChartMark] = []
    note = ""  # the sentence below the chart
    if metric is LEARNING_RATE:
        marks = _marks(table, sorted(moments))
    if metric is SPEED:
        skipped = [(row["update"], "") for row in metrics if row.get("skipped")]
        slower = [(row["update"], "slower") for row in metrics if "slower" in row]
        marks = _marks(table, [*skipped, *slower])
        note = f"{counted(len(skipped), 'update')} skipped, each marked below." if skipped else ""
    label_count = sum(bool(mark.label) for mark in marks)
    # Each label may need a line of its own above the curve.
    headroom = 1.15 + 0.16 * label_count
    is_wide = metric.place == "first"
    if metric is LOSS and BITS_PER_BYTE.held_out not in table:
        is_wide = True  # no wide chart of held-out bits per byte stands before it
    values = [known_values(table, key) for key in metric.keys]
    return Chart(
        metric.chart,
        metric.title,
        lines_of(metric, table),
        limits(metric, values, levels.values(), headroom),
        levels=levels,
        marks=marks,
        note=note,
        is_count=metric.is_count,
        is_wide=is_wide,
    )


def _marks(table: Columns, moments: Moments) -> list[ChartMark]:
    """Return a mark at the first row at or after each moment's update.

    A moment after the table's last row has no mark, since the run has not come to it yet.
    """
    marks = list[ChartMark]()
    for update, words in moments:
        for row, row_update in enumerate(table["update"]):
            if row_update is not None and row_update >= update:
                marks.append(ChartMark(row, words))
                break
    return marks


def _memory_bars(ledger: Mapping[str, Mapping[str, int]]) -> str:
    """Return the planned and the measured peak memory as markup: a bar each, made of its parts.

    `ledger` has bytes by part, under "planned" and "measured".
    """
    totals = {name: sum(ledger[name].values()) for name in ("planned", "measured")}
    longest = max(*totals.values(), 1)
    rows = []
    for name, total in totals.items():
        parts = [size / max(total, 1) for size in ledger[name].values()]
        bar = Bar(memory(total), share=total / longest, parts=parts)
        rows.append(BarRow(name, is_highlighted=False, bars=[bar]))
    sentences = []
    for name in totals:
        sizes = ", ".join(f"{part} {memory(size)}" for part, size in ledger[name].items())
        sentences.append(f"{name.capitalize()}: {sizes}")
    note = "; ".join(sentences)
    return (
        '<figure class="chart"><figcaption><h2>Peak memory</h2></figcaption>\n'
        f'{bars("Peak memory", [], rows)}<p class="note">{note}</p></figure>'
    )
