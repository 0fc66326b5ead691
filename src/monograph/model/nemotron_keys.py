"""Read and write the keys that only the config.json of a Nemotron-H has.

The module needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from monograph.errors import InputRefused
from monograph.model.checks import check_positive_integer, check_positive_number
from monograph.model.layer_types import FULL_ATTENTION, LINEAR_ATTENTION, MAMBA, PLAIN_MLP

if TYPE_CHECKING:
    from monograph.model.config import LlamaConfig

# The keys of files for fields of `LlamaConfig`, by the fields' names.
_KEYS_OF_FIELDS = {
    "mamba_n_heads": "mamba_num_heads",
    "mamba_d_head": "mamba_head_dim",
    "mamba_n_groups": "n_groups",
    "mamba_d_state": "ssm_state_size",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_proj_bias": "use_bias",
    "rms_norm_eps": "layer_norm_epsilon",
}
# Older names of keys, which transformers reads instead of the newer ones if a file has both.
_OLDER_KEYS = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_dt_min": "time_step_min",
}
# transformers' defaults of the keys that only this family has.
DEFAULTS = {
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "use_bias": False,
    "layer_norm_epsilon": 1e-5,
    "time_step_min": 0.001,
}
KEYS = (
    *_KEYS_OF_FIELDS.values(),
    *_OLDER_KEYS,
    "hybrid_override_pattern",
    "layers_block_type",
)
# Those without which nothing can be said of a model, if transformers' defaults do not hold for it.
REQUIRED = (*_KEYS_OF_FIELDS.values(), "time_step_min", "layers_block_type")
# The fields of `LlamaConfig` that files of this family have under other names, and the keys about rotary
# positions, which it does not have.
NOT_IN_FILES = (
    "layer_types",
    *_KEYS_OF_FIELDS,
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
)
# The kinds of layers by the words of files. transformers wrote "mamba" and "attention" before its version 5.
_LAYER_TYPES = {
    MAMBA: MAMBA,
    LINEAR_ATTENTION: MAMBA,
    "attention": FULL_ATTENTION,
    FULL_ATTENTION: FULL_ATTENTION,
    PLAIN_MLP: PLAIN_MLP,
}
_WORDS_IN_FILES = {MAMBA: "linear_attention", FULL_ATTENTION: FULL_ATTENTION, PLAIN_MLP: PLAIN_MLP}
# The kinds of layers by the letters of a pattern. "E" is a mixture of experts.
_MIXTURE = "moe"
_LETTERS = {"M": MAMBA, "*": FULL_ATTENTION, "-": PLAIN_MLP, "E": _MIXTURE}


def from_hf(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a config.json with the keys and values that `LlamaConfig` has.

    Args:
        values: the content of the config.json, with its family's defaults filled in.

    Raises:
        InputRefused: a wrong value, or one that the decoder does not compute.
    """
    for older, newer in _OLDER_KEYS.items():
        if values.get(older) is not None:
            values = {**values, newer: values[older]}
    for name in ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"):
        check_positive_integer(name, values[name])
    check_positive_number("layer_norm_epsilon", values["layer_norm_epsilon"])
    least_step = values["time_step_min"]
    if least_step != 0:
        check_positive_number("time_step_min", least_step)
    types = _layer_types(values)
    # No layer rotates, whatever the file says of rotary positions.
    unread = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
    read = {key: value for key, value in values.items() if key not in unread}
    return {
        **read,
        **{field: values[key] for field, key in _KEYS_OF_FIELDS.items()},
        "layer_types": types,
        "num_hidden_layers": len(types),
        # transformers does not read this key in this family.
        "tie_word_embeddings": False,
    }


def _layer_types(values: Mapping[str, Any]) -> list[str]:
    """Return the kind of each layer."""
    # If a file has both keys, transformers reads layer_types.
    key = "layer_types" if values.get("layer_types") is not None else "layers_block_type"
    words = values.get(key)
    if words is None:
        key = "hybrid_override_pattern"
        words = values.get(key)
        if not isinstance(words, str):
            raise InputRefused("the key layers_block_type is missing")
        words = [_LETTERS.get(letter, letter) for letter in words]
    if not isinstance(words, list) or not words:
        raise InputRefused(f"{key} = {words!r}: expected a list of kinds of layers")
    if _MIXTURE in words:
        raise InputRefused(f"{key}: mixtures of experts ('moe') are not supported")
    for word in words:
        if not isinstance(word, str) or word not in _LAYER_TYPES:
            raise InputRefused(
                f"{key}: {word!r}: expected {', '.join(map(repr, _WORDS_IN_FILES.values()))}"
            )
    return [_LAYER_TYPES[word] for word in words]


def to_hf(config: LlamaConfig) -> dict[str, Any]:
    """Return the keys of a config.json that differ in name or form from fields of a `LlamaConfig`."""
    layers = range(config.num_hidden_layers)
    types = config.layer_types or (FULL_ATTENTION,) * len(layers)
    letters = {kind: letter for letter, kind in _LETTERS.items()}
    return {
        **{key: getattr(config, field) for field, key in _KEYS_OF_FIELDS.items()},
        "layers_block_type": [_WORDS_IN_FILES[each] for each in types],
        "hybrid_override_pattern": "".join(letters[each] for each in types),
    }
