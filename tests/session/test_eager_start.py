"""Run: pytest tests/session/test_eager_start.py [-m slow] (updates before the step is compiled)."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from commands.forked import CommandServer
from laws.resumed import LORA, MATCHED, OWN, PREFERRED, REWARDED, SETTINGS, write_inputs
from monograph.config import load
from monograph.device import describe
from monograph.rl.processes import FunctionProcess
from monograph.run.folder import Run
from monograph.run.progress import Progress
from monograph.session import eager_start
from monograph.session.eager_start import EAGER_KEY, compile_run, compiled_key, should_begin_eagerly
from monograph.session.objectives import with_records
from monograph.session.record import write_config
from monograph.session.resolve import resolve
from monograph.session.session import Session
from monograph.session.setup import open_session
from monograph.storage.code import digests

OPEN = ("train.updates", "train.compile")
BY_CLOCK = {key: value for key, value in SETTINGS.items() if key not in OPEN}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    write_inputs(tmp_path)
    return tmp_path


def session_of(settings: dict[str, Any]) -> Session:
    given = with_records(load(None, settings, {}))
    plan, progress = resolve(given.vouching(digests(given.programs)), describe()), Progress()
    task = plan.job.objective.open(plan, progress)
    return open_session(Run(Path("run")), plan, task, torch.device("cpu"), progress)


def test_it_pays_where_the_clock_gives_the_length_and_nothing_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = session_of(BY_CLOCK)
    window = next(session.open_batches(0))
    key = compiled_key(session, window)
    assert should_begin_eagerly(session, key)
    whole = session.plan
    by_epochs = replace(whole.job, span=whole.job.span._replace(epochs=2))
    others = [
        replace(whole, **change)
        for change in ({"updates": 20}, {"job": by_epochs}, {"memory": "stream"})
    ]  # type: ignore[arg-type]
    for session.plan in (*others, whole.with_training(replace(whole.training, compile="none"))):
        assert not should_begin_eagerly(session, key), session.plan
    session.plan = whole
    for change in ({"cores": 1}, {"free_memory_bytes": 2**30}, {"type": "cuda"}):
        machine = replace(describe(), **change)  # type: ignore[arg-type]
        monkeypatch.setattr(eager_start, "describe", lambda machine=machine: machine)
        assert not should_begin_eagerly(session, key), change
    monkeypatch.setattr(eager_start, "describe", describe)
    eager_start.mark_compiled(key)
    assert not should_begin_eagerly(session, key), "it is compiled"
    other = session_of(BY_CLOCK | {"train.seed": 5, "optim.lr": 0.01})
    assert compiled_key(other, window) == key, "another seed or rate is the same code"
    assert should_begin_eagerly(
        session, compiled_key(session, {**window, "tokens": window["tokens"][:, 1:]})
    ), "this shape is not"


def test_it_pays_for_a_model_that_exists_and_for_preferences_and_rewards_too() -> None:
    for kind in (LORA, PREFERRED, MATCHED):
        session = session_of({key: value for key, value in kind.items() if key not in OPEN})
        assert should_begin_eagerly(session, compiled_key(session, next(session.open_batches(0))))


def test_a_module_of_a_file_is_not_run_by_another_process() -> None:
    session = session_of({key: value for key, value in OWN.items() if key not in OPEN})
    assert not should_begin_eagerly(session, compiled_key(session, next(session.open_batches(0))))


def test_answers_of_any_number_are_one_step_and_another_loss_is_another_one() -> None:
    by_clock = {key: value for key, value in MATCHED.items() if key not in OPEN}
    session = session_of(by_clock)
    window = next(session.open_batches(0))
    key = compiled_key(session, window)
    assert compiled_key(session, {name: tensor[:1] for name, tensor in window.items()}) == key
    assert compiled_key(session_of(by_clock | {"rl.temperature": 0.8}), window) != key


@pytest.mark.parametrize("kind", ["texts", "preferences", "rewards"])
def test_the_other_process_opens_a_run_whose_settings_are_all_that_is_written(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is given a window, so that it draws no answers and judges none, which may cost money."""
    run = Run.create("run")
    settings = {"texts": BY_CLOCK, "preferences": PREFERRED, "rewards": REWARDED}[kind]
    by_clock = {key: value for key, value in settings.items() if key not in OPEN}
    given = with_records(load(None, by_clock | {"train.compile": "none", "train.minutes": 1}, {}))
    write_config(run, given.vouching(digests(given.programs)))
    with closing(session_of(by_clock).task) as task:
        save_file(
            {name: each.clone() for name, each in next(task.windows(0, None, ())).items()},
            "window.safetensors",
        )
    before = sorted(Path("run").iterdir())
    compiled = list[Any]()
    monkeypatch.setattr(
        eager_start, "compile_step", lambda session, window, progress: compiled.append(window)
    )
    monkeypatch.setattr(
        FunctionProcess, "start", lambda _: pytest.fail("the user's program was started")
    )
    compile_run("run", "window.safetensors")
    assert sorted(Path("run").iterdir()) == before
    assert set(compiled[0]) >= {"tokens", "targets"}


@pytest.mark.slow
def test_a_first_run_waits_for_the_cache_alone(server: CommandServer, here: Path) -> None:
    settings = [
        "model.preset=nano",
        "data.source=stdlib",
        "data.tokenizer=bytes",
        "train.tokens_per_update=512",
    ]
    home = {
        "MONOGRAPH_HOME": str(here / "home"),
        "TORCHINDUCTOR_CACHE_DIR": str(here / "home" / "compiled"),
    }
    runs = []
    for name in ("cold", "warm"):
        done = server.run(
            here, "train", *settings, "train.minutes=0.35", "--out", name, "--json", env=home
        )
        assert done.code == 0, done.err
        early = [row for row in Run(here / name).rows() if EAGER_KEY in row]
        runs.append(
            (
                json.loads(done.out.splitlines()[-1])["compile_s"],
                early[-1]["wall_s"] if early else 0.0,
            )
        )
    (cold_s, early_s), (warm_s, none_s) = runs
    assert early_s > cold_s and not none_s, runs
    assert cold_s < 2 * warm_s + 2, runs
