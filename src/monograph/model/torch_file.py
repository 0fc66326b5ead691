"""Read a Llama from a file of `torch.save`, which has weights but no configuration.

A. Tam's article "Pretraining a Llama Model on Your Local GPU" writes such a file. It has a state dict,
alone or under the key "model". The names of the decoder's tensors begin with "base_model.", and the
rotary tables are buffers.

Sizes are read from the tensors. The number of heads follows from the rotary tables. If there are none,
it is the user's setting in the section [model]. If there is no setting either, it is that of the
preset llama-179m, provided that the weights have its shape. Everything else is what the settings in
[model] say, or its default.
"""

import math
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from monograph.errors import InputRefused, MonographError
from monograph.model import hub
from monograph.model.config import LlamaConfig
from monograph.model.rope import cos_sin
from monograph.storage.reading import open_input, readable

# Keys under which checkpoints keep the weights, next to the optimizer's state.
_WEIGHTS_KEYS = ("model", "model_state_dict", "state_dict")
# The prefixes of names that come from torch.compile, DistributedDataParallel and the article.
_PREFIX = re.compile(r"^(?:_orig_mod\.|module\.)*(?:base_model\.|model\.)?")
_ROTARY = re.compile(r"model\.rotary_emb\.(cos|sin|inv_freq)")
# The largest accepted error of a number in a rotary table. In a table in bf16, errors are at most 2^-9. In a
# table of another base, or in one that was never computed, they are about 1.
_TABLE_ERROR = 0.01
# torch.save writes a ZIP file. It ends with three records that describe the list of its entries: the
# ZIP64 end record, its locator and the plain end record.
_ZIP64_END_BYTES = 56
_LOCATOR_BYTES = 20
_PLAIN_END_BYTES = 22
MAX_LISTED_BYTES = 1 << 24  # the largest list of entries, which zipfile reads as a whole


def read(path: Path, settings: Mapping[str, Any]) -> tuple[LlamaConfig, dict[str, Tensor]]:
    """Return the configuration of the model in a file, and its weights.

    The weights are memory-mapped, and have their Hugging Face names. Nothing but tensors is
    unpickled.

    Args:
        path: the file.
        settings: the values of `LlamaConfig` that the user gave. They must agree with the tensors.

    Raises:
        InputRefused: there is no such file, or it does not have the weights of a Llama, or a size
            is wrong or unknown.
    """
    state = _state_dict(path)
    weights = {name: tensor for name, tensor in state.items() if not _ROTARY.fullmatch(name)}
    config = _config(state, path, settings)
    # The configuration is made from some of the tensors, so errors call these "the other tensors".
    hub.check_tensors(weights, config, path, source="the other tensors")
    _check_rotary(state, config, path)
    return config, weights


def _state_dict(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file by their Hugging Face names."""
    try:
        with readable(path):
            _check_archive(path)
            loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except FileNotFoundError:
        raise InputRefused(f"{path}: no such file; it is looked for from {Path.cwd()}") from None
    except MonographError:  # an error of `_check_archive` or `readable`, whose message is for users
        raise
    except Exception as error:  # The unpickler may raise anything for a damaged file.
        lines = str(error).splitlines()
        first_line = lines[0][:100] if lines else ""
        raise InputRefused(
            f"{path}: not weights that torch.save wrote ({type(error).__name__}: {first_line}); "
            "save model.state_dict() alone"
        ) from None
    if isinstance(loaded, dict):
        loaded = next((loaded[key] for key in _WEIGHTS_KEYS if key in loaded), loaded)
    if not isinstance(loaded, dict) or not all(isinstance(name, str) for name in loaded):
        raise InputRefused(f"{path}: holds no state dict; save model.state_dict()")
    state = {}
    for name, tensor in loaded.items():
        is_plain = (
            isinstance(tensor, Tensor) and tensor.layout == torch.strided and not tensor.is_meta
        )
        # A tensor with a stride of 0 can be larger than its storage.
        if not is_plain or tensor.nbytes > tensor.untyped_storage().nbytes():
            raise InputRefused(
                f"{path}: {name} is not a plain tensor, all of whose elements are in the file"
            )
        bare_name = _PREFIX.sub("", name)
        if bare_name.startswith("lm_head."):
            state[bare_name] = tensor
        else:
            state[f"model.{bare_name}"] = tensor
    return state


def _check_archive(path: Path) -> None:
    """Check the sizes in a ZIP file before torch reads it.

    torch would allocate as many bytes as the file claims. torch.save does not compress entries, so
    no entry is larger than the file.

    Raises:
        InputRefused: an entry is compressed, or larger than the file.
        BadZipFile: the file is not a ZIP file, or its list of entries is too long.
    """
    with open_input(path) as file:
        end_bytes = _ZIP64_END_BYTES + _LOCATOR_BYTES + _PLAIN_END_BYTES
        file.seek(max(0, path.stat().st_size - end_bytes))
        # If the file is shorter than the three records, zeros are put in front of what was read.
        end = file.read(end_bytes).rjust(end_bytes, b"\0")
        zip64_end = end[:_ZIP64_END_BYTES]
        locator = end[_ZIP64_END_BYTES:-_PLAIN_END_BYTES]
        plain_end = end[-_PLAIN_END_BYTES:]
        # Both end records have the length of the list. If there is a locator, there is a ZIP64 end
        # record, and its length counts.
        if locator.startswith(b"PK\6\7"):
            listed_bytes = int.from_bytes(zip64_end[40:48], "little")
        else:
            listed_bytes = int.from_bytes(plain_end[12:16], "little")
        if not plain_end.startswith(b"PK\5\6") or listed_bytes > MAX_LISTED_BYTES:
            raise zipfile.BadZipFile(
                "not an archive, or one of more entries than a model has tensors"
            )
        for entry in zipfile.ZipFile(file).infolist():
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > path.stat().st_size:
                raise InputRefused(
                    f"{path}: {entry.filename!r} is compressed or larger than the file: not of torch.save"
                )


def _config(state: Mapping[str, Tensor], path: Path, settings: Mapping[str, Any]) -> LlamaConfig:
    """Return the configuration that the tensors and the user's settings determine.

    Raises:
        InputRefused: a tensor is missing, or a size is unknown, or not that of the tensors.
    """

    def shape(name: str) -> torch.Size:
        """Return the shape of a matrix, which must be there."""
        if name not in state or state[name].ndim != 2 or not state[name].numel():
            raise InputRefused(
                f"{path}: holds no matrix {name}, so it is not the state dict of a Llama"
            )
        return state[name].shape

    layer_matches = [re.match(r"model\.layers\.(\d+)\.", name) for name in state]
    layer_numbers = {match[1] for match in layer_matches if match}
    vocab_size, hidden_size = shape("model.embed_tokens.weight")
    sizes: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": shape("model.layers.0.mlp.gate_proj.weight")[0],
        "num_hidden_layers": len(layer_numbers),
    }
    # The rows of these two matrices belong to all heads together.
    query_size = shape("model.layers.0.self_attn.q_proj.weight")[0]
    key_size = shape("model.layers.0.self_attn.k_proj.weight")[0]
    if "model.rotary_emb.cos" in state:
        sizes["max_position_embeddings"], head_dim = shape("model.rotary_emb.cos")
        # If the user gives a rope_theta, it replaces this one, and `_check_rotary` compares it with the
        # table. The base is not in `sizes`, because the loop below would refuse the user's value for a
        # rounding error.
        settings = {"rope_theta": _rope_theta(state["model.rotary_emb.cos"]), **settings}
    else:
        head_dim = _head_dim(sizes, query_size, path, settings)
    sizes["num_attention_heads"] = query_size // head_dim
    sizes["num_key_value_heads"] = key_size // head_dim
    if "lm_head.weight" not in state and not settings.get("tie_word_embeddings"):
        raise InputRefused(
            f"{path}: there is no lm_head.weight: save the whole model's state_dict(), "
            "or give model.tie_word_embeddings=true if its head is the embedding"
        )
    # The rotary table may be longer or shorter than the texts that the user wants.
    for key in (sizes.keys() & settings.keys()) - {"max_position_embeddings"}:
        if settings[key] != sizes[key]:
            raise InputRefused(
                f"model.{key} = {settings[key]}, but the weights in {path} have {sizes[key]}"
            )
    return LlamaConfig(**{**sizes, "head_dim": head_dim, **settings})


def _head_dim(
    sizes: Mapping[str, Any], query_size: int, path: Path, settings: Mapping[str, Any]
) -> int:
    """Return the width of a head of a model without a rotary table.

    The width follows from the user's number of heads. Without such a number, it is that of the
    preset llama-179m, if the weights have its shape.

    Args:
        sizes: the sizes that the tensors show.
        query_size: the width of the queries of all heads.
        path: the file, for errors.
        settings: the values of `LlamaConfig` that the user gave.

    Raises:
        InputRefused: the user gives no number, and the weights do not have the preset's shape.
    """
    heads = settings.get("num_attention_heads")
    if heads:
        # At least 1, because the caller divides by the width. `hub.check_tensors` refuses a number
        # of heads that does not fit the tensors.
        return max(1, query_size // int(heads))
    preset = LlamaConfig.preset("llama-179m")
    has_preset_sizes = all(
        sizes[key] == getattr(preset, key)
        for key in ("hidden_size", "intermediate_size", "num_hidden_layers")
    )
    if has_preset_sizes and query_size == preset.hidden_size:
        return preset.head_dim
    raise InputRefused(
        f"{path}: its tensors do not show how many heads there are: give model.num_attention_heads"
    )


def _rope_theta(cos_TE: Tensor) -> float:
    """Return the base theta of a rotary table, or the default if the table does not show it.

    cos_TE[1, 1] is the cosine of the second frequency, theta ^ (-2 / E). The table is exact to about
    six digits, so rounding theta to four digits recovers the round number that was meant, such as
    10000 or 500000. `_check_rotary` then compares the whole table.

    Shapes: T positions, E width of a head.
    """
    if min(cos_TE.shape) < 2 or cos_TE.shape[1] < 4:
        return LlamaConfig.rope_theta
    cosine = float(cos_TE[1, 1])
    if not 0 < cosine < 1:
        return LlamaConfig.rope_theta
    theta = math.acos(cosine) ** (-cos_TE.shape[1] / 2)
    return float(f"{theta:.4g}")


def _check_rotary(state: Mapping[str, Tensor], config: LlamaConfig, path: Path) -> None:
    """Refuse weights whose rotary tables differ from those of the configuration.

    Shapes: B = 1 row, T positions, F half the width of a head.
    """
    if "model.rotary_emb.cos" not in state:
        return
    positions_BT = torch.arange(len(state["model.rotary_emb.cos"]))[None]
    half_tables = cos_sin(positions_BT, config, torch.float32)
    for name, half_B1TF in zip(("cos", "sin"), half_tables, strict=True):
        stored = state.get(f"model.rotary_emb.{name}")
        # As in transformers, a row of the file's table is the half table's row twice.
        expected = torch.cat([half_B1TF[0, 0]] * 2, dim=-1)
        is_equal = (
            stored is not None
            and stored.shape == expected.shape
            and bool(((stored - expected).abs() < _TABLE_ERROR).all())
        )
        if not is_equal:
            raise InputRefused(
                f"{path}: rotary_emb.{name} is not that of rope_theta = {config.rope_theta:g}, so the model would "
                "compute something else here: save the model that was trained"
            )
