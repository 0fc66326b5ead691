"""Run: pytest tests/commands/test_profile.py

`monograph profile`: a table, a verdict, a picture and a trace; no run is made, nothing is written
over.
"""

from __future__ import annotations

import json
import os
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest

from commands.forked import CommandServer
from commands.inputs import TINY, over
from monograph.commands.profile import warn_if_busy
from monograph.profiling.intervals import PARTS
from monograph.run.progress import Progress


def test_where_the_time_goes_is_said_and_written_into_a_folder_of_its_own(
    server: CommandServer, here: Path
) -> None:
    done = server.run(
        here, "profile", *over(TINY, "train.micro_batch=2"), "data.packing=padded", "--json"
    )
    assert done.code == 0, done.err
    found = json.loads(done.out.splitlines()[-1])
    assert (
        found["schema"] == "monograph.profile/1"
        and found["micro_steps"] == 2
        and found["compile"] == "none"
    )
    assert list(found["parts"]) == list(PARTS)
    assert sum(part["share"] for part in found["parts"].values()) == pytest.approx(1.0)
    assert sum(part["seconds"] for part in found["parts"].values()) == pytest.approx(
        found["update_s"]
    )
    assert 0 < found["floor_s"] < found["update_s"] and found["matmul_flops_per_s"] > 1e8
    assert found["gaps_s"]["launch"] > 0
    assert found["bound_by"] in {*PARTS, "padding", "nothing"}
    assert all(
        change["predicted_gain"] > 1 and change["saved_s"] > 0 for change in found["changes"]
    )
    for line in ("update ", "best ", "limit ", "change ", "written ", *PARTS):
        assert f"\n{line}" in f"\n{done.out}", line
    # Nothing but what was found: no run, no checkpoint, no lock.
    assert {path.name for path in here.iterdir()} == {"texts", "profiles"}
    [seen] = (here / "profiles").iterdir()
    assert {path.name for path in seen.iterdir()} == {"profile.svg", "report.html", "trace.json"}
    picture = (seen / "profile.svg").read_text()
    assert (
        xml.fromstring(picture).tag.endswith("svg")
        and "host gaps" in picture
        and "prefers-color-scheme" in picture
    )
    names = {
        event["name"] for event in json.loads((seen / "trace.json").read_text())["traceEvents"]
    }
    assert {
        "monograph.step",
        "monograph.data",
        "monograph.optimizer",
        "monograph.head",
        "aten::mm",
    } <= names


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--out", "texts"], 3, "--out texts: holds something already"),
        (["--out", "texts/0.txt"], 3, "--out texts/0.txt: holds something already"),
        (["--out", "texts/0.txt/there"], 3, "texts/0.txt/there"),
        (["train.memory=stream"], 2, "train.memory = stream"),
        (["-"], 2, "in the place of standard input"),
    ],
)
def test_what_is_refused_is_one_line_and_leaves_nothing(
    server: CommandServer, here: Path, arguments: list[str], code: int, words: str
) -> None:
    done = server.run(here, "profile", *TINY, *arguments)
    assert done.code == code and words in done.err.splitlines()[-1] and "Traceback" not in done.err
    assert {path.name for path in here.iterdir()} == {"texts"}


def test_a_run_in_the_place_of_text_is_told_from_it(server: CommandServer, here: Path) -> None:
    (here / "run" / "checkpoints").mkdir(parents=True)
    (here / "run" / "config.toml").touch()
    done = server.run(here, "profile", "run")
    assert (
        done.code == 2
        and "run is a run, not text: `monograph profile run/config.toml` takes its" in done.err
    )
    assert {path.name for path in here.iterdir()} == {"texts", "run"}


def test_a_busy_machine_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for load, said in ((0.0, ""), (1e3, "load 1000 on ")):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        warn_if_busy(Progress())
        assert (said in capsys.readouterr().err) if said else not capsys.readouterr().err


@pytest.mark.slow
def test_a_disk_that_fills_up_is_one_line_and_leaves_nothing(
    server: CommandServer, here: Path
) -> None:
    done = server.run(here, "profile", *TINY, "--out", "seen", file_bytes=100_000)
    assert (
        done.code == 7
        and "seen/trace.json: the trace could not be written whole" in done.err.splitlines()[-1]
    )
    assert not (here / "seen").exists()


@pytest.mark.slow
def test_a_captured_step_is_told_apart(server: CommandServer, here: Path) -> None:
    done = server.run(
        here, "profile", *over(TINY, "train.compile=whole"), "--out", "seen", "--json"
    )
    assert done.code == 0, done.err
    found = json.loads(done.out.splitlines()[-1])
    assert found["compile"] == "whole"
    for part in ("matmul", "attention", "loss head", "optimizer", "elementwise"):
        assert found["parts"][part]["seconds"] > 0, part
    assert not any(change["what"] == "train.compile=whole" for change in found["changes"])
