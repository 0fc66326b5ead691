# Run: pytest tests/test_schedule.py
"""Schedules: end points, monotonicity, shape and the unit (updates)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monograph.schedule import constant, cool_down, warmup_cosine, warmup_stable_decay


@pytest.mark.parametrize("warmup, total", [(0, 1), (0, 10), (3, 10), (10, 10), (99, 100), (5, 3)])
def test_cosine_rises_then_falls_and_ends_at_final(warmup, total):
    factor = warmup_cosine(warmup, total, final=0.2)
    values = [factor(i) for i in range(total)]
    top = min(warmup, total - 1)
    assert values[: top + 1] == sorted(values[: top + 1])
    assert values[top:] == sorted(values[top:], reverse=True)
    assert all(0 < v <= 1 for v in values)
    if total > warmup + 1:
        assert values[-1] == pytest.approx(0.2) and max(values) == 1.0
    assert factor(10 * total + warmup) == pytest.approx(0.2)


def test_cosine_is_half_way_in_the_middle():
    assert warmup_cosine(0, 101, final=0.0)(50) == pytest.approx(0.5)


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
    assert factor(75) == 1.0 and factor(76) == pytest.approx(0.2 + 0.8 * 0.8) and factor(84) == pytest.approx(0.52)
    assert factor(99) == pytest.approx(0.2 + 0.8 * (1 - (24 / 25) ** 0.5))


@pytest.mark.parametrize("first", [5, 50, 90, 99])
@pytest.mark.parametrize("schedule", [warmup_cosine(10, 100, 0.05), warmup_stable_decay(10, 100, final=0.05)])
def test_a_cool_down_falls_from_where_the_schedule_is(schedule, first):
    factor = cool_down(schedule, first, 110, 0.05)
    values = [factor(i) for i in range(110)]
    assert values[:first] == [schedule(i) for i in range(first)] and values[-1] == pytest.approx(0.05)
    assert values[first - 1 :] == sorted(values[first - 1 :], reverse=True)
