"""Say which layer of a model is of which kind: attention or not, its window, its rotary positions.
Needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from monograph.errors import InputRefused
from monograph.model.families import LINEAR_SIZES, Family, family
from monograph.model.scaling import FULL, LINEAR, SLIDING, check_positive_integer

if TYPE_CHECKING:
    from monograph.model.config import LlamaConfig

# A limit for files that ask for a list of layers by two numbers; no trained decoder has as many.
MOST_LAYERS = 10_000
# What a delta net adds to the square of a query's or key's length, as in transformers.
LENGTH_EPS = 1e-6


def windows_from_hf(values: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """Return sliding_window and layer_types (() for "all alike") of a config.json with its family's
    defaults filled in.

    With layer_types, they say which layers have the window. Without them it always counts where
    each so many-th layer has none, and elsewhere with use_sliding_window. A Qwen has no window
    without that flag in any case.

    Raises:
        InputRefused: layer_types where the family has none, or a wrong value.
    """
    its = family(values["model_type"])
    window = values.get("sliding_window")
    types = values.get("layer_types")
    if types is not None and not isinstance(types, list):
        raise InputRefused(f"layer_types = {types!r}: expected a list")
    if types is not None and not types:
        raise InputRefused(
            f"layer_types has 0 entries, but num_hidden_layers = {values['num_hidden_layers']}"
        )
    if its.others == LINEAR:
        for name in LINEAR_SIZES:
            check_positive_integer(name, values.get(name, 1))  # a new model has none yet
        return None, tuple(_usual_types(values, its) if types is None else types)
    if "layer_types" not in its.keys:
        if types is not None:
            raise InputRefused(
                f"layer_types is not supported with model_type = {values['model_type']!r}"
            )
        kept = "sliding_window" in its.keys and (
            "use_sliding_window" not in its.keys or _slides(values)
        )
        return window if kept else None, ()
    if (
        not _slides(values)
        and not its.full_every
        and (types is None or "no_rope_layers" not in its.keys)
    ):
        window = None
    if types is not None or (window is None and not its.full_every):
        return window, tuple(types or ())
    return window, _usual_types(values, its)


def _slides(values: Mapping[str, Any]) -> bool:
    slides = values.get("use_sliding_window", False)
    if not isinstance(slides, bool):
        raise InputRefused(f"use_sliding_window = {slides!r}: expected true or false")
    return slides


def _usual_types(values: Mapping[str, Any], its: Family) -> tuple[str, ...]:
    """Return the layer_types of a model whose layers are not alike and whose file has none."""
    layers = range(layer_count(values))
    every = its.full_every
    first = values.get("max_window_layers", 28)
    if "sliding_window_pattern" in its.keys:
        every = values.get("sliding_window_pattern", every)
        check_positive_integer("sliding_window_pattern", every)
    if its.others == LINEAR:
        every = values.get("full_attention_interval", every)
        check_positive_integer("full_attention_interval", every)
    if every:
        return tuple(its.others if (layer + 1) % every else FULL for layer in layers)
    if "no_rope_layers" in its.keys:
        return tuple(
            FULL if rotates else SLIDING
            for rotates in rotations_from_hf(values) or (1,) * len(layers)
        )
    if isinstance(first, bool) or not isinstance(first, int):
        raise InputRefused(f"max_window_layers = {first!r}: expected a whole number")
    return tuple(SLIDING if layer >= first else FULL for layer in layers)


def rotations_from_hf(values: Mapping[str, Any]) -> tuple[int, ...]:
    """Return 1 for each layer that rotates queries and keys and 0 for each other one; () if all do.

    Raises:
        InputRefused: a wrong value.
    """
    if "no_rope_layers" not in family(values["model_type"]).keys:
        return ()
    layers = layer_count(values)
    listed = values.get("no_rope_layers")
    every = values.get("no_rope_layer_interval", 4)
    if listed is None:
        check_positive_integer("no_rope_layer_interval", every)
        listed = [int((layer + 1) % every != 0) for layer in range(layers)]
    if not isinstance(listed, list) or len(listed) < layers:
        raise InputRefused(
            f"no_rope_layers = {listed!r}: expected a list of 0 or 1 for each of {layers} layers"
        )
    return () if all(each == 1 for each in listed[:layers]) else tuple(listed[:layers])


def linear_sizes(config: LlamaConfig) -> dict[str, int]:
    """Return the sizes of a LlamaConfig's delta nets, of which 0 stands for what follows from
    others.

    Raises:
        InputRefused: a value of the wrong type or out of range, or heads that do not divide.
    """
    if config.family.others != LINEAR:
        return {}
    values = config.linear_num_value_heads or max(1, config.hidden_size // config.head_dim)
    usual = (
        values // (2 - values % 2) if isinstance(values, int) else 0,
        values,
        config.head_dim,
        config.head_dim,
        4,
    )
    found = {
        name: getattr(config, name) or size for name, size in zip(LINEAR_SIZES, usual, strict=True)
    }
    for name, size in found.items():
        check_positive_integer(name, size)
    keys = found["linear_num_key_heads"]
    if values % keys:
        raise InputRefused(
            f"linear_num_value_heads = {values} is not a multiple of linear_num_key_heads = {keys}; change one"
        )
    return found


def fresh(model_type: str, layers: int) -> dict[str, Any]:
    """Return what a new model of a family has beyond its sizes: the family itself, its windows and
    rotary positions.

    Raises:
        InputRefused: the decoder does not compute it.
    """
    its = family(model_type)
    values = {"model_type": model_type, "num_hidden_layers": layers}
    if its.full_every and "sliding_window" in its.keys:
        values["sliding_window"] = its.defaults["sliding_window"]
    window, types = windows_from_hf(values)
    if types and its.others == LINEAR:
        types = (*types[:-1], FULL)  # a model of few layers has attention, too
    found: dict[str, Any] = {
        "model_type": model_type,
        "sliding_window": window,
        "layer_types": types,
        "no_rope_layers": rotations_from_hf(values),
        "rope_local_theta": its.local_theta if "rope_local_base_freq" in its.keys else None,
        "partial_rotary_factor": its.defaults.get("partial_rotary_factor", 1.0),
        "attention_bias": its.defaults.get("attention_bias", False),
    }
    if its.others == LINEAR:
        found["rms_norm_eps"] = LENGTH_EPS  # llama.cpp has one number for both
    return found if "llama3" in its.scalings else found | {"rope_scaling": None}  # as presets have


def layer_count(values: Mapping[str, Any]) -> int:
    """Return num_hidden_layers, small enough for a list of them."""
    layers: int = values["num_hidden_layers"]
    check_positive_integer("num_hidden_layers", layers)
    if layers > MOST_LAYERS:
        raise InputRefused(f"num_hidden_layers = {layers}: expected at most {MOST_LAYERS}")
    return layers
