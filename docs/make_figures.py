"""Draw docs/figures/first-run.svg, a finished run as its terminal showed it, held-out.svg, its curve,
and adapter-sweep.svg, a finished sweep of adapters.

Usage: python docs/make_figures.py [--record RUN TRANSCRIPT] [--record-sweep COMMAND TRANSCRIPT]

The first two are drawn from docs/figures/first-run.json. With --record this file is written first: RUN
is a finished run's folder, TRANSCRIPT is what `monograph train` wrote to standard error (2> FILE). The
third is drawn from docs/figures/adapter-sweep.json, which --record-sweep writes: COMMAND is what was
typed. The pictures leave out lines of the transcripts that they have no room for; every figure in them
is the run's own.
"""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.cells import cell_len

from monograph.report import quantities, run_figures
from monograph.report.figures import themed
from monograph.run.curve import YARDSTICK_WIDTH, curve_pieces
from monograph.run.progress import LABEL_WIDTH
from monograph.run.screen import cut_to_width, one_line

FIGURES = Path(__file__).resolve().parent / "figures"
RECORDING, FIRST_RUN, HELD_OUT = (
    FIGURES / "first-run.json",
    FIGURES / "first-run.svg",
    FIGURES / "held-out.svg",
)
SWEEP_RECORDING, SWEEP = FIGURES / "adapter-sweep.json", FIGURES / "adapter-sweep.svg"
YARDSTICKS = ("trigram", "gzip -9", "order 6", "xz -9")
# How many lines of the transcript are shown of each label, before the training and after it.
BEFORE, AFTER = {"data": 1, "tokens": 1, "compile": 1, "plan": 1}, {"done": 3}
# Of the transcript of a sweep, lines with these labels are shown.
OF_SWEEP = ("plan", "prune", "stopped", "adapter", "members", "best", "done")
COLUMNS, CURVE_ROWS = 100, 5
CELL_WIDTH, LINE_HEIGHT, MARGIN = 7.8, 17.0, 14.0
BITS = [
    (0x01, 0, 0),
    (0x02, 0, 1),
    (0x04, 0, 2),
    (0x08, 1, 0),
    (0x10, 1, 1),
    (0x20, 1, 2),
    (0x40, 0, 3),
    (0x80, 1, 3),
]

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
rect.done { fill: var(--accent); } path { fill: none; stroke-linecap: round; stroke-width: 2.3; stroke: var(--accent); }
path.level { stroke: var(--muted); stroke-width: 1.4; }
"""


@dataclass
class Recording:
    """What the pictures need of a run.

    Attributes:
        rows: its evaluations, its samples and its last update, as metrics.jsonl has them.
        yardsticks: the name of each yardstick and its bits per byte.
        before: the transcript's lines before the training.
        after: its lines after the training.
    """

    rows: list[dict[str, Any]]
    yardsticks: dict[str, float]
    before: list[str]
    after: list[str]

    @property
    def last(self) -> dict[str, Any]:
        """Return the row of the last update."""
        return next(row for row in reversed(self.rows) if "train_loss" in row)

    @property
    def curve(self) -> list[dict[str, Any]]:
        """Return the rows of evaluations, in order."""
        return [row for row in self.rows if row.get("eval_bits_per_byte") is not None]


def main() -> None:
    """Record a run if one is given, and draw both figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", nargs=2, type=Path, metavar=("RUN", "TRANSCRIPT"))
    parser.add_argument("--record-sweep", nargs=2, metavar=("COMMAND", "TRANSCRIPT"))
    given = parser.parse_args()
    if given.record:
        RECORDING.write_text(
            json.dumps(asdict(recorded(*given.record)), indent=1, ensure_ascii=False) + "\n"
        )
    if given.record_sweep:
        command, transcript = given.record_sweep
        lines = Path(transcript).read_text(encoding="utf-8").splitlines()
        kept = {"command": command, "lines": lines_of_sweep(lines)}
        SWEEP_RECORDING.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    SWEEP.write_text(adapter_sweep(), encoding="utf-8")
    run = recording()
    FIRST_RUN.write_text(first_run(run), encoding="utf-8")
    HELD_OUT.write_text(held_out(run), encoding="utf-8")


def recording() -> Recording:
    """Return the recording that the pictures are drawn from."""
    return Recording(**json.loads(RECORDING.read_text(encoding="utf-8")))


def recorded(folder: Path, transcript: Path) -> Recording:
    """Return the recording of the run in `folder`, with the yardsticks from its report."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    page = (folder / "report.html").read_text(encoding="utf-8")
    stated = {name: re.search(rf"{re.escape(name)} \((\d+\.\d+)\)", page) for name in YARDSTICKS}
    yardsticks = {name: float(match[1]) for name, match in stated.items() if match}
    lines = transcript.read_text(encoding="utf-8").splitlines()
    begin = next(i for i, line in enumerate(lines) if re.match(r"  (update|sample) ", line))
    end = next(i for i, line in enumerate(lines) if line.startswith("done "))
    last = next(row for row in reversed(rows) if "train_loss" in row)
    kept = [
        row
        for row in rows
        if "sample" in row or row.get("eval_bits_per_byte") is not None or row is last
    ]
    return Recording(kept, yardsticks, once_per_stage(lines[:begin]), lines[end:])


def once_per_stage(lines: list[str]) -> list[str]:
    """Keep each stage's last line: without a terminal a long stage prints several lines while it
    goes on.
    """
    kept = [
        line
        for line, following in pairwise([*lines, ""])
        if not line[:10].strip() or line[:10] != following[:10]
    ]
    return [line for line in kept if line.strip()]


class Screen:
    """Elements of a picture, row by row."""

    def __init__(self) -> None:
        self.elements: list[str] = []
        self.row = 0

    def words(self, column: int, text: str, style: str = "") -> None:
        """Add a piece of the current row."""
        if text.strip():
            self.elements.append(f'<text class="{style}" {_place(column, self.row, text)}</text>')

    def labelled(self, line: str, style: str) -> None:
        """Add a line of the transcript, with the label at its beginning in another style."""
        self.words(0, line[:LABEL_WIDTH], style)
        self.words(LABEL_WIDTH, line[LABEL_WIDTH:])

    def dots(self, places: list[tuple[float, float]], style: str) -> None:
        """Add dots at (x, y) in pixels."""
        path = "".join(f"M{x:.1f} {y:.1f}h.01" for x, y in places)
        self.elements.append(f'<path class="{style}" d="{path}"/>')

    def bar(self, column: int, length: float, style: str) -> None:
        """Add a horizontal stroke of `length` cells."""
        x, y = MARGIN + column * CELL_WIDTH, _baseline(self.row) - 4
        self.elements.append(
            f'<rect class="{style}" x="{x:.1f}" y="{y:.1f}" width="{length * CELL_WIDTH:.1f}" height="2"/>'
        )

    def svg(self, title: str) -> str:
        """Return the whole picture."""
        width, height = 2 * MARGIN + COLUMNS * CELL_WIDTH, 2 * MARGIN + self.row * LINE_HEIGHT
        box = f'<rect x=".5" y=".5" width="{width - 1:.0f}" height="{height - 1:.0f}" rx="8" fill="var(--paper)"'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img">\n'
            f'<title>{escape(title)}</title>\n<style>{STYLE}</style>\n{box} stroke="var(--rule)"/>\n'
            + "\n".join(self.elements)
            + "\n</svg>\n"
        )


def first_run(run: Recording) -> str:
    """Draw the screen at the end of the run."""
    screen = Screen()
    screen.words(0, "$ monograph train", "bold")
    screen.row += 1
    for line in with_labels(run.before, BEFORE):
        screen.labelled(line, "bold")
        screen.row += 1
    progress(screen, run)
    curve(screen, run)
    samples(screen, run)
    for line in with_labels(run.after, AFTER):
        screen.labelled(line, "good" if line.startswith("done ") else "accent bold")
        screen.row += 1
    end = run.curve[-1]["eval_bits_per_byte"]
    return screen.svg(
        f"A training run in a terminal; it ends at {end:.2f} bits per byte of held-out text"
    )


def with_labels(lines: list[str], labels: dict[str, int]) -> list[str]:
    """Return the first lines of each label, a long one's continuation included, in the transcript's
    order.
    """
    kept, label, left = [], "", dict(labels)
    for line in lines:
        label = line[:LABEL_WIDTH].strip() or label
        if line.strip() and left.get(label, 0):
            kept.append(line)
            left[label] -= 1
    return kept


def progress(screen: Screen, run: Recording) -> None:
    """Draw the progress bar and the figures next to it."""
    row = run.last
    head = f"  update {row['update']}/{row['update']} "
    speed = quantities.count(row["tokens_per_s"], "tok/s")
    tail = (
        f"100 %   loss {row['train_loss']:.2f}   {speed}   {quantities.clock_time(row['wall_s'])}"
    )
    room = COLUMNS - len(head) - len(tail) - 1
    screen.words(0, head)
    screen.bar(len(head), room, "done")
    screen.words(len(head) + room + 1, tail)
    screen.row += 1


def curve(screen: Screen, run: Recording) -> None:
    """Draw held-out bits per byte among the yardsticks, in the dots that the terminal draws."""
    screen.words(2, "bits per byte (held out)", "dim")
    screen.words(COLUMNS - YARDSTICK_WIDTH, "  on the same text", "dim")
    screen.row += 1
    xs, ys = ([row[key] for row in run.curve] for key in ("tokens", "eval_bits_per_byte"))
    for pieces in curve_pieces(xs, ys, COLUMNS, CURVE_ROWS, run.yardsticks):
        column = 0
        for role, text in pieces:
            if role in ("curve", "level"):
                screen.dots([*dots(text, column, screen.row)], role)
            else:
                screen.words(column, text, "dim" if role == "scale" else "")
            column += len(text)
        screen.row += 1


def dots(text: str, column: int, row: int) -> Iterator[tuple[float, float]]:
    """Yield the pixel positions of the dots of Braille characters; none for a space."""
    for bit, across, down in BITS if text.strip() else ():
        if (ord(text) - 0x2800) & bit:
            top = _baseline(row) - 0.78 * LINE_HEIGHT
            yield (
                MARGIN + (column + 0.25 + 0.5 * across) * CELL_WIDTH,
                top + (0.125 + 0.25 * down) * LINE_HEIGHT,
            )


def samples(screen: Screen, run: Recording) -> None:
    """Draw the model's samples, each from the same prompt."""
    for row in run.rows:
        if "sample" in row:
            head = f"  sample at {100 * row['share']:.0f} %".ljust(18)
            screen.words(0, head, "dim")
            screen.words(len(head), cut_to_width(one_line(row["sample"]), COLUMNS - len(head)))
            screen.row += 1


def lines_of_sweep(lines: list[str]) -> list[str]:
    """Return the lines of a sweep's transcript that are shown, each with the lines that continue it."""
    kept, label = [], ""
    for line in lines:
        label = line[:LABEL_WIDTH].strip() or label
        if line.strip() and label in OF_SWEEP:
            kept.append(line)
    return kept


def adapter_sweep() -> str:
    """Draw the screen at the end of the recorded sweep."""
    recorded_sweep = json.loads(SWEEP_RECORDING.read_text(encoding="utf-8"))
    screen = Screen()
    # A long command goes on in the next line, as a shell reads it.
    typed = textwrap.wrap(f"$ {recorded_sweep['command']}", COLUMNS - 2, subsequent_indent=" " * 4)
    for line in [*(f"{part} \\" for part in typed[:-1]), typed[-1]]:
        screen.words(0, line, "bold")
        screen.row += 1
    for line in recorded_sweep["lines"]:
        if line.startswith("members "):
            screen.words(0, line[:LABEL_WIDTH], "bold")
            screen.words(LABEL_WIDTH, line[LABEL_WIDTH:], "dim")
        else:
            screen.labelled(line, "good" if line.startswith(("best ", "done ")) else "bold")
        screen.row += 1
    return screen.svg(
        "A finished sweep of adapters in a terminal, with the settings that it compared"
    )


def _baseline(row: int) -> float:
    return MARGIN + (row + 0.78) * LINE_HEIGHT


def _place(column: int, row: int, text: str) -> str:
    """Return position and text; `textLength` keeps the columns in place with any monospace font."""
    text = cut_to_width(text.rstrip(), COLUMNS - column)
    kept = text.lstrip(" ")
    column += len(text) - len(kept)
    x, length = MARGIN + column * CELL_WIDTH, cell_len(kept) * CELL_WIDTH
    return f'x="{x:.1f}" y="{_baseline(row):.1f}" textLength="{length:.1f}">{escape(kept, quote=False)}'


def held_out(run: Recording) -> str:
    """Return the report's figure of the held-out curve, with colours of the reader's theme."""
    return themed(run_figures.held_out_svg(run.rows, run.yardsticks))


if __name__ == "__main__":
    main()
