# Run: pytest tests/data/test_damaged_records.py    (all 20,000, with their counts: -m slow -s)
"""Damaged and odd records are refused by name, or passed over and counted; what is trained on is
what they say.
"""

from __future__ import annotations

from collections import Counter

import pytest

from data.damage import CASES, check

ALL = {"lines": 8000, "gzip": 3000, "zstd": 3000, "parquet": 3000, "arrow": 3000}
FAST = 20  # of them one


@pytest.mark.parametrize("kind", CASES)
def test_damaged_records(kind, tmp_path):
    outcomes: Counter[str] = Counter()
    for seed in range(ALL[kind] // FAST):
        outcomes += check(kind, seed, tmp_path)
    assert outcomes["is good"] < sum(outcomes.values()) / 2 and len(outcomes) > 1, outcomes


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_thousand_damaged_records(tmp_path):
    assert sum(ALL.values()) == 20_000
    for kind, count in ALL.items():
        outcomes: Counter[str] = Counter()
        for seed in range(count):
            outcomes += check(kind, seed, tmp_path)
        print(f"\n{kind}: {count:,} files")
        for outcome, number in outcomes.most_common():
            print(f"  {number:6,}  {outcome}")
