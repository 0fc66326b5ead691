# Run what uses it: pytest tests/model/test_config_keys.py
"""Random config.json files that say something of every key that transformers reads, whether or not
it changes a number.

Most values are ones that people have, some are ones that nobody computes here; a draw may therefore
be refused.
"""

from __future__ import annotations

from monograph.model.families import DEFAULT_FAMILY, FAMILIES
from monograph.model.layer_types import FULL_ATTENTION, SLIDING_ATTENTION
from monograph.model.scaling import LONGROPE, PROPORTIONAL, QUERY_GROWTH

LENGTH = 24  # tokens of a row; windows are drawn shorter and longer
_FLAG, _OPTIONAL_FLAG = [False, True], [None, False, True]

# Keys that change no number of a model that is run for its logits, with values that people have.
IDLE = {
    "architectures": [None, ["LlamaForCausalLM"], ["Qwen2ForSequenceClassification"]],
    "transformers_version": ["4.31.0", "5.1.0"], "torch_dtype": ["float32", "bfloat16"], "dtype": ["float32", None],
    "output_hidden_states": _FLAG, "output_attentions": _FLAG, "return_dict": _FLAG, "use_cache": _FLAG,
    "chunk_size_feed_forward": [0, 3], "is_encoder_decoder": _FLAG, "is_decoder": _FLAG,
    "add_cross_attention": _FLAG, "cross_attention_hidden_size": [None], "tie_encoder_decoder": _FLAG,
    "id2label": [None, {"0": "no", "1": "yes"}], "label2id": [None, {"no": 0, "yes": 1}], "num_labels": [1, 2, 5],
    "problem_type": [None, "regression"], "finetuning_task": [None, "sst2"], "task_specific_params": [None, {}],
    "tokenizer_class": [None, "LlamaTokenizer"], "prefix": [None, "x"], "pruned_heads": [{}], "torchscript": _FLAG,
    "use_bfloat16": _FLAG, "tf_legacy_loss": _FLAG, "name_or_path": ["", "me/model"], "_name_or_path": ["me/model"],
    "_commit_hash": [None, "0" * 40], "attn_implementation": [None, "eager", "sdpa"], "experts_implementation": [None],
    "gradient_checkpointing": _FLAG, "tie_last_hidden_states": _OPTIONAL_FLAG, "sep_token_id": [None, 3],
    "decoder_start_token_id": [None, 1], "bos_token_id": [None, 0, 1], "eos_token_id": [None, 2, [2, 5]],
    "max_length": [20, 99], "temperature": [0.7], "top_k": [50], "do_sample": _FLAG, "pretraining_tp": [1, 2],
    "initializer_range": [0.02, 0.5], "attention_dropout": [0.0, 0.25], "unsloth_version": ["2025.1"], "auto_map": [{}],
    "classifier_dropout": [None, 0.1], "hidden_dropout": [0.1], "token_classification_bias": _FLAG,
    "attention_chunk_size": [None, 4], "kv_sharing_modes": [None], "number_of_conv_states": [3],
    "distributed_config": [None], "fusion_config": [None], "mtp_hidden_states_first": _FLAG,
    "logits_mup_width_multiplier": [2.0], "unpadded_vocab_size": [9], "mlp_layer_types": [None],
    "mamba_chunk_size": [32, 256], "num_logits_to_keep": [1], "chunk_size": [7, 128], "expand": [1, 2],
    "time_step_max": [0.2], "time_step_floor": [1e-4], "residual_in_fp32": _FLAG, "rescale_prenorm_residual": _FLAG,
    "mamba_ssm_cache_dtype": ["float32"], "use_mamba_kernels": [True], "n_routed_experts": [4], "n_shared_experts": [1],
    "moe_shared_expert_intermediate_size": [8], "moe_latent_size": [None, 8], "moe_shared_expert_overlap": _FLAG,
    "routed_scaling_factor": [1.0, 2.5], "n_group": [1], "topk_group": [1], "num_nextn_predict_layers": [0, 1],
    "mtp_layers_block_type": [None, ["full_attention"]],
    "use_mrope": [False], "quantization_config": [None], "router_aux_loss_coef": [0.0, 0.5],
}  # fmt: skip


# What is not computed here of a Gemma 4, or not taken by transformers.
ODD_GEMMA_4 = {
    "sliding_window": None,
    "num_key_value_heads": None,
}
# Keys with which transformers makes no Gemma 4.
NOT_OF_A_GEMMA_4 = ("attention_chunk_size", "kv_sharing_modes")
# Keys that a Bamba has not, or of which it has one value: transformers refuses or ignores the others.
NOT_OF_A_BAMBA = ("layer_types", "layers_block_type", "partial_rotary_factor")


def keys_that_count(draw, vocabulary: int, family: str = DEFAULT_FAMILY) -> dict[str, list]:
    """Keys that change a number of some family, with values that are computed here and values that
    are not.
    """
    layers = draw.choice([1, 2, 3])
    tables = [_rope(draw), _rope(draw)]
    its = FAMILIES[family]
    # transformers 5.23 cannot compute shared keys without inputs of layers.
    input_width = draw.choice([0, 6])
    if its.default_local_theta is not None:
        tables = [
            {FULL_ATTENTION: _rope(draw)},
            {
                FULL_ATTENTION: _rope(draw),
                SLIDING_ATTENTION: {"rope_type": "default", "rope_theta": 1e3},
            },
        ]
    if LONGROPE in its.rope_types:
        tables = [_long_rope(draw), _long_rope(draw)]
    if QUERY_GROWTH in its.optional_keys:
        tables = [_growing_rope(draw), _growing_rope(draw)]
    has_own_tables = LONGROPE in its.rope_types or QUERY_GROWTH in its.optional_keys
    if PROPORTIONAL in its.rope_types:
        tables = [_proportional_rope(draw), _proportional_rope(draw)]
    kinds = [draw.choice([FULL_ATTENTION, its.other_layer_type]) for _ in range(layers)]
    own_heads = {"head_dim": 10, **draw.choice([{}, {"num_key_value_heads": 1}])}
    without_window = [place for place, kind in enumerate(kinds) if kind == FULL_ATTENTION]
    by_layer = {str(place): own_heads for place in {*without_window, layers - 1}}
    is_gemma4 = family == "gemma4_text"
    return {
        "num_hidden_layers": [layers],
        "intermediate_size": [24, 40],
        "num_attention_heads": [4],
        "num_key_value_heads": [None, 1, 2, 4],
        "head_dim": [4, 6, 16] if is_gemma4 else [None, 4, 6, 16],
        "hidden_act": ["silu", "silu", "silu", "swish", "gelu"],
        "max_position_embeddings": [LENGTH, 64, 4096],
        "rms_norm_eps": [1e-6, 1e-5, 1e-2],
        "tie_word_embeddings": _FLAG,
        "pad_token_id": [None, 0, vocabulary - 1, -1, -2, vocabulary],
        "attention_bias": _FLAG,
        "mlp_bias": [False, False, False, True],
        "use_bias": _FLAG if family == "nemotron_h" else [False, None, False, True],
        "sliding_window": [None, 1, 5, LENGTH - 1, LENGTH, 4096],
        "use_sliding_window": _FLAG,
        "max_window_layers": [0, 1, 28],
        "layer_types": [None, kinds, [FULL_ATTENTION] * layers, ["chunked_attention"] * layers],
        "no_rope_layers": [None, [draw.choice([0, 1]) for _ in range(layers + 1)], [1] * layers],
        "no_rope_layer_interval": [1, 2, 4],
        "rope_theta": [1e2, 1e4, 5e5, 10_000],
        "rope_scaling": [
            None,
            {},
            *(tables if has_own_tables else [_rope(draw), _rope(draw)] * (not is_gemma4)),
        ],
        "rope_parameters": [None, {}, *tables],
        "embedding_multiplier": [1.0, 12, 0.5],
        "residual_multiplier": [1, 0.22],
        "attention_multiplier": [0.25, 0.0625],
        "logits_scaling": [1.0, 8, 3.0],
        "partial_rotary_factor": [None, 1.0, 1.0, 0.5],
        "original_max_position_embeddings": [8, 64],
        "hidden_activation": ["gelu_pytorch_tanh", "gelu_pytorch_tanh", "silu"],
        "query_pre_attn_scalar": [4, 16],
        "sliding_window_pattern": [2, 3, 6],
        "full_attention_interval": [1, 2, 4],
        "linear_num_key_heads": [1, 2],
        "linear_num_value_heads": [2, 4, 6],
        "linear_key_head_dim": [16, 23],
        "linear_value_head_dim": [16, 24],
        "linear_conv_kernel_dim": [1, 3, 4],
        "rope_local_base_freq": [1e2, 1e4],
        "attn_logit_softcapping": [None, None, 50.0],
        "final_logit_softcapping": [None, None, 30.0],
        "use_bidirectional_attention": ["vision", None, "all"]
        if is_gemma4
        else [False, None, True],
        "global_head_dim": [4, 10],
        "num_global_key_value_heads": [None, 1, 4],
        "attention_k_eq_v": _FLAG,
        "hidden_size_per_layer_input": [input_width],
        "vocab_size_per_layer_input": [vocabulary, vocabulary + 3],
        "num_kv_shared_layers": [0, 1, 2] if input_width else [0],
        "use_double_wide_mlp": _FLAG,
        "enable_moe_block": [False, False, True],
        "top_k_experts": [None, 1, 2],
        "resid_pdrop": [0.0, 0.0, 0.1],
        "embd_pdrop": [0.0, 0.1],
        "is_causal": [True, True, True, False],
        "per_layer_config": [
            *(None, None, {}, {"0": {"rms_norm_eps": 0.5}}),
            *[by_layer] * (3 * is_gemma4),
        ],
        "num_experts": [4, 4, 5, 5, 6, 0],
        "num_local_experts": [0, 4, 5] if its.may_lack_experts else [4, 6],
        "mamba_n_heads": [4],
        "mamba_d_head": ["auto", "auto", 16, 8],
        "mamba_n_groups": [1, 2, 4],
        "mamba_d_state": [5, 16],
        "mamba_d_conv": [1, 3, 4],
        "mamba_expand": [2, 2, 1],
        "mamba_conv_bias": _FLAG,
        "mamba_proj_bias": _FLAG,
        "mamba_num_heads": [4, 6],
        "mamba_head_dim": [3, 8],
        "n_groups": [1, 2],
        "ssm_state_size": [5, 16],
        "conv_kernel": [1, 3, 4],
        "use_conv_bias": _FLAG,
        "layer_norm_epsilon": [1e-6, 1e-5, 1e-2],
        "time_step_min": [0.0, 0.001, 0.5],
        "mamba_dt_min": [0.1],
        "mlp_hidden_act": ["relu2", "relu2", "relu2", "silu"],
        "mamba_hidden_act": ["silu", "silu", "gelu"],
        "hybrid_override_pattern": [
            "".join(draw.choice("M*--") for _ in range(layers)),
            *(["E" * layers] if draw.random() < 0.1 else []),
        ],
        "position_embedding_type": [None, "nope", "rope"],
        "shared_intermediate_size": [24, 40],
        "time_step_limit": [None, [0.0, {"__float__": "Infinity"}], [0.0, 0.1]],
        "layers_block_type": [None, ["mamba"] * (layers - 1) + ["attention"]],
        "attn_layer_indices": [None, [], [0], [layers - 1, 40, -1]],
        "z_loss_coefficient": [0.0, 0.0, 0.1],
        "conv_L_cache": [1, 3, 4],
        "conv_bias": _FLAG,
        "norm_eps": [1e-6, 1e-5, 1e-2],
        "block_auto_adjust_ff_dim": _FLAG,
        "block_ff_dim": [24, 50],
        "block_ffn_dim_multiplier": [None, 1, 1.3],
        "block_multiple_of": [8, 1],
        "full_attn_idxs": [None, [0], [layers - 1, 40]],
        "tie_embedding": _FLAG,
        "num_experts_per_tok": [1, 2, 2, 3, 3, 9],
        "norm_topk_prob": _FLAG,
        "moe_intermediate_size": [12, 20],
        "shared_expert_intermediate_size": [8, 20],
        "decoder_sparse_step": [1, 1, 2, 0],
        "mlp_only_layers": [None, [], [0], [1, 7]],
        "output_router_logits": [False, False, True],
        "clip_qkv": [None, 0.5, 8.0],
        "swiglu_alpha": [1.702, 1.702, 1.5],
        "swiglu_limit": [7.0, 7.0, 3.0],
        "transformers_weights": [None, None, "other.safetensors"],
    }


def _rope(draw) -> dict:
    kind = draw.choice(
        ["default", "default", "linear", "linear", "llama3", "llama3", "yarn", "dynamic"]
    )
    table = {
        "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
        "rope_theta": draw.choice([1e2, 1e4]), "partial_rotary_factor": draw.choice([1.0, 1.0, 0.5]),
    }  # fmt: skip
    if kind == "yarn":
        table |= {
            "attention_factor": draw.choice([None, 1.2]), "beta_fast": draw.choice([None, 4.0, 32]),
            "beta_slow": draw.choice([0.5, 1]), "mscale": draw.choice([0.7, 1.0]), "truncate": draw.choice(_FLAG),
            "mscale_all_dim": draw.choice([0.0, 0.8]),
        }  # fmt: skip
    wanted = {"factor", "low_freq_factor", "high_freq_factor"} if kind != "default" else set()
    table = {key: value for key, value in table.items() if key in wanted or draw.random() < 0.3}
    return {draw.choice(["rope_type", "rope_type", "type"]): kind, **table}


def _growing_rope(draw) -> dict:
    """A Ministral 3's table; its queries grow within the texts that are compared in none."""
    growth = {QUERY_GROWTH: draw.choice([0, 0.1, 0.1]), "original_max_position_embeddings": LENGTH}
    return {**_rope(draw), **growth}


def _proportional_rope(draw) -> dict:
    """The two tables of a Gemma 4."""
    full = {
        "rope_type": "proportional", "rope_theta": draw.choice([1e2, 1e6]),
        "partial_rotary_factor": draw.choice([0.25, 0.6]), "factor": draw.choice([1.0, 3.0]),
    }  # fmt: skip
    full = draw.choice([full, full, {"rope_type": "default", "rope_theta": 1e3}])
    return {
        FULL_ATTENTION: full,
        SLIDING_ATTENTION: {"rope_type": "default", "rope_theta": draw.choice([1e2, 1e4])},
    }


def _long_rope(draw) -> dict:
    pairs = draw.choice([4, 4, 4, 2])
    table = {
        f"{name}_factor": [draw.choice([1.0, 1.5, 2, 4.0]) for _ in range(pairs)]
        for name in ("short", "long")
    }
    others = {"attention_factor": draw.choice([None, 1.2]), "factor": draw.choice([None, 4.0])}
    table |= {key: value for key, value in others.items() if draw.random() < 0.3}
    return {
        draw.choice(["rope_type", "type"]): draw.choice(
            ["longrope", "longrope", "su", "yarn", "linear"]
        ),
        **table,
    }


def drawn(family: str, draw) -> dict:
    """One config.json; a key that may be left out is there in a third of the draws."""
    vocabulary = draw.choice([30, 37])
    values = {"model_type": family, "vocab_size": vocabulary, "hidden_size": 32}
    counting = keys_that_count(draw, vocabulary, family)
    counted = [
        f"linear_{name}"
        for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    ]
    always = {
        *counted,
        "num_hidden_layers",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
    }
    its = FAMILIES[family]
    if "mamba_n_heads" in its.optional_keys:  # its default is larger than the model
        always |= {"mamba_n_heads", "num_local_experts"}
    if family == "nemotron_h":  # its default has mixtures, and sizes larger than the model
        always |= {"hybrid_override_pattern", "mamba_num_heads", "mamba_head_dim", "n_groups"}
    # Its default has embeddings of each layer. Scores have no factor, so that those of its wide heads are so
    # large that fp32 is off by 1e-5 in both.
    if family == "gemma4_text":
        always |= {"hidden_size_per_layer_input", "global_head_dim", "head_dim"}
    if its.defaults.get("pad_token_id", 0) >= vocabulary:
        always.add("pad_token_id")
    if its.expert_width_key:  # its defaults are large, and choose 8 experts
        always |= {
            "num_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
        }
    # With its default, 1, scores are so large that fp32 is off by 1e-5 in both.
    if "attention_multiplier" in its.optional_keys:
        always.add("attention_multiplier")
    left_out = NOT_OF_A_GEMMA_4 if family == "gemma4_text" else ()
    # A file that says one thing which nothing here computes is refused, and tells nothing of its
    # other keys.
    odd = draw.random() < 0.3
    for key, choices in {**IDLE, **counting}.items():
        if key not in left_out and (key in always or draw.random() < 1 / 3):
            values[key] = draw.choice(choices)
    if not odd:
        for key, value in [*values.items()]:
            if _is_odd(family, key, value):
                del values[key]
                # What must be said is said otherwise, if it can be.
                others = [each for each in counting.get(key, []) if not _is_odd(family, key, each)]
                if key in always and others:
                    values[key] = others[0]
    return values


def _is_odd(family: str, key: str, value) -> bool:
    its = FAMILIES[family]
    if isinstance(value, dict) and "rope" in key:
        kind = value.get("rope_type", value.get("type"))
        return kind == "dynamic" or value.get("partial_rotary_factor", 1.0) != 1.0
    return (
        (value in ("gelu", "other.safetensors", 0.5) and key != "clip_qkv")
        or (key.startswith("swiglu") and value not in (1.702, 7.0))
        or (key == "decoder_sparse_step" and value == 0)
        or (key in ("mlp_bias", "use_bias", "is_causal") and value is (key != "is_causal"))
        or (key == "pad_token_id" and value in (30, 37))
        or (key == "per_layer_config" and bool(value) and "rms_norm_eps" in str(value))
        or (key == "use_bidirectional_attention" and value == "all")
        or (family == "gemma4_text" and key in ODD_GEMMA_4 and value == ODD_GEMMA_4[key])
        or (key == "time_step_limit" and value == [0.0, 0.1])
        or (key == "mamba_d_head" and value == 8)
        or (family == "bamba" and key in NOT_OF_A_BAMBA)
        or (key == "hybrid_override_pattern" and "E" in value)
        or (key == "mlp_hidden_act" and value == "silu")
        or (key == "layer_types" and value is not None)
        and ("layer_types" not in its.optional_keys or "chunked_attention" in value)
    )
