# Run: pytest tests/model/test_families.py
"""Every family against a plain float64 decoder and against transformers, through folders, and
counted.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from daily import nightly
from model.family_shapes import MIXED, NOT_IN_SMALL, OPTIONAL, SCALINGS, SMALL, in_files, margin
from monograph.errors import InputRefused
from monograph.laws.comparisons import relative_error
from monograph.model.config import LlamaConfig
from monograph.model.families import FAMILIES
from monograph.model.hub import load_model, save_model
from monograph.model.layer_types import FULL_ATTENTION, SLIDING_ATTENTION
from monograph.model.llama import Llama
from monograph.model.parameters import axis_keys, parameter_shapes
from monograph.model.scaling import LONGROPE, PROPORTIONAL, LongScaling, ProportionalScaling
from reference import llama as reference

# By day those whose files differ most from the model in memory go through a folder.
DAY = {"llama", "qwen3_5_moe_text", "gpt_oss"}
# By day every family is compared with one of its references, at night with both.
BY_DECODER, BY_TRANSFORMERS = (nightly(FAMILIES, [*FAMILIES][at::2]) for at in range(2))

MULTIPLIERS = {
    "embedding_multiplier": [1.0, 12.0],
    "residual_multiplier": [1.0, 0.22],
    "attention_multiplier": [None, 0.0625, 0.4],
    "logits_scaling": [1.0, 3.0, 8.0],
}


def _with_shared_keys(draw, config: LlamaConfig) -> LlamaConfig:
    """As many layers without keys of their own as there can be, at most, and none at least."""
    layers = config.num_hidden_layers
    kinds = config.layer_types or (FULL_ATTENTION,) * layers
    most = next(n for n in range(layers) if {*kinds[: layers - n - 1]} != {*kinds})
    shared = draw(st.integers(0, most))
    wide = draw(st.booleans())
    return replace(config, num_kv_shared_layers=shared, use_double_wide_mlp=wide)


@st.composite
def configs(draw, family, least=2):
    keys, layers = FAMILIES[family].optional_keys, draw(st.integers(1, 3))
    key_value, group = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 4]))
    windowed, linear = (
        "sliding_window" in keys and draw(st.booleans()),
        "linear_num_key_heads" in keys,
    )
    recurrent = not FAMILIES[family].other_layers.attends
    kinds = st.lists(
        st.sampled_from(
            [
                FULL_ATTENTION,
                FAMILIES[family].other_layer_type,
                *FAMILIES[family].more_layer_types,
            ]
        ),
        min_size=layers,
        max_size=layers,
    )
    sizes = {
        "linear_conv_kernel_dim": draw(st.integers(1, 5)),
        "linear_key_head_dim": draw(st.sampled_from([4, 7])),
    }
    sizes |= {"linear_num_key_heads": key_value, "linear_num_value_heads": key_value * group}
    experts, longs = (
        draw(st.integers(1 - FAMILIES[family].may_lack_experts, 6)) if "num_experts" in keys else 0,
        LONGROPE in FAMILIES[family].rope_types,
    )
    whole = longs or FAMILIES[family].head_dim_is_derived
    # A norm after the feed-forward layer makes its rounding large if few channels leave little of it.
    has_norm_after = FAMILIES[family].norm_names.after_mlp is not None
    narrowest = max(5, least) if has_norm_after else 5
    mixed = {
        "num_experts": st.just(experts), "num_experts_per_tok": st.integers(1, max(experts, 1)),
        "norm_topk_prob": st.booleans(),
        "moe_intermediate_size": st.integers(16 if has_norm_after else 1, 20),
        "shared_expert_intermediate_size": st.integers(1, 20),
        "mlp_only_layers": st.sampled_from([(), (0,), (1, 2)]), "clip_qkv": st.sampled_from([None, 0.5]),
    }  # fmt: skip
    unit = key_value * group * (1 + whole)  # heads that fill the width must be even
    has_types = recurrent or (windowed and "layer_types" in keys)
    layer_types = _with_last(tuple(draw(kinds)), family) if has_types else ()
    if FAMILIES[family].rotates_in_windows and set(layer_types) == {FULL_ATTENTION}:
        layer_types = (SLIDING_ATTENTION, *layer_types[1:])
    config = LlamaConfig(
        model_type=family,
        vocab_size=draw(st.integers(3, 50)),
        hidden_size=unit * (1 + longs) * max(draw(st.integers(2, 6)), -(-least // unit)),
        intermediate_size=draw(st.integers(narrowest, 40)),
        num_hidden_layers=layers,
        num_attention_heads=key_value * group,
        num_key_value_heads=key_value,
        head_dim=0 if whole else draw(st.sampled_from([4, 6, 16])),
        rms_norm_eps=draw(st.sampled_from([1e-6, 1e-5])),
        rope_theta=1e4 if FAMILIES[family].never_rotates else draw(st.sampled_from([1e4, 5e5])),
        rope_scaling=None
        if longs or FAMILIES[family].never_rotates
        else draw(
            st.sampled_from(
                [None, ProportionalScaling(0.4), ProportionalScaling(0.25, 3.0)]
                if PROPORTIONAL in FAMILIES[family].rope_types
                else SCALINGS
            )
        ),
        tie_word_embeddings=FAMILIES[family].may_tie and draw(st.booleans()),
        attention_bias="attention_bias" in keys and draw(st.booleans()),
        sliding_window=draw(st.sampled_from([1, 2, 5, 39, 40, 100])) if windowed else None,
        layer_types=layer_types,
        **sizes if linear else {},
        no_rope_layers=tuple(draw(st.tuples(*[st.sampled_from([0, 1])] * layers)))
        if "no_rope_layers" in keys
        else (),
        **{
            name: draw(st.sampled_from(values))
            for name, values in MULTIPLIERS.items()
            if name in keys
        },
        **{name: draw(values) for name, values in mixed.items() if name in keys},
        query_pre_attn_scalar=draw(st.sampled_from([0, 5]))
        if "query_pre_attn_scalar" in keys
        else 0,
        partial_rotary_factor=draw(st.sampled_from([1.0, 0.5 if longs else 0.67]))
        if "partial_rotary_factor" in keys
        else 1.0,
        rope_local_theta=draw(st.sampled_from([1e2, 5e5]))
        if windowed and "rope_local_theta" in keys
        else None,
        initializer_range=0.1 if recurrent else 0.3,  # as in benchmarks/families.py
        attention_dropout=draw(st.sampled_from([0.0, 0.1])),
        pad_token_id=draw(st.sampled_from([None, 0, 2, -1])),
    )
    if "attention_k_eq_v" in keys:
        are_keys = draw(st.booleans())
        config = replace(
            config,
            global_head_dim=draw(st.sampled_from([0, 4, 10])),
            attention_k_eq_v=are_keys,
            num_global_key_value_heads=draw(st.sampled_from([0, 1])) if are_keys else 0,
            final_logit_softcapping=draw(st.sampled_from([None, 2.0, 30.0])),
            hidden_size_per_layer_input=draw(st.sampled_from([0, 5 if least < 16 else 24, 16])),
        )
        config = _with_shared_keys(draw, config)
    if "mamba_n_heads" in keys:
        groups, per_group = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 3]))
        config = replace(
            config,
            mamba_n_groups=groups,
            mamba_n_heads=groups * per_group,
            mamba_d_head=config.hidden_size * draw(st.sampled_from([1, 2])),
            mamba_d_state=draw(st.sampled_from([4, 7])),
            mamba_d_conv=draw(st.integers(1, 5)),
            mamba_conv_bias=draw(st.booleans()),
            mamba_proj_bias=draw(st.booleans()),
        )
    if "time_step_min" in keys:
        config = replace(config, time_step_min=draw(st.sampled_from([0.001, 0.5, 1.0])))
    if "position_embedding_type" in keys:
        config = replace(config, position_embedding_type=draw(st.sampled_from(["rope", "nope"])))
    if "conv_L_cache" in keys:
        config = replace(
            config, conv_L_cache=draw(st.integers(1, 5)), conv_bias=draw(st.booleans())
        )
    if not longs or draw(st.booleans()):
        return config
    factors = tuple(
        draw(
            st.lists(
                st.floats(1, 4), min_size=config.rotary_dim // 2, max_size=config.rotary_dim // 2
            )
        )
    )
    return replace(
        config,
        rope_scaling=LongScaling(factors, factors, draw(st.sampled_from([1.0, 1.2])), 2048, 4096),
    )


def _with_last(types, family):
    """The types of layers, of which the last one is full attention where it must be."""
    return (*types[:-1], FULL_ATTENTION) if FAMILIES[family].last_layer_is_full else types


def _model(config, seed=0):
    """With random biases and norm weights, where a fresh model has zeros and ones that would hide a
    fault.
    """
    model, generator = Llama(config, seed), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or name.endswith(".bias"):
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def _tokens(config, length, seed=0):
    return torch.randint(
        config.vocab_size, (2, length), generator=torch.Generator().manual_seed(seed)
    )


def _gradients(logits, parameters):
    weights = (
        torch.linspace(-1, 1, logits.numel(), dtype=torch.float64)
        .reshape(logits.shape)
        .to(logits.dtype)
    )
    # A layer's factor is not trained: its gradient is zero.
    return torch.autograd.grad((logits * weights).sum(), parameters, materialize_grads=True)


def _assert_near(named, expected, bound):
    # Where a query sees one key only, the gradients of scores are zero, rounded by the eps of the
    # whole gradient.
    scale = torch.cat([gradient.flatten() for gradient in expected]).norm()
    for (name, ours), theirs in zip(named.items(), expected, strict=True):
        assert (ours - theirs).norm() < bound * max(theirs.norm(), 1e-2 * scale), name


@pytest.mark.parametrize("family", BY_DECODER)
@settings(max_examples=1)
@given(data=st.data(), seed=st.integers(0, 99))
def test_float64_equals_the_plain_decoder(family, data, seed):
    _equals_the_plain_decoder(data.draw(configs(family)), seed)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=30)
@given(data=st.data(), seed=st.integers(0, 99))
def test_more_configurations_equal_the_plain_decoder(family, data, seed):
    _equals_the_plain_decoder(data.draw(configs(family)), seed)


def _equals_the_plain_decoder(config, seed):
    model, tokens = _model(config, seed).double(), _tokens(config, 9, seed)
    segments = torch.tensor([[1, 1, 1, 2, 2, 2, 2, 0, 0], [1] * 9])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 0], [*range(9)]])
    weights = dict(model.named_parameters())
    ours = model(tokens, segments=segments, positions=positions)
    plain = reference.hidden_states(weights, config, tokens, segments, positions)
    assert relative_error(ours, plain) < 1e-12
    logits, plain_logits = model.logits(ours), reference.logits(weights, config, plain)
    assert relative_error(logits, plain_logits) < 1e-12
    gradients, plain_gradients = (
        _gradients(x, list(weights.values())) for x in (logits, plain_logits)
    )
    _assert_near(dict(zip(weights, gradients, strict=True)), plain_gradients, 1e-11)


@pytest.mark.parametrize("family", BY_TRANSFORMERS)
@settings(max_examples=1)
@given(data=st.data(), seed=st.integers(0, 99))
def test_fp32_equals_transformers(family, data, seed):
    _equals_transformers(family, data, seed)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=40)
@given(data=st.data(), seed=st.integers(0, 99))
def test_more_configurations_equal_transformers(family, data, seed):
    _equals_transformers(family, data, seed)


def _equals_transformers(family, data, seed):
    from transformers import AutoConfig, AutoModelForCausalLM

    # With fewer channels a norm leaves so little of them that fp32 itself is worse than the bound. That of a
    # Gemma 4's many norms needs more of them, as in benchmarks/families.py.
    config = data.draw(configs(family, least=32 if FAMILIES[family].unscaled_scores else 12))
    # transformers 5.23 cannot compute a Gemma 4 with shared keys, but without inputs of its layers.
    assume(config.hidden_size_per_layer_input or not config.num_kv_shared_layers)
    model = _model(config, seed)
    theirs = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config.to_hf()), experts_implementation="eager"
    )
    assert type(theirs).__name__ == FAMILIES[family].architecture
    theirs.eval().load_state_dict(in_files(model.state_dict(), config))
    tokens = _tokens(config, 40, seed)
    assume(margin(model, tokens) > 1e-5)  # else rounding may choose another expert
    ours, their_logits = model.logits(model(tokens)), theirs(tokens, use_cache=False).logits
    assert relative_error(ours, their_logits) < 1e-5
    expected = dict(theirs.named_parameters())
    expected = dict(zip(expected, _gradients(their_logits, list(expected.values())), strict=True))
    mine = _in_files(model, ours, config)
    model.double()
    exact = _in_files(model, model.logits(model(tokens)), config)
    # Where a query sees one key only, the gradients of scores are zero, rounded by the eps of the
    # whole gradient.
    least = 1e-2 * torch.cat([gradient.flatten() for gradient in exact.values()]).norm()
    for name, true in exact.items():
        if name.endswith(".layer_scalar"):  # transformers has no gradient of it
            assert not true.any() and not mine[name].any()
            continue
        size, naive = max(true.norm(), least), (expected[name] - true).norm()
        assert naive < 1e-4 * size, name
        assert (mine[name] - true).norm() < max(1e-5 * size, 2 * naive), name


def _in_files(model, logits, config):
    """The gradients by the names of the family's files."""
    named = dict(model.named_parameters())
    return in_files(dict(zip(named, _gradients(logits, list(named.values())), strict=True)), config)


@pytest.mark.parametrize(
    ("family", "shard"),
    [
        *(
            pytest.param(family, "20KB", marks=() if family in DAY else pytest.mark.slow)
            for family in FAMILIES
        ),
        *(
            pytest.param(family, "1GB", marks=() if family == "llama" else pytest.mark.slow)
            for family in FAMILIES
        ),
    ],
)
def test_a_folder_goes_out_and_comes_back_as_its_family(tmp_path, family, shard):
    from transformers import AutoModelForCausalLM

    config = LlamaConfig(model_type=family, **SMALL | MIXED[family])
    model, tokens = _model(config), _tokens(config, 20)
    save_model(model, tmp_path / "ours", max_shard_bytes=20_000 if shard == "20KB" else 10**9)
    theirs, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(theirs).__name__ == FAMILIES[family].architecture
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size=shard)
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists() == (shard == "20KB")
    back = load_model(tmp_path / "theirs")
    assert back.config == config
    assert all(
        torch.equal(one, other)
        for one, other in zip(model.parameters(), back.parameters(), strict=True)
    )
    with torch.no_grad():
        assert relative_error(back.logits(back(tokens)), theirs(tokens).logits) < 1e-5


def test_a_small_model_of_each_family_has_each_key_of_its_row():
    assert {key for its in FAMILIES.values() for key in its.optional_keys} == {
        *OPTIONAL,
        *NOT_IN_SMALL,
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_counted_and_shaped_as_the_configuration_says(family):
    configs = [LlamaConfig(model_type=family, **SMALL | MIXED[family])]
    configs += [LlamaConfig.preset(name, family=family) for name in ("nano", "1b", "8b")]
    for config in configs:
        drawn = torch.get_rng_state()
        with torch.device("meta"):
            model = Llama(config)
        assert torch.equal(torch.get_rng_state(), drawn)  # drawing 8b would take minutes
        assert all(parameter.is_meta for parameter in model.parameters())
        built = {key: tuple(parameter.shape) for key, parameter in model.named_parameters()}
        assert built == parameter_shapes(config)
        assert (
            sum(parameter.numel() for parameter in model.parameters()) == config.parameter_count()
        )
        assert not list(model.buffers())


@pytest.mark.parametrize(
    ("family", "name", "keys"),
    [
        ("qwen3_next", "model.embed_tokens.weight", ("vocab_size", "hidden_size")),
        ("qwen3_next", "model.layers.0.mlp.experts.up_proj.weight",
         ("num_experts", "moe_intermediate_size", "hidden_size")),
        ("qwen3_next", "model.layers.0.mlp.shared_expert_gate.weight", ("1", "hidden_size")),
        ("qwen3_next", "model.layers.3.self_attn.q_proj.weight", ("2 * num_attention_heads * head_dim", "hidden_size")),
        ("qwen3_5_text", "model.layers.0.linear_attn.in_proj_qkv.weight",
         (" and ".join(f"linear_{each}" for each in (
             "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")), "hidden_size")),
        ("gpt_oss", "model.layers.1.mlp.experts.down_proj.bias", ("num_experts", "hidden_size")),
    ],
)  # fmt: skip
def test_the_keys_that_say_how_large_a_parameter_is_are_found_by_changing_them(family, name, keys):
    assert axis_keys(LlamaConfig.preset("1b", family=family), name) == keys


def test_sizes_of_which_no_tensor_can_be_made_are_refused():
    with pytest.raises(
        InputRefused, match=r"a llama of these sizes has a tensor of more bytes than 2\^63"
    ):
        LlamaConfig(
            **SMALL | {"intermediate_size": 2**31 - 1, "hidden_size": 2**31 - 8}
        ).parameter_count()


def test_fresh_biases_are_zero_and_norms_of_heads_one():
    for family in ("qwen2", "qwen3"):
        for name, parameter in Llama(LlamaConfig(model_type=family, **SMALL)).named_parameters():
            if parameter.ndim == 1:
                assert (parameter == (0 if name.endswith(".bias") else 1)).all(), name


@pytest.mark.parametrize("family", FAMILIES)
def test_named_siblings_are_layers_of_the_part_that_names_them(family):
    with torch.device("meta"):
        model = Llama(LlamaConfig(model_type=family, **SMALL | MIXED[family]))
    named = [(part, name) for part in model.modules() for name in getattr(part, "siblings", ())]
    assert named and all(isinstance(getattr(part, name), nn.Linear) for part, name in named)
