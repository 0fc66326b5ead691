"""The shapes that have a name; `LlamaConfig.preset` says what they are."""

from typing import Any

from monograph.model.scaling import Llama3Scaling

# vocab_size, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads
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
BEYOND_SHAPE: dict[str, dict[str, Any]] = {
    "nano": {"tie_word_embeddings": True, "initializer_range": 0.08},
    "micro": {"tie_word_embeddings": True, "initializer_range": 0.046},
    "124m": {"tie_word_embeddings": True},
    "llama-179m": {},
    "1b": {**_LLAMA_3, "tie_word_embeddings": True, "rope_scaling": Llama3Scaling(factor=32.0)},
    "8b": {**_LLAMA_3, "rope_scaling": Llama3Scaling()},
}
