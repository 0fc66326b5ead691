"""Run: pytest tests/session/test_door.py"""

from pathlib import Path

import pytest

from monograph.config import load
from monograph.config.keys import PreferSection
from monograph.run.folder import Run
from monograph.run.writing import write_tokenizer
from monograph.session.door import job_of
from monograph.session.objectives.preferences import Preferences
from monograph.session.record import write_config
from monograph.text.tokenizer import Tokenizer


def test_a_job_leaves_open_what_the_shape_or_the_device_decides_and_nothing_else() -> None:
    job = job_of(load(None, {}, {}))
    assert job.open_choices == {"precision", "micro_batch", "compile", "remat", "memory"}
    assert job.is_lr_open and job.is_decay_open and set(job.intervals) == {None}
    assert "auto" not in vars(job.reading).values() and job.reading.tokenizer == "bpe"
    given = {
        "train.eval_every": 3,
        "optim.lr": 1e-3,
        "optim.weight_decay": 0.1,
        "train.tokens": 2**20,
    }
    given |= {"train.remat": "full", "train.micro_batch": 2, "train.memory": "device"}
    told = job_of(load(None, given, {}))
    assert told.intervals.eval_every == 3 and not told.is_lr_open and not told.is_decay_open
    assert told.open_choices == {"precision", "compile"} and (
        told.training.remat,
        told.training.rows,
    ) == (
        "full",
        2,
    )
    assert told.updates == 2**20 // told.training.tokens_per_update and told.span.tokens == 2**20


def test_a_job_names_the_run_that_was_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = Run.create(Path("runs/first"))
    with run.lock(new=True):
        write_config(run, load(None, {"train.updates": 1}, {}))
        write_tokenizer(run, Tokenizer.bytes())
    job = job_of(load(None, {"data.tokenizer": "last"}, {}))
    assert job.reading.tokenizer == job.tokens.tokenizer == "runs/first/tokenizer.json"
    assert job.record.settings.data.tokenizer == "runs/first/tokenizer.json"


def test_an_objective_has_its_own_keys_decided(tmp_path: Path) -> None:
    job = job_of(load(None, {"prefer.loss": "simpo", "prefer.gamma": 0.5}, {}))
    assert isinstance(job.objective, Preferences) and job.objective.preference
    assert job.objective.preference.parameters["gamma"] == 0.5
    assert (
        job.record.settings.section(PreferSection).beta
        == job.objective.preference.parameters["beta"]
    )
