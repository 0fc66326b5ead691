"""Tiny models that see pictures, of random weights, as transformers makes them."""

from __future__ import annotations

from typing import Any

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
HYBRID = SMALL | {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip
SEEING = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4,
    "num_position_embeddings": 16,
}  # fmt: skip
SIGLIP = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
PIXTRAL = SIGLIP | {"image_size": 16, "patch_size": 4, "head_dim": 8}
MODELS = {
    "qwen3_5": (HYBRID, SEEING, ["model.visual."]),
    "qwen3_5_moe": (HYBRID | EXPERTS, SEEING, ["model.visual."]),
    "gemma3": (
        SMALL | {"sliding_window": 8}, SIGLIP | {"image_size": 16, "patch_size": 4},
        ["multi_modal_projector.", "vision_tower."],
    ),
    "mistral3": (
        SMALL | {"model_type": "ministral3"}, PIXTRAL, ["multi_modal_projector.", "vision_tower."],
    ),
    "gemma4": (
        SMALL | {
            "sliding_window": 8, "global_head_dim": 12, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 64, "final_logit_softcapping": 3.0,
        },
        SIGLIP | {"num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16},
        ["model.embed_vision.", "model.vision_tower."],
    ),
}  # fmt: skip


def seeing(kind: str, **keys: Any) -> Any:
    """A model of a kind, ready to be evaluated; keys of its text model may have other values."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    text, vision, _ = MODELS[kind]
    config = AutoConfig.for_model(kind, text_config=text | keys, vision_config=vision)
    return AutoModelForImageTextToText.from_config(config).eval()
