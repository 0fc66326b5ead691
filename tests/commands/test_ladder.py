"""Run: pytest tests/commands/test_ladder.py

`monograph profile --ladder`: a row for each rung, with its numbers or with the reason why it has
none.
"""

from __future__ import annotations

import json
import signal
import time
import xml.etree.ElementTree as xml
from dataclasses import replace
from pathlib import Path

import pytest

from commands.forked import CommandServer
from commands.inputs import TINY, over
from monograph.commands.profile import (
    Climb,
    _climb_rungs,
    _ladder_json,
    _print_ladder,
    rung_objects,
)
from monograph.config import classify, load
from monograph.device import describe
from monograph.run.progress import Progress
from monograph.session.ladder import RUNGS, Ladder, RungMeasurement
from monograph.session.resolve import resolve

NO_COMPILER = {"CXX": "no-such-compiler"}
LADDER = ["profile", "--ladder", *TINY]


def test_without_a_compiler_what_needs_none_is_measured(server: CommandServer, here: Path) -> None:
    done = server.run(here, *LADDER, "--out", "seen", "--json", env=NO_COMPILER)
    assert done.code == 0, done.err
    found = json.loads(done.out.splitlines()[-1])
    assert (
        found["schema"] == "monograph.ladder/2"
        and found["updates"] == 8
        and found["tokens"] == 1024
    )
    rungs = {rung["rung"]: rung for rung in found["rungs"]}
    assert list(rungs) == [rung.name for rung in RUNGS]
    missing = {name: rung["obstacle"] for name, rung in rungs.items() if rung["obstacle"]}
    hindered = {"compiled", "CUDA graphs", "fp8", "offload", "adapters", "streaming"}
    assert hindered <= missing.keys() <= {"bf16", *hindered}
    assert "no-such-compiler" in missing["compiled"]
    there = [rung for rung in found["rungs"] if not rung["obstacle"]]
    for rung in there:
        assert (
            rung["tokens_per_s"] > 0
            and rung["update_s_low"] <= rung["update_s"] <= rung["update_s_high"]
        )
        assert rung["peak_memory_bytes"] > 4 * 4 * found["params"] and rung["compile_s"] == 0
    for one in there[1:]:
        other = rungs[one["over"]]
        assert one["times"] == pytest.approx(one["tokens_per_cpu_s"] / other["tokens_per_cpu_s"])
        assert one["memory_times"] == pytest.approx(
            one["peak_memory_bytes"] / other["peak_memory_bytes"]
        )
    assert {one["over"] for one in there[-3:]} == {"packed"}
    assert rungs["accumulation"]["memory_times"] < 1 and rungs["8-bit state"]["memory_times"] < 1
    # The same text, seed and tokens: the same model, up to rounding.
    losses = [rung["eval_loss"] for rung in there]
    assert rungs["fused loss and optimizer"]["eval_loss"] == pytest.approx(
        rungs["eager"]["eval_loss"], rel=1e-5
    )
    assert max(losses) - min(losses) < 0.01 and 4 < min(losses) < 6
    assert rungs["packed"]["micro_batch"] == 4 and rungs["accumulation"]["micro_batch"] == 1
    shown = [line for line in done.out.split("\n\n")[0].splitlines() if "not here" not in line]
    assert shown.count("each over packed:") == 1 and max(map(len, shown)) <= 100
    for name in rungs:
        assert f"\n{name} " in f"\n{done.out}"
    assert "rung      13 of 13   streaming" in done.err and " left" in done.err
    # Nothing but what was found: no run, no checkpoint, no lock.
    assert {path.name for path in here.iterdir()} == {"texts", "seen"}
    assert {path.name for path in (here / "seen").iterdir()} == {
        "ladder.svg",
        "ladder.json",
        "report.html",
    }
    assert json.loads((here / "seen" / "ladder.json").read_text()) == found
    picture = (here / "seen" / "ladder.svg").read_text()
    assert (
        xml.fromstring(picture).tag.endswith("svg")
        and "not available here" in picture
        and "prefers-color-scheme" in picture
    )


def test_a_busy_machine_changes_no_ratio() -> None:
    """Another program takes two thirds of the clock's time on one rung, and none of the process's
    own.
    """
    quick = RungMeasurement((0.1,) * 8, (0.1,) * 8, 1e3, 4, 1, 1 << 20, 5.0, None, 0.0, ())
    disturbed = replace(quick, seconds=(0.3,) * 8)
    climbs = [Climb(RUNGS[0], "", quick), Climb(RUNGS[1], RUNGS[0].name, disturbed)]
    assert [rung_objects(climbs, timed)[1]["times"] for timed in ("cpu", "wall")] == pytest.approx(
        [1.0, 1 / 3]
    )


@pytest.mark.slow
def test_without_held_out_text_the_loss_is_the_trainings(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the first rung; the others are as if there were no such machine."""
    monkeypatch.chdir(here)
    settings = load(*classify(over(TINY, "data.held_out=0", "train.precision=fp32"))[:2])
    ladder = Ladder.of(resolve(settings, describe()), here / "seen", Progress())
    monkeypatch.setattr(Ladder, "obstacle", lambda self, way, rung: "no" if rung.fields else None)
    found = _ladder_json(ladder, _climb_rungs(ladder, Progress()), here / "seen")
    _print_ladder(found, here / "seen")
    first, (out, error) = found["rungs"][0], capsys.readouterr()
    assert (
        first["eval_loss"] is None
        and 4 < first["train_loss"] < 7
        and f"{first['train_loss']:.3f}" in out
    )
    assert (
        "train.compile, train.precision: ignored, since the rungs set this themselves"
        in " ".join(error.split())
    )


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_leaves_nothing(
    sent: signal.Signals, code: int, server: CommandServer, here: Path
) -> None:
    command = server.start(here, *LADDER, env=NO_COMPILER)
    command.until(lambda: (here / "profiles").exists())
    time.sleep(0.1)
    command.signal(sent)
    done = command.wait()
    assert done.code == code and "Traceback" not in done.err
    assert {path.name for path in here.iterdir()} == {"texts"}


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--out", "texts"], 3, "--out texts: holds something already"),
        (["train.memory=stream"], 2, "train.memory = stream"),
        (["-"], 2, "in the place of standard input"),
        (
            ["optim.name=muon", "optim.state=bf16", "optim.master_weights=false"],
            2,
            "a ladder begins in fp32",
        ),
    ],
)
def test_what_is_refused_is_one_line_and_leaves_nothing(
    server: CommandServer, here: Path, arguments: list[str], code: int, words: str
) -> None:
    settings = over(
        LADDER, *(["train.precision=bf16"] if "optim.master_weights=false" in arguments else [])
    )
    done = server.run(here, *settings, *arguments, env=NO_COMPILER)
    assert done.code == code and words in done.err.splitlines()[-1] and "Traceback" not in done.err
    assert {path.name for path in here.iterdir()} == {"texts"}


def test_a_disk_that_fills_up_is_one_line_and_leaves_nothing(
    server: CommandServer, here: Path
) -> None:
    done = server.run(here, *LADDER, "--out", "seen", env=NO_COMPILER, file_bytes=5_000)
    assert done.code == 7 and "written" in done.err.splitlines()[-1]
    assert not (here / "seen").exists()
