"""Run: pytest tests/commands/test_stdin.py (text from a pipe: what a run does once the pipe is
gone).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commands.forked import CommandServer
from commands.inputs import OWN, SLOW, TINY, over


@pytest.fixture
def piped(here: Path) -> Path:
    """A file for standard input."""
    path = here / "piped.txt"
    path.write_text("\n".join(path.read_text() for path in sorted((here / "texts").iterdir())))
    return path


def test_every_command_finds_the_text_again(server: CommandServer, here: Path, piped: Path) -> None:
    done = server.run(here, "train", "-", *TINY[1:], "--json", stdin=piped, figures=0)
    assert done.code == 0, done.err
    trained = json.loads(done.out)
    kept = here / trained["run"] / "stdin"
    assert kept.read_bytes() == piped.read_bytes() and str(kept.relative_to(here)) in done.err
    scored = server.run(here, "evaluate", "last", "--json")
    assert json.loads(scored.out.splitlines()[-1])["bits_per_byte"] == pytest.approx(
        trained["eval_bits_per_byte"]
    )
    kept.parent.rename(here / "moved")
    again = server.run(here, "evaluate", "moved", "--json")
    assert json.loads(again.out.splitlines()[-1])["bits_per_byte"] == pytest.approx(
        trained["eval_bits_per_byte"]
    )
    branch = ["train", "--from", "moved", "--out", "branch", "train.updates=1"]
    assert server.run(here, *branch, figures=0).code == 0
    assert 'source = ["moved/stdin"]' in (here / "branch/config.toml").read_text()


def test_a_stopped_run_goes_on_without_the_pipe(
    server: CommandServer, here: Path, piped: Path
) -> None:
    """And a list of sources keeps its order; the rows are those of an uninterrupted run."""
    arguments = ["-", "texts", *over(OWN[1:], "train.updates=4", "model.init=own.py:build")]
    (here / "own.py").write_text(SLOW.replace("0.05", "0"))
    for out in ("once", "twice"):
        assert server.run(here, "train", *arguments, "--out", out, stdin=piped, figures=0).code == 0
    (here / "twice/metrics.jsonl").write_text("")
    for path in (here / "twice/checkpoints").iterdir():
        path.rename(here / path.name)
    (here / "twice").rename(here / "moved")  # the text is still the run's
    assert server.run(here, "train", "--resume", "moved", figures=0).code == 0
    losses = [
        [
            json.loads(line).get("train_loss")
            for line in (here / out / "metrics.jsonl").read_text().splitlines()
        ]
        for out in ("once", "moved")
    ]
    assert losses[0] == losses[1] and any(losses[0])


def test_an_empty_pipe_leaves_nothing(server: CommandServer, here: Path) -> None:
    done = server.run(here, "train", "-", *TINY[1:])
    assert done.code == 3 and "standard input: empty file" in done.err.splitlines()[-1]
    assert not list((here / "runs").iterdir())
