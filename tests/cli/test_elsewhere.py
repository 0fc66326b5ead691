"""Run: pytest tests/cli/test_elsewhere.py (commands and options that other programs have, and what does it here)."""

from __future__ import annotations

import re

import pytest

from cli.called import COMMANDS, Calls, monograph_
from monograph.config import KEYS
from monograph.config.elsewhere import COMMANDS as OTHERS
from monograph.config.elsewhere import ELSEWHERE, OPTIONS
from monograph.config.recipes import recipes


@pytest.mark.parametrize("name", [*OTHERS])
def test_a_command_of_other_programs_is_answered_with_ours(
    name: str, calls: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    assert monograph_(name, "a", "--b") == 2 and not calls
    assert capsys.readouterr().err == f"error: No such command {name!r}; {OTHERS[name]}\n"


@pytest.mark.parametrize("name", [*OPTIONS])
def test_an_option_of_other_programs_is_answered_with_ours(
    name: str, calls: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    option = f"--{name.replace('_', '-')}"
    assert monograph_("train", option) == 2 and not calls
    assert capsys.readouterr().err == f"error: No such option: {option}; {OPTIONS[name]}\n"


def test_what_is_named_instead_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert not OTHERS.keys() & {*COMMANDS}
    answers = "\n".join([*OTHERS.values(), *OPTIONS.values(), *ELSEWHERE.values()])
    assert {*re.findall(r"monograph (\w+)", answers)} <= {*COMMANDS, "data"}
    assert {*re.findall(r"--recipe (\S+)", answers)} <= {recipe.name for recipe in recipes()}
    assert {*re.findall(r"\b(?:train|optim|data|model|lora|rl|prefer)\.\w+", answers)} <= {*KEYS}
    helps = []
    for command in COMMANDS:
        monograph_(command, "--help")
        helps.append(capsys.readouterr().out)
    options = {*re.findall(r"(--[a-z][\w-]+)", answers)} - {"--nproc-per-node"}  # of torchrun
    assert options <= {*re.findall(r"--[a-z][\w-]+", "\n".join(helps))}
