"""Run: pytest tests/run/test_metrics_log.py"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from monograph.run.folder import Run
from monograph.run.metrics_log import PATIENCE, MetricsLog, MetricsLogs
from monograph.step import Update


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(tmp_path / "run")


def update(index: int, skipped: int = 0, loss: float = 2.5) -> Update:
    """What the step reports; `skipped` counts from the start."""
    number = torch.tensor
    return Update(
        index,
        number(loss).double(),
        number(7),
        0.1,
        number(1.5).double(),
        number(7 * index),
        number(skipped),
    )


def test_a_row_per_update_with_what_the_caller_adds(run: Run) -> None:
    journal = MetricsLog(run, every=1)
    assert journal.add(update(0), {"wall_s": 3.0})
    assert run.rows() == [
        {
            "update": 1, "tokens": 0, "train_loss": 2.5, "lr": 0.1, "grad_norm": 1.5, "skipped": False, "wall_s": 3.0,
        }
    ]  # fmt: skip


def test_rows_are_written_every_so_often_and_at_a_flush(run: Run) -> None:
    journal = MetricsLog(run, every=3)
    written = [journal.add(update(index), {}) for index in range(7)]
    assert written == [False, False, True, False, False, True, False] and len(run.rows()) == 6
    journal.flush()
    assert [row["update"] for row in run.rows()] == [1, 2, 3, 4, 5, 6, 7]
    journal.flush()
    assert len(run.rows()) == 7


def test_a_loss_that_is_not_finite_is_json_all_the_same(run: Run) -> None:
    MetricsLog(run, every=1).add(update(0, skipped=1, loss=float("nan")), {})
    row = json.loads(run.metrics.read_text())
    assert row["train_loss"] is None and row["skipped"] is True


def test_many_skipped_updates_in_a_row_are_no_accident_and_single_ones_are(run: Run) -> None:
    journal = MetricsLog(run, every=1)
    for index in range(3 * PATIENCE):
        journal.add(update(index, skipped=(index + 1) // 2), {})
        assert not journal.has_diverged
    assert journal.skipped == 3 * PATIENCE // 2
    # The last of those was one of them.
    for index in range(3 * PATIENCE, 4 * PATIENCE - 1):
        assert not journal.has_diverged
        journal.add(update(index, skipped=index + 1 - 3 * PATIENCE // 2), {})
    assert journal.has_diverged and journal.skipped_in_a_row == PATIENCE


@pytest.mark.parametrize("stopped_at", [0, 5, 11, PATIENCE + 9])
def test_a_resumed_journal_counts_on(run: Run, stopped_at: int) -> None:
    """One skipped update at the start, then, after ten, every one: the same end with or without an
    interruption.
    """
    journal, index = MetricsLog(run, every=1), 0
    while not journal.has_diverged:
        if index == stopped_at:
            journal = MetricsLog(run, every=1)
        journal.add(update(index, skipped=1 if index < 10 else index - 8), {})
        index += 1
    assert index == PATIENCE + 10 == journal.last["update"]
    assert journal.skipped == PATIENCE + 1
    assert [row["skipped"] for row in run.rows()] == [True] + [False] * 9 + [True] * PATIENCE


# ---- many at once --------------------------------------------------------------------------------


def together(index: int, skipped: tuple[int, ...], loss: tuple[float, ...]) -> Update:
    """What an engine of several members reports: tensors [N], and a learning rate of each."""
    loss_N, counts_N = torch.tensor(loss, dtype=torch.float64), torch.full((len(loss),), 7)
    rates: Any = tuple(0.1 * (i + 1) for i in range(len(loss)))
    return Update(
        index, loss_N, counts_N, rates, loss_N + 1, counts_N * index, torch.tensor(skipped)
    )


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    return [Run.create(tmp_path / name) for name in "abc"]


def test_each_member_has_rows_of_its_own(runs: list[Run], tmp_path: Path) -> None:
    journals = MetricsLogs(runs, every=2)
    extras: list[dict[str, Any]] = [{"wall_s": 1.0, "of": number} for number in range(3)]
    written = [journals.add(together(i, (0, i, 0), (1.0, 2.0, 3.0)), extras) for i in range(3)]
    assert written == [False, True, False]
    journals.flush()
    journals.flush()
    for index, run in enumerate(runs):
        alone = MetricsLog(Run.create(tmp_path / f"alone-{index}"), every=1)
        for number in range(3):
            alone.add(
                update_of(together(number, (0, number, 0), (1.0, 2.0, 3.0)), index), extras[index]
            )
        assert run.rows() == alone.run.rows(), "the rows that it would have written alone"
    assert [row["skipped"] for row in runs[1].rows()] == [False, True, True]


def update_of(several: Update, index: int) -> Update:
    rates: Any = several.lr
    parts = (several.loss, several.count, several.grad_norm, several.tokens, several.skipped)
    loss, count, norm, tokens, skipped = (part[index] for part in parts)
    return Update(several.index, loss, count, rates[index], norm, tokens, skipped)


def test_a_member_that_diverged_is_told_once_and_written_no_more(runs: list[Run]) -> None:
    journals = MetricsLogs(runs, every=1)
    for index in range(5 + PATIENCE):
        journals.add(together(index, (0, max(0, index - 4), 0), (1.0, 2.0, 3.0)), [{}] * 3)
        assert journals.find_diverged() == ([1] if index == 4 + PATIENCE else [])
    assert journals.divergences == {1: 5}
    journals.add(together(5 + PATIENCE, (0, 1 + PATIENCE, 0), (1.0, 2.0, 3.0)), [{}] * 3)
    assert [run.rows()[-1]["update"] for run in runs] == [6 + PATIENCE, 5 + PATIENCE, 6 + PATIENCE]
    assert runs[1].rows()[-1] == {"update": 5 + PATIENCE, "diverged": 5}
    assert (
        MetricsLogs(runs, every=1).divergences == {1: 5}
        and MetricsLogs(runs, every=1).find_diverged() == []
    )


@pytest.mark.parametrize(
    ("loss", "skips", "lost"),
    [
        (2.0, 6, True),  # nothing was learned in the second half
        (2.0, 5, False),  # a gradient overflows now and then
        (float("nan"), 1, True),  # not even a loss at the end
        (float("nan"), 0, False),  # a window without a target
    ],
)
def test_at_the_end_of_a_run_there_is_no_more_to_wait_for(
    runs: list[Run], loss: float, skips: int, lost: bool
) -> None:
    journals = MetricsLogs(runs[:2], every=1)
    for index in range(12):
        last_ones = max(0, index + 1 - (12 - skips))
        journals.add(together(index, (last_ones, 0), (loss if index == 11 else 2.0, 2.0)), [{}] * 2)
        assert journals.find_diverged() == []
    assert journals.find_diverged(12) == ([0] if lost else []) and journals.find_diverged(12) == []
    assert journals.divergences == ({0: 12 - skips} if lost else {})
    assert ({"update": 12, "diverged": 12 - skips} in runs[0].rows()) == lost


def test_one_model_is_an_ensemble_of_one(runs: list[Run]) -> None:
    journals = MetricsLogs(runs[:1], every=1)
    assert journals.add(update(0), [{}]) and runs[0].rows()[0]["train_loss"] == 2.5
