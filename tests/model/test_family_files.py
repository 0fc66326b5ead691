# Run: pytest tests/model/test_family_files.py
"""What a config.json says of a family, as transformers reads it; and what does not fit is refused
by name.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from clocks import least_s
from model.family_shapes import MIXED, SMALL, in_files
from monograph.errors import InputRefused
from monograph.graph.mmap_weights import MappedPieces, materialize_
from monograph.model.config import LlamaConfig
from monograph.model.families import FAMILIES
from monograph.model.hub import load_model, mapped_model, save_model
from monograph.model.layer_keys import MAX_LAYERS
from monograph.model.layer_types import FULL_ATTENTION, SLIDING_ATTENTION
from monograph.model.llama import Llama
from monograph.model.whole_folder import save_whole

HF = {
    key: SMALL[key]
    for key in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
}


def _read(**values):
    return LlamaConfig.from_hf({**HF, "num_hidden_layers": 4, "num_key_value_heads": 2, **values})


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_a_key_that_transformers_never_reads_of_a_family_is_not_refused(family):
    assert _read(model_type=family, mlp_bias=True) == _read(model_type=family)


@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh"])
def test_the_older_name_of_a_gemmas_activation_means_the_same(activation):
    from transformers import AutoConfig

    config = _read(model_type="gemma", hidden_act=activation)
    assert config == _read(model_type="gemma")
    theirs = AutoConfig.for_model("gemma", hidden_act=activation)
    assert theirs.hidden_act == config.to_hf()["hidden_act"] == "gelu_pytorch_tanh"


def _windows(config):
    return [config.window(layer) for layer in range(config.num_hidden_layers)]


@pytest.mark.parametrize(
    ("values", "windows"),
    [
        ({"model_type": "mistral"}, [4096] * 4),
        ({"model_type": "mistral", "sliding_window": None}, [None] * 4),
        # Transformers does not read it either.
        ({"model_type": "llama", "sliding_window": 7}, [None] * 4),
        ({"model_type": "qwen2", "sliding_window": 7}, [None] * 4),
        ({"model_type": "qwen2", "sliding_window": 7, "use_sliding_window": True}, [None] * 4),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 7,
                "use_sliding_window": True,
                "max_window_layers": 3,
            },
            [None] * 3 + [7],
        ),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 7,
                "use_sliding_window": True,
                "max_window_layers": 0,
            },
            [7] * 4,
        ),
        ({"model_type": "olmo3", "sliding_window": 7}, [7, 7, 7, None]),
        (
            {"model_type": "gemma3_text", "sliding_window": 7, "sliding_window_pattern": 2},
            [7, None, 7, None],
        ),
        (
            {
                "model_type": "smollm3",
                "sliding_window": 7,
                "use_sliding_window": True,
                "pad_token_id": 0,
            },
            [None, None, None, 7],
        ),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 7,
                "use_sliding_window": True,
                "max_window_layers": 0,
                "layer_types": [FULL_ATTENTION, SLIDING_ATTENTION, FULL_ATTENTION, FULL_ATTENTION],
            },
            [None, 7, None, None],
        ),
    ],
)
def test_windows_are_those_of_transformers(values, windows):
    from transformers import AutoConfig

    assert _windows(_read(**values)) == windows
    theirs = AutoConfig.for_model(**{**HF, "num_hidden_layers": 4, **values})
    kinds = getattr(theirs, "layer_types", [SLIDING_ATTENTION] * 4)
    window = theirs.sliding_window if values["model_type"] != "llama" else None
    assert [window if kind == SLIDING_ATTENTION else None for kind in kinds] == windows


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_file_leaves_open_is_what_transformers_takes(family):
    from transformers import AutoConfig

    heads = {"num_attention_heads": 32, "hidden_size": 128, "vocab_size": 200_000}
    sizes = {**HF, **heads, "num_hidden_layers": 2}
    if family == "nemotron_h":  # its default has mixtures
        sizes["layers_block_type"] = ["full_attention", "mlp"]
    if family == "helium":  # transformers computes only heads that fill the width
        sizes |= {"head_dim": 4, "num_key_value_heads": 32}
    if family == "gemma4_text":  # its default has embeddings of each layer
        sizes["hidden_size_per_layer_input"] = 0
    ours = LlamaConfig.from_hf({**sizes, "model_type": family})
    theirs = AutoConfig.for_model(family, **sizes)
    keys = ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings")
    for key in (*keys, "attention_dropout", "pad_token_id", "bos_token_id", "eos_token_id"):
        eps_there = {"lfm2": "norm_eps", "nemotron_h": "layer_norm_epsilon"}.get(family, key)
        name_there = eps_there if key == "rms_norm_eps" else key
        if key == "attention_dropout" and family in ("lfm2", "ernie4_5"):
            continue  # these have none
        expected = getattr(theirs, name_there)
        if (family, key) == ("ministral3", "max_position_embeddings"):
            expected = theirs.rope_parameters["original_max_position_embeddings"]
        expected = tuple(expected) if isinstance(expected, list) else expected
        assert getattr(ours, key) == expected, key
    if family == "gemma4_text":
        heads = [theirs.per_layer_config[layer].head_dim for layer in (0, 1)]
        assert [ours.of_layer(layer).head_dim for layer in (0, 1)] == heads == [256, 512]
    else:
        assert ours.head_dim == getattr(theirs, "head_dim", 4)
    assert ours.attention_multiplier == getattr(theirs, "attention_multiplier", None)
    if FAMILIES[family].never_rotates:
        return
    rope = theirs.rope_parameters
    assert ours.rope_theta == rope.get("full_attention", rope)["rope_theta"]
    assert (ours.rope_local_theta or ours.rope_theta) == rope.get("sliding_attention", rope)[
        "rope_theta"
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_config_json_goes_both_ways(family):
    config = LlamaConfig(model_type=family, **SMALL | MIXED[family])
    assert LlamaConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config
    if (
        "sliding_window" in FAMILIES[family].optional_keys
        and "layer_types" in FAMILIES[family].optional_keys
    ):
        without = replace(config, sliding_window=None, layer_types=())
        if FAMILIES[family].rotates_in_windows:
            with pytest.raises(InputRefused, match="sliding_window = 9: no layer has a window"):
                replace(config, sliding_window=9, layer_types=(FULL_ATTENTION,) * 3)
            return
        assert replace(config, sliding_window=9, layer_types=(FULL_ATTENTION,) * 3) == without


def test_layers_of_an_exaone_rotate_in_windows_alone_or_all():
    sizes = {**SMALL, "model_type": "exaone4", "num_hidden_layers": 4}
    without = LlamaConfig(**sizes)
    assert [without.rotates(layer) for layer in range(4)] == [True] * 4
    default = _read(model_type="exaone4")
    assert default.sliding_window == 4096
    assert [default.rotates(layer) for layer in range(4)] == [True, True, True, False]


@pytest.mark.parametrize(
    ("growth", "said"),
    [
        ({}, "rope_parameters.llama_4_scaling_beta is missing"),
        ({"llama_4_scaling_beta": -0.1}, "llama_4_scaling_beta = -0.1: expected"),
        ({"llama_4_scaling_beta": True}, "llama_4_scaling_beta = True"),
        ({"llama_4_scaling_beta": 0.1, "rope_type": "default"}, "only with rope_type = 'yarn'"),
    ],
)
def test_a_growth_of_queries_that_cannot_be_computed_is_refused(growth, said):
    table = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, **growth}
    with pytest.raises(InputRefused, match=said):
        _read(model_type="ministral3", rope_parameters=table)


def test_a_ministral_computes_no_text_in_which_queries_have_grown():
    config = LlamaConfig(model_type="ministral3", **SMALL | MIXED["ministral3"])
    long = LlamaConfig.from_hf(config.to_hf() | {"max_position_embeddings": 256})
    assert long.max_position_embeddings == 64 and long.to_hf()["max_position_embeddings"] == 256
    model = Llama(long, 0)
    with pytest.raises(InputRefused, match="longer than the model's max_position_embeddings = 64"):
        model(torch.zeros(1, 65, dtype=torch.long))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"model_type": "gemma2"},
            r"model_type = 'gemma2' is not supported: only llama, ",
        ),
        ({"model_type": "gpt2"}, r"model_type = 'gpt2' is not supported: only llama, "),
        ({"model_type": ["llama"]}, r"model_type = \['llama'\] is not supported"),
        (
            {"model_type": "mistral", "sliding_window": 0},
            r"sliding_window = 0: expected a whole number of at least 1",
        ),
        ({"model_type": "mistral", "sliding_window": "4k"}, r"sliding_window = '4k'"),
        (
            {"model_type": "mistral", "layer_types": [SLIDING_ATTENTION] * 4},
            r"layer_types is not supported with .* 'mistral'",
        ),
        (
            {"model_type": "qwen3", "layer_types": SLIDING_ATTENTION},
            r"layer_types = 'sliding_attention': expected a list",
        ),
        (
            {"model_type": "qwen3", "layer_types": [FULL_ATTENTION] * 3},
            r"layer_types has 3 entries, but num_hidden_layers = 4",
        ),
        (
            {"model_type": "qwen3", "layer_types": [FULL_ATTENTION, "chunked_attention"] * 2},
            r"layer_types has 'chunked_attention'",
        ),
        (
            {"model_type": "qwen3", "layer_types": [SLIDING_ATTENTION] * 4},
            r"layer_types has 'sliding_attention', but no sliding_w",
        ),
        (
            {"model_type": "qwen3", "attention_bias": "yes"},
            r"attention_bias = 'yes': expected true or false",
        ),
        ({"model_type": "qwen3", "head_dim": 7}, r"head_dim = 7 is odd"),
        (
            {"model_type": "qwen2", "use_sliding_window": "false"},
            r"use_sliding_window = 'false': expected true or",
        ),
        (
            {"model_type": "qwen3", "use_sliding_window": None},
            r"use_sliding_window = None: expected true or false",
        ),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "num_hidden_layers": 10**9},
            rf"num_hidden_layers = 1000000000: expected at most {MAX_LAYERS}",
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
    def refused() -> None:
        with pytest.raises(InputRefused, match=said) as refusal:
            _read(**values)
        assert "\n" not in str(refusal.value)

    assert least_s(refused, 0.1) < 0.1


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"model_type": "llama", "sliding_window": 5},
            r"sliding_window is not supported with model_type = 'llama'",
        ),
        (
            {"model_type": "mistral", "attention_bias": True},
            r"attention_bias is not supported .* 'mistral'",
        ),
        (
            {"model_type": "mistral", "sliding_window": 5, "layer_types": (FULL_ATTENTION,) * 3},
            r"layer_types is not supported",
        ),
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
        (
            {"head_dim": 8},
            r"k_norm.weight has shape \[6\], expected \[8\] by config.json \(head_dim\)",
        ),
        (
            {"num_key_value_heads": 4},
            r"expected \[24, 32\] by config.json \(num_key_value_heads \* head_dim, hidden_size\)",
        ),
        (
            {"attention_bias": True},
            r"12 missing in the weights of a qwen3, the first is .*k_proj.bias'",
        ),
        (
            {"model_type": "qwen2"},
            r"9 missing in the weights of a qwen2, the first is .*k_proj.bias'",
        ),
        (
            {"model_type": "llama"},
            r"6 unexpected in the weights of a llama, the first is .*k_norm.weight'",
        ),
        (
            {"num_hidden_layers": 10**8},
            r"num_hidden_layers = 100000000 in config.json, the weights have 3 layers",
        ),
    ],
)
def test_weights_that_are_not_the_configurations_are_refused_before_anything_is_built(
    tmp_path, change, said
):
    save_model(Llama(LlamaConfig(model_type="qwen3", **SMALL)), tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"layer_types": None} | change))

    def refused() -> None:
        with pytest.raises(InputRefused, match=said):
            load_model(tmp_path / "model")

    assert least_s(refused, 0.5) < 0.5


def _without(name, tensors):
    return {key: value for key, value in tensors.items() if key != name}


FIFTH = "model.layers.0.mlp.experts.4.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "spoil", "said"),
    [
        (
            {"num_experts": 4},
            dict,
            r"5 tensors such as .*experts.0.down_proj.weight', the last of expert 4, but num_e.* 4",
        ),
        (
            {"num_experts": 10**9},
            dict,
            r"there are 5 tensors such as .* but num_experts = 1000000000",
        ),
        (
            {},
            lambda t: _without(FIFTH, t),
            r"there are 4 tensors such as .*0.up_proj.weight', the last of expert 3",
        ),
        (
            {},
            lambda t: t | {FIFTH: t[FIFTH][1:].clone()},
            rf"{FIFTH} has shape \[19, 32\] and .* \[20, 32\] and F32",
        ),
        (
            {},
            lambda t: t | {FIFTH: t[FIFTH].bfloat16()},
            rf"{FIFTH} has shape \[20, 32\] and dtype BF16, but",
        ),
        (
            {"moe_intermediate_size": 12},
            dict,
            r"down_proj.weight has shape \[5, 32, 20\], expected \[5, 32, 12\] by",
        ),
        (
            {"mlp_only_layers": [0, 1]},
            dict,
            r"3 missing in the weights of a qwen3_moe, the first is .*mlp.down_proj",
        ),
    ],
)
def test_experts_that_are_not_the_configurations_are_refused_by_name(tmp_path, change, spoil, said):
    save_model(
        Llama(LlamaConfig(model_type="qwen3_moe", **SMALL | MIXED["qwen3_moe"])), tmp_path / "model"
    )
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    save_file(spoil(tensors), tmp_path / "model" / "model.safetensors")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InputRefused, match=said):
        load_model(tmp_path / "model")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"num_experts_per_tok": 9},
            r"num_experts_per_tok = 9: expected at most the number of experts, 8",
        ),
        ({"num_local_experts": None}, r"num_local_experts = None: expected a whole number"),
        ({"mlp_only_layers": "all"}, r"mlp_only_layers = 'all': expected a list"),
        ({"decoder_sparse_step": 0}, r"decoder_sparse_step = 0: expected a whole number"),
        ({"norm_topk_prob": 1}, r"norm_topk_prob = 1: expected true or false"),
        (
            {"router_aux_loss_coef": 1e200},
            r"router_aux_loss_coef = 1e\+200: expected a number from 0 to 1e\+06",
        ),
        ({"output_router_logits": "yes"}, r"output_router_logits = 'yes': expected true or false"),
        ({"router_aux_loss_coef": -1}, r"router_aux_loss_coef = -1: expected a positive number"),
        (
            {"model_type": "olmoe", "head_dim": 16},
            r"head_dim = 16: expected hidden_size / num_attention_heads",
        ),
        ({"model_type": "olmoe", "clip_qkv": 0}, r"clip_qkv = 0: expected a positive number"),
        (
            {"model_type": "granitemoehybrid", "num_local_experts": -1},
            r"num_local_experts = -1: expected a whole number of at least 1",
        ),
    ],
)
def test_a_wrong_key_of_a_mixture_is_refused_by_name(values, said):
    with pytest.raises(InputRefused, match=said):
        _read(**{"model_type": "qwen3_moe", "num_experts": 8} | values)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"layer_types": [FULL_ATTENTION] * 4}, r"layer_types is not supported with .* 'bamba'"),
        ({"layers_block_type": ["mamba"] * 4}, r"layers_block_type is not supported with"),
        ({"attn_layer_indices": 3}, r"attn_layer_indices = 3: expected a list of layers"),
        ({"partial_rotary_factor": 1.0}, r"partial_rotary_factor = 1.0 is not supported outside"),
        ({"time_step_limit": [0.0, 0.1]}, r"time_step_limit = \[0.0, 0.1\] is not supported"),
        ({"z_loss_coefficient": 0.1}, r"z_loss_coefficient = 0.1 is not supported: only 0.0"),
        ({"mlp_bias": True}, r"mlp_bias = True is not supported"),
        ({"mamba_d_head": 7}, r"mamba_n_heads \* mamba_d_head = 28: expected .* 64"),
    ],
)
def test_what_a_bamba_does_not_have_is_refused_by_name(values, said):
    with pytest.raises(InputRefused, match=said):
        _read(**{"model_type": "bamba", "mamba_n_heads": 4} | values)


NEMOTRON = {"model_type": "nemotron_h", "layers_block_type": ["mamba", "mlp", "attention"]}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"layers_block_type": ["mamba", "moe"]}, r"layers_block_type: mixtures of experts"),
        (
            {"layers_block_type": None, "hybrid_override_pattern": "M-E*"},
            r"hybrid_override_pattern: mixtures of experts",
        ),
        ({"layers_block_type": None}, r"the key layers_block_type is missing"),
        ({"layers_block_type": ["conv"]}, r"layers_block_type: 'conv': expected"),
        ({"layers_block_type": []}, r"layers_block_type = \[\]: expected a list"),
        ({"mlp_hidden_act": "silu"}, r"mlp_hidden_act = 'silu' is not supported: only 'relu2'"),
        ({"mamba_hidden_act": "gelu"}, r"mamba_hidden_act = 'gelu' is not supported"),
        ({"mlp_bias": True}, r"mlp_bias = True is not supported"),
        ({"n_groups": 3}, r"mamba_n_heads = 128 is not a multiple of mamba_n_groups = 3"),
        ({"time_step_min": -1.0}, r"time_step_min = -1.0: expected a positive number"),
    ],
)
def test_what_a_nemotron_does_not_have_is_refused_by_name(values, said):
    with pytest.raises(InputRefused, match=said):
        _read(**NEMOTRON | values)


def test_the_head_of_a_nemotron_is_not_tied_and_a_pattern_is_a_list_of_its_layers():
    assert not _read(**NEMOTRON, tie_word_embeddings=True).tie_word_embeddings
    with pytest.raises(InputRefused, match=r"tie_word_embeddings = true is not supported with"):
        replace(_read(**NEMOTRON), tie_word_embeddings=True)
    pattern = {"layers_block_type": None, "hybrid_override_pattern": "M-*"}
    assert _read(**NEMOTRON | pattern) == _read(**NEMOTRON)
    assert _read(**NEMOTRON).layer_types == ("mamba", "mlp", "full_attention")


def test_a_bambas_table_says_how_much_of_a_head_is_rotated():
    tables = [{}, {"rope_parameters": {"rope_theta": 7.0, "partial_rotary_factor": 1.0}}]
    files = [{"model_type": "bamba", "mamba_n_heads": 4, **table} for table in tables]
    assert [_read(**values).partial_rotary_factor for values in files] == [0.5, 1.0]


def test_new_mixtures_are_balanced_and_loaded_ones_as_their_files_say():
    new = LlamaConfig.preset("nano", family="olmoe")
    assert LlamaConfig.from_hf(new.to_hf()) == new and (
        new.output_router_logits,
        new.router_aux_loss_coef,
    ) == (
        True,
        0.01,
    )
    assert not LlamaConfig.preset("nano").output_router_logits
    kept = [_read(model_type=its, num_experts=8) for its in ("olmoe", "qwen3_moe")]
    assert [(each.output_router_logits, each.router_aux_loss_coef) for each in kept] == [
        (False, 0.01),
        (False, 0.001),
    ]


def test_every_second_layer_may_be_a_mixture():
    config = _read(
        model_type="qwen3_moe", num_experts=8, decoder_sparse_step=2, mlp_only_layers=[3, 7]
    )
    assert [config.is_mixture(layer) for layer in range(4)] == [False, True, False, False]
    assert config.shortened(2).mlp_only_layers == (0,)


def _packed(folder, spoil=dict):
    """A gpt-oss whose experts are in MXFP4, as it is published: random codes, and scales up to 1."""
    sizes = SMALL | MIXED["gpt_oss"] | {"hidden_size": 64, "intermediate_size": 32}
    save_model(Llama(LlamaConfig(model_type="gpt_oss", **sizes)).bfloat16(), folder)
    tensors, draw = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith("_proj") and "experts" in name]:
        experts, inputs, rows = tensors.pop(name).shape
        shape = experts, rows, inputs // 32
        tensors[f"{name}_blocks"] = torch.randint(
            256, (*shape, 16), generator=draw, dtype=torch.uint8
        )
        tensors[f"{name}_scales"] = torch.randint(
            115, 128, shape, generator=draw, dtype=torch.uint8
        )
    save_file(spoil(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(
        json.dumps(
            json.loads(path.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
        )
    )
    return folder


def test_experts_in_mxfp4_are_the_numbers_that_transformers_reads(tmp_path):
    from transformers import AutoModelForCausalLM, Mxfp4Config

    folder = _packed(tmp_path / "model")
    plain = Mxfp4Config(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=plain, dtype=torch.bfloat16
    ).state_dict()
    for ours in (load_model(folder), materialize_(mapped_model(folder, torch.float32))):
        mine = in_files(ours.state_dict(), ours.config)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(tensor.bfloat16(), theirs[name]) for name, tensor in mine.items())
    up = [
        weight
        for name, weight in mapped_model(folder).named_parameters()
        if name.endswith("up_proj.weight")
    ]
    assert len(up) == 3 and all(isinstance(weight, MappedPieces) for weight in up)


def test_no_trained_weights_are_put_back_into_mxfp4(tmp_path):
    folder = _packed(tmp_path / "model")
    with pytest.raises(InputRefused, match=r"is stored in 4 or 8 bits, to which trained weights"):
        save_whole(load_model(folder), folder, tmp_path / "whole", None)
    assert not (tmp_path / "whole").exists()


def _changed(part, change):
    """Change the tensors with a part of a name; leave those out that become None."""

    def spoil(tensors):
        changed = {
            name: change(tensor) if part in name else tensor for name, tensor in tensors.items()
        }
        return {name: tensor.contiguous() for name, tensor in changed.items() if tensor is not None}

    return spoil


@pytest.mark.parametrize(
    ("part", "change", "said"),
    [
        (
            "1.mlp.experts.down_proj_scales",
            lambda _: None,
            r"_scales is missing, expected \[experts, rows, bl",
        ),
        (
            "2.mlp.experts.down_proj_blocks",
            torch.Tensor.int,
            r"down_proj_blocks is stored as I32, expected U8",
        ),
        (
            "0.mlp.experts.gate_up_proj_scales",
            lambda t: t[:, 1:],
            r"_proj_scales has shape \[5, 63, 2\], expected",
        ),
        (
            "0.mlp.experts.gate_up_proj_",
            lambda t: t[:, 1:],
            r"has shape \[5, 63.*\], expected an even number on",
        ),
    ],
)
def test_damaged_mxfp4_is_refused_by_name(tmp_path, part, change, said):
    with pytest.raises(InputRefused, match=said):
        mapped_model(_packed(tmp_path / "model", _changed(part, change)))


@pytest.mark.parametrize(
    "more", ["mlp.experts.down_proj", "mlp.experts.down_proj.weight", "mlp.gate.weight"]
)
def test_a_tensor_that_is_there_in_two_forms_is_refused(tmp_path, more):
    more = f"model.layers.1.{more}"
    with pytest.raises(
        InputRefused,
        match=rf"{more}\b.* are one tensor of the model|are one.*{more}| and {more} are one",
    ):
        mapped_model(
            _packed(tmp_path / "model", lambda tensors: tensors | {more: torch.zeros(5, 32, 64)})
        )


def test_factors_of_longrope_that_give_no_number_are_refused():
    long = {"type": "longrope", "long_factor": [1.0] * 4}
    values = {**HF, "model_type": "phi3", "num_hidden_layers": 1, "rope_scaling": long}
    for number, said in (
        (1e-308, "expected at least 0.001"),
        (float("nan"), "expected a positive number"),
    ):
        values["rope_scaling"]["short_factor"] = [1.0, 2.0, number, 4.0]
        with pytest.raises(InputRefused, match=rf"rope_scaling.short_factor = .*: {said}"):
            LlamaConfig.from_hf(values)


def test_an_original_length_outside_of_two_tables_is_not_read():
    table = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    tables = {FULL_ATTENTION: table, SLIDING_ATTENTION: {"rope_type": "default"}}
    config = _read(
        model_type="gemma3_text",
        max_position_embeddings=24,
        original_max_position_embeddings=8,
        rope_parameters=tables,
    )
    assert config.rope_scaling.original_max_position_embeddings == 24
