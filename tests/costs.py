"""What each test file costs: `pytest --costs` prints the ten dearest, `--costs FILE` writes all of
them as JSON.

With `--night` FILE keeps the costs of the tests that were measured on other nights.

A file's CPU seconds are those of its process and of its children, between the end of the test
before and the end of its own last test, so fixtures count where they are made. Collecting is
counted apart.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

MEASURED = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "tests.json"
UNKNOWN_CPU_S = 5.0  # what a file is taken to cost before it was measured
COLLECTING = "collecting"
PROPERTY = "cpu_s"


def measured_cpu_s() -> dict[str, float]:
    """CPU seconds of each test file, by the last measured run that was committed
    (`make test-costs`).
    """
    return {name: cost[0] for name, cost in json.loads(MEASURED.read_text())["files"].items()}


def cpu_s_of_a_second() -> float:
    """CPU seconds that the measured run spent in a second of the clock: its workers share the
    cores.
    """
    run = json.loads(MEASURED.read_text())
    return float(run["cpu_s"] / run["wall_s"])


def cpu_s() -> float:
    """CPU seconds of this process, of its children, and of theirs that have ended (a server's
    forks).
    """
    own = os.getpid()
    try:  # and never ask whether it is there: a test may have made os.stat fail
        running = Path(f"/proc/{own}/task/{own}/children").read_text().split()
    except OSError:  # not Linux
        running = []
    return sum(os.times()[:4]) + sum(map(_of_process_s, running))


def _of_process_s(pid: str) -> float:
    try:
        ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]
    except OSError:  # it has just ended
        return 0.0
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


class Costs:
    """Measures in every worker; adds up and prints in the process that was called."""

    def __init__(self, path: str, added: bool = False):
        self.path = path
        self.added = added  # to the costs of tests that the file has
        self.seen_s = 0.0
        self.began_s = time.monotonic()
        self.collecting_s = 0.0
        self.cpu = defaultdict[str, float](float)
        self.wall = defaultdict[str, float](float)
        self.tests = defaultdict[str, float](float)

    def pytest_collection_finish(self) -> None:
        self.begin()
        self.collecting_s = self.seen_s

    def begin(self) -> None:
        """Count from here on, as a fork does, whose CPU seconds begin at none."""
        self.seen_s = cpu_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.when == "teardown":  # once a test, as asking takes a fiftieth of all the seconds
            now = cpu_s()
            report.user_properties.append((PROPERTY, now - self.seen_s))
            self.seen_s = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # The report on a test that ended its worker is made by the process that was called, and has
        # no cost.
        spent_s = dict(report.user_properties).get(PROPERTY, 0.0)
        file = report.nodeid.split("::")[0]
        self.cpu[file] += spent_s
        self.wall[file] += report.duration
        self.tests[report.nodeid] += spent_s

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput[COLLECTING] = self.collecting_s
        else:
            self.cpu[COLLECTING] += self.collecting_s

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.cpu[COLLECTING] += getattr(node, "workeroutput", {}).get(COLLECTING, 0.0)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        wall_s, total_s = time.monotonic() - self.began_s, sum(self.cpu.values())
        terminalreporter.section("costs")
        terminalreporter.line(
            f"{total_s / 60:.1f} CPU minutes, {wall_s / 60:.1f} minutes; the dearest files, in CPU s:"
        )
        by_cost = sorted(self.cpu, key=lambda file: -self.cpu[file])
        for file in by_cost[:10]:
            terminalreporter.line(f"{self.cpu[file]:8.1f}  {file}")
        if self.path:
            tests = sorted(self.tests, key=lambda test: -self.tests[test])
            known = (
                json.loads(Path(self.path).read_text())["tests"]
                if self.added and Path(self.path).exists()
                else {}
            )
            found = {
                "schema": "monograph-test-costs-1",
                "machine": {"type": "cpu", "cores": os.cpu_count(), "system": platform.platform()},
                "cpu_s": round(total_s, 1),
                "wall_s": round(wall_s, 1),
                "files": {
                    file: [round(self.cpu[file], 2), round(self.wall[file], 2)] for file in by_cost
                },
                "tests": known
                | {
                    test: round(self.tests[test], 2)
                    for test in tests
                    if self.added or self.tests[test] >= 1
                },
            }
            Path(self.path).write_text(json.dumps(found, indent=1) + "\n")
