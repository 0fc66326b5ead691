"""The architectures that the one decoder computes, by the model_type of their config.json. Needs no torch.

All are the Llama decoder with at most four differences: biases on the projections of attention (Qwen 2), a norm on each
query and key head (Qwen 3), a window that attention does not look beyond (Mistral, some layers of Qwen), and what
transformers takes where the file says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from monograph.errors import InputRefused
from monograph.model.scaling import check_whole

FULL, SLIDING = "full_attention", "sliding_attention"
MOST_LAYERS = 10_000  # of which a list is made from two numbers in a file; far above any decoder that was trained


class Family(NamedTuple):
    """One architecture.

    Attributes:
        architecture: the class of transformers that loads it.
        keys: keys that some families have, and that this one has.
        defaults: what transformers takes where config.json lacks the key.
        qkv_bias: biases on the query, key and value projections, always and not by a key.
        qk_norm: an RMS norm on each query and key head before the rotation.
    """

    architecture: str
    keys: tuple[str, ...]
    defaults: Mapping[str, Any]
    qkv_bias: bool = False
    qk_norm: bool = False


_ENDS = {"bos_token_id": 1, "eos_token_id": 2}

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", ("attention_bias",), {"max_position_embeddings": 2048, **_ENDS}),
    "mistral": Family(
        "MistralForCausalLM",
        ("sliding_window",),
        {"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096, **_ENDS},
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        ("sliding_window", "layer_types"),
        {"num_key_value_heads": 32, "max_position_embeddings": 32_768, "sliding_window": 4096},
        qkv_bias=True,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        ("attention_bias", "sliding_window", "layer_types"),
        {"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32_768, "sliding_window": 4096},
        qk_norm=True,
    ),
}
# Keys of config.json that change what transformers computes or loads, with the values that mean what is computed here.
# Where a key is missing transformers takes one of them.
_COMPUTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "mlp_bias": (False,),
    "is_causal": (True,),
    "partial_rotary_factor": (1, None),
    "per_layer_config": (None, {}),
    "transformers_weights": (None,),
}


def family(model_type: object) -> Family:
    """The family of that name.

    Raises:
        InputRefused: the decoder does not compute it.
    """
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise InputRefused(f"model_type = {model_type!r} is not supported: only {', '.join(FAMILIES)} are")
    return FAMILIES[model_type]


def check_computed(values: Mapping[str, Any]) -> None:
    """Raises InputRefused, naming the key, if a config.json asks for what the decoder does not compute."""
    for key, known in _COMPUTED.items():
        if values.get(key, known[0]) not in known:
            raise InputRefused(f"{key} = {values[key]!r} is not supported: only {known[0]!r} is")
    if values.get("quantization_config") is not None:
        raise InputRefused("quantization_config: quantised weights are not supported; save them in bf16 or fp32")


def windows_from_hf(values: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """sliding_window and layer_types, () for "all alike", of a config.json with its family's defaults filled in.

    Qwen's window counts only with use_sliding_window, and then from layer max_window_layers on where the file does not
    list its layer_types.

    Raises:
        InputRefused: layer_types where the family has none, or a wrong value.
    """
    window, types, keys = values.get("sliding_window"), values.get("layer_types"), family(values["model_type"]).keys
    if types is not None and not isinstance(types, list):
        raise InputRefused(f"layer_types = {types!r}: expected a list")
    if "layer_types" not in keys:
        if types is not None:
            raise InputRefused(f"layer_types is not supported with model_type = {values['model_type']!r}")
        return window if "sliding_window" in keys else None, ()
    if not values.get("use_sliding_window", False):
        window = None
    if types is not None or window is None:
        return window, tuple(types or ())
    first, layers = values.get("max_window_layers", 28), values["num_hidden_layers"]
    if isinstance(first, bool) or not isinstance(first, int):
        raise InputRefused(f"max_window_layers = {first!r}: expected a whole number")
    check_whole("num_hidden_layers", layers)
    if layers > MOST_LAYERS:
        raise InputRefused(f"num_hidden_layers = {layers}: expected at most {MOST_LAYERS}")
    return window, tuple(SLIDING if layer >= first else FULL for layer in range(layers))
