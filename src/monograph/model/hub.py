"""Read and write a model's Hugging Face folder: config.json, safetensors weights (one file or
shards), tokenizer files.

Weights are read only from safetensors, never unpickled, and only after all names and shapes in the
files' headers have been compared with config.json. Out of the folder of a model that sees pictures
the text model is taken.
"""

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from monograph.errors import InputRefused
from monograph.graph.lora import plain_parameters
from monograph.graph.mmap_weights import kept_dtype, mapped, materialize_
from monograph.model import parameters, sampling_defaults
from monograph.model.config import LlamaConfig
from monograph.model.files import (
    DTYPES,
    Stored,
    mapped_weights,
    new_folder,
    nothing_beside,
    read_headers,
    write_json,
    write_tensors,
)
from monograph.model.layouts import in_decoder, in_files
from monograph.model.llama import Llama
from monograph.storage.reading import exists, inside, is_folder, read_json
from monograph.text.tokenizer import Tokenizer

# Of a text model these count where both halves of config.json say something.
_OUTER = ("bos_token_id", "eos_token_id", "pad_token_id", "quantization_config")


class _Wrapped(NamedTuple):
    """How a folder holds a text model.

    Attributes:
        text: its model_type.
        begins: how names of its tensors begin, and how they begin in a folder of its own.
        others: how names of all other tensors begin.
        defaults: transformers' defaults for keys that a text model of its own must have.
        ties: transformers' default for tie_word_embeddings, which is read outside of the text
            model's part.
    """

    text: str
    begins: Mapping[str, str]
    others: tuple[str, ...]
    defaults: Mapping[str, int] = {}
    ties: bool = False


_QWEN = {"model.language_model.": "model."}, ("model.visual.",)
_WRAPPED = {
    "qwen3_5": _Wrapped("qwen3_5_text", *_QWEN),
    "qwen3_5_moe": _Wrapped("qwen3_5_moe_text", *_QWEN),
    "gemma3": _Wrapped(
        "gemma3_text",
        {
            "language_model.model.": "model.",
            "language_model.lm_head.": "lm_head.",
            "model.language_model.": "model.",
        },
        (
            "vision_tower.",
            "multi_modal_projector.",
            "model.vision_tower.",
            "model.multi_modal_projector.",
        ),
        {"vocab_size": 262_208, "hidden_size": 2304, "num_attention_heads": 8},
        ties=True,
    ),
}
# Layers that predict several tokens at once, which transformers leaves out, too; and the models
# that have them.
_PREDICTION = "mtp."
_PREDICTING = ("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")


def _is_wrapped(values: Mapping[str, Any]) -> bool:
    """Return whether a config.json is of a model that holds a text model."""
    return str(values.get("model_type")) in _WRAPPED


def _text_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the content of a text model's config.json from that of a model that holds it, or the
    same content.

    Raises:
        InputRefused: the text model's part is missing, or is of another kind.
    """
    if (its := _WRAPPED.get(str(values.get("model_type")))) is None:
        return values
    inner = values.get("text_config")
    if not isinstance(inner, dict) or inner.get("model_type", its.text) != its.text:
        raise InputRefused(
            f"text_config = {inner!r}: expected a table with model_type = {its.text!r}"
        )
    if (ties := values.get("tie_word_embeddings", its.ties)) is None:
        raise InputRefused("tie_word_embeddings = null: expected true or false")
    outer = {key: values[key] for key in _OUTER if values.get(key) is not None}
    return {**its.defaults, **inner, **outer, "model_type": its.text, "tie_word_embeddings": ties}


def _text_tensors(
    stored: Mapping[str, Stored], model_type: object
) -> tuple[dict[str, Stored], list[str]]:
    """Return the text model's tensors by their own names, and the beginnings of the names of those
    left out.
    """
    its = _WRAPPED.get(str(model_type), _Wrapped("", {}, ()))
    others = (*its.others, _PREDICTION) if model_type in _PREDICTING else its.others
    found = dict[str, Stored]()
    left_out = list[str]()
    for name, tensor in stored.items():
        if other := next((begin for begin in others if name.startswith(begin)), None):
            left_out.append(other)
            continue
        begin = next((begin for begin in its.begins if name.startswith(begin)), "")
        own = its.begins.get(begin, "") + name.removeprefix(begin)
        if own in found:
            raise InputRefused(
                f"{tensor.path}: {name} and {found[own].known_as} are one tensor of the text model"
            )
        found[own] = tensor._replace(known_as=name)
    return found, sorted(set(left_out))


# Characters of an error message that quotes a file, whose text may have any length.
LONGEST_FAULT = 400
SHARD_BYTES = 5_000_000_000  # transformers 4 begins a new file at this size

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_LAYER = re.compile(r"model\.layers\.(0|[1-9]\d{0,8})\..+")
# A buffer in old exports, which follows from config.json.
_DERIVED = re.compile(r".*\.rotary_emb\.inv_freq")


def read_config(folder: str | Path) -> LlamaConfig:
    """Return the configuration in a folder's config.json.

    Raises:
        InputRefused: no such folder or file, no JSON, or a model that `Llama` does not compute; the
            message names file and key.
    """
    path, values = _config_json(Path(folder))
    try:
        return LlamaConfig.from_hf(_text_values(values))
    except InputRefused as error:
        fault = str(error)
        fault = (
            f"text_config: {fault}"
            if _is_wrapped(values) and not fault.startswith("text_config")
            else fault
        )
        shown = (
            fault
            if len(fault) <= LONGEST_FAULT
            else f"{fault[: LONGEST_FAULT // 2]} ... {fault[-100:]}"
        )
        raise InputRefused(f"{path}: {shown}") from None


def _config_json(folder: Path) -> tuple[Path, dict[str, Any]]:
    if not is_folder(folder):
        raise InputRefused(
            f"{folder}: no such folder; expected a Hugging Face model folder with config.json"
        )
    path = inside(folder, "config.json")
    return path, read_json(path)


def left_out(folder: str | Path) -> list[str]:
    """Return how the names of those tensors of a folder begin that are no part of its text model."""
    return _text_tensors(
        read_headers(Path(folder)), _config_json(Path(folder))[1].get("model_type")
    )[1]


def read_headers_of(
    folder: str | Path, config: LlamaConfig | None = None
) -> tuple[LlamaConfig, dict[str, Stored]]:
    """Return a folder's configuration and the headers of its tensors, which agree in name, shape
    and dtype.

    Args:
        folder: as in `mapped_model`.
        config: the folder's configuration, if it has been read.

    Raises:
        InputRefused: as `mapped_model`.
    """
    config = config or read_config(folder)
    stored, _ = _text_tensors(
        read_headers(Path(folder)), _config_json(Path(folder))[1].get("model_type")
    )
    stored = {name: tensor for name, tensor in stored.items() if not _DERIVED.fullmatch(name)}
    stored = in_decoder(stored, config)
    check_headers(stored, config, Path(folder))
    return config, stored


def load_model(folder: str | Path, dtype: torch.dtype | None = None) -> Llama:
    """Return the model of a Hugging Face folder, on the CPU.

    Besides the model, one tensor at a time is in memory. Arguments and errors are those of
    `mapped_model`.
    """
    return materialize_(mapped_model(folder, dtype))


def mapped_model(folder: str | Path, dtype: torch.dtype | None = None) -> Llama:
    """Return the model of a folder with its weights still in their files, mapped
    (`monograph.graph.mmap_weights`).

    Nothing is built before the headers of the weight files agree with config.json.

    Args:
        folder: a folder with config.json and model.safetensors, or the shards that
            model.safetensors.index.json lists.
        dtype: dtype of the weights; None: the stored one, which must then be the same for all.

    Raises:
        InputRefused: a damaged, missing, superfluous or unsupported file, tensor or value; the
            message names it.
    """
    folder = Path(folder)
    config, stored = read_headers_of(folder)
    kinds = sorted({tensor.dtype for tensor in stored.values()})
    if dtype is None and len(kinds) > 1:
        raise InputRefused(
            f"{folder}: the weights are stored as {' and '.join(kinds)}; say which dtype to load"
        )
    becomes = dtype or DTYPES[kinds[0]]
    model = assembled(
        config, {name: mapped(tensor, becomes) for name, tensor in mapped_weights(stored)}, folder
    )
    model.sampling = sampling_defaults.read(folder)
    return model


def assembled(config: LlamaConfig, state: dict[str, Tensor], origin: Path) -> Llama:
    """Return a model of the given tensors, which are not copied and whose names and shapes have
    been checked.

    Raises:
        InputRefused: a tied head that differs from the embedding.
    """
    if config.tie_word_embeddings:
        embedding = state["model.embed_tokens.weight"]
        if not torch.equal(state.get("lm_head.weight", embedding), embedding):
            raise InputRefused(
                f"{origin}: lm_head.weight differs from model.embed_tokens.weight although tie_word_embeddings = true; "
                "set it to false if the head is meant to be separate"
            )
        state["lm_head.weight"] = embedding
    # On the meta device no initial weights are drawn or allocated, which `state` would replace.
    with torch.device("meta"):
        model = Llama(config)
    model.load_state_dict(state, assign=True)
    model.tie_weights()  # `assign` made two parameters out of the one tensor
    return model


def tokenizer_file(folder: str | Path) -> Path | None:
    """Return the path of a folder's tokenizer.json, or None."""
    folder = Path(folder)
    return inside(folder, "tokenizer.json") if exists(folder / "tokenizer.json") else None


def save_model(
    model: Llama,
    folder: str | Path,
    tokenizer: Tokenizer | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    beside: Callable[[Path], None] = nothing_beside,
) -> None:
    """Write a folder that transformers and `load_model` can read: configuration, weights and, if
    given, the tokenizer.

    Everything is written and synced in a hidden folder next to the target, then renamed, so that
    the target is whole or absent. Files get the modes that the umask gives.

    Args:
        model: the model; its weights are written in their own dtype, a tied head once, adapters
            merged, and its defaults for sampling into generation_config.json. Besides the model,
            one tensor at a time is in memory.
        folder: the folder to create; it may exist if it is empty.
        tokenizer: a tokenizer, which is written with its chat template and other files; its bos and
            eos ids are used if the model's configuration has none.
        max_shard_bytes: weights above this size are split into shards with an index.
        beside: writes what belongs beside the model into the folder before it gets its name.

    Raises:
        InputRefused: the folder exists and holds something, or cannot be written.
        DiskFull: no space left; nothing of this export remains.
    """
    config = model.config.to_hf()
    dtype = kept_dtype(model.model.embed_tokens.weight)
    config["torch_dtype"] = str(dtype).removeprefix("torch.")
    if tokenizer is not None:
        for key, token in (("bos_token_id", tokenizer.bos_id), ("eos_token_id", tokenizer.eos_id)):
            config[key] = token if config[key] is None else config[key]
    with new_folder(Path(folder)) as new:
        write_json(new / "config.json", config)
        ends = _generation_config(config, model.config.ends, tokenizer)
        if model.sampling:
            # Else transformers may take all of it from config.json.
            ends.pop("_from_model_config", None)
        write_json(new / sampling_defaults.FILE, {**ends, **model.sampling})
        if tokenizer is not None:
            tokenizer.save(new / "tokenizer.json")
            write_json(
                new / "tokenizer_config.json", _tokenizer_config(new, tokenizer, model.config)
            )
            if template := tokenizer.config.template:
                (new / "chat_template.jinja").write_text(template.source, encoding="utf-8")
            for name, source in tokenizer.config.named_files().items():
                (new / name).parent.mkdir(exist_ok=True)
                (new / name).write_text(source, encoding="utf-8")
        write_tensors(new, in_files(plain_parameters(model), model.config), max_shard_bytes)
        beside(new)


def _generation_config(
    config: dict[str, Any], own: Collection[int], tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """Return generation_config.json: the ids that begin and end a text, of the model and of the
    tokenizer.
    """
    ends = {key: config[key] for key in ("bos_token_id", "eos_token_id") if config[key] is not None}
    if tokenizer is not None:
        listed = tokenizer.config.stops
        if listed or (own and tokenizer.eos_id not in own):  # each may end a training text
            return {
                **ends,
                "eos_token_id": list(dict.fromkeys((*(listed or own), tokenizer.eos_id))),
            }
    return {"_from_model_config": True, **ends}


def _tokenizer_config(folder: Path, tokenizer: Tokenizer, config: LlamaConfig) -> dict[str, Any]:
    """Return tokenizer_config.json: settings, and the texts of the tokens that begin and end a
    document.
    """
    content = read_json(folder / "tokenizer.json")
    text_of = {id_: text for text, id_ in content["model"]["vocab"].items()}
    text_of |= {token["id"]: token["content"] for token in content["added_tokens"]}
    ends = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        # Else transformers 4 would set it to false in tokenizer.json.
        "add_prefix_space": tokenizer.space_first,
        **(tokenizer.config.tokens or {key: text_of[id_] for key, id_ in ends.items()}),
    }


def check_tensors(
    tensors: Mapping[str, Tensor], config: LlamaConfig, path: Path, said_by: str
) -> None:
    """Compare tensors of a file or folder with those that a configuration requires; see
    `check_headers`.
    """
    names = {dtype: name for name, dtype in DTYPES.items()}
    stored = {
        name: Stored(path, tuple(t.shape), names.get(t.dtype, str(t.dtype)))
        for name, t in tensors.items()
    }
    check_headers(stored, config, path, said_by)


def check_headers(
    stored: dict[str, Stored], config: LlamaConfig, origin: Path, said_by: str = "config.json"
) -> None:
    """Compare headers of tensors with those that a configuration requires; messages call it
    `said_by`.

    Raises:
        InputRefused: a missing or unexpected tensor, a wrong shape or an unsupported dtype; the
            message names tensor, shapes and keys.
    """
    # The number of layers is checked first, so that a huge number in config.json costs neither time
    # nor memory.
    layers = len({match[1] for match in map(_LAYER.fullmatch, stored) if match})
    if layers != config.num_hidden_layers:
        raise InputRefused(
            f"{origin}: num_hidden_layers = {config.num_hidden_layers} in {said_by}, the weights have {layers} layers"
        )
    shapes = dict(parameters.shapes(config))
    tied = config.tie_word_embeddings and _HEAD in stored
    if tied:
        shapes[_HEAD] = shapes[_EMBEDDING]
    for kind, names in (
        ("missing", shapes.keys() - stored.keys()),
        ("unexpected", stored.keys() - shapes.keys()),
    ):
        if names:
            raise InputRefused(
                f"{origin}: {len(names)} {kind} in the weights of a {config.model_type}, the first is {min(names)!r}"
            )
    for name, tensor in stored.items():
        expected = shapes[name]
        if tensor.shape != expected:
            keys = ", ".join(
                parameters.keys_of(config, _EMBEDDING if tied and name == _HEAD else name)
            )
            raise InputRefused(
                f"{tensor.path}: {name} has shape {list(tensor.shape)}, expected {list(expected)} by {said_by} ({keys})"
            )
        if tensor.dtype not in DTYPES:
            raise InputRefused(
                f"{tensor.path}: {name} is stored as {tensor.dtype}, not as one of {', '.join(DTYPES)}"
            )
