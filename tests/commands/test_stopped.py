"""Run: pytest tests/commands/test_stopped.py (a run that is stopped by a signal, a full disk or by
diverging).
"""

from __future__ import annotations

import re
import shlex
import signal
import sys
import time
from pathlib import Path

import pytest

from cli.called import monograph_
from commands.forked import PROGRAM, CommandServer
from commands.inputs import LONG, OWN, POISON, SLOW, TINY, newest, over, rows, sound
from monograph import checkpointing

# ---- stopped -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        *(pytest.param(each, marks=pytest.mark.slow) for each in (signal.SIGTERM, signal.SIGHUP)),
    ],
)
def test_a_signal_saves_and_the_printed_command_goes_on(
    number: int, server: CommandServer, here: Path
) -> None:
    (here / "slow.py").write_text(SLOW)
    command = server.start(here, "train", *LONG)
    command.until(lambda: (here / "run/metrics.jsonl").exists())
    command.signal(number)
    done = command.wait()
    assert done.code == 75, done.err
    said = re.fullmatch(r"saved at update (\d+); continue: (.+)", done.err.splitlines()[-1])
    assert said and sound(here / "run") == int(said[1]) == len(rows(here / "run")) < 400
    program, *arguments = shlex.split(said[2].replace(f"{sys.executable} -m monograph", PROGRAM))
    assert program in (PROGRAM, "monograph")  # the latter where it is on the PATH
    again = server.start(here, *arguments, figures=0)
    again.until(lambda: len(rows(here / "run")) > int(said[1]))
    again.signal(number)
    assert again.wait().code == 75
    page = (here / "run/report.html").read_text()
    assert "Training run, stopped ·" in page and "location.reload" not in page
    assert page.count(">continued by<") == 1 and "--resume" in page.split(">continued by<")[1][:200]
    assert [row["update"] for row in rows(here / "run")] == list(range(1, sound(here / "run") + 1))


def test_a_second_interrupt_leaves_at_once(server: CommandServer, here: Path) -> None:
    (here / "slow.py").write_text(SLOW.replace("0.05", "2"))
    command = server.start(here, "train", *LONG, figures=0)
    command.until(lambda: (here / "run/metrics.jsonl").exists())
    # Into the second update: just after the first one the run would end at once by itself.
    time.sleep(0.5)
    # Signals that come too soon after one another are one, on a busy machine above all.
    for _ in range(12):
        command.signal(signal.SIGINT)
        time.sleep(0.1)
    done = command.wait()
    assert done.code == 130 and "Traceback" not in done.err
    assert sound(here / "run") < 200 and server.run(here, "check", "run").code == 0


def test_usr1_saves_and_goes_on(server: CommandServer, here: Path) -> None:
    (here / "slow.py").write_text(SLOW)
    command = server.start(here, "train", *LONG, figures=0)
    command.until(lambda: (here / "run/metrics.jsonl").exists())
    command.signal(signal.SIGUSR1)
    command.until(lambda: newest(here / "run").name > "step-00000000")
    saved = sound(here / "run")
    command.until(lambda: len(rows(here / "run")) > saved)
    command.signal(signal.SIGTERM)
    assert command.wait().code == 75 and 0 < saved < 200


def test_interrupted_before_it_trains(server: CommandServer, here: Path) -> None:
    (here / "slow.py").write_text(
        SLOW.replace("0.05", "0") + "\nimport os\nos.path.exists('go') or time.sleep(60)\n"
    )
    command = server.start(here, "train", *over(LONG, "train.updates=2"), figures=0)
    command.until(lambda: (here / "run/config.toml").exists())
    command.signal(signal.SIGINT)
    done = command.wait()
    assert done.code == 130 and "Traceback" not in done.err
    assert re.fullmatch(
        r"error: interrupted; continue: .*monograph train --resume run", done.err.splitlines()[-1]
    )
    (here / "go").touch()
    assert server.run(here, "train", "--resume", "run", "--json", figures=0).code == 0, (
        "resumable from its start"
    )


def test_a_folder_in_use(
    server: CommandServer,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (here / "slow.py").write_text(SLOW)
    command = server.start(here, "train", *LONG, figures=0)
    command.until(lambda: (here / "run/metrics.jsonl").exists())
    monkeypatch.chdir(here)
    for arguments in (["--resume", "run"], ["texts", "--out", "run"]):
        assert monograph_("train", *arguments) == 8
        assert f"in use by process {command.pid}" in capsys.readouterr().err
    assert monograph_("check", "run") == 0
    command.signal(signal.SIGTERM)
    assert command.wait().code == 75


# ---- short of something --------------------------------------------------------------------------


# As the first large file is written, or the first of all.
@pytest.mark.parametrize(
    "file_bytes", [20_000, *(pytest.param(each, marks=pytest.mark.slow) for each in (2000, 400))]
)
def test_a_full_disk_keeps_the_last_checkpoint(
    file_bytes: int, server: CommandServer, here: Path
) -> None:
    """Files that may not grow: first the checkpoints, then metrics, then the settings do not fit."""
    small = over(TINY, "train.updates=12", "train.keep=2", "model.intermediate_size=8")
    limit = {"file_bytes": file_bytes}
    done = server.run(here, "train", *small, "--out", "run", figures=0, **limit)
    assert done.code == 7 and "Traceback" not in done.err, done.err
    if (here / "run").exists():
        assert server.run(here, "train", "--resume", "run", figures=0).code == 0
    else:
        assert server.run(here, "train", *small, "--out", "run", figures=0).code == 0
    assert sound(here / "run") == 12


def test_a_disk_that_fills_up_during_training(server: CommandServer, here: Path) -> None:
    """The metrics grow until they may not; what was saved before stays, and a resume ends as if
    nothing had been.
    """
    (here / "own.py").write_text(SLOW.replace("0.05", "0"))
    long = [
        *over(OWN, "train.updates=200", "train.save_every=50", "model.init=own.py:build"),
        "--out",
        "run",
    ]
    done = server.run(here, "train", *long, figures=0, file_bytes=40_000)
    assert done.code == 7 and "cannot write run/metrics.jsonl" in done.err.splitlines()[-1], (
        done.err
    )
    assert 0 < sound(here / "run") < 200
    assert (
        server.run(here, "train", "--resume", "run", figures=0).code == 0
        and sound(here / "run") == 200
    )
    assert [row["update"] for row in rows(here / "run")] == list(range(1, 201))


def test_diverged_by_a_poisoned_loss(server: CommandServer, here: Path) -> None:
    (here / "slow.py").write_text(POISON)
    done = server.run(
        here,
        "train",
        *over(OWN, "train.updates=60", "model.init=slow.py:build"),
        "--out",
        "run",
        figures=0,
    )
    assert done.code == 5 and "20 updates in a row" in done.err.splitlines()[-1]
    skipped = [row["skipped"] for row in rows(here / "run")]
    assert skipped[-20:] == [True] * 20 and not any(skipped[:-20])
    assert sound(here / "run") > 0


def test_diverged_by_an_absurd_learning_rate(server: CommandServer, here: Path) -> None:
    arguments = over(
        TINY, "optim.lr=1e6", "optim.schedule=constant", "train.updates=200", "train.save_every=1"
    )
    done = server.run(here, "train", *arguments, "--out", "run", figures=0)
    assert done.code == 5 and "lower optim.lr" in done.err.splitlines()[-1], done.err
    for path in (here / "run/checkpoints").glob("step-*"):
        assert all(
            bool(tensor.isfinite().all()) for tensor in checkpointing.load(path).model.values()
        ), path.name
