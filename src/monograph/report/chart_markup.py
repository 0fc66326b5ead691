"""Write charts into a page: their data for the page's script, and a still picture of each chart.

The script (charts.js) draws with uPlot. Readers without JavaScript see the still picture.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np

from monograph.report.charts import Chart, Columns, Line, known_values, moving_median
from monograph.report.markup import escaped
from monograph.report.quantities import count

# The horizontal axes that a reader can choose: the column's key, and its name in the menu.
AXES = {"tokens": "tokens", "update": "updates", "time": "time"}
STILL_POINTS = 150  # maximum of points of a line in a still picture
# The size of a still picture, in units of its own: a page stretches the picture to the place that it has.
STILL_WIDTH = 600
STILL_HEIGHT = 200


def payload(tables: Sequence[Columns], charts: Sequence[Chart]) -> str:
    """Return tables and charts as JSON that can stand inside a <script> element."""
    content = {"axes": AXES, "tables": tables, "charts": [asdict(chart) for chart in charts]}
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    # A text such as "</script>" would end the element.
    return text.replace("<", "\\u003c")


def figure(chart: Chart, tables: Sequence[Columns]) -> str:
    """Return a chart's markup: a still picture, and its first and last values in words.

    charts.js replaces both.
    """
    size_class = ' class="chart wide"' if chart.is_wide else ' class="chart"'
    note = f'<p class="note">{escaped(chart.note)}</p>' if chart.note else ""
    words = _values_in_words(chart, tables)
    picture = _still_picture(chart, tables, words)
    return (
        f'<figure{size_class} id="chart-{chart.name}"><figcaption><h2>{escaped(chart.title)}</h2></figcaption>\n'
        f'<div class="plot">{picture}</div><p class="readout">{escaped(words)}</p>{note}</figure>'
    )


def _values_in_words(chart: Chart, tables: Sequence[Columns]) -> str:
    """Return the first and last values of the chart's first four lines, and its levels."""
    words = []
    for line in chart.lines[:4]:
        values = known_values(tables[line.table], line.key)
        if len(values) > 1:
            first = count(values[0])
            last = count(values[-1])
            words.append(f"{line.label}: {first} at first, {last} at last")
        elif len(values):
            words.append(f"{line.label}: {count(values[-1])}")
    words += [f"{name}: {count(level)}" for name, level in chart.levels.items()]
    return "; ".join(words)


def _still_picture(chart: Chart, tables: Sequence[Columns], words: str) -> str:
    """Return a chart as an SVG element without text, which can be stretched to any width."""
    x_key = chart.axis.key if chart.axis else "tokens"
    xs_by_line = [known_values(tables[line.table], x_key) for line in chart.lines]
    begin = min((float(xs.min()) for xs in xs_by_line if len(xs)), default=0.0)
    end = max((float(xs.max()) for xs in xs_by_line if len(xs)), default=1.0)
    shapes = [
        _line_markup(line, tables[line.table], x_key, (begin, end), chart.limits)
        for line in chart.lines
    ]
    for level in chart.levels.values():
        shapes.append(_polyline([(0.0, level), (1.0, level)], chart.limits, "level"))
    return (
        f'<svg viewBox="0 0 {STILL_WIDTH} {STILL_HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escaped(chart.title)}: {escaped(words)}">{"".join(shapes)}</svg>'
    )


def _line_markup(
    line: Line,
    table: Columns,
    x_key: str,
    x_ends: tuple[float, float],
    y_limits: tuple[float, float],
) -> str:
    """Return the moving median of a line as a polyline; "" if the line has no values."""
    # Not strict, because the line's column may be missing. `known` is then empty.
    pairs = zip(table[x_key], table.get(line.key, []), strict=False)
    known = [(x, y) for x, y in pairs if x is not None and y is not None]
    if not known:
        return ""
    indices, medians = moving_median(np.array([y for _, y in known]), points=STILL_POINTS)
    begin, end = x_ends
    width = (end - begin) or 1.0
    points = [
        ((known[index][0] - begin) / width, float(median))
        for index, median in zip(indices, medians, strict=True)
    ]
    return _polyline(points, y_limits, f"shade{line.shade}")


def _polyline(
    points: Sequence[tuple[float, float]], y_limits: tuple[float, float], css_class: str
) -> str:
    """Return an SVG polyline.

    Args:
        points: (x as a share of the picture's width, value) pairs.
        y_limits: the values at the picture's lower and upper edge; others are drawn at the edge.
        css_class: the line's class, which gives it a colour.
    """
    low, high = y_limits
    height = (high - low) or 1.0
    shares = [(x, min(max((high - value) / height, 0.0), 1.0)) for x, value in points]
    corners = " ".join(f"{STILL_WIDTH * x:.0f},{STILL_HEIGHT * y:.0f}" for x, y in shares)
    return f'<polyline class="{css_class}" points="{corners}"/>'
