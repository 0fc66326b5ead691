"""Print lines on a terminal or another stream, and draw curves as text.

On a terminal, a region below the printed lines is redrawn in place. A curve consists of cells. A
cell is one character, in Braille (Unicode block U+2800) or ASCII. It has several dots, e.g. 2 x 4
in Braille, each of which may be lit.
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
StyledText = tuple[str, str]  # (role, text)

SCALE_WIDTH = 6  # characters before the plot, such as "4.0 "
YARDSTICK_WIDTH = 18  # characters after it, such as "  order 6 1.87"


class Cells(NamedTuple):
    """A set of characters to draw with.

    Attributes:
        across: number of dots in a cell from left to right.
        down: number of dots in a cell from top to bottom.
    """

    across: int
    down: int

    def character(self, lit: set[Dot]) -> str:
        """Return the character of a cell.

        Args:
            lit: the lit dots (column, row) in the cell, at least one; row 0 is at the top.
        """
        if self.across == 1:  # ASCII
            rows = tuple(sorted(row for _, row in lit))
            return {(0,): "'", (1,): ".", (0, 1): ":"}[rows]
        return chr(0x2800 + sum(_BRAILLE_BIT[dot] for dot in lit))


BRAILLE = Cells(across=2, down=4)
ASCII = Cells(across=1, down=2)
# The bit of each dot (column, row) in the code of a Braille character.
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
) -> list[list[StyledText]]:
    """Draw a curve, and return its rows, the last of which is the x axis.

    Args:
        xs: the points' x, ascending. Points are joined by lines.
        ys: the points' y. Points whose y is not finite are left out.
        width: number of characters in a row, including the scale and the names of the yardsticks.
        height: number of rows without the x axis.
        yardsticks: {name: y} of dotted levels. The name and value are written at the right, on
            another row if two would collide.
        x_end: the right end of the x axis, which begins at 0; None for the last x.
        cells: the characters to draw with.

    Returns:
        For each row, pieces (role, text) from left to right. The role says how to colour the text:
        "scale", "curve", "level" or "name".
    """
    points = [(x, y) for x, y in zip(xs, ys, strict=True) if math.isfinite(y)]
    low = min([y for _, y in points] + list(yardsticks.values()), default=0.0)
    curve_top = low
    if points:
        # The steep start of a curve would flatten the rest. So values above 2.2 times the last one
        # are drawn at the upper edge.
        curve_top = min(max(y for _, y in points), 2.2 * points[-1][1])
    high = max([curve_top, *yardsticks.values()])
    margin = max(0.04 * (high - low), 0.02)
    columns = width - SCALE_WIDTH - YARDSTICK_WIDTH
    last_x = points[-1][0] if points else 0.0
    right = x_end or last_x or 1.0  # 1.0, so that there is an axis even before the first token
    grid = _Grid(cells, columns, height, low - margin, high + margin, right)
    curve = grid.by_cell(grid.joined(points))
    levels = grid.by_cell(dot for level in yardsticks.values() for dot in grid.dotted(level))
    scale = grid.scale_labels()
    names = _spread_names(yardsticks, grid)
    rows: list[list[StyledText]] = []
    for row in range(height):
        pieces: list[StyledText] = [("scale", f"{scale.get(row, ''):>{SCALE_WIDTH - 1}} ")]
        for column in range(columns):
            cell = (column, row)
            # The curve hides a level, since two lines in a cell are illegible.
            if cell in curve:
                pieces.append(("curve", cells.character(curve[cell])))
            elif cell in levels:
                pieces.append(("level", cells.character(levels[cell])))
            else:
                pieces.append(("level", " "))
        pieces.append(("name", names.get(row, "")))
        rows.append(pieces)
    x_axis = " " * SCALE_WIDTH + _x_labels(grid.x_end, columns)
    return [*rows, [("scale", x_axis)]]


@dataclass(frozen=True)
class _Grid:
    """A map from values to dots. Dot (0, 0) is at the upper left.

    Attributes:
        cells: the characters to draw with.
        columns: number of cells from left to right.
        rows: number of cells from top to bottom.
        low: the y of the lowest dots.
        high: the y of the uppermost dots.
        x_end: the x of the rightmost dots; that of the leftmost is 0.
    """

    cells: Cells
    columns: int
    rows: int
    low: float
    high: float
    x_end: float

    def dot(self, x: float, y: float) -> Dot:
        """Return the dot of a point; for a point outside, the nearest dot at the edge."""
        right = self.columns * self.cells.across - 1
        bottom = self.rows * self.cells.down - 1
        column = round(x / self.x_end * right)
        row = round((self.high - y) / (self.high - self.low) * bottom)
        return min(right, max(0, column)), min(bottom, max(0, row))

    def cell_row(self, y: float) -> int:
        """Return the row of cells that a value is in."""
        return self.dot(0, y)[1] // self.cells.down

    def by_cell(self, dots: Iterable[Dot]) -> dict[Dot, set[Dot]]:
        """Return {cell (column, row): its lit dots}, each dot relative to its cell."""
        cells: dict[Dot, set[Dot]] = {}
        for column, row in dots:
            cell_column, inner_column = divmod(column, self.cells.across)
            cell_row, inner_row = divmod(row, self.cells.down)
            cells.setdefault((cell_column, cell_row), set()).add((inner_column, inner_row))
        return cells

    def dotted(self, y: float) -> list[Dot]:
        """Return the dots of a dotted level at `y`: one in every second cell."""
        row = self.dot(0, y)[1]
        across = self.cells.across
        return [(column, row) for column in range(0, self.columns * across, 2 * across)]

    def joined(self, points: Sequence[tuple[float, float]]) -> list[Dot]:
        """Return the dots of straight lines from each point to the next."""
        corners = [self.dot(x, y) for x, y in points]
        dots = corners[-1:]  # each line below has its first dot, but not its last one
        for (column, row), (next_column, next_row) in itertools.pairwise(corners):
            steps = max(abs(next_column - column), abs(next_row - row), 1)
            for i in range(steps):
                dot_column = round(column + (next_column - column) * i / steps)
                dot_row = round(row + (next_row - row) * i / steps)
                dots.append((dot_column, dot_row))
        return dots

    def scale_labels(self) -> dict[int, str]:
        """Return {row of cells: label} for the y axis.

        The labels are at multiples of the smallest step of which two labels are at least two rows
        apart.
        """
        rows_per_unit = self.rows / (self.high - self.low)
        steps = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)
        step = next((step for step in steps if step * rows_per_unit >= 2), None)
        if step is None:
            return {}
        multiples = range(math.ceil(self.low / step), math.floor(self.high / step) + 1)
        return {self.cell_row(step * multiple): f"{step * multiple:.1f}" for multiple in multiples}


def _spread_names(yardsticks: Mapping[str, float], grid: _Grid) -> dict[int, str]:
    """Return {row of cells: label} of the yardsticks.

    A label is in the row of its level. If that row is taken, it is in the nearest free row above,
    or else below.
    """
    labels: dict[int, str] = {}
    for name, value in sorted(yardsticks.items(), key=lambda item: item[1]):
        level_row = grid.cell_row(value)
        candidates = [*range(level_row, -1, -1), *range(level_row + 1, grid.rows)]
        row = next((row for row in candidates if row not in labels), None)
        if row is not None:
            labels[row] = f"  {name} {value:.2f}"[:YARDSTICK_WIDTH]
    return labels


def _x_labels(x_end: float, columns: int) -> str:
    """Return the labels of the x axis at each quarter of its length.

    A label ends at its quarter. A label that would touch another is left out.
    """
    line = f"{quantities.count(x_end)} tokens".rjust(columns)
    for quarter in (3, 2, 1):
        label = quantities.count(x_end * quarter / 4)
        end = columns * quarter // 4
        begin = end - len(label)
        is_free = not line[max(0, begin) : end + 2].strip()
        if is_free and begin >= 0:
            line = line[:begin] + label + line[end:]
    return line


WIDTH = 100  # characters of the longest line
NARROWEST = 40  # lines are not cut to fewer characters; a narrower terminal wraps them
REDRAW_S = 0.5  # interval of redrawing on a terminal
# Elsewhere a first line is printed after FIRST_LINE_S. The interval to the next line is twice as
# long each time, up to MAX_LINE_INTERVAL_S.
FIRST_LINE_S = 10.0
MAX_LINE_INTERVAL_S = 60.0

# ASCII for a stream that is not UTF-8. Any other character that its encoding lacks becomes "?".
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


class _FailsafeStream:
    """A text stream whose writes do not fail.

    Characters that the encoding lacks are replaced. After a failed write, all further output is
    dropped: a closed terminal, or a pipe that nobody reads, must not end a run after hours of work.
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
    """Lines that are printed to a stream, with one live region below them.

    A stream that does not take escape sequences gets plain lines, without colour or redrawing. The
    environment variable NO_COLOR only turns colour off.

    Attributes:
        is_live: whether a region can be redrawn in place.
        is_utf8: whether the stream's encoding is UTF-8.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = _FailsafeStream(sys.stderr if stream is None else stream)
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
        """Return the largest number of characters in a line."""
        if not self._is_terminal:
            return WIDTH
        # One less than the terminal has, since some terminals wrap after the last character.
        return max(NARROWEST, min(WIDTH, self._console.width - 1))

    @property
    def height(self) -> int:
        """Return the terminal's number of lines."""
        return self._console.height

    def print(self, *lines: Text) -> None:
        """Write lines above the live region, each cut to `width` characters."""
        for line in _cut_lines(lines, self.width):
            self._console.print(line)
        self._stream.flush()

    @contextmanager
    def live(
        self,
        region: Callable[[], list[Text]],
        status: Callable[[], Text],
        state: Callable[[], object],
    ) -> Iterator[None]:
        """Show progress during the `with` block.

        On a terminal a region is redrawn in place, and disappears at the end of the block. Other
        text that is written to standard error appears above it. Elsewhere lines are printed at
        growing intervals. The three functions are called from another thread, so that progress is
        shown while the main thread is busy.

        Args:
            region: returns the lines of the region.
            status: returns the line to print if the stream is not a terminal.
            state: returns a value that changes with the progress. If it is the same as at the last
                line, no line is printed.
        """
        if not self.is_live:
            with _every(REDRAW_S, _OccasionalLines(self, status, state).print_if_due):
                yield
            return

        def cut_region() -> Text:
            # Lines are cut even on a terminal that is narrower than `width`: a wrapped line would
            # take more rows than are redrawn.
            width = max(1, min(self.width, self._console.width - 1))
            return Text("\n").join(_cut_lines(region(), width))

        view = Live(
            get_renderable=cut_region,
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,  # standard output is for results
            redirect_stderr=False,  # `_ErrorsAboveRegion` does this, and makes texts visible
        )
        with (
            redirect_stderr(_ErrorsAboveRegion(self._console, sys.stderr)),
            view,
            _every(REDRAW_S, view.refresh),
        ):
            view.refresh()
            yield


class _OccasionalLines:
    """Lines about the progress, at growing intervals, in place of a region; see `Screen.live`."""

    def __init__(
        self, screen: Screen, status: Callable[[], Text], state: Callable[[], object]
    ) -> None:
        self._screen = screen
        self._status = status
        self._state = state
        self._interval_s = FIRST_LINE_S
        self._next_s = monotonic() + FIRST_LINE_S
        self._last_state: object = None

    def print_if_due(self) -> None:
        """Print a line if it is time and the state has changed."""
        if monotonic() < self._next_s:
            return
        state = self._state()
        if state == self._last_state:
            return
        self._last_state = state
        self._interval_s = min(2 * self._interval_s, MAX_LINE_INTERVAL_S)
        self._next_s = monotonic() + self._interval_s
        self._screen.print(self._status())


class _ErrorsAboveRegion(FileProxy):
    """The standard error stream while a region is live; it writes above the region."""

    def write(self, text: str) -> int:
        return self.own(visible(text))

    def own(self, text: str) -> int:  # `monograph.terminal.own` looks for a method of this name
        return super().write(text)


def _cut_lines(lines: Sequence[Text], width: int) -> list[Text]:
    """Return lines with control characters made visible, each cut to `width` characters.

    The given lines may be cut in place.
    """
    cut_lines = []
    for line in lines:
        visible_text = visible(line.plain)
        if visible_text != line.plain:
            # The colours of parts are lost, because they refer to positions in the former text.
            line = Text(visible_text, line.style)
        line.truncate(width, overflow="ellipsis")
        cut_lines.append(line)
    return cut_lines


def one_line(text: str) -> str:
    """Return a text of a model or a file as one line, with a sign for each line end."""
    return visible(text.expandtabs(4).replace("\n", "⏎"))


def cut_to_width(text: str, width: int) -> str:
    """Return a text cut to at most `width` columns of a terminal; a wide character takes two."""
    if cell_len(text) <= width:
        return text
    return set_cell_size(text, width - 1) + "…"


@contextmanager
def _every(seconds: float, act: Callable[[], None]) -> Iterator[None]:
    """Call `act` from another thread every `seconds` during the `with` block."""
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
