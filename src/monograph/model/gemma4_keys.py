"""Read and write the keys that only the config.json of a Gemma 4's text model has.

Layers without a window may have heads of another width, and another number of key-value heads. A file says
so in one of two ways: by global_head_dim and num_global_key_value_heads, or by per_layer_config, a table of
each such layer's own values, which transformers 5 writes. If a file has the table, the other two keys are
not read.

With enable_moe_block = true each block has a mixture of experts beside its gated layer. The number of a
token's experts is called top_k_experts there.

The module needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from monograph.errors import InputRefused
from monograph.model.checks import check_positive_integer
from monograph.model.layer_types import FULL_ATTENTION, SLIDING_ATTENTION

if TYPE_CHECKING:
    from monograph.model.config import LlamaConfig

# The keys that only files of this family have, and the fields of `LlamaConfig` that these files have not.
KEYS = (
    "enable_moe_block",
    "per_layer_config",
    "top_k_experts",
    "use_bidirectional_attention",
)
NOT_IN_FILES = (
    "rope_theta",
    "rope_scaling",
    "num_experts_per_tok",
    "norm_topk_prob",
)
# Those without which nothing can be said of a model, if transformers' defaults do not hold for it.
REQUIRED: tuple[str, ...] = ()
# transformers' defaults of these keys.
DEFAULTS: dict[str, Any] = {
    "global_head_dim": 512,
    "enable_moe_block": False,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
}
# Values of these keys for which nothing has to be computed that is not computed here.
_OFF = {
    # With "vision" only pictures attend to later positions.
    "use_bidirectional_attention": (None, "vision"),
}
# What a file with enable_moe_block = true must say.
_MIXTURE_SIZES = ("num_experts", "top_k_experts", "moe_intermediate_size")
_HEAD_DIM = "head_dim"
_KEY_VALUE_HEADS = "num_key_value_heads"


def from_hf(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a config.json with the keys and values that `LlamaConfig` has.

    Args:
        values: the content of the config.json, with its family's defaults filled in.

    Raises:
        InputRefused: a part that is not computed here, or a wrong value.
    """
    for key, off in _OFF.items():
        if values.get(key) not in off:
            raise InputRefused(f"{key} = {values[key]!r} is not supported: only {off[0]!r} is")
    if values.get("rope_scaling"):
        raise InputRefused("rope_scaling is not read in this family: expected rope_parameters")
    layer_types = _layer_types(values)
    head_dim, key_value_heads = _heads_without_window(values, layer_types)
    input_width = values.get("hidden_size_per_layer_input") or 0
    input_rows = values.get("vocab_size_per_layer_input") if input_width else 0
    return {
        **values,
        **_mixture(values),
        "hidden_size_per_layer_input": input_width,
        "vocab_size_per_layer_input": input_rows,
        "layer_types": layer_types,
        "rope_parameters": _rope_tables(values),
        "global_head_dim": head_dim,
        "num_global_key_value_heads": key_value_heads,
    }


def _mixture(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of the mixtures by the names of `LlamaConfig`; without a mixture, 0 experts and no
    other size.

    Raises:
        InputRefused: there is a mixture, and one of its sizes is missing or wrong.
    """
    enabled = values["enable_moe_block"]
    if not isinstance(enabled, bool):
        raise InputRefused(f"enable_moe_block = {enabled!r}: expected true or false")
    if not enabled:
        return {**dict.fromkeys(_MIXTURE_SIZES), "num_experts": 0}
    for key in _MIXTURE_SIZES:
        if values.get(key) is None:
            raise InputRefused(f"enable_moe_block = true needs the key {key}")
        check_positive_integer(key, values[key])
    experts, experts_per_token, _ = (values[key] for key in _MIXTURE_SIZES)
    if experts_per_token > experts:
        raise InputRefused(
            f"top_k_experts = {experts_per_token}: expected at most the number of experts, {experts}"
        )
    return {"num_experts_per_tok": experts_per_token}


def _layer_types(values: Mapping[str, Any]) -> Any:
    """Return the kind of each layer. As in transformers, the last one has no window, whatever the file
    says.
    """
    listed_types = values.get("layer_types")
    if listed_types is None:
        layers = values["num_hidden_layers"]
        check_positive_integer("num_hidden_layers", layers)
        listed_types = [
            SLIDING_ATTENTION if (layer + 1) % 6 else FULL_ATTENTION for layer in range(layers)
        ]
    if not isinstance(listed_types, list) or not listed_types:
        return listed_types  # `windows_from_hf` refuses it
    return [*listed_types[:-1], FULL_ATTENTION]


def _rope_tables(values: Mapping[str, Any]) -> Any:
    """Return the two tables of rotary positions.

    Raises:
        InputRefused: there are tables, but not both, or one has no rope_theta.
    """
    tables = values.get("rope_parameters")
    if tables is None:
        return {
            FULL_ATTENTION: {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1e6,
            },
            SLIDING_ATTENTION: {"rope_type": "default", "rope_theta": 1e4},
        }
    for kind in (FULL_ATTENTION, SLIDING_ATTENTION):
        table = tables.get(kind) if isinstance(tables, dict) else None
        if not isinstance(table, dict) or "rope_theta" not in table:
            raise InputRefused(
                f"rope_parameters = {tables!r}: expected a table with a rope_theta for {FULL_ATTENTION!r} and one for "
                f"{SLIDING_ATTENTION!r}"
            )
    return tables


def _heads_without_window(values: Mapping[str, Any], layer_types: Any) -> tuple[Any, Any]:
    """Return the width of a head, and the number of key-value heads, of layers without a window.

    Raises:
        InputRefused: per_layer_config says something else of a layer, or not the same of all layers
            without a window.
    """
    if "per_layer_config" not in values:
        has_own_heads = values.get("attention_k_eq_v") is True
        key_value_heads = values.get("num_global_key_value_heads") if has_own_heads else None
        return values["global_head_dim"], key_value_heads or 0
    by_layer = values["per_layer_config"] or {}
    if not isinstance(by_layer, dict):
        raise InputRefused(f"per_layer_config = {by_layer!r}: expected a table")
    types = layer_types if isinstance(layer_types, list) else []
    expected = {str(layer) for layer, kind in enumerate(types) if kind == FULL_ATTENTION}
    tables = [*by_layer.values()]
    is_uniform = all(table == tables[0] for table in tables) and isinstance(
        tables[0] if tables else {}, dict
    )
    if not is_uniform or ({*by_layer} not in (set(), expected)):
        raise InputRefused(
            "per_layer_config: expected the same values for each layer without a window, and none for the others"
        )
    own = tables[0] if tables else {}
    unknown = sorted({*own} - {_HEAD_DIM, _KEY_VALUE_HEADS})
    if unknown:
        raise InputRefused(
            f"per_layer_config has {unknown[0]!r}: only {_HEAD_DIM!r} and {_KEY_VALUE_HEADS!r} are supported"
        )
    if _KEY_VALUE_HEADS in own and values.get("attention_k_eq_v") is not True:
        if own[_KEY_VALUE_HEADS] != values[_KEY_VALUE_HEADS]:
            raise InputRefused(
                f"per_layer_config has another {_KEY_VALUE_HEADS}, which is supported only with attention_k_eq_v = true"
            )
        own = {key: value for key, value in own.items() if key != _KEY_VALUE_HEADS}
    return own.get(_HEAD_DIM, values[_HEAD_DIM]), own.get(_KEY_VALUE_HEADS, 0)


def to_hf(config: LlamaConfig) -> dict[str, Any]:
    """Return the keys of a config.json that differ in name or form from fields of a `LlamaConfig`."""
    mixture = dict.fromkeys(_MIXTURE_SIZES)
    if config.num_experts:
        sizes = config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size
        mixture = dict(zip(_MIXTURE_SIZES, sizes, strict=True))
    return {
        "global_head_dim": config.global_head_dim or config.head_dim,
        "num_global_key_value_heads": config.num_global_key_value_heads or None,
        "enable_moe_block": config.num_experts > 0,
        **mixture,
        "hidden_size_per_layer_input": config.hidden_size_per_layer_input,
        "vocab_size_per_layer_input": config.vocab_size_per_layer_input or config.vocab_size,
        "num_kv_shared_layers": config.num_kv_shared_layers,
        "use_double_wide_mlp": config.use_double_wide_mlp,
    }
