# Run: pytest tests/session/test_transfer.py
"""`optim.transfer`: what a run records of it, what is refused, the proxy of a run, and a run to its
export.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from monograph import checkpointing
from monograph.commands.export import run as export
from monograph.commands.train import run as train
from monograph.config import Settings, load
from monograph.device import card_device
from monograph.errors import UsageError
from monograph.laws.comparisons import relative_error
from monograph.model import hub
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.run.folder import Run
from monograph.session.door import transfer_of
from monograph.session.plan import Shape
from monograph.session.record import write_config
from monograph.session.recorded import settings_from_parent, settings_to_resume
from monograph.session.requirements import require_possible
from monograph.session.resolve import request_of, resolve, shape_of
from monograph.sweeps.spec import narrow_proxy, transfer_notes
from monograph.transfer import WidthTransfer, narrowed

WIDE = {
    "model.preset": "nano", "model.hidden_size": 256, "model.intermediate_size": 768, "model.num_attention_heads": 8,
    "model.num_key_value_heads": 4, "optim.lr": 0.01, "optim.name": "muon",
}  # fmt: skip


def settings(**changes: Any) -> Settings:
    return load(None, WIDE | {key.replace("__", "."): value for key, value in changes.items()}, {})


def sized(given: Settings) -> Settings:
    return resolve(given, card_device("H100")).record.settings


def shape(given: Settings) -> LlamaConfig:
    return shape_of(resolve(given, card_device("H100")))


def test_the_width_is_recorded_once_it_is_chosen() -> None:
    chosen = sized(settings(optim__transfer="width"))
    assert chosen.optim.transfer_base == 64 and chosen.origins["optim.transfer_base"] == "plan"
    assert sized(chosen).optim.transfer_base == 64
    assert (
        sized(settings(optim__transfer="width", optim__transfer_base=128)).optim.transfer_base
        == 128
    )
    assert sized(settings()).optim.transfer == "none"


@pytest.mark.parametrize("value", ["0", "-1", "1e3.5", "wide"])
def test_what_is_no_width_is_refused(value: str) -> None:
    with pytest.raises(
        UsageError, match="command line: optim.transfer_base = .*expected a whole number above 0"
    ):
        settings(optim__transfer="width", optim__transfer_base=value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"optim.lr": "auto"},
            "carries a learning rate that was found on a narrower model: give it as optim.lr",
        ),
        (
            {"optim.transfer": "width", "optim.transfer_base": 48},
            "optim.transfer = width: hidden_size = 48 as a base.*64, 128",
        ),
        ({"model.preset": "nano"}, "no narrower model keeps the ratios"),
        (
            {"model.init": "own.py:build"},
            "a rule for a new model, made by preset or sizes.*own.py:build",
        ),
    ],
    ids=["no rate", "no such width", "as narrow as can be", "other weights"],
)
def test_what_cannot_be_carried_is_refused(
    changes: dict[str, Any], said: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text("def build(): ...\n")
    given: dict[str, Any] = {"optim.transfer": "width", "optim.lr": 0.01, **changes}
    if not changes.keys() & {"model.preset", "model.init"}:
        given = WIDE | given
    with pytest.raises(UsageError, match=said):
        require_possible(load(None, given, {}), card_device("H100"))
        sized(load(None, given, {}))


def test_a_rate_may_stay_open_where_nothing_is_trained() -> None:
    given = sized(settings(optim__transfer="width", optim__lr="auto"))
    config = shape(given)
    assert request_of(
        resolve(given, card_device("H100")), config, card_device("H100")
    ).training.optim.groups
    assert shape(narrow_proxy(given, config)).hidden_size == 64


def test_the_optimizer_has_the_rates_of_the_table() -> None:
    card = card_device("H100")
    given = resolve(settings(optim__transfer="width"), card)
    config = shape_of(given)
    plan = resolve(given, card, Shape(config))
    found = {group.pattern: group for group in plan.training.optim.groups}
    assert found["model.layers.*.mlp.up_proj.weight"].lr == 0.5
    assert found["model.norm.weight"].lr == 0.25 and found["model.embed_tokens.weight"].eps == 0.25
    assert request_of(given, config, card).training.optim == plan.training.optim
    assert not resolve(settings(), card).training.optim.groups
    with pytest.raises(UsageError, match="a rule for a new model"):
        resolve(given, card, Shape(None))


def test_the_proxy_of_a_run_is_the_base_and_an_ordinary_run() -> None:
    given = sized(settings(optim__transfer="width", train__tokens_per_update=1024))
    config = shape(given)
    proxy = narrow_proxy(given, config)
    assert shape(proxy) == narrowed(config) and proxy.optim.transfer == "none"
    transfer = transfer_of(given, config)
    assert transfer is not None and transfer.base == shape(proxy)
    differ = {key for key, value in given.values().items() if value != proxy.values()[key]}
    sizes = {
        f"model.{n}"
        for n in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    }
    assert differ == sizes | {"optim.transfer", "optim.transfer_base"}


def test_what_does_not_carry_is_said_and_not_applied() -> None:
    given = sized(settings(optim__transfer="width", train__tokens_per_update=4096))
    same = transfer_notes(given, given, 100, 100)
    assert (
        len(same) == 2
        and same[0].startswith("carried: learning rate")
        and "tokens per update" in same[1]
    )
    small = given.resolve({"train.tokens_per_update": 1024}, "test")
    larger, longer = transfer_notes(given, small, 500, 100)[2:]
    assert "4,096 tokens per update instead of 1,024" in larger and "about 2 times" in larger
    assert "500 updates instead of 100, 20 times the tokens" in longer and "divided by 20" in longer
    assert all(line.endswith("not applied") for line in (larger, longer))


def test_a_run_that_goes_on_keeps_its_base(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run")
    write_config(run, sized(settings(optim__transfer="width", optim__transfer_base=128)))
    run.tokenizer.touch()
    for said in (
        {"optim.transfer": "width", "optim.transfer_base": 128},
        {"optim.transfer": "width"},
        {},
    ):
        assert settings_to_resume(run, load(None, said, {})).optim.transfer_base == 128
        assert settings_from_parent(run, load(None, said, {})).optim.transfer_base == 128
    for key, value, own in (("optim.transfer", "none", "width"), ("optim.transfer_base", 64, 128)):
        with pytest.raises(UsageError, match=f"{key} = {value} .* was started with {own}"):
            settings_to_resume(run, load(None, {key: value}, {}))
        with pytest.raises(
            UsageError, match=f"{key} = {value}, .* were drawn with {own}; leave it out"
        ):
            settings_from_parent(run, load(None, {key: value}, {}))


@pytest.mark.parametrize("name", [pytest.param("adamw", marks=pytest.mark.slow), "muon"])
def test_from_training_to_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tied model: the final gain starts at 1/m, and the folder is that of any Llama."""
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr("monograph.session.reporting.write_report", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(
        "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu " * 60
    )
    given = WIDE | {
        "data.source": "text.txt", "data.tokenizer": "bytes", "data.sequence_length": 32, "data.held_out": 0.0,
        "train.updates": 3, "train.tokens_per_update": 128, "train.compile": "none", "train.precision": "fp32",
        "train.save_every": 3, "optim.transfer": "width", "optim.name": name, "optim.warmup_updates": 0,
    }  # fmt: skip
    train(load(None, given, {}), out=Path("run"), resume=None, from_=None, json=False)
    torch.use_deterministic_algorithms(False)
    assert "transfer_base = 64" in Path("run/config.toml").read_text()
    first = checkpointing.load(Path("run/checkpoints/step-00000000")).model
    config = json.loads((Path("run/checkpoints/step-00000003/state.json")).read_text())[
        "model_config"
    ]
    assert torch.equal(first["model.norm.weight"], torch.full((256,), 0.25))
    assert "transfer" not in json.dumps(config) and config["tie_word_embeddings"]
    export("run", to=Path("out"), format="hf", dtype=None)
    theirs, report = AutoModelForCausalLM.from_pretrained("out", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    mine = hub.load_model("out")
    assert (
        isinstance(mine, Llama)
        and WidthTransfer(mine.config, narrowed(mine.config)).width_ratio == 4
    )
    tokens = torch.arange(30)[None]
    with torch.no_grad():
        assert relative_error(mine.logits(mine(tokens)), theirs(tokens).logits) < 1e-6
