"""Find the family that computes a model of an unknown model_type.

A new model_type is often an old decoder under a new name. Such a model is computed as the nearest family
if nothing in its folder says that it differs:

- The family reads each key of the model's config.json. There are two exceptions: keys that change no number
  of the model, and keys whose value turns off a part that the family lacks.
- No number depends on the defaults of the model's own code, which cannot be seen. So the keys of `_required`
  must be there, and a part without a key is taken to be off, even if the family has it on by default.
- All tensors have the names and shapes that the family's tensors have.

A difference that neither a key nor a tensor shows is not found in this way. `_HIDDEN_DIFFERENCES` lists the
types of transformers with such a difference. tests/model/test_nearest.py looks at all types of transformers
for them. The module needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from monograph.errors import InputRefused
from monograph.model.checks import check_positive_integer, check_positive_number
from monograph.model.config import LlamaConfig
from monograph.model.families import FAMILIES, SUPPORTED_VALUES, Family, keys_in_files
from monograph.model.layer_keys import layer_count
from monograph.model.layer_types import FULL_ATTENTION, SLIDING_ATTENTION
from monograph.model.scaling import QUERY_GROWTH

# The families of which no key tells all that differs from others. Such parts are taken to be off.
HIDDEN_FAMILIES = {"ernie4_5", "exaone4", "gemma", "gemma4_text", "glm", "glm4", "helium"}
# Keys that change no number of a model: notes about the file, what transformers returns or keeps in memory,
# and settings of generation and classification.
_IDLE_KEYS = {
    "_commit_hash",
    "_name_or_path",
    "architectures",
    "attn_implementation",
    "chunk_size_feed_forward",
    "dtype",
    "experts_implementation",
    "finetuning_task",
    "gradient_checkpointing",
    "id2label",
    "label2id",
    "model_type",
    "name_or_path",
    "num_labels",
    "num_logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "prefix",
    "pretraining_tp",
    "problem_type",
    "return_dict",
    "task_specific_params",
    "tokenizer_class",
    "torch_dtype",
    "torchscript",
    "transformers_version",
    "unsloth_version",
    "use_bfloat16",
    "use_cache",
}
# Keys by which a model of one of these families can be known under another name, unless the family that is
# tried has a key of this name.
_TELLING_KEYS = {"use_bias"}  # ERNIE's
# Keys that give the types of layers by a rule, and for each the key that gives them as a list. A rule means
# nothing if the list is there.
_RULES = {
    "full_attention_interval": "layer_types",
    "max_window_layers": "layer_types",
    "no_rope_layer_interval": "no_rope_layers",
    "sliding_window_pattern": "layer_types",
}
# Those of these rules that mean nothing if the model has no window.
_WINDOW_RULES = ("max_window_layers", "sliding_window_pattern")
# Parts that are off if their key is null, false or an empty list.
_OFF_IF_FALSE = {"attention_bias", "clip_qkv", "mlp_only_layers", "sliding_window"}
_ROTARY_TABLES = ("rope_parameters", "rope_scaling")
# The keys of a table of rotary positions that all families read.
_ROTARY_KEYS = {
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "factor",
    "high_freq_factor",
    "long_factor",
    "low_freq_factor",
    "mscale",
    "mscale_all_dim",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_theta",
    "rope_type",
    "short_factor",
    "truncate",
    "type",
}
# The number of characters of a value in a message.
MAX_SHOWN = 60
_ORIGINAL_LENGTH = "original_max_position_embeddings"
_LOCAL_BASE = "rope_local_base_freq"
_NORMALISED = "norm_topk_prob"


class Nearest(NamedTuple):
    """A family that computes a model of an unknown model_type.

    Attributes:
        config: the model's configuration as one of this family.
        assumption: a line that says what was assumed.
    """

    config: LlamaConfig
    assumption: str


def find_nearest(
    values: Mapping[str, Any],
    has_head: bool,
    require_tensors: Callable[[LlamaConfig], None],
) -> Nearest:
    """Return the configuration of a model of an unknown model_type as one of the nearest family.

    If several families compute the same model, the first in `FAMILIES` is taken.

    Args:
        values: the content of the config.json.
        has_head: whether the weights have an output head.
        require_tensors: raises InputRefused if the weights do not have the names and shapes of a
            configuration.

    Raises:
        InputRefused: no family computes this model. The message has the nearest family, and the key or
            the tensor that differs.
    """
    model_type = values["model_type"]
    # The nearest family is the one that leaves the fewest keys unread. The error tells only its fault.
    fewest_not_read = len(values) + 1
    fault = ""
    for name, family in FAMILIES.items():
        if name in HIDDEN_FAMILIES:
            continue
        not_read = [each for key in values for each in _not_understood(key, values, family)]
        if len(not_read) > fewest_not_read:
            continue
        try:
            if not_read:
                raise InputRefused(f"it has no {not_read[0]}")
            config = _config_as(name, values, has_head)
            require_tensors(config)
        except InputRefused as error:
            if len(not_read) < fewest_not_read:
                fewest_not_read = len(not_read)
                fault = f"the nearest family is {name}, but {error}"
            continue
        return Nearest(
            config,
            f"model_type = {model_type!r} is unknown: computed as {name}, by its keys and tensors; "
            "compare its logits with those of its own code",
        )
    raise InputRefused(f"model_type = {model_type!r} is not supported: {fault}")


def _not_understood(key: str, values: Mapping[str, Any], family: Family) -> list[str]:
    """Return descriptions of what a family does not read of a key of a config.json, with its value.

    Most keys are read or not as a whole. In a table of rotary positions, each entry is checked by itself.
    """
    value = values[key]
    if not (key in _ROTARY_TABLES and isinstance(value, dict)):
        return [] if _is_understood(key, values, family) else [_shown(key, value)]
    # The table itself and the tables in it, by their places.
    tables = {key: value}
    for name, entry in value.items():
        if isinstance(entry, dict):
            tables[f"{key}.{name}"] = entry
    read = _ROTARY_KEYS | ({QUERY_GROWTH} & {*family.optional_keys})
    not_read = []
    for place, table in tables.items():
        for name, entry in table.items():
            if name not in read and not isinstance(entry, dict):
                not_read.append(_shown(f"{place}.{name}", entry))
    return not_read


def _shown(key: str, value: object) -> str:
    """Return a key and its value, shortened."""
    text = repr(value)
    return f"{key} = {text}" if len(text) <= MAX_SHOWN else f"{key} = {text[:MAX_SHOWN]}..."


def _is_understood(key: str, values: Mapping[str, Any], family: Family) -> bool:
    """Return whether a key with its value means in a family what it means in the file.

    Only the key's name can tell: a key that the family has, too, is taken to mean the same.
    """
    value = values[key]
    if key in _IDLE_KEYS:
        return True
    if key in _TELLING_KEYS:
        return family.own_keys is not None and key in family.own_keys.KEYS
    if key in _WINDOW_RULES and not _has_window(values):
        return True
    if key in _RULES:
        return isinstance(values.get(_RULES[key]), list)
    if key == "use_sliding_window":
        return _agrees_about_windows(values, family)
    if key == _LOCAL_BASE and _states_both_bases(values):
        return True
    if key == _NORMALISED and family.always_norm_topk_prob:
        return value is True
    if key in keys_in_files(family):
        return True
    if key.endswith(("dropout", "pdrop")):
        return value is None or value == 0
    if key in _OFF_IF_FALSE:
        return value is None or value is False or value == []
    if key == "layer_types":
        all_full = isinstance(value, list) and all(each == FULL_ATTENTION for each in value)
        return all_full and values.get("sliding_window") is None
    if key == "no_rope_layers":
        return isinstance(value, list) and all(each == 1 for each in value)
    return key in SUPPORTED_VALUES and value in SUPPORTED_VALUES[key]


def _agrees_about_windows(values: Mapping[str, Any], family: Family) -> bool:
    """Return whether use_sliding_window agrees with the keys that a family reads about windows."""
    states_no_window = values.get("sliding_window") is None
    if values["use_sliding_window"] is True:
        return _lists_windows(values) or states_no_window
    if values["use_sliding_window"] is not False or _lists_windows(values):
        return False
    # A sliding_window that this key switches off is off only in a family that reads the key.
    return states_no_window or "use_sliding_window" in keys_in_files(family)


def _has_window(values: Mapping[str, Any]) -> bool:
    """Return whether a file states a window, and does not switch it off."""
    is_off = values.get("use_sliding_window") is False
    return values.get("sliding_window") is not None and not is_off


def _lists_windows(values: Mapping[str, Any]) -> bool:
    """Return whether layer_types has layers with a window."""
    listed = values.get("layer_types")
    return isinstance(listed, list) and SLIDING_ATTENTION in listed


def _config_as(name: str, values: Mapping[str, Any], has_head: bool) -> LlamaConfig:
    """Return the configuration that a config.json states if its model is one of a family.

    Raises:
        InputRefused: a required key is missing, or the family refuses a value.
    """
    family = FAMILIES[name]
    for key in _required(family, values):
        if values.get(key) is None:
            raise InputRefused(f"the key {key} is missing, whose default is not known")
    stated = {key: value for key, value in values.items() if value is not None}
    if "layer_types" not in family.optional_keys:
        stated.pop("layer_types", None)  # all layers are full attention
    return LlamaConfig.from_hf(_with_parts_off(family, stated, has_head) | {"model_type": name})


def _rotary_tables(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tables of rotary positions that are read.

    If there is a `rope_scaling`, `rope_parameters` is read only if it has a table for each kind of layer.
    """
    tables = [values[name] for name in _ROTARY_TABLES if isinstance(values.get(name), dict)]
    if not values.get("rope_scaling"):
        return tables
    return [table for table in tables if table is values["rope_scaling"] or _is_nested(table)]


def _is_nested(table: Mapping[str, Any]) -> bool:
    """Return whether a table of rotary positions has a table for each kind of layer."""
    return any(isinstance(each, dict) for each in table.values())


def _inner_tables(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tables of rotary positions that are for one kind of layer each."""
    tables = _rotary_tables(values)
    return [each for table in tables for each in table.values() if isinstance(each, dict)]


def _states_both_bases(values: Mapping[str, Any]) -> bool:
    """Return whether there is a base for layers with a window, and one for the others."""
    inner_tables = _inner_tables(values)
    return len(inner_tables) == 2 and all("rope_theta" in each for each in inner_tables)


def _required(family: Family, values: Mapping[str, Any]) -> list[str]:
    """Return the keys that a file must have if its model is one of a family."""
    keys = [
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
        "rms_norm_eps",
        family.activation[0],
    ]
    tables = _rotary_tables(values)
    if not any("rope_theta" in table for table in (*tables, *_inner_tables(values))):
        keys.append("rope_theta")
    is_scaled = any(
        table.get("rope_type", table.get("type", "default")) != "default" for table in tables
    )
    if is_scaled and _ORIGINAL_LENGTH in family.defaults:
        keys.append(_ORIGINAL_LENGTH)
    if _lists_windows(values) and family.default_local_theta is not None:
        # Layers with a window have a base of their own.
        if not _states_both_bases(values):
            keys.append(_LOCAL_BASE)
    # Without layer_types, nothing says which layers have the window.
    if _has_window(values):
        keys.append("layer_types")
    if not family.other_layers.attends:
        keys += ["layer_types", *family.other_layers.size_keys]
    if family.expert_width_key:
        keys.append("num_experts_per_tok")
        if not family.always_norm_topk_prob:
            keys.append(_NORMALISED)
    if family.own_keys is not None:
        keys = [key for key in keys if key not in family.own_keys.NOT_IN_FILES]
        keys += family.own_keys.REQUIRED
    return keys


def _with_parts_off(family: Family, stated: dict[str, Any], has_head: bool) -> dict[str, Any]:
    """Return the content of a config.json in which parts without a key are off.

    Every key for which the family has a default gets the file's value, or a value that turns its part off.

    Args:
        family: the family.
        stated: the keys of the file that are not null.
        has_head: whether the weights have an output head.
    """
    for key in ("hidden_size", "num_attention_heads", "max_position_embeddings"):
        check_positive_integer(key, stated[key])
    layers = layer_count(stated)
    values: dict[str, Any] = dict.fromkeys(family.defaults)
    values["tie_word_embeddings"] = not has_head
    if family.expert_width_key != "intermediate_size":
        # A family with a default for this key has a mixture in each layer, whose width is another key. So
        # the key is not used, and may keep the family's default.
        values.pop("intermediate_size", None)
    if _ORIGINAL_LENGTH in values:
        values[_ORIGINAL_LENGTH] = stated["max_position_embeddings"]
    if "rope_parameters" in values:
        values["rope_parameters"] = {}
    if "attention_multiplier" in values:
        head_dim = stated.get("head_dim", stated["hidden_size"] / stated["num_attention_heads"])
        check_positive_number("head_dim", head_dim)
        values["attention_multiplier"] = head_dim**-0.5
    if "layer_types" in keys_in_files(family):
        values["layer_types"] = [FULL_ATTENTION] * layers
    if "no_rope_layers" in family.optional_keys:
        values["no_rope_layers"] = [1] * layers
    values |= stated
    if _lists_windows(values):
        values["use_sliding_window"] = True
    return values
