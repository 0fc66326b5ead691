"""Build a report's HTML page, which loads nothing, follows a light or dark theme and has tables that sort."""

import html
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from string import Template

from monograph.report.figures import COLOURS, Drawing
from monograph.storage.reading import contents

# A cell is a text, by which it is sorted, or (text, number to sort by). None is unknown, and always sorted last.
Cell = str | tuple[str, float | None]

_PAGE = Template(files(__package__).joinpath("page.html").read_text("utf-8"))
# A click or the enter key on a column's name sorts it rising, falling, and then in the original order.
_SCRIPT = "\n" + files(__package__).joinpath("sortable.html").read_text("utf-8").rstrip()


def page(
    *,
    title: str,
    headline: str,
    standing: str,
    figures: Iterable[tuple[str, str]],
    drawings: Iterable[Drawing],
    sections: Iterable[str],
) -> str:
    """Return a report as an HTML page.

    `title`, `headline`, `standing` and `figures` are plain text.

    Args:
        title: the report's subject, such as a folder's name.
        headline: the result in a few words.
        standing: a sentence that says how good the result is.
        figures: (name, quantity) pairs to read first.
        drawings: pictures.
        sections: markup from `section`; empty ones are left out.
    """
    known = "\n".join(f"<div><dt>{escaped(name)}</dt><dd>{escaped(value)}</dd></div>" for name, value in figures)
    body = "\n".join(filter(None, sections))
    return _PAGE.substitute(
        title=escaped(title),
        headline=escaped(headline),
        standing=escaped(standing),
        figures=known,
        drawings="\n".join(map(_inline, drawings)),
        sections=body,
        script=_SCRIPT if 'class="sortable"' in body else "",
    )


def section(heading: str, *parts: str) -> str:
    """Return markup under a heading; an empty text if all parts are empty."""
    body = "\n".join(filter(None, parts))
    return f"<section><h2>{escaped(heading)}</h2>\n{body}\n</section>" if body else ""


def table(name: str, heads: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Return a table with the columns' names over its rows, empty if there are no rows; a name sorts by its column.

    Args:
        name: the table's content, for screen readers.
        heads: the columns' names.
        rows: a cell for each column; in a column of numbers each cell is a pair of text and number.
    """
    if not rows:
        return ""
    numbers = [any(isinstance(row[column], tuple) for row in rows) for column in range(len(heads))]
    names = "".join(
        f'<th scope="col" aria-sort="none"{_right(number)}><button type="button">{escaped(head)}</button></th>'
        for head, number in zip(heads, numbers, strict=True)
    )
    lines = "\n".join(f"<tr>{''.join(map(_cell, row, numbers))}</tr>" for row in rows)
    return (
        f'<div class="scroll" role="region" aria-label="{escaped(name)}" tabindex="0"><table class="sortable">\n'
        f"<thead><tr>{names}</tr></thead>\n<tbody>\n{lines}\n</tbody></table></div>"
    )


def number(value: float | None, form: str) -> Cell:
    """Return a cell for a number, written by `form` such as "{:.3f}"; an empty one for None."""
    return ("", None) if value is None else (form.format(value), value)


def _right(number: bool) -> str:
    return ' class="number"' if number else ""


def _cell(cell: Cell, number: bool) -> str:
    text, value = cell if isinstance(cell, tuple) else (cell, None)
    worth = f' data-value="{"" if value is None else format(value, ".9g")}"' if number else ""
    return f"<td{_right(number)}{worth}>{escaped(text)}</td>"


def pairs(rows: Iterable[tuple[str, str]]) -> str:
    """Return a table of names and values, in the given order."""
    lines = "\n".join(f'<tr><th scope="row">{escaped(name)}</th><td>{escaped(text)}</td></tr>' for name, text in rows)
    return f"<table>{lines}</table>" if lines else ""


def folded(name: str, text: str) -> str:
    """Return a text folded up under a name; an empty text stays empty."""
    return f"<details><summary>{escaped(name)}</summary><pre>{escaped(text)}</pre></details>" if text else ""


def config_of(folder: Path) -> str:
    """Return a run's config.toml, folded up; an empty text if there is none."""
    config = folder / "config.toml"
    return folded(config.name, (contents(config) or b"").decode("utf-8"))


def _inline(drawing: Drawing) -> str:
    """Return the figure as SVG inside the page, in the page's colours, which follow the light or dark theme."""
    svg = drawing.svg.replace("DejaVu Sans", "system-ui")
    for colour, name, _ in COLOURS:
        svg = svg.replace(colour, f"var(--{name})")
    # All figures have the same names for their clip paths; on one page these must differ.
    for old in ('id="', "url(#", 'href="#'):
        svg = svg.replace(old, f"{old}{drawing.name}-")
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{drawing.name.replace("_", " ")}" ', 1)
    return f'<figure class="{drawing.name}">{svg}</figure>'


def escaped(text: str) -> str:
    """Return the text made safe inside HTML; control characters, which HTML forbids, become a dot."""
    return html.escape("".join(c if c.isprintable() or c in "\n\t" else "·" for c in text))
