"""Describe the architectures that the one decoder computes, by their model_type in config.json. Needs no torch.

All are the Llama decoder with at most four differences: biases on the projections of attention (Qwen 2), a norm on each
query and key head (Qwen 3), a window that limits attention (Mistral, some layers of Qwen), and transformers' defaults
for missing keys. Rotary position embeddings may be scaled for longer contexts in two ways.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

from monograph.errors import InputRefused

LARGEST_SIZE = 2**31 - 1


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation, which makes every rotary wavelength `factor` times as long (Chen et al. 2306.15595).

    Attributes:
        factor: at least 1.
    """

    factor: float

    def __post_init__(self) -> None:
        check_number("rope_scaling.factor", self.factor)
        if self.factor < 1:
            raise InputRefused(f"rope_scaling.factor = {self.factor}: expected at least 1")


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's stretching of rotary wavelengths beyond the context of pre-training; see `rope.inverse_frequencies`.

    Attributes:
        factor: stretching of long wavelengths, at least 1.
        low_freq_factor: wavelengths above original_max_position_embeddings / low_freq_factor tokens are long.
        high_freq_factor: wavelengths below original_max_position_embeddings / high_freq_factor tokens are kept.
        original_max_position_embeddings: context length of pre-training, tokens.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            check_number(f"rope_scaling.{name}", getattr(self, name))
        check_whole("rope_scaling.original_max_position_embeddings", self.original_max_position_embeddings)
        if self.factor < 1 or self.low_freq_factor >= self.high_freq_factor:
            raise InputRefused(
                f"rope_scaling.factor = {self.factor}, low_freq_factor = {self.low_freq_factor}, high_freq_factor = "
                f"{self.high_freq_factor}: expected a factor of at least 1 and low below high"
            )


Scaling = LinearScaling | Llama3Scaling

_KINDS: dict[str, type[Scaling]] = {"linear": LinearScaling, "llama3": Llama3Scaling}


def from_hf(values: dict[str, Any]) -> tuple[Any, Scaling | None]:
    """Return the rotary base (not checked yet) and the scaling of a config.json.

    Raises:
        InputRefused: a kind of scaling that is not supported, or a wrong or missing value.
    """
    # transformers 5 writes a dictionary `rope_parameters`, 4 wrote `rope_theta` and `rope_scaling`. If a file has both,
    # transformers reads only `rope_scaling`.
    name = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    rope = values.get(name) or {}
    if not isinstance(rope, dict):
        raise InputRefused(f"{name} = {rope!r}: expected a table or null")
    if nested := [key for key, value in rope.items() if isinstance(value, dict)]:
        raise InputRefused(f"{name}.{nested[0]}: one rotary embedding for each kind of layer is not supported")
    if rope.get("partial_rotary_factor", 1) != 1:
        raise InputRefused(f"partial_rotary_factor = {rope['partial_rotary_factor']!r} is not supported: only 1 is")
    theta = rope.get("rope_theta", values.get("rope_theta", 10_000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise InputRefused(f"rope_type = {kind!r} is not supported: only 'default', 'linear' and 'llama3' are")
    names, length = [field.name for field in fields(_KINDS[kind])], "original_max_position_embeddings"
    if length in values:  # outside of the table it takes precedence over a value inside
        rope = {**rope, length: values[length]}
    rope = {length: values["max_position_embeddings"], **rope}
    if missing := [name for name in names if name not in rope]:
        raise InputRefused(f"the key {missing[0]} of the {kind} rope scaling is missing")
    return theta, _KINDS[kind](**{name: rope[name] for name in names})


def to_hf(scaling: Scaling) -> dict[str, Any]:
    """Return the value of `rope_scaling` for a config.json."""
    return {"rope_type": next(name for name, kind in _KINDS.items() if type(scaling) is kind), **asdict(scaling)}


def check_whole(name: str, value: object) -> None:
    """Raise InputRefused unless the value is a whole number from 1 to 2^31 - 1, the largest that GGUF can hold."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputRefused(f"{name} = {value!r}: expected a whole number of at least 1")
    if value > LARGEST_SIZE:
        raise InputRefused(f"{name} = {value}: expected at most {LARGEST_SIZE}")


def check_number(name: str, value: object) -> None:
    """Raise InputRefused unless the value is a positive number that torch takes: an int64 or a finite float."""
    most = 2**63 if isinstance(value, int) else 1e300
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < most:
        raise InputRefused(f"{name} = {value!r}: expected a positive number below {most:g}")


FULL, SLIDING = "full_attention", "sliding_attention"
MOST_LAYERS = 10_000  # a limit for files that ask for a list of layers by two numbers; no trained decoder has as many


class Family(NamedTuple):
    """One architecture.

    Attributes:
        architecture: the transformers class that loads it.
        keys: the optional keys that this family has.
        defaults: transformers' defaults for keys that config.json lacks.
        qkv_bias: whether the query, key and value projections always have biases.
        qk_norm: whether each query and key head has an RMS norm before the rotation.
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
# Keys of config.json that change what transformers computes or loads, with the values that match `Llama`; transformers'
# default is one of them.
_COMPUTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "mlp_bias": (False,),
    "is_causal": (True,),
    "partial_rotary_factor": (1, None),
    "per_layer_config": (None, {}),
    "transformers_weights": (None,),
}


def family(model_type: object) -> Family:
    """Return the family of a model_type.

    Raises:
        InputRefused: the decoder does not compute it.
    """
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise InputRefused(f"model_type = {model_type!r} is not supported: only {', '.join(FAMILIES)} are")
    return FAMILIES[model_type]


def check_computed(values: Mapping[str, Any]) -> None:
    """Raise InputRefused with the key's name if a config.json asks for something that the decoder does not compute."""
    for key, known in _COMPUTED.items():
        if key == "mlp_bias" and values["model_type"] != "llama":  # other families never read it
            continue
        if values.get(key, known[0]) not in known:
            raise InputRefused(f"{key} = {values[key]!r} is not supported: only {known[0]!r} is")
    if values.get("quantization_config") is not None:
        raise InputRefused("quantization_config: quantised weights are not supported; save them in bf16 or fp32")


def windows_from_hf(values: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """Return sliding_window and layer_types (() for "all alike") of a config.json with its family's defaults filled in.

    Qwen's window counts only with use_sliding_window; if the file has no layer_types, it is used from layer
    max_window_layers on.

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
    slides = values.get("use_sliding_window", False)
    if not isinstance(slides, bool):
        raise InputRefused(f"use_sliding_window = {slides!r}: expected true or false")
    if not slides:
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
