"""Read and check the keys of a config.json about its layers: the type of each one, and whether it rotates
queries and keys. Types are full attention, attention with a window, a delta net and Mamba 2.

The module needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from monograph.errors import InputRefused
from monograph.model.checks import check_positive_integer
from monograph.model.families import Family, find_family
from monograph.model.layer_types import FULL_ATTENTION, SLIDING_ATTENTION

# The largest accepted number of layers, far above that of any trained decoder. A small file can state a huge
# number of layers, and lists of that length are made here.
MAX_LAYERS = 10_000


def windows_from_hf(values: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """Return sliding_window and layer_types of a config.json.

    If the file has layer_types, they say which layers have the window. Without them, the family says
    it. The first of these rules that applies to the family decides:

    - It has no key sliding_window: no layer has a window.
    - It has no key layer_types: all layers have the window. If the family has the key
      use_sliding_window, this must be true.
    - It has `full_attention_every` = n: all layers except every n-th have the window.
    - It has the key no_rope_layers: if use_sliding_window is true, the layers that do not rotate have
      the window.
    - Else, if use_sliding_window is true, the layers from max_window_layers on have the window.

    Args:
        values: the content of the config.json, with its family's defaults filled in.

    Returns:
        The window, or None.
        The type of each layer; (): all layers are alike.

    Raises:
        InputRefused: the file has layer_types and the family does not, or a value is wrong.
    """
    family = find_family(values["model_type"])
    window = values.get("sliding_window")
    listed_types = values.get("layer_types")
    if listed_types is not None and not isinstance(listed_types, list):
        raise InputRefused(f"layer_types = {listed_types!r}: expected a list")
    if listed_types is not None and not listed_types:
        raise InputRefused(
            f"layer_types has 0 entries, but num_hidden_layers = {values['num_hidden_layers']}"
        )
    if not family.other_layers.attends:
        for name in family.other_layers.size_keys:
            # `new_model_keys` calls this function before a new model has these sizes.
            check_positive_integer(name, values.get(name, 1))
        if listed_types is None:
            return None, _default_types(values, family)
        return None, tuple(listed_types)
    if "layer_types" not in family.optional_keys:
        if listed_types is not None:
            raise InputRefused(
                f"layer_types is not supported with model_type = {values['model_type']!r}"
            )
        if "sliding_window" not in family.optional_keys:
            return None, ()
        if "use_sliding_window" in family.optional_keys and not _uses_window(values):
            return None, ()
        return window, ()
    # As in transformers, use_sliding_window = false removes the window, except in two cases: the
    # family has windows by its own rule, or it has layers that do not rotate and the file lists the
    # types.
    has_rule = family.full_attention_every > 0
    list_decides = listed_types is not None and "no_rope_layers" in family.optional_keys
    if not _uses_window(values) and not has_rule and not list_decides:
        window = None
    if listed_types is not None:
        return window, tuple(listed_types)
    if window is None and not has_rule:
        return None, ()
    return window, _default_types(values, family)


def _uses_window(values: Mapping[str, Any]) -> bool:
    """Return use_sliding_window, or raise InputRefused if it is neither true nor false."""
    uses_window = values.get("use_sliding_window", False)
    if not isinstance(uses_window, bool):
        raise InputRefused(f"use_sliding_window = {uses_window!r}: expected true or false")
    return uses_window


def _default_types(values: Mapping[str, Any], family: Family) -> tuple[str, ...]:
    """Return the layer_types of a file that leaves them out and whose layers are not alike."""
    layers = range(layer_count(values))
    every = family.full_attention_every
    if "sliding_window_pattern" in family.optional_keys:
        every = values.get("sliding_window_pattern", every)
        check_positive_integer("sliding_window_pattern", every)
    if not family.other_layers.attends:
        every = values.get("full_attention_interval", every)
        check_positive_integer("full_attention_interval", every)
    if every:
        others = (family.other_layer_type, *family.more_layer_types)
        return tuple(
            others[layer % len(others)] if (layer + 1) % every else FULL_ATTENTION
            for layer in layers
        )
    if "no_rope_layers" in family.optional_keys:
        rotations = rotations_from_hf(values) or (1,) * len(layers)
        return tuple(FULL_ATTENTION if rotates else SLIDING_ATTENTION for rotates in rotations)
    first_with_window = values.get("max_window_layers", 28)
    if isinstance(first_with_window, bool) or not isinstance(first_with_window, int):
        raise InputRefused(f"max_window_layers = {first_with_window!r}: expected a whole number")
    return tuple(
        SLIDING_ATTENTION if layer >= first_with_window else FULL_ATTENTION for layer in layers
    )


def rotations_from_hf(values: Mapping[str, Any]) -> tuple[int, ...]:
    """Return no_rope_layers of a config.json: 1 for each layer that rotates queries and keys, and 0
    for each layer that does not.

    Args:
        values: the content of a config.json, with its family's defaults filled in.

    Returns:
        A number for each layer; (): all layers rotate.

    Raises:
        InputRefused: a wrong value.
    """
    if "no_rope_layers" not in find_family(values["model_type"]).optional_keys:
        return ()
    layers = layer_count(values)
    listed = values.get("no_rope_layers")
    if listed is None:
        # Every n-th layer does not rotate.
        every = values.get("no_rope_layer_interval", 4)
        check_positive_integer("no_rope_layer_interval", every)
        listed = [int((layer + 1) % every != 0) for layer in range(layers)]
    if not isinstance(listed, list) or len(listed) < layers:
        raise InputRefused(
            f"no_rope_layers = {listed!r}: expected a list of 0 or 1 for each of {layers} layers"
        )
    # As in transformers, the list may be longer than the number of layers.
    rotations = tuple(listed[:layers])
    if all(rotates == 1 for rotates in rotations):
        return ()
    return rotations


def new_model_keys(model_type: str, layers: int) -> dict[str, Any]:
    """Return the keys of a new model that follow from its family, such as windows and rotary
    positions.

    Args:
        model_type: the family.
        layers: the model's number of layers.

    Raises:
        InputRefused: the decoder does not compute this family.
    """
    family = find_family(model_type)
    values = {"model_type": model_type, "num_hidden_layers": layers}
    if family.full_attention_every and "sliding_window" in family.optional_keys:
        values["sliding_window"] = family.defaults["sliding_window"]
    window, types = windows_from_hf(values)
    if types and (family.last_layer_is_full or not family.other_layers.attends):
        # In a hybrid the last layer is full attention, so that a model of few layers has attention, too.
        types = (*types[:-1], FULL_ATTENTION)
    local_theta = None
    if "rope_local_base_freq" in family.optional_keys or family.last_layer_is_full:
        local_theta = family.default_local_theta
    keys: dict[str, Any] = {
        "model_type": model_type,
        "sliding_window": window,
        "layer_types": types,
        "no_rope_layers": rotations_from_hf(values),
        "rope_local_theta": local_theta,
        "partial_rotary_factor": family.defaults.get("partial_rotary_factor", 1.0),
        "attention_bias": family.defaults.get("attention_bias", False),
        "time_step_min": family.defaults.get("time_step_min", 0.0),
        "position_embedding_type": family.defaults.get("position_embedding_type", "rope"),
    }
    if family.other_layers.new_norm_eps is not None:
        keys["rms_norm_eps"] = family.other_layers.new_norm_eps
    if not family.may_tie:
        keys["tie_word_embeddings"] = False
    if "llama3" not in family.rope_types:
        # The scaling of the presets 1b and 8b is llama3, which this family does not have.
        keys["rope_scaling"] = None
    return keys


def layer_count(values: Mapping[str, Any]) -> int:
    """Return num_hidden_layers, or raise InputRefused if it is above MAX_LAYERS."""
    layers: int = values["num_hidden_layers"]
    check_positive_integer("num_hidden_layers", layers)
    if layers > MAX_LAYERS:
        raise InputRefused(f"num_hidden_layers = {layers}: expected at most {MAX_LAYERS}")
    return layers
