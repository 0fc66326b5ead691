"""Read and write the keys that only the config.json of an LFM2 has.

The module needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from monograph.errors import InputRefused
from monograph.model.checks import check_positive_integer, check_positive_number
from monograph.model.layer_types import CONVOLUTION, FULL_ATTENTION

if TYPE_CHECKING:
    from monograph.model.config import LlamaConfig

# The keys that only files of this family have, and the fields of `LlamaConfig` that these files have not.
KEYS = (
    "block_auto_adjust_ff_dim",
    "block_ff_dim",
    "block_ffn_dim_multiplier",
    "block_multiple_of",
    "full_attn_idxs",
    "norm_eps",
    "tie_embedding",
)
# Those without which nothing can be said of a model, if transformers' defaults do not hold for it.
REQUIRED = ("block_auto_adjust_ff_dim", "norm_eps")
NOT_IN_FILES = ("rms_norm_eps",)


def from_hf(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a config.json with the keys and values that `LlamaConfig` has.

    Args:
        values: the content of the config.json, with its family's defaults filled in.

    Raises:
        InputRefused: a wrong value.
    """
    check_positive_number("norm_eps", values["norm_eps"])
    return {
        **values,
        "rms_norm_eps": values["norm_eps"],
        "intermediate_size": _feed_forward_width(values),
        "layer_types": _layer_types(values),
        "tie_word_embeddings": values.get("tie_embedding", values["tie_word_embeddings"]),
    }


def _feed_forward_width(values: Mapping[str, Any]) -> int:
    """Return the width of the gated layers.

    Unless block_auto_adjust_ff_dim is false, the file has the width of a layer without a gate. Two
    thirds of it make a gated layer of the same size. They are multiplied by block_ffn_dim_multiplier
    and rounded up to a multiple of block_multiple_of.
    """
    # `block_ff_dim` is an older name of the key. If a file has both, transformers reads this one.
    key = "block_ff_dim" if "block_ff_dim" in values else "intermediate_size"
    width = values[key]
    check_positive_integer(key, width)
    is_adjusted = values["block_auto_adjust_ff_dim"]
    if not isinstance(is_adjusted, bool):
        raise InputRefused(f"block_auto_adjust_ff_dim = {is_adjusted!r}: expected true or false")
    if not is_adjusted:
        return int(width)
    width = int(2 * width / 3)
    if values["block_ffn_dim_multiplier"] is not None:
        check_positive_number("block_ffn_dim_multiplier", values["block_ffn_dim_multiplier"])
        width = int(values["block_ffn_dim_multiplier"] * width)
    multiple = values["block_multiple_of"]
    check_positive_integer("block_multiple_of", multiple)
    return -(-width // multiple) * int(multiple)


def _layer_types(values: Mapping[str, Any]) -> Any:
    """Return the kind of each layer. Without the keys, all layers are attention, as in transformers."""
    listed_types = values.get("layer_types")
    if listed_types is not None:
        return listed_types
    check_positive_integer("num_hidden_layers", values["num_hidden_layers"])
    layers = range(values["num_hidden_layers"])
    attention_layers = values.get("full_attn_idxs")
    if attention_layers is None:
        attention_layers = [*layers]
    if not isinstance(attention_layers, list):
        raise InputRefused(f"full_attn_idxs = {attention_layers!r}: expected a list of layers")
    return [FULL_ATTENTION if layer in attention_layers else CONVOLUTION for layer in layers]


def to_hf(config: LlamaConfig) -> dict[str, Any]:
    """Return the keys of a config.json that differ in name or form from fields of a `LlamaConfig`."""
    layers = range(config.num_hidden_layers)
    types = config.layer_types or (FULL_ATTENTION,) * len(layers)
    return {
        "norm_eps": config.rms_norm_eps,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [layer for layer in layers if types[layer] == FULL_ATTENTION],
    }
