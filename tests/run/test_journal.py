"""Run: pytest tests/run/test_journal.py"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from monograph.errors import Diverged
from monograph.run.folder import Run
from monograph.run.journal import PATIENCE, Journal
from monograph.step import Update


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(tmp_path / "run")


def update(index: int, skipped: int = 0, loss: float = 2.5) -> Update:
    """What the step reports; `skipped` counts from the start."""
    number = torch.tensor
    return Update(
        index, number(loss).double(), number(7), 0.1, number(1.5).double(), number(7 * index), number(skipped)
    )


def test_a_row_per_update_with_what_the_caller_adds(run: Run) -> None:
    journal = Journal(run, every=1)
    assert journal.add(update(0), {"wall_s": 3.0})
    assert run.rows() == [
        {
            "update": 1, "tokens": 0, "train_loss": 2.5, "lr": 0.1, "grad_norm": 1.5, "skipped": False, "wall_s": 3.0,
        }
    ]  # fmt: skip


def test_rows_are_written_every_so_often_and_at_a_flush(run: Run) -> None:
    journal = Journal(run, every=3)
    written = [journal.add(update(index), {}) for index in range(7)]
    assert written == [False, False, True, False, False, True, False] and len(run.rows()) == 6
    journal.flush()
    assert [row["update"] for row in run.rows()] == [1, 2, 3, 4, 5, 6, 7]
    journal.flush()
    assert len(run.rows()) == 7


def test_a_note_comes_after_the_updates_before_it(run: Run) -> None:
    journal = Journal(run, every=9)
    journal.add(update(0), {})
    journal.note({"update": 1, "eval_loss": 2.0})
    assert ["train_loss" in row for row in run.rows()] == [True, False]


def test_a_loss_that_is_not_finite_is_json_all_the_same(run: Run) -> None:
    Journal(run, every=1).add(update(0, skipped=1, loss=float("nan")), {})
    row = json.loads(run.metrics.read_text())
    assert row["train_loss"] is None and row["skipped"] is True


def test_many_skipped_updates_in_a_row_are_an_end_and_single_ones_are_not(run: Run) -> None:
    journal = Journal(run, every=1)
    for index in range(3 * PATIENCE):
        journal.add(update(index, skipped=(index + 1) // 2), {})
    assert journal.skipped == 3 * PATIENCE // 2
    # The last of those was one of them.
    with pytest.raises(Diverged, match=f"{PATIENCE} updates in a row, up to {4 * PATIENCE - 1}, were skipped"):
        for index in range(3 * PATIENCE, 5 * PATIENCE):
            journal.add(update(index, skipped=index + 1 - 3 * PATIENCE // 2), {})


@pytest.mark.parametrize("stopped_at", [0, 5, 11, PATIENCE + 9])
def test_a_resumed_journal_counts_on(run: Run, stopped_at: int) -> None:
    """One skipped update at the start, then, after ten, every one: the same end with or without an interruption."""
    journal, index = Journal(run, every=1), 0
    with pytest.raises(Diverged) as ended:
        for index in range(100):
            if index == stopped_at:
                journal = Journal(run, every=1)
            journal.add(update(index, skipped=1 if index < 10 else index - 8), {})
    assert index == PATIENCE + 9 and f"up to {PATIENCE + 10}" in str(ended.value)
    assert journal.skipped == PATIENCE + 1
    assert [row["skipped"] for row in run.rows()] == [True] + [False] * 9 + [True] * PATIENCE
