"""Run: pytest tests/sweeps/test_results.py (what came of a sweep, read from its runs, and how it is
written)
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from monograph.config import load
from monograph.config.axes import SEED
from monograph.evaluation.significance import tabulate
from monograph.sweeps import results
from monograph.sweeps.folder import Sweep
from monograph.sweeps.spec import members_of

SETTINGS = load(None, {"train.updates": 50}, {})
POINTS: list[dict[str, Any]] = [
    {"optim.lr": lr, "train.seed": seed} for lr in (1e-3, 2e-3, 4e-3) for seed in (0, 1)
]
BITS = [2.0, 2.2, 1.95, 2.11, None, 3.0]


def outcomes(folder: Path, bits: list[float | None]) -> list[results.Outcome]:
    sweep = Sweep.create(folder / "s", SETTINGS, POINTS, None)
    members = members_of(SETTINGS, POINTS)
    with sweep.lock_members(members) as runs:
        for run, value in zip(runs, bits, strict=True):
            run.log(
                {
                    "update": 50,
                    "tokens": 900,
                    "train_loss": 1.0,
                    "skipped": False,
                    "tokens_per_s": 10.0,
                }
            )
            if value is None:
                run.log({"update": 51, "diverged": 31})
            elif not math.isnan(value):
                run.log(
                    {
                        "update": 50,
                        "eval_loss": value / 2,
                        "eval_bits_per_byte": value,
                        "eval_rows": 9,
                    }
                )
                run.log(
                    {
                        "update": 50,
                        "summary": results.make_summary(run.rows(), run, {"dtype": "fp32"}),
                    }
                )
                (run.checkpoints / "step-00000050").mkdir(parents=True)
    return [results.read_outcome(sweep, member) for member in members]


def test_what_each_member_came_to(tmp_path: Path) -> None:
    found = outcomes(tmp_path, BITS)
    assert [each.is_over for each in found] == [True] * 6 and found[4].diverged == 31
    assert [each.score("eval_loss") for each in found] == [1.0, 1.1, 0.975, 1.055, None, 1.5]
    assert (
        found[0].summary
        and found[0].summary["update"] == 50
        and found[0].summary["dtype"] == "fp32"
    )


def test_a_member_that_lost_its_last_checkpoint_is_not_over(tmp_path: Path) -> None:
    """As a run that came to its end and lost it: it is trained once more."""
    [first, *_] = outcomes(tmp_path, BITS)
    (first.run.checkpoints / "step-00000050").rmdir()
    sweep = Sweep.open(tmp_path / "s")
    assert not results.read_outcome(sweep, first.member).is_over


def test_the_table_as_a_person_reads_it(tmp_path: Path) -> None:
    found = outcomes(tmp_path, BITS)
    lines = results.table_lines(results.compare_settings(found), found)
    assert [line.split() for line in lines] == [
        ["lr", "bits/byte"],
        ["0.001", "2.100", "±", "0.100", "tied", "(+0.070)"],
        ["0.002", "2.030", "±", "0.080", "best"],
        ["0.004", "3.000", "1", "of", "2", "diverged", "at", "update", "31"],
    ]
    assert (
        len(
            {
                line.index(value)
                for line, value in zip(lines, ("bits", "2.1", "2.0", "3.0"), strict=True)
            }
        )
        == 1
    )
    assert results.verdict(results.compare_settings(found)) == "lr=0.002"


def test_members_that_have_no_score_yet_are_blank(tmp_path: Path) -> None:
    found = outcomes(tmp_path, [2.0, 2.2, *[math.nan] * 4])
    assert [each.is_over for each in found] == [True, True, False, False, False, False]
    lines = results.table_lines(results.compare_settings(found), found)
    assert lines[1].split() == ["0.001", "2.100", "±", "0.100", "best"] and lines[2].split() == [
        "0.002"
    ]


def test_every_member_diverged(tmp_path: Path) -> None:
    found = outcomes(tmp_path, [None] * 6)
    table = results.compare_settings(found)
    assert results.table_lines(table, found)[1].endswith("diverged at update 31, 31")
    assert "every member diverged" in results.verdict(table)


def test_where_the_loss_says_nothing_about_bytes_it_is_the_score(tmp_path: Path) -> None:
    found = outcomes(tmp_path, [2.0] * 6)
    for each in found:
        each.evaluation["eval_bits_per_byte"] = None
    table = results.compare_settings(found)
    assert table.unit == "nats" and table.values == (1.0,) * 6


def test_as_json(tmp_path: Path) -> None:
    found = outcomes(tmp_path, BITS)
    members, best = results.results_json(found, results.compare_settings(found))
    assert members[2]["knobs"] == POINTS[2] and members[2]["eval_bits_per_byte"] == 1.95
    assert members[4]["diverged"] == 31 and members[4]["checkpoint"] is None
    assert (
        best
        and best["knobs"] == {"optim.lr": 2e-3}
        and best["member"] == 2
        and best["tied"] == [{"optim.lr": 1e-3}]
    )
    assert best["mean"] == pytest.approx(2.03) and best["run"].endswith("members/002")
    assert (
        results.results_json(
            found, results.compare_settings(outcomes(tmp_path / "other", [None] * 6))
        )[1]
        is None
    )


def test_as_it_is_drawn(tmp_path: Path) -> None:
    drawn = results.chart_settings(results.compare_settings(outcomes(tmp_path, BITS)))
    assert [each["standing"] for each in drawn] == ["tied", "best", ""]
    assert drawn[2]["values"] == [None, 3.0] and drawn[0]["knobs"] == {"lr": 1e-3}


def test_losses_count_until_rounding_has_grown() -> None:
    """From the third update on, two ways to train alone differ by more than 1 % themselves."""
    alone = [2.0, 1.9, 1.8, 1.7]
    otherwise = [2.0, 1.901, 1.9, 0.7]
    found = results.compare_losses([2.0, 1.8995, 3.0, 1.7], alone, otherwise)
    assert found.equal and found.bound == pytest.approx(4.0)
    assert found.telling_updates == 2
    assert found.telling_difference == pytest.approx(5e-4)
    assert found.telling_rounding == pytest.approx(1e-3)
    calm = results.compare_losses(alone, alone, [2.0, 1.9, 1.8, 1.701])
    assert (calm.telling_updates, calm.difference) == (4, 0.0)


def test_of_equal_scores_none_is_called_best() -> None:
    """As of rewards that are all zero; with settings, and with seeds alone."""
    for points in (
        [{"optim.lr": 0.1, SEED: 0}, {"optim.lr": 0.2, SEED: 0}],
        [{SEED: 0}, {SEED: 1}],
    ):
        table = tabulate([0.0, 0.0], points, SEED, "reward", higher_is_better=True)
        assert table.none_is_better and table.best is not None
        assert results.verdict(table) == (
            "none: all have the same score; what is called best is member 0's"
        )
        assert "best" not in str(table).replace("none is better", "")
        drawn = results.chart_settings(table)
        assert {each["standing"] for each in drawn} == {""}
    # One survivor is better than one that diverged.
    table = tabulate([0.0, None], [{"optim.lr": 0.1}, {"optim.lr": 0.2}], SEED)
    assert not table.none_is_better
