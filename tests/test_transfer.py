# Run: pytest tests/test_transfer.py
"""Width transfer: the proxy of a model, the table, and what is refused. Law 14 is in tests/laws."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from torch import nn

import monograph
from batches import tiny_config, tiny_llama
from monograph.errors import UsageError
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.optim import AdamW, Group, Muon
from monograph.step import Step
from monograph.transfer import WidthFactors, WidthTransfer, narrowed

FAMILIES = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "biased": {"attention_bias": True},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
}


def wide(**changes) -> LlamaConfig:
    shape = {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    }
    return LlamaConfig(**{"vocab_size": 61, "num_hidden_layers": 2, **shape, **changes})


# ---- the proxy -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "shape"),
    [
        ("micro", (96, 256, 3, 1)),
        ("124m", (256, 680, 2, 2)),
        ("llama-179m", (256, 1024, 4, 1)),
        ("1b", (256, 1024, 4, 1)),
        ("8b", (512, 1792, 4, 1)),
    ],
)
def test_the_proxy_of_a_preset(preset, shape):
    config = LlamaConfig.preset(preset)
    base = narrowed(config)
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    assert tuple(getattr(base, name) for name in names) == shape
    same = {name: getattr(config, name) for name in (*names, "initializer_range")}
    assert replace(base, **same) == config
    assert base.initializer_range == pytest.approx(
        config.initializer_range * math.sqrt(config.hidden_size / shape[0])
    )
    sizes = dict(zip(names, shape, strict=True))
    assert LlamaConfig.preset(preset, **sizes) == base, (
        "the proxy of a preset is that preset, made narrower"
    )
    WidthTransfer(config, base)


def test_a_width_may_be_named_and_may_be_wider():
    assert narrowed(wide(), 32).num_attention_heads == 4
    assert narrowed(wide(), 64) == wide()
    assert narrowed(wide(), 128).num_key_value_heads == 8
    assert narrowed(narrowed(wide(), 16), 64).hidden_size == 64


@pytest.mark.parametrize(
    ("config", "width", "said"),
    [
        (
            wide(),
            24,
            r"hidden_size = 24 as a base: does not keep the ratios .*; these do: 16, 32, 48, 64",
        ),
        (wide(), 8, r"these do: 16, 32, 48, 64"),
        (
            LlamaConfig.preset("nano"),
            None,
            "no narrower model keeps the ratios of hidden_size 64, 2 heads",
        ),
    ],
)
def test_a_width_that_does_not_keep_the_ratios_is_refused(config, width, said):
    with pytest.raises(UsageError, match=said):
        narrowed(config, width)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 3}, r"num_hidden_layers \(2, 3\)"),
        ({"vocab_size": 62}, r"vocab_size \(61, 62\)"),
        ({"num_key_value_heads": 8}, r"num_attention_heads / num_key_value_heads \(2, 1\)"),
        ({"intermediate_size": 256}, r"intermediate_size / hidden_size \(3, 4\)"),
        ({"tie_word_embeddings": True}, r"tie_word_embeddings \(False, True\)"),
        ({"num_attention_heads": 4}, r"head_dim \(8, 16\), num_attention_heads / hidden_size"),
    ],
)
def test_shapes_that_differ_in_more_than_width_are_refused_by_name(changes, said):
    with pytest.raises(UsageError, match=said):
        WidthTransfer(wide(**changes), narrowed(wide(), 16))
    WidthTransfer(wide(intermediate_size=204), narrowed(wide(), 16))  # 6 % apart


# ---- the table -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_has_its_row(family):
    config = wide(**FAMILIES[family])
    transfer, model = WidthTransfer(config, narrowed(config, 16)), Llama(config)
    found, by_muon = transfer.factors(), transfer.factors(Muon())
    m, tied = 4.0, config.tie_word_embeddings
    assert transfer.width_ratio == m
    for name, parameter in model.named_parameters():
        pattern = name if "layers" not in name else f"model.layers.*.{name.split('.', 3)[3]}"
        row = found[pattern]
        if "embed" in name:
            assert row == WidthFactors(2.0, 1.0, 1 / m)
        elif name == "lm_head.weight":
            assert row == WidthFactors(1.0, 1 / m, 1.0)
        elif name == "model.norm.weight":
            assert row == (
                WidthFactors(1 / m, 1 / m, 1.0) if tied else WidthFactors(1.0, 1.0, 1 / m)
            )
        elif parameter.ndim == 2:
            assert row == WidthFactors(1.0, 1 / m, 1 / m)
            row = row._replace(lr=m**-0.5)
        else:
            assert row == WidthFactors(1.0, 1.0, 1 / m)
        assert by_muon[pattern] == row
    for optim in (AdamW(weight_decay=0.1), Muon(weight_decay=0.1)):
        for kind in transfer.optimizer(optim).kinds(model).values():
            assert kind.weight_decay * kind.lr == pytest.approx(0.1) or kind.weight_decay == 0


def test_each_matrix_has_its_own_ratio():
    config = wide(intermediate_size=200)
    transfer = WidthTransfer(config, replace(narrowed(wide(), 16), initializer_range=0.04))
    found = transfer.factors()
    assert found["model.layers.*.mlp.down_proj.weight"].lr == 48 / 200
    assert found["model.layers.*.mlp.up_proj.weight"].lr == 16 / 64
    # Its spectral norm, lr * 0.2 sqrt(max(rows, cols)), goes with sqrt(rows / cols).
    up = transfer.factors(Muon())["model.layers.*.mlp.up_proj.weight"].lr
    assert up * math.sqrt(200 / 48) == pytest.approx(math.sqrt((200 / 64) / (48 / 16)))


def test_initial_weights_have_the_spread_of_the_table():
    config = wide(
        hidden_size=256, intermediate_size=768, num_attention_heads=32, num_key_value_heads=16
    )
    base = narrowed(config, 64)
    model, narrow = Llama(config, seed=1), Llama(base, seed=2)
    WidthTransfer(config, base).initialise_(model)
    for name, ratio in (("embed_tokens.weight", 1.0), ("layers.0.mlp.down_proj.weight", 0.5)):
        one, other = (each.model.get_parameter(name).std().item() for each in (model, narrow))
        assert one / other == pytest.approx(ratio, rel=0.03)


def test_a_parameter_without_a_row_is_an_error():
    config = tiny_config()
    transfer, model = WidthTransfer(config, narrowed(config, 16)), tiny_llama()
    model.model.layers[1].mlp.adapter = nn.Linear(4, 4)
    with pytest.raises(
        UsageError, match=r"width transfer has no row for model.layers.1.mlp.adapter.weight"
    ):
        transfer.initialise_(model)


def test_a_tensor_that_a_family_may_gain_is_an_error(monkeypatch):
    gained = {"self_attn.sinks": (8,)}
    monkeypatch.setattr(monograph.transfer, "block_shapes", lambda config, layer: gained)
    with pytest.raises(UsageError, match=r"no row for self_attn.sinks"):
        WidthTransfer(wide(), narrowed(wide(), 16)).factors()


@pytest.mark.parametrize("optim", [AdamW(groups=[Group("*")]), Muon(matrices=["*.weight"])])
def test_an_optimizer_with_rates_of_its_own_is_refused(optim):
    with pytest.raises(UsageError, match="leave groups and matrices to it"):
        WidthTransfer(wide(), narrowed(wide(), 16)).optimizer(optim)


@pytest.mark.parametrize(("optim", "planes"), [(AdamW(), (2, 4)), (Muon(), (6, 7))])
def test_few_buffers_more_and_none_at_the_base(optim, planes):
    config = wide()
    found = tuple(
        len(
            Step(
                Llama(config), optim=WidthTransfer(config, narrowed(config, width)).optimizer(optim)
            ).planes
        )
        for width in (64, 16)
    )
    assert found == planes


def test_the_library_has_it():
    assert monograph.WidthTransfer is WidthTransfer and monograph.narrowed is narrowed
