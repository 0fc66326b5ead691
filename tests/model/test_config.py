# Run: pytest tests/model/test_config.py
"""Sizes: the presets are what their table says, odd values are refused by name, config.json goes
both ways.
"""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from monograph.errors import InputRefused
from monograph.model.config import LlamaConfig
from monograph.model.layer_types import FULL_ATTENTION, SLIDING_ATTENTION
from monograph.model.scaling import LinearScaling, Llama3Scaling

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
HF = {"model_type": "llama", **SMALL}


def _table():
    rows = re.findall(
        r"^\s*\| ([\w-]+) \| ([\d,]+) \| (.*) \|$", LlamaConfig.preset.__doc__, re.MULTILINE
    )
    return {name: (int(count.replace(",", "")), rest) for name, count, rest in rows}


@pytest.mark.parametrize("name", ["nano", "micro", "124m", "llama-179m", "1b", "8b"])
def test_a_preset_is_what_the_table_says(name):
    config, (count, rest) = LlamaConfig.preset(name), _table()[name]
    assert config.parameter_count() == count
    assert rest == " | ".join(
        [
            f"{config.vocab_size:,}",
            f"{config.num_hidden_layers}",
            f"{config.hidden_size:,}",
            f"{config.intermediate_size:,}",
            f"{config.num_attention_heads} x {config.head_dim}",
            f"{config.num_key_value_heads}",
            "tied" if config.tie_word_embeddings else "untied",
            f"{config.max_position_embeddings:,}",
        ]
    )


def test_a_preset_takes_overrides_and_refuses_unknown_ones():
    assert LlamaConfig.preset("nano", vocab_size=1000).vocab_size == 1000
    with pytest.raises(InputRefused, match="'hiden_size'"):
        LlamaConfig.preset("nano", hiden_size=64)
    with pytest.raises(InputRefused, match=r"preset = 'mega': expected one of nano, micro"):
        LlamaConfig.preset("mega")


def test_a_preset_of_a_family_has_its_windows_and_its_layers_that_do_not_rotate():
    assert LlamaConfig.preset("nano", family="olmo3", num_hidden_layers=5).layer_types == (
        SLIDING_ATTENTION,
    ) * 3 + (
        FULL_ATTENTION,
        SLIDING_ATTENTION,
    )
    assert LlamaConfig.preset("nano", family="smollm3", num_hidden_layers=5).no_rope_layers == (
        1,
        1,
        1,
        0,
        1,
    )
    assert LlamaConfig.preset("1b", family="gemma3_text").theta_and_scaling(local=True) == (
        1e4,
        None,
    )
    assert LlamaConfig.preset("nano", family="qwen3") == LlamaConfig.preset(
        "nano", model_type="qwen3"
    )
    with pytest.raises(InputRefused, match="model_type = 'gpt2' is not supported"):
        LlamaConfig.preset("nano", family="gpt2")


def test_sizes_that_are_left_out_are_derived():
    config = LlamaConfig(**SMALL)
    assert (config.num_key_value_heads, config.head_dim) == (4, 8)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"num_key_value_heads": 3},
            r"num_attention_heads = 4 is not a multiple of num_key_value_heads = 3",
        ),
        (
            {"num_attention_heads": 5},
            r"hidden_size = 32 is not a multiple of num_attention_heads = 5",
        ),
        ({"hidden_size": 12}, r"head_dim = 3 is odd.*hidden_size = 12 and num_attention_heads = 4"),
        ({"head_dim": 7}, r"head_dim = 7 is odd"),
        ({"vocab_size": "64"}, r"vocab_size = '64': expected a whole number of at least 1"),
        ({"vocab_size": True}, r"vocab_size = True"),
        ({"num_hidden_layers": 0}, r"num_hidden_layers = 0"),
        ({"intermediate_size": 48.0}, r"intermediate_size = 48.0"),
        ({"head_dim": -8}, r"head_dim = -8"),
        ({"rms_norm_eps": float("nan")}, r"rms_norm_eps = nan: expected a positive number"),
        ({"rope_theta": float("inf")}, r"rope_theta = inf"),
        ({"rope_theta": 10**400}, r"rope_theta = 1000"),
        ({"rms_norm_eps": "1e-5"}, r"rms_norm_eps = '1e-5'"),
        ({"initializer_range": 2}, r"initializer_range = 2: expected at most 1"),
        ({"tie_word_embeddings": 1}, r"tie_word_embeddings = 1: expected true or false"),
        ({"bos_token_id": -1}, r"bos_token_id = -1"),
        ({"eos_token_id": (2, "3")}, r"eos_token_id = '3'"),
        (
            {"pad_token_id": 64},
            r"pad_token_id = 64: expected null or a token id below vocab_size = 64",
        ),
        ({"pad_token_id": -65}, r"pad_token_id = -65"),
        ({"pad_token_id": "0"}, r"pad_token_id = '0'"),
        ({"attention_dropout": -0.1}, r"attention_dropout = -0.1: expected a positive number"),
    ],
)
def test_a_wrong_value_is_refused_by_name(values, said):
    with pytest.raises(InputRefused, match=said):
        LlamaConfig(**{**SMALL, **values})


@pytest.mark.parametrize(
    "values", [{"factor": 0.5}, {"low_freq_factor": 4.0}, {"original_max_position_embeddings": 0}]
)
def test_a_wrong_scaling_is_refused_by_name(values):
    with pytest.raises(InputRefused, match=rf"rope_scaling.*{next(iter(values))}"):
        Llama3Scaling(**values)


@pytest.mark.parametrize("name", ["nano", "llama-179m", "1b"])
def test_config_json_goes_both_ways(name):
    config = LlamaConfig.preset(name, eos_token_id=(1, 2))
    assert LlamaConfig.from_hf(config.to_hf()) == config


def test_both_spellings_of_rope_in_config_json_are_read():
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    four = {**HF, "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **scaling}}
    older = {**HF, "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}}
    five = {**HF, "rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **scaling}}
    left_open = {"rms_norm_eps": 1e-6, "bos_token_id": 1, "eos_token_id": 2}
    expected = LlamaConfig(
        **SMALL, **left_open, rope_theta=5e5, rope_scaling=Llama3Scaling(**scaling)
    )
    assert (
        LlamaConfig.from_hf(four)
        == LlamaConfig.from_hf(older)
        == LlamaConfig.from_hf(five)
        == expected
    )
    linear = {**HF, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert LlamaConfig.from_hf(linear).rope_scaling == LinearScaling(2.0)
    both = LlamaConfig.from_hf(
        linear | {"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}
    )
    # As transformers reads it.
    assert (both.rope_scaling, both.rope_theta) == (LinearScaling(2.0), 10_000.0)
    assert (
        LlamaConfig.from_hf(
            {**HF, "rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}
        ).rope_theta
        == 7.0
    )


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"model_type": "mamba"},
            r"model_type = 'mamba' is not supported: only llama, ",
        ),
        ({"mlp_bias": True}, r"mlp_bias = True is not supported"),
        ({"rms_norm_eps": None}, r"rms_norm_eps = null: expected a number"),
        ({"max_position_embeddings": None}, r"max_position_embeddings = null"),
        ({"attention_dropout": None}, r"attention_dropout = null"),
        ({"is_causal": False}, r"is_causal = False is not supported: only True is"),
        (
            {"partial_rotary_factor": 0.5},
            r"partial_rotary_factor = 0.5 is not supported: only 1 is",
        ),
        (
            {"per_layer_config": {"0": {"head_dim": 4}}},
            r"per_layer_config = .* is not supported: only None is",
        ),
        ({"quantization_config": {"bits": 4}}, r"quantization_config: quant_method = None is not"),
        (
            {"transformers_weights": "other.safetensors"},
            r"transformers_weights = .* is not supported",
        ),
        ({"rope_parameters": "llama3"}, r"rope_parameters = 'llama3': expected a table"),
        (
            {
                "rope_scaling": {"type": "longrope", "factor": 2.0},
                "rope_parameters": {"rope_type": "default"},
            },
            r"rope_type = 'longrope' is not supported",
        ),
        ({"hidden_act": "gelu"}, r"hidden_act = 'gelu' is not supported"),
        ({"model_type": None}, r"model_type"),
        ({"vocab_size": None}, r"the key vocab_size is missing"),
        ({"num_key_value_heads": 0}, r"num_key_value_heads = 0"),
        ({"hidden_size": [32]}, r"hidden_size = \[32\]"),
        (
            {"max_position_embeddings": 10**13},
            r"max_position_embeddings = 10000000000000: expected at most 2147483647",
        ),
        ({"eos_token_id": 2**31}, r"eos_token_id = 2147483648: expected a token id, at most"),
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
            r"rope_type = 'longrope' is not supported",
        ),
        (
            {"rope_scaling": {"rope_type": ["linear"], "factor": 2.0}},
            r"rope_type = \['linear'\] is not supported",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}},
            r"the key low_freq_factor .* is missing",
        ),
        (
            {"rope_scaling": {"type": "linear"}},
            r"the key factor of the linear rope scaling is missing",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 0.5}},
            r"rope_scaling.factor = 0.5: expected at least 1",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            r"full_attention: one rotary .* not supported",
        ),
        ({"rope_scaling": "llama3"}, r"rope_scaling = 'llama3': expected a table"),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            r"partial_rotary_factor = 0.5 is not supported",
        ),
        ({"rope_theta": "many"}, r"rope_theta = 'many'"),
        (
            {"model_type": "olmo3", "rope_scaling": {"type": "linear", "factor": 4.0}},
            r"type = 'linear' .* write rope_type",
        ),
    ],
)
def test_a_config_json_that_is_not_ours_is_refused_by_name(values, said):
    with pytest.raises(InputRefused, match=said):
        LlamaConfig.from_hf({**HF, **values})


def test_the_configuration_needs_no_torch():
    code = "import sys, monograph.model.config; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
