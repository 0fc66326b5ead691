"""Run: pytest tests/commands/test_exit_codes.py (every exit code of the contract, as a person's
shell sees it).
"""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import monograph
from commands.forked import PROGRAM, CommandServer, Done
from commands.inputs import LONG, ONCE, OWN, POISON, SLOW, TINY, over, sound, with_texts

DOCS = Path(__file__).parents[2] / "docs" / "errors.md"
OWN_MODULE = [*over(OWN, "train.updates=60", "model.init=slow.py:build"), "--out", "own"]


def done(server: CommandServer, here: Path) -> Done:
    return server.run(here, "train", *ONCE, "--out", "run", figures=0)


def bug(server: CommandServer, here: Path) -> Done:
    # In our own code, for what a module of the user's raises is not ours; divmod has no line that
    # is the module's.
    breaking = "import functools\nfrom monograph.session import reporting\n"
    breaking += "reporting.Reporter.end = functools.partial(divmod, 1)\n"
    (here / "slow.py").write_text(breaking + SLOW.replace("0.05", "0"))
    return server.run(here, "train", *over(OWN_MODULE, "train.updates=1"), figures=0)


def usage(server: CommandServer, here: Path) -> Done:
    return server.run(here, "train", "train.lrr=1")


def refused(server: CommandServer, here: Path) -> Done:
    return server.run(here, "evaluate", "nowhere")


def no_checkpoint(server: CommandServer, here: Path) -> Done:
    done(server, here)
    for path in (here / "run" / "checkpoints").rglob("optimizer.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    return server.run(here, "generate", "run", "alpha")


def diverged(server: CommandServer, here: Path) -> Done:
    (here / "slow.py").write_text(POISON)
    return server.run(here, "train", *OWN_MODULE, figures=0)


def out_of_memory(server: CommandServer, here: Path) -> Done:
    (here / "slow.py").write_text(
        SLOW.replace("time.sleep(0.05)", "raise torch.OutOfMemoryError('out of memory')")
    )
    return server.run(here, "train", *OWN_MODULE, figures=0)


def disk_full(server: CommandServer, here: Path) -> Done:
    return server.run(here, "train", *TINY, "--out", "run", figures=0, file_bytes=400)


def in_use(server: CommandServer, here: Path) -> Done:
    done(server, here)
    with (here / "run" / "run.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return server.run(here, "train", "--resume", "run")


def stopped(server: CommandServer, here: Path) -> Done:
    (here / "slow.py").write_text(SLOW)
    command = server.start(here, "train", *LONG, figures=0)
    command.until(lambda: (here / "run/metrics.jsonl").exists())
    command.signal(signal.SIGTERM)
    return command.wait()


def interrupted_twice(server: CommandServer, here: Path) -> Done:
    (here / "slow.py").write_text(SLOW.replace("0.05", "2"))
    command = server.start(here, "train", *LONG, figures=0)
    command.until(lambda: (here / "run/metrics.jsonl").exists())
    time.sleep(0.5)
    for _ in range(12):
        command.signal(signal.SIGINT)
        time.sleep(0.1)
    return command.wait()


def terminated(server: CommandServer, here: Path) -> Done:
    command = server.start(here, "profile", "--ladder", *TINY, env={"CXX": "no-such-compiler"})
    command.until(lambda: (here / "profiles").exists())
    time.sleep(0.1)
    command.signal(signal.SIGTERM)
    return command.wait()


def reader_gone(server: CommandServer, here: Path) -> Done:
    return server.run(here, "data", "show", *TINY, reader=0)


CODES: dict[int, Callable[[CommandServer, Path], Done]] = {
    0: done, 1: bug, 2: usage, 3: refused, 4: no_checkpoint, 5: diverged, 6: out_of_memory, 7: disk_full, 8: in_use,
    75: stopped, 130: interrupted_twice, 141: reader_gone, 143: terminated,
}  # fmt: skip
# The last line of others that fail begins with "error: ".
SAID = {1: "bug: TypeError", 75: "saved at update"}


def test_every_code_of_the_contract(server: CommandServer, tmp_path: Path) -> None:
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", DOCS.read_text(), re.M)}
    assert listed == CODES.keys(), "docs/errors.md lists others than are tested here"
    for code, way in CODES.items():
        (tmp_path / str(code)).mkdir()
        ended = way(server, with_texts(tmp_path / str(code)))
        last = (ended.err.splitlines() or [""])[-1]
        assert ended.code == code and "Traceback" not in ended.err, (code, ended)
        assert code in (0, 130, 141) or last.startswith(SAID.get(code, "error: ")), (
            code,
            ended.err,
        )
    assert sound(tmp_path / "5" / "own") > 0 and sound(tmp_path / "75" / "run") > 0


@pytest.mark.slow
def test_a_shell_sees_the_same(tmp_path: Path) -> None:
    """A new process as a person starts it."""
    here = tmp_path
    (here / "texts").mkdir()
    program = f"{shlex.quote(sys.executable)} -m monograph"
    script = f"{program} check nowhere; echo $?; {program} train no.key=1; echo $?; {program} --version >&2; echo $?"
    environment = os.environ | {"PYTHONPATH": str(Path(monograph.__file__).parents[1])}
    shell = subprocess.run(
        ["sh", "-c", script], cwd=here, env=environment, capture_output=True, text=True
    )
    assert shell.stdout.split() == ["3", "2", "0"], shell
    errors = [line for line in shell.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 2 and "nowhere is not a run" in errors[0] and PROGRAM not in shell.stderr
