"""Build a report's HTML page, which loads nothing, follows a light or dark theme and has tables that sort."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from pathlib import Path
from string import Template

from monograph.report.figures import Drawing
from monograph.report.plot_style import ACCENT, GRID, INK, MUTED, WARN
from monograph.storage.reading import contents

# A cell is a text, by which it is sorted, or (text, number to sort by). None is unknown, and always sorted last.
Cell = str | tuple[str, float | None]

_COLOURS = {INK: "--ink", MUTED: "--muted", GRID: "--rule", ACCENT: "--accent", WARN: "--warn"}

_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>
:root { --paper: #fff; --wash: #f5f6f8; --ink: #1c1d21; --muted: #666872; --rule: #e2e3e8;
  --accent: #2457c5; --warn: #c2460e; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #131417; --wash: #1c1e22; --ink: #e9eaee; --muted: #9a9da8; --rule: #30333a;
    --accent: #84a9ff; --warn: #ff9a6b; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, -apple-system, "Segoe UI",
  sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 56px 32px 72px; }
.run { margin: 0; color: var(--muted); font-size: 14px; }
h1 { margin: 6px 0 8px; font-size: 38px; line-height: 1.15; letter-spacing: -0.02em; text-wrap: balance; }
.standing { margin: 0; max-width: 52em; color: var(--muted); }
h2 { margin: 56px 0 16px; font-size: 18px; letter-spacing: -0.005em; }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(108px, 1fr)); gap: 20px 20px; margin: 36px 0 44px;
  padding: 20px 0; border: solid var(--rule); border-width: 1px 0; }
dt { color: var(--muted); font-size: 13px; }
dd { margin: 0; font-size: 18px; font-variant-numeric: tabular-nums; white-space: nowrap; }
figure { margin: 0; }
.drawings { display: grid; grid-template-columns: repeat(6, 1fr); gap: 32px 28px; }
.drawings figure { grid-column: span 2; }
.drawings .held_out { grid-column: span 4; }
.drawings [class^="against"], .drawings .curves { grid-column: span 3; }
.drawings .profile, .drawings .ladder { grid-column: span 6; max-width: 860px; }
.drawings svg { display: block; width: 100%; height: auto; overflow: visible; }
.drawings text { font-family: system-ui, -apple-system, "Segoe UI", sans-serif; }
.samples { display: grid; grid-template-columns: repeat(auto-fit, minmax(260px, 1fr)); gap: 20px; }
figcaption { margin-bottom: 6px; color: var(--muted); font-size: 13px; }
pre { margin: 0; padding: 14px 16px; border-radius: 6px; background: var(--wash); overflow: auto; white-space: pre-wrap;
  overflow-wrap: anywhere; font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, "DejaVu Sans Mono", monospace;
  tab-size: 4; }
.samples pre { min-height: 100%; max-height: 30em; }
.samples figure { display: grid; grid-template-rows: auto 1fr; }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 28px 5px 0; border-bottom: 1px solid var(--rule); text-align: left; vertical-align: top;
  overflow-wrap: anywhere; }
th { color: var(--muted); font-weight: 400; white-space: nowrap; }
.sortable th, .sortable td { padding-right: 24px; overflow-wrap: normal; }
.sortable td { white-space: nowrap; }
.sortable td:last-child:not(.number) { min-width: 18em; white-space: normal; }
.number { text-align: right; }
th button { margin: 0; padding: 0; border: 0; background: none; color: inherit; font: inherit; cursor: pointer; }
[aria-sort] button::after { content: "\\2195"; margin-left: 4px; opacity: 0.45; }
[aria-sort="ascending"] button::after { content: "\\2191"; opacity: 1; }
[aria-sort="descending"] button::after { content: "\\2193"; opacity: 1; }
.scroll { overflow-x: auto; }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
details { margin-top: 28px; }
summary { margin-bottom: 10px; color: var(--muted); font-size: 14px; cursor: pointer; }
@media (max-width: 820px) {
  main { padding: 32px 18px 48px; }
  h1 { font-size: 29px; }
  .drawings figure[class] { grid-column: span 6; }
}
</style>
</head>
<body>
<main>
<p class="run">$title</p>
<h1>$headline</h1>
<p class="standing">$standing</p>
<dl>
$figures
</dl>
<div class="drawings">
$drawings
</div>
$sections
</main>$script
</body>
</html>
""")

# A click or the enter key on a column's name sorts it rising, falling, and then in the original order.
_SCRIPT = """
<script>
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0], given = [...body.rows], heads = [...table.tHead.rows[0].cells];
  const then = { none: "ascending", ascending: "descending", descending: "none" };
  heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
    const order = then[head.getAttribute("aria-sort")], sign = order === "descending" ? -1 : 1;
    const worth = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
    const compared = (one, other) => {
      const [a, b] = [worth(one), worth(other)];
      if (a === "" || b === "") return (a === "") - (b === "");
      return sign * ("value" in one.cells[column].dataset ? a - b : a.localeCompare(b));
    };
    for (const each of heads) each.setAttribute("aria-sort", each === head ? order : "none");
    body.append(...(order === "none" ? given : [...given].sort(compared)));
  }));
}
</script>"""


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
    for colour, variable in _COLOURS.items():
        svg = svg.replace(colour, f"var({variable})")
    # All figures have the same names for their clip paths; on one page these must differ.
    for old in ('id="', "url(#", 'href="#'):
        svg = svg.replace(old, f"{old}{drawing.name}-")
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{drawing.name.replace("_", " ")}" ', 1)
    return f'<figure class="{drawing.name}">{svg}</figure>'


def escaped(text: str) -> str:
    """Return the text made safe inside HTML; control characters, which HTML forbids, become a dot."""
    return html.escape("".join(c if c.isprintable() or c in "\n\t" else "·" for c in text))
