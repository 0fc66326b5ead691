"""Run: pytest tests/report/test_in_progress.py (the page of what is in progress is written now and
then)
"""

from __future__ import annotations

import pytest

from monograph.errors import DiskFull, InputRefused
from monograph.report import in_progress
from monograph.report.in_progress import PageInProgress


def test_the_page_is_written_again_after_a_while_and_takes_a_hundredth_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, written, cost_s = [100.0], list[float](), [0.1]

    def write(state: str) -> None:
        assert state == "in progress"
        written.append(now[0])
        now[0] += cost_s[0]

    monkeypatch.setattr(in_progress, "clock", lambda: now[0])
    page = PageInProgress(write)
    for second in range(100, 400):
        now[0] = max(now[0], float(second))
        if second == 150:
            cost_s[0] = 1.0
        page.refresh()
    assert written[:3] == [115.0, 131.0, 147.0] and written[3:] == [163.0, 264.0, 365.0]


@pytest.mark.parametrize(
    "error", [DiskFull("full"), OSError(5, "gone"), InputRefused("a row is damaged")]
)
def test_what_is_in_progress_goes_on_without_its_page(error: Exception) -> None:
    def write(state: str) -> None:
        raise error

    PageInProgress(write).write("stopped")
