"""Read and write the keys that only the config.json of a Bamba has.

The module needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from monograph.errors import InputRefused
from monograph.model import scaling
from monograph.model.layer_types import FULL_ATTENTION, MAMBA
from monograph.model.mamba_keys import head_dim_from_hf, require_unlimited_time_steps

if TYPE_CHECKING:
    from monograph.model.config import LlamaConfig

# The keys that only files of this family have.
KEYS = ("attn_layer_indices", "mamba_chunk_size", "mamba_expand", "time_step_limit")
# Those without which nothing can be said of a model, if transformers' defaults do not hold for it.
REQUIRED = ("attn_layer_indices", "mamba_expand")
# The field of `LlamaConfig` that files of this family do not have: they list the layers of attention.
NOT_IN_FILES = ("layer_types",)
# The share of a head's channels that transformers rotates if the table of rotary positions does not say it.
_ROTARY_FACTOR = 0.5


def from_hf(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a config.json with the keys and values that `LlamaConfig` has.

    Args:
        values: the content of the config.json, with its family's defaults filled in.

    Raises:
        InputRefused: a wrong value, or one that the decoder does not compute.
    """
    require_unlimited_time_steps(values)
    _check_rotary_factor(values)
    return {
        **values,
        "mamba_d_head": head_dim_from_hf(values),
        "layer_types": _layer_types(values),
    }


def _check_rotary_factor(values: Mapping[str, Any]) -> None:
    """Refuse a partial_rotary_factor that transformers does not read, because it is not in the table."""
    table = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if isinstance(table, dict) and "partial_rotary_factor" in table:
        return
    factor = values["partial_rotary_factor"]
    if factor != _ROTARY_FACTOR:
        raise InputRefused(
            f"partial_rotary_factor = {factor!r} is not supported outside of rope_parameters: only "
            f"{_ROTARY_FACTOR} is"
        )


def _layer_types(values: Mapping[str, Any]) -> list[str]:
    """Return the kind of each layer. Without the key, all layers are of Mamba 2, as in transformers."""
    for key in ("layer_types", "layers_block_type"):
        if values.get(key) is not None:
            raise InputRefused(
                f"{key} is not supported with model_type = {values['model_type']!r}: expected attn_layer_indices"
            )
    attention_layers = values.get("attn_layer_indices") or []
    if not isinstance(attention_layers, list):
        raise InputRefused(f"attn_layer_indices = {attention_layers!r}: expected a list of layers")
    layers = range(values["num_hidden_layers"])
    return [FULL_ATTENTION if layer in attention_layers else MAMBA for layer in layers]


def to_hf(config: LlamaConfig) -> dict[str, Any]:
    """Return the keys of a config.json that differ in name or form from fields of a `LlamaConfig`."""
    layers = range(config.num_hidden_layers)
    types = config.layer_types or (FULL_ATTENTION,) * len(layers)
    # The table is `rope_scaling` if there is a scaling.
    tables = scaling.to_hf(config) or {
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta}
    }
    rotary_factor = {"partial_rotary_factor": config.partial_rotary_factor}
    return {
        **{name: table | rotary_factor for name, table in tables.items()},
        "attn_layer_indices": [layer for layer in layers if types[layer] == FULL_ATTENTION],
        "mamba_expand": config.mamba_n_heads * config.mamba_d_head // config.hidden_size,
        "mamba_chunk_size": 256,
    }
