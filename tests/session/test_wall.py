"""Run: pytest tests/session/test_wall.py (train.wall_minutes limits the whole run, preparation and
report counted).
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from laws.resumed import SETTINGS, cut_back, fingerprint, resume, start, write_inputs
from monograph.device import clock
from monograph.errors import UsageError
from monograph.planner.defaults import END_S, seconds_for_end
from monograph.run.progress import RunningStage, silent
from monograph.session import deadline, eager_start, reporting, warmup
from monograph.session.brief import why_uncompiled
from monograph.session.deadline import Deadline
from monograph.session.eager_start import compiled_key, should_begin_eagerly
from monograph.session.reporting import Reporter
from monograph.session.start import Started, _short_time_note, _time_line
from session.test_eager_start import BY_CLOCK, session_of

TOO_LONG = "compiling would take much of the time that train.wall_minutes allows"
CLOCKED = ("after_update", "deadline", "reporting", "session", "start", "update_clock", "warmup")
LENGTHS = {
    "the whole alone": ({}, 88),
    "training is shorter": ({"train.minutes": 0.5}, 23),
    "training is longer": ({"train.minutes": 60}, 88),
    "fewer updates": ({"train.updates": 20}, 20),
    "more updates": ({"train.updates": 1000}, 88),
    "more epochs": ({"train.epochs": 1000}, 88),
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(reporting, "write_report", lambda *_: None)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    write_inputs(tmp_path)
    return tmp_path


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> float:
    """Time stands still, and an update takes a second."""
    now = clock()
    for module in ("session", "warmup", "reporting", "brief", "eager_start", "deadline"):
        monkeypatch.setattr(f"monograph.session.{module}.clock", lambda: now)
    monkeypatch.setattr(warmup, "time_update", lambda session: 1.0)
    monkeypatch.setattr(warmup, "store_seconds", lambda *_: None)
    monkeypatch.setattr("monograph.planner.defaults.most_updates", lambda *_: 10**6)
    return now


@pytest.mark.parametrize("case", LENGTHS)
def test_the_length_is_what_the_time_left_allows(case: str, still: float) -> None:
    """Of 100 s, 5 are for samples and checkpoints, 6 for evaluations, and 1 is for measuring the
    memory.
    """
    given, updates = LENGTHS[case]
    session = session_of(BY_CLOCK | {"train.wall_minutes": 3} | given)
    session.deadline_s = still + 100 + END_S
    warmup.fix_length(session, silent())
    assert session.updates == updates
    # It is the difference of two readings of the clock.
    assert session.budget_s == pytest.approx(30 if given == {"train.minutes": 0.5} else 100)


def test_a_slower_machine_still_ends_in_time(still: float) -> None:
    """Preparation that came after the length was decided takes from the training."""
    session = session_of(BY_CLOCK | {"train.wall_minutes": 3})
    session.deadline_s = still + 100 + END_S
    warmup.fix_length(session, silent())
    session.training_since_s = still - 75.0
    session.deadline_s = still + 8 + END_S  # of the 25 s that were thought to be left
    reporter = Reporter(session, silent())
    reporter.update_s.extend([1.0] * 5)
    reporter.shorten_if_late(75)
    assert session.early_cool_down == [0, 75 + 6], (
        "the last evaluation and measuring the memory take their part"
    )
    session.deadline_s = still + 3.5 + END_S
    session.engine.step.index = 77
    reporter.shorten_if_late(77)
    assert session.early_cool_down == [0, 77 + 2], (
        "slower still: the cool-down goes on, and ends earlier"
    )
    session.deadline_s = still + END_S
    reporter.shorten_if_late(78)
    assert session.early_cool_down == [0, 79], "no time is left"


def test_an_update_that_would_not_end_in_time_is_not_waited_for(still: float) -> None:
    """However early it is: one that takes a minute of the two that are left for all."""
    session = session_of(BY_CLOCK | {"train.wall_minutes": 2})
    session.deadline_s = still + 62 + END_S
    session.plan = replace(session.plan, updates=100)
    session.training_since_s = still - 60
    assert Deadline(session).shorter_length(1, 60.0) == 2
    assert Deadline(session).shorter_length(1, 0.6) == 0, "100 of these are in time"
    assert Deadline(session).shorter_length(99, 60.0) == 0, (
        "the last one is not waited for, and ends no earlier"
    )
    assert Deadline(session).shorter_length(1, 1.0) == 0, "not in time, but it is too early to tell"


def test_the_last_evaluation_takes_at_most_a_fifth_and_what_is_left(
    still: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two minutes, with 10 held-out rows, of which each point of the curve has 4."""
    monkeypatch.setattr(deadline, "CURVE_ROWS", 4)
    session = session_of(BY_CLOCK | {"train.wall_minutes": 2})
    assert len(session.text.held_out) == 10
    slow = Deadline(session, row_s=4.0, sample_s=4.0)
    assert (
        slow.affordable_rows(9.0) is None
        and slow.can_sample_midway
        and slow.has_time_for_samples(1e9)
    ), "without a limit all rows are scored"
    for left_s, row_s, rows in ((100, 4.0, 6), (100, 2.0, None), (20, 4.0, 5), (0, 4.0, 4)):
        session.deadline_s = still + left_s + END_S
        assert Deadline(session, row_s).affordable_rows(9.0) == rows, (left_s, row_s)
    per_row = session.batches.rows_per_window * 3  # a forward pass is a third of an update
    session.deadline_s = still + 100 + END_S
    assert Deadline(session).affordable_rows(4.0 * per_row) == 6, "no row was scored before"
    assert slow.has_time_for_figures
    session.deadline_s = still + 0.4 * END_S
    assert not slow.has_time_for_figures
    session.deadline_s = still + 100 + END_S
    assert not slow.can_sample_midway and Deadline(session, 4.0, 2.0).can_sample_midway
    assert not slow.has_time_for_samples(26) and slow.has_time_for_samples(25)


def test_where_preparation_took_all_the_time_it_is_said(still: float) -> None:
    session = session_of(BY_CLOCK | {"train.wall_minutes": 2})
    window = next(session.open_batches(0))
    session.deadline_s = still
    assert (
        _time_line(session, window, still)
        == "preparation left nothing of 2 min 00 s: one update, then the report"
    )
    session.deadline_s = still + 100
    assert "at most 2 min 00 s in all" in _time_line(session, window, still)


@pytest.mark.parametrize("minutes, said", [(0.2, True), (0.7, False), (None, False)])
def test_a_time_that_hardly_suffices_to_start_and_end_is_noted_before_anything_is_read(
    minutes: float | None, said: bool
) -> None:
    least = _short_time_note(minutes, Started(0.0, 4.0))
    assert (
        least
        == "starting and ending a run takes about 10 s of 12 s; reading the texts comes on top"
    ) == said
    assert bool(least) == said


@pytest.mark.parametrize(("start_s", "limit_s", "expected"), [
    (0.0, 600, END_S), (4.0, 600, 6.0), (16.0, 600, 24.0), (16.0, 30, 7.5),
])  # fmt: skip
def test_the_report_of_a_busy_machine_gets_more_time(
    start_s: float, limit_s: float, expected: float
) -> None:
    assert seconds_for_end(start_s, limit_s) == expected


@pytest.mark.parametrize(("minutes", "compiles"), [(1, False), (30, True)])
def test_compiling_has_to_leave_time_for_training(
    minutes: float, compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if the text were long.
    monkeypatch.setattr("monograph.planner.defaults.most_updates", lambda *_: 10**9)
    session = session_of(BY_CLOCK | {"train.wall_minutes": minutes})
    session.deadline_s = clock() + 60 * minutes
    assert why_uncompiled(session, next(session.open_batches(0)), 1.0) == (
        "" if compiles else TOO_LONG
    )


@pytest.mark.parametrize(("length", "is_cached", "compiles"), [
    ({"train.minutes": 0.5}, False, True), ({"train.updates": 60}, False, False), ({"train.updates": 60}, True, True),
])  # fmt: skip
def test_a_run_that_waits_for_the_compiler_trains_for_longer_than_that_takes(
    length: dict[str, Any], is_cached: bool, compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the clock it trains meanwhile; 60 updates of half a second are worth it if the code is in
    the cache.
    """
    # As if the text were long.
    monkeypatch.setattr("monograph.planner.defaults.most_updates", lambda *_: 10**9)
    monkeypatch.setattr("monograph.session.brief.is_compiled", lambda _: is_cached)
    monkeypatch.setattr("monograph.session.brief._time_one_update", lambda _: 0.5)
    session = session_of(BY_CLOCK | length)
    why = why_uncompiled(session, next(session.open_batches(0)), 1.0)
    assert why == ("" if compiles else "it takes about 30 s, less than compiling")


@pytest.mark.parametrize(("given", "spent_s"), [
    ({"train.minutes": 0.2}, 12), ({"train.updates": 9}, 100), ({"train.minutes": 5}, 100),
])  # fmt: skip
def test_timing_updates_takes_a_share_of_the_time_that_the_run_has(
    given: dict[str, Any], spent_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []
    monkeypatch.setattr(warmup, "clock", lambda: 0.0)
    monkeypatch.setattr("monograph.session.session.clock", lambda: 0.0)
    monkeypatch.setattr(warmup, "seconds_per_call", lambda *found: told.append(found[-1]) or 1.0)
    session = session_of(BY_CLOCK | given)
    session.deadline_s = 100 + END_S
    warmup.time_update(session)
    assert told == [pytest.approx(spent_s)]


def test_a_compiler_that_takes_too_long_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_of(BY_CLOCK | {"train.wall_minutes": 5})
    window = next(session.open_batches(0))
    assert should_begin_eagerly(session, compiled_key(session, window))
    session.deadline_s = clock() + 60 * 5
    assert eager_start.patience_s(session) == pytest.approx(0.5 * (5 * 60 - END_S), abs=5)
    assert [eager_start.patience_for(minutes) for minutes in (0.5, 5, 600)] == [72, 300, 600], (
        "but not for long"
    )
    monkeypatch.setattr(eager_start, "_update_eagerly", lambda *_: False)
    eager_start.begin(session, window, silent(), lambda: None)
    assert session.eager_reason and session.plan.record.settings.train.compile == "none"


@pytest.mark.parametrize(("spent_s", "ends"), [(5.0, False), (7.0, True)])
def test_reading_ends_with_the_time_in_one_line_and_leaves_nothing(
    spent_s: float, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if tokenising had come to its second report after so long."""
    program_start_s = clock() + 100.0
    reading = list[float]()
    monkeypatch.setattr(
        "monograph.session.start.clock", lambda: program_start_s + (spent_s if reading else 4.0)
    )
    report = RunningStage.report
    monkeypatch.setattr(
        RunningStage, "report", lambda *given: reading.append(1.0) or report(*given)
    )
    limited = SETTINGS | {"train.wall_minutes": 0.1, "train.updates": 1}
    if not ends:
        start("run", limited, program_start_s=program_start_s)
        return
    with pytest.raises(
        UsageError,
        match=r"train.wall_minutes = 0.1: .* then came reading \(texts: .*\); give more time",
    ):
        start("run", limited, program_start_s=program_start_s)
    assert not Path("run").exists()


def test_a_run_that_is_limited_is_resumed_to_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that goes on by a millisecond whenever it is looked at.

    By the real one, a busy machine makes fewer updates, and leaves out samples that the resumed run
    then has.
    """
    looks = itertools.count()
    for module in ("commands.train", *(f"session.{each}" for each in CLOCKED)):
        monkeypatch.setattr(f"monograph.{module}.clock", lambda: next(looks) / 1000)
    monkeypatch.setattr(warmup, "time_update", lambda session: 3.0)
    monkeypatch.setattr(reporting, "SAMPLE_TOKENS", 4)
    limited: dict[str, Any] = {
        "train.updates": 500,
        "train.wall_minutes": 1.2,
        "train.save_every": 4,
    }
    start("whole", SETTINGS | limited)
    expected = fingerprint(Path("whole"))
    assert 10 <= int(expected["newest"][5:]) <= 20, "about 60 s of updates of 3 s"
    assert [row["update"] for row in expected["rows"] if "sample" in row] == [3, 9, 18]
    cut_back("whole", "cut", 8)
    resume("cut")
    assert fingerprint(Path("cut")) == expected
