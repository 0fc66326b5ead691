"""Build a report's HTML page: one file that loads nothing, follows a light or dark theme and has
tables that sort.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template

from monograph.report.charts import Chart, Columns, figure, payload
from monograph.report.markup import escaped
from monograph.storage.reading import contents

# A cell is a text, by which it is sorted, or (text, number to sort by). None is unknown, and always
# sorted last.
Cell = str | tuple[str, float | None]

ONE_LINE = 24  # characters of a table's last column that stand on one line at any width


def _own(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")


_PAGE = Template(_own("page.html"))
# A click or the enter key on a column's name sorts it rising, falling, and then in the original
# order.
_SORTING = _own("sortable.html").rstrip()
# The page loads itself again after so many seconds. It stops doing so once the file has not been
# written for some time, since a run that is killed cannot say so.
_REFRESHING = _own("refresh.html").rstrip()


@dataclass(frozen=True)
class Drawings:
    """The charts of a page and the tables that they draw.

    Attributes:
        tables: the columns.
        charts: the charts.
        others: markup that stands among the charts, such as bars.
        halves: whether each chart takes half of the page's width.
    """

    tables: Sequence[Columns] = ()
    charts: Sequence[Chart] = ()
    others: Sequence[str] = ()
    halves: bool = False


def page(
    *,
    kind: str,
    title: str,
    headline: str,
    standing: str,
    figures: Iterable[tuple[str, str]],
    drawings: Drawings,
    sections: Iterable[str],
    warning: str = "",
    refresh_s: int = 0,
) -> str:
    """Return a report as an HTML page.

    `title`, `headline`, `standing`, `warning` and `figures` are plain text.

    Args:
        kind: what the report is about, such as "Training run".
        title: the report's subject, such as a folder's name.
        headline: the result in a few words.
        standing: a sentence that says how good the result is.
        figures: (name, quantity) pairs to read first.
        drawings: charts and their data.
        sections: markup from `section`; empty ones are left out.
        warning: a sentence on why the result is not worth much; empty if it is.
        refresh_s: seconds after which the page loads itself again; 0 for a page that will not
            change.
    """
    known = "\n".join(
        f"<div><dt>{escaped(name)}</dt><dd>{escaped(value)}</dd></div>" for name, value in figures
    )
    body = "\n".join(filter(None, sections))
    shown = [*(figure(chart, drawings.tables) for chart in drawings.charts), *drawings.others]
    scripts = []
    if drawings.charts:
        scripts.append(_drawing(drawings))
    if 'class="sortable"' in body:
        scripts.append(_SORTING)
    if refresh_s:
        scripts.append(_REFRESHING)
    return _PAGE.substitute(
        title=escaped(title),
        kicker=escaped(f"{kind} · {title}"),
        headline=escaped(headline),
        standing=escaped(standing),
        warning=f'<p class="standing warning">{escaped(warning)}</p>' if warning else "",
        figures=known,
        drawings=_grid(shown, drawings.halves) if shown else "",
        sections=body,
        styles=_own("uplot/uPlot.min.css") if drawings.charts else "",
        refresh=f' data-refresh="{refresh_s}"' if refresh_s else "",
        script="".join(f"\n{script}" for script in scripts),
    )


def _grid(shown: Sequence[str], halves: bool) -> str:
    body = "\n".join(shown)
    arrangement = "drawings half" if halves else "drawings"
    return f'<div class="{arrangement}">\n{body}\n</div>\n'


def _drawing(drawings: Drawings) -> str:
    """Return the data of the charts and the scripts that draw it, with uPlot's licence, which asks
    to come along.
    """
    licence = _own("uplot/LICENSE").strip()
    return (
        f'<script type="application/json" id="data">{payload(drawings.tables, drawings.charts)}</script>\n'
        f"<script>\n/*\n{licence}\n*/\n{_own('uplot/uPlot.iife.min.js').strip()}\n</script>\n"
        f"<script>\n{_own('charts.js').strip()}\n</script>"
    )


def column(*sections: str) -> str:
    """Return sections one below the other; a wide page shows two columns side by side."""
    body = "\n".join(filter(None, sections))
    return f'<div class="column">\n{body}\n</div>' if body else ""


def section(heading: str, *parts: str, whole: bool = False) -> str:
    """Return markup under a heading; an empty text if all parts are empty.

    Args:
        heading: the heading.
        parts: markup.
        whole: whether the section has the page's whole width, as one that is in no `column` can
            have.
    """
    body = "\n".join(filter(None, parts))
    role = ' class="whole"' if whole else ""
    return f"<section{role}><h2>{escaped(heading)}</h2>\n{body}\n</section>" if body else ""


def table(name: str, heads: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Return a table with the columns' names over its rows, empty if there are no rows; a name
    sorts by its column.

    Args:
        name: the table's content, for screen readers.
        heads: the columns' names.
        rows: a cell for each column; in a column of numbers each cell is a pair of text and number.
    """
    if not rows:
        return ""
    numbers = [any(isinstance(row[column], tuple) for row in rows) for column in range(len(heads))]
    roles = ["number" if number else "" for number in numbers]
    if not numbers[-1] and max(len(str(row[-1])) for row in rows) > ONE_LINE:
        roles[-1] = "words"  # which may take several lines
    names = "".join(
        f'<th scope="col" aria-sort="none"{_role(role)}><button type="button">{escaped(head)}</button></th>'
        for head, role in zip(heads, roles, strict=True)
    )
    lines = "\n".join(f"<tr>{''.join(map(_cell, row, roles))}</tr>" for row in rows)
    return (
        f'<div class="scroll" role="region" aria-label="{escaped(name)}" tabindex="0"><table class="sortable">\n'
        f"<thead><tr>{names}</tr></thead>\n<tbody>\n{lines}\n</tbody></table></div>"
    )


def number(value: float | None, form: str) -> Cell:
    """Return a cell for a number, written by `form` such as "{:.3f}"; an empty one for None."""
    return ("", None) if value is None else (form.format(value), value)


def _role(role: str) -> str:
    return f' class="{role}"' if role else ""


def _cell(cell: Cell, role: str) -> str:
    text, value = cell if isinstance(cell, tuple) else (cell, None)
    number = "" if value is None else format(value, ".9g")
    worth = f' data-value="{number}"' if role == "number" else ""
    return f"<td{_role(role)}{worth}>{escaped(text)}</td>"


def pairs(rows: Iterable[tuple[str, str]]) -> str:
    """Return a table of names and values, in the given order."""
    lines = "\n".join(
        f'<tr><th scope="row">{escaped(name)}</th><td>{escaped(text)}</td></tr>'
        for name, text in rows
    )
    return f'<table class="pairs">{lines}</table>' if lines else ""


def folded(name: str, text: str) -> str:
    """Return a text folded up under a name; an empty text stays empty."""
    return (
        f"<details><summary>{escaped(name)}</summary><pre>{escaped(text)}</pre></details>"
        if text
        else ""
    )


def config_of(folder: Path) -> str:
    """Return a run's config.toml, folded up; an empty text if there is none."""
    config = folder / "config.toml"
    return folded(config.name, (contents(config) or b"").decode("utf-8"))


@dataclass(frozen=True)
class Bar:
    """A bar in a table of bars.

    Attributes:
        text: the value in words, which stands at the bar's end.
        share: the bar's length as a share of the longest one's; None for no bar.
        parts: lengths of the bar's parts, as shares of it; empty for one part.
        floor: the place of a mark, as a share of the longest bar; None for no mark.
    """

    text: str
    share: float | None
    parts: Sequence[float] = ()
    floor: float | None = None


_LONGEST = 54  # percent of a cell's width, which leaves room for the words


def bars(name: str, heads: Sequence[str], rows: Sequence[tuple[str, bool, Sequence[Bar]]]) -> str:
    """Return a table whose cells are bars with their values.

    Args:
        name: the table's content, for screen readers.
        heads: the names of the columns of bars; empty for a single column that needs none.
        rows: (the row's name, whether it stands out, a bar for each column).
    """
    names = "".join(f'<th scope="col">{escaped(head)}</th>' for head in heads)
    above = f"<thead><tr><td></td>{names}</tr></thead>\n" if heads else ""
    lines = "\n".join(
        f'<tr{_role("best" if best else "")}><th scope="row">{escaped(row)}</th>{"".join(map(_bar, cells))}</tr>'
        for row, best, cells in rows
    )
    return (
        f'<div class="scroll" role="region" aria-label="{escaped(name)}" tabindex="0"><table class="bars">\n'
        f"{above}<tbody>\n{lines}\n</tbody></table></div>"
    )


def _bar(bar: Bar) -> str:
    text = f"<span>{escaped(bar.text)}</span>"
    if bar.share is None:
        return f"<td>{text}</td>"
    parts = "".join(
        f'<i style="width: {100 * part:.2f}%; opacity: {max(0.3, 1 - 0.14 * index):.2f}"></i>'
        for index, part in enumerate(bar.parts)
    )
    floor = (
        ""
        if bar.floor is None
        else f'<span class="floor" style="left: {_LONGEST * bar.floor:.2f}%"></span>'
    )
    length = f'<span class="bar" style="width: {_LONGEST * bar.share:.2f}%">{parts}</span>'
    return f'<td><span class="track">{length}{floor}{text}</span></td>'
