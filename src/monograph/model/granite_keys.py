"""Read and write the keys that only the config.json of a Granite 4 has (granitemoehybrid).

The module needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from monograph.errors import InputRefused
from monograph.model.checks import check_positive_integer
from monograph.model.layer_types import FULL_ATTENTION, LINEAR_ATTENTION, MAMBA
from monograph.model.mamba_keys import head_dim_from_hf, require_unlimited_time_steps

if TYPE_CHECKING:
    from monograph.model.config import LlamaConfig

# The keys that only files of this family have.
KEYS = (
    "layers_block_type",
    "mamba_chunk_size",
    "mamba_expand",
    "num_local_experts",
    "shared_intermediate_size",
    "time_step_limit",
)
# The keys that a config.json of an unknown model_type must have to be read as one of this family
# (`monograph.model.nearest`). They have defaults in this family, which may be others in the unknown one.
REQUIRED = (
    "mamba_expand",
    "num_local_experts",
    "position_embedding_type",
    "shared_intermediate_size",
)
# The fields of `LlamaConfig` that files of this family have under other names.
NOT_IN_FILES = ("moe_intermediate_size", "num_experts", "shared_expert_intermediate_size")
# The words that files have for the kinds of layers. transformers writes "linear_attention" and
# "full_attention" since its version 5, and wrote "mamba" and "attention" before.
_LAYER_TYPES = {
    MAMBA: MAMBA,
    LINEAR_ATTENTION: MAMBA,
    "attention": FULL_ATTENTION,
    FULL_ATTENTION: FULL_ATTENTION,
}
# The words that all versions of transformers read.
_WORDS_IN_FILES = {MAMBA: MAMBA, FULL_ATTENTION: "attention"}


def from_hf(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a config.json with the keys and values that `LlamaConfig` has.

    Args:
        values: the content of the config.json, with its family's defaults filled in.

    Raises:
        InputRefused: a wrong value, or one that the decoder does not compute.
    """
    experts = values["num_local_experts"]
    if experts != 0 or isinstance(experts, bool):
        check_positive_integer("num_local_experts", experts)
    require_unlimited_time_steps(values)
    check_positive_integer("shared_intermediate_size", values["shared_intermediate_size"])
    head_dim = head_dim_from_hf(values)
    position_type = values.get("position_embedding_type")
    if position_type not in (None, "nope", "rope"):
        raise InputRefused(
            f"position_embedding_type = {position_type!r} is not supported: only 'rope' and 'nope' are"
        )
    # Without experts, each block has a gated layer of the width of the shared expert.
    shared_width = values["shared_intermediate_size"]
    widths = {"intermediate_size": shared_width}
    if experts:
        widths = {
            "moe_intermediate_size": values["intermediate_size"],
            "shared_expert_intermediate_size": shared_width,
        }
    return {
        **values,
        **widths,
        "num_experts": experts,
        "mamba_d_head": head_dim,
        "position_embedding_type": position_type or "nope",
        "layer_types": _layer_types(values),
    }


def _layer_types(values: Mapping[str, Any]) -> list[str]:
    """Return the kind of each layer. Without the key, all layers are of Mamba 2, as in transformers."""
    # `layers_block_type` is an older name of the key. If a file has both, transformers reads this one.
    words = values.get("layers_block_type") or values.get("layer_types")
    if words is None:
        return [MAMBA] * int(values["num_hidden_layers"])
    if not isinstance(words, list):
        raise InputRefused(f"layer_types = {words!r}: expected a list")
    for word in words:
        if not isinstance(word, str) or word not in _LAYER_TYPES:
            raise InputRefused(f"layer_types: {word!r}: expected 'mamba' or 'attention'")
    return [_LAYER_TYPES[word] for word in words]


def to_hf(config: LlamaConfig) -> dict[str, Any]:
    """Return the keys of a config.json that differ in name or form from fields of a `LlamaConfig`."""
    layers = range(config.num_hidden_layers)
    types = config.layer_types or (FULL_ATTENTION,) * len(layers)
    # Without experts, the width of a shared expert is 0, and each block has a gated layer instead.
    shared_width = config.shared_expert_intermediate_size or config.intermediate_size
    return {
        "shared_intermediate_size": shared_width,
        "num_local_experts": config.num_experts,
        "mamba_expand": config.mamba_n_heads * config.mamba_d_head // config.hidden_size,
        "mamba_chunk_size": 256,
        "layer_types": [_WORDS_IN_FILES[each] for each in types],
    }
