"""Run: pytest tests/run/test_source.py"""

import json
from pathlib import Path

import pytest

from monograph.errors import InputRefused
from monograph.model import hub
from monograph.model.config import LlamaConfig
from monograph.run.folder import Run
from monograph.run.source import ModelSource


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_last_stays_the_run_that_it_was_when_the_source_was_opened() -> None:
    first = Run.create(Path("runs/first"))
    with first.lock(new=True):
        first.config.write_text("")
    source = ModelSource.open("last")
    assert source.run and source.recorded_name == "runs/first"
    with Run.create(Path("runs/second")).lock(new=True):
        Path("runs/second/config.toml").write_text("")
    assert source.run.folder == first.folder and source.recorded_name == "runs/first"
    assert ModelSource.open("last").recorded_name == "runs/second"


def test_a_folder_is_read_once(here: Path) -> None:
    shape = LlamaConfig.preset("nano", vocab_size=64, max_position_embeddings=32)
    (here / "config.json").write_text(json.dumps(shape.to_hf()))
    source = ModelSource.open(str(here))
    assert source.shape is not None
    (here / "config.json").unlink()
    for same in (source, source.renamed(f"{here}/.")):
        assert same.positions == 32 and not same.run and not same.is_weight_file


def test_the_headers_are_checked_against_the_configuration_that_was_read(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = LlamaConfig.preset("nano", vocab_size=64, max_position_embeddings=32)
    (here / "config.json").write_text(json.dumps(shape.to_hf()))
    source = ModelSource.open(str(here))
    assert source.shape
    monkeypatch.setattr(
        hub, "read_config", lambda folder: pytest.fail("config.json is read a second time")
    )
    with pytest.raises(InputRefused, match="model.safetensors"):
        source.require_headers({})


def test_an_adapter_is_known_by_its_name_and_its_weights_by_its_base(here: Path) -> None:
    (here / "base").mkdir()
    (here / "base/config.json").write_text(
        json.dumps(LlamaConfig.preset("nano", vocab_size=64).to_hf())
    )
    (here / "adapter").mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
    (here / "adapter/adapter_config.json").write_text(
        json.dumps({**config, "base_model_name_or_path": "base"})
    )
    source = ModelSource.open("adapter")
    assert source.adapter and source.adapter.lora.rank == 4
    assert (source.recorded_name, source.base) == ("adapter", str(here / "base"))
    assert source.shape and source.shape.vocab_size == 64
    named = source.renamed(str(here / "adapter"))
    assert named.adapter and named.adapter.folder == here / "adapter" and named.base == source.base


def test_what_a_program_builds_is_no_folder() -> None:
    source = ModelSource.open("own.py:build")
    assert (
        source.code
        and not source.run
        and source.shape is None
        and source.recorded_name == "own.py:build"
    )
