"""Run: pytest tests/sweeps/test_spec.py (what a command line asks for, and what it means without
arguments)
"""

from __future__ import annotations

from pathlib import Path

import pytest

from batches import tiny_llama
from monograph.config import load
from monograph.errors import UsageError
from monograph.model.hub import save_model
from monograph.run.folder import Run
from monograph.session.record import write_config
from monograph.sweeps import spec
from monograph.text.tokenizer import Tokenizer

SHAPE = ["model.hidden_size=64", "model.num_hidden_layers=2", "model.num_attention_heads=4"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def begun(name: str, **values: object) -> Run:
    run = Run.create(Path("runs") / name)
    write_config(
        run, load(None, {key.replace("__", "."): value for key, value in values.items()}, {})
    )
    return run


def test_axes_and_values() -> None:
    found = spec.spec_of([*SHAPE, "optim.lr=1e-3,1e-2", "train.seed=0..2", "optim.eps=1e-9"], None)
    assert len(found.points) == 6 and found.points[4] == {"optim.lr": 1e-2, "train.seed": 1}
    assert found.settings.optim.eps == 1e-9 and found.target is None
    assert found.settings.optim.lr == 1e-3, (
        "an axis' first value stands for it in what all members share"
    )


def test_without_an_axis_rates_about_the_known_one_and_two_seeds() -> None:
    found = spec.spec_of([*SHAPE, "optim.lr=0.01"], None)
    rates = [point["optim.lr"] for point in found.points[::2]]
    assert rates == [0.01 * 2.0**step for step in range(-4, 4)] and {
        p["train.seed"] for p in found.points
    } == {0, 1}
    assert spec.spec_of(["model.preset=nano"], None).points[8]["optim.lr"] == 6e-3, (
        "nano's, for Muon"
    )
    save_model(tiny_llama(vocab_size=259), "base", Tokenizer.bytes())
    found = spec.spec_of(
        [
            "model.init=base",
            "lora.rank=4",
            "optim.lr=0.001",
            "lora.lr_ratio=16",
            "data.sequence_length=32",
        ],
        None,
    )
    assert [point["optim.lr"] for point in found.points[::8]] == [6.25e-05, 0.001]
    assert found.settings.lora.lr_ratio == 16


def test_a_fresh_machine_sweeps_the_default_models_proxy() -> None:
    found = spec.spec_of([], None)
    assert len(found.points) == 16
    narrow, wide = found.settings, found.target
    assert wide and wide.model.preset == "micro"
    assert (wide.optim.transfer, wide.optim.transfer_base) == ("width", 96)
    assert (narrow.model.hidden_size, narrow.model.num_attention_heads, narrow.optim.transfer) == (
        96,
        3,
        "none",
    )
    assert narrow.train.minutes == spec.DEFAULT_MINUTES and wide.train.minutes == 3.0


def test_the_newest_run_is_what_is_tuned() -> None:
    begun("a", model__preset="nano")
    run = begun("b", model__preset="micro", data__sequence_length=64, optim__name="adamw", optim__lr=3e-3,
                train__updates=777, train__wall_minutes=9, optim__warmup_updates=9, train__micro_batch=3)  # fmt: skip
    run.tokenizer.write_text("{}")
    found = spec.spec_of([], None)
    assert found.settings.data.sequence_length == 64 and found.settings.optim.name == "adamw"
    assert found.settings.data.tokenizer == str(run.tokenizer)
    assert (found.settings.train.updates, found.settings.train.micro_batch) == (None, "auto")
    assert found.settings.optim.lr == "auto" and found.settings.optim.warmup_updates == "auto"


def test_what_is_said_of_a_value_that_a_sweep_has_not_of_the_newest_run_is_left_behind() -> None:
    run = begun("a", model__preset="nano", data__tokenizer="bpe", data__vocab_size=300, train__parallel="fsdp",
                train__gather_dtype="bf16")  # fmt: skip
    run.tokenizer.write_text("{}")
    found = spec.spec_of([], None).settings
    assert (found.data.tokenizer, found.data.vocab_size) == (str(run.tokenizer), None)
    assert (found.train.parallel, found.train.gather_dtype) == ("none", "fp32")


def test_a_sweep_is_not_the_newest_run_and_what_has_no_narrower_shape_is_tuned_itself() -> None:
    begun("a", model__preset="nano")
    (begun("b", model__preset="micro").folder / "sweep.json").write_text("{}")
    found = spec.spec_of([], None)
    assert (
        found.settings.model.preset == "nano"
        and found.target is None
        and found.settings.model.hidden_size is None
    )


def test_transfer_is_asked_for() -> None:
    found = spec.spec_of(["model.preset=micro", "optim.transfer=width", "optim.lr=1e-3,1e-2"], None)
    assert found.target and (found.target.optim.transfer, found.target.optim.transfer_base) == (
        "width",
        96,
    )
    assert found.settings.model.hidden_size == 96 and found.settings.optim.transfer == "none"
    named = spec.spec_of(
        ["model.preset=micro", "optim.transfer=width", "optim.transfer_base=96"], None
    )
    assert named.target and named.target.optim.transfer_base == 96
    assert (named.settings.optim.transfer, named.settings.optim.transfer_base) == ("none", None)
    with pytest.raises(UsageError, match="no narrower model keeps the ratios"):
        spec.spec_of(["model.preset=nano", "optim.transfer=width"], None)


@pytest.mark.parametrize(
    ("arguments", "samples", "words"),
    [
        (["data.held_out=0"], None, "members are compared on held-out text"),
        (
            ["train.wall_minutes=3"],
            None,
            "the members of a sweep share train.minutes: leave it out",
        ),
        (["optim.lrr=1,2"], None, "did you mean optim.lr=1,2?"),
        (["optim.lr=1e-3,1e-2"], 3, "the axes have 2 points"),
        (["optim.lr=log:1e-3..1e-2"], None, "say how many values"),
    ],
)
def test_what_cannot_be_asked(arguments: list[str], samples: int | None, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        spec.spec_of(arguments, samples)


def test_a_sweep_that_is_there_is_gone_on_with(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    assert not spec.names_existing_sweep(tmp_path / "s", [], None)
    (tmp_path / "s" / "sweep.json").write_text("{}")
    assert spec.names_existing_sweep(tmp_path / "s", [], None)
    assert not spec.names_existing_sweep(
        tmp_path / "s", ["texts"], None
    ) and not spec.names_existing_sweep(None, [], None)
