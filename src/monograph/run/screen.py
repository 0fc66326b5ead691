"""Show progress on a terminal, in a region that is redrawn in place, or as plain lines on another
stream; draw curves.

A curve is text, in Braille or in ASCII characters. A cell is one character. A dot is a part of a
cell; a Braille cell (Unicode block U+2800) has 2 x 4 dots.
"""

import itertools
import math
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from time import monotonic
from typing import NamedTuple, TextIO

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.text import Text

from monograph.report import quantities
from monograph.terminal import is_terminal, own, takes_colour, takes_escapes, visible

Dot = tuple[int, int]  # (column, row)
Piece = tuple[str, str]  # (role, text)

SCALE_WIDTH = 6  # characters before the plot, such as "4.0 "
YARDSTICK_WIDTH = 18  # characters after it, such as "  order 6 1.87"


class Cells(NamedTuple):
    """A set of characters to draw with: the number of dots across and down a cell, and the
    character for lit dots.
    """

    across: int
    down: int

    def character(self, lit: set[Dot]) -> str:
        """Return the character for the lit dots (column, row), at least one of them; row 0 is on
        top.
        """
        if self.across == 1:
            return {(0,): "'", (1,): ".", (0, 1): ":"}[tuple(sorted(row for _, row in lit))]
        return chr(0x2800 + sum(_BRAILLE_BIT[dot] for dot in lit))


BRAILLE = Cells(across=2, down=4)
ASCII = Cells(across=1, down=2)
_BRAILLE_BIT = {
    (0, 0): 0x01,
    (0, 1): 0x02,
    (0, 2): 0x04,
    (1, 0): 0x08,
    (1, 1): 0x10,
    (1, 2): 0x20,
    (0, 3): 0x40,
    (1, 3): 0x80,
}


def curve_pieces(
    xs: Sequence[float],
    ys: Sequence[float],
    width: int,
    height: int,
    yardsticks: Mapping[str, float],
    x_end: float | None = None,
    cells: Cells = BRAILLE,
) -> list[list[Piece]]:
    """Return the plot's rows as pieces (role, text); the roles to colour are "scale", "curve",
    "level" and "name".

    Points (xs, ys), ascending in x, are joined; x runs from 0 to `x_end` (default: the last x).
    Each yardstick is a dotted level with its name and value at the right, a row off if two would
    collide. The scale covers the yardsticks and the curve's end. Values above 2.2 times the last
    one are drawn on the upper edge, since the steep start would flatten the rest. Values that are
    not finite are left out.
    """
    points = [(x, y) for x, y in zip(xs, ys, strict=True) if math.isfinite(y)]
    values = [y for _, y in points] + list(yardsticks.values())
    low = min(values, default=0.0)
    reach = min(max(y for _, y in points), 2.2 * points[-1][1]) if points else low
    high = max([reach, *yardsticks.values()])
    margin = max(0.04 * (high - low), 0.02)
    columns = width - SCALE_WIDTH - YARDSTICK_WIDTH
    # Before the first token, too, there is an axis.
    right = x_end or (points[-1][0] if points else 0.0) or 1.0
    grid = _Grid(cells, columns, height, low - margin, high + margin, right)
    curve = grid.by_cell(grid.joined(points))
    levels = grid.by_cell(dot for level in yardsticks.values() for dot in grid.dotted(level))
    scale = grid.scale_labels()
    names = _spread_names(yardsticks, grid)
    rows: list[list[Piece]] = []
    for row in range(height):
        pieces: list[Piece] = [("scale", f"{scale.get(row, ''):>{SCALE_WIDTH - 1}} ")]
        # The curve hides a level, since two lines in a cell are illegible.
        for column in range(columns):
            role, lit = ("curve", curve) if (column, row) in curve else ("level", levels)
            dots = lit.get((column, row))
            pieces.append((role, cells.character(dots) if dots else " "))
        rows.append([*pieces, ("name", names.get(row, ""))])
    return [*rows, [("scale", " " * SCALE_WIDTH + _x_labels(grid.x_end, columns))]]


@dataclass(frozen=True)
class _Grid:
    """The map from values to dots; dot (0, 0) is the upper left one; `rows` and `columns` count
    cells.
    """

    cells: Cells
    columns: int
    rows: int
    low: float
    high: float
    x_end: float

    def dot(self, x: float, y: float) -> Dot:
        right, bottom = self.columns * self.cells.across - 1, self.rows * self.cells.down - 1
        column = round(x / self.x_end * right)
        row = round((self.high - y) / (self.high - self.low) * bottom)
        return min(right, max(0, column)), min(bottom, max(0, row))

    def cell_row(self, y: float) -> int:
        return self.dot(0, y)[1] // self.cells.down

    def by_cell(self, dots: Iterable[Dot]) -> dict[Dot, set[Dot]]:
        """Group dots by cell (column, row); a dot's position is then relative to its cell."""
        cells: dict[Dot, set[Dot]] = {}
        for column, row in dots:
            cell_column, inner_column = divmod(column, self.cells.across)
            cell_row, inner_row = divmod(row, self.cells.down)
            cells.setdefault((cell_column, cell_row), set()).add((inner_column, inner_row))
        return cells

    def dotted(self, y: float) -> list[Dot]:
        row = self.dot(0, y)[1]
        across = self.cells.across
        return [(column, row) for column in range(0, self.columns * across, 2 * across)]

    def joined(self, points: Sequence[tuple[float, float]]) -> list[Dot]:
        corners = [self.dot(x, y) for x, y in points]
        dots = corners[-1:]
        for (column, row), (next_column, next_row) in itertools.pairwise(corners):
            steps = max(abs(next_column - column), abs(next_row - row), 1)
            dots += [
                (
                    round(column + (next_column - column) * i / steps),
                    round(row + (next_row - row) * i / steps),
                )
                for i in range(steps)
            ]
        return dots

    def scale_labels(self) -> dict[int, str]:
        """Return y labels by cell row, at multiples of the finest of 0.1, 0.2, 0.5, ... that leaves
        a row between.
        """
        rows_per_unit = self.rows / (self.high - self.low)
        step = next(
            (step for step in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50) if step * rows_per_unit >= 2),
            None,
        )
        if step is None:
            return {}
        multiples = range(math.ceil(self.low / step), math.floor(self.high / step) + 1)
        return {self.cell_row(step * multiple): f"{step * multiple:.1f}" for multiple in multiples}


def _spread_names(yardsticks: Mapping[str, float], grid: _Grid) -> dict[int, str]:
    """Return the yardsticks' labels by row: each in its own row, or the nearest free one above, or
    else below.
    """
    taken: dict[int, str] = {}
    for name, value in sorted(yardsticks.items(), key=lambda item: item[1]):
        wanted = grid.cell_row(value)
        candidates = [*range(wanted, -1, -1), *range(wanted + 1, grid.rows)]
        row = next((row for row in candidates if row not in taken), None)
        if row is not None:
            taken[row] = f"  {name} {value:.2f}"[:YARDSTICK_WIDTH]
    return taken


def _x_labels(x_end: float, columns: int) -> str:
    """Return the labels of the x axis's quarters, each ending at its place, as far as gaps remain
    between them.
    """
    line = f"{quantities.count(x_end)} tokens".rjust(columns)
    for quarter in (3, 2, 1):
        label = quantities.count(x_end * quarter / 4)
        end = columns * quarter // 4
        if not line[max(0, end - len(label)) : end + 2].strip() and len(label) <= end:
            line = line[: end - len(label)] + label + line[end:]
    return line


WIDTH = 100  # longest line, in characters
NARROWEST = 40  # printed lines are not cut below this; a narrower terminal wraps them
REDRAW_S = 0.5  # interval of redrawing on a terminal
# Elsewhere a line is printed after SPEAK_S, then after twice as long each time, up to
# SPEAK_AT_MOST_S.
SPEAK_S, SPEAK_AT_MOST_S = 10.0, 60.0

# ASCII for a stream that is not UTF-8; any other character that its encoding lacks becomes "?"
_ASCII = str.maketrans(
    {
        "━": "=",
        "─": "-",
        "·": "-",
        "…": "~",
        "⏎": "\\",
        "−": "-",
        "→": "->",
        "≤": "<=",
        "≥": ">=",
        "×": "x",
        "±": "+-",
    }
)


class _Stream:
    """A text stream that replaces characters its encoding lacks, and drops all output once a write
    has failed.

    A closed terminal, or a pipe that nobody reads, must not end a run after hours of work.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream: TextIO | None = stream
        # In-memory streams have no encoding and take any character.
        self.encoding = stream.encoding or "utf-8"
        self.is_utf8 = self.encoding.lower().replace("-", "") == "utf8"

    def write(self, text: str) -> int:
        if not self.is_utf8:
            text = text.translate(_ASCII).encode(self.encoding, "replace").decode(self.encoding)
        self._try(lambda stream: own(stream, text))
        return len(text)

    def flush(self) -> None:
        self._try(lambda stream: stream.flush())

    def _try(self, call: Callable[[TextIO], None]) -> None:
        if self._stream is not None:
            try:
                call(self._stream)
            except (OSError, ValueError):
                self._stream = None

    def isatty(self) -> bool:
        return is_terminal(self._stream)

    def fileno(self) -> int:
        if self._stream is None:
            raise OSError("the stream is gone")
        return self._stream.fileno()


class Screen:
    """The lines printed to `stream` (default: standard error), with one live region below them.

    Without support for escape sequences, lines are plain, without colour or redrawing. NO_COLOR
    only turns colour off.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = _Stream(sys.stderr if stream is None else stream)
        self.is_live = takes_escapes(self._stream)
        self.is_utf8 = self._stream.is_utf8
        self._is_terminal = is_terminal(self._stream)
        self._console = Console(
            file=self._stream,  # type: ignore[arg-type]
            force_terminal=self.is_live,
            color_system="auto" if takes_colour(self._stream) else None,
            width=None if self._is_terminal else WIDTH,
            markup=False,
            highlight=False,
            emoji=False,
            soft_wrap=True,
        )

    @property
    def width(self) -> int:
        """Return how many characters fit a line: one less than the terminal has, as some wrap after
        the last.
        """
        return max(NARROWEST, min(WIDTH, self._console.width - 1)) if self._is_terminal else WIDTH

    @property
    def height(self) -> int:
        """Return the terminal's number of lines."""
        return self._console.height

    def print(self, *lines: Text) -> None:
        """Write `lines` above the live region, each cut to `width` characters."""
        for line in _fitted(lines, self.width):
            self._console.print(line)
        self._stream.flush()

    @contextmanager
    def live(
        self,
        region: Callable[[], list[Text]],
        status: Callable[[], Text],
        state: Callable[[], object],
    ) -> Iterator[None]:
        """Keep `region()` on the terminal during the `with` block; elsewhere print `status()` now
        and then.

        It is printed only if `state()` differs from what it was the time before. All three are
        called from another thread, so that progress shows while the main thread is busy. The region
        vanishes at the end. Any other text written to standard error appears above it.
        """
        if not self.is_live:
            with _every(REDRAW_S, _Speaker(self, status, state).speak):
                yield
            return
        view = Live(
            # Wrapped lines would take more rows than are redrawn, so lines are cut even on a narrow
            # terminal.
            get_renderable=lambda: Text("\n").join(
                _fitted(region(), max(1, min(self.width, self._console.width - 1)))
            ),
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,  # standard output is for results
            redirect_stderr=False,
        )
        with (
            redirect_stderr(_Above(self._console, sys.stderr)),
            view,
            _every(REDRAW_S, view.refresh),
        ):
            view.refresh()
            yield


class _Speaker:
    """What prints lines about a region that is not redrawn, at growing intervals and only where
    something changed.
    """

    def __init__(
        self, screen: Screen, status: Callable[[], Text], state: Callable[[], object]
    ) -> None:
        self._screen = screen
        self._status = status
        self._state = state
        self._interval_s = SPEAK_S
        self._next_s = monotonic() + SPEAK_S
        self._said: object = None

    def speak(self) -> None:
        """Print a line if it is time and something changed."""
        if monotonic() < self._next_s or (state := self._state()) == self._said:
            return
        self._said = state
        self._interval_s = min(2 * self._interval_s, SPEAK_AT_MOST_S)
        self._next_s = monotonic() + self._interval_s
        self._screen.print(self._status())


class _Above(FileProxy):
    """The standard error stream while a region is live below it; it writes above the region."""

    def write(self, text: str) -> int:
        return self.own(visible(text))

    def own(self, text: str) -> int:
        return super().write(text)


def _fitted(lines: Sequence[Text], width: int) -> list[Text]:
    # A line with escaped characters loses its colours, because they refer to character positions.
    fitted = [
        line if visible(line.plain) == line.plain else Text(visible(line.plain), line.style)
        for line in lines
    ]
    for line in fitted:
        line.truncate(width, overflow="ellipsis")
    return fitted


def shown(text: str) -> str:
    """Return `text` from a model or a file as one line, in which each line end is a sign."""
    return visible(text.expandtabs(4).replace("\n", "⏎"))


def cut(text: str, width: int) -> str:
    """Return `text` cut to at most `width` terminal cells; a wide character takes two."""
    return text if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"


@contextmanager
def _every(seconds: float, act: Callable[[], None]) -> Iterator[None]:
    """Call `act` every `seconds` from a thread while the `with` block runs."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(seconds):
            act()

    thread = threading.Thread(target=repeat, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
