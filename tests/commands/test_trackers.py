"""Run: pytest -m slow tests/commands/test_trackers.py (installs wandb, trackio and MLflow, the
newest: 1.1 GB)

Each tracker's own library finds every number of a run's metrics.jsonl, also after a disk that was
full.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from cli.called import ENVIRONMENT
from commands.forked import CommandServer
from commands.inputs import TINY, over, with_texts
from commands.test_follow import READERS, begun, call, update
from installed import installed
from laws.test_small_disk import IN_A_NAMESPACE, unavailable
from monograph.run.folder import Run

pytestmark = pytest.mark.slow
TRACKERS = ["wandb", "trackio", "mlflow"]
READ = "\nimport json\nprint(json.dumps([rate, points]))"
# In a mount namespace: `out` is a small disk, which then grows.
SMALL = {"wandb": "600k", "trackio": "600k", "mlflow": "2m"}  # MLflow's empty tables take 0.6 MB
FULL = """
follow() { "$0" -W ignore -m monograph follow run --to $1 --out out 2>&1; echo "code $?"; }
mount -t tmpfs -o size=$3 none out && follow $1
mount -o remount,size=99m out && follow $1 && "$0" -c "$2"
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """With the trackers, and with what `follow` itself imports."""
    return str(
        installed(
            tmp_path_factory.mktemp("trackers") / "venv", *TRACKERS, "typer", "rich", "pydantic"
        )
    )


def numbers(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in row.items():
        if isinstance(value, dict):
            yield from numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            yield prefix + name, float(value)


def check(printed: str, run: Path) -> int:
    """The tracker has the file's numbers: those that two rows of an update share, such as `tokens`,
    once or twice.
    """
    rate, points = json.loads(printed)
    rows = Run(run).rows()
    file = [
        (name, row["update"], value)
        for row in rows
        for name, value in numbers(row)
        if name != "update"
    ]
    assert rate == 0.001 and {*map(tuple, points)} == {*file} and len(points) <= len(file)
    return len(file)


@pytest.mark.parametrize("to", TRACKERS)
def test_a_run_s_numbers_are_those_of_its_file(
    to: str, python: str, server: CommandServer, tmp_path: Path
) -> None:
    with_texts(tmp_path)
    settings = over(TINY, "train.eval_every=3", "optim.lr=0.001")
    assert server.run(tmp_path, "train", *settings, "--out", "run", figures=0).code == 0
    said = call(
        tmp_path, "-m", "monograph", "follow", "run", "--to", to, "--out", "out", python=python
    )
    assert said.startswith(f"run: {len(Run(tmp_path / 'run').rows())} rows, up to update 8; ")
    printed = call(tmp_path, "-c", READERS[to] + READ, python=python)
    assert check(printed.splitlines()[-1], tmp_path / "run") > 50


@pytest.mark.skipif(
    unavailable(), reason="no namespace of our own to mount a disk in (unshare --user --mount)"
)
@pytest.mark.parametrize("to", TRACKERS)
def test_a_disk_that_fills_up_is_told_and_the_next_call_sends_all(
    to: str, python: str, tmp_path: Path
) -> None:
    begun(tmp_path / "run").log(*[update(number, 1 / number) for number in range(1, 4001)])
    (tmp_path / "out").mkdir()
    program = [*IN_A_NAMESPACE, "sh", "-c", FULL, python, to, READERS[to] + READ, SMALL[to]]
    environment = ENVIRONMENT | {"WANDB_ERROR_REPORTING": "false"}
    done = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    full, code, sent, again, printed = done.stdout.splitlines()
    assert (
        full.startswith(f"error: {to}: ")
        and full.endswith("; see the disk, then follow again")
        and code == "code 7"
    )
    assert sent.startswith("run: 4,000 rows, up to update 4000; ") and again == "code 0"
    check(printed, tmp_path / "run")
