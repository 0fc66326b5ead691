"""Take the text model out of the folder of a model that sees pictures."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from monograph.errors import InputRefused
from monograph.model.files import Stored

# Of a text model these count where both halves of config.json say something.
_OUTER = ("bos_token_id", "eos_token_id", "pad_token_id", "quantization_config")


class Wrapped(NamedTuple):
    """How a folder holds a text model.

    Attributes:
        text: its model_type.
        begins: how names of its tensors begin, and how they begin in a folder of its own.
        others: how names of all other tensors begin.
        defaults: transformers' defaults for keys that a text model of its own must have.
        ties: transformers' default for tie_word_embeddings, which is read outside of the text model's part.
    """

    text: str
    begins: Mapping[str, str]
    others: tuple[str, ...]
    defaults: Mapping[str, int] = {}
    ties: bool = False


_QWEN = {"model.language_model.": "model."}, ("model.visual.",)
WRAPPED = {
    "qwen3_5": Wrapped("qwen3_5_text", *_QWEN),
    "qwen3_5_moe": Wrapped("qwen3_5_moe_text", *_QWEN),
    "gemma3": Wrapped(
        "gemma3_text",
        {"language_model.model.": "model.", "language_model.lm_head.": "lm_head.", "model.language_model.": "model."},
        ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
        {"vocab_size": 262_208, "hidden_size": 2304, "num_attention_heads": 8},
        ties=True,
    ),
}
# Layers that predict several tokens at once, which transformers leaves out, too; and the models that have them.
_PREDICTION, _PREDICTING = "mtp.", ("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")


def is_wrapped(values: Mapping[str, Any]) -> bool:
    """Return whether a config.json is of a model that holds a text model."""
    return str(values.get("model_type")) in WRAPPED


def text_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the content of a text model's config.json from that of a model that holds it, or the same content.

    Raises:
        InputRefused: the text model's part is missing, or is of another kind.
    """
    if (its := WRAPPED.get(str(values.get("model_type")))) is None:
        return values
    inner = values.get("text_config")
    if not isinstance(inner, dict) or inner.get("model_type", its.text) != its.text:
        raise InputRefused(f"text_config = {inner!r}: expected a table with model_type = {its.text!r}")
    if (ties := values.get("tie_word_embeddings", its.ties)) is None:
        raise InputRefused("tie_word_embeddings = null: expected true or false")
    outer = {key: values[key] for key in _OUTER if values.get(key) is not None}
    return {**its.defaults, **inner, **outer, "model_type": its.text, "tie_word_embeddings": ties}


def text_tensors(stored: Mapping[str, Stored], model_type: object) -> tuple[dict[str, Stored], list[str]]:
    """Return the text model's tensors by their own names, and the beginnings of the names of those left out."""
    its = WRAPPED.get(str(model_type), Wrapped("", {}, ()))
    others = (*its.others, _PREDICTION) if model_type in _PREDICTING else its.others
    found, left_out = dict[str, Stored](), list[str]()
    for name, tensor in stored.items():
        if other := next((begin for begin in others if name.startswith(begin)), None):
            left_out.append(other)
            continue
        begin = next((begin for begin in its.begins if name.startswith(begin)), "")
        own = its.begins.get(begin, "") + name.removeprefix(begin)
        if own in found:
            raise InputRefused(f"{tensor.path}: {name} and {found[own].known_as} are one tensor of the text model")
        found[own] = tensor._replace(known_as=name)
    return found, sorted(set(left_out))
