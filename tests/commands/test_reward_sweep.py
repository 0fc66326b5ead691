"""Run: pytest tests/commands/test_reward_sweep.py (a sweep of adapters that learn from rewards, as
typed: its results, the best adapters for PEFT, verified, killed and gone on with)
"""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from commands.forked import CommandServer
from commands.inputs import newest, over, rows
from laws.resumed import TIMES, write_inputs
from monograph.run.folder import Run

UPDATES = 6
SETTINGS = [
    "prompts.jsonl", "model.init=base", "lora.rank=2", "rl.reward=letters.py:score", "data.sequence_length=32",
    "rl.prompts=2", "rl.group=4", "rl.max_new_tokens=6", f"train.updates={UPDATES}", "train.compile=none",
    "train.precision=fp32", "train.save_every=2", "data.held_out=0.4",
]  # fmt: skip
AXES = ["optim.lr=1e-3,0.05", "train.seed=0,1"]
# The first time that this function is called in the middle, it ends the process that trains.
DEADLY = """
import os, signal
from pathlib import Path
calls = []
def score(prompt, answer, record):
    calls.append(1)
    if len(calls) == {call} and not Path("was_killed").exists():
        Path("was_killed").touch()
        os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()
    return len(set(answer)) % 3
"""
FAILING = """
calls = []
def score(prompt, answer, record):
    calls.append(1)
    return len(set(answer)) % 3 if len(calls) < 300 else 1 / 0
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, server: CommandServer) -> Path:
    """A folder with a finished sweep of four members."""
    folder = tmp_path_factory.mktemp("rewarded")
    write_inputs(folder)
    done = server.run(
        folder, "sweep", *SETTINGS, *AXES, "--out", "s", "--json", figures=1, at_once=1
    )
    assert done.code == 0, done.err
    (folder / "out").write_text(done.out)
    (folder / "err").write_text(done.err)
    return folder


def result(place: Path) -> Any:
    return json.loads((place / "out").read_text().splitlines()[-1])


def test_what_is_done_is_said_before_it_trains(place: Path) -> None:
    before_training = " ".join((place / "err").read_text().partition("100 %")[0].split())
    assert re.search(
        rf"{UPDATES} updates of 2 prompts, 4 answers each of up to 6 tokens; 4 members, all at once"
        r" \([\d.]+ [KMG]iB; one alone [\d.]+ [KMG]iB\)",
        before_training,
    ), before_training


def test_the_best_setting_has_the_highest_reward(place: Path) -> None:
    found = result(place)
    assert found["measure"] == {
        "key": "eval_reward",
        "unit": "reward",
        "higher_is_better": True,
    }
    rewards = [member["eval_reward"] for member in found["members"]]
    means = [sum(rewards[:2]) / 2, sum(rewards[2:]) / 2]
    assert found["best"]["mean"] == pytest.approx(max(means))
    assert found["best"]["unit"] == "reward" and found["best"]["standard_error"] is not None
    said = (place / "err").read_text()
    assert re.search(r"^members +lr +reward$", said, re.M)
    assert len(re.findall(r"^ +0\.0\d+ +\d\.\d+ ± \d", said, re.M)) == 2
    page = (place / "s/report.html").read_text()
    assert "held-out reward" in page and "bits per byte" not in page
    assert (place / "s/figures/curves.png").exists()


def test_members_are_ordinary_runs(place: Path, server: CommandServer) -> None:
    member = result(place)["members"][3]
    drawn = [row for row in rows(place / member["run"]) if "reward" in row]
    assert len(drawn) == UPDATES and drawn[-1]["tokens"] == sum(r["drawn_tokens"] for r in drawn)
    scored = [row["update"] for row in rows(place / member["run"], "eval_reward")]
    assert scored[0] == 0 and scored[-1] == UPDATES, "as a single run, before the first update too"
    summary = json.loads((place / member["run"] / "metrics.jsonl").read_text().splitlines()[-1])
    assert summary["summary"]["eval_reward"] == member["eval_reward"]
    typed = ["train", "--from", member["run"], "train.updates=2", "--out", "longer"]
    assert server.run(place, *typed, figures=0).code == 0


def test_the_best_member_is_a_folder_for_peft(place: Path, server: CommandServer) -> None:
    folder = result(place)["best"]["adapter"]
    assert folder == "s/adapter" and (place / folder / "adapter_config.json").exists()
    typed = ["generate", "base", "--adapter", f"best={folder}", "alpha", "--max-tokens", "3"]
    assert server.run(place, *typed).code == 0


def test_a_member_is_verified_against_itself_alone(place: Path, server: CommandServer) -> None:
    done = server.run(place, "sweep", "--out", "s", "--verify", "2", "--json", figures=0)
    assert done.code == 0, done.err
    verified = json.loads(done.out.splitlines()[-1])["verify"]
    assert verified["equal"] and verified["updates"] == UPDATES


def test_killed_while_answers_are_scored_and_gone_on_with(
    place: Path, server: CommandServer, tmp_path: Path
) -> None:
    """Law 10, by SIGKILL: metrics and weights are the bits of a sweep that was not killed."""
    for name in ("base", "prompts.jsonl"):
        source = place / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    (tmp_path / "deadly.py").write_text(DEADLY.format(call=350))
    typed = ["sweep", *over(SETTINGS, "rl.reward=deadly.py:score"), *AXES]
    command = server.start(tmp_path, *typed, "--out", "s", figures=0, at_once=1)
    assert command.wait().signal == signal.SIGKILL
    members = [tmp_path / f"s/members/00{index}" for index in range(4)]
    updates = [len([row for row in rows(member) if "reward" in row]) for member in members]
    assert 0 < updates[0] < UPDATES, updates
    done = server.run(tmp_path, *typed, "--out", "s", "--json", figures=0, at_once=1)
    assert done.code == 0, done.err
    done = server.run(tmp_path, *typed, "--out", "whole", figures=0, at_once=1)
    assert done.code == 0, done.err
    for member in members:
        whole = tmp_path / "whole/members" / member.name
        metrics = [
            [{key: value for key, value in row.items() if key not in TIMES} for row in run.rows()]
            for run in (Run(member), Run(whole))
        ]
        # The summaries name the folders.
        assert metrics[0][:-1] == metrics[1][:-1] and len(metrics[0]) > 2 * UPDATES
        weights = [(newest(run) / "model.safetensors").read_bytes() for run in (member, whole)]
        assert weights[0] == weights[1]


def test_a_reward_that_fails_in_the_middle_loses_nothing(
    place: Path, server: CommandServer, tmp_path: Path
) -> None:
    for name in ("base", "prompts.jsonl"):
        source = place / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    (tmp_path / "fails.py").write_text(FAILING)
    typed = over(SETTINGS, "rl.reward=fails.py:score", "train.save_every=100")
    done = server.run(tmp_path, "sweep", *typed, *AXES, "--out", "s", figures=0, at_once=1)
    assert done.code == 3 and "ZeroDivisionError: division by zero" in done.err, done.err
    updates = set()
    for index in range(4):
        member = tmp_path / f"s/members/00{index}"
        trained = max(row["update"] for row in rows(member) if "reward" in row)
        assert newest(member).name == f"step-{trained:08}"
        updates.add(trained)
    assert len(updates) == 1 and 0 < updates.pop() < UPDATES


def test_members_that_cannot_sample_at_once_train_one_after_another(
    place: Path, server: CommandServer
) -> None:
    """Members without adapters: it is said why."""
    typed = [each for each in over(SETTINGS, "train.updates=2") if not each.startswith("lora.")]
    done = server.run(
        place, "sweep", *typed, "optim.lr=1e-3", "train.seed=0,1", "--out", "full", figures=0,
        at_once=1,
    )  # fmt: skip
    assert done.code == 0, done.err
    said = " ".join(done.err.split())
    assert "2 members, one after another: members without adapters each have weights" in said


REFUSED: list[tuple[list[str], int, str]] = [
    (["--prune", "0.1"], 2, "--prune does not go with rl.reward"),
    (["--distill"], 2, "leave out rl.reward"),
    (["rl.group=2,4"], 2, "rl.group cannot be an axis: "),
    (["rl.temperature=0.9,1"], 2, "rl.temperature cannot be an axis"),
    (["rl.updates=1,2"], 2, "rl.updates cannot be an axis: in the same number of updates"),
    (["data.held_out=0"], 2, "data.held_out = 0: members are compared on held-out prompts"),
    (["data.held_out=1e-9"], 3, "nothing is held out"),
    (["rl.kl=none,k2"], 2, "rl.kl = k2: say how strong it is"),
]


@pytest.mark.parametrize(("more", "code", "part"), REFUSED, ids=[each[0][-1] for each in REFUSED])
def test_what_is_refused(
    more: list[str], code: int, part: str, place: Path, server: CommandServer
) -> None:
    given = [each for each in more if "=" in each]
    flags = [each for each in more if "=" not in each]
    done = server.run(place, "sweep", *over([*SETTINGS, *AXES], *given), *flags, "--out", "refused")
    [line] = [each for each in done.err.splitlines() if each.startswith("error")]
    assert done.code == code and part in line, done.err
    assert not list((place / "refused").glob("members/*/checkpoints/*"))


@pytest.mark.slow
def test_an_objective_is_an_axis(place: Path, server: CommandServer) -> None:
    """Each value is a group; a run that is stopped goes on."""
    typed = over(SETTINGS, "train.updates=2", "rl.kl=k2")
    axes = ["rl.advantage=dr_grpo,rloo", "rl.kl_coef=0.01,0.1", "train.seed=0,1"]
    done = server.run(place, "sweep", *typed, *axes, "--out", "axes", "--json", figures=0)
    assert done.code == 0, done.err
    knobs = [member["knobs"] for member in json.loads(done.out.splitlines()[-1])["members"]]
    assert {knob["rl.advantage"] for knob in knobs} == {"dr_grpo", "rloo"} and len(knobs) == 8
    assert (place / "axes/members/000/reference.safetensors").exists()
