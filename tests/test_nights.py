"""Run: pytest tests/test_nights.py (every slow test has its night, and no night takes longer than
it may).
"""

from __future__ import annotations

from collections import Counter
from datetime import date, timedelta

import pytest

from costs import MEASURED as DAY
from nights import (
    MEASURED,
    NIGHTS,
    UNMEASURED_S,
    Bounded,
    is_of_night,
    measured_night_cpu_s,
    shares,
)

BEGUN = date(2026, 12, 20)


def test_any_nights_in_a_row_run_each_test_once_and_share_them_evenly() -> None:
    tests = [f"tests/laws/test_cross.py::test_every_pair[{number}]" for number in range(3000)]
    nights = [BEGUN + timedelta(days=number) for number in range(NIGHTS)]
    counts = Counter[date]()
    for test in tests:
        [own] = [night for night in nights if is_of_night(test, night)]
        counts[own] += 1
    assert len(counts) == NIGHTS
    assert max(counts.values()) < 2 * len(tests) / NIGHTS


def test_shares_have_each_test_once_and_none_costs_more_than_it_may() -> None:
    cost = {f"test_{number}": float(number % 37) for number in range(200)}
    tests = [*cost, "unmeasured", "too_dear"]
    cost["too_dear"] = 101.0
    lists = shares(tests, cost, 100.0)
    assert sorted(test for each in lists for test in each) == sorted(set(tests) - {"too_dear"})
    spent = [sum(cost.get(test, UNMEASURED_S) for test in each) for each in lists]
    assert max(spent) <= 100.0
    assert len(lists) <= 1.3 * sum(spent) / 100.0 + 1, "they are full"
    assert shares(reversed(tests), cost, 100.0) == lists, "each worker makes the same ones"


def test_measured_costs_are_read() -> None:
    assert MEASURED.parent == DAY.parent
    assert max(measured_night_cpu_s().values()) > 1


def test_what_would_end_too_late_is_not_begun(request: pytest.FixtureRequest) -> None:
    Bounded(BEGUN, minutes=5).pytest_runtest_setup(request.node)
    with pytest.raises(pytest.skip.Exception, match="would not end within"):
        Bounded(BEGUN, minutes=0.9 * UNMEASURED_S / 60).pytest_runtest_setup(request.node)
