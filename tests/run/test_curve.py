"""Run: pytest tests/run/test_curve.py."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monograph.run.curve import ASCII, BRAILLE, SCALE_WIDTH, YARDSTICK_WIDTH, Cells, curve_pieces

YARDSTICKS = {"trigram": 2.82, "gzip -9": 1.97, "order 6": 1.87, "xz -9": 1.66}
WIDTH, HEIGHT = 80, 8
COLUMNS = WIDTH - SCALE_WIDTH - YARDSTICK_WIDTH


def drawn(*arguments: Any, **options: Any) -> list[str]:
    """Return the rows of `curve_pieces` as text."""
    return [
        "".join(text for _, text in row).rstrip() for row in curve_pieces(*arguments, **options)
    ]


def dots_of(rows: list[str]) -> set[tuple[int, int]]:
    """Lit dots (column, row) of the plot part of Braille rows, read back from the characters."""
    offsets = {
        0: (0, 0),
        1: (0, 1),
        2: (0, 2),
        3: (1, 0),
        4: (1, 1),
        5: (1, 2),
        6: (0, 3),
        7: (1, 3),
    }
    lit = set()
    for row, text in enumerate(rows[:-1]):
        for column, character in enumerate(text[SCALE_WIDTH : SCALE_WIDTH + COLUMNS]):
            bits = ord(character) - 0x2800 if character != " " else 0
            lit |= {
                (2 * column + across, 4 * row + down)
                for bit, (across, down) in offsets.items()
                if bits >> bit & 1
            }
    return lit


@given(
    st.lists(st.floats(0.1, 20) | st.just(math.nan), max_size=40),
    st.dictionaries(st.sampled_from(list(YARDSTICKS)), st.floats(0.5, 9)),
    st.sampled_from([BRAILLE, ASCII]),
    st.integers(4, 12),
)
def test_any_curve_fits_its_frame(
    ys: list[float], yardsticks: dict[str, float], cells: Cells, height: int
) -> None:
    rows = drawn([1e5 * i for i in range(len(ys))], ys, WIDTH, height, yardsticks, cells=cells)
    assert len(rows) == height + 1
    assert all(len(row) <= WIDTH for row in rows)
    for name, value in yardsticks.items():
        assert sum(f"{name} {value:.2f}" in row for row in rows) == 1
    if cells is ASCII:
        assert "".join(rows).isascii()


def test_a_straight_line_is_drawn_from_corner_to_corner() -> None:
    rows = drawn([0, 1], [2.0, 1.0], WIDTH, HEIGHT, {})
    lit = dots_of(rows)
    assert {column for column, _ in lit} == set(range(2 * COLUMNS))  # no gap
    by_column = sorted(lit)
    assert all(
        later[1] >= earlier[1] for earlier, later in zip(by_column, by_column[1:], strict=False)
    )
    assert by_column[0][1] <= 2  # margins of 4 % of the height
    assert by_column[-1][1] >= 4 * HEIGHT - 3


def test_x_is_to_scale_of_the_planned_end() -> None:
    lit = dots_of(drawn([0, 50], [2.0, 2.0], WIDTH, HEIGHT, {}, x_end=100))
    assert max(column for column, _ in lit) == pytest.approx(COLUMNS, abs=1)


def test_a_steep_start_is_cut_at_the_upper_edge() -> None:
    """The untrained model's 8 bits per byte must not flatten the part that matters."""
    rows = drawn([0, 1, 2, 3], [8.0, 3.0, 2.0, 1.8], WIDTH, HEIGHT, {"xz": 1.7})
    assert min(row for _, row in dots_of(rows)) == 0

    assert "2.0" in "".join(text[:SCALE_WIDTH] for text in rows)


@given(
    st.lists(st.floats(0.1, 20), min_size=1, max_size=40),
    st.dictionaries(st.sampled_from(list(YARDSTICKS)), st.floats(0.5, 9)),
)
def test_where_the_run_stands_is_never_cut(ys: list[float], yardsticks: dict[str, float]) -> None:
    """However far it is from the yardsticks; what is cut lies on row 0, and the margin keeps all
    else off it.
    """
    ys = [*ys, ys[-1]]
    lit = dots_of(drawn([float(i) for i in range(len(ys))], ys, WIDTH, 12, yardsticks))
    assert min(row for column, row in lit if column == 2 * COLUMNS - 1) > 0


def test_scale_labels_stand_where_their_values_are() -> None:
    rows = drawn([0, 1], [3.0, 3.0], WIDTH, HEIGHT, {"low": 1.0, "high": 3.0})
    labelled = {
        row[:SCALE_WIDTH].strip(): index
        for index, row in enumerate(rows)
        if row[:SCALE_WIDTH].strip()
    }
    assert labelled["3.0"] < labelled["2.0"] < labelled["1.0"]
    assert min(row for _, row in dots_of(rows)) // 4 == labelled["3.0"]


def test_yardsticks_are_dotted_levels_in_their_order() -> None:
    rows = drawn([], [], WIDTH, HEIGHT, YARDSTICKS)
    found = [name for row in rows for name in YARDSTICKS if name in row]
    assert found == ["trigram", "gzip -9", "order 6", "xz -9"]
    assert len({row for _, row in dots_of(rows)}) == 4


def test_the_curve_hides_the_levels_it_crosses() -> None:
    pieces = curve_pieces([0, 1], [2.0, 2.0], WIDTH, HEIGHT, {"same": 2.0, "low": 1.0})
    roles = [{role for role, text in row if text.strip()} - {"scale", "name"} for row in pieces]
    assert {"curve"} in roles
    assert {"curve", "level"} not in roles


def test_the_x_axis_names_its_unit_and_end() -> None:
    labels = drawn([0, 3e6], [3, 2], WIDTH, HEIGHT, {})[-1]
    assert labels.split("  ")[-1].strip() == "3 M tokens"
    assert [labels.index(text) + len(text) - SCALE_WIDTH for text in ("750 k", "1.5 M")] == [
        COLUMNS // 4,
        COLUMNS // 2,
    ]
    assert drawn([0, 3e6], [3, 2], 40, HEIGHT, {})[-1].split("  ")[-1].strip() == "3 M tokens"
