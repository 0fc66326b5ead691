# Run: pytest tests/laws/test_exported_log_probabilities.py
"""Law 11 in numbers: the log-probabilities of a GGUF file in llama.cpp are the model's, at every
position of a text.

Equal greedy texts do not say that. A pair of channels that is not rotated, or an epsilon that is
another one, moves log-probabilities by 1e-4 to 1e-1, and the best token mostly stays the best one.

The bound is derived as elsewhere (laws/comparisons.py): twice the error of the naive path in fp32, measured
against float64. The naive path here is the model with the two roundings that llama.cpp is known for
(ggml/src/ggml-cpu/ops.cpp): it gets the angle of each rotary pair from that of the pair before by a
product in fp32, and reads GELU from a table of fp16 numbers. With them its error is that of
llama.cpp, within 1 to 1.8 times, for each family.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from laws.test_exported_is_original import needs_gguf
from llama_cpp import Apart, LlamaCpp
from model import config_draws
from monograph.errors import InputRefused
from monograph.graph.experts import Router
from monograph.laws.comparisons import error_within
from monograph.model import llama
from monograph.model.config import LlamaConfig
from monograph.model.families import FAMILIES, Family
from monograph.model.gguf import DTYPES, FILE, save_gguf
from monograph.model.layer_types import (
    CONVOLUTION,
    FULL_ATTENTION,
    LINEAR_ATTENTION,
    MAMBA,
    PLAIN_MLP,
    SLIDING_ATTENTION,
)
from monograph.model.layers import MLP
from monograph.model.llama import Llama
from monograph.model.mixture import Experts
from monograph.model.rope import inverse_frequencies
from monograph.model.scaling import (
    PROPORTIONAL,
    GrowingYarnScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    ProportionalScaling,
    YarnScaling,
)
from monograph.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.bytes()
# Tokens that are whole characters.
WHOLE = sorted(set(TOKENIZER.encode("".join(map(chr, range(32, 127))))))
VOCABULARY = TOKENIZER.vocab_size + 7  # rows more than there are tokens, as published models have
BEGINNING = 10  # tokens of a text that are given
# A router's logits of two experts that are closer than that may change places in fp32.
NEAR_TIE = 2e-5
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
}
# What a published model, which the comment names, has otherwise than `usual` of its family. Windows
# are shorter than most published ones, so that texts reach beyond them.
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama": {  # Llama 3.1 8B
        "rope_theta": 5e5, "rms_norm_eps": 1e-5, "rope_scaling": Llama3Scaling(8.0, 1.0, 4.0, 8192),
    },
    "mistral": {"rms_norm_eps": 1e-5},  # Nemo
    "ministral3": {  # Ministral 3 3B
        "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
        "rope_scaling": GrowingYarnScaling(
            16.0, 1.0, 4096, llama_4_scaling_beta=0.1, max_position_embeddings=65_536
        ),
    },
    "helium": {"hidden_size": 512, "num_key_value_heads": 2, "rms_norm_eps": 1e-8, "rope_theta": 1e5},  # Helium 1 2B
    "exaone4": {  # EXAONE 4.0 1.2B
        "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "sliding_window": None, "layer_types": (),
        "rope_scaling": Llama3Scaling(16.0, 1.0, 4.0, 8192),
    },
    "qwen2": {  # Qwen 2.5 0.5B
        "hidden_size": 448, "num_attention_heads": 7, "head_dim": 64, "tie_word_embeddings": True,
    },
    "qwen3": {"num_key_value_heads": 2, "tie_word_embeddings": True},  # Qwen 3 0.6B
    "olmo2": {  # OLMo 2 7B
        "hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2, "rope_theta": 5e5,
        "rms_norm_eps": 1e-6,
    },
    "olmo3": {  # Olmo 3 32B
        "hidden_size": 640, "num_attention_heads": 5, "rms_norm_eps": 1e-6,
        "rope_scaling": YarnScaling(8.0, YarnScaling.default_attention_factor(8.0), 8192),
    },
    "smollm3": {"rope_theta": 5e6},  # SmolLM3 3B
    "gemma3_text": {"num_attention_heads": 2, "rope_scaling": LinearScaling(8.0)},  # Gemma 3 4B
    # Which published size has which keys was not looked up.
    "gemma4_text": {
        "num_attention_heads": 2, "head_dim": 64, "global_head_dim": 128, "rope_scaling": ProportionalScaling(0.25),
        "final_logit_softcapping": 30.0, "attention_k_eq_v": True,
        # Scores of its experts are small, so that of many experts two are often nearly tied.
        "num_experts": 4, "num_experts_per_tok": 3,
    },
    "phi3": {  # Phi-4-mini
        "hidden_size": 384, "num_attention_heads": 3, "rope_theta": 1e4, "partial_rotary_factor": 0.75,
        "tie_word_embeddings": True, "sliding_window": 262_144,
        "rope_scaling": LongScaling(
            tuple(1 + pair / 48 for pair in range(48)), tuple(1.0 + pair for pair in range(48)), 1.19, 4096, 131_072
        ),
    },
    "granite": {  # Granite 3.3 8B
        "rope_theta": 1e7, "rms_norm_eps": 1e-5, "embedding_multiplier": 12.0, "residual_multiplier": 0.22,
        "attention_multiplier": 0.0078125, "logits_scaling": 16.0,
    },
    "granitemoehybrid": {  # Granite 4.0 H Tiny
        "rms_norm_eps": 1e-5, "embedding_multiplier": 12.0, "residual_multiplier": 0.22,
        "attention_multiplier": 0.0078125, "logits_scaling": 6.0, "position_embedding_type": "nope",
    },
    "glm": {"partial_rotary_factor": 0.5, "attention_bias": True},  # GLM-4 9B chat
    "glm4": {"partial_rotary_factor": 0.5},  # GLM-4 9B of April 2025
    "ernie4_5": {},  # ERNIE 4.5 0.3B
    "gemma": {"rope_theta": 1e4},  # Gemma 2B
    "bamba": {"rope_theta": 1e4},  # Bamba 9B
    "nemotron_h": {  # Nemotron-H 8B, but without its least time step, which an export warns of
        "num_hidden_layers": 4, "layer_types": (MAMBA, PLAIN_MLP, MAMBA, FULL_ATTENTION), "mamba_n_groups": 2,
        "rms_norm_eps": 1e-5,
    },
    "qwen3_5_text": {"tie_word_embeddings": True, "rope_theta": 1e7},  # Qwen 3.5 0.8B
    "qwen3_next": {"num_experts_per_tok": 10, "rope_theta": 1e7},  # Qwen 3 Next 80B-A3B
    "qwen3_5_moe_text": {"rope_theta": 1e7},  # Qwen 3.5 35B-A3B
    "qwen3_moe": {},  # Qwen 3 30B-A3B
    "olmoe": {  # OLMoE 1B-7B
        "hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2, "rope_theta": 1e4,
    },
    # Gpt-oss 20B, but with truncate = true, as llama.cpp computes it (which an export warns of).
    "gpt_oss": {
        "sliding_window": 128, "num_experts_per_tok": 4,
        "rope_scaling": YarnScaling(32.0, YarnScaling.default_attention_factor(32.0), 4096),
    },
}  # fmt: skip


def usual(its: Family) -> dict[str, Any]:
    """A family's head size, share of rotated channels, base, epsilon and heads for a key-value head
    as transformers' defaults and most published models have them; one layer of each kind, or as many
    as llama.cpp's pattern of layers has.
    """
    found: dict[str, Any] = {
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }
    found |= {key: its.defaults[key] for key in list(found)[2:] if key in its.defaults}
    if "no_rope_layers" in its.optional_keys:
        found |= {"num_hidden_layers": 4, "no_rope_layers": (1, 1, 1, 0)}
    if its.other_layer_type == LINEAR_ATTENTION:
        found |= {
            "num_hidden_layers": 2, "layer_types": (LINEAR_ATTENTION, FULL_ATTENTION), "partial_rotary_factor": 0.25,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        }  # fmt: skip
    elif its.other_layer_type == MAMBA:
        found |= {
            "num_hidden_layers": 2, "layer_types": (MAMBA, FULL_ATTENTION), "mamba_n_heads": 4,
            "mamba_d_head": 32, "mamba_d_state": 128,
            "partial_rotary_factor": its.defaults.get("partial_rotary_factor", 1.0),
        }  # fmt: skip
    elif its.other_layer_type == CONVOLUTION:
        found |= {"num_hidden_layers": 2, "layer_types": (CONVOLUTION, FULL_ATTENTION)}
    elif its.full_attention_every:
        kinds = (*[SLIDING_ATTENTION] * (its.full_attention_every - 1), FULL_ATTENTION)
        found |= {"num_hidden_layers": len(kinds), "layer_types": kinds, "sliding_window": 64}
    if its.default_local_theta is not None:
        found["rope_local_theta"] = its.default_local_theta
    if its.expert_width_key:
        found |= {"num_attention_heads": 8, "num_experts": 16, "num_experts_per_tok": 8}
        sizes = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
        found |= {key: size for key, size in sizes.items() if key in its.optional_keys}
        if its.expert_width_key == "moe_intermediate_size":
            found["norm_topk_prob"] = True
    if its.expert_bias:
        found["attention_bias"] = True
    if its.llama_cpp and its.llama_cpp.head_dim_is_derived:
        found["hidden_size"] = found["num_attention_heads"] * found["head_dim"]
    return found


REAL = {
    family: usual(its) | PUBLISHED.get(family, {})
    for family, its in FAMILIES.items()
    if its.llama_cpp
}


def model_of(config: LlamaConfig, seed: int = 0) -> Llama:
    """With random biases and norms, and logits of the same size in every family."""
    model = Llama(config, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or name.endswith(".bias"):
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
        model.lm_head.weight.mul_(config.logits_scaling)
    return model.requires_grad_(False)


@torch.no_grad()
def log_probabilities(model: Llama, ids: list[int]) -> torch.Tensor:
    """Those of the token after each of these, [T, V]."""
    return model.logits(model(torch.tensor([ids])))[0].log_softmax(-1)


def chained(
    positions_BT: torch.Tensor, config: LlamaConfig, dtype: torch.dtype, local: bool = False
):
    """`cos_sin` of angles that have the rounding of a chain of products in fp32, one for each pair."""
    base, scaling = config.theta_and_scaling(local)
    positions_T, pairs = positions_BT[0], config.rotary_dim // 2
    step = torch.tensor(base ** (-2 / config.rotary_dim)).float()
    chain = [positions_T.float()]
    for _ in range(pairs - 1):
        chain.append(chain[-1] * step)
    exact_F = base ** (-torch.arange(pairs).double() / pairs)
    rounding_TF = torch.where(
        positions_T[:, None] > 0, torch.stack(chain, -1) / (positions_T[:, None] * exact_F), 1.0
    )
    frequencies_F = inverse_frequencies(config, torch.float64, positions_T.device, local)
    angles_11TF = (positions_T[:, None] * frequencies_F * rounding_TF).float()[None, None]
    factor = scaling.attention_factor if isinstance(scaling, YarnScaling | LongScaling) else 1.0
    return angles_11TF.cos() * factor, angles_11TF.sin() * factor


def from_a_table(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.gelu(gate.half().float(), approximate="tanh").half().float() * up


def naive_log_probabilities(
    model: Llama, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> torch.Tensor:
    """In fp32, with llama.cpp's two roundings."""
    model = copy.deepcopy(model)
    if model.config.family.activation[1].startswith("gelu"):
        for module in model.modules():
            if isinstance(module, MLP | Experts):
                module.combine = from_a_table
    with monkeypatch.context() as patched:
        patched.setattr(llama, "cos_sin", chained)
        return log_probabilities(model, ids)


def beginning(seed: int) -> list[int]:
    return random.Random(seed).choices(WHOLE, k=BEGINNING)


def up_to_a_near_tie(model: Llama, ids: list[int]) -> int:
    """How many tokens of a text come before two experts between which fp32 may choose otherwise."""
    near_T = torch.zeros(len(ids), dtype=torch.bool)

    def note(router: Router, inputs: tuple[torch.Tensor, ...], chosen: object) -> None:
        if router.top_k < len(router.weight):
            best = F.linear(inputs[0], router.weight, router.bias).topk(router.top_k + 1).values
            near_T.logical_or_(best[:, -2] - best[:, -1] < NEAR_TIE)

    hooks = [
        part.register_forward_hook(note) for part in model.modules() if isinstance(part, Router)
    ]
    log_probabilities(model, ids)
    for hook in hooks:
        hook.remove()
    places = near_T.nonzero()
    return int(places[0]) if len(places) else len(ids)


def compare(
    model: Llama,
    folder: Path,
    length: int,
    prompts: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compare every position of a text that llama.cpp draws, and what it says after prompts that
    are parts of it.
    """
    save_gguf(model, folder, TOKENIZER, "f32", lambda line: None)
    client = LlamaCpp(folder / FILE, context=512)
    prompt = beginning(seed=0)
    drawn, rows = client.drawn(prompt, length - BEGINNING, WHOLE, VOCABULARY)
    ids = prompt + drawn
    ends = [*range(BEGINNING, length), *prompts]  # how many tokens are before each row
    rows += [client.drawn(ids[:end], 1, WHOLE, VOCABULARY)[1][0] for end in prompts]
    exact = log_probabilities(model.double(), ids)
    known = up_to_a_near_tie(model, ids)
    assert known > length // 2, "a near tie of experts: take another seed"
    model.float()
    naive = naive_log_probabilities(model, ids, monkeypatch)
    sure = torch.tensor([end <= known for end in ends])
    places = torch.tensor(ends)[sure] - 1
    theirs = torch.tensor(rows)[sure]
    assert error_within(theirs, naive[places], exact[places]), model.config


# By day every second family.
EACH_LENGTH = [
    pytest.param(family, length, marks=() if length == 100 and place % 4 == 0 else pytest.mark.slow)
    for place, family in enumerate(REAL)
    for length in (100, 400)
]


@needs_gguf
@pytest.mark.parametrize(("family", "length"), EACH_LENGTH)
def test_log_probabilities_are_the_models(
    tmp_path: Path, family: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(LlamaConfig(model_type=family, **{**SMALL, **REAL[family]}))
    prompts = (
        (1, BEGINNING, 100)
        if length == 100
        else (1, 2, BEGINNING, 50, 63, 64, 65, 100, 129, 200, 300, 400)
    )
    compare(model, tmp_path / "out", length, prompts, monkeypatch)


@needs_gguf
@pytest.mark.parametrize("pairs", [30, 31, 32])
@pytest.mark.parametrize(
    "family", ["qwen3_5_text", pytest.param("qwen3_5_moe_text", marks=pytest.mark.slow)]
)
def test_every_pair_of_channels_is_rotated(
    tmp_path: Path, family: str, pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the number of pairs is modulo 3; with a small base, so that also the last pair turns
    within a text.
    """
    small_base = {"rope_theta": 100.0, "partial_rotary_factor": 2 * pairs / 256}
    config = LlamaConfig(model_type=family, **{**SMALL, **REAL[family], **small_base})
    compare(model_of(config), tmp_path / "out", 110, (100, 110), monkeypatch)


def likely(family: str, draw: random.Random) -> dict[str, Any]:
    """Sizes of a model; each key has now and then a value that llama.cpp does not compute. Some are
    of no model.
    """
    its = FAMILIES[family]

    def mostly(usual: Any, *others: Any) -> Any:
        return usual if draw.random() < 0.93 else draw.choice(others)

    kv_heads, head_dim, layers = (
        draw.choice([1, 1, 2, 3]),
        draw.choice([6, 8, 16, 32, 64, 80, 96]),
        draw.choice([1, 2, 3]),
    )
    heads = kv_heads * draw.choice([1, 2, 3, 7])
    width = mostly(heads * head_dim, 32, 100)
    sizes: dict[str, Any] = {
        "model_type": family, "vocab_size": TOKENIZER.vocab_size + draw.choice([0, 7]),
        "hidden_size": width, "intermediate_size": draw.choice([24, 64, 100, 256]),
        "num_attention_heads": heads, "num_key_value_heads": mostly(kv_heads, heads), "head_dim": head_dim,
        "max_position_embeddings": draw.choice([64, 4096]), "rms_norm_eps": mostly(1e-6, 1e-5, 1e-3),
        "rope_theta": draw.choice([100.0, 1e4, 1e6]), "tie_word_embeddings": draw.random() < 0.5 and its.may_tie,
        "num_hidden_layers": layers, "initializer_range": 1.6 / width**0.5,
    }  # fmt: skip
    # Large scores, which have no factor, would make one rounding in fp32 much larger than another.
    if its.unscaled_scores:
        sizes |= {"initializer_range": 1 / width**0.5}
    every = its.full_attention_every
    if its.never_rotates:
        sizes |= {"rope_theta": 1e4}
    if its.other_layer_type in (MAMBA, CONVOLUTION):  # any layers may be of this kind
        every = draw.choice([1, 2, 2, 3])
    if every:
        every = mostly(every, 1, 2, 3)
        layers = sizes["num_hidden_layers"] = draw.choice(
            [every, every, every + 1, mostly(every, 1, 2)]
        )
        sizes["layer_types"] = tuple(
            draw.choice([its.other_layer_type, *its.more_layer_types])
            if (layer + 1) % every
            else FULL_ATTENTION
            for layer in range(layers)
        )
    if its.rotates_in_windows and draw.random() < 0.8:
        sizes |= {"layer_types": (), "sliding_window": None}
    if "no_rope_layers" in its.optional_keys:
        layers = sizes["num_hidden_layers"] = draw.choice([1, 3, 4, 5])
        sizes["no_rope_layers"] = tuple(
            int((layer + 1) % mostly(4, 2, 3) != 0) for layer in range(layers)
        )
    scaling = draw.choice(["", "", "", "linear", "linear", "yarn", "yarn", "llama3", "odd yarn"])
    if "longrope" in its.rope_types:
        pairs = int(head_dim * 0.5) // 2
        sizes["partial_rotary_factor"] = 0.5
        if scaling:
            sizes["rope_scaling"] = LongScaling((1.5,) * pairs, (2.0,) * pairs, 1.19, CONTEXT, 4096)
            sizes["max_position_embeddings"] = CONTEXT
    elif scaling and not its.never_rotates:
        sizes["rope_scaling"] = {
            "linear": LinearScaling(2.5),
            "llama3": Llama3Scaling(4.0, 1.0, 4.0, 32),
            "yarn": YarnScaling(4.0, YarnScaling.default_attention_factor(4.0), 16),
            "odd yarn": YarnScaling(4.0, 1.3, 16),
        }[scaling]
        if PROPORTIONAL in its.rope_types:
            sizes["rope_scaling"] = ProportionalScaling(draw.choice([0.25, 0.6]), mostly(1.0, 2.5))
    linear_heads = draw.choice([1, 2, 3])
    linear_width = draw.choice([8, 16, 23, 64, 128])
    experts = draw.choice([1, 2, 5, 8, 17])
    if its.may_lack_experts:
        experts = draw.choice([0, experts])
    mamba_heads = 2 if width % 2 else draw.choice([2, 4])
    own = {
        "attention_bias": mostly(its.expert_bias, not its.expert_bias),
        "sliding_window": draw.choice([8, 20, 4096])
        if its.full_attention_every
        else mostly(4096, 8, None),
        "rope_local_theta": mostly(1e4, 50.0) if family == "gemma3_text" else None,
        "query_pre_attn_scalar": mostly(0, 5),
        "global_head_dim": draw.choice([0, 8, 32, 96]),
        "attention_k_eq_v": draw.random() < 0.5,
        "final_logit_softcapping": draw.choice([None, 5.0]),
        "embedding_multiplier": draw.choice([1.0, 12.0]),
        "residual_multiplier": draw.choice([1.0, 0.22]),
        "attention_multiplier": draw.choice([None, 0.1]),
        "logits_scaling": draw.choice([1.0, 8.0]),
        "linear_num_key_heads": linear_heads,
        "linear_num_value_heads": linear_heads * draw.choice([1, 2, 3]),
        "linear_key_head_dim": linear_width,
        "linear_value_head_dim": mostly(linear_width, 16),
        "linear_conv_kernel_dim": draw.choice([1, 2, 3, 4, 5]),
        "num_experts": experts,
        "num_experts_per_tok": min(experts, draw.choice([1, 2, 4])),
        "norm_topk_prob": mostly(family != "olmoe", family == "olmoe"),
        "moe_intermediate_size": draw.choice([8, 24, 32]),
        "shared_expert_intermediate_size": draw.choice([8, 24, 32]),
        "position_embedding_type": draw.choice(["rope", "nope"]),
        "mamba_n_heads": mamba_heads,
        "mamba_d_head": mostly(2 * width // mamba_heads, width),
        "mamba_n_groups": draw.choice([1, 2]),
        "mamba_d_state": draw.choice([8, 23, 64]),
        "mamba_d_conv": draw.choice([1, 2, 3, 4, 5]),
        "mamba_conv_bias": draw.random() < 0.5,
        "mamba_proj_bias": mostly(False, True),
        "time_step_min": draw.choice([0.0, 0.0, 0.5]),
        "mlp_only_layers": mostly((), (0,)),
        "clip_qkv": mostly(None, 3.0),
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": draw.random() < 0.5,
        "hidden_size_per_layer_input": draw.choice([0, 8, 32]),
        "vocab_size_per_layer_input": draw.choice([0, VOCABULARY + 5]),
    }
    if "num_kv_shared_layers" in its.optional_keys and draw.random() < 0.5:
        # Mostly those that llama.cpp has: a layer without a window is the last with keys of its own.
        shared = own["num_kv_shared_layers"] = mostly(draw.choice([2, 4]), 1, 3)
        kinds = (SLIDING_ATTENTION, FULL_ATTENTION) * 4
        sizes |= {"num_hidden_layers": 2 + shared, "layer_types": kinds[: 2 + shared]}
    if not own["hidden_size_per_layer_input"]:
        own["vocab_size_per_layer_input"] = 0
    if "partial_rotary_factor" not in sizes:
        own["partial_rotary_factor"] = draw.choice([1.0, 0.5, 0.25])
    if family == "bamba":
        own["partial_rotary_factor"] = draw.choice([1.0, 0.5])
    return sizes | {
        key: value for key, value in own.items() if key in its.optional_keys and key not in sizes
    }


def any_config(family: str, draw: random.Random, of_file: bool) -> LlamaConfig | None:
    """A random configuration, or that of a random config.json; None if it is no model."""
    try:
        if not of_file:
            return LlamaConfig(**likely(family, draw))
        return LlamaConfig.from_hf(
            config_draws.drawn(family, draw) | {"vocab_size": VOCABULARY, "initializer_range": 0.2}
        )
    except InputRefused:
        return None


CONTEXT = 256  # llama.cpp has no shorter one
KEYS = {field.name for field in fields(LlamaConfig)}
EACH = 40  # configurations of each family


@needs_gguf
@pytest.mark.slow
@pytest.mark.parametrize("family", REAL)
def test_any_file_that_is_written_is_loaded(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or its export is refused in a line that names the key; and what is loaded says what the model
    says.
    """
    outcomes = Counter[str]()
    with closing(Apart()) as client:
        for seed in range(EACH):
            draw, config = random.Random(f"{family} {seed}"), None
            while config is None or config.max_position_embeddings <= BEGINNING:
                config = any_config(family, draw, of_file=seed % 4 == 0)
            model = model_of(config, seed)
            dtype = draw.choice(["f32", "f32", "f32", *DTYPES])
            folder = tmp_path / str(seed)
            try:
                save_gguf(model, folder, TOKENIZER, dtype, lambda line: None)
            except InputRefused as refused:
                assert "\n" not in str(refused) and any(key in str(refused) for key in KEYS), (
                    refused
                )
                outcomes["refused"] += 1
                continue
            prompt = beginning(seed)
            count = min(config.max_position_embeddings, 60) - BEGINNING
            drawn, rows = client.drawn(
                folder / FILE,
                CONTEXT,
                prompt=prompt,
                count=count,
                among=WHOLE,
                vocabulary=config.vocab_size,
            )
            theirs = torch.tensor(rows)
            assert torch.allclose(theirs.exp().sum(-1), torch.ones(count), atol=1e-3)
            outcomes["loaded"] += 1
            # Of these an export says that numbers differ.
            warned = not getattr(config.rope_scaling, "truncate", True)
            warned |= config.time_step_min > 0
            warned |= (
                isinstance(config.rope_scaling, LongScaling)
                and config.rope_scaling.longest < CONTEXT
            )
            if dtype == "f32" and not warned:
                ids = prompt + drawn
                exact = log_probabilities(model.double(), ids)
                end = min(up_to_a_near_tie(model, ids), len(ids) - 1)
                if end < BEGINNING:  # already in the prompt
                    continue
                sure = slice(BEGINNING - 1, end)
                naive = naive_log_probabilities(model.float(), ids, monkeypatch)
                assert error_within(theirs[: sure.stop - sure.start], naive[sure], exact[sure]), (
                    config
                )
                outcomes["compared"] += 1
    assert outcomes["loaded"] >= 4 and outcomes["compared"] >= 2, outcomes
