"""Small models of every family, with a key of every kind that it has."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from monograph.graph.experts import Router
from monograph.graph.lora_merge import UnreadTensor
from monograph.model.families import FAMILIES
from monograph.model.layer_types import FULL_ATTENTION
from monograph.model.layouts import FusedExpertsRule, JoinedLayersRule
from monograph.model.scaling import (
    LONGROPE,
    PROPORTIONAL,
    QUERY_GROWTH,
    GrowingYarnScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    ProportionalScaling,
    YarnScaling,
)


def in_files(named, config):
    """Tensors by the decoder's names as transformers has them in memory."""
    plain = (
        UnreadTensor(name, tensor.detach().to("meta"), tensor.detach)
        for name, tensor in named.items()
    )
    tensors = FusedExpertsRule(config).to_files(JoinedLayersRule(config).to_files(plain))
    return {_in_memory(tensor.name): tensor.read() for tensor in tensors}


def _in_memory(name):
    """The name in transformers of a tensor that its files call otherwise."""
    for in_files, in_memory in RENAMED.items():
        name = name.replace(in_files, in_memory)
    return name


def margin(model, *inputs):
    """The smallest distance of an expert's probability that was just enough to one that was not,
    over all tokens.
    """
    found = [torch.tensor(1.0)]

    def note(router, inputs, chosen):
        shares = (
            F.linear(inputs[0], router.weight, router.bias)
            .softmax(-1)
            .sort(-1, descending=True)
            .values
        )
        if router.top_k < shares.shape[1]:
            found.append((shares[:, router.top_k - 1] - shares[:, router.top_k]).min())

    hooks = [m.register_forward_hook(note) for m in model.modules() if isinstance(m, Router)]
    with torch.no_grad():
        model(*inputs)
    for hook in hooks:
        hook.remove()
    return min(gap.item() for gap in found)


# Names of a Granite 4's experts in files, and in transformers.
RENAMED = {
    "block_sparse_moe.input_linear.weight": "block_sparse_moe.experts.gate_up_proj",
    "block_sparse_moe.output_linear.weight": "block_sparse_moe.experts.down_proj",
    "block_sparse_moe.router.layer.": "block_sparse_moe.router.",
}
SCALINGS = [
    None,
    LinearScaling(2.5),
    Llama3Scaling(4.0, 1.0, 4.0, 16),
    YarnScaling(4.0, 1.3, 16, 4.0, 0.5),
]
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
# What a small model has of each optional key of a config.json; a family has those that its row names.
OPTIONAL = {
    "attention_bias": True,
    "sliding_window": 5,
    "no_rope_layers": (1, 0, 1),
    "rope_local_theta": 1e3,
    "query_pre_attn_scalar": 5,
    "global_head_dim": 10,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "num_kv_shared_layers": 1,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": 70,
    "final_logit_softcapping": 9.0,
    "partial_rotary_factor": 0.67,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.1,
    "logits_scaling": 5.0,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 5,
    "linear_conv_kernel_dim": 3,
    "position_embedding_type": "nope",
    "mamba_n_heads": 8,
    "mamba_d_head": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 5,
    "mamba_d_conv": 3,
    "mamba_conv_bias": True,
    "mamba_proj_bias": True,
    "time_step_min": 0.3,
    "conv_L_cache": 4,
    "conv_bias": True,
    "num_experts": 5,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 12,
    "mlp_only_layers": (1,),
    "clip_qkv": 0.7,
}
# What a row may name besides: other spellings of the same, and keys that small models leave at
# their defaults.
NOT_IN_SMALL = {
    "layer_types",
    "linear_value_head_dim",
    "llama_4_scaling_beta",
    "num_local_experts",
    "output_router_logits",
    "per_layer_config",
    "rope_local_base_freq",
    "router_aux_loss_coef",
    "sliding_window_pattern",
    "use_sliding_window",
}


def mixed(place: int, family: str) -> dict:
    """A key of every kind that a family has, as its row in `FAMILIES` says.

    The scalings, and the keys that all families have, take turns.
    """
    its = FAMILIES[family]
    keys = {key: value for key, value in OPTIONAL.items() if key in its.optional_keys}
    keys["eos_token_id"] = (2, 5)  # a GLM without ids would get some from transformers
    if "layer_types" in its.optional_keys:
        third = (*its.more_layer_types, its.other_layer_type)[0]
        keys["layer_types"] = (its.other_layer_type, FULL_ATTENTION, third)
        if its.last_layer_is_full:
            keys["layer_types"] = (its.other_layer_type, FULL_ATTENTION, FULL_ATTENTION)
    if its.always_norm_topk_prob:
        keys.pop("norm_topk_prob", None)
    if LONGROPE in its.rope_types:
        # Half of its rotary pairs and factors for each of them.
        keys |= {"partial_rotary_factor": 0.75, "head_dim": 8}
        keys["rope_scaling"] = LongScaling((1.0, 1.5, 2.0), (2.0, 3.0, 4.0), 1.2, 64, 1024)
    elif QUERY_GROWTH in its.optional_keys:
        keys["rope_scaling"] = GrowingYarnScaling(
            4.0, 1.0, 64, llama_4_scaling_beta=0.3, max_position_embeddings=256
        )
    elif PROPORTIONAL in its.rope_types:
        keys["rope_scaling"] = ProportionalScaling(0.5)
    elif not its.never_rotates:
        keys["rope_scaling"] = SCALINGS[place % len(SCALINGS)]
    if its.head_dim_is_derived:
        keys["head_dim"] = SMALL["hidden_size"] // SMALL["num_attention_heads"]
    if place % 2:
        keys |= {"tie_word_embeddings": its.may_tie, "pad_token_id": 7}
    if place % 3 == 2:
        keys["attention_dropout"] = 0.1
    return keys


MIXED = {family: mixed(place, family) for place, family in enumerate(FAMILIES)}
