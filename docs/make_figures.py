"""Draw docs/figures/ from a recorded run: first-run.svg, the run as its terminal showed it, and held-out.svg.

Usage: python docs/make_figures.py RUN [--transcript FILE] [--to docs/figures]

RUN is a finished run's folder; FILE is what `monograph train` wrote to standard error (2> FILE). Every figure on the
screen is the run's own; only time is compressed. Without FILE the lines before and after the training are left out.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.cells import cell_len

from monograph.report import figures, quantities
from monograph.report.figures import themed
from monograph.run.progress import LABEL_WIDTH
from monograph.run.screen import SCALE_WIDTH, YARDSTICK_WIDTH, curve_pieces, cut, shown

YARDSTICKS = ("trigram", "gzip -9", "order 6", "xz -9")
COLUMNS, CURVE_ROWS, FRAMES = 100, 8, 30
CELL_WIDTH, LINE_HEIGHT, MARGIN = 7.8, 17.0, 18.0
LOOP_S, TRAINING_S, END_S = 20.0, (4.0, 14.5), 15.2  # of the animation; the rest holds the finished screen
BITS = [(0x01, 0, 0), (0x02, 0, 1), (0x04, 0, 2), (0x08, 1, 0), (0x10, 1, 1), (0x20, 1, 2), (0x40, 0, 3), (0x80, 1, 3)]

# Both themes are legible on either background, since a terminal has its own.
STYLE = """
svg { --paper: #fbfbfc; --ink: #1c1d21; --muted: #6e7079; --rule: #d9dbe1; --accent: #2457c5; --good: #1a7f37; }
@media (prefers-color-scheme: dark) {
  svg { --paper: #131417; --ink: #e3e4e8; --muted: #8b8e99; --rule: #34373f; --accent: #84a9ff; --good: #57c777; }
}
text { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: var(--ink);
  white-space: pre; }
.dim { fill: var(--muted); } .accent { fill: var(--accent); } .good { fill: var(--good); font-weight: bold; }
.bold { font-weight: bold; }
rect.rest { fill: var(--rule); } path { fill: none; stroke-linecap: round; stroke-width: 2.3; stroke: var(--accent); }
path.level { stroke: var(--muted); stroke-width: 1.4; }
.a { animation: 20s step-end infinite; } .gone { opacity: 0; }
@media (prefers-reduced-motion: reduce) { .a { animation: none; } }
"""


@dataclass
class Recorded:
    """The content of a run's folder."""

    rows: list[dict[str, Any]]
    yardsticks: dict[str, float]
    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)

    @property
    def updates(self) -> list[dict[str, Any]]:
        """Return the rows of updates, in order."""
        return [row for row in self.rows if "train_loss" in row]

    @property
    def curve(self) -> list[dict[str, Any]]:
        """Return the rows of evaluations, in order."""
        return [row for row in self.rows if row.get("eval_bits_per_byte") is not None]


def main() -> None:
    """Read the run and write both figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--transcript", type=Path)
    parser.add_argument("--to", type=Path, default=Path(__file__).parent / "figures")
    given = parser.parse_args()
    run = recorded(given.run, given.transcript)
    given.to.mkdir(parents=True, exist_ok=True)
    for name, svg in (("first-run", animated(run)), ("held-out", held_out(run))):
        path = given.to / f"{name}.svg"
        path.write_text(svg, encoding="utf-8")
        print(f"{path}: {len(svg.encode()) / 1000:.0f} kB")


def recorded(folder: Path, transcript: Path | None) -> Recorded:
    """Return the run in `folder`, with the yardsticks from its report."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    page = (folder / "report.html").read_text(encoding="utf-8")
    stated = {name: re.search(rf"{re.escape(name)} \((\d+\.\d+)\)", page) for name in YARDSTICKS}
    run = Recorded(rows, {name: float(match[1]) for name, match in stated.items() if match})
    if transcript is not None:
        lines = transcript.read_text(encoding="utf-8").splitlines()
        begin = next(i for i, line in enumerate(lines) if re.match(r"  (update|sample) ", line))
        end = next(i for i, line in enumerate(lines) if line.startswith("done "))
        run.before, run.after = once_per_stage(lines[:begin]), lines[end:]
    return run


def once_per_stage(lines: list[str]) -> list[str]:
    """Keep each stage's last line: without a terminal a long stage prints several lines while it goes on."""
    kept = [line for line, following in pairwise([*lines, ""]) if not line[:10].strip() or line[:10] != following[:10]]
    return [line for line in kept if line.strip()]


class Screen:
    """Elements of a picture, each with its row and the seconds of the loop in which it shows."""

    def __init__(self) -> None:
        self.elements: list[str] = []
        self.spans: dict[tuple[float, float | None], str] = {}
        self.row = 0

    def line(self, text: str, since: float, style: str = "", until: float | None = None) -> None:
        """Add a line of text in the current row."""
        if text.strip():
            self.elements.append(f"<text {self._shows(style, since, until)} {_place(0, self.row, text)}</text>")

    def labelled(self, line: str, since: float, style: str) -> None:
        """Add a line of the transcript, with the label at its beginning in another style."""
        for column, text in ((0, line[:LABEL_WIDTH]), (LABEL_WIDTH, line[LABEL_WIDTH:])):
            if text.strip():
                self.words(column, text, since, "" if column else style)

    def words(self, column: int, text: str, since: float, style: str = "") -> None:
        """Add a piece of a line."""
        self.elements.append(f"<text {self._shows(style, since, None)} {_place(column, self.row, text)}</text>")

    def dots(self, places: list[tuple[float, float]], since: float, style: str = "") -> None:
        """Add dots at (x, y) in pixels."""
        path = "".join(f"M{x:.1f} {y:.1f}h.01" for x, y in places)
        self.elements.append(f'<path {self._shows(style, since, None)} d="{path}"/>')

    def bar(self, column: int, length: float, since: float, until: float | None, style: str) -> None:
        """Add a horizontal stroke of `length` cells."""
        x, y = MARGIN + column * CELL_WIDTH, _baseline(self.row) - 4
        shows = self._shows(style, since, until)
        self.elements.append(f'<rect {shows} x="{x:.1f}" y="{y:.1f}" width="{length * CELL_WIDTH:.1f}" height="2"/>')

    def svg(self, title: str) -> str:
        """Return the whole picture."""
        width, height = 2 * MARGIN + COLUMNS * CELL_WIDTH, 2 * MARGIN + self.row * LINE_HEIGHT
        frames = "".join(
            f"@keyframes {name} {{ 0% {{ opacity: 0 }} {_percent(since)} {{ opacity: 1 }}"
            + (f" {_percent(until)} {{ opacity: 0 }}" if until is not None else "")
            + " }\n"
            for (since, until), name in self.spans.items()
        )
        box = f'<rect x=".5" y=".5" width="{width - 1:.0f}" height="{height - 1:.0f}" rx="8" fill="var(--paper)"'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img">\n'
            f'<title>{escape(title)}</title>\n<style>{STYLE}{frames}</style>\n{box} stroke="var(--rule)"/>\n'
            + "\n".join(self.elements)
            + "\n</svg>\n"
        )

    def _shows(self, style: str, since: float, until: float | None) -> str:
        """Return class and animation; elements that stay are visible without animation too, others are not."""
        name = self.spans.setdefault((round(since, 2), until and round(until, 2)), f"k{len(self.spans)}")
        classes = " ".join(filter(None, ["a", style, "gone" if until is not None else ""]))
        return f'class="{classes}" style="animation-name:{name}"'


def animated(run: Recorded) -> str:
    """Draw the run's screen, which fills up in 20 seconds and starts again."""
    screen = Screen()
    screen.line("$ monograph train", 0.2, "bold")
    screen.row += 2
    for index, line in enumerate(run.before):
        screen.labelled(line, 0.8 + 3.0 * index / len(run.before), "bold")
        screen.row += 1
    screen.row += 1
    progress(screen, run)
    curve(screen, run)
    samples(screen, run)
    screen.row += 1
    for line in run.after:
        screen.labelled(line, END_S, "good" if line.startswith("done ") else "accent bold")
        screen.row += 1
    last = run.curve[-1]["eval_bits_per_byte"]
    return screen.svg(f"A training run in a terminal; it ends at {last:.2f} bits per byte of held-out text")


def progress(screen: Screen, run: Recorded) -> None:
    """Draw the progress bar and the figures next to it, FRAMES times."""
    updates = run.updates
    total = updates[-1]["update"]
    chosen = sorted({round(i * (len(updates) - 1) / (FRAMES - 1)) for i in range(FRAMES)})
    times = [*(at(run, updates[i]["wall_s"]) for i in chosen), None]
    for i, (since, until) in zip(chosen, pairwise(times), strict=True):
        row = updates[i]
        head = f"  update {row['update']:>{len(str(total))}}/{total} "
        left_s = updates[-1]["wall_s"] - row["wall_s"]
        time = f"{quantities.clock_time(left_s)} left" if left_s else quantities.clock_time(row["wall_s"])
        speed = f"   {quantities.count(row['tokens_per_s'], 'tok/s')}" if row["tokens_per_s"] else ""
        tail = f"{100 * row['update'] / total:>3.0f} %   loss {row['train_loss']:.2f}{speed}   {time}"
        room = COLUMNS - len(head) - 46
        screen.line(head + " " * (room + 1) + tail, since or 0.0, "", until)
        screen.bar(len(head), room, since or 0.0, until, "rest")
        screen.bar(len(head), room * row["update"] / total, since or 0.0, until, "accent")
    screen.row += 1


def curve(screen: Screen, run: Recorded) -> None:
    """Draw held-out bits per byte among the yardsticks, in the dots that the terminal draws."""
    points = run.curve
    xs, ys = ([row[key] for row in points] for key in ("tokens", "eval_bits_per_byte"))
    begin = at(run, 0.0)
    screen.words(2, "bits per byte (held out)", begin, "dim")
    if run.yardsticks:
        screen.words(COLUMNS - YARDSTICK_WIDTH, "  on the same text", begin, "dim")
    screen.row += 1
    groups: dict[int, list[tuple[float, float]]] = {}
    levels: list[tuple[float, float]] = []
    columns = COLUMNS - SCALE_WIDTH - YARDSTICK_WIDTH
    for pieces in curve_pieces(xs, ys, COLUMNS, CURVE_ROWS, run.yardsticks):
        column = 0
        for role, text in pieces:
            if role in ("curve", "level"):
                for x, y in dots(text, column, screen.row):
                    tokens = (x - MARGIN - SCALE_WIDTH * CELL_WIDTH) / (columns * CELL_WIDTH) * xs[-1]
                    reached = next((i for i, each in enumerate(xs) if each >= tokens), len(xs) - 1)
                    (groups.setdefault(reached, []) if role == "curve" else levels).append((x, y))
            elif text.strip():
                screen.words(column, text, begin, "dim" if role == "scale" else "")
            column += len(text)
        screen.row += 1
    if levels:
        screen.dots(levels, begin, "level")
    for index, places in sorted(groups.items()):
        screen.dots(places, at(run, seen_at(run, points[index])))


def dots(text: str, column: int, row: int) -> Iterator[tuple[float, float]]:
    """Yield the pixel positions of the dots of Braille characters; none for a space."""
    for bit, across, down in BITS if text.strip() else ():
        if (ord(text) - 0x2800) & bit:
            top = _baseline(row) - 0.78 * LINE_HEIGHT
            yield MARGIN + (column + 0.25 + 0.5 * across) * CELL_WIDTH, top + (0.125 + 0.25 * down) * LINE_HEIGHT


def samples(screen: Screen, run: Recorded) -> None:
    """Draw the model's samples, each from the same prompt."""
    for row in run.rows:
        if "sample" not in row:
            continue
        head = f"  sample at {100 * row['share']:.0f} %".ljust(18)
        since = at(run, seen_at(run, row))
        screen.words(0, head, since, "dim")
        screen.words(len(head), cut(shown(row["sample"]), COLUMNS - len(head)), since)
        screen.row += 1


def seen_at(run: Recorded, row: dict[str, Any]) -> float:
    """Return the seconds into the training of an evaluation or a sample: those of its update."""
    return next(each["wall_s"] for each in reversed(run.updates) if each["update"] <= row["update"])


def at(run: Recorded, wall_s: float) -> float:
    """Return the second of the loop at which a second of the training is shown."""
    begin, end = TRAINING_S
    return begin + (end - begin) * wall_s / run.updates[-1]["wall_s"]


def _baseline(row: int) -> float:
    return MARGIN + (row + 0.78) * LINE_HEIGHT


def _percent(second: float) -> str:
    return f"{100 * second / LOOP_S:.1f}%"


def _place(column: int, row: int, text: str) -> str:
    """Return position and text; `textLength` keeps the columns in place with any monospace font."""
    text = cut(text.rstrip(), COLUMNS - column)
    kept = text.lstrip(" ")
    column += len(text) - len(kept)
    x, length = MARGIN + column * CELL_WIDTH, cell_len(kept) * CELL_WIDTH
    return f'x="{x:.1f}" y="{_baseline(row):.1f}" textLength="{length:.1f}">{escape(kept, quote=False)}'


def held_out(run: Recorded) -> str:
    """Return the report's figure of the held-out curve, with colours of the reader's theme."""
    _, drawings = figures.draw(run.rows, run.yardsticks, "", "")
    svg = next(drawing.svg for drawing in drawings if drawing.name == "held_out")
    return themed(svg)


if __name__ == "__main__":
    main()
