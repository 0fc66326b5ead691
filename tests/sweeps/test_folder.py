"""Run: pytest tests/sweeps/test_folder.py (a sweep on disk: made, taken up, refused)"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from monograph.config import load
from monograph.errors import InputRefused, UsageError
from monograph.run.folder import Run
from monograph.session.record import write_config
from monograph.sweeps.folder import Sweep, seeds_of_best
from monograph.sweeps.spec import Member, members_of

SETTINGS = load(None, {"train.updates": 5}, {})
POINTS: list[dict[str, Any]] = [{"optim.betas": (0.9, 0.95)}, {"optim.betas": (0.8, 0.9)}]


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    return Sweep.create(tmp_path / "s", SETTINGS, POINTS, None)


def test_a_sweep_is_read_back(sweep: Sweep) -> None:
    again = Sweep.open(sweep.run.folder)
    assert again.points == POINTS and again.settings.values() == SETTINGS.values()
    assert members_of(again.settings, again.points)[1].settings.optim.betas == (0.8, 0.9)


def test_the_same_command_goes_on_and_another_is_refused(sweep: Sweep) -> None:
    sweep.record["elapsed_s"] = 7.0
    sweep.write()
    assert Sweep.create(sweep.run.folder, SETTINGS, POINTS, None).record["elapsed_s"] == 7.0
    for settings, points in (
        (SETTINGS, POINTS[:1]),
        (load(None, {"train.updates": 6}, {}), POINTS),
    ):
        with pytest.raises(UsageError, match="holds another sweep"):
            Sweep.create(sweep.run.folder, settings, points, None)


def test_a_folder_that_is_no_sweep(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run")
    write_config(run, SETTINGS)
    with pytest.raises(InputRefused, match="already holds a run"):
        Sweep.create(run.folder, SETTINGS, POINTS, None)
    with pytest.raises(InputRefused, match="is not a sweep"):
        Sweep.open(run.folder)


def test_a_sweep_that_was_killed_before_it_began_is_no_hindrance(sweep: Sweep) -> None:
    sweep.run.config.unlink()
    (sweep.run.folder / "sweep.json").unlink()
    assert Sweep.create(sweep.run.folder, SETTINGS, POINTS[:1], None).points == POINTS[:1]


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"asked": 1, "points": 3}', '{"points": [3]}', "\0", "[" * 10**5]
)
def test_a_damaged_record_is_one_line(sweep: Sweep, text: str) -> None:
    (sweep.run.folder / "sweep.json").write_text(text)
    with pytest.raises(InputRefused, match=r"sweep\.json: damaged"):
        Sweep.open(sweep.run.folder)


@pytest.mark.parametrize(
    "forged",
    [
        {"points": []},
        {"points": [{"bogus": 1}]},
        *(
            {name: value}
            for name in ("elapsed_s", "training_s")
            for value in ("x", None, -1.0, math.nan)
        ),
        {"target": 5},
        {"groups": []},
        *(
            {"groups": [{"rounds": rounds, "updates": 3, "why": ""}]}
            for rounds in ([], [0], [1], [9])
        ),
        {"groups": [{"rounds": [[1]], "updates": 3, "why": ""}]},
        {"least_tokens": "many"},
        {"tokens": 2**70},
    ],
    ids=str,
)
def test_a_forged_record_is_one_line_though_its_digest_is_right(
    sweep: Sweep, forged: dict[str, Any]
) -> None:
    sweep.record |= forged
    sweep.write()
    with pytest.raises(InputRefused, match=r"sweep\.json: damaged"):
        Sweep.open(sweep.run.folder)


def test_where_one_run_is_needed_a_sweep_says_which(sweep: Sweep) -> None:
    with pytest.raises(
        InputRefused, match=r"is a sweep: name one of its runs, such as .*members/000"
    ):
        Run.open(sweep.run.folder)
    with sweep.lock_members(members_of(SETTINGS, POINTS)) as runs:
        for run in runs:
            write_config(run, SETTINGS)
    sweep.link_best(1)
    assert Run.open(sweep.run.folder / "best").config.resolve() == sweep.member(1).config.resolve()
    with pytest.raises(InputRefused, match="such as .*best"):
        Run.open(sweep.run.folder)


def test_members_are_locked_runs(sweep: Sweep) -> None:
    members = [Member(0, {}, SETTINGS), Member(1, {}, SETTINGS)]
    with sweep.lock_members(members) as runs:
        assert [run.folder.name for run in runs] == ["000", "001"]
        with pytest.raises(Exception, match="is in use"), runs[1].lock():
            pass
        write_config(runs[0], SETTINGS)
    with sweep.lock_members(members):  # one that has begun, and one that has not
        pass


def test_the_table_has_a_line_for_each_member(sweep: Sweep) -> None:
    members = [{"knobs": point, "eval_loss": 1.5, "diverged": None} for point in POINTS]
    lines = sweep.write_table(members).read_text().splitlines()
    assert lines == ["member,optim.betas,eval_loss,diverged", "0,0.9 0.95,1.5,", "1,0.8 0.9,1.5,"]


def test_the_seeds_of_the_best_setting(sweep: Sweep) -> None:
    with pytest.raises(InputRefused, match="without a best setting yet"):
        seeds_of_best(sweep.run.folder)
    knobs = [{"optim.lr": lr, "train.seed": seed} for lr in (1e-3, 1e-2) for seed in (4, 5, 6)]
    members = [
        {"knobs": each, "diverged": 3 if each["train.seed"] == 5 else None} for each in knobs
    ]
    sweep.record["result"] = {"best": {"knobs": {"optim.lr": 1e-2}}, "members": members}
    sweep.write()
    assert {seed: run.folder.name for seed, run in seeds_of_best(sweep.run.folder).items()} == {
        4: "003",
        6: "005",
    }


def test_the_wide_run_gets_the_best_knobs(tmp_path: Path) -> None:
    target = load(
        None,
        {
            "model.preset": "micro",
            "optim.transfer": "width",
            "optim.transfer_base": 96,
            "train.tokens_per_update": 2048,
        },
        {},
    )
    narrow = SETTINGS.resolve({"train.tokens_per_update": 512}, "here")
    sweep = Sweep.create(tmp_path / "s", narrow, [{"optim.lr": 1e-2}], target)
    sweep.record["groups"] = [{"updates": 5}]
    told = " ".join(sweep.write_wide({"optim.lr": 1e-2}))
    assert "not carried" in told and "about 2 times the one found; not applied" in told
    wide = load(sweep.wide, {}, {})
    assert (wide.optim.lr, wide.model.preset) == (1e-2, "micro")
    assert (wide.optim.transfer, wide.optim.transfer_base) == ("width", 96)
    assert json.loads((sweep.run.folder / "sweep.json").read_bytes())["target"] == target.to_toml()
