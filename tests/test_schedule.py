# Run: pytest tests/test_schedule.py
"""Schedules: end points, monotonicity, shape and the unit (updates)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monograph.config import classify, load
from monograph.device import describe
from monograph.schedule import constant, cool_down, warmup_cosine, warmup_stable_decay
from monograph.session.resolve import resolve


@pytest.mark.parametrize("warmup, total", [(0, 1), (0, 10), (3, 10), (10, 10), (99, 100), (5, 3)])
@pytest.mark.parametrize("final", [0.2, 0.0])
def test_cosine_rises_then_falls_to_final_and_wastes_no_update(warmup, total, final):
    factor = warmup_cosine(warmup, total, final)
    values = [factor(i) for i in range(total)]
    top = min(warmup, total - 1)
    assert values[: top + 1] == sorted(values[: top + 1])
    assert values[top:] == sorted(values[top:], reverse=True)
    assert all(0 < v <= 1 for v in values)
    if total > warmup:
        assert max(values) == 1.0 and values[-1] > final and factor(total) == pytest.approx(final)
    assert factor(10 * total + warmup) == pytest.approx(final)


def test_cosine_is_half_way_in_the_middle():
    assert warmup_cosine(0, 100, final=0.0)(50) == pytest.approx(0.5)


def test_constant():
    assert [constant(4)(i) for i in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert constant()(0) == 1.0


@given(st.integers(0, 40), st.integers(1, 200), st.floats(0, 1), st.floats(0, 0.9))
def test_wsd_rises_stays_and_falls(warmup, total, decay, final):
    factor = warmup_stable_decay(warmup, total, decay, final)
    values = [factor(i) for i in range(total)]
    falls = max(1, round(decay * total))
    assert values[:warmup] == [(i + 1) / warmup for i in range(min(warmup, total))]
    assert all(value == 1.0 for value in values[warmup : total - falls + 1])
    after = values[min(warmup, total) :]
    assert after == sorted(after, reverse=True) and all(final < value <= 1.0 for value in after)
    assert factor(max(total, warmup + 1)) == factor(10 * total + warmup) == pytest.approx(final)


def test_wsd_is_one_minus_the_root():
    factor = warmup_stable_decay(10, 100, decay=0.25, final=0.2)
    assert (
        factor(75) == 1.0
        and factor(76) == pytest.approx(0.2 + 0.8 * 0.8)
        and factor(84) == pytest.approx(0.52)
    )
    assert factor(99) == pytest.approx(0.2 + 0.8 * (1 - (24 / 25) ** 0.5))


@pytest.mark.parametrize("first", [5, 50, 90, 99])
@pytest.mark.parametrize("final", [0.0, 0.05])
@pytest.mark.parametrize("course", [warmup_cosine, warmup_stable_decay])
def test_a_cool_down_is_a_straight_line_from_where_the_schedule_is_and_wastes_no_update(
    course, final, first
):
    schedule = course(10, 100, final=final)
    factor = cool_down(schedule, first, 110, final)
    values = [factor(i) for i in range(111)]
    assert values[:first] == [schedule(i) for i in range(first)] and factor(110) == factor(
        200
    ) == pytest.approx(final)
    falls = [values[i] - values[i + 1] for i in range(first - 1, 110)]
    assert falls == pytest.approx([falls[0]] * len(falls)) and falls[0] > 0


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        (["optim.schedule=cosine"], warmup_cosine(10, 100, 0.05)),
        (["optim.schedule=cosine", "optim.min_lr_ratio=0"], warmup_cosine(10, 100, 0.0)),
        (["optim.schedule=wsd"], warmup_stable_decay(10, 100, final=0.05)),
        (["optim.schedule=wsd", "optim.min_lr_ratio=0.5"], warmup_stable_decay(10, 100, final=0.5)),
        (["optim.schedule=constant"], constant(10)),
    ],
)
def test_the_settings_name_a_schedule_and_its_floor(named, expected):
    factor = resolve(load(*classify([*named, "optim.warmup_updates=10"])[:2]), describe()).schedule(
        100
    )
    assert [factor(i) for i in range(101)] == [expected(i) for i in range(101)]
