"""Run: pytest tests/cli/test_elsewhere.py (commands and options that other programs have, and what
does it here).
"""

from __future__ import annotations

import re

import pytest

from cli.called import COMMANDS, Calls, monograph_
from monograph.cli import command_tree
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


@pytest.mark.parametrize("command", [*OPTIONS])
def test_an_option_of_other_programs_is_answered_with_ours(
    command: str, calls: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = command_tree().commands[command]
    own = {name for each in tree.params for name in each.opts}
    for name, said in OPTIONS[command].items():
        if not name:  # an argument
            continue
        option = f"-{name}" if len(name) == 1 else f"--{name.replace('_', '-')}"
        assert option not in own
        assert monograph_(command, "last", option, "7") == 2 and not calls
        answer = (
            f"say {said.format(7) if '{}' in said else f'{said} 7'}"
            if said.startswith("-")
            else said
        )
        assert capsys.readouterr().err == f"error: No such option: {option}; {answer}\n"
        assert not said.startswith("-") or said.split()[0] in own


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (
            "train texts --foo 1 optim.learning_rate=2 train.minutes=x optim.eps=1e-9",
            ["No such option: --foo; did you mean --from?", "optim.learning_rate; did you mean optim.lr=2?",
             'train.minutes = "x": expected a number'],
        ),
        (
            "train --lr=1e-3 --out new --wandb optim.lrr=0.1 --epochs 3",
            ["--lr; did you mean optim.lr=1e-3?", "--wandb; say monograph follow", "--epochs; did you mean",
             "optim.lrr; did you mean optim.lr=0.1?"],
        ),
        ("sweep --foo optim.lr=1e-3,1e-2 train.sed=0,1", ["--foo", "train.sed; did you mean train.seed=0,1?"]),
        ("train --a1 --b1 --c1 --d1 --e1 --f1 --g1", ["--a1", "--b1", "--c1", "--d1", "--e1"]),
        ("train rl.max_tokens=20 lora.lr=1", ["rl.max_tokens; did you mean rl.max_new_tokens=20?", "mean optim.lr=1?"]),
        ("train --temperature 0.7", ["--temperature; say rl.temperature=N of a run with rl.reward"]),
    ],
)  # fmt: skip
def test_all_that_is_wrong_with_a_line_is_said_at_once(
    arguments: str, parts: list[str], calls: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    assert monograph_(*arguments.split()) == 2 and not calls
    said = capsys.readouterr().err.split("; also ")
    assert len(said) == len(parts)
    for line, part in zip(said, parts, strict=True):
        assert part in line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("train --minutes ten", "--minutes ten: expected a number"),
        ("train --minutes=ten", "--minutes ten: expected a number"),
        ("generate last text --top-k -1", "--top-k -1: expected a number, at least 0"),
        ("serve last --port abc", "--port abc: expected a whole number, 0 to 65535"),
        ("serve last --port 99999", "--port 99999: expected a number, 0 to 65535"),
        ("train --json=true", "Option '--json' does not take a value: write --json alone"),
        (
            "data show --row",
            "Option '--row' requires an argument; --row N: the number of a packed row; ",
        ),
    ],
)
def test_an_options_value_is_answered_with_what_it_takes(
    arguments: str, said: str, calls: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    assert monograph_(*arguments.split()) == 2 and not calls
    assert capsys.readouterr().err.startswith(f"error: {said}")


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        ("train --lr 1e-4", "did you mean optim.lr=1e-4?"),
        ("train --lr=1e-4", "did you mean optim.lr=1e-4?"),
        ("train -lr 1e-4", "did you mean optim.lr=1e-4?"),
        (
            "train --lr --json",
            "did you mean optim.lr? It takes a number above 0, or auto, as in optim.lr=0.0003",
        ),
        ("train --learning_rate -1", "did you mean optim.lr? It takes a number above 0, or auto"),
        ("train --bf16", "say train.precision=bf16"),
        ("train --seed 3", "did you mean train.seed=3?"),
        ("train --updates 9", "did you mean train.updates=9 or rl.updates=9?"),
        ("train -o out", "did you mean --out?"),
        ("train --qqq", "its options are --out, "),
        ("generate last --seeed 3", "did you mean --seed?"),
        ("generate last --top-h 0.3", "it is not among the filters; --min-p also keeps more"),
        ("generate last --top-a 0.3", "say --sampler top_a=0.3"),
        (
            "generate last --bf16 text",
            "`monograph generate` takes no keys of a run; its options are --prompts, ",
        ),
        (
            "serve last --seed 3",
            "`monograph serve` takes no keys of a run; its options are --host, ",
        ),
        ("serve last port=9000", "say --port 9000"),
        ("serve last max_num_seqs=4", "say --rows 4"),
        ("serve last optim.lr=3", "`monograph serve` takes no keys of a run"),
        ("serve last a", "after `monograph serve` stands RUN|FOLDER; its options are --host, "),
        (
            "export last",
            "--to DIR: the folder to write; hf://OWNER/NAME: push to the Hugging Face Hub, as in ",
        ),
        ("serve", "RUN|FOLDER: a run, `last`, a checkpoint's folder, a Hugging Face folder, "),
        ("chat last text", "say monograph generate RUN PROMPT --chat"),
        ("evaluate last data.txt", "say --data data.txt"),
        ("export last --to out --bf16", "`monograph export` takes no keys of a run"),
        ("generate last text --device cpu", "say CUDA_VISIBLE_DEVICES=0 before the command"),
        ("train --set optim.lr=1e-4", "type optim.lr=1e-4 as it is"),
        ("train -c run.toml", "type run.toml as it is"),
        ("data stats", "the commands are show, build"),
        ("train --lr_scheduler_type constant_with_warmup", "did you mean optim.schedule=constant?"),
        ("recipes lora --lr 3", "`monograph recipes` takes no keys of a run; it has no options"),
    ],
)
def test_an_answer_says_what_to_type(
    arguments: str, answer: str, calls: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    assert monograph_(*arguments.split()) == 2 and not calls
    assert f"; {answer}" in capsys.readouterr().err


def test_what_is_named_instead_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert not OTHERS.keys() & {*COMMANDS}
    options = [said for each in OPTIONS.values() for said in each.values()]
    answers = "\n".join([*OTHERS.values(), *options, *ELSEWHERE.values()])
    assert {*re.findall(r"monograph (\w+)", answers)} <= {*COMMANDS, "data"}
    assert {*re.findall(r"--recipe (\S+)", answers)} <= {recipe.name for recipe in recipes()}
    assert {*re.findall(r"\b(?:train|optim|data|model|lora|rl|prefer)\.\w+", answers)} <= {*KEYS}
    helps = []
    for command in ([], *([name] for name in COMMANDS)):
        monograph_(*command, "--help")
        helps.append(capsys.readouterr().out)
    others = {
        "--nproc-per-node",
        "--standalone",
        "--model",
        "--model_args",
        "--tasks",
    }  # of torchrun and lm-evaluation-harness
    assert {*re.findall(r"(--[a-z][\w-]+)", answers)} - others <= {
        *re.findall(r"--[a-z][\w-]+", "\n".join(helps))
    }
