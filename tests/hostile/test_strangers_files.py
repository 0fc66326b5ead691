"""Run: pytest tests/hostile/test_strangers_files.py [-m slow -s] (what a stranger's folder names as
code never runs).

The product of carriers (where a folder names code), forgeries (what lies around, so that the name
could be read as something else) and commands. The stranger's file would leave another file behind.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from commands.forked import CommandServer, Done
from commands.inputs import OWN, TINY, with_texts
from hostile.test_code_of_runs import MODULE
from monograph import checkpointing
from monograph.config import load
from monograph.run.folder import Run
from monograph.run.trust import OPTION, is_ours
from monograph.sweeps.folder import Sweep

FLAG = "flag"
CODES = (0, 2, 3, 4)  # no bug, and no training that came to another end


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory, server: CommandServer) -> Path:
    """A folder with texts, prompts, a run, a finished sweep with a student, and an export with
    adapters.
    """
    here = with_texts(tmp_path_factory.mktemp("strangers"))
    (here / "prompts.jsonl").write_text('{"prompt": "alpha", "answer": "beta"}\n' * 20)
    for arguments in (
        ["train", *TINY, "--out", "runs/true"],
        ["train", *OWN, "model.init=runs/true", "lora.rank=2", "--out", "adapted"],
        ["sweep", *TINY, "optim.lr=1e-3,2e-3", "--distill", "--out", "swept"],
        ["export", "adapted", "--to", "hf"],
    ):
        done = server.run(here, *arguments, figures=0)
        assert done.code == 0, done.err
    return here


# What lies around in the folder `there`, and how its program is named.


def plain(there: Path, function: str) -> str:
    return f"{there}/evil.py:{function}"


def a_file_is_called_so(there: Path, function: str) -> str:
    (there / f"evil.py:{function}").write_text("not a program")
    return plain(there, function)


def a_link_to_nothing_is_called_so(there: Path, function: str) -> str:
    (there / f"evil.py:{function}").symlink_to("nothing")
    return plain(there, function)


def a_link_to_itself_is_called_so(there: Path, function: str) -> str:
    (there / f"evil.py:{function}").symlink_to(f"evil.py:{function}")
    return plain(there, function)


def a_folder_is_called_so(there: Path, function: str) -> str:
    (there / f"evil.py:{function}").mkdir()
    return plain(there, function)


def a_run_is_called_so(there: Path, function: str) -> str:
    shutil.copytree(there.parent / "true", there / f"evil.py:{function}")
    return plain(there, function)


def a_fifo_is_called_so(there: Path, function: str) -> str:
    os.mkfifo(there / f"evil.py:{function}")
    return plain(there, function)


def a_colon_in_the_folder(there: Path, function: str) -> str:
    (there / "a:b").mkdir()
    shutil.copy(there / "evil.py", there / "a:b")
    return f"{there}/a:b/evil.py:{function}"


def a_program_with_a_colon_as_the_folder(there: Path, function: str) -> str:
    (there / f"evil.py:{function}").mkdir()
    shutil.copy(there / "evil.py", there / f"evil.py:{function}")
    return f"{there}/evil.py:{function}/evil.py:{function}"


def two_endings(there: Path, function: str) -> str:
    shutil.copy(there / "evil.py", there / "evil.py:other.py")
    return f"{there}/evil.py:other.py:{function}"


def a_link_to_the_program(there: Path, function: str) -> str:
    (there / "link.py").symlink_to("evil.py")
    return f"{there}/../{there.name}/link.py:{function}"


FORGERIES = [
    plain, a_file_is_called_so, a_link_to_nothing_is_called_so, a_link_to_itself_is_called_so, a_folder_is_called_so,
    a_run_is_called_so, a_fifo_is_called_so, a_colon_in_the_folder, a_program_with_a_colon_as_the_folder, two_endings,
    a_link_to_the_program,
]  # fmt: skip


# Where a folder names the program. Each gets the name of the program for a function, and returns
# what to name in a command: a run, or a folder of a model.

Name = Callable[[str], str]


def forged(run: Run, values: dict[str, object]) -> None:
    """Let a run's settings have other values, with every digest right, and the mark of the settings
    before.
    """
    mark = next(line for line in run.config.read_text().splitlines() if line.startswith("# mark"))
    settings = load(run.config, {}, {})
    if "model.init" in values:
        settings = settings.model_copy(update={"model": type(settings.model)()})
        settings = settings.model_copy(
            update={"origins": {k: v for k, v in settings.origins.items() if k[:6] != "model."}}
        )
    settings = settings.resolve(values, "forged")
    run.config.write_text(f"{settings.to_toml()}{mark}\n")
    for folder in sorted(run.checkpoints.glob("step-*"))[-1:]:
        found = checkpointing.load(folder)
        state = {**found.state, "settings": load(run.config, {}, {}).fingerprint}
        file, _, function = str(values.get("model.init")).rpartition(":")
        if function == "build":
            digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()
            state["recipe"] = state["recipe"] | {"init": values["model.init"], "sha256": digest}
        checkpointing.save(run.checkpoints, replace(found, state=state), keep=9)
    rows = run.metrics.read_text().splitlines(keepends=True)
    # Something is left to train.
    run.metrics.write_text("".join(row for row in rows if "summary" not in row))


def in_model_init(here: Path, name: Name) -> str:
    run = copied(here, "runs/true", "runs/forged")
    forged(run, {"model.init": name("build")})
    return str(run.folder)


def rewarded(here: Path, reward: str) -> dict[str, object]:
    """The settings of a run with rewards, as far as others do not fit."""
    return {
        "model.init": str(here / "runs/true"), "data.source": str(here / "prompts.jsonl"), "rl.reward": reward,
        "rl.prompts": 2, "rl.group": 2, "rl.max_new_tokens": 4, "train.tokens_per_update": 128, "train.updates": 9,
    }  # fmt: skip


def in_reward(here: Path, name: Name) -> str:
    run = copied(here, "runs/true", "runs/forged")
    forged(run, rewarded(here, name("score")))
    return str(run.folder)


def in_both(here: Path, name: Name) -> str:
    run = copied(here, "adapted", "runs/forged")
    forged(
        run,
        {
            "model.init": name("build"),
            "rl.reward": name("score"),
            "data.source": str(here / "prompts.jsonl"),
        },
    )
    return str(run.folder)


def in_the_base_of_adapters(here: Path, name: Name) -> str:
    shutil.copytree(here / "hf/adapter", here / "forged")
    config = here / "forged/adapter_config.json"
    values = json.loads(config.read_text()) | {"base_model_name_or_path": name("build")}
    config.write_text(json.dumps(values))
    return str(here / "forged")


def in_a_teacher(here: Path, name: Name) -> str:
    """The teacher's own settings and recipe name the program."""
    forged(copied(here, "runs/true", "runs/teacher"), {"model.init": name("build")})
    run = copied(here, "runs/true", "runs/forged")
    forged(run, rewarded(here, "teacher") | {"rl.teacher": str(here / "runs/teacher")})
    return str(run.folder)


def swept(here: Path, key: str, value: str) -> str:
    shutil.copytree(here / "swept", here / "runs/forged", symlinks=True)
    sweep = Sweep.open(here / "runs/forged")
    for index, point in enumerate(sweep.record["points"]):
        point[key] = value
        forged(sweep.member(index), {key: value})
    sweep.write()
    return str(sweep.run.folder)


def in_the_points_of_a_sweep(here: Path, name: Name) -> str:
    return swept(here, "model.init", name("build"))


def in_the_rewards_of_a_sweep(here: Path, name: Name) -> str:
    return swept(here, "rl.reward", name("score"))


def in_members_that_are_gone(here: Path, name: Name) -> str:
    """They would be made anew, with the mark of whoever makes them."""
    folder = Path(swept(here, "rl.reward", name("score")))
    shutil.rmtree(folder / "members")
    return str(folder)


def in_members_that_teach(here: Path, name: Name) -> str:
    """The student would be made anew from the best one's settings, with the mark of whoever makes
    it.
    """
    folder = Path(swept(here, "rl.reward", name("score")))
    shutil.rmtree(folder / "distilled")
    return str(folder)


CARRIERS = [
    in_model_init, in_reward, in_both, in_the_base_of_adapters, in_a_teacher, in_the_points_of_a_sweep,
    in_the_rewards_of_a_sweep, in_members_that_are_gone, in_members_that_teach,
]  # fmt: skip

TRAIN = ["train.updates=3", "--out", "out"]
COMMANDS = {
    "train --from": ["train", "--from", "IT", *TRAIN],
    "train --from best": ["train", "--from", "IT/best", *TRAIN],
    "train --from distilled": ["train", "--from", "IT/distilled", *TRAIN],
    "train CONFIG": ["train", "IT/config.toml", *TRAIN],
    "train --resume": ["train", "--resume", "IT"],
    "train --resume last": ["train", "--resume", "last"],
    "train model.init": ["train", *OWN, "model.init=IT", "--out", "out"],
    "train, a teacher": ["train", *OWN[1:], "prompts.jsonl", "model.init=runs/true", "rl.reward=teacher",
                         "rl.teacher=IT", "--out", "out"],
    "generate": ["generate", "IT", "--max-tokens", "1"],
    "evaluate": ["evaluate", "IT"],
    "evaluate mixture": ["evaluate", "IT/mixture"],
    "export": ["export", "IT", "--to", "out"],
    "serve": ["serve", "IT", "--host", "203.0.113.1"],
    "sweep": ["sweep", "--out", "IT"],
    "sweep --distill": ["sweep", "--out", "IT", "--distill"],
    "sweep --verify": ["sweep", "--out", "IT", "--verify", "0"],
    "sweep CONFIG": ["sweep", "IT/config.toml", "optim.lr=1e-3,2e-3", *TRAIN],
    "compare": ["compare", "runs/true", "IT"],
    "check": ["check", "IT"],
    "profile": ["profile", "IT/config.toml", "--out", "out"],
    "plan": ["plan", "IT/config.toml"],
    "data show": ["data", "show", "IT/config.toml"],
    "follow": ["follow", "IT", "--to", "tensorboard", "--out", "out"],
}  # fmt: skip


def copied(here: Path, run: str, to: str) -> Run:
    shutil.copytree(here / run, here / to)
    (here / to / "run.lock").write_text('{"serial": 99}')
    return Run(here / to)


def tried(begun: Path, here: Path, server: CommandServer, carrier: Callable[[Path, Name], str],
          forgery: Callable[[Path, str], str], command: str) -> tuple[Done, Path]:  # fmt: skip
    """A command on a forged folder that is new, in a folder of its own."""
    shutil.copytree(begun, here, symlinks=True)
    there = here / "runs/elsewhere"
    there.mkdir()
    flag = here / FLAG
    program = (
        MODULE
        + f"\ndef score(prompt, completion, record):\n    return 1\n\nopen({str(flag)!r}, 'w')\n"
    )
    (there / "evil.py").write_text(program)
    named = carrier(here, lambda function: _renewed(there, program, forgery, function))
    arguments = [each.replace("IT", named) for each in COMMANDS[command]]
    return server.run(here, *arguments, figures=0), flag


def _renewed(there: Path, program: str, forgery: Callable[[Path, str], str], function: str) -> str:
    shutil.rmtree(there / function, ignore_errors=True)
    (there / function).mkdir()
    (there / function / "evil.py").write_text(program)
    if not (there / "true").exists():
        shutil.copytree(there.parent / "true", there / "true")
    return forgery(there / function, function)


def require_refused_or_read(case: str, done: Done, flag: Path) -> None:
    assert not flag.exists(), f"{case}: the stranger's program ran: {done.err}"
    assert done.code in CODES, f"{case}: ended with {done.code}: {done.err}"
    assert "Traceback" not in done.err and "bug:" not in done.err, f"{case}: {done.err}"
    if done.code:
        assert re.match(r"\S*error: |monograph: ", done.err.splitlines()[-1]), f"{case}: {done.err}"


CROSS = [*itertools.product(CARRIERS, FORGERIES, COMMANDS)]
# What ran a stranger's program once, and a sample that is another one after every change of the
# lists.
KNOWN = [
    *itertools.product(
        [in_reward], [a_file_is_called_so, a_colon_in_the_folder], ["train --from", "train CONFIG"]
    ),
    (in_reward, a_link_to_nothing_is_called_so, "train --resume"),
    (in_reward, plain, "evaluate"),
    (in_members_that_are_gone, plain, "sweep"),
    (in_members_that_teach, plain, "sweep --distill"),
    (in_members_that_teach, a_file_is_called_so, "sweep --distill"),
]
BY_DAY = [*KNOWN, *random.Random(len(CROSS)).sample(CROSS, 1)]


def names(case: object) -> str:
    return case.__name__ if callable(case) else str(case).replace(" ", "_")


@pytest.mark.parametrize(("carrier", "forgery", "command"), BY_DAY, ids=names)
def test_a_strangers_file_never_runs(
    carrier: Callable[[Path, Name], str], forgery: Callable[[Path, str], str], command: str, begun: Path,
    tmp_path: Path, server: CommandServer,
) -> None:  # fmt: skip
    done, flag = tried(begun, tmp_path / "here", server, carrier, forgery, command)
    require_refused_or_read(f"{names(carrier)}, {names(forgery)}, {command}", done, flag)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("carrier", CARRIERS, ids=names)
def test_no_way_to_name_it_by_any_command(
    carrier: Callable[[Path, Name], str], begun: Path, tmp_path: Path, server: CommandServer
) -> None:
    ends = dict.fromkeys(CODES, 0)
    asked = 0
    for _, forgery, command in (each for each in CROSS if each[0] is carrier):
        done, flag = tried(begun, tmp_path / "here", server, carrier, forgery, command)
        require_refused_or_read(f"{names(carrier)}, {names(forgery)}, {command}", done, flag)
        shutil.rmtree(tmp_path / "here")
        ends[int(done.code or 0)] += 1
        asked += OPTION in done.err
    print(
        f"{names(carrier):<28} {sum(ends.values()):4} folders   {ends}   {asked} name {OPTION}   0 programs run"
    )


@pytest.mark.parametrize(
    ("carrier", "command"),
    [(in_members_that_are_gone, "sweep"), (in_members_that_teach, "sweep --distill")],
    ids=names,
)
def test_no_command_signs_a_program_that_nobody_vouched_for(
    carrier: Callable[[Path, Name], str],
    command: str,
    begun: Path,
    tmp_path: Path,
    server: CommandServer,
) -> None:
    """Otherwise the next command would find the user's own mark, and run it."""
    done, flag = tried(begun, tmp_path / "here", server, carrier, plain, command)
    require_refused_or_read(command, done, flag)
    configs = [*(tmp_path / "here/runs/forged").rglob("config.toml")]
    naming = [config for config in configs if "evil.py" in config.read_text()]
    signed = [config for config in naming if is_ours(config, load(config, {}, {}).programs)]
    assert configs and not signed, done.err


def test_a_reward_of_one_s_own_runs_unasked(
    begun: Path, tmp_path: Path, server: CommandServer
) -> None:
    """Also in a folder with a colon, beside a file of its value's name, and in a branch."""
    here = tmp_path / "here"
    shutil.copytree(begun, here, symlinks=True)
    (here / "a:b").mkdir()
    (here / "a:b/own.py").write_text(
        f"open({FLAG!r}, 'a').write('x')\n\ndef score(prompt, completion, record):\n    return len(completion)\n"
    )
    (here / "a:b/own.py:score").write_text("")
    small = [
        "data.sequence_length=32",
        "rl.prompts=2",
        "rl.group=2",
        "rl.max_new_tokens=4",
        "train.updates=2",
    ]
    small += ["train.compile=none", "train.precision=fp32"]
    own = ["train", "prompts.jsonl", "model.init=runs/true", "rl.reward=a:b/own.py:score", *small]
    for command in ([*own, "--out", "mine"], ["train", "--from", "mine", "train.updates=2", "--out", "again"],
                    ["train", "mine/config.toml", "--out", "third"]):  # fmt: skip
        (here / FLAG).unlink(missing_ok=True)
        done = server.run(here, *command, figures=0)
        assert done.code == 0 and (here / FLAG).read_text() == "x", done.err
    (here / "a:b/own.py").write_text("def score(prompt, completion, record):\n    return 1\n")
    done = server.run(here, "train", "--from", "mine", *TRAIN, figures=0)
    assert done.code == 3 and OPTION in done.err, done.err
