"""Run: pytest tests/commands/test_recipes.py (the recipes: each is a sound configuration, and its
command runs).
"""

from __future__ import annotations

import json
import shlex
import tomllib
from pathlib import Path

import pytest

from commands.forked import CommandServer
from commands.test_finetune import folder_that_chats
from monograph.commands.recipes import run as command
from monograph.config import KEYS, load
from monograph.config.recipes import Recipe, recipe_named, recipes
from monograph.errors import UsageError

NAMES = "chats continue dpo kto larger lora lora-4bit rewards rewards-own sweep texts".split()
# What makes any of them a run of seconds.
TINY = [
    "data.sequence_length=64", "data.held_out=0.1", "train.updates=2", "train.tokens_per_update=256",
    "train.compile=none", "train.precision=fp32",
]  # fmt: skip
FOR = {
    "new": ["model.preset=nano", "data.tokenizer=bytes", "optim.warmup_updates=1"],
    "rewards": ["rl.group=2", "rl.prompts=2", "rl.max_new_tokens=4"],
}


def inputs(here: Path) -> None:
    """The files that the recipes' commands name, small."""
    folder_that_chats(here, "chatml")
    (here / "chatty").rename(here / "FOLDER")
    (here / "texts").rename(here / "my_texts")
    (here / "reward.py").write_text(
        "def score(prompt, answer, record):\n    return float(len(answer) % 2)\n"
    )
    for name, record in {
        "prompts": {"prompt": "why 7", "answer": "7"},
        "pairs": {"prompt": "why 7", "chosen": "why", "rejected": "so"},
    }.items():
        (here / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for _ in range(20)))
    labelled = (
        {"prompt": f"why {number}", "completion": "why", "label": number % 2 == 0}
        for number in range(20)
    )
    (here / "labels.jsonl").write_text("".join(json.dumps(record) + "\n" for record in labelled))


def test_the_recipes_are_these_and_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert [recipe.name for recipe in recipes()] == NAMES
    command(None)
    out = capsys.readouterr().out
    assert all(recipe.meaning in out and recipe.command in out for recipe in recipes())
    command("lora")
    assert capsys.readouterr().out == recipe_named("lora").path.read_text()
    with pytest.raises(UsageError, match="there is no recipe loar; did you mean lora?"):
        recipe_named("loar")


@pytest.mark.parametrize("recipe", recipes(), ids=NAMES)
def test_a_recipe_is_a_configuration_that_begins_with_what_it_is_for(recipe: Recipe) -> None:
    settings = load(recipe.path, {}, {})
    assert settings.given_values().keys() <= set(KEYS) and len(settings.given_values()) > 2
    program, name, option, named, *_ = recipe.command.split()
    assert (program, option, named) == ("monograph", "--recipe", recipe.name) and name in (
        "train",
        "sweep",
    )
    assert recipe.meaning.endswith(".")
    for line in recipe.path.read_text().splitlines():
        assert len(line) <= 120 and "\t" not in line
    assert (
        "optim" not in tomllib.loads(recipe.path.read_text())
        or settings.optim.lr != "auto"
        or named == "larger"
    )


def test_keys_change_a_recipe(server: CommandServer, here: Path) -> None:
    done = server.run(here, "train", "--recipe", "lora", "lora.rank=8", "--print-config")
    table = tomllib.loads(done.out)
    assert table["lora"]["rank"] == 8 and table["optim"]["lr"] == 2e-4, done.err
    (here / "run.toml").write_text("")
    both = server.run(here, "train", "--recipe", "lora", "run.toml")
    assert both.code == 2 and "are both configurations; give one" in both.err


@pytest.mark.slow
@pytest.mark.parametrize("recipe", recipes(), ids=NAMES)
def test_the_command_of_a_recipe_runs(recipe: Recipe, server: CommandServer, here: Path) -> None:
    inputs(here)
    words = shlex.split(recipe.command)[1:]
    tables = tomllib.loads(recipe.path.read_text())
    kinds = [
        kind
        for kind, is_so in (
            ("new", "preset" in tables.get("model", {})),
            ("rewards", "rl" in tables),
        )
        if is_so
    ]
    more = [*TINY, *(setting for kind in kinds for setting in FOR[kind])]
    words = [word.replace("log:1e-3..2e-2:5", "1e-3,2e-3") for word in words]
    if "rewards" in kinds:
        more.remove("train.tokens_per_update=256")
    done = server.run(here, *words, *more, "--json", figures=0)
    assert done.code == 0, done.err
    found = json.loads(done.out.splitlines()[-1])
    assert found["best"] if words[0] == "sweep" else found["update"] == 2
