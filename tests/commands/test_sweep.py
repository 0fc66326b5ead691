"""Run: pytest tests/commands/test_sweep.py (sweep and compare, as typed; killed, stopped, gone on
with)
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
import shlex
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from commands.forked import CommandServer
from commands.inputs import TINY, over, rows, sound, with_texts
from monograph import checkpointing

AXES = ["optim.lr=log:1e-3..1e-1:3", "train.seed=0,1"]
SHORT = over(TINY, "train.updates=20", "train.save_every=10", "optim.name=adamw")
UPDATES = 30
LONG = [*over(SHORT, f"train.updates={UPDATES}", "train.save_every=10"), *AXES, "--out", "s"]
RESULT = "schema run measure members best advice wall_s tokens_per_s"
MEMBER = (
    "knobs eval_loss eval_bits_per_byte train_loss diverged stopped win_probability run checkpoint"
)
PRUNED = [
    *over(SHORT, "train.updates=24", "train.save_every=9"),
    "optim.lr=1e-4,2e-2,3e-2",
    "train.seed=0,1",
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, server: CommandServer) -> Path:
    """A folder with a sweep in it that came to its end."""
    folder = with_texts(tmp_path_factory.mktemp("sweep"))
    done = server.run(folder, "sweep", *SHORT, *AXES, "--json", figures=1)
    assert done.code == 0, done.err
    (folder / "out").write_text(done.out)
    (folder / "err").write_text(done.err)
    return folder


def result(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text.splitlines()[-1])
    return found


def test_a_sweep_says_what_it_does_and_what_came_of_it(place: Path) -> None:
    said, found = (place / "err").read_text(), result((place / "out").read_text())
    assert (
        "plan      20 updates of 128 tokens = 2.56 k each; 6 members" in said
        and "measured at 1, 6" in said
    )
    assert "lr      bits/byte" in said and re.search(r"0\.1 +\d\.\d+ ± \d\.\d+   best", said)
    assert (
        "\nbest      lr=0.1\n" in said
        and "\nadvice    0.1 is the largest lr that this sweep tried" in said
    )
    assert "monograph train --from last/best --minutes 5" in said.replace(
        f"{sys.executable} -m ", ""
    )
    assert list(found) == RESULT.split() and found["schema"] == "monograph.sweep/1"
    assert [list(member) for member in found["members"]] == [MEMBER.split()] * 6
    knobs = [
        (member["knobs"]["optim.lr"], member["knobs"]["train.seed"]) for member in found["members"]
    ]
    assert knobs == [(lr, seed) for lr in (1e-3, 1e-2, 1e-1) for seed in (0, 1)]
    assert found["best"]["knobs"] == {"optim.lr": 0.1} and found["tokens_per_s"] > 0
    run = place / found["run"]
    assert json.loads((run / "sweep.json").read_text())["result"] == found
    table = list(csv.DictReader((run / "sweep.csv").read_text().splitlines()))
    assert [float(row["optim.lr"]) for row in table] == [lr for lr, _ in knobs]
    assert {path.name for path in (run / "figures").iterdir()} == {"against_lr.png", "curves.png"}
    page = (run / "report.html").read_text()
    assert "<svg" in page and "<td>monograph sweep " in page


@pytest.mark.slow
def test_its_advice_runs_as_printed(place: Path, server: CommandServer) -> None:
    """The best of three rates is the last one: the command that is printed trains that and two
    above it.
    """
    found, said = result((place / "out").read_text()), (place / "err").read_text()
    command = found["advice"][0]["command"]
    assert (
        found["advice"][0]["text"].endswith("Go on there.")
        and command.removeprefix("monograph ") in said
    )
    done = server.run(place, *shlex.split(command)[1:], "--out", "beyond", "--json", figures=0)
    assert done.code == 0, done.err
    assert {member["knobs"]["optim.lr"] for member in result(done.out)["members"]} == {
        0.1,
        1.0,
        10.0,
    }


def test_members_are_ordinary_runs(place: Path, server: CommandServer) -> None:
    found = result((place / "out").read_text())
    best, member = found["best"], found["members"][found["best"]["member"]]
    scores = result(server.run(place, "evaluate", "last/best", "--json").out)
    assert scores["bits_per_byte"] == pytest.approx(member["eval_bits_per_byte"], rel=1e-6)
    assert server.run(place, "generate", "last/best", "alpha ", "--max-tokens", "4").code == 0
    assert server.run(place, "check", best["run"]).code == 0
    assert server.run(place, "export", best["run"], "--to", "hf").code == 0
    again = server.run(place, "train", "--resume", best["run"], figures=0)
    assert again.code == 0 and "has already finished, after 20 updates" in again.err
    branch = server.run(
        place,
        "train",
        "--from",
        f"{found['run']}/members/003",
        "train.updates=4",
        "--out",
        "b",
        figures=0,
    )
    assert branch.code == 0 and sound(place / "b") == 4, branch.err


def test_a_member_is_the_run_that_train_makes_of_its_config(
    place: Path, server: CommandServer
) -> None:
    """Law 5 at the level of the command: fp32, uncompiled; six members in one graph against one run
    alone.
    """
    folder = place / result((place / "out").read_text())["run"] / "members" / "003"
    done = server.run(
        place, "train", str(folder / "config.toml"), "texts", "--out", "solo", "--json", figures=0
    )
    assert done.code == 0, done.err
    ours, alone = rows(folder), rows(place / "solo")
    for key in ("update", "tokens", "lr", "skipped"):
        assert [row[key] for row in ours] == [row[key] for row in alone]
    assert [row["train_loss"] for row in ours] == pytest.approx(
        [row["train_loss"] for row in alone], rel=1e-5
    )
    assert result(done.out)["eval_loss"] == pytest.approx(
        rows(folder, "eval_loss")[-1]["eval_loss"], rel=1e-5
    )


def test_a_member_is_verified_against_itself_alone(place: Path, server: CommandServer) -> None:
    done = server.run(place, "sweep", "--verify", "3", "--json", figures=0)
    assert done.code == 0, done.err
    whole = result(done.out)
    found = whole["verify"]
    record = json.loads((place / whole["run"] / "sweep.json").read_text())
    assert record["result"] == whole
    assert (
        found["equal"] and found["updates"] == 20 and found["difference"] <= found["bound"] < 1e-2
    )
    said = " ".join(done.err.split())
    assert "member 3 against the same run alone, the training losses of 20 updates in " in said


def test_a_member_that_is_not_itself_alone_ends_with_1(place: Path, server: CommandServer) -> None:
    """One loss of many is another, as if the graph of all had computed it so."""
    shutil.copytree(place / result((place / "out").read_text())["run"], place / "odd")
    metrics = place / "odd/members/003/metrics.jsonl"
    before = metrics.stat().st_size
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    next(line for line in lines if line["update"] == 7)["train_loss"] += 0.25
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    newest = max((metrics.parent / "checkpoints").iterdir())
    saved = checkpointing.load(newest)
    offset = saved.state["metrics_offset"] + metrics.stat().st_size - before
    sealed = {
        "metrics_offset": offset,
        "metrics_sha256": hashlib.sha256(metrics.read_bytes()[:offset]).hexdigest(),
    }
    checkpointing.save(newest.parent, replace(saved, state={**saved.state, **sealed}))
    done = server.run(place, "sweep", "--out", "odd", "--verify", "3", "--json", figures=0)
    assert done.code == 1, done.err
    found = result(done.out)["verify"]
    assert found["equal"] is False and found["bound"] < found["difference"] == pytest.approx(
        0.25, abs=1e-3
    )
    assert re.search(r"largest difference 0\.25, beyond \d", " ".join(done.err.split()))
    assert server.run(place, "sweep", "--out", "odd", "--verify", "2", figures=0).code == 0


def test_the_same_command_again_changes_nothing(place: Path, server: CommandServer) -> None:
    found = result((place / "out").read_text())
    done = server.run(place, "sweep", "--out", found["run"], "--json", figures=0)
    assert done.code == 0 and result(done.out)["members"] == found["members"]
    assert "data  " not in done.err, "no text is read"
    done = server.run(place, "sweep", *SHORT, "optim.lr=1e-3,1e-2", "--out", found["run"])
    assert done.code == 2 and "holds another sweep" in done.err


def test_metrics_of_a_member_that_were_altered_are_no_result(
    place: Path, server: CommandServer
) -> None:
    [sweep] = (place / "runs").iterdir()
    metrics, before = sweep / "members/002/metrics.jsonl", (sweep / "sweep.json").read_bytes()
    kept = metrics.read_bytes()
    metrics.write_bytes(re.sub(rb'"train_loss": \d', b'"train_loss": 1', kept, count=1))
    done = server.run(place, "sweep", "--out", str(sweep))
    assert done.code == 3 and f"{metrics}: expected rows of sha256" in done.err.splitlines()[-1], (
        done.err
    )
    metrics.write_bytes(kept)
    assert (sweep / "sweep.json").read_bytes() == before


def test_a_sweep_is_no_run(place: Path, server: CommandServer) -> None:
    for command in (
        ["generate", "last", "a"],
        ["train", "--from", "last"],
        ["evaluate", "last"],
        ["check", "last"],
    ):
        done = server.run(place, *command)
        assert (
            done.code == 3 and "is a sweep: name one of its runs, such as last/best" in done.err
        ), done.err


@pytest.mark.slow
def test_killed_and_gone_on_with_is_uninterrupted(server: CommandServer, here: Path) -> None:
    """Law 10: killed in mid-air, and the members' metrics and weights are the bits of a sweep that
    was not.
    """
    command = server.start(here, "sweep", *LONG, figures=0)
    command.until(lambda: any((here / "s/members/005/checkpoints").glob("step-000000[1-9]*")))
    command.signal(signal.SIGKILL)
    assert command.wait().signal == signal.SIGKILL
    done = server.run(here, "sweep", *LONG, "--json", figures=0)
    assert done.code == 0, done.err
    whole = here / "whole"
    whole.mkdir()
    for name in ("sweep.json", "config.toml", "run.lock"):  # so that as many train at once
        shutil.copy(here / "s" / name, whole)
    assert server.run(here, "sweep", "--out", "whole", figures=0).code == 0
    for index in range(6):
        one, other = (here / name / "members" / f"{index:03d}" for name in ("s", "whole"))
        kept = [
            [(row["update"], row["train_loss"], row["lr"]) for row in rows(run)]
            for run in (one, other)
        ]
        assert kept[0] == kept[1] and len(kept[0]) == UPDATES
        files = [
            (run / f"checkpoints/step-{UPDATES:08}/model.safetensors").read_bytes()
            for run in (one, other)
        ]
        assert files[0] == files[1]


def weights_and_losses(member: Path) -> tuple[bytes, list[tuple[int, float]]]:
    weights = (max((member / "checkpoints").iterdir()) / "model.safetensors").read_bytes()
    return weights, [(row["update"], row["train_loss"]) for row in rows(member)]


def test_members_that_cannot_win_are_stopped_and_change_no_other(
    server: CommandServer, here: Path
) -> None:
    """The others have the bits of a sweep in which none is stopped."""
    done = server.run(
        here, "sweep", *PRUNED, "--prune", "0.2", "--out", "s", "--json", figures=0, at_once=1
    )
    assert done.code == 0, done.err
    assert "prune     members that can hardly win are stopped after update 6 or 12" in done.err
    found = result(done.out)
    stopped = [member["stopped"] for member in found["members"]]
    assert stopped[0] == stopped[1] in (6, 12) and None in stopped
    assert re.search(
        r"0\.0001 +\d\.\d+ ± \d\.\d+ +stopped at update \d+: best with P < 0\.\d", done.err
    )
    assert "is among them with a probability of at most 20 %" in " ".join(done.err.split())
    assert [row["update"] for row in rows(here / "s/members/000")] == list(range(1, stopped[0] + 1))
    assert server.run(here, "sweep", *PRUNED, "--out", "whole", figures=0, at_once=1).code == 0
    for index, update in enumerate(stopped):
        if update is None:
            one, other = (here / name / "members" / f"{index:03d}" for name in ("s", "whole"))
            assert weights_and_losses(one) == weights_and_losses(other)
    again = server.run(here, "sweep", "--out", "s", "--prune", "0.3", figures=0)
    assert again.code == 2 and "s was begun with --prune 0.2, and goes on so" in again.err
    again = server.run(here, "sweep", "--out", "s", "--json", figures=0)
    assert again.code == 0 and result(again.out)["members"] == found["members"]


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["stopped", "after"])
def test_killed_where_members_are_stopped_and_gone_on_with(
    server: CommandServer, here: Path, moment: str
) -> None:
    """Law 10: between the rows that say so, or soon after them."""
    command = server.start(
        here, "sweep", *PRUNED, "--prune", "0.2", "--out", "s", figures=0, at_once=1
    )

    def is_reached() -> bool:
        if moment == "stopped":
            metrics = here / "s/members/000/metrics.jsonl"
            return metrics.exists() and '"stopped"' in metrics.read_text()
        return any((here / "s/members/005/checkpoints").glob("step-0000001[89]"))

    command.until(is_reached)
    command.signal(signal.SIGKILL)
    assert command.wait().signal == signal.SIGKILL
    done = server.run(here, "sweep", "--out", "s", "--json", figures=0)
    assert done.code == 0, done.err
    whole = server.run(
        here, "sweep", *PRUNED, "--prune", "0.2", "--out", "whole", "--json", figures=0, at_once=1
    )
    pairs = zip(result(done.out)["members"], result(whole.out)["members"], strict=True)
    for index, (ours, theirs) in enumerate(pairs):
        assert ours["stopped"] == theirs["stopped"]
        assert ours["win_probability"] == theirs["win_probability"]
        one, other = (here / name / "members" / f"{index:03d}" for name in ("s", "whole"))
        assert weights_and_losses(one) == weights_and_losses(other)


def test_members_whose_checkpoints_are_gone_begin_anew_and_it_is_said(
    server: CommandServer, here: Path
) -> None:
    assert (
        server.run(
            here,
            "sweep",
            *over(SHORT, "train.updates=2"),
            "train.seed=0,1",
            "--out",
            "s",
            figures=0,
        ).code
        == 0
    )
    shutil.rmtree(here / "s/members/001/checkpoints")
    done = server.run(here, "sweep", "--out", "s", "--verify", "0", figures=0)
    assert (
        done.code == 0
        and "warning   no update of which every member has a sound checkpoint" in done.err
    ), done.err
    assert (
        "verify    1 of 2 members are not trained to the end: the sweep goes on first" in done.err
    )


def test_a_signal_saves_and_the_printed_command_goes_on(server: CommandServer, here: Path) -> None:
    command = server.start(here, "sweep", *LONG, figures=0)
    command.until(lambda: (here / "s/members/005/metrics.jsonl").exists())
    command.signal(signal.SIGINT)
    done = command.wait()
    assert done.code == 75, done.err
    said = re.fullmatch(
        rf"saved at update (\d+) of {UPDATES}; continue: (.+)", done.err.splitlines()[-1]
    )
    # On a busy machine several rounds may pay, and then members of earlier ones have ended.
    assert said and {sound(here / f"s/members/{index:03d}") for index in range(6)} - {UPDATES} <= {
        int(said[1])
    }
    page = (here / "s/report.html").read_text()
    assert (
        "Sweep, stopped ·" in page
        and " of 6 members have finished." in page
        and "location.reload" not in page
    )
    assert "stopped after 0:" in done.err and "left" not in done.err.splitlines()[-2]
    _, again = said[2].split("monograph ")
    done = server.run(here, *shlex.split(again), figures=0)
    assert done.code == 0 and "best" in done.err and re.search(r"^  100 % ", done.err, re.M), (
        done.err
    )
    assert [row["update"] for row in rows(here / "s/members/004")] == list(range(1, UPDATES + 1))


@pytest.mark.slow
def test_a_member_that_diverges_is_named_and_touches_no_other(
    server: CommandServer, here: Path
) -> None:
    fewer = over(SHORT, "train.updates=40", "optim.lr=1e-2,1e30", "train.seed=0,1")
    done = server.run(here, "sweep", *fewer, "--out", "s", "--json", figures=0)
    assert done.code == 0, done.err
    found = result(done.out)
    lost = [member["diverged"] for member in found["members"]]
    assert lost[:2] == [None, None] and lost[2] == lost[3] and lost[2] is not None and lost[2] < 5
    assert f"1e+30   diverged        diverged at update {lost[2]}, {lost[3]}" in done.err
    assert found["best"]["knobs"] == {"optim.lr": 1e-2} and found["best"]["tied"] == []
    tame = [each.replace("1e30", "2e-2") for each in fewer]
    assert server.run(here, "sweep", *tame, "--out", "t", figures=0).code == 0
    for index in (0, 1):
        pair = [
            [row["train_loss"] for row in rows(here / name / f"members/00{index}")]
            for name in ("s", "t")
        ]
        assert pair[0] == pytest.approx(pair[1], rel=1e-5), "as beside a member that learns"
    again = server.run(here, "sweep", "--out", "s", "--json", figures=0)
    assert again.code == 0 and result(again.out)["members"] == found["members"]


def test_a_member_that_diverges_in_a_short_run_is_named_too(
    server: CommandServer, here: Path
) -> None:
    """In less updates than are waited for in a long one, at once with others and alone."""
    few = over(SHORT, "train.updates=6")
    done = server.run(
        here,
        "sweep",
        *few,
        "optim.lr=1e-2,1e30",
        "train.seed=0,1",
        "--out",
        "s",
        "--json",
        figures=0,
    )
    assert done.code == 0, done.err
    found = result(done.out)
    assert [member["diverged"] for member in found["members"]] == [None, None, 0, 0]
    assert "1e+30   diverged        diverged at update 0, 0" in done.err
    assert found["best"]["knobs"] == {"optim.lr": 1e-2} and found["best"]["tied"] == []
    again = server.run(here, "sweep", "--out", "s", "--json", figures=0)
    assert again.code == 0 and result(again.out)["members"] == found["members"]
    done = server.run(
        here, "sweep", *few, "optim.lr=1e30", "train.seed=0,1", "--out", "t", figures=0
    )
    assert done.code == 5 and "every member of t diverged: lower optim.lr" in done.err
    assert re.search(r"^  100 % ", done.err, re.M), "it ends at the end of what it was"


@pytest.mark.slow
def test_settings_that_change_shapes_make_groups(server: CommandServer, here: Path) -> None:
    axes = ["optim.name=adamw,muon", "model.hidden_size=16,32", "train.seed=0,1"]
    few = over(
        [each for each in SHORT if not each.startswith(("optim.name", "model.hidden"))],
        "train.updates=6",
    )
    done = server.run(here, "sweep", *few, *axes, "--out", "s", "--json", figures=0)
    assert done.code == 0, done.err
    assert len(re.findall(r"^plan +name=\w+ hidden_size=\d+: ", done.err, re.MULTILINE)) == 4
    members = result(done.out)["members"]
    assert len(members) == 8 and all(member["diverged"] is None for member in members)
    assert len(re.findall(r"^ +(adamw|muon) +(16|32) ", done.err, re.MULTILINE)) >= 3


def test_compare_by_document_and_by_seed(place: Path, server: CommandServer) -> None:
    found = result((place / "out").read_text())
    runs = [member["run"] for member in found["members"]]
    done = server.run(place, "compare", runs[0], runs[4], "--json")
    assert done.code == 0, done.err
    compared = result(done.out)
    [each] = compared["differences"]
    assert (
        compared["schema"] == "monograph.compare/1"
        and each["paired_by"] == "document"
        and each["is_noise"] is False
    )
    expected = found["members"][4]["eval_bits_per_byte"] - found["members"][0]["eval_bits_per_byte"]
    assert each["difference"] == pytest.approx(expected, rel=1e-5)
    assert f"{runs[4]} is better" in done.out and "+0 % parameters" in done.out
    muon = over(SHORT, "optim.name=muon", "train.updates=2")
    other = server.run(
        place, "sweep", *muon, "optim.lr=0.1", "train.seed=0,1", "--out", "m", figures=0
    )
    assert other.code == 0
    done = server.run(place, "compare", found["run"], "m", "--json")
    assert result(done.out)["differences"][0]["paired_by"] == "seed" and "(2 seeds)" in done.out, (
        done.err
    )


@pytest.mark.parametrize(
    ("typed", "code", "words"),
    [
        (["sweep", *SHORT, "optim.lrr=1,2"], 2, "did you mean optim.lr=1,2?"),
        (["sweep", *SHORT, "optim.lr=,"], 2, "optim.lr: an axis with an empty value"),
        (["sweep", *SHORT, "optim.lr=log:1e-3..:4"], 2, "a range has two ends"),
        (
            ["sweep", *SHORT, "optim.lr=1e-3,0.001"],
            2,
            "there twice, and its members would be equal",
        ),
        (["sweep", *SHORT, "train.minutes=1,2"], 2, "train.minutes cannot be an axis"),
        (["sweep", *SHORT, "data.held_out=0"], 2, "data.held_out is given twice"),
        (
            ["sweep", *over(SHORT, "data.held_out=0"), "train.seed=0,1"],
            2,
            "members are compared on held-out text",
        ),
        (["sweep", *SHORT, "optim.lr=log:1e-3..1e-1"], 2, "--samples N"),
        (["sweep", *SHORT, *AXES, "--samples", "9"], 2, "the axes have 3 points in all"),
        (["sweep", *SHORT, *AXES, "--prune", "2"], 2, "--prune = 2.0: expected a probability"),
        (
            ["sweep", *SHORT, "optim.lr=1e-3,1e-2", "--prune", "0.05"],
            2,
            "give at least two, train.seed",
        ),
        (
            ["sweep", *SHORT, "train.seed=0,1", "--prune", "0.05"],
            2,
            "this sweep has one: give an axis",
        ),
        (["sweep", *SHORT, *AXES, "--verify", "6"], 2, "--verify 6: the sweep has members 0 to 5"),
        (["sweep", "--verify", "0"], 3, "no sweep in runs/ yet"),
        (
            ["sweep", *over(SHORT, "model.num_attention_heads=2,3"), "train.seed=0,1"],
            3,
            "num_attention_heads = 3",
        ),
        (["sweep", "nothere.txt", *AXES], 3, "nothere.txt: no such file or folder"),
        (["compare", "texts"], 2, "compare takes two runs or more"),
        (["compare", "texts", "nothere"], 2, "texts is not a run, so it has no held-out text"),
        (["compare", "nothere", "texts"], 2, "nothere is not a run"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    typed: list[str], code: int, words: str, server: CommandServer, here: Path
) -> None:
    done = server.run(here, *typed)
    last = done.err.splitlines()[-1]
    assert done.code == code and words in last and last.startswith("error: "), done.err
    assert sum(line.startswith("error") for line in done.err.splitlines()) == 1
    assert not [*here.glob("runs/*")]
