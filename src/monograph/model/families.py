"""Describe the families of models that the decoder computes, by model_type, and the named presets.

One decoder computes all families. A `Family` says which parts of the decoder its models have, which
optional keys of config.json they have, and transformers' defaults for keys that a file leaves out.

`LlamaConfig.preset` documents the presets. The module needs no torch.
"""

from collections.abc import Mapping
from types import ModuleType
from typing import Any, Literal, NamedTuple

from monograph.errors import InputRefused
from monograph.model import (
    bamba_keys,
    gemma4_keys,
    granite_keys,
    lfm2_keys,
    nemotron_keys,
    quantisation,
)
from monograph.model.layer_types import (
    CONVOLUTION,
    CONVOLUTION_SIZES,
    DELTA_NET_SIZES,
    LAYER_TYPES,
    LINEAR_ATTENTION,
    MAMBA,
    MAMBA_SIZES,
    PLAIN_MLP,
    SLIDING_ATTENTION,
    LayerType,
)
from monograph.model.scaling import LONGROPE, PROPORTIONAL, QUERY_GROWTH, Llama3Scaling


class NormNames(NamedTuple):
    """The names of a block's norms, by their places; None: the block has no norm there."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


class FusedNames(NamedTuple):
    """The names, in a block, of the two tensors that hold the matrices of all experts of a layer."""

    gate_up: str = "mlp.experts.gate_up_proj"
    down: str = "mlp.experts.down_proj"


class LlamaCppSupport(NamedTuple):
    """How llama.cpp computes the models of a family.

    These are facts about llama.cpp's source. tests/laws/test_exported_is_original.py and
    test_exported_log_probabilities.py check them.

    Attributes:
        name: llama.cpp's name of the architecture.
        interleaved_rotary: whether llama.cpp rotates neighbouring channels of a head, as in
            `Family.interleaved_rotary`.
        reads_rope_divisors: whether llama.cpp reads divisors of the rotary frequencies from the file.
            The scaling "llama3" is exported in this form.
        head_dim_is_derived: whether head_dim must be hidden_size / num_attention_heads.
        needs_output_head: whether a file must have the output head even if it is tied to the
            embedding.
        needs_tied_head: whether a file must not have an output head, because llama.cpp uses the
            embedding as the head.
        layers_with_windows: the number of layers of the only models in which llama.cpp computes windows;
            0: any number.
        reads_yarn_keys: whether llama.cpp reads from the file how YaRN scales scores, and where it
            begins and ends to stretch wavelengths.
        local_rope_theta: the base of rotary positions in layers with a window; None: they have the
            base of the other layers.
        computes_attention_bias: whether llama.cpp computes the biases of attention_bias.
        norm_before_mlp: llama.cpp's name of the norm before the feed-forward layer.
        final_norm: llama.cpp's name of the norm after the last block.
        norm_topk_prob: whether llama.cpp divides the weights of a token's experts by their sum. It
            does not read this from the file.
        attention_alone: llama.cpp's name of the architecture if all layers of a hybrid are attention
            and have no experts; "": it does not load such a model.
        kv_heads_by_layer: whether a file has the number of key-value heads of each layer, which is 0
            for a layer without attention.
        windows_by_layer: whether a file says which layers have a window, and has the width of a head and
            the rotary base of layers with a window and of the others.
        rotation_is_a_key: whether a file says whether queries and keys are rotated.
        needs_layer_norm_eps: whether a file must also have the epsilon of layer norms, although there
            are none.
        joined_layers: whether llama.cpp's files also have the family's joined layers
            (`Family.joined_layers`), instead of separate ones.
        has_mtp: whether a file may have a head for multi-token prediction, which is one more block.
        treated_as_70b: which models of 80 layers llama.cpp's quantizer treats as a model of 70
            billion weights, whose value projections get more bits: none (""), those with fewer
            key-value heads than query heads ("grouped"), or all ("all").
    """

    name: str
    interleaved_rotary: bool = False
    reads_rope_divisors: bool = False
    head_dim_is_derived: bool = False
    needs_output_head: bool = False
    needs_tied_head: bool = False
    layers_with_windows: int = 0
    reads_yarn_keys: bool = False
    local_rope_theta: float | None = None
    computes_attention_bias: bool = False
    norm_before_mlp: str = "ffn_norm"
    final_norm: str = "output_norm"
    norm_topk_prob: bool = True
    attention_alone: str = ""
    kv_heads_by_layer: bool = False
    windows_by_layer: bool = False
    rotation_is_a_key: bool = False
    has_mtp: bool = False
    needs_layer_norm_eps: bool = False
    joined_layers: bool = False
    treated_as_70b: Literal["", "grouped", "all"] = ""


class Family(NamedTuple):
    """What distinguishes the models of one model_type.

    Attributes:
        architecture: the transformers class that loads the model.
        optional_keys: the keys of config.json that this family has and some other families do not.
        defaults: transformers' defaults for keys that a config.json leaves out.
        qkv_bias: whether the query, key and value projections always have biases.
        output_bias: whether attention_bias gives the output projection of attention a bias, too.
        interleaved_rotary: whether the two channels of a rotary pair are neighbours in a head. If
            false, they are at the same place in the two halves of a head.
        qk_norm: the RMS norm of queries and keys before the rotation: over each head ("heads") or
            over all heads together ("all"); "": none.
        norm_names: the names of the norms before and after attention and the feed-forward layer.
        joined_layers: layers that are one layer in the files, as {name in the files: names in the
            decoder}. A single layer that has another name in the files is in it, too. Names of layers
            in a block begin after the block's name.
        joined_in_mixtures: the same for a model with experts, in addition to `joined_layers`. It takes
            precedence for a name that both have.
        rope_types: the supported scalings of rotary positions, by transformers' names.
        other_layer_type: the type of the layers that are not full attention, by its word in
            `LAYER_TYPES`: layers with a window, gated delta nets, layers of Mamba 2, or gated short
            convolutions.
        more_layer_types: the types of layers that the family has besides full attention and
            `other_layer_type`.
        has_feed_forward: whether a block has a feed-forward layer after its first layer.
        never_rotates: whether no layer of any model rotates queries and keys.
        rotates_in_windows: whether only layers with the window rotate queries and keys, in a model that
            has a sliding_window. In a model without one all layers do.
        may_tie: whether the output head may be the embedding matrix.
        trains_padding: whether the embedding row of pad_token_id gets a gradient from look-ups.
        any_mamba_width: whether the heads of a layer of Mamba 2 may together have any width. If not,
            it is a multiple of hidden_size.
        full_attention_every: n, if every n-th layer is full attention and the layers between are of
            `other_layer_type`, in turn with `more_layer_types`. It is used only if a file has no
            layer_types. 0: the family has no such rule, and `layer_keys.windows_from_hf` says which
            layers have a window.
        last_layer_is_full: whether the last layer must be full attention.
        default_local_theta: default base of the rotary positions in layers with a window; None: these
            layers have the base of the other layers.
        unscaled_scores: whether attention's scores have no factor.
        value_norm: whether the values of each head are divided by their root mean square.
        layer_scalar: whether each block's result is multiplied by a number that is stored with the
            block's parameters, but not trained.
        gated_attention: whether each head's attention is multiplied by a gate.
        centred_norms: whether norms multiply by 1 + weight, so that their weights are centred at 0.
        embedding_scaled: whether embedded tokens are multiplied by the root of hidden_size.
        activation: transformers' key for the activation of the feed-forward layer, and the value of
            this key.
        older_activations: other values of this key that mean the same in this family.
        only_default_keys: keys that this family reads, but only with transformers' default, which is in
            `SUPPORTED_VALUES`. Other values are refused.
        head_dim_is_derived: whether head_dim must be hidden_size / num_attention_heads.
        expert_width_key: the key for the width of a mixture's experts; "": the family has no mixtures
            of experts.
        mixture_beside_mlp: whether a block with a mixture has a gated layer beside it
            (`monograph.model.mixture_beside_mlp`).
        always_norm_topk_prob: whether the weights of a token's experts are divided by their sum,
            whatever norm_topk_prob is.
        file_prefix: what the names of tensors in files begin with instead of "model.", except the
            output head's; "": they begin with "model.".
        fused_experts: how files store the experts of a layer. "": each expert has its own tensors.
            Otherwise there are two tensors for all experts, one with gate and up and one with down.
            "halves": the rows of gate are followed by those of up. "columns": the matrices are
            transposed, and columns of gate and up alternate.
        fused_names: the names of these two tensors in a block of the files.
        may_lack_experts: whether a model may have num_experts = 0, and a gated layer in each block.
        gated_shared_expert: whether a shared expert's output is multiplied by a gate of its own.
        expert_bias: whether the projections of experts and the router have biases.
        clamped_gating: whether gate and up are combined as in gpt-oss
            (`monograph.model.layers.gating`).
        attention_sinks: whether each head's attention has a sink (`monograph.ops.attention`).
        projections_by_key_head: whether a delta net has two input projections: one for queries, keys,
            values and gates, and one for beta and decay. Their rows are ordered by key heads. If false,
            it has four: one for queries, keys and values, and one each for gates, beta and decay.
        heads_divide_hidden_size: whether transformers refuses a hidden_size that is not a multiple of
            the number of heads, even if there is a head_dim.
        new_norm_topk_prob: norm_topk_prob of a new model with mixtures.
        may_have_mtp_layers: whether files may have layers for multi-token prediction although their
            config.json does not say so.
        own_keys: the module that translates the keys of config.json that only this family has. It has
            the functions `from_hf` and `to_hf`, and `KEYS`, the names of these keys. None: the family
            has only keys of `LlamaConfig`.
        llama_cpp: how llama.cpp computes an exported model; None: no file for llama.cpp is written.
    """

    architecture: str
    optional_keys: tuple[str, ...]
    defaults: Mapping[str, Any]
    qkv_bias: bool = False
    output_bias: bool = True
    interleaved_rotary: bool = False
    qk_norm: Literal["", "heads", "all"] = ""
    norm_names: NormNames = NormNames()
    joined_layers: Mapping[str, tuple[str, ...]] = {}
    joined_in_mixtures: Mapping[str, tuple[str, ...]] = {}
    rope_types: tuple[str, ...] = ("linear", "llama3", "yarn")
    other_layer_type: str = SLIDING_ATTENTION
    more_layer_types: tuple[str, ...] = ()
    has_feed_forward: bool = True
    never_rotates: bool = False
    rotates_in_windows: bool = False
    may_tie: bool = True
    trains_padding: bool = False
    any_mamba_width: bool = False
    full_attention_every: int = 0
    last_layer_is_full: bool = False
    default_local_theta: float | None = None
    unscaled_scores: bool = False
    value_norm: bool = False
    layer_scalar: bool = False
    gated_attention: bool = False
    centred_norms: bool = False
    embedding_scaled: bool = False
    activation: tuple[str, str] = "hidden_act", "silu"
    older_activations: tuple[str, ...] = ()
    only_default_keys: tuple[str, ...] = ()
    head_dim_is_derived: bool = False
    expert_width_key: str = ""
    mixture_beside_mlp: bool = False
    always_norm_topk_prob: bool = False
    file_prefix: str = ""
    fused_experts: Literal["", "halves", "columns"] = ""
    fused_names: FusedNames = FusedNames()
    may_lack_experts: bool = False
    gated_shared_expert: bool = True
    expert_bias: bool = False
    clamped_gating: bool = False
    attention_sinks: bool = False
    projections_by_key_head: bool = False
    heads_divide_hidden_size: bool = False
    new_norm_topk_prob: bool = True
    may_have_mtp_layers: bool = False
    own_keys: ModuleType | None = None
    llama_cpp: LlamaCppSupport | None = None

    @property
    def other_layers(self) -> LayerType:
        """Return the kind of the layers that are not full attention."""
        return LAYER_TYPES[self.other_layer_type]


_EXPERT_KEYS = (
    "num_experts",
    "num_experts_per_tok",
    "norm_topk_prob",
    "output_router_logits",
    "router_aux_loss_coef",
)
# The fields that scale the embedded tokens, the branches, attention's scores and the logits.
MULTIPLIERS = (
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "logits_scaling",
)
# Fields of `LlamaConfig` that only some families have. A family has such a field if it is among the
# family's `optional_keys`.
FIELDS_OF_SOME_FAMILIES = {
    "attention_bias",
    "sliding_window",
    "layer_types",
    "no_rope_layers",
    "position_embedding_type",
    "mamba_conv_bias",
    "mamba_proj_bias",
    "time_step_min",
    "conv_bias",
    "rope_local_theta",
    "partial_rotary_factor",
    "query_pre_attn_scalar",
    "global_head_dim",
    "num_global_key_value_heads",
    "attention_k_eq_v",
    "num_kv_shared_layers",
    "use_double_wide_mlp",
    "hidden_size_per_layer_input",
    "vocab_size_per_layer_input",
    "final_logit_softcapping",
    *MULTIPLIERS,
    *(key for layer_type in LAYER_TYPES.values() for key in layer_type.size_keys),
    *_EXPERT_KEYS,
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "mlp_only_layers",
    "clip_qkv",
}
# Keys of config.json that must not be null. A file may leave them out.
NON_NULL_KEYS = (
    "rms_norm_eps",
    "max_position_embeddings",
    "attention_dropout",
    "attention_multiplier",
    "rope_local_base_freq",
)
_LLAMA_BOS_AND_EOS = {"bos_token_id": 1, "eos_token_id": 2}
_NORMS_AFTER_BRANCHES = NormNames(
    None, "post_attention_layernorm", None, "post_feedforward_layernorm"
)
# What all families with gated delta nets share: attributes of their `Family`, and defaults of keys.
_HYBRID: dict[str, Any] = {
    "qk_norm": "heads",
    "other_layer_type": LINEAR_ATTENTION,
    "full_attention_every": 4,
    "gated_attention": True,
    "centred_norms": True,
    "may_have_mtp_layers": True,
}
_HYBRID_DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "partial_rotary_factor": 0.25,
    **dict(zip(DELTA_NET_SIZES, (16, 32, 128, 128, 4), strict=True)),
}

_LLAMA_IN_LLAMA_CPP = LlamaCppSupport(
    "llama",
    interleaved_rotary=True,
    reads_rope_divisors=True,
    computes_attention_bias=True,
    treated_as_70b="grouped",
)
_OLMO_2_IN_LLAMA_CPP = LlamaCppSupport("olmo2", head_dim_is_derived=True, needs_output_head=True)
# What GLM and GLM-4 share: attributes of their `Family`, and defaults of keys.
_GLM: dict[str, Any] = {
    "output_bias": False,
    "interleaved_rotary": True,
    "joined_layers": {"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")},
}
_GLM_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1.5625e-7,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "pad_token_id": 151_329,
    "eos_token_id": [151_329, 151_336, 151_338],
}
# The norms of a block of Gemma 3 and 4.
_NORMS_AROUND_BRANCHES = NormNames(
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
# The norms of a Gemma 4's block that belong to its mixture and the gated layer beside it.
_NORMS_OF_MIXTURE_BESIDE_MLP = (
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm_1",
    "pre_feedforward_layernorm_2",
    "post_feedforward_layernorm_2",
)
# llama.cpp's name of the norm before the feed-forward layer in its newer architectures.
_POST_ATTENTION_NORM = "post_attention_norm"

FAMILIES: dict[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        ("attention_bias",),
        {"max_position_embeddings": 2048, **_LLAMA_BOS_AND_EOS},
        only_default_keys=("mlp_bias",),
        heads_divide_hidden_size=True,
        llama_cpp=_LLAMA_IN_LLAMA_CPP,
    ),
    "mistral": Family(
        "MistralForCausalLM",
        ("sliding_window",),
        {
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "sliding_window": 4096,
            **_LLAMA_BOS_AND_EOS,
        },
        llama_cpp=_LLAMA_IN_LLAMA_CPP,
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        ("sliding_window", "layer_types"),
        {"num_key_value_heads": 32, "max_position_embeddings": 32_768, "sliding_window": 4096},
        qkv_bias=True,
        llama_cpp=LlamaCppSupport("qwen2", head_dim_is_derived=True, treated_as_70b="all"),
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
        llama_cpp=LlamaCppSupport("qwen3"),
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
        norm_names=_NORMS_AFTER_BRANCHES,
        llama_cpp=_OLMO_2_IN_LLAMA_CPP,
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
        only_default_keys=("mlp_bias",),
        llama_cpp=LlamaCppSupport("smollm3", interleaved_rotary=True),
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
        norm_names=_NORMS_AFTER_BRANCHES,
        full_attention_every=4,
        default_local_theta=500_000.0,  # also if the file's rope_theta is another number
        llama_cpp=_OLMO_2_IN_LLAMA_CPP,
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
        norm_names=_NORMS_AROUND_BRANCHES,
        full_attention_every=6,
        default_local_theta=10_000.0,
        centred_norms=True,
        embedding_scaled=True,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        only_default_keys=(
            "attn_logit_softcapping",
            "final_logit_softcapping",
            "use_bidirectional_attention",
        ),
        llama_cpp=LlamaCppSupport("gemma3", local_rope_theta=10_000.0),
    ),
    "gemma4_text": Family(
        "Gemma4ForCausalLM",
        (
            "attention_bias",
            "sliding_window",
            "layer_types",
            "rope_local_theta",
            "global_head_dim",
            "num_global_key_value_heads",
            "attention_k_eq_v",
            "num_kv_shared_layers",
            "use_double_wide_mlp",
            "hidden_size_per_layer_input",
            "vocab_size_per_layer_input",
            "final_logit_softcapping",
            "per_layer_config",
            "num_experts",
            "num_experts_per_tok",
            "norm_topk_prob",
            "moe_intermediate_size",
        ),
        {
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 30,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 262_144,
            "max_position_embeddings": 131_072,
            "rope_theta": 1e6,
            "sliding_window": 512,
            "tie_word_embeddings": True,
            "pad_token_id": 0,
            "bos_token_id": 2,
            "eos_token_id": 1,
            **gemma4_keys.DEFAULTS,
        },
        qk_norm="heads",
        value_norm=True,
        unscaled_scores=True,
        layer_scalar=True,
        norm_names=_NORMS_AROUND_BRANCHES,
        rope_types=(PROPORTIONAL,),
        full_attention_every=6,
        last_layer_is_full=True,
        default_local_theta=10_000.0,
        embedding_scaled=True,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        expert_width_key="moe_intermediate_size",
        mixture_beside_mlp=True,
        always_norm_topk_prob=True,
        fused_experts="halves",
        fused_names=FusedNames("experts.gate_up_proj", "experts.down_proj"),
        joined_in_mixtures={
            "router.proj": ("mlp.router.proj",),
            "router": ("mlp.router",),
            **{name: (f"mlp.{name}",) for name in _NORMS_OF_MIXTURE_BESIDE_MLP},
        },
        may_lack_experts=True,
        llama_cpp=LlamaCppSupport("gemma4", kv_heads_by_layer=True, windows_by_layer=True),
        own_keys=gemma4_keys,
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
        joined_layers={
            "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
        },
        rope_types=(LONGROPE,),
        only_default_keys=("resid_pdrop",),
        llama_cpp=LlamaCppSupport("phi3", head_dim_is_derived=True, joined_layers=True),
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
        {"max_position_embeddings": 2048, "attention_multiplier": 1.0, **_LLAMA_BOS_AND_EOS},
        only_default_keys=("mlp_bias",),
        llama_cpp=LlamaCppSupport(
            "granite",
            interleaved_rotary=True,
            reads_rope_divisors=True,
            computes_attention_bias=True,
        ),
    ),
    "qwen3_5_text": Family(
        "Qwen3_5ForCausalLM",
        ("attention_bias", "layer_types", "partial_rotary_factor", *DELTA_NET_SIZES),
        {"num_key_value_heads": 4, **_HYBRID_DEFAULTS},
        **_HYBRID,
        llama_cpp=LlamaCppSupport("qwen35", norm_before_mlp=_POST_ATTENTION_NORM, has_mtp=True),
    ),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        (
            "attention_bias",
            "layer_types",
            "partial_rotary_factor",
            *DELTA_NET_SIZES,
            *_EXPERT_KEYS,
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "mlp_only_layers",
        ),
        {
            "num_key_value_heads": 2,
            **_HYBRID_DEFAULTS,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "norm_topk_prob": True,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
        **_HYBRID,
        expert_width_key="moe_intermediate_size",
        projections_by_key_head=True,
        llama_cpp=LlamaCppSupport("qwen3next", norm_before_mlp=_POST_ATTENTION_NORM, has_mtp=True),
    ),
    "qwen3_5_moe_text": Family(
        "Qwen3_5MoeForCausalLM",
        (
            "attention_bias",
            "layer_types",
            "partial_rotary_factor",
            *DELTA_NET_SIZES,
            *_EXPERT_KEYS,
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
        ),
        {
            "intermediate_size": 512,
            "num_key_value_heads": 2,
            **_HYBRID_DEFAULTS,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
        **_HYBRID,
        expert_width_key="moe_intermediate_size",
        always_norm_topk_prob=True,
        fused_experts="halves",
        llama_cpp=LlamaCppSupport("qwen35moe", norm_before_mlp=_POST_ATTENTION_NORM, has_mtp=True),
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        (
            "attention_bias",
            "sliding_window",
            "use_sliding_window",
            *_EXPERT_KEYS,
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
        expert_width_key="moe_intermediate_size",
        llama_cpp=LlamaCppSupport("qwen3moe"),
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        ("attention_bias", "clip_qkv", *_EXPERT_KEYS, "num_local_experts"),
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
        head_dim_is_derived=True,
        expert_width_key="intermediate_size",
        new_norm_topk_prob=False,
        llama_cpp=LlamaCppSupport("olmoe", needs_output_head=True, norm_topk_prob=False),
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        ("attention_bias", "sliding_window", "layer_types", *_EXPERT_KEYS, "num_local_experts"),
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
        joined_layers={"mlp.router": ("mlp.gate",)},
        full_attention_every=2,
        expert_width_key="intermediate_size",
        always_norm_topk_prob=True,
        fused_experts="columns",
        expert_bias=True,
        clamped_gating=True,
        attention_sinks=True,
        only_default_keys=("swiglu_alpha", "swiglu_limit"),
        llama_cpp=LlamaCppSupport(
            "gpt-oss",
            needs_output_head=True,
            computes_attention_bias=True,
            norm_before_mlp=_POST_ATTENTION_NORM,
        ),
    ),
    "granitemoehybrid": Family(
        "GraniteMoeHybridForCausalLM",
        (
            "attention_bias",
            "layer_types",
            "position_embedding_type",
            *MAMBA_SIZES,
            "mamba_conv_bias",
            "mamba_proj_bias",
            *MULTIPLIERS,
            *_EXPERT_KEYS,
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
        ),
        {
            "max_position_embeddings": 2048,
            "attention_multiplier": 1.0,
            "position_embedding_type": "nope",
            **dict(zip(MAMBA_SIZES, (128, "auto", 1, 256, 4), strict=True)),
            "mamba_expand": 2,
            "shared_intermediate_size": 1024,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            **_LLAMA_BOS_AND_EOS,
        },
        joined_layers={
            "shared_mlp.input_linear": ("mlp.gate_proj", "mlp.up_proj"),
            "shared_mlp.output_linear": ("mlp.down_proj",),
        },
        joined_in_mixtures={
            "shared_mlp.input_linear": (
                "mlp.shared_expert.gate_proj",
                "mlp.shared_expert.up_proj",
            ),
            "shared_mlp.output_linear": ("mlp.shared_expert.down_proj",),
            "block_sparse_moe.router.layer": ("mlp.gate",),
        },
        other_layer_type=MAMBA,
        full_attention_every=10,
        expert_width_key="moe_intermediate_size",
        always_norm_topk_prob=True,
        fused_experts="halves",
        fused_names=FusedNames(
            "block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"
        ),
        may_lack_experts=True,
        gated_shared_expert=False,
        llama_cpp=LlamaCppSupport(
            "granitehybrid",
            interleaved_rotary=True,
            reads_rope_divisors=True,
            computes_attention_bias=True,
            attention_alone="granite",
            kv_heads_by_layer=True,
            rotation_is_a_key=True,
        ),
        own_keys=granite_keys,
    ),
    "bamba": Family(
        "BambaForCausalLM",
        (
            "attention_bias",
            "layer_types",
            "partial_rotary_factor",
            *MAMBA_SIZES,
            "mamba_conv_bias",
            "mamba_proj_bias",
        ),
        {
            "intermediate_size": 14_336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 262_144,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "pad_token_id": 0,
            **_LLAMA_BOS_AND_EOS,
            **dict(zip(MAMBA_SIZES, (128, "auto", 1, 256, 4), strict=True)),
            "mamba_expand": 2,
        },
        norm_names=NormNames(before_mlp="pre_ff_layernorm"),
        joined_layers={
            "feed_forward.gate_proj": ("mlp.gate_proj",),
            "feed_forward.up_proj": ("mlp.up_proj",),
            "feed_forward.down_proj": ("mlp.down_proj",),
            "model.final_layernorm": ("model.norm",),
        },
        other_layer_type=MAMBA,
        full_attention_every=10,
        only_default_keys=("mlp_bias", "z_loss_coefficient"),
        llama_cpp=LlamaCppSupport(
            "granitehybrid",
            interleaved_rotary=True,
            reads_rope_divisors=True,
            computes_attention_bias=True,
            kv_heads_by_layer=True,
            rotation_is_a_key=True,
        ),
        own_keys=bamba_keys,
    ),
    "lfm2": Family(
        "Lfm2ForCausalLM",
        ("layer_types", *CONVOLUTION_SIZES, "conv_bias"),
        {
            "intermediate_size": 12_288,
            "num_key_value_heads": 8,
            "max_position_embeddings": 128_000,
            "rope_theta": 1e6,
            "tie_word_embeddings": True,
            "pad_token_id": 0,
            **_LLAMA_BOS_AND_EOS,
            "conv_L_cache": 3,
            "norm_eps": 1e-5,
            "block_auto_adjust_ff_dim": True,
            "block_ffn_dim_multiplier": 1.0,
            "block_multiple_of": 256,
        },
        qk_norm="heads",
        norm_names=NormNames(before_attention="operator_norm", before_mlp="ffn_norm"),
        joined_layers={
            "self_attn.q_layernorm": ("self_attn.q_norm",),
            "self_attn.k_layernorm": ("self_attn.k_norm",),
            "self_attn.out_proj": ("self_attn.o_proj",),
            "feed_forward.w1": ("mlp.gate_proj",),
            "feed_forward.w3": ("mlp.up_proj",),
            "feed_forward.w2": ("mlp.down_proj",),
            "model.embedding_norm": ("model.norm",),
        },
        other_layer_type=CONVOLUTION,
        full_attention_every=3,
        llama_cpp=LlamaCppSupport(
            "lfm2",
            head_dim_is_derived=True,
            kv_heads_by_layer=True,
            final_norm="token_embd_norm",
        ),
        own_keys=lfm2_keys,
    ),
    "glm": Family(
        "GlmForCausalLM",
        ("attention_bias", "partial_rotary_factor"),
        _GLM_DEFAULTS,
        **_GLM,
        llama_cpp=LlamaCppSupport(
            "chatglm",
            interleaved_rotary=True,
            head_dim_is_derived=True,
            computes_attention_bias=True,
            joined_layers=True,
        ),
    ),
    "glm4": Family(
        "Glm4ForCausalLM",
        ("attention_bias", "partial_rotary_factor"),
        _GLM_DEFAULTS,
        **_GLM,
        norm_names=NormNames(
            "input_layernorm",
            "post_self_attn_layernorm",
            "post_attention_layernorm",
            "post_mlp_layernorm",
        ),
        llama_cpp=LlamaCppSupport(
            "glm4", interleaved_rotary=True, computes_attention_bias=True, joined_layers=True
        ),
    ),
    "ernie4_5": Family(
        "Ernie4_5ForCausalLM",
        (),
        {
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "tie_word_embeddings": True,
            "pad_token_id": 0,
            **_LLAMA_BOS_AND_EOS,
        },
        interleaved_rotary=True,
        only_default_keys=("use_bias",),
        llama_cpp=LlamaCppSupport("ernie4_5", interleaved_rotary=True),
    ),
    "gemma": Family(
        "GemmaForCausalLM",
        ("attention_bias",),
        {
            "num_key_value_heads": 16,
            "head_dim": 256,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
            "pad_token_id": 0,
            "bos_token_id": 2,
            "eos_token_id": 1,
        },
        centred_norms=True,
        embedding_scaled=True,
        activation=("hidden_act", "gelu_pytorch_tanh"),
        older_activations=("gelu",),
        only_default_keys=("use_bidirectional_attention",),
        llama_cpp=LlamaCppSupport("gemma", needs_tied_head=True),
    ),
    "nemotron_h": Family(
        "NemotronHForCausalLM",
        (
            "layer_types",
            *MAMBA_SIZES,
            "mamba_conv_bias",
            "mamba_proj_bias",
            "time_step_min",
        ),
        {
            "vocab_size": 131_072,
            "hidden_size": 4096,
            "intermediate_size": 21_504,
            "num_hidden_layers": 4,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 4096,
            "pad_token_id": 0,
            **_LLAMA_BOS_AND_EOS,
            **nemotron_keys.DEFAULTS,
        },
        norm_names=NormNames(before_attention="norm", before_mlp=None),
        joined_layers={
            "mixer.q_proj": ("self_attn.q_proj",),
            "mixer.k_proj": ("self_attn.k_proj",),
            "mixer.v_proj": ("self_attn.v_proj",),
            "mixer.o_proj": ("self_attn.o_proj",),
            "mixer": ("mamba",),
            "mixer.in_proj": ("mamba.in_proj",),
            "mixer.conv1d": ("mamba.conv1d",),
            "mixer.norm": ("mamba.norm",),
            "mixer.out_proj": ("mamba.out_proj",),
            "mixer.up_proj": ("plain_mlp.up_proj",),
            "mixer.down_proj": ("plain_mlp.down_proj",),
            "model.embeddings": ("model.embed_tokens",),
            "model.norm_f": ("model.norm",),
        },
        other_layer_type=MAMBA,
        more_layer_types=(PLAIN_MLP,),
        full_attention_every=8,
        has_feed_forward=False,
        never_rotates=True,
        may_tie=False,
        trains_padding=True,
        any_mamba_width=True,
        activation=("mlp_hidden_act", "relu2"),
        only_default_keys=("mamba_hidden_act", "mlp_bias"),
        file_prefix="backbone.",
        may_have_mtp_layers=True,
        llama_cpp=LlamaCppSupport("nemotron_h", kv_heads_by_layer=True, needs_layer_norm_eps=True),
        own_keys=nemotron_keys,
    ),
    "ministral3": Family(
        "Ministral3ForCausalLM",
        ("sliding_window", QUERY_GROWTH),
        {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 262_144,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 16_384,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                QUERY_GROWTH: 0.1,
            },
            "pad_token_id": 11,
            **_LLAMA_BOS_AND_EOS,
        },
        llama_cpp=LlamaCppSupport("mistral3", interleaved_rotary=True, reads_yarn_keys=True),
    ),
    "helium": Family(
        "HeliumForCausalLM",
        ("attention_bias",),
        {
            "num_key_value_heads": 20,
            "head_dim": 128,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-8,
            "rope_theta": 100_000.0,
            "pad_token_id": 3,
            **_LLAMA_BOS_AND_EOS,
        },
        output_bias=False,
        interleaved_rotary=True,
        only_default_keys=("mlp_bias",),
        head_dim_is_derived=True,
        llama_cpp=_LLAMA_IN_LLAMA_CPP,
    ),
    "exaone4": Family(
        "Exaone4ForCausalLM",
        ("sliding_window", "layer_types", "sliding_window_pattern"),
        {
            "num_key_value_heads": 32,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "bos_token_id": 0,
            "eos_token_id": 2,
        },
        qk_norm="heads",
        norm_names=_NORMS_AFTER_BRANCHES,
        rotates_in_windows=True,
        full_attention_every=4,
        llama_cpp=LlamaCppSupport(
            "exaone4", reads_rope_divisors=True, head_dim_is_derived=True, layers_with_windows=64
        ),
    ),
}
# Keys of config.json that change what transformers computes or loads, with the values for which it
# computes the same as `Llama`. The first value is transformers' default.
SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "use_bidirectional_attention": (False, None),
    "mamba_hidden_act": ("silu", "swish"),
    "mlp_bias": (False,),
    "use_bias": (False, None),
    "resid_pdrop": (0.0,),
    "is_causal": (True,),
    "partial_rotary_factor": (1, None),
    "per_layer_config": (None, {}),
    "transformers_weights": (None,),
    "swiglu_alpha": (1.702,),
    "swiglu_limit": (7.0,),
    "z_loss_coefficient": (0.0,),
}
# The keys of this table that only some families read. All families read the others.
_KEYS_READ_BY_SOME = {key for family in FAMILIES.values() for key in family.only_default_keys}
# All names that transformers has for an activation, by the name in `Family.activation`.
_ACTIVATION_NAMES = {
    "silu": ("silu", "swish"),
    "gelu_pytorch_tanh": ("gelu_pytorch_tanh",),
    "relu2": ("relu2",),
}


# The keys of config.json that all families read.
_KEYS_OF_ALL = {
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "tie_word_embeddings",
    "initializer_range",
    "attention_dropout",
    "quantization_config",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
}


def keys_in_files(family: Family) -> set[str]:
    """Return the keys of config.json that a family reads.

    Keys that give the types of layers by a rule are not included: they count only if a file has no
    layer_types or no_rope_layers.
    """
    keys = {*_KEYS_OF_ALL, *family.optional_keys, *family.only_default_keys, family.activation[0]}
    if "mlp_only_layers" in keys:
        keys.add("decoder_sparse_step")
    if {"sliding_window", "layer_types"} <= keys:
        keys.add("use_sliding_window")
    if LONGROPE in family.rope_types:
        keys.add("original_max_position_embeddings")
    if family.own_keys is not None:
        # Some of its optional keys are fields of `LlamaConfig` that have other names in its files.
        keys -= {*family.own_keys.NOT_IN_FILES}
        keys |= {*family.own_keys.KEYS}
    # This field of `LlamaConfig` is in no file.
    return keys - {"rope_local_theta"}


def find_family(model_type: object) -> Family:
    """Return the family of a model_type.

    Raises:
        InputRefused: the decoder does not compute this family.
    """
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise InputRefused(
            f"model_type = {model_type!r} is not supported: only {', '.join(FAMILIES)} are"
        )
    return FAMILIES[model_type]


def check_supported(values: Mapping[str, Any]) -> None:
    """Raise InputRefused if a config.json asks for something that the decoder does not compute.

    The message has the name of the key. The family's `optional_keys` are not checked here.
    """
    family = find_family(values["model_type"])
    activation_key, activation = family.activation
    activation_names = _ACTIVATION_NAMES[activation] + family.older_activations
    supported_values = {activation_key: activation_names, **SUPPORTED_VALUES}
    for key, supported in supported_values.items():
        is_read = key not in _KEYS_READ_BY_SOME or key in family.only_default_keys
        is_checked_here = is_read and key not in family.optional_keys
        if is_checked_here and values.get(key, supported[0]) not in supported:
            raise InputRefused(
                f"{key} = {values[key]!r} is not supported: only {supported[0]!r} is"
            )
    # gpt-oss, whose experts may be in MXFP4, is the only family with alternating columns.
    quantisation.read(values, may_be_mxfp4=family.fused_experts == "columns")


# The family of a new model if the user names none.
DEFAULT_FAMILY = "llama"
# The sizes of each preset: vocab_size, hidden_size, intermediate_size, num_hidden_layers,
# num_attention_heads, num_key_value_heads.
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
# The presets' values of other keys.
PRESET_EXTRAS: dict[str, dict[str, Any]] = {
    "nano": {"tie_word_embeddings": True, "initializer_range": 0.08},
    "micro": {"tie_word_embeddings": True, "initializer_range": 0.046},
    "124m": {"tie_word_embeddings": True},
    "llama-179m": {},
    "1b": {**_LLAMA_3, "tie_word_embeddings": True, "rope_scaling": Llama3Scaling(factor=32.0)},
    "8b": {**_LLAMA_3, "rope_scaling": Llama3Scaling()},
}
