"""Small models of every family, with a key of every kind that it has."""

from __future__ import annotations

from monograph.model.families import FULL, SLIDING, LinearScaling, Llama3Scaling

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
    "mistral": {"sliding_window": 5, "tie_word_embeddings": True, "pad_token_id": 7},
    "qwen2": {"attention_dropout": 0.1, "sliding_window": 5, "layer_types": (FULL, SLIDING, SLIDING)},
    "qwen3": {"sliding_window": 5, "layer_types": (SLIDING, FULL, SLIDING), "attention_bias": True},
}
