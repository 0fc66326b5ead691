"""Run: pytest tests/commands/test_named.py (whatever names a model is taken wherever one is)"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import monograph as mono
from commands.forked import CommandServer
from commands.inputs import ONCE, OWN, TINY, over, with_texts
from monograph import checkpointing

NAMES = ("run", "last", "checkpoint", "last/checkpoint", "best", "best.checkpoint", "folder")
COMMANDS = {
    "generate": ["generate", "NAME", "alpha", "--max-tokens", "1"],
    "export": ["export", "NAME", "--to", "out"],
    "evaluate": ["evaluate", "NAME", "--data", "texts"],
    "compare": ["compare", "runs/run", "NAME", "--data", "texts"],
    "check": ["check", "NAME"],
    "train --from": [
        "train",
        *TINY[:1],
        *TINY[2:4],
        "--from",
        "NAME",
        "train.compile=none",
        "train.updates=1",
        "--out",
        "out",
    ],
    "train data.tokenizer": ["train", *ONCE[:1], *ONCE[2:], "data.tokenizer=NAME", "--out", "out"],
    "train model.init": [
        "train",
        *OWN[:1],
        *over(OWN[2:], "train.updates=1"),
        "model.init=NAME",
        "--out",
        "out",
    ],
}
BY_DAY = ("checkpoint",)
BY_NIGHT = tuple(name for name in NAMES if name not in BY_DAY)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory, server: CommandServer) -> dict[str, str]:
    """By what a model can be named, in the folder `here`."""
    here = with_texts(tmp_path_factory.mktemp("named"))
    swept = server.run(
        here, "sweep", *ONCE, "optim.lr=1e-3,2e-3", "--out", "runs/sweep", "--json", figures=0
    )
    assert server.run(here, "train", *TINY, "--out", "runs/run", figures=0).code == 0
    assert server.run(here, "export", "last", "--to", "folder").code == 0
    best = json.loads(swept.out.splitlines()[-1])["best"]["checkpoint"]
    names = (
        "runs/run",
        "last",
        "runs/run/checkpoints/step-00000006",
        "last/checkpoints/step-00000006",
    )
    return dict(zip(NAMES, (*names, "runs/sweep/best", best, "folder"), strict=True)) | {
        "here": str(here)
    }


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "name", [*BY_DAY, *(pytest.param(each, marks=pytest.mark.slow) for each in BY_NIGHT)]
)
def test_each_name_is_taken_by_each_command(
    name: str, command: str, begun: dict[str, str], tmp_path: Path, server: CommandServer
) -> None:
    for each in ("texts", "runs", "folder"):
        (tmp_path / each).symlink_to(Path(begun["here"], each))
    done = server.run(
        tmp_path, *(each.replace("NAME", begun[name]) for each in COMMANDS[command]), figures=0
    )
    assert done.code == 0, done.err


def test_a_checkpoint_that_is_named_is_the_one_that_is_taken(
    begun: dict[str, str], monkeypatch: pytest.MonkeyPatch, server: CommandServer
) -> None:
    here = Path(begun["here"])
    monkeypatch.chdir(here)
    at_6 = checkpointing.load(Path(begun["checkpoint"]))
    model, _ = mono.load(begun["checkpoint"])
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in at_6.model.items())
    assert not torch.equal(mono.load("last")[0].lm_head.weight, model.lm_head.weight)
    begin = [*COMMANDS["train model.init"][:-1], "from-6"]
    done = server.run(
        here, *(each.replace("NAME", begun["last/checkpoint"]) for each in begin), figures=0
    )
    assert (
        done.code == 0
        and 'init = "runs/run/checkpoints/step-00000006"' in Path("from-6/config.toml").read_text()
    )
    done = server.run(
        here,
        "train",
        "--from",
        begun["checkpoint"],
        "train.updates=1",
        "--out",
        "branched",
        figures=0,
    )
    assert done.code == 0 and "runs/run after update 6" in " ".join(done.err.split()), done.err


@pytest.mark.parametrize("name", ["run", "checkpoint", "folder"])
def test_what_holds_a_model_is_no_text(
    name: str, begun: dict[str, str], server: CommandServer
) -> None:
    for command in (["plan"], ["data", "show"], ["sweep", "optim.lr=1,2"]):
        done = server.run(Path(begun["here"]), *command, begun[name])
        assert done.code == 2 and "not text: give" in done.err and "model.init=" in done.err, (
            done.err
        )


def test_a_checkpoint_is_known_by_a_link_and_from_inside(
    begun: dict[str, str], tmp_path: Path, server: CommandServer
) -> None:
    folder = Path(begun["here"], begun["checkpoint"])
    (tmp_path / "linked").symlink_to(folder)
    of_a_member = Path(begun["here"]), begun["best.checkpoint"]
    for place, name in (
        (tmp_path, "linked"),
        (folder.parent, folder.name),
        (folder, "."),
        of_a_member,
    ):
        done = server.run(place, "generate", name, "alpha", "--max-tokens", "1")
        assert done.code == 0, done.err


def test_what_a_checkpoint_does_not_name(begun: dict[str, str], server: CommandServer) -> None:
    here = Path(begun["here"])
    done = server.run(here, "train", "--resume", begun["checkpoint"])
    assert done.code == 2 and f"--from {begun['checkpoint']}" in done.err
    done = server.run(here, "generate", "runs/run/checkpoints/step-00000005")
    assert done.code == 4 and "no checkpoint of update 5; there are those of" in done.err
    done = server.run(here, "train", "--from", "folder", "model.init=folder")
    assert done.code == 2 and "both name a model" in done.err
