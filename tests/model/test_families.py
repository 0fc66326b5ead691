# Run: pytest tests/model/test_families.py
"""Every family against a plain float64 decoder and against transformers, through folders, and counted."""

from __future__ import annotations

import json
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from monograph.errors import InputRefused
from monograph.model.config import LlamaConfig
from monograph.model.families import FAMILIES, FULL, MOST_LAYERS, SLIDING
from monograph.model.hub import load_model, save_model
from monograph.model.llama import Llama
from monograph.model.scaling import LinearScaling, Llama3Scaling
from numerics import relative_error
from reference import llama as reference

SCALINGS = [None, LinearScaling(2.5), Llama3Scaling(4.0, 1.0, 4.0, 16)]
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
# A key of every kind in every family that has it.
MIXED = {
    "llama": {"attention_bias": True, "rope_scaling": SCALINGS[1]},
    "mistral": {"sliding_window": 5, "tie_word_embeddings": True},
    "qwen2": {"sliding_window": 5, "layer_types": (FULL, SLIDING, SLIDING)},
    "qwen3": {"sliding_window": 5, "layer_types": (SLIDING, FULL, SLIDING), "attention_bias": True},
}


@st.composite
def configs(draw, family):
    keys, layers = FAMILIES[family].keys, draw(st.integers(1, 3))
    key_value, group = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 4]))
    windowed = "sliding_window" in keys and draw(st.booleans())
    kinds = st.lists(st.sampled_from([FULL, SLIDING]), min_size=layers, max_size=layers)
    return LlamaConfig(
        model_type=family,
        vocab_size=draw(st.integers(3, 50)),
        hidden_size=key_value * group * draw(st.integers(2, 6)),
        intermediate_size=draw(st.integers(5, 40)),
        num_hidden_layers=layers,
        num_attention_heads=key_value * group,
        num_key_value_heads=key_value,
        head_dim=draw(st.sampled_from([4, 6, 16])),
        rms_norm_eps=draw(st.sampled_from([1e-6, 1e-5])),
        rope_theta=draw(st.sampled_from([1e4, 5e5])),
        rope_scaling=draw(st.sampled_from(SCALINGS)),
        tie_word_embeddings=draw(st.booleans()),
        attention_bias="attention_bias" in keys and draw(st.booleans()),
        sliding_window=draw(st.sampled_from([1, 2, 5, 39, 40, 100])) if windowed else None,
        layer_types=tuple(draw(kinds)) if windowed and "layer_types" in keys else (),
        initializer_range=0.3,
    )


def _model(config, seed=0):
    """With random biases and norm weights, where a fresh model has zeros and ones that would hide a fault."""
    model, generator = Llama(config, seed), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def _tokens(config, length, seed=0):
    return torch.randint(config.vocab_size, (2, length), generator=torch.Generator().manual_seed(seed))


def _gradients(logits, parameters):
    weights = torch.linspace(-1, 1, logits.numel(), dtype=torch.float64).reshape(logits.shape).to(logits.dtype)
    return torch.autograd.grad((logits * weights).sum(), parameters)


def _assert_near(named, expected, bound):
    # Where a query sees one key only, the gradients of scores are roundings of zero; they are to be seen as such.
    scale = torch.cat([gradient.flatten() for gradient in expected]).norm()
    for (name, ours), theirs in zip(named.items(), expected, strict=True):
        assert (ours - theirs).norm() < bound * max(theirs.norm(), 1e-3 * scale), name


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=6)
@given(data=st.data(), seed=st.integers(0, 99))
def test_float64_equals_the_plain_decoder(family, data, seed):
    config = data.draw(configs(family))
    model, tokens = _model(config, seed).double(), _tokens(config, 9, seed)
    segments = torch.tensor([[1, 1, 1, 2, 2, 2, 2, 0, 0], [1] * 9])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 0], [*range(9)]])
    weights = dict(model.named_parameters())
    ours = model(tokens, segments=segments, positions=positions)
    plain = reference.hidden_states(weights, config, tokens, segments, positions)
    assert relative_error(ours, plain) < 1e-12
    logits, plain_logits = model.logits(ours), reference.logits(weights, config, plain)
    assert relative_error(logits, plain_logits) < 1e-12
    gradients, plain_gradients = (_gradients(x, list(weights.values())) for x in (logits, plain_logits))
    _assert_near(dict(zip(weights, gradients, strict=True)), plain_gradients, 1e-11)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=8)
@given(data=st.data(), seed=st.integers(0, 99))
def test_fp32_equals_transformers(family, data, seed):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = data.draw(configs(family))
    model = _model(config, seed)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config.to_hf()))
    assert type(theirs).__name__ == FAMILIES[family].architecture
    assert model.state_dict().keys() == theirs.state_dict().keys()
    theirs.load_state_dict(model.state_dict())
    tokens = _tokens(config, 40, seed)
    ours, their_logits = model.logits(model(tokens)), theirs(tokens).logits
    assert relative_error(ours, their_logits) < 1e-5
    named, their_named = dict(model.named_parameters()), dict(theirs.named_parameters())
    gradients = _gradients(ours, list(named.values()))
    expected = _gradients(their_logits, [their_named[name] for name in named])
    _assert_near(dict(zip(named, gradients, strict=True)), expected, 1e-5)


@pytest.mark.parametrize("shard", ["20KB", "1GB"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_goes_out_and_comes_back_as_its_family(tmp_path, family, shard):
    from transformers import AutoModelForCausalLM

    config = LlamaConfig(model_type=family, **SMALL | MIXED[family])
    model, tokens = _model(config), _tokens(config, 20)
    save_model(model, tmp_path / "ours", max_shard_bytes=20_000 if shard == "20KB" else 10**9)
    theirs, report = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(theirs).__name__ == FAMILIES[family].architecture
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size=shard)
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists() == (shard == "20KB")
    back = load_model(tmp_path / "theirs")
    assert back.config == config
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), back.parameters(), strict=True))
    with torch.no_grad():
        assert relative_error(back.logits(back(tokens)), theirs(tokens).logits) < 1e-6


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_counted_and_shaped_as_the_configuration_says(family):
    shapes = [LlamaConfig(model_type=family, **SMALL | MIXED[family])]
    shapes += [LlamaConfig.preset(name, model_type=family) for name in ("nano", "1b", "8b")]
    for config in shapes:
        start = time.process_time()
        with torch.device("meta"):
            model = Llama(config)
        assert time.process_time() - start < 2  # drawing 8b would take minutes
        built = {key: tuple(parameter.shape) for key, parameter in model.named_parameters()}
        layers = {
            f"model.layers.{i}.{k}": s
            for i in range(config.num_hidden_layers)
            for k, s in config.layer_shapes().items()
        }
        assert built == {**config.outer_shapes(), **layers}
        assert sum(parameter.numel() for parameter in model.parameters()) == config.parameter_count()
        assert not list(model.buffers())


def test_fresh_biases_are_zero_and_norms_of_heads_one():
    for family in ("qwen2", "qwen3"):
        for name, parameter in Llama(LlamaConfig(model_type=family, **SMALL)).named_parameters():
            if parameter.ndim == 1:
                assert (parameter == (0 if name.endswith(".bias") else 1)).all(), name


# ── config.json ───────────────────────────────────────────────────────────────────────────────────

HF = {key: SMALL[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")}


def _read(**values):
    return LlamaConfig.from_hf({**HF, "num_hidden_layers": 4, "num_key_value_heads": 2, **values})


def _windows(config):
    return [config.window(layer) for layer in range(config.num_hidden_layers)]


@pytest.mark.parametrize(
    ("values", "windows"),
    [
        ({"model_type": "mistral"}, [4096] * 4),
        ({"model_type": "mistral", "sliding_window": None}, [None] * 4),
        ({"model_type": "llama", "sliding_window": 7}, [None] * 4),  # transformers does not read it either
        ({"model_type": "qwen2", "sliding_window": 7}, [None] * 4),
        ({"model_type": "qwen2", "sliding_window": 7, "use_sliding_window": True}, [None] * 4),
        (
            {"model_type": "qwen2", "sliding_window": 7, "use_sliding_window": True, "max_window_layers": 3},
            [None] * 3 + [7],
        ),
        ({"model_type": "qwen3", "sliding_window": 7, "use_sliding_window": True, "max_window_layers": 0}, [7] * 4),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 7,
                "use_sliding_window": True,
                "max_window_layers": 0,
                "layer_types": [FULL, SLIDING, FULL, FULL],
            },
            [None, 7, None, None],
        ),
    ],
)
def test_windows_are_those_of_transformers(values, windows):
    from transformers import AutoConfig

    assert _windows(_read(**values)) == windows
    theirs = AutoConfig.for_model(**{**HF, "num_hidden_layers": 4, **values})
    kinds = getattr(theirs, "layer_types", [SLIDING] * 4)
    window = theirs.sliding_window if values["model_type"] != "llama" else None
    assert [window if kind == SLIDING else None for kind in kinds] == windows


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_file_leaves_open_is_what_transformers_takes(family):
    from transformers import AutoConfig

    heads = {"num_attention_heads": 32, "hidden_size": 64}
    ours = LlamaConfig.from_hf({**HF, **heads, "num_hidden_layers": 2, "model_type": family})
    theirs = AutoConfig.for_model(family, **{**HF, **heads, "num_hidden_layers": 2})
    for key in ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"):
        assert getattr(ours, key) == getattr(theirs, key), key
    assert ours.head_dim == getattr(theirs, "head_dim", 2)
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize("family", FAMILIES)
def test_config_json_goes_both_ways(family):
    config = LlamaConfig(model_type=family, **SMALL | MIXED[family])
    assert LlamaConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config
    same = LlamaConfig(model_type=family, **SMALL)
    if "layer_types" in FAMILIES[family].keys:
        assert LlamaConfig(model_type=family, **SMALL, sliding_window=9, layer_types=(FULL,) * 3) == same


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"model_type": "gemma2"}, r"model_type = 'gemma2' is not supported: only llama, mistral, qwen2, qwen3 are"),
        ({"model_type": "gpt2"}, r"model_type = 'gpt2' is not supported: only llama, mistral"),
        ({"model_type": ["llama"]}, r"model_type = \['llama'\] is not supported"),
        ({"model_type": "mistral", "sliding_window": 0}, r"sliding_window = 0: expected a whole number of at least 1"),
        ({"model_type": "mistral", "sliding_window": "4k"}, r"sliding_window = '4k'"),
        ({"model_type": "mistral", "layer_types": [SLIDING] * 4}, r"layer_types is not supported with .* 'mistral'"),
        ({"model_type": "qwen3", "layer_types": SLIDING}, r"layer_types = 'sliding_attention': expected a list"),
        ({"model_type": "qwen3", "layer_types": [FULL] * 3}, r"layer_types has 3 entries, but num_hidden_layers = 4"),
        (
            {"model_type": "qwen3", "layer_types": [FULL, "chunked_attention"] * 2},
            r"layer_types has 'chunked_attention'",
        ),
        (
            {"model_type": "qwen3", "layer_types": [SLIDING] * 4},
            r"layer_types has 'sliding_attention', but no sliding_w",
        ),
        ({"model_type": "qwen3", "attention_bias": "yes"}, r"attention_bias = 'yes': expected true or false"),
        ({"model_type": "qwen3", "head_dim": 7}, r"head_dim = 7 is odd"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "num_hidden_layers": 10**9},
            rf"num_hidden_layers = 1000000000: expected at most {MOST_LAYERS}",
        ),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": "2"},
            r"max_window_layers = '2': expected a whole number",
        ),
        (
            {"model_type": "qwen2", "num_attention_heads": 5},
            r"hidden_size = 32 is not a multiple of num_attention_heads",
        ),
    ],
)
def test_a_wrong_config_json_is_refused_by_name_and_at_once(values, said):
    start = time.process_time()
    with pytest.raises(InputRefused, match=said) as refusal:
        _read(**values)
    assert time.process_time() - start < 0.1 and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"model_type": "llama", "sliding_window": 5}, r"sliding_window is not supported with model_type = 'llama'"),
        ({"model_type": "mistral", "attention_bias": True}, r"attention_bias is not supported .* 'mistral'"),
        ({"model_type": "mistral", "sliding_window": 5, "layer_types": (FULL,) * 3}, r"layer_types is not supported"),
    ],
)
def test_a_key_that_the_family_would_lose_is_refused(values, said):
    with pytest.raises(InputRefused, match=said):
        LlamaConfig(**SMALL | values)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"vocab_size": 65},
            r"lm_head.weight has shape \[64, 32\], expected \[65, 32\] by config.json \(vocab_size,",
        ),
        ({"head_dim": 8}, r"k_norm.weight has shape \[6\], expected \[8\] by config.json \(head_dim\)"),
        (
            {"num_key_value_heads": 4},
            r"expected \[24, 32\] by config.json \(num_key_value_heads \* head_dim, hidden_size\)",
        ),
        ({"attention_bias": True}, r"12 missing in the weights of a qwen3, the first is .*k_proj.bias'"),
        ({"model_type": "qwen2"}, r"9 missing in the weights of a qwen2, the first is .*k_proj.bias'"),
        ({"model_type": "llama"}, r"6 unexpected in the weights of a llama, the first is .*k_norm.weight'"),
        ({"num_hidden_layers": 10**8}, r"num_hidden_layers = 100000000 in config.json, the weights have 3 layers"),
    ],
)
def test_weights_that_are_not_the_configurations_are_refused_before_anything_is_built(tmp_path, change, said):
    save_model(Llama(LlamaConfig(model_type="qwen3", **SMALL)), tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"layer_types": None} | change))
    start = time.process_time()
    with pytest.raises(InputRefused, match=said):
        load_model(tmp_path / "model")
    assert time.process_time() - start < 0.5
