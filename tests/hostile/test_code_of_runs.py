"""Run: pytest tests/hostile/test_code_of_runs.py [-s] (programs and texts that a run from elsewhere
names).
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from commands.forked import CommandServer, Done
from commands.inputs import OWN, SLOW, TINY, with_texts
from daily import nightly
from monograph import checkpointing
from monograph.config import load
from monograph.run.folder import Run
from monograph.run.recipe import ModelRecipe, build_from_file
from monograph.run.source import ModelSource, checked_recipe
from monograph.run.trust import OPTION
from monograph.session.recorded import foreign_text_warning
from monograph.sweeps.folder import Sweep

CANARY = "canary"
MODULE = (
    SLOW.replace("time.sleep(0.05)", "") + f"\nimport pathlib\npathlib.Path({CANARY!r}).touch()\n"
)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory, server: CommandServer) -> Path:
    """A folder with texts, a run of a Llama, one of a module of its own whose file is gone, and a
    sweep.
    """
    here = with_texts(tmp_path_factory.mktemp("trust"))
    (here / "own.py").write_text(MODULE)
    runs = {"llama": ["train", *TINY], "own": ["train", *OWN, "model.init=own.py:build"]}
    runs["sweep"] = ["sweep", *TINY, "optim.lr=1e-3,2e-3"]
    for name, arguments in runs.items():
        done = server.run(here, *arguments, "--out", f"runs/{name}", figures=0)
        assert done.code == 0, done.err
    (here / "own.py").unlink()
    (here / CANARY).unlink()
    return here


@pytest.fixture
def here(begun: Path, tmp_path: Path) -> Path:
    shutil.copytree(begun, tmp_path / "copy", symlinks=True)
    return tmp_path / "copy"


def forge(here: Path, run: Run, init: str, places: str) -> None:
    """Let a run name a program in its config.toml, its state or both, with every digest as it must
    be.
    """
    settings = load(run.config, {}, {})
    if "config" in places:
        model = type(settings.model)(init=init)
        text = settings.model_copy(update={"model": model}).to_toml()
        # A true one, of another run.
        mark = (here / "runs/own/config.toml").read_text().splitlines()[-1]
        run.config.write_text(f"{text}{mark}\n")
    for folder in sorted(run.checkpoints.glob("step-*"))[-1:]:
        found = checkpointing.load(folder)
        record = {**found.state, "settings": load(run.config, {}, {}).fingerprint}
        if "state" in places:
            digest = hashlib.sha256((here / init.partition(":")[0]).read_bytes()).hexdigest()
            record["recipe"] = record["recipe"] | {"init": init, "sha256": digest}
        checkpointing.save(run.checkpoints, replace(found, state=record), keep=9)
    metrics = "".join(
        line for line in run.metrics.read_text().splitlines(keepends=True) if "summary" not in line
    )
    run.metrics.write_text(metrics)  # so that there is something left to train


def absolute(here: Path) -> str:
    return f"{here}/elsewhere/evil.py:build"


def inside(here: Path) -> str:
    return "runs/forged/evil.py:build"


def upwards(here: Path) -> str:
    return "runs/forged/../../elsewhere/evil.py:build"


def link(here: Path) -> str:
    (here / "runs/forged/link.py").symlink_to(here / "elsewhere/evil.py")
    return "runs/forged/link.py:build"


NAMED = {each.__name__: each for each in (absolute, inside, upwards, link)}
PLACES = ("config", "state", "config and state")
TRAIN = ["train.updates=3", "--out", "out"]
# What may run the program of a run: with --trust-code it does, where both places name it.
RUNNING = {
    "evaluate": ["evaluate", "runs/forged"],
    "evaluate --data": ["evaluate", "runs/forged", "--data", "texts"],
    "evaluate, last": ["evaluate", "last"],
    "evaluate, a checkpoint": ["evaluate", "CHECKPOINT"],
    "compare": ["compare", "runs/llama", "runs/forged"],
    "compare, itself": ["compare", "runs/forged", "runs/forged"],
    "train --from": ["train", "--from", "runs/forged", *TRAIN],
    "train --from, an update": ["train", "--from", "runs/forged@8", *TRAIN],
    "train --from, a checkpoint": ["train", "--from", "CHECKPOINT", *TRAIN],
    "train --resume": ["train", "--resume", "runs/forged"],
    "train CONFIG.toml": ["train", "runs/forged/config.toml", *TRAIN],
    "sweep": ["sweep", "--samples", "1", "--out", "out"],
    "sweep CONFIG.toml": ["sweep", "runs/forged/config.toml", "optim.lr=1e-3,2e-3", *TRAIN],
    "profile": ["profile", "runs/forged/config.toml", "--out", "out"],
}
# What runs no program of a run, whatever is said.
READING = {
    "generate": ["generate", "runs/forged", "--max-tokens", "1"],
    "generate, last": ["generate", "last", "--max-tokens", "1"],
    "export": ["export", "runs/forged", "--to", "out"],
    "check": ["check", "runs/forged"],
    "train model.init": ["train", *OWN, "model.init=runs/forged", "--out", "out"],
    "train model.init, adapters": [
        "train",
        *OWN,
        "model.init=runs/forged",
        "lora.rank=2",
        "--out",
        "out",
    ],
    "plan": ["plan", "runs/forged/config.toml"],
    "data show": ["data", "show", "runs/forged/config.toml"],
}


def tried(
    here: Path, server: CommandServer, command: list[str], named: str, places: str, *said: str
) -> Done:
    """A command on a forged run that is new each time."""
    for path in ("runs/forged", "out", "elsewhere", CANARY):
        shutil.rmtree(here / path, ignore_errors=True)
        (here / path).unlink(missing_ok=True) if (here / path).is_file() else None
    shutil.copytree(here / "runs/llama", here / "runs/forged")
    (here / "runs/forged/run.lock").write_text('{"serial": 99}')
    for folder in ("elsewhere", "runs/forged"):
        (here / folder).mkdir(exist_ok=True)
        (here / folder / "evil.py").write_text(MODULE)
    run = Run(here / "runs/forged")
    forge(here, run, NAMED[named](here), places)
    newest = max(run.checkpoints.glob("step-*")).relative_to(here)
    arguments = [str(newest) if each == "CHECKPOINT" else each for each in command]
    return server.run(here, *arguments, *said, figures=0)


def crossed(here: Path, server: CommandServer, name: str, ways: list[tuple[str, str]]) -> None:
    """One command against forged runs: no program runs; prints a row of the table."""
    command, refused = {**RUNNING, **READING}[name], 0
    for named, places in ways:
        done = tried(here, server, command, named, places)
        case = f"{name}, {named} path in {places}: {done.err}"
        assert not (here / CANARY).exists(), case
        assert done.code in (0, 2, 3) and "Traceback" not in done.err, case
        if OPTION in done.err:
            refused += 1
            assert done.code == 3 and "evil.py" in done.err.splitlines()[-1], case
        if name in RUNNING and places == "config and state":
            assert OPTION in done.err.splitlines()[-1], case
    print(
        f"{name:<28} {len(ways):3} forged runs   {refused:3} refused, {OPTION} named   0 programs run"
    )


# Each command that runs a program, once, and one that runs none.
CALLED_BY_DAY = (
    "evaluate", "compare", "train --from", "train --resume", "train CONFIG.toml", "sweep", "profile", "generate",
)  # fmt: skip
BY_DAY = [
    *((name, "inside", "config and state") for name in CALLED_BY_DAY),
    ("evaluate", "absolute", "state"),
    ("train --from", "link", "config"),
]


@pytest.mark.parametrize(
    ("name", "named", "places"), BY_DAY, ids=lambda each: each.replace(" ", "_")
)
def test_no_program_of_a_forged_run_is_run(
    name: str, named: str, places: str, here: Path, server: CommandServer
) -> None:
    crossed(here, server, name, [(named, places)])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [*RUNNING, *READING])
def test_every_way_to_name_it(name: str, here: Path, server: CommandServer) -> None:
    crossed(here, server, name, [(named, places) for named in NAMED for places in PLACES])


@pytest.mark.parametrize(
    "name",
    nightly(
        ["evaluate", "compare", "train --from", "train --resume", "sweep", "profile"],
        {"evaluate", "sweep"},
    ),
)
def test_what_is_said_to_be_trusted_runs(name: str, here: Path, server: CommandServer) -> None:
    done = tried(here, server, RUNNING[name], "inside", "config and state", OPTION)
    assert (here / CANARY).exists(), done.err


def test_the_program_that_was_read_is_the_one_that_runs(tmp_path: Path) -> None:
    """Python would run what lies compiled next to a file, if that says that it need not be compared
    with the file.
    """
    file, canary = tmp_path / "mine.py", tmp_path / CANARY
    file.write_text(
        "import torch\n\ndef build(): return torch.nn.Linear(1, 1)\n\ndef loss(model, batch): ...\n"
    )
    shadow = Path(importlib.util.cache_from_source(str(file)))
    shadow.parent.mkdir()
    evil = compile(f"open({str(canary)!r}, 'w')\n" + file.read_text(), str(file), "exec")
    shadow.write_bytes(importlib._bootstrap_external._code_to_hash_pyc(evil, bytes(8), False))  # type: ignore[attr-defined]
    recipe = ModelRecipe(init=f"{file}:build", preset="auto", sizes={}, seed=0)
    recipe = checked_recipe(recipe, ModelSource.open(f"{file}:build"))
    recipe = recipe._replace(vouched={str(recipe.init): str(recipe.sha256)})
    assert recipe.code and build_from_file(recipe, recipe.code)[0].in_features == 1
    assert not canary.exists()


def test_what_a_forged_sweep_names_is_not_run(here: Path, server: CommandServer) -> None:
    """Its members' values of model.init are in sweep.json; a member that is trained once more has
    its own config.
    """
    (here / "evil.py").write_text(MODULE)
    sweep = Sweep.open(here / "runs/sweep")
    member = sweep.member(0)
    metrics = member.metrics.read_text()
    forge(here, member, "evil.py:build", "config and state")
    member.metrics.write_text(metrics)
    done = server.run(here, "sweep", "--out", "runs/sweep", "--verify", "0", figures=0)
    assert done.code == 3 and OPTION in done.err and not (here / CANARY).exists(), done.err
    for point in sweep.record["points"]:
        point["model.init"] = "evil.py:build"
    settings = load(sweep.run.config, {}, {})
    sweep.run.config.write_text(
        settings.model_copy(update={"model": type(settings.model)()}).to_toml()
    )
    sweep.record["settings"] = load(sweep.run.config, {}, {}).fingerprint
    sweep.write()
    shutil.rmtree(sweep.run.folder / "members")
    command = ["sweep", "--out", "runs/sweep"]
    done = server.run(here, *command, figures=0)
    assert done.code == 3 and OPTION in done.err and not (here / CANARY).exists(), done.err
    server.run(here, *command, OPTION, figures=0)
    assert (here / CANARY).exists()


def test_an_adapter_whose_base_is_called_as_a_program_is(here: Path, server: CommandServer) -> None:
    """Its folder may hold `evil.py`, and a folder `evil.py:build` that is there to be named."""
    lora = ["train", *OWN, "model.init=runs/llama", "lora.rank=2", "--out", "out"]
    assert (
        server.run(here, *lora, figures=0).code == 0
        and server.run(here, "export", "out", "--to", "hf").code == 0
    )
    config = here / "hf/adapter/adapter_config.json"
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": "evil.py:build"})
    )
    (config.parent / "evil.py").write_text(MODULE)
    (config.parent / "evil.py:build").mkdir()
    done = server.run(here, "train", *OWN, "model.init=hf/adapter", "--out", "further", figures=0)
    assert done.code == 3 and not (here / CANARY).exists(), done.err


def test_what_this_user_trained_here_runs_unasked(here: Path, server: CommandServer) -> None:
    """Also once it was moved; not once its program is another one, or where nobody knows who wrote
    it.
    """
    (here / "own.py").write_text(MODULE)
    assert (
        server.run(here, "train", *OWN, "model.init=own.py:build", "--out", "new", figures=0).code
        == 0
    )
    (here / "new").rename(here / "moved")
    evaluate = ["evaluate", "moved"]
    done = server.run(here, "evaluate", "runs/own", "--data", "texts")
    assert done.code == 3 and OPTION in done.err, (
        "its program was in another folder, beside other files"
    )
    assert server.run(here, *evaluate, "--data", "texts").code == 0
    assert server.run(here, "train", "--from", "moved", *TRAIN, figures=0).code == 0
    assert server.run(here, "evaluate", "out").code == 0
    done = server.run(here, *evaluate, env={"MONOGRAPH_HOME": str(here / "empty")})
    assert done.code == 3 and OPTION in done.err and not (here / "empty").exists(), done.err
    (here / "own.py").write_text(MODULE + "\n")
    done = server.run(here, *evaluate)
    assert done.code == 3 and "own.py: not the file that moved was trained with" in done.err
    done = server.run(here, "train", "--resume", "moved")
    assert done.code == 3 and "own.py: not the file that moved was trained with" in done.err


def link_beside(here: Path, forged: Path) -> Path:
    (here / "link.toml").symlink_to(forged)
    return here / "link.toml"


def without_lock(here: Path, forged: Path) -> Path:
    (forged.parent / "run.lock").unlink()
    return forged


def below(here: Path, forged: Path) -> Path:
    (forged.parent / "sub").mkdir()
    return shutil.copy(forged, forged.parent / "sub/config.toml")


def mark_alone(here: Path, forged: Path) -> Path:
    return shutil.copy(forged, here / "some.toml")


@pytest.mark.parametrize("place", [link_beside, without_lock, below, mark_alone])
def test_a_settings_file_of_a_stranger_is_known_wherever_it_lies(
    place: Callable[[Path, Path], Path], here: Path, server: CommandServer
) -> None:
    tried(here, server, ["check", "runs/forged"], "absolute", "config and state")
    toml = place(here, here / "runs/forged/config.toml")
    for command in ("train", "profile"):
        done = server.run(here, command, str(toml), "--out", "out", figures=0)
        assert done.code == 3 and OPTION in done.err and not (here / CANARY).exists(), done.err


def test_settings_that_are_gone_are_asked_for(here: Path, server: CommandServer) -> None:
    (here / "runs/llama/config.toml").unlink()
    for command in (["train", "--resume", "runs/llama"], ["train", "--from", "runs/llama", *TRAIN]):
        done = server.run(here, *command, figures=0)
        assert done.code == 3 and "found nothing" in done.err and "put it back" in done.err, (
            done.err
        )


def test_a_link_to_damaged_settings_is_refused_as_they_are(
    here: Path, server: CommandServer
) -> None:
    config = here / "runs/llama/config.toml"
    config.write_text(re.sub("(?m)^lr = .*", "lr = 0.806", config.read_text()))
    (here / "link.toml").symlink_to(config)
    done = server.run(here, "train", "link.toml", *TRAIN, figures=0)
    assert done.code == 3 and "not what the run was begun with" in done.err, done.err


def test_training_goes_on_where_no_secret_can_be_kept(here: Path, server: CommandServer) -> None:
    (here / "own.py").write_text(MODULE)
    (here / "file").touch()
    nowhere = {
        "MONOGRAPH_HOME": "",
        "XDG_CACHE_HOME": str(here),
        "XDG_STATE_HOME": str(here / "file"),
    }
    own = ["model.init=own.py:build", "--out"]
    assert server.run(here, "train", *OWN, *own, "out", env=nowhere, figures=0).code == 0
    assert (
        server.run(
            here, "sweep", *OWN, "optim.lr=1e-3,2e-3", *own, "swept", env=nowhere, figures=0
        ).code
        == 0
    )
    done = server.run(here, "evaluate", "out", env=nowhere)
    assert done.code == 3 and OPTION in done.err
    assert server.run(here, "evaluate", "out", OPTION, env=nowhere).code == 0


def test_text_outside_of_a_strangers_run_is_said_before_it_is_read(
    here: Path, server: CommandServer
) -> None:
    assert "warning" not in server.run(here, "evaluate", "runs/llama").err
    config = here / "runs/llama/config.toml"
    config.write_text(config.read_text().rpartition("# mark ")[0])
    by_run = (["evaluate"], ["compare", "runs/llama"], ["train", *TRAIN, "--from"])
    by_file = (["train", "--out", "again"], ["data", "show"])
    for command in (*by_run, *by_file):
        done = server.run(
            here,
            *command,
            "runs/llama/config.toml" if command in by_file else "runs/llama",
            figures=0,
        )
        assert done.code == 0 and "names text outside of it, which is read: texts" in done.err, (
            done.err
        )
    # A link inside of the folder leads there, too, by the folder's name or by a pattern.
    (here / "runs/llama/inside").mkdir()
    (here / "runs/llama/inside/link").symlink_to(here / "texts")
    for named in ("runs/llama/inside", "runs/llama/inside/**/*.txt"):
        config.write_text(re.sub("source = .*", f'source = "{named}"', config.read_text()))
        settings = load(config, {}, {})
        assert f"which is read: {named}" in foreign_text_warning(
            Run(here / "runs/llama"), settings.data.source, settings.programs
        )
