"""Run: pytest tests/laws/test_clock.py (a clock that jumps by a year, back or ahead, changes
nothing).
"""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

import pytest

from laws.resumed import SETTINGS, cut_back, fingerprint, resume, start
from monograph.run.folder import Run

pytestmark = pytest.mark.usefixtures("here")
YEAR_S = 365 * 86_400.0


def let_it_jump(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every time of day that is asked for is a year off, in turns."""
    true_s, ahead = time.time, itertools.cycle([YEAR_S, -YEAR_S])
    monkeypatch.setattr(time, "time", lambda: true_s() + next(ahead))


def test_a_run_and_its_resume_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    start("whole", seldom := SETTINGS | {"train.save_every": 9})
    expected = fingerprint(Path("whole"))
    let_it_jump(monkeypatch)
    start("jumped", seldom)
    assert fingerprint(Path("jumped")) == expected
    cut_back("jumped", "cut", 9)
    for number, path in enumerate(Path("cut").rglob("*")):
        os.utime(path, (number % 2 * 4e9, number % 2 * 4e9))
    resume("cut")
    assert fingerprint(Path("cut")) == expected


def test_the_newest_run_is_the_last_that_was_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    let_it_jump(monkeypatch)
    for number in range(3):
        run = Run.create()
        run.config.write_text("")
        assert Run.open("last").folder == run.folder, number
    assert len({path.name[:4] for path in Path("runs").iterdir()}) == 2, "the years did not jump"
