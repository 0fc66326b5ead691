"""Small models of every family, with a key of every kind that it has."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from monograph.graph.experts import Router
from monograph.graph.lora import Plain
from monograph.model.layouts import FusedRule, JoinedRule
from monograph.model.scaling import (
    FULL,
    LINEAR,
    SLIDING,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    YarnScaling,
)


def in_files(named, config):
    """Tensors by the decoder's names as transformers has them in memory."""
    plain = (
        Plain(name, tensor.detach().to("meta"), tensor.detach) for name, tensor in named.items()
    )
    tensors = FusedRule(config.family.fused_experts == "columns").written(
        JoinedRule(config).written(plain)
    )
    return {tensor.name: tensor.read() for tensor in tensors}


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
        if router.count < shares.shape[1]:
            found.append((shares[:, router.count - 1] - shares[:, router.count]).min())

    hooks = [m.register_forward_hook(note) for m in model.modules() if isinstance(m, Router)]
    with torch.no_grad():
        model(*inputs)
    for hook in hooks:
        hook.remove()
    return min(gap.item() for gap in found)


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
# A key of every kind in every family that has it.
MIXED = {
    "llama": {"attention_bias": True, "rope_scaling": SCALINGS[1]},
    "mistral": {"sliding_window": 5, "tie_word_embeddings": True, "pad_token_id": 7},
    "qwen2": {"attention_dropout": 0.1, "sliding_window": 5, "layer_types": (FULL, SLIDING, SLIDING)},
    "olmo2": {"attention_bias": True, "pad_token_id": 7, "rope_scaling": SCALINGS[2]},
    "smollm3": {"sliding_window": 5, "layer_types": (SLIDING, FULL, FULL), "no_rope_layers": (1, 0, 1)},
    "olmo3": {
        "sliding_window": 5, "layer_types": (SLIDING, FULL, SLIDING), "rope_scaling": SCALINGS[3],
        "rope_local_theta": 1e3,
    },
    "phi3": {
        "sliding_window": 5, "partial_rotary_factor": 0.75, "tie_word_embeddings": True, "head_dim": 8,
        "rope_scaling": LongScaling((1.0, 1.5, 2.0), (2.0, 3.0, 4.0), 1.2, 64, 1024),
    },
    "gemma3_text": {
        "sliding_window": 5, "layer_types": (SLIDING, FULL, SLIDING), "rope_scaling": SCALINGS[1],
        "rope_local_theta": 1e4, "query_pre_attn_scalar": 5, "tie_word_embeddings": True, "pad_token_id": 0,
    },
    "granite": {
        "embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.1, "logits_scaling": 5.0,
        "attention_bias": True,
    },
    "qwen3_5_text": {
        "layer_types": (LINEAR, FULL, LINEAR), "linear_num_key_heads": 2, "linear_num_value_heads": 6,
        "linear_key_head_dim": 5, "linear_conv_kernel_dim": 3, "partial_rotary_factor": 0.67,
    },
    "qwen3_next": {
        "layer_types": (LINEAR, FULL, LINEAR), "linear_num_key_heads": 2, "linear_num_value_heads": 6,
        "linear_key_head_dim": 5, "linear_conv_kernel_dim": 3, "partial_rotary_factor": 0.67, "num_experts": 5,
        "num_experts_per_tok": 3, "norm_topk_prob": True, "moe_intermediate_size": 20, "mlp_only_layers": (1,),
        "shared_expert_intermediate_size": 12,
    },
    "qwen3_5_moe_text": {
        "layer_types": (LINEAR, FULL, LINEAR), "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 12,
    },
    "qwen3_moe": {
        "num_experts": 5, "num_experts_per_tok": 3, "norm_topk_prob": True, "moe_intermediate_size": 20,
        "mlp_only_layers": (1,), "sliding_window": 5,
    },
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "clip_qkv": 0.7},
    "gpt_oss": {
        "sliding_window": 5, "layer_types": (SLIDING, FULL, SLIDING), "attention_bias": True, "num_experts": 5,
        "num_experts_per_tok": 2, "rope_scaling": YarnScaling(4.0, 1.3, 16, 4.0, 0.5, False), "pad_token_id": 7,
    },
    "qwen3": {"sliding_window": 5, "layer_types": (SLIDING, FULL, SLIDING), "attention_bias": True},
}  # fmt: skip
