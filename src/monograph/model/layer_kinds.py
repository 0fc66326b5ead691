"""Say of which kind each layer of a model is: attention or a delta net, with a window, with rotary
positions.

The module needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from monograph.errors import InputRefused
from monograph.model.families import LINEAR_SIZES, Family, family
from monograph.model.scaling import FULL, LINEAR, SLIDING, check_positive_integer

if TYPE_CHECKING:
    from monograph.model.config import LlamaConfig

# The largest number of layers, because a file can ask for a list of layers by two numbers. No trained
# decoder has as many.
MOST_LAYERS = 10_000
# The number that a delta net adds to the squared length of a query or key, as in transformers.
LENGTH_EPS = 1e-6


def windows_from_hf(values: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """Return sliding_window and layer_types of a config.json.

    If the file has layer_types, they say which layers have the window. Without them, layers have a
    window if the family's `full_every` is not 0, or if use_sliding_window is true. A Qwen never has a
    window without use_sliding_window.

    Args:
        values: the content of the config.json, with its family's defaults filled in.

    Returns:
        The window, or None.
        The kind of each layer; (): all layers are alike.

    Raises:
        InputRefused: the file has layer_types and the family does not, or a value is wrong.
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
            # The values of a new model do not have these sizes yet.
            check_positive_integer(name, values.get(name, 1))
        return None, tuple(_default_types(values, its) if types is None else types)
    if "layer_types" not in its.keys:
        if types is not None:
            raise InputRefused(
                f"layer_types is not supported with model_type = {values['model_type']!r}"
            )
        if "sliding_window" not in its.keys:
            return None, ()
        if "use_sliding_window" in its.keys and not _uses_window(values):
            return None, ()
        return window, ()
    # In a family with layers that do not rotate, layer_types count without use_sliding_window.
    types_suffice = types is not None and "no_rope_layers" in its.keys
    if not _uses_window(values) and not its.full_every and not types_suffice:
        window = None
    if types is not None:
        return window, tuple(types)
    if window is None and not its.full_every:
        return window, ()
    return window, _default_types(values, its)


def _uses_window(values: Mapping[str, Any]) -> bool:
    """Return use_sliding_window, which is checked."""
    uses_window = values.get("use_sliding_window", False)
    if not isinstance(uses_window, bool):
        raise InputRefused(f"use_sliding_window = {uses_window!r}: expected true or false")
    return uses_window


def _default_types(values: Mapping[str, Any], its: Family) -> tuple[str, ...]:
    """Return the layer_types of a file that leaves them out, where layers are not alike."""
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
        rotations = rotations_from_hf(values) or (1,) * len(layers)
        return tuple(FULL if rotates else SLIDING for rotates in rotations)
    if isinstance(first, bool) or not isinstance(first, int):
        raise InputRefused(f"max_window_layers = {first!r}: expected a whole number")
    return tuple(SLIDING if layer >= first else FULL for layer in layers)


def rotations_from_hf(values: Mapping[str, Any]) -> tuple[int, ...]:
    """Return 1 for each layer that rotates queries and keys, and 0 for each other layer.

    Args:
        values: the content of a config.json, with its family's defaults filled in.

    Returns:
        A number for each layer; (): all layers rotate.

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
    # A list may be longer than the model.
    rotations = tuple(listed[:layers])
    if all(rotates == 1 for rotates in rotations):
        return ()
    return rotations


def linear_sizes(config: LlamaConfig) -> dict[str, int]:
    """Return the sizes of a configuration's delta nets, where defaults replace sizes of 0.

    Raises:
        InputRefused: a value of the wrong type or out of range, or heads that do not divide.
    """
    if config.family.others != LINEAR:
        return {}
    value_heads = config.linear_num_value_heads or max(1, config.hidden_size // config.head_dim)
    default_key_heads = value_heads
    if isinstance(value_heads, int) and value_heads % 2 == 0:
        default_key_heads = value_heads // 2
    sizes = {
        "linear_num_key_heads": config.linear_num_key_heads or default_key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": config.linear_key_head_dim or config.head_dim,
        "linear_value_head_dim": config.linear_value_head_dim or config.head_dim,
        "linear_conv_kernel_dim": config.linear_conv_kernel_dim or 4,
    }
    for name, size in sizes.items():
        check_positive_integer(name, size)
    key_heads = sizes["linear_num_key_heads"]
    if value_heads % key_heads:
        raise InputRefused(
            f"linear_num_value_heads = {value_heads} is not a multiple of linear_num_key_heads = {key_heads}; "
            "change one"
        )
    return sizes


def fresh(model_type: str, layers: int) -> dict[str, Any]:
    """Return the keys of a new model that follow from its family, such as windows and rotary
    positions.

    Args:
        model_type: the family.
        layers: the model's number of layers.

    Raises:
        InputRefused: the decoder does not compute this family.
    """
    its = family(model_type)
    values = {"model_type": model_type, "num_hidden_layers": layers}
    if its.full_every and "sliding_window" in its.keys:
        values["sliding_window"] = its.defaults["sliding_window"]
    window, types = windows_from_hf(values)
    if types and its.others == LINEAR:
        # So that a model of few layers has attention, too.
        types = (*types[:-1], FULL)
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
        # llama.cpp has one number for the norms' epsilon and for LENGTH_EPS.
        found["rms_norm_eps"] = LENGTH_EPS
    if "llama3" not in its.scalings:
        # The scaling of presets is llama3.
        found["rope_scaling"] = None
    return found


def layer_count(values: Mapping[str, Any]) -> int:
    """Return num_hidden_layers, or raise InputRefused if it is above MOST_LAYERS."""
    layers: int = values["num_hidden_layers"]
    check_positive_integer("num_hidden_layers", layers)
    if layers > MOST_LAYERS:
        raise InputRefused(f"num_hidden_layers = {layers}: expected at most {MOST_LAYERS}")
    return layers
