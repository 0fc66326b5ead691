# Run: pytest tests/test_schedule.py
"""Schedules: end points, monotonicity and the unit (updates)."""

from __future__ import annotations

import pytest

from monograph.schedule import constant, warmup_cosine


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
