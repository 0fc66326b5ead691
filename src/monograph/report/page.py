"""Build a report's HTML page.

A page is one file that loads nothing else. It follows the reader's light or dark theme, and its
tables can be sorted. This module's functions return markup, and escape the plain text that they are
given.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import NamedTuple

from monograph.report.chart_markup import figure, payload
from monograph.report.charts import Chart, Columns
from monograph.report.markup import escaped
from monograph.storage.reading import contents

# A cell of a table that sorts: a text to sort by, or (text, number to sort by). The number None
# means unknown, and is last in each order.
TableCell = str | tuple[str, float | None]

# The last column of a table may wrap if one of its texts is longer than this many characters.
_MAX_ONE_LINE = 24


def _asset(name: str) -> str:
    """Return the text of a file in this module's folder."""
    return files(__package__).joinpath(name).read_text("utf-8")


_PAGE = Template(_asset("page.html"))
# The name of a column is a button. Presses sort the table by this column: first ascending, then
# descending, then in the original order.
_SORTING_SCRIPT = _asset("sortable.html").rstrip()
# The page reloads itself every `refresh_s` seconds. It stops once the file is old, since the page
# of a run that was killed stays "in progress" forever.
_REFRESH_SCRIPT = _asset("refresh.html").rstrip()


@dataclass(frozen=True)
class Drawings:
    """The charts of a page and the tables that they draw.

    Attributes:
        tables: the tables of columns; a line of a chart has the index of its table.
        charts: the charts.
        markup: markup that stands after the charts, in the same grid.
        halves: whether each chart takes half of the page's width, instead of a third.
    """

    tables: Sequence[Columns] = ()
    charts: Sequence[Chart] = ()
    markup: Sequence[str] = ()
    halves: bool = False


def page(
    *,
    kind: str,
    title: str,
    headline: str,
    assessment: str,
    key_figures: Iterable[tuple[str, str]],
    drawings: Drawings,
    sections: Iterable[str],
    warning: str = "",
    refresh_s: int = 0,
) -> str:
    """Return a report as an HTML page.

    Args:
        kind: what the report is about, such as "Training run".
        title: the report's subject, such as a folder's name.
        headline: the result in a few words.
        assessment: a sentence that says how good the result is.
        key_figures: (name, quantity) pairs to read first.
        drawings: charts and their data.
        sections: markup from `section` and `column`; empty ones are left out.
        warning: a sentence on why the result cannot be relied on; "" for no warning.
        refresh_s: seconds after which the page reloads itself; 0 for never.
    """
    key_figure_items = "\n".join(
        f"<div><dt>{escaped(name)}</dt><dd>{escaped(value)}</dd></div>"
        for name, value in key_figures
    )
    body = "\n".join(filter(None, sections))
    grid_items = [figure(chart, drawings.tables) for chart in drawings.charts]
    grid_items += drawings.markup
    scripts = []
    if drawings.charts:
        scripts.append(_chart_scripts(drawings))
    if 'class="sortable"' in body:  # a section has a `table`
        scripts.append(_SORTING_SCRIPT)
    if refresh_s:
        scripts.append(_REFRESH_SCRIPT)
    return _PAGE.substitute(
        title=escaped(title),
        kicker=escaped(f"{kind} · {title}"),
        headline=escaped(headline),
        standing=escaped(assessment),
        warning=f'<p class="standing warning">{escaped(warning)}</p>' if warning else "",
        figures=key_figure_items,
        drawings=_grid(grid_items, drawings.halves) if grid_items else "",
        sections=body,
        styles=_asset("uplot/uPlot.min.css") if drawings.charts else "",
        refresh=f' data-refresh="{refresh_s}"' if refresh_s else "",
        script="".join(f"\n{script}" for script in scripts),
    )


def _grid(items: Sequence[str], halves: bool) -> str:
    """Return the grid of a page's charts; see `Drawings`."""
    body = "\n".join(items)
    css_classes = "drawings half" if halves else "drawings"
    return f'<div class="{css_classes}">\n{body}\n</div>\n'


def _chart_scripts(drawings: Drawings) -> str:
    """Return the data of the charts, uPlot, and the script that draws the charts with it."""
    licence = _asset("uplot/LICENSE").strip()  # each copy of uPlot must include its licence
    return (
        f'<script type="application/json" id="data">{payload(drawings.tables, drawings.charts)}</script>\n'
        f"<script>\n/*\n{licence}\n*/\n{_asset('uplot/uPlot.iife.min.js').strip()}\n</script>\n"
        f"<script>\n{_asset('charts.js').strip()}\n</script>"
    )


def column(*sections: str) -> str:
    """Return sections, one below the other; "" if all are empty.

    A wide page shows two columns side by side.
    """
    body = "\n".join(filter(None, sections))
    return f'<div class="column">\n{body}\n</div>' if body else ""


def section(heading: str, *parts: str, full_width: bool = False) -> str:
    """Return markup under a heading; "" if all parts are empty.

    Args:
        heading: the heading.
        parts: markup.
        full_width: whether the section takes the page's whole width; False inside a `column`.
    """
    body = "\n".join(filter(None, parts))
    css_class = ' class="whole"' if full_width else ""
    return f"<section{css_class}><h2>{escaped(heading)}</h2>\n{body}\n</section>" if body else ""


def table(name: str, heads: Sequence[str], rows: Sequence[Sequence[TableCell]]) -> str:
    """Return a table that can be sorted by each column; "" if there are no rows.

    Args:
        name: the table's content in words, for screen readers.
        heads: the columns' names.
        rows: a cell for each column; in a column of numbers each cell is a pair of text and number.
    """
    if not rows:
        return ""
    css_classes = []
    for index in range(len(heads)):
        is_number = any(isinstance(row[index], tuple) for row in rows)
        css_classes.append("number" if is_number else "")
    is_long = max(len(str(row[-1])) for row in rows) > _MAX_ONE_LINE
    if css_classes[-1] != "number" and is_long:
        css_classes[-1] = "words"  # these cells may wrap
    names = "".join(
        f'<th scope="col" aria-sort="none"{_class_attribute(css_class)}>'
        f'<button type="button">{escaped(head)}</button></th>'
        for head, css_class in zip(heads, css_classes, strict=True)
    )
    lines = "\n".join(f"<tr>{''.join(map(_cell_markup, row, css_classes))}</tr>" for row in rows)
    return (
        f'<div class="scroll" role="region" aria-label="{escaped(name)}" tabindex="0"><table class="sortable">\n'
        f"<thead><tr>{names}</tr></thead>\n<tbody>\n{lines}\n</tbody></table></div>"
    )


def number(value: float | None, number_format: str) -> TableCell:
    """Return the cell of a number in a format such as "{:.3f}"; an empty cell for None."""
    if value is None:
        return "", None
    return number_format.format(value), value


def _class_attribute(css_class: str) -> str:
    """Return the class attribute of an element, with a space before it; "" for no class."""
    return f' class="{css_class}"' if css_class else ""


def _cell_markup(cell: TableCell, css_class: str) -> str:
    if isinstance(cell, tuple):
        text, value = cell
    else:
        text = cell
        value = None
    sort_key = ""
    if css_class == "number":
        # The sorting script puts an empty value last.
        digits = "" if value is None else format(value, ".9g")
        sort_key = f' data-value="{digits}"'
    return f"<td{_class_attribute(css_class)}{sort_key}>{escaped(text)}</td>"


def pairs(rows: Iterable[tuple[str, str]]) -> str:
    """Return a table of names and values, in the given order."""
    lines = "\n".join(
        f'<tr><th scope="row">{escaped(name)}</th><td>{escaped(text)}</td></tr>'
        for name, text in rows
    )
    return f'<table class="pairs">{lines}</table>' if lines else ""


def folded(name: str, text: str) -> str:
    """Return a text that is hidden until the reader opens it by its name; "" for an empty text."""
    if not text:
        return ""
    return f"<details><summary>{escaped(name)}</summary><pre>{escaped(text)}</pre></details>"


def config_of(folder: Path) -> str:
    """Return the config.toml of a run's folder, `folded`; "" if there is none."""
    config = folder / "config.toml"
    return folded(config.name, (contents(config) or b"").decode("utf-8"))


@dataclass(frozen=True)
class Bar:
    """A bar in a table of bars.

    Attributes:
        text: the value in words, which stands at the bar's end.
        share: the bar's length as a share of the longest bar's length; None for words without a bar.
        parts: the lengths of the bar's parts as shares of this bar; empty for a bar of one part.
        floor: the place of a mark, such as the best possible value, as a share of the longest bar's
            length; None for no mark.
    """

    text: str
    share: float | None
    parts: Sequence[float] = ()
    floor: float | None = None


class BarRow(NamedTuple):
    """A row in a table of bars.

    Attributes:
        name: the row's name.
        is_highlighted: whether its bars have the accent colour.
        bars: a bar for each column.
    """

    name: str
    is_highlighted: bool
    bars: Sequence[Bar]


_LONGEST_PERCENT = 54  # the longest bar's share of its cell; the words need the rest


def bars(name: str, heads: Sequence[str], rows: Sequence[BarRow]) -> str:
    """Return a table whose cells are bars with their values.

    Args:
        name: the table's content in words, for screen readers.
        heads: the names of the columns of bars; empty for a table without heads.
        rows: the rows.
    """
    names = "".join(f'<th scope="col">{escaped(head)}</th>' for head in heads)
    head_row = f"<thead><tr><td></td>{names}</tr></thead>\n" if heads else ""
    body_rows = []
    for row in rows:
        row_class = _class_attribute("best" if row.is_highlighted else "")
        cells = "".join(map(_bar_markup, row.bars))
        body_rows.append(f'<tr{row_class}><th scope="row">{escaped(row.name)}</th>{cells}</tr>')
    lines = "\n".join(body_rows)
    return (
        f'<div class="scroll" role="region" aria-label="{escaped(name)}" tabindex="0"><table class="bars">\n'
        f"{head_row}<tbody>\n{lines}\n</tbody></table></div>"
    )


def _bar_markup(bar: Bar) -> str:
    """Return a cell with a bar, its value and its mark."""
    text = f"<span>{escaped(bar.text)}</span>"
    if bar.share is None:
        return f"<td>{text}</td>"
    parts = ""
    for index, part in enumerate(bar.parts):
        opacity = max(0.3, 1 - 0.14 * index)  # each part is paler than the one before
        parts += f'<i style="width: {100 * part:.2f}%; opacity: {opacity:.2f}"></i>'
    floor = ""
    if bar.floor is not None:
        floor = f'<span class="floor" style="left: {_LONGEST_PERCENT * bar.floor:.2f}%"></span>'
    length = f'<span class="bar" style="width: {_LONGEST_PERCENT * bar.share:.2f}%">{parts}</span>'
    return f'<td><span class="track">{length}{floor}{text}</span></td>'
