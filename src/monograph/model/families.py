"""Describe the families of models that the decoder computes, by model_type, and the named presets.

One decoder computes all families. A `Family` says which parts of the decoder its models have, which
optional keys of config.json it reads, and transformers' defaults for these keys.

`LlamaConfig.preset` documents the presets. The module needs no torch.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from monograph.errors import InputRefused
from monograph.model.scaling import LINEAR, LONG, SLIDING, Llama3Scaling


class Norms(NamedTuple):
    """The names of a block's norms, by their places; None: the block has no norm there."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


class LlamaCpp(NamedTuple):
    """What llama.cpp computes for the models of a family: facts of its source, which
    tests/laws/test_exported_is_original.py and test_exported_log_probabilities.py compare.

    Attributes:
        name: llama.cpp's name of the architecture.
        neighbouring: whether the two channels of a rotary pair are neighbours. In this package they
            are at the same place in the two halves of a head.
        has_divisors: whether llama.cpp reads divisors of the rotary frequencies, which then express
            the scaling "llama3".
        whole_heads: whether all heads together must be as wide as hidden_size.
        own_head: whether a file must have the output head, although it is the embedding.
        local_base: the base of rotary positions in layers with a window; None: the base of the other
            layers.
        biases: whether llama.cpp computes attention_bias.
        mlp_norm: llama.cpp's name of the norm before the feed-forward layer.
        divides: whether the weights of a token's experts are divided by their sum.
        of_70b: which models of 80 layers llama.cpp's quantizer treats as a model of 70 billion
            weights, whose value projections get more bits: none (""), those with grouped heads, or
            all.
    """

    name: str
    neighbouring: bool = False
    has_divisors: bool = False
    whole_heads: bool = False
    own_head: bool = False
    local_base: float | None = None
    biases: bool = False
    mlp_norm: str = "ffn_norm"
    divides: bool = True
    of_70b: Literal["", "grouped", "all"] = ""


class Family(NamedTuple):
    """One architecture.

    Attributes:
        architecture: the transformers class that loads the model.
        keys: the optional keys of config.json that this family has.
        defaults: transformers' defaults for keys that a config.json leaves out.
        qkv_bias: whether the query, key and value projections always have biases.
        qk_norm: the RMS norm of queries and keys before the rotation: over each head ("heads") or
            over all heads together ("all"); "": none.
        norms: the norms of the residual branches.
        joined: {name in the files: names in the decoder} of the layers of a block that are one layer
            in the files.
        scalings: the supported scalings of rotary positions, by transformers' names.
        others: the kind of the layers that are not full attention: layers with a window, or gated
            delta nets.
        full_every: n, if every n-th layer is full attention and all other layers are not. It counts
            only if a file has no layer_types. 0: all layers are alike, except with
            use_sliding_window. Then the layers from max_window_layers on have a window. If the family
            has layers that do not rotate, these layers have a window instead.
        local_theta: default base of the rotary positions in layers with a window; None: these layers
            have the base of the other layers.
        gated: whether each head's attention is multiplied by a gate.
        centred: whether norms multiply by 1 + weight, so that their weights are centred at 0.
        embedding_scaled: whether embedded tokens are multiplied by the root of hidden_size.
        activation: transformers' key for the activation of the feed-forward layer, and the value of
            this key.
        only_default: keys of `_COMPUTED` that this family reads, and for which only the first value
            there is computed. All families read the keys there that no row has.
        whole_heads: whether all heads together must be as wide as hidden_size.
        experts: the key for the width of a mixture's experts; "": the family has no mixtures.
        divides: whether the weights of a token's experts are always divided by their sum.
        fused_experts: how files have all experts' matrices of a layer in two tensors, of which one
            has gate and up: gate's rows above up's ("halves"), or transposed, with alternating
            columns of gate and up ("columns"). "": each expert has its own tensors.
        expert_bias: whether the projections of experts and the router have biases.
        clamped: whether gate and up are combined as in gpt-oss (`monograph.model.layers.gating`).
        sinks: whether each head's attention has a sink (`monograph.ops.attention`).
        by_key_head: whether a delta net has one projection for queries, keys, values and gates, and
            one for the decay and beta of each value head, both ordered by key heads.
        heads_divide_width: whether transformers refuses a hidden_size that is no multiple of the
            number of heads, even with a head_dim.
        new_divides: norm_topk_prob of a new model with a mixture.
        predicts_ahead: whether files may have layers that predict several tokens at once, which
            neither transformers nor this package reads.
        llama_cpp: how llama.cpp reads an exported file; None: llama.cpp does not know the family, and
            no such file is written.
    """

    architecture: str
    keys: tuple[str, ...]
    defaults: Mapping[str, Any]
    qkv_bias: bool = False
    qk_norm: Literal["", "heads", "all"] = ""
    norms: Norms = Norms()
    joined: Mapping[str, tuple[str, ...]] = {}
    scalings: tuple[str, ...] = ("linear", "llama3", "yarn")
    others: str = SLIDING
    full_every: int = 0
    local_theta: float | None = None
    gated: bool = False
    centred: bool = False
    embedding_scaled: bool = False
    activation: tuple[str, str] = "hidden_act", "silu"
    only_default: tuple[str, ...] = ()
    whole_heads: bool = False
    experts: str = ""
    divides: bool = False
    fused_experts: Literal["", "halves", "columns"] = ""
    expert_bias: bool = False
    clamped: bool = False
    sinks: bool = False
    by_key_head: bool = False
    heads_divide_width: bool = False
    new_divides: bool = True
    predicts_ahead: bool = False
    llama_cpp: LlamaCpp | None = None


LINEAR_SIZES = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
_EXPERTS = (
    "num_experts",
    "num_experts_per_tok",
    "norm_topk_prob",
    "output_router_logits",
    "router_aux_loss_coef",
)
MULTIPLIERS = (
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "logits_scaling",
)
# Fields of `LlamaConfig` that only some families have.
OF_SOME = {
    "attention_bias",
    "sliding_window",
    "layer_types",
    "no_rope_layers",
    "rope_local_theta",
    "partial_rotary_factor",
    "query_pre_attn_scalar",
    *MULTIPLIERS,
    *LINEAR_SIZES,
    *_EXPERTS,
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "mlp_only_layers",
    "clip_qkv",
}
# Keys that must not be null in a file.
NEVER_NULL = (
    "rms_norm_eps",
    "max_position_embeddings",
    "attention_dropout",
    "attention_multiplier",
    "rope_local_base_freq",
)
_ENDS = {"bos_token_id": 1, "eos_token_id": 2}
_AFTER_BRANCHES = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
# The attributes of all families with attention and gated delta nets, and the defaults of their keys.
_HYBRID: dict[str, Any] = {
    "qk_norm": "heads",
    "others": LINEAR,
    "full_every": 4,
    "gated": True,
    "centred": True,
    "predicts_ahead": True,
}
_HYBRID_KEYS: dict[str, Any] = {
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "partial_rotary_factor": 0.25,
    **dict(zip(LINEAR_SIZES, (16, 32, 128, 128, 4), strict=True)),
}

_ITS_LLAMA = LlamaCpp("llama", neighbouring=True, has_divisors=True, biases=True, of_70b="grouped")
_ITS_OLMO_2 = LlamaCpp("olmo2", whole_heads=True, own_head=True)
# The name of the norm before the feed-forward layer in the newer architectures of llama.cpp.
_POST_NORM = "post_attention_norm"

FAMILIES: dict[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        ("attention_bias",),
        {"max_position_embeddings": 2048, **_ENDS},
        only_default=("mlp_bias",),
        heads_divide_width=True,
        llama_cpp=_ITS_LLAMA,
    ),
    "mistral": Family(
        "MistralForCausalLM",
        ("sliding_window",),
        {
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "sliding_window": 4096,
            **_ENDS,
        },
        llama_cpp=_ITS_LLAMA,
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        ("sliding_window", "layer_types"),
        {"num_key_value_heads": 32, "max_position_embeddings": 32_768, "sliding_window": 4096},
        qkv_bias=True,
        llama_cpp=LlamaCpp("qwen2", whole_heads=True, of_70b="all"),
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        ("attention_bias", "sliding_window", "layer_types"),
        {
            "num_key_value_heads": 32,
            "head_dim": 128,
            "max_position_embeddings": 32_768,
            "sliding_window": 4096,
        },
        qk_norm="heads",
        llama_cpp=LlamaCpp("qwen3"),
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        ("attention_bias",),
        {
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 2048,
            "pad_token_id": 1,
            "eos_token_id": 50_279,
        },
        qk_norm="all",
        norms=_AFTER_BRANCHES,
        llama_cpp=_ITS_OLMO_2,
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        ("attention_bias", "sliding_window", "layer_types", "no_rope_layers"),
        {
            "num_key_value_heads": 4,
            "max_position_embeddings": 32_768,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
            "pad_token_id": 128_004,
            "bos_token_id": 128_000,
            "eos_token_id": 128_001,
        },
        only_default=("mlp_bias",),
        llama_cpp=LlamaCpp("smollm3", neighbouring=True),
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        ("attention_bias", "sliding_window", "layer_types", "rope_local_theta"),
        {
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 2048,
            "rope_theta": 500_000.0,
            "sliding_window": 4096,
            "pad_token_id": 1,
            "eos_token_id": 50_279,
        },
        qk_norm="all",
        norms=_AFTER_BRANCHES,
        full_every=4,
        local_theta=500_000.0,  # also if the file's rope_theta is another number
        llama_cpp=_ITS_OLMO_2,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        (
            "attention_bias",
            "sliding_window",
            "layer_types",
            "sliding_window_pattern",
            "rope_local_theta",
            "rope_local_base_freq",
            "query_pre_attn_scalar",
        ),
        {
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131_072,
            "rope_theta": 1e6,
            "sliding_window": 4096,
            "query_pre_attn_scalar": 256,
            "tie_word_embeddings": True,
            "pad_token_id": 0,
            "bos_token_id": 2,
            "eos_token_id": 1,
        },
        qk_norm="heads",
        norms=Norms(
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ),
        full_every=6,
        local_theta=10_000.0,
        centred=True,
        embedding_scaled=True,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        only_default=(
            "attn_logit_softcapping",
            "final_logit_softcapping",
            "use_bidirectional_attention",
        ),
        llama_cpp=LlamaCpp("gemma3", local_base=10_000.0),
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        ("sliding_window", "partial_rotary_factor"),
        {
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "bos_token_id": 1,
            "eos_token_id": 32_000,
            "pad_token_id": 32_000,
        },
        joined={
            "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
        },
        scalings=(LONG,),
        only_default=("resid_pdrop",),
        llama_cpp=LlamaCpp("phi3", whole_heads=True),
    ),
    "granite": Family(
        "GraniteForCausalLM",
        (
            "attention_bias",
            "embedding_multiplier",
            "residual_multiplier",
            "attention_multiplier",
            "logits_scaling",
        ),
        {"max_position_embeddings": 2048, "attention_multiplier": 1.0, **_ENDS},
        only_default=("mlp_bias",),
        llama_cpp=LlamaCpp("granite", neighbouring=True, has_divisors=True, biases=True),
    ),
    "qwen3_5_text": Family(
        "Qwen3_5ForCausalLM",
        ("attention_bias", "layer_types", "partial_rotary_factor", *LINEAR_SIZES),
        {"num_key_value_heads": 4, **_HYBRID_KEYS},
        **_HYBRID,
        llama_cpp=LlamaCpp("qwen35", mlp_norm=_POST_NORM),
    ),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        (
            "attention_bias",
            "layer_types",
            "partial_rotary_factor",
            *LINEAR_SIZES,
            *_EXPERTS,
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "mlp_only_layers",
        ),
        {
            "num_key_value_heads": 2,
            **_HYBRID_KEYS,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "norm_topk_prob": True,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
        **_HYBRID,
        experts="moe_intermediate_size",
        by_key_head=True,
        llama_cpp=LlamaCpp("qwen3next", mlp_norm=_POST_NORM),
    ),
    "qwen3_5_moe_text": Family(
        "Qwen3_5MoeForCausalLM",
        (
            "attention_bias",
            "layer_types",
            "partial_rotary_factor",
            *LINEAR_SIZES,
            *_EXPERTS,
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
        ),
        {
            "intermediate_size": 512,
            "num_key_value_heads": 2,
            **_HYBRID_KEYS,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
        **_HYBRID,
        experts="moe_intermediate_size",
        divides=True,
        fused_experts="halves",
        llama_cpp=LlamaCpp("qwen35moe", mlp_norm=_POST_NORM),
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        (
            "attention_bias",
            "sliding_window",
            "use_sliding_window",
            *_EXPERTS,
            "num_local_experts",
            "moe_intermediate_size",
            "mlp_only_layers",
        ),
        {
            "num_key_value_heads": 4,
            "max_position_embeddings": 32_768,
            "sliding_window": 4096,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        qk_norm="heads",
        experts="moe_intermediate_size",
        llama_cpp=LlamaCpp("qwen3moe"),
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        ("attention_bias", "clip_qkv", *_EXPERTS, "num_local_experts"),
        {
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "pad_token_id": 1,
            "eos_token_id": 50_279,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "router_aux_loss_coef": 0.01,
        },
        qk_norm="all",
        whole_heads=True,
        experts="intermediate_size",
        new_divides=False,
        llama_cpp=LlamaCpp("olmoe", own_head=True, divides=False),
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        ("attention_bias", "sliding_window", "layer_types", *_EXPERTS, "num_local_experts"),
        {
            "vocab_size": 201_088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "attention_bias": True,
            "sliding_window": 128,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "rope_theta": 150_000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        joined={"mlp.router": ("mlp.gate",)},
        full_every=2,
        experts="intermediate_size",
        divides=True,
        fused_experts="columns",
        expert_bias=True,
        clamped=True,
        sinks=True,
        only_default=("swiglu_alpha", "swiglu_limit"),
        llama_cpp=LlamaCpp("gpt-oss", own_head=True, biases=True, mlp_norm=_POST_NORM),
    ),
}
# Keys of config.json that change what transformers computes or loads, with the values for which it
# computes the same as `Llama`. The first of them is transformers' default.
_COMPUTED: dict[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "use_bidirectional_attention": (False, None),
    "mlp_bias": (False,),
    "resid_pdrop": (0.0,),
    "is_causal": (True,),
    "partial_rotary_factor": (1, None),
    "per_layer_config": (None, {}),
    "transformers_weights": (None,),
    "swiglu_alpha": (1.702,),
    "swiglu_limit": (7.0,),
}
_READ_BY_SOME = {key for its in FAMILIES.values() for key in its.only_default}
# transformers' names of one activation.
_NAMES_OF_ACTIVATION = {"silu": ("silu", "swish"), "gelu_pytorch_tanh": ("gelu_pytorch_tanh",)}


def family(model_type: object) -> Family:
    """Return the family of a model_type.

    Raises:
        InputRefused: the decoder does not compute this family.
    """
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise InputRefused(
            f"model_type = {model_type!r} is not supported: only {', '.join(FAMILIES)} are"
        )
    return FAMILIES[model_type]


def check_computed(values: Mapping[str, Any]) -> None:
    """Raise InputRefused if a config.json asks for something that the decoder does not compute.

    The message has the name of the key.
    """
    model_type = values["model_type"]
    its = family(model_type)
    activation_key, activation = its.activation
    computed = {activation_key: _NAMES_OF_ACTIVATION[activation], **_COMPUTED}
    for key, supported in computed.items():
        is_read = key not in _READ_BY_SOME or key in its.only_default
        # Optional keys of the family are checked elsewhere.
        is_checked = is_read and key not in its.keys
        if is_checked and values.get(key, supported[0]) not in supported:
            raise InputRefused(
                f"{key} = {values[key]!r} is not supported: only {supported[0]!r} is"
            )
    quantisation = values.get("quantization_config")
    if quantisation is None:
        return
    if its.fused_experts != "columns":
        raise InputRefused(
            "quantization_config: quantised weights are not supported; save them in bf16 or fp32"
        )
    if not isinstance(quantisation, dict) or quantisation.get("quant_method") != "mxfp4":
        raise InputRefused(
            "quantization_config: of quantised weights only quant_method = 'mxfp4' is supported; "
            "save them in bf16 or fp32"
        )


# The family of a new model if the user names none.
FIRST_FAMILY = "llama"
# vocab_size, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads,
# num_key_value_heads
PRESETS: dict[str, tuple[int, ...]] = {
    "nano": (512, 64, 192, 2, 2, 1),
    "micro": (4096, 192, 512, 4, 6, 2),
    "124m": (50_304, 768, 2048, 12, 6, 6),
    "llama-179m": (50_000, 768, 3072, 12, 12, 3),
    "1b": (128_256, 2048, 8192, 16, 32, 8),
    "8b": (128_256, 4096, 14_336, 32, 32, 8),
}
_LLAMA_3: dict[str, Any] = {
    "max_position_embeddings": 131_072,
    "rope_theta": 500_000.0,
    "bos_token_id": 128_000,
    "eos_token_id": 128_001,
}
# The other keys of the presets.
BEYOND_SHAPE: dict[str, dict[str, Any]] = {
    "nano": {"tie_word_embeddings": True, "initializer_range": 0.08},
    "micro": {"tie_word_embeddings": True, "initializer_range": 0.046},
    "124m": {"tie_word_embeddings": True},
    "llama-179m": {},
    "1b": {**_LLAMA_3, "tie_word_embeddings": True, "rope_scaling": Llama3Scaling(factor=32.0)},
    "8b": {**_LLAMA_3, "rope_scaling": Llama3Scaling()},
}
