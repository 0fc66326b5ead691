"""Draw curves as text.

A plot consists of cells. A cell is one character, in Braille (Unicode block U+2800) or ASCII. It
has several dots, e.g. 2 x 4 in Braille, each of which may be lit. A yardstick is a value to compare the
curve with, such as what a simple model of text reaches. It is drawn as a level, which is a dotted line,
with its name at the right.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from monograph.report import quantities

Dot = tuple[int, int]  # (column, row) of a dot in the plot, or in its cell
PlotCell = tuple[int, int]  # (column, row) of a cell in the plot
StyledText = tuple[str, str]  # (role, text)

SCALE_WIDTH = 6  # characters before the plot, such as "4.0 "
YARDSTICK_WIDTH = 18  # characters after it: a yardstick's label, such as "  order 6 1.87"


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
    point_ys = [y for _, y in points]
    low = min([*point_ys, *yardsticks.values()], default=0.0)
    curve_top = low
    if points:
        # The steep start of a curve would flatten the rest. So values above 2.2 times the last one
        # are drawn at the upper edge.
        curve_top = min(max(point_ys), 2.2 * point_ys[-1])
    high = max([curve_top, *yardsticks.values()])
    # Stays free above and below the curve. It is not 0 even if all values are equal.
    margin = max(0.04 * (high - low), 0.02)
    columns = width - SCALE_WIDTH - YARDSTICK_WIDTH
    last_x = points[-1][0] if points else 0.0
    right = x_end or last_x or 1.0  # 1.0, so that there is an axis even before the first token
    grid = _Grid(cells, columns, height, low - margin, high + margin, right)
    curve = grid.by_cell(grid.line_dots(points))
    level_dots: list[Dot] = []
    for level in yardsticks.values():
        level_dots += grid.level_dots(level)
    levels = grid.by_cell(level_dots)
    scale = grid.scale_labels()
    names = _yardstick_labels(yardsticks, grid)
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

    def by_cell(self, dots: Iterable[Dot]) -> dict[PlotCell, set[Dot]]:
        """Return {cell: its lit dots}, each dot relative to its cell."""
        cells: dict[PlotCell, set[Dot]] = {}
        for column, row in dots:
            cell_column, inner_column = divmod(column, self.cells.across)
            cell_row, inner_row = divmod(row, self.cells.down)
            cells.setdefault((cell_column, cell_row), set()).add((inner_column, inner_row))
        return cells

    def level_dots(self, y: float) -> list[Dot]:
        """Return the dots of a dotted line at `y`: one in every second cell."""
        row = self.dot(0, y)[1]
        across = self.cells.across
        return [(column, row) for column in range(0, self.columns * across, 2 * across)]

    def line_dots(self, points: Sequence[tuple[float, float]]) -> list[Dot]:
        """Return the dots of straight lines from each point to the next."""
        corners = [self.dot(x, y) for x, y in points]
        dots = corners[-1:]  # each line below lacks its last dot, which begins the next line
        for (column, row), (next_column, next_row) in itertools.pairwise(corners):
            steps = max(abs(next_column - column), abs(next_row - row), 1)
            for i in range(steps):
                dot_column = round(column + (next_column - column) * i / steps)
                dot_row = round(row + (next_row - row) * i / steps)
                dots.append((dot_column, dot_row))
        return dots

    def scale_labels(self) -> dict[int, str]:
        """Return {row of cells: label} for the y axis; {} if no step is large enough.

        The labels are at the multiples of a step, which is the smallest one for which labels are at least
        two rows apart.
        """
        rows_per_unit = self.rows / (self.high - self.low)
        possible_steps = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)
        step = next((step for step in possible_steps if step * rows_per_unit >= 2), None)
        if step is None:
            return {}
        multiples = range(math.ceil(self.low / step), math.floor(self.high / step) + 1)
        return {self.cell_row(step * multiple): f"{step * multiple:.1f}" for multiple in multiples}


def _yardstick_labels(yardsticks: Mapping[str, float], grid: _Grid) -> dict[int, str]:
    """Return {row of cells: label} of the yardsticks.

    A label is in the row of its level. If that row already has one, the label is in the nearest free row
    above, or else in the nearest one below. If no row is free, it is left out.
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
        # The label needs its own characters and two more at its right.
        is_free = not line[max(0, begin) : end + 2].strip()
        if is_free and begin >= 0:
            line = line[:begin] + label + line[end:]
    return line
