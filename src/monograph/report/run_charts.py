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


def run_drawings(rows: Sequence[MetricsRow], yardsticks: Yardsticks, moments: Moments) -> Drawings:
    """Return a run's charts: one for each metric that its rows have values of, and its peak memory.

    Args:
        rows: rows as `monograph.report.run_figures` describes them.
        yardsticks: names and values in bits per byte, which are drawn in the chart of held-out bits
            per byte.
        moments: moments to mark in the chart of the learning rate, such as the end of the warm-up.
    """
    table = columns(rows, metric_keys())
    charts = [_chart(metric, table, rows, yardsticks, moments) for metric in shown_metrics(table)]
    ledger = last_memory_ledger(rows)
    memory_markup = [_memory_bars(ledger)] if ledger else []
    # All charts draw columns of one table, the run's.
    return Drawings(tables=[table], charts=charts, markup=memory_markup)


def _chart(
    metric: Metric,
    table: Columns,
    rows: Sequence[MetricsRow],
    yardsticks: Yardsticks,
    moments: Moments,
) -> Chart:
    """Return the chart of a metric.

    Args:
        metric: the metric.
        table: the columns of the run's rows.
        rows: see `run_drawings`.
        yardsticks: see `run_drawings`.
        moments: see `run_drawings`.
    """
    # Levels to compare the values with. Only the chart of bits per byte has them.
    levels = yardsticks if metric is BITS_PER_BYTE else {}
    marks: list[ChartMark] = []
    note = ""  # a sentence that the page shows below the chart
    if metric is LEARNING_RATE:
        # The page lays labels out from left to right, so they must be in the order of the updates.
        marks = _marks(table, sorted(moments))
    if metric is SPEED:
        # A mark without words is a short tick. Rows are in the order of the updates.
        skipped = [(row["update"], "") for row in rows if row.get("skipped")]
        slower = [(row["update"], "slower") for row in rows if row.get("slower")]
        marks = _marks(table, [*skipped, *slower])
        if skipped:
            note = f"{counted(len(skipped), 'update')} skipped, each marked by a short tick."
    label_count = sum(bool(mark.label) for mark in marks)
    # The upper end of the axis, as a multiple of the largest value. Each label may need a line of its
    # own above the curve.
    headroom = 1.15 + 0.16 * label_count
    # A page begins with a wide chart. It is that of a metric with the place "first", such as held-out bits
    # per byte, or that of the loss if no bits per byte were measured.
    is_wide = metric.place == "first"
    if metric is LOSS and BITS_PER_BYTE.held_out not in table:
        is_wide = True
    values_of_lines = [known_values(table, key) for key in metric.keys]
    return Chart(
        name=metric.chart,
        title=metric.title,
        lines=lines_of(metric, table),
        limits=limits(metric, values_of_lines, levels.values(), headroom),
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
        f'{bars("Peak memory", heads=[], rows=rows)}<p class="note">{note}</p></figure>'
    )
