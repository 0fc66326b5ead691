"""Run: pytest tests/ensemble/test_knobs.py"""

from __future__ import annotations

import copy
import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monograph.ensemble.knobs import Knobs, grid, log_range
from monograph.errors import UsageError


def test_knobs_are_read_by_name_and_never_change() -> None:
    knobs = Knobs(lr=1e-3, seed=2)
    assert (knobs.lr, knobs.seed) == (1e-3, 2) and list(knobs.items()) == [
        ("lr", 1e-3),
        ("seed", 2),
    ]
    assert dict(knobs) == {"lr": 1e-3, "seed": 2}
    with pytest.raises(AttributeError, match="never change"):
        knobs.lr = 2
    with pytest.raises(AttributeError, match="no knob 'rate'; there are lr, seed"):
        _ = knobs.rate


def test_equal_values_make_equal_knobs() -> None:
    knobs = Knobs(lr=1e-3, betas=(0.9, 0.95))
    assert knobs == Knobs(betas=(0.9, 0.95), lr=1e-3) != Knobs(lr=1e-3)
    assert len({knobs, Knobs(betas=(0.9, 0.95), lr=1e-3)}) == 1
    assert copy.deepcopy(knobs) == pickle.loads(pickle.dumps(knobs)) == knobs
    assert repr(knobs) == "Knobs(lr=0.001, betas=(0.9, 0.95))"


def test_a_grid_is_the_product_in_order() -> None:
    found = grid(lr=[1.0, 2.0], seed=range(3))
    assert [(k.lr, k.seed) for k in found] == [(lr, seed) for lr in (1.0, 2.0) for seed in range(3)]
    assert grid() == [Knobs()]
    with pytest.raises(UsageError, match="the axis seed has no value"):
        grid(lr=[1.0], seed=[])


@pytest.mark.parametrize("axis", [1e-3, "abc"])
def test_an_axis_that_is_a_value_is_refused(axis: object) -> None:
    with pytest.raises(UsageError, match=f"the axis lr is {axis!r}: give its values"):
        grid(lr=axis)  # type: ignore[arg-type]


def test_what_nobody_read_is_known() -> None:
    knobs = Knobs(lr=1.0, width=2, depth=3)
    assert Knobs.unread(knobs) == ["lr", "width", "depth"]
    assert knobs.lr + knobs["depth"] == 4.0 and Knobs.unread(knobs) == ["width"]
    assert knobs == Knobs(lr=1.0, width=2, depth=3) and Knobs.unread(copy.copy(knobs)) == [
        "lr",
        "width",
        "depth",
    ]
    assert dict(knobs)["width"] == 2 and Knobs.unread(knobs) == []


@given(st.floats(1e-9, 1e3), st.floats(1e-9, 1e3), st.integers(2, 50))
def test_a_log_range_has_its_ends_and_one_factor(first: float, last: float, count: int) -> None:
    if first == last:
        return
    values = log_range(first, last, count)
    assert (values[0], values[-1], len(values)) == (first, last, count)
    factor = (last / first) ** (1 / (count - 1))
    assert all(
        math.isclose(b / a, factor, rel_tol=1e-9) for a, b in zip(values, values[1:], strict=False)
    )


@pytest.mark.parametrize(
    ("first", "last", "count", "words"),
    [(0.0, 1.0, 3, "0 is not a number above 0"), (1.0, math.inf, 3, "inf"), (1.0, 2.0, 1, "at least 2"),
     (1.0, 1.0, 3, "would be equal"), (1.0, 1.0, 0, "at least 2"), (math.nan, 1.0, 2, "nan")],
)  # fmt: skip
def test_a_log_range_that_is_none(first: float, last: float, count: int, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        log_range(first, last, count)


def test_one_value() -> None:
    assert log_range(0.5, 0.5, 1) == [0.5]
