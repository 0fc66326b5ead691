# Run: pytest tests/session/test_resolve.py
"""What the settings pin, the planner leaves alone; what nothing fits, `train` refuses before
anything is built.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from monograph import planner
from monograph.config import load
from monograph.decode.cache import KVCache
from monograph.device import Device, card_device
from monograph.errors import OutOfDeviceMemory, UsageError
from monograph.model.config import LlamaConfig
from monograph.ops.attention import slots_per_block
from monograph.optim import AdamW
from monograph.planner import defaults
from monograph.predict.estimate import estimate_bytes
from monograph.predict.footprint import Footprint
from monograph.predict.roofline import efficiency, matmul_parameters
from monograph.run.source import ModelSource
from monograph.session import setup
from monograph.session.objectives.rewards import Rewards, predicted_sampling_s
from monograph.session.objectives.texts import TextTask
from monograph.session.plan import RunPlan, Shape
from monograph.session.requirements import notes_on, require_compatible
from monograph.session.resolve import REMATS, request_of, resolve, shape_of
from monograph.text.tokenizer import Tokenizer

CARD = card_device("4090")


def settings(**keys):
    return load(None, {key.replace("__", "."): value for key, value in keys.items()}, {})


def sized(**keys) -> RunPlan:
    return resolve(settings(**keys), CARD)


def shape(plan: RunPlan) -> Shape:
    return Shape(shape_of(plan))


@pytest.fixture(autouse=True)
def _not_traced(monkeypatch):
    guess = lambda work: Footprint("forward", {"weights": estimate_bytes(work)})  # noqa: E731
    monkeypatch.setattr(defaults, "traced_bytes", lambda work: guess(work).by_origin)


def test_a_run_takes_the_whole_update_where_it_fits():
    given = sized(model__preset="micro", train__tokens_per_update=8192)
    assert (
        resolve(given, CARD, shape(given)).training.rows
        == given.training.window_rows
        == 8192 // given.training.length
    )


def test_what_is_pinned_stays():
    given = sized(
        train__micro_batch=3, train__precision="fp32", train__compile="none", optim__name="adamw"
    )
    asked = request_of(given, shape(given).config, CARD)
    assert (asked.micro_batch, asked.precisions, asked.scopes) == (3, ("fp32",), ("none",))
    assert isinstance(asked.training.optim, AdamW)


@pytest.mark.parametrize(
    "keys", [{}, {"train__remat": "full", "train__micro_batch": 3}, {"optim__weight_decay": 0.2}]
)
def test_how_a_run_is_trained_is_one_record_which_its_settings_give_again(keys):
    given = sized(model__preset="micro", train__tokens_per_update=8192, **keys)
    known = shape(given)
    plan = resolve(given, CARD, known)
    asked = request_of(given, known.config, CARD).training
    assert not plan.open_choices and given.open_choices == {
        "micro_batch",
        "compile",
        "remat",
        "memory",
    } - {key[7:] for key in keys}
    made = {name: getattr(plan.training, name) for name in ("rows", "compile", "remat")}
    assert plan.training == replace(asked, **made, optim=plan.training.optim), (
        "a request's with what is chosen"
    )
    recorded = plan.record.settings.train
    assert plan.choices == {key: getattr(recorded, key) for key in plan.choices}, (
        "and what is recorded is what is done"
    )
    again = resolve(plan.record, CARD, known)
    assert (again.training, again.memory) == (plan.training, plan.memory), (
        "as a resumed run reads it"
    )


def test_only_what_is_built_is_chosen():
    asked = request_of(sized(), shape(sized()).config, CARD)
    for key, values in (("compile", asked.scopes), ("remat", asked.remats)):
        # Else refused.
        assert values and all(settings(**{f"train__{key}": value}) for value in values)


def test_what_nothing_fits_is_exit_code_6():
    given = sized(model__preset="8b")
    with pytest.raises(
        OutOfDeviceMemory, match=r"nothing fits .* of NVIDIA GeForce RTX 4090: .* GiB more"
    ) as refusal:
        resolve(given, CARD, shape(given))
    assert refusal.value.exit_code == 6


@pytest.mark.parametrize(
    "pinned", [{}, {"train__micro_batch": 1}, {"train__micro_batch": 1, "train__remat": "full"}]
)
@pytest.mark.parametrize("folder", [False, True])
def test_what_nothing_fits_is_refused_before_its_weights_are_made(
    pinned, folder, monkeypatch, tmp_path
):
    """They alone may be more than the host has, and then the system kills the process without a
    word.
    """
    monkeypatch.setattr(setup, "build", lambda recipe: pytest.fail("built"))
    keys = {"model__preset": "8b", **pinned}
    if folder:
        # Here is no file of weights.
        monkeypatch.setattr(ModelSource, "require_headers", lambda self, sizes: None)
        (tmp_path / "config.json").write_text(json.dumps(LlamaConfig.preset("8b").to_hf()))
        keys = {"model__init": str(tmp_path), "data__tokenizer": "bytes", **pinned}
    text = SimpleNamespace(
        vocab_size=259, tokenizer=Tokenizer.bytes(), train=SimpleNamespace(per_epoch=1)
    )
    host = replace(CARD, type="cpu")
    with pytest.raises(OutOfDeviceMemory, match="nothing fits"):
        setup.build_run(resolve(settings(**keys), host), TextTask(text), host)


def test_beside_a_pinned_micro_batch_the_rest_is_chosen_all_the_same():
    given = sized(
        model__preset="124m",
        data__sequence_length=1024,
        train__micro_batch=8,
        train__tokens_per_update=2**16,
    )
    tight = replace(CARD, free_memory_bytes=4 * 2**30)
    for device, remats in ((CARD, {"none"}), (tight, set(REMATS) - {"none"})):
        plan = resolve(given, device, shape(given))
        assert plan.training.rows == 8 and plan.training.remat in remats


def test_a_little_less_memory_is_a_smaller_micro_batch():
    given = sized(model__preset="124m", data__sequence_length=1024, train__tokens_per_update=2**19)
    roomy, tight = (
        resolve(given, replace(CARD, free_memory_bytes=gib * 2**30), shape(given)).training.rows
        for gib in (24, 6)
    )
    assert 512 > roomy > tight >= 1 and 512 % roomy == 0 == 512 % tight


def test_the_shape_is_the_settings_own_and_needs_no_text():
    assert (
        shape_of(
            sized(data__tokenizer="bpe", data__vocab_size=700, model__preset="nano")
        ).vocab_size
        == 700
    )
    assert shape_of(sized(data__tokenizer="bytes", model__preset="nano")).vocab_size == 259
    assert shape_of(sized(model__vocab_size=900, model__preset="nano")).vocab_size == 900


def test_a_module_of_ones_own_cannot_be_planned(tmp_path):
    (tmp_path / "own.py").write_text("def build(): ...")
    with pytest.raises(UsageError, match="a preset, sizes or a Hugging Face folder"):
        shape_of(sized(model__init=f"{tmp_path}/own.py:build"))


def test_a_deep_model_gets_a_graph_per_block_and_a_card_may_send_inputs_to_the_host():
    deep, shallow = sized(model__preset="8b"), sized(model__preset="124m")
    assert request_of(deep, shape(deep).config, CARD).scopes[0] == "blocks"
    assert request_of(shallow, shape(shallow).config, CARD).scopes[0] == "whole"
    assert request_of(deep, shape(deep).config, CARD).remats == REMATS
    assert "offload" not in request_of(deep, shape(deep).config, replace(CARD, type="cpu")).remats


def test_offloading_inside_one_graph_is_refused():
    with pytest.raises(UsageError, match="train.compile is blocks or none"):
        require_compatible(settings(train__remat="offload", train__compile="whole"))


def test_fp32_on_a_gpu_is_said_to_leave_its_tensor_cores_idle():
    [note] = notes_on(sized(train__precision="fp32"), CARD)
    assert note.startswith("train.precision = fp32: ") and "TF32" in note
    for card in (
        card_device("T4"),
        replace(CARD, type="cpu"),
    ):  # without bf16, and without tensor cores
        assert not [*notes_on(sized(train__precision="fp32"), card)]


def test_an_update_is_whole_rows_and_a_note_says_how_many():
    plan = sized(train__tokens_per_update=1000, train__tokens=768_000)
    training = plan.training
    assert (training.window_rows, training.tokens_per_update, plan.updates) == (3, 768, 1000)
    [note] = notes_on(plan, CARD)
    assert (
        "train.tokens_per_update = 1000: an update has 3 rows of data.sequence_length = 256, so 768 tokens"
        in note
    )
    for length in (256, 300, 5000):
        usual = sized(data__sequence_length=length)
        assert usual.training.tokens_per_update % length == 0 and not [*notes_on(usual, CARD)]


def test_answers_keys_and_values_are_kept_free(tmp_path, monkeypatch):
    """As many bytes as decoding allocates are left out of what the planner may use."""
    config = LlamaConfig.preset("nano", vocab_size=259, max_position_embeddings=64)
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    asked = {
        "model.init": str(tmp_path),
        "data.tokenizer": "bytes",
        "data.sequence_length": 64,
        "train.micro_batch": 2,
    }
    asked |= {"rl.reward": "exact", "rl.prompts": 3, "rl.group": 5, "rl.max_new_tokens": 9}
    plan = resolve(load(None, asked, {}), CARD, will_build=False)
    clip = plan.training.clip
    assert plan.training.window_rows == 15 and clip is not None and not clip.skip_spikes
    # 15 answers in 16 rows; 3 prompts are read at once.
    cache = KVCache.allocate(config, 16 + 3, 64, torch.float32, torch.device("cpu"))
    needed = sum(tensor.nbytes for tensor in (*cache.keys, *cache.values))
    assert Rewards().extra_bytes(plan, config, CARD) == {"answers": needed}
    fewer = Rewards().extra_bytes(plan, config, CARD, slots=20)
    assert fewer == {
        "answers": 19 * KVCache.bytes_per_row(config, 20, torch.float32, slots_per_block(20))
    }
    near = resolve(
        load(None, asked | {"rl.kl": "k2", "rl.kl_coef": 0.1}, {}), CARD, will_build=False
    )
    assert (
        Rewards().extra_bytes(near, config, CARD)["reference"] == 2 * 4 * config.parameter_count()
    )
    shared = resolve(
        load(
            None,
            asked | {"rl.group": 11, "rl.kl": "k2", "rl.kl_coef": 0.1, "train.parallel": "fsdp"},
            {},
        ),
        CARD,
        will_build=False,
    )
    parts = Rewards().extra_bytes(shared, config, CARD, ranks=2)
    row = KVCache.bytes_per_row(config, 65, torch.float32, slots_per_block(65))
    # 17 answers in 20 rows, which four divides.
    assert parts["answers"] == (20 + 3) * row, "a rank draws half of the answers"
    assert parts["whole weights"] < 4 * config.parameter_count() == parts["reference"], (
        "matrices in bf16, and a half"
    )
    given: list[int] = []
    monkeypatch.setattr(
        planner,
        "budget",
        lambda device: given.append(device.free_memory_bytes) or defaults.budget(device),
    )
    assert resolve(plan, CARD, Shape(config)).training.rows == 2
    assert given == [CARD.free_memory_bytes - needed]
    monkeypatch.undo()
    monkeypatch.setattr(
        "monograph.session.objectives.rewards.default_device", lambda: torch.device("cpu")
    )
    host = Device("a CPU", "cpu", 2**34, 2**34)
    del asked["train.micro_batch"]
    for compiled, known, rows, length in (
        ("none", 22, 15, 24),
        ("whole", 22, 5, 64),
        ("whole", 0, 15, 64),
    ):
        short = resolve(load(None, asked | {"train.compile": compiled}, {}), host, will_build=False)
        work = resolve(short, host, Shape(config, slots=known)).expected.work
        assert (work.window_rows, work.length) == (rows, length), (
            "of short answers three share a row of 64"
        )


@pytest.mark.parametrize(
    ("changes", "head_bytes", "block_bytes"),
    [
        ({"train.precision": "fp32"}, 4, 4),
        ({"train.precision": "bf16"}, 4, 4),
        ({"train.precision": "bf16", "optim.state": "bf16", "optim.master_weights": False}, 2, 2),
        ({"train.precision": "fp32", "lora.rank": 2}, 4, 4),
        ({"train.precision": "bf16", "lora.rank": 2}, 2, 2),
        ({"train.precision": "bf16", "lora.rank": 2, "lora.base": "int8"}, 2, 1),
        ({"train.precision": "bf16", "lora.rank": 2, "lora.base": "nf4"}, 2, 0.516),
    ],
    ids=str,
)
def test_the_time_of_drawing_is_that_of_reading_the_weights_as_they_are_stored(
    changes: dict[str, Any], head_bytes: float, block_bytes: float, tmp_path: Path
) -> None:
    """On a card whose memory is so slow that nothing else takes long."""
    slow = replace(CARD, bandwidth_bytes_per_s=1e9)
    config = LlamaConfig.preset("1b", tie_word_embeddings=False)
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    asked = {
        "model.init": str(tmp_path),
        "data.tokenizer": "bytes",
        "data.sequence_length": 64,
        "train.micro_batch": 2,
        "rl.reward": "exact",
        "rl.prompts": 1,
        "rl.group": 2,
        "rl.max_new_tokens": 10,
    }
    plan = resolve(load(None, asked | changes, {}), CARD, will_build=False)
    head = config.vocab_size * config.hidden_size
    weights_bytes = head * head_bytes + (matmul_parameters(config) - head) * block_bytes
    _, bandwidth = efficiency(slow)
    found = predicted_sampling_s(plan, config, slow)
    assert found == pytest.approx(10 * weights_bytes / bandwidth, rel=0.02)


def test_only_presets_that_were_measured_have_fields_of_muon_of_their_own():
    shapes = (
        {"model__preset": "micro"},
        {"model__preset": "micro", "model__family": "gemma3_text"},
        {"model__preset": "124m"},
    )
    rules = [sized(**keys).training.optim for keys in shapes]
    assert [(rule.momentum, rule.embedding_lr) for rule in rules] == [
        (0.9, 6.0),
        (0.95, 1.0),
        (0.95, 1.0),
    ]


@pytest.mark.parametrize(
    ("keys", "epoch_rows", "decay"),
    [
        ({}, 0, 0.3),
        ({"train__epochs": 2}, 0, 0.6),
        ({"train__epochs": 9}, 0, 1.0),
        ({"train__epochs": 2}, 1, 0.6),
        ({"train__updates": 100}, 400, 0.6),
        ({"train__updates": 100}, 4000, 0.3),
        ({"train__minutes": 1000.0}, 400, 1.0),
        ({"train__minutes": 0.001}, 400, 0.3),
        ({"train__minutes": 1000.0}, 0, 0.3),
        ({"train__epochs": 9, "optim__weight_decay": 0.2}, 0, 0.2),
        ({"optim__name": "adamw"}, 1, 0.1),
        ({"model__family": "olmo3", "train__epochs": 9}, 0, 0.1),
    ],
)
def test_the_decay_of_a_new_small_model_grows_with_its_epochs(keys, epoch_rows, decay):
    given = sized(**({"model__preset": "micro", "train__tokens_per_update": 2048} | keys))
    assert given.training.window_rows == 8
    found = resolve(
        given,
        CARD,
        shape(given)._replace(records_per_epoch=epoch_rows, minutes=given.job.span.minutes),
    )
    assert found.training.optim.weight_decay == pytest.approx(decay)
    assert found.record.settings.optim.weight_decay == found.training.optim.weight_decay, (
        "a resumed run reads it"
    )
