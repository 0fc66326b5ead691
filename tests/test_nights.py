"""Run: pytest tests/test_nights.py (every slow test has its night)."""

from __future__ import annotations

from collections import Counter
from datetime import date, timedelta

from nights import NIGHTS, is_of_night


def test_any_nights_in_a_row_run_each_test_once_and_share_them_evenly() -> None:
    tests = [f"tests/laws/test_cross.py::test_every_pair[{number}]" for number in range(3000)]
    begun = date(2026, 12, 20)
    nights = [begun + timedelta(days=number) for number in range(NIGHTS)]
    shares = Counter[date]()
    for test in tests:
        [own] = [night for night in nights if is_of_night(test, night)]
        shares[own] += 1
    assert len(shares) == NIGHTS
    assert max(shares.values()) < 2 * len(tests) / NIGHTS
