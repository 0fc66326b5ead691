"""Which slow tests are run on which night.

`pytest -m slow --night 2026-11-28` runs that date's share of four weeks: a test's share is decided
by its name alone, so that a new one moves no other, and any `NIGHTS` nights in a row run all.

`--night DATE --minutes 15` runs a smaller share, which by measured costs takes at most that long.
As many dates in a row as there are shares run all but the tests that take longer alone, which no
share has. On a machine that is slower than the one that was measured, the tests for which no time
is left are not begun. What was run, and what was not, is said at the end.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Iterable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from costs import cpu_s_of_a_second

NIGHTS = 28
MEASURED = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "nights.json"
SAYS = "tonight"
OVER = "it would not end within the night's minutes"
UNMEASURED_S = 10.0  # what a test is taken to cost before it was measured; most slow ones cost less


def is_of_night(test: str, night: date) -> bool:
    """Return whether a test, by its node id, is run on the night of a date."""
    return zlib.crc32(test.encode()) % NIGHTS == night.toordinal() % NIGHTS


def measured_night_cpu_s() -> dict[str, float]:
    """CPU seconds of each slow test that was measured: `pytest -m slow --night DATE --costs FILE`
    adds to that file.
    """
    return dict(json.loads(MEASURED.read_text())["tests"])


def shares(tests: Iterable[str], cost: Mapping[str, float], budget_s: float) -> list[list[str]]:
    """Return the tests in lists that each cost at most the budget, each with its dearest test
    first.

    A test goes into the first list that has room for it, the dearest test first. One that costs
    more than the budget alone is in no list.
    """

    def of(test: str) -> float:
        return cost.get(test, UNMEASURED_S)

    filled: list[list[str]] = []
    left_s: list[float] = []
    for test in sorted(tests, key=lambda test: (-of(test), test)):
        if of(test) > budget_s:
            continue
        place = next(
            (number for number, left in enumerate(left_s) if left >= of(test)), len(filled)
        )
        if place == len(filled):
            filled.append([])
            left_s.append(budget_s)
        filled[place].append(test)
        left_s[place] -= of(test)
    return filled


class Bounded:
    """Leaves a date's share of at most so many minutes, says which it has, and begins none that
    would end too late.
    """

    def __init__(self, night: date, minutes: float):
        self.night = night
        self.minutes = minutes
        self.end_s = time.monotonic() + 60 * minutes
        self.cost = measured_night_cpu_s()
        self.says: list[str] = []

    @pytest.hookimpl(trylast=True)  # after -m and -k
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        budget_s = 60 * self.minutes * cpu_s_of_a_second()
        named = {item.nodeid: item for item in items}
        all_shares = shares(named, self.cost, budget_s) or [[]]
        number = self.night.toordinal() % len(all_shares)
        share = all_shares[number]
        spent_s = sum(self.cost.get(test, UNMEASURED_S) for test in share)
        in_one = {test for each in all_shares for test in each}
        self.says = [
            f"share {number + 1} of {len(all_shares)}, by the date {self.night}: {len(share)} of {len(named)} tests, "
            f"about {spent_s / 60:.1f} CPU minutes of at most {budget_s / 60:.1f}",
            *(f"in this share: {test}" for test in share),
            *(
                f"in no share, as it takes longer alone: {test}"
                for test in named
                if test not in in_one
            ),
        ]
        items[:] = [named[test] for test in share]
        config.hook.pytest_deselected(items=[named[test] for test in named if test not in share])

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if time.monotonic() + self.cost.get(item.nodeid, UNMEASURED_S) > self.end_s:
            pytest.skip(OVER)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput[SAYS] = self.says

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.says = self.says or getattr(node, "workeroutput", {}).get(SAYS, [])

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        skipped = terminalreporter.stats.get("skipped", [])
        late = [
            f"not begun, as {OVER}: {each.nodeid}" for each in skipped if OVER in str(each.longrepr)
        ]
        terminalreporter.section("tonight")
        for line in [*self.says, *late]:
            terminalreporter.line(line)
