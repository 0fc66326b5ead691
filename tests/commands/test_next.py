"""Run: pytest tests/commands/test_next.py [-m slow] (each command that a run names at its end works
on that run).
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from commands.forked import CommandServer, Done
from commands.inputs import OWN, SLOW, TINY, over
from commands.test_finetune import SHORT as CHATS
from commands.test_finetune import folder_that_chats
from laws.resumed import write_inputs
from monograph.errors import Stopped

BRIEF = ["train.updates=4", "train.compile=none", "train.precision=fp32"]
BASE = ["model.init=base", "data.sequence_length=32", *BRIEF]
REWARDS = [
    "prompts.jsonl", *BASE, "rl.reward=letters.py:score", "rl.prompts=2", "rl.group=2", "rl.max_new_tokens=4",
]  # fmt: skip
RUNS = {
    "texts": ["train", *TINY],
    "a module": ["train", *OWN, "model.init=own.py:build"],
    "conversations": ["train", *over(CHATS, "train.updates=4")],
    "pairs": ["train", "pairs.jsonl", "data.held_out=0.3", "train.tokens_per_update=128", *BASE],
    "labels": [
        "train",
        "labelled.jsonl",
        "data.held_out=0.3",
        "train.tokens_per_update=128",
        *BASE,
    ],
    "rewards": ["train", *REWARDS, "data.held_out=0.5"],
    "adapters": ["train", *OWN, "model.init=base", "lora.rank=2"],
    "a sweep": ["sweep", *over(TINY, "optim.lr=1e-3,1e-2", "train.seed=0,1")],
    "nothing held out": ["train", *over(TINY, "data.held_out=0")],
    "padded": ["train", *TINY, "data.packing=padded"],
    "streamed": ["train", *TINY, "train.memory=stream"],
    "averaged": ["train", *TINY, "optim.ema=0.9"],
    "epochs": ["train", *[each for each in TINY if "updates=" not in each], "train.epochs=1"],
    "a folder of its own": ["train", *TINY, "--out", "mine"],
    "pairs of adapters": [
        "train",
        "pairs.jsonl",
        "train.tokens_per_update=128",
        "lora.rank=2",
        *BASE,
    ],
    "rewards of adapters": ["train", *REWARDS, "lora.rank=2"],
}
# What another kind stands for by day.
AT_NIGHT = {
    "texts", "conversations", "adapters", "labels", "a module", "nothing held out", "padded", "streamed", "averaged",
    "epochs", "a folder of its own", "pairs of adapters", "rewards of adapters", "a sweep",
}  # fmt: skip


@pytest.fixture
def here(tmp_path: Path) -> Path:
    write_inputs(tmp_path)
    (tmp_path / "own.py").write_text(SLOW.replace("0.05", "0"))
    folder_that_chats(tmp_path, "chatml")
    return tmp_path


def following(done: Done) -> list[list[str]]:
    """The arguments of each command that is named at the end of what was printed."""
    lines = done.err.partition("\nnext ")[2].replace("\\\n", "").splitlines()
    named = [line[line.index("monograph ") :] for line in lines if re.search(r"\bmonograph ", line)]
    assert len(named) == len([line for line in lines if line.strip()]) > 0, done.err
    return [shlex.split(line)[1:] for line in named]


def follow(server: CommandServer, here: Path, done: Done, call: str) -> None:
    assert done.code == 0, done.err
    for arguments in following(done):
        # Minutes.
        arguments = ["0.02" if argument in ("5", "30") else argument for argument in arguments]
        again = server.start(here, *arguments, call=call, figures=0).wait()
        opened = again.code == Stopped.exit_code and again.err.endswith("opened\n")
        assert again.code == 0 or opened, (arguments, again.err)


@pytest.mark.slow
def test_a_resumed_run_names_commands_that_open_it(server: CommandServer, here: Path) -> None:
    done = server.run(here, *RUNS["rewards"], figures=0)
    assert done.code == 0, done.err
    [run] = (here / "runs").iterdir()
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(line for line in lines if '"summary"' not in line))
    follow(
        server,
        here,
        server.run(here, "train", "--resume", "last", figures=0),
        "commands.opened:main",
    )


def marked(kinds: set[str]) -> list[object]:
    return [pytest.param(kind, marks=pytest.mark.slow if kind in kinds else ()) for kind in RUNS]


@pytest.mark.parametrize("kind", marked(AT_NIGHT))
def test_each_command_that_a_run_names_opens_that_run(
    kind: str, server: CommandServer, here: Path
) -> None:
    follow(server, here, server.run(here, *RUNS[kind], figures=0), "commands.opened:main")


@pytest.mark.slow
@pytest.mark.parametrize("kind", RUNS)
def test_each_command_that_a_run_names_ends_well(
    kind: str, server: CommandServer, here: Path
) -> None:
    follow(server, here, server.run(here, *RUNS[kind], figures=0), "monograph.cli:main")
