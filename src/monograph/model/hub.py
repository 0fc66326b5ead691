"""Read and write a model's Hugging Face folder: config.json, safetensors weights (one file or
shards), tokenizer files.

Weights are read only from safetensors and never unpickled. Before weights are read, all names and
shapes in the files' headers are compared with config.json. If the model also sees pictures, only its
text model is read.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from monograph.errors import InputRefused
from monograph.graph.lora_merge import plain_parameters
from monograph.graph.lora_targets import linear_layers
from monograph.graph.mmap_weights import kept_dtype, mapped, materialize_
from monograph.model import parameters, quantisation, quantised, sampling_defaults
from monograph.model.config import LlamaConfig
from monograph.model.families import FAMILIES
from monograph.model.files import (
    DTYPES,
    StoredTensor,
    has_weights,
    mapped_weights,
    new_folder,
    read_headers,
    write_json,
    write_no_extras,
    write_tensors,
)
from monograph.model.layouts import to_decoder_tensors, to_file_tensors
from monograph.model.llama import Llama
from monograph.model.mtp import MTP_PREFIX
from monograph.model.nearest import Nearest, find_nearest
from monograph.model.quantisation import Base, Quantisation
from monograph.storage.reading import exists, file_inside, is_folder, read_json
from monograph.text.tokenizer import Tokenizer

# The largest number of characters of an error about a file, because it may quote a text of any length.
MAX_ERROR_LENGTH = 400
# The size at which transformers 4 begins a new file.
SHARD_BYTES = 5_000_000_000

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_KEYS_OR_VALUES = re.compile(
    r"model\.layers\.(0|[1-9]\d{0,8})\.self_attn\.(?:k_proj|v_proj|k_norm|v_norm)\..+"
)
_LAYER = re.compile(r"model\.layers\.(0|[1-9]\d{0,8})\..+")
# A buffer in old exports. It is ignored, because it can be computed from config.json.
_ROTARY_BUFFER = re.compile(r".*\.rotary_emb\.inv_freq")

# Keys of a model that contains a text model. They are read from the top of its config.json if they are
# there, and otherwise from the table `text_config` in it.
_OUTER_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id", "quantization_config")


class _Wrapper(NamedTuple):
    """A kind of model that contains a text model, such as one that also sees pictures.

    Attributes:
        text_type: the text model's model_type if the config.json does not say it.
        prefixes: {prefix of the names of the text model's tensors in this folder: the prefix that
            replaces it in the folder of a text model alone}.
        other_prefixes: prefixes of the names of all other tensors.
        defaults: transformers' defaults for keys that the folder of a text model must have.
        tie_word_embeddings: transformers' default for this key, which is read from the top of the
            config.json.
        other_text_types: the other model_types that the text model may have.
    """

    text_type: str
    prefixes: Mapping[str, str]
    other_prefixes: tuple[str, ...]
    defaults: Mapping[str, int] = {}
    tie_word_embeddings: bool = False
    other_text_types: tuple[str, ...] = ()


_QWEN_PREFIXES = {"model.language_model.": "model."}
_QWEN_OTHER_PREFIXES = ("model.visual.",)
# Those of Gemma 3 and Mistral 3, which transformers has renamed in its version 5.
_LLAVA_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
_LLAVA_OTHER_PREFIXES = (
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
)
# By the model_type of the whole model.
_WRAPPERS = {
    "qwen3_5": _Wrapper("qwen3_5_text", _QWEN_PREFIXES, _QWEN_OTHER_PREFIXES),
    "qwen3_5_moe": _Wrapper("qwen3_5_moe_text", _QWEN_PREFIXES, _QWEN_OTHER_PREFIXES),
    "gemma3": _Wrapper(
        "gemma3_text",
        _LLAVA_PREFIXES,
        _LLAVA_OTHER_PREFIXES,
        {"vocab_size": 262_208, "hidden_size": 2304, "num_attention_heads": 8},
        tie_word_embeddings=True,
    ),
    "mistral3": _Wrapper(
        "mistral",
        _LLAVA_PREFIXES,
        _LLAVA_OTHER_PREFIXES,
        tie_word_embeddings=True,
        other_text_types=("ministral3",),
    ),
    "gemma4": _Wrapper(
        "gemma4_text",
        {"model.language_model.": "model."},
        (
            "model.vision_tower.",
            "model.audio_tower.",
            "model.embed_vision.",
            "model.embed_audio.",
        ),
        tie_word_embeddings=True,
    ),
}
# The key of config.json with the number of layers of a head for multi-token prediction.
_MTP_KEY = "mtp_num_hidden_layers"


def text_model_type(model_type: str) -> str:
    """Return the model_type that the text model in a model of this type has unless its config.json says
    another one; both may be the same.
    """
    wrapper = _WRAPPERS.get(model_type)
    return model_type if wrapper is None else wrapper.text_type


def _is_wrapped(values: Mapping[str, Any]) -> bool:
    """Return whether a config.json belongs to a model that contains a text model."""
    return str(values.get("model_type")) in _WRAPPERS


def sees_pictures(folder: str | Path) -> bool:
    """Return whether a folder's model contains a text model, and layers for pictures."""
    _, values = _config_json(Path(folder))
    return _is_wrapped(values)


def _text_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the content that the config.json of the text model alone would have.

    Raises:
        InputRefused: `text_config` is missing, or is of another kind of model.
    """
    wrapper = _WRAPPERS.get(str(values.get("model_type")))
    if wrapper is None:
        return values
    inner = values.get("text_config")
    text_types = (wrapper.text_type, *wrapper.other_text_types)
    if not isinstance(inner, dict) or inner.get("model_type", wrapper.text_type) not in text_types:
        expected = " or ".join(map(repr, text_types))
        raise InputRefused(
            f"text_config = {inner!r}: expected a table with model_type = {expected}"
        )
    is_tied = values.get("tie_word_embeddings", wrapper.tie_word_embeddings)
    if is_tied is None:
        raise InputRefused("tie_word_embeddings = null: expected true or false")
    outer = {key: values[key] for key in _OUTER_KEYS if values.get(key) is not None}
    text_values = {**wrapper.defaults, **inner, **outer}
    text_values["model_type"] = inner.get("model_type", wrapper.text_type)
    text_values["tie_word_embeddings"] = is_tied
    return text_values


def _text_tensors(
    stored: Mapping[str, StoredTensor], values: Mapping[str, Any], mtp: bool
) -> tuple[dict[str, StoredTensor], list[str]]:
    """Split a folder's tensors into those of the text model and the others.

    Args:
        stored: the folder's tensors.
        values: the content of the folder's config.json.
        mtp: whether the head for multi-token prediction belongs to the text model.

    Returns:
        The text model's tensors, by the names that they have in the folder of a text model alone.
        The prefixes of the names of the other tensors, sorted.
    """
    # In the folder of a text model alone, all tensors belong to it, and keep their names.
    no_wrapper = _Wrapper("", {}, ())
    model_type = str(values.get("model_type"))
    wrapper = _WRAPPERS.get(model_type, no_wrapper)
    other_prefixes = wrapper.other_prefixes
    family = FAMILIES.get(wrapper.text_type or model_type)
    may_have_mtp_layers = bool(values.get(_MTP_KEY)) or (
        family is not None and family.may_have_mtp_layers
    )
    if may_have_mtp_layers and not mtp:
        other_prefixes = (*other_prefixes, MTP_PREFIX)
    text_tensors = dict[str, StoredTensor]()
    seen_prefixes = set[str]()
    for name, tensor in stored.items():
        other_prefix = next((each for each in other_prefixes if name.startswith(each)), None)
        if other_prefix is not None:
            seen_prefixes.add(other_prefix)
            continue
        prefix = next((each for each in wrapper.prefixes if name.startswith(each)), "")
        text_name = wrapper.prefixes.get(prefix, "") + name.removeprefix(prefix)
        if text_name in text_tensors:
            raise InputRefused(
                f"{tensor.path}: {name} and {text_tensors[text_name].name_in_file} are one tensor of the text model"
            )
        text_tensors[text_name] = tensor._replace(name_in_file=name)
    return text_tensors, sorted(seen_prefixes)


def read_config(folder: str | Path, mtp: bool = False) -> LlamaConfig:
    """Return the configuration in a folder's config.json.

    If its model_type is unknown, the headers of the weights are read, too (`monograph.model.nearest`).

    Args:
        folder: the folder.
        mtp: whether the model shall have the folder's head for multi-token prediction.

    Raises:
        InputRefused: no such folder or file, a file that is not JSON, or a model that `Llama` does
            not compute. The message has the file and the key. Or the folder has no such head.
    """
    path, values = _config_json(Path(folder))
    try:
        config = _config_without_mtp(Path(folder), values)
        return replace(config, mtp_num_hidden_layers=1) if mtp else config
    except InputRefused as error:
        fault = str(error)
        if _is_wrapped(values) and not fault.startswith("text_config"):
            fault = f"text_config: {fault}"
        if len(fault) > MAX_ERROR_LENGTH:
            fault = f"{fault[: MAX_ERROR_LENGTH // 2]} ... {fault[-100:]}"
        raise InputRefused(f"{path}: {fault}") from None


def _config_without_mtp(folder: Path, values: Mapping[str, Any]) -> LlamaConfig:
    """Return the configuration of a folder's model without its head for multi-token prediction."""
    if _needs_nearest(folder, values):
        return _nearest(folder, values).config
    text_values = {key: value for key, value in _text_values(values).items() if key != _MTP_KEY}
    return LlamaConfig.from_hf(text_values)


def assumption(folder: str | Path) -> str:
    """Return a line that says which family computes a model of an unknown model_type.

    The line is "" if the model_type is known.
    """
    _, values = _config_json(Path(folder))
    if not _needs_nearest(Path(folder), values):
        return ""
    return _nearest(Path(folder), values).assumption


def _needs_nearest(folder: Path, values: Mapping[str, Any]) -> bool:
    """Return whether the nearest family has to be found: the folder's model_type is unknown, and the
    folder has weights to compare with those of the families.
    """
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        return False
    return text_model_type(model_type) not in FAMILIES and has_weights(folder)


def _nearest(folder: Path, values: Mapping[str, Any]) -> Nearest:
    """Return the family that computes a folder's model, whose model_type is unknown."""
    stored = read_headers(folder)

    def require_tensors(config: LlamaConfig) -> None:
        tensors = _decoder_tensors(stored, config, values)
        check_headers(tensors, config, folder)

    return find_nearest(values, _HEAD in stored, require_tensors)


def _decoder_tensors(
    stored: Mapping[str, StoredTensor], config: LlamaConfig, values: Mapping[str, Any]
) -> dict[str, StoredTensor]:
    """Return descriptions of a text model's tensors in the decoder's form.

    Args:
        stored: the tensors of the folder of the text model alone.
        config: the model's configuration.
        values: the content of the folder's config.json.
    """
    weights = {
        name: each
        for name, each in stored.items()
        if not _ROTARY_BUFFER.fullmatch(name) and not _is_of_taken_keys(name, config)
    }
    weights = quantised.fold(weights, _quantisation(values))
    return to_decoder_tensors(weights, config)


def _is_of_taken_keys(name: str, config: LlamaConfig) -> bool:
    """Return whether a tensor would make keys or values in a layer that takes them from another one.

    Files may have such tensors, which nothing reads, in transformers neither.
    """
    found = _KEYS_OR_VALUES.fullmatch(name) if config.num_kv_shared_layers else None
    if found is None:
        return False
    layer = int(found[1])
    return layer < config.num_hidden_layers and config.keys_layer(layer) != layer


def _quantisation(values: Mapping[str, Any]) -> Quantisation | None:
    """Return what a config.json, which was already checked, says of quantised weights."""
    return quantisation.read(_text_values(values), may_be_mxfp4=True)


def _config_json(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Return the path and the content of a folder's config.json."""
    if not is_folder(folder):
        fault = "a file" if exists(folder) else "no such folder"
        raise InputRefused(
            f"{folder}: {fault}; expected a Hugging Face model folder with config.json"
        )
    hint = "; expected the folder of a run or a Hugging Face model"
    path = file_inside(folder, "config.json", hint)
    return path, read_json(path)


def prefixes_left_out(folder: str | Path, mtp: bool = False) -> list[str]:
    """Return the prefixes of a folder's tensors that do not belong to its text model and are not read.

    Args:
        folder: the folder.
        mtp: whether the head for multi-token prediction is read.
    """
    headers = read_headers(Path(folder))
    _, values = _config_json(Path(folder))
    _, prefixes = _text_tensors(headers, values, mtp)
    return prefixes


def read_checked_headers(
    folder: str | Path, config: LlamaConfig | None = None, mtp: bool = False
) -> tuple[LlamaConfig, dict[str, StoredTensor]]:
    """Return a folder's configuration, and the descriptions of its tensors in the decoder's form.

    The names, shapes and dtypes of the tensors are compared with the configuration.

    Args:
        folder: as in `mapped_model`.
        config: the folder's configuration; None: it is read from the folder.
        mtp: as in `mapped_model`, if the configuration is not given.

    Raises:
        InputRefused: see `mapped_model`.
    """
    config = config or read_config(folder, mtp)
    headers = read_headers(Path(folder))
    _, values = _config_json(Path(folder))
    has_head = bool(config.mtp_num_hidden_layers)
    if has_head and not any(name.startswith(MTP_PREFIX) for name in headers):
        raise InputRefused(
            f"{folder}: it has no {MTP_PREFIX}* tensors, so no head for multi-token prediction: do not ask for it, "
            "or take another folder"
        )
    stored, _ = _text_tensors(headers, values, has_head)
    stored = _decoder_tensors(stored, config, values)
    check_headers(stored, config, Path(folder))
    return config, stored


class FewBits(NamedTuple):
    """In which form a folder has weights in few bits.

    Attributes:
        label: the form's name.
        base: the value of lora.base that keeps the weights' codes; "auto": there is none.
        dtype: the dtype to which weights are dequantised, by its name in safetensors.
        dense: the names of linear layers that the folder does not have in few bits.
    """

    label: str
    base: Base
    dtype: str
    dense: tuple[str, ...]


def read_few_bits(folder: str | Path, config: LlamaConfig | None = None) -> FewBits | None:
    """Return in which form a folder has weights in few bits; None if it has none, or only MXFP4.

    Args:
        folder: as in `mapped_model`.
        config: the folder's configuration; None: it is read from the folder.

    Raises:
        InputRefused: see `mapped_model`.
    """
    config = config or read_config(folder)
    _, values = _config_json(Path(folder))
    form = _quantisation(values)
    if form is None or form.format == "mxfp4":
        return None
    _, stored = read_checked_headers(folder, config)
    with torch.device("meta"):  # shapes without memory
        layers = linear_layers(Llama(config))
    dense = tuple(name for name in layers if not stored[f"{name}.weight"].pieces)
    dtypes = [tensor.dtype for tensor in stored.values() if tensor.pieces]
    return FewBits(form.label, form.base, dtypes[0] if dtypes else "BF16", dense)


def load_model(folder: str | Path, dtype: torch.dtype | None = None, mtp: bool = False) -> Llama:
    """Return the model of a Hugging Face folder, on the CPU.

    Besides the model, one tensor at a time is in memory. Arguments and errors are those of
    `mapped_model`.
    """
    return materialize_(mapped_model(folder, dtype, mtp))


def mapped_model(folder: str | Path, dtype: torch.dtype | None = None, mtp: bool = False) -> Llama:
    """Return the model of a folder, with weights that are mapped to their files
    (`monograph.graph.mmap_weights`).

    Before the model is built, the headers of the weight files are compared with config.json.

    Args:
        folder: a folder with config.json and model.safetensors, or with config.json and the shards
            that model.safetensors.index.json lists.
        dtype: dtype of the weights; None: the stored dtype, which must be the same for all weights.
        mtp: whether the model shall have the folder's head for multi-token prediction.

    Raises:
        InputRefused: a damaged, missing, superfluous or unsupported file, tensor or value, which the
            message names.
    """
    folder = Path(folder)
    config, stored = read_checked_headers(folder, mtp=mtp)
    stored_dtypes = sorted({tensor.dtype for tensor in stored.values()})
    if dtype is None and len(stored_dtypes) > 1:
        raise InputRefused(
            f"{folder}: the weights are stored as {' and '.join(stored_dtypes)}; say which dtype to load"
        )
    if dtype is None:
        dtype = DTYPES[stored_dtypes[0]]
    state = {name: mapped(tensor, dtype) for name, tensor in mapped_weights(stored)}
    model = assemble(config, state, folder)
    model.sampling = sampling_defaults.read(folder)
    return model


def assemble(config: LlamaConfig, state: dict[str, Tensor], origin: Path) -> Llama:
    """Return a model whose parameters are the given tensors, without copies.

    Args:
        config: the shape.
        state: the tensors, whose names and shapes are already checked.
        origin: the path for error messages.

    Raises:
        InputRefused: a tied head that differs from the embedding.
    """
    if config.tie_word_embeddings:
        embedding = state[_EMBEDDING]
        if not torch.equal(state.get(_HEAD, embedding), embedding):
            raise InputRefused(
                f"{origin}: lm_head.weight differs from model.embed_tokens.weight although tie_word_embeddings = true; "
                "set it to false if the head is meant to be separate"
            )
        state[_HEAD] = embedding
    # On the meta device, initial weights are neither allocated nor sampled. `state` takes their place.
    with torch.device("meta"):
        model = Llama(config)
    model.load_state_dict(state, assign=True)
    # `assign` made two parameters of the tied tensor. The model must have one, used twice.
    model.tie_weights()
    return model


def tokenizer_file(folder: str | Path) -> Path | None:
    """Return the path of a folder's tokenizer.json, or None."""
    folder = Path(folder)
    return file_inside(folder, "tokenizer.json") if exists(folder / "tokenizer.json") else None


def save_model(
    model: Llama,
    folder: str | Path,
    tokenizer: Tokenizer | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    write_extras: Callable[[Path], None] = write_no_extras,
) -> None:
    """Write a folder with configuration, weights and tokenizer, for transformers and `load_model`.

    Weights are written in their own dtype, and adapters are merged into them. A tied head is written once,
    as the embedding. The model's defaults for sampling are written to generation_config.json. Files get
    the permissions that the umask gives. Everything is written and synced in a hidden folder next to the
    target, which is then renamed, so that the target is complete or absent. Besides the model, one tensor
    at a time is in memory.

    Args:
        model: the model.
        folder: the folder to create. An empty folder may exist.
        tokenizer: the tokenizer, which is written with its chat template and other files. Its bos and
            eos ids are used if the model's configuration has none. None: no tokenizer is written.
        max_shard_bytes: the size above which weights are split into shards with an index.
        write_extras: called with the hidden folder, to write further files before the folder gets
            its name.

    Raises:
        InputRefused: the folder is not empty, or cannot be written.
        DiskFull: there is no space left. Nothing of this export remains.
    """
    config = model.config.to_hf()
    dtype = kept_dtype(model.model.embed_tokens.weight)
    config["torch_dtype"] = str(dtype).removeprefix("torch.")
    if tokenizer is not None:
        if config["bos_token_id"] is None:
            config["bos_token_id"] = tokenizer.bos_id
        if config["eos_token_id"] is None:
            config["eos_token_id"] = tokenizer.eos_id
    with new_folder(Path(folder)) as new:
        write_json(new / "config.json", config)
        generation = _generation_config(config, model.config.eos_token_ids, tokenizer)
        if model.sampling:
            # With this key, transformers may ignore this file and read all values from config.json.
            generation.pop("_from_model_config", None)
        write_json(new / sampling_defaults.FILE, {**generation, **model.sampling})
        if tokenizer is not None:
            tokenizer.save(new / "tokenizer.json")
            write_json(
                new / "tokenizer_config.json", _tokenizer_config(new, tokenizer, model.config)
            )
            if template := tokenizer.config.template:
                (new / "chat_template.jinja").write_text(template.source, encoding="utf-8")
            for name, source in tokenizer.config.named_template_files().items():
                (new / name).parent.mkdir(exist_ok=True)
                (new / name).write_text(source, encoding="utf-8")
        write_tensors(new, to_file_tensors(plain_parameters(model), model.config), max_shard_bytes)
        write_extras(new)


def _generation_config(
    config: dict[str, Any], model_ends: Collection[int], tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """Return the keys of generation_config.json about the ids that begin and end a text.

    Usually the ids are the same as in config.json, and `_from_model_config` says so. In two cases
    eos_token_id is a list of all ids that end a text: if the tokenizer has a list of such ids, or if its
    eos id is not one of the model's.

    Args:
        config: the content of config.json.
        model_ends: the ids that end a text by the model's configuration.
        tokenizer: the tokenizer, or None.
    """
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id") if config[key] is not None}
    if tokenizer is not None:
        tokenizer_ends = tokenizer.config.stops
        lacks_eos = bool(model_ends) and tokenizer.eos_id not in model_ends
        if tokenizer_ends or lacks_eos:
            # The model was trained on texts that may end with any of these ids.
            other_ends = tokenizer_ends or model_ends
            ends = (*other_ends, tokenizer.eos_id)
            ids["eos_token_id"] = list(dict.fromkeys(ends))  # each once
            return ids
    return {"_from_model_config": True, **ids}


def _tokenizer_config(folder: Path, tokenizer: Tokenizer, config: LlamaConfig) -> dict[str, Any]:
    """Return the content of tokenizer_config.json: settings, and the texts of special tokens.

    Args:
        folder: the folder, with tokenizer.json.
        tokenizer: the tokenizer.
        config: the model's configuration.
    """
    content = read_json(folder / "tokenizer.json")
    text_of = {id_: text for text, id_ in content["model"]["vocab"].items()}
    text_of |= {token["id"]: token["content"] for token in content["added_tokens"]}
    tokens = tokenizer.config.tokens
    if not tokens:
        tokens = {
            "bos_token": text_of[tokenizer.bos_id],
            "eos_token": text_of[tokenizer.eos_id],
        }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        # Without this key, transformers 4 would set it to false in tokenizer.json.
        "add_prefix_space": tokenizer.inserts_space,
        **tokens,
    }


def check_tensors(
    tensors: Mapping[str, Tensor], config: LlamaConfig, path: Path, source: str
) -> None:
    """Compare tensors with those that a configuration requires, as `check_headers` does."""
    dtype_names = {dtype: name for name, dtype in DTYPES.items()}
    stored = dict[str, StoredTensor]()
    for name, tensor in tensors.items():
        # A dtype without a name in safetensors is refused below by torch's name.
        dtype_name = dtype_names.get(tensor.dtype, str(tensor.dtype))
        stored[name] = StoredTensor(path, tuple(tensor.shape), dtype_name)
    check_headers(stored, config, path, source)


def check_headers(
    stored: dict[str, StoredTensor],
    config: LlamaConfig,
    origin: Path,
    source: str = "config.json",
) -> None:
    """Compare descriptions of tensors with those that a configuration requires.

    Args:
        stored: the tensors.
        config: the configuration.
        origin: the file or folder of the tensors, for messages.
        source: where the sizes of the configuration are from, for messages.

    Raises:
        InputRefused: a missing or unexpected tensor, a wrong shape or an unsupported dtype. The
            message has the tensor, the shapes and the keys.
    """
    # The number of layers is checked first, so that a huge number in config.json costs neither time
    # nor memory.
    layers = len({match[1] for match in map(_LAYER.fullmatch, stored) if match})
    if layers != config.num_hidden_layers:
        raise InputRefused(
            f"{origin}: num_hidden_layers = {config.num_hidden_layers} in {source}, the weights have {layers} layers"
        )
    shapes = dict(parameters.parameter_shapes(config))
    # A file of a model with a tied head may have the head, too. `assemble` compares it with the embedding.
    has_tied_head = config.tie_word_embeddings and _HEAD in stored
    if has_tied_head:
        shapes[_HEAD] = shapes[_EMBEDDING]
    missing = shapes.keys() - stored.keys()
    unexpected = stored.keys() - shapes.keys()
    for kind, names in (("missing", missing), ("unexpected", unexpected)):
        if names:
            raise InputRefused(
                f"{origin}: {len(names)} {kind} in the weights of a {config.model_type}, the first is {min(names)!r}"
            )
    for name, tensor in stored.items():
        expected = shapes[name]
        if tensor.shape != expected:
            # A tied head is not a separate parameter, so its axes are those of the embedding.
            parameter = _EMBEDDING if has_tied_head and name == _HEAD else name
            keys = ", ".join(parameters.axis_keys(config, parameter))
            raise InputRefused(
                f"{tensor.path}: {name} has shape {list(tensor.shape)}, expected {list(expected)} by {source} ({keys})"
            )
        if tensor.dtype not in DTYPES:
            raise InputRefused(
                f"{tensor.path}: {name} is stored as {tensor.dtype}, not as one of {', '.join(DTYPES)}"
            )
