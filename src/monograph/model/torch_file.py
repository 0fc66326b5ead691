"""Read a Llama from a file of `torch.save`, such as that of A. Tam's "Pretraining a Llama Model on
Your Local GPU".

The file holds a state dict, alone or under "model", with the decoder under "base_model." and the
rotary tables as buffers, but no configuration. Sizes are taken from the tensors, the number of
heads from the rotary tables, and all else from the keys of [model] or, for weights of its shape,
from the preset llama-179m.
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

# Where checkpoints keep the weights next to the optimizer.
_INSIDE = ("model", "model_state_dict", "state_dict")
# Prefixes of names by torch.compile, DistributedDataParallel and the article.
_PREFIX = re.compile(r"^(?:_orig_mod\.|module\.)*(?:base_model\.|model\.)?")
_ROTARY = re.compile(r"model\.rotary_emb\.(cos|sin|inv_freq)")
# A rotary table that was cast to bf16 is off by 2^-9; one of another base, or of uninitialised
# memory, by about 1.
_TABLE_ERROR = 0.01
# A ZIP file without a comment, as torch.save writes it, ends with the place and length of its list
# of entries.
_END_BYTES = 98
MOST_LISTED_BYTES = 1 << 24


def read(path: Path, sizes: Mapping[str, Any]) -> tuple[LlamaConfig, dict[str, Tensor]]:
    """Return the configuration of the model in a file, and its weights, still mapped, by their
    Hugging Face names.

    Only tensors are unpickled.

    Args:
        path: the file.
        sizes: keys of `LlamaConfig` that the user gave; they must agree with the tensors.

    Raises:
        InputRefused: no such file, no weights of a Llama, or a size that is wrong or unknown.
    """
    state = _read(path)
    weights = {name: tensor for name, tensor in state.items() if not _ROTARY.fullmatch(name)}
    config = _shape(state, path, sizes)
    hub.check_tensors(weights, config, path, "the other tensors")
    _check_rotary(state, config, path)
    return config, weights


def _read(path: Path) -> dict[str, Tensor]:
    try:
        with readable(path):
            _require_stored(path)
            loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except FileNotFoundError:
        raise InputRefused(f"{path}: no such file; it is looked for from {Path.cwd()}") from None
    except MonographError:
        raise
    except Exception as error:  # on a damaged file the unpickler may raise anything
        line = (str(error).splitlines() or [""])[0][:100]
        raise InputRefused(
            f"{path}: not weights that torch.save wrote ({type(error).__name__}: {line}); save model.state_dict() alone"
        ) from None
    if isinstance(loaded, dict):
        loaded = next((loaded[key] for key in _INSIDE if key in loaded), loaded)
    if not isinstance(loaded, dict) or not all(isinstance(name, str) for name in loaded):
        raise InputRefused(f"{path}: holds no state dict; save model.state_dict()")
    state = {}
    for name, tensor in loaded.items():
        plain = isinstance(tensor, Tensor) and tensor.layout == torch.strided and not tensor.is_meta
        if not plain or tensor.nbytes > tensor.untyped_storage().nbytes():
            raise InputRefused(f"{path}: {name} is no plain tensor that the file holds in full")
        inner = _PREFIX.sub("", name)
        state[inner if inner.startswith("lm_head.") else f"model.{inner}"] = tensor
    return state


def _require_stored(path: Path) -> None:
    """Refuse an archive whose entries are larger than the file: torch stores entries uncompressed."""
    with open_input(path) as file:
        file.seek(max(0, path.stat().st_size - _END_BYTES))
        end = file.read(_END_BYTES)
        # The length of the list of entries is in the ZIP64 end record if there is one, else in the
        # plain one.
        listed = end[-58:-50] if end[-42:-38] == b"PK\6\7" else end[-10:-6]
        if end[-22:-18] != b"PK\5\6" or int.from_bytes(listed, "little") > MOST_LISTED_BYTES:
            raise zipfile.BadZipFile(
                "not an archive, or one of more entries than a model has tensors"
            )
        for entry in zipfile.ZipFile(file).infolist():
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > path.stat().st_size:
                raise InputRefused(
                    f"{path}: {entry.filename!r} is compressed or larger than the file: not of torch.save"
                )


def _shape(state: Mapping[str, Tensor], path: Path, sizes: Mapping[str, Any]) -> LlamaConfig:
    def shape(name: str) -> torch.Size:
        if name not in state or state[name].ndim != 2 or not state[name].numel():
            raise InputRefused(
                f"{path}: holds no matrix {name}, so it is not the state dict of a Llama"
            )
        return state[name].shape

    layers = {
        match[1] for match in (re.match(r"model\.layers\.(\d+)\.", name) for name in state) if match
    }
    shown: dict[str, Any] = {
        "vocab_size": shape("model.embed_tokens.weight")[0],
        "hidden_size": shape("model.embed_tokens.weight")[1],
        "intermediate_size": shape("model.layers.0.mlp.gate_proj.weight")[0],
        "num_hidden_layers": len(layers),
    }
    queries, keys = (shape(f"model.layers.0.self_attn.{name}_proj.weight")[0] for name in "qk")
    if "model.rotary_emb.cos" in state:
        shown["max_position_embeddings"], head_dim = shape("model.rotary_emb.cos")
        sizes = {"rope_theta": _rope_theta(state["model.rotary_emb.cos"]), **sizes}
    else:
        head_dim = _head_dim(shown, queries, path, sizes)
    shown |= {"num_attention_heads": queries // head_dim, "num_key_value_heads": keys // head_dim}
    if "lm_head.weight" not in state and not sizes.get("tie_word_embeddings"):
        raise InputRefused(
            f"{path}: there is no lm_head.weight: save the whole model's state_dict(), "
            "or give model.tie_word_embeddings=true if its head is the embedding"
        )
    for key in (shown.keys() & sizes.keys()) - {"max_position_embeddings"}:
        if sizes[key] != shown[key]:
            raise InputRefused(
                f"model.{key} = {sizes[key]}, but the weights in {path} have {shown[key]}"
            )
    return LlamaConfig(**{**shown, "head_dim": head_dim, **sizes})


def _head_dim(shown: Mapping[str, Any], queries: int, path: Path, sizes: Mapping[str, Any]) -> int:
    """Return the width of a head without a rotary table: from the given number of heads, or the
    preset's.
    """
    if heads := sizes.get("num_attention_heads"):
        return max(1, queries // int(heads))
    known = LlamaConfig.preset("llama-179m")
    article = {
        key: getattr(known, key)
        for key in ("hidden_size", "intermediate_size", "num_hidden_layers")
    }
    if article.items() <= shown.items() and queries == known.hidden_size:
        return known.head_dim
    raise InputRefused(
        f"{path}: its tensors do not show how many heads there are: give model.num_attention_heads"
    )


def _rope_theta(cos_TE: Tensor) -> float:
    """Return the base theta of a table with the second frequency theta ^ (-2 / E); the default if
    none can be read.

    It is rounded to four digits, as the table is exact to six. `_check_rotary` then compares the
    whole table.
    """
    if min(cos_TE.shape) < 2 or cos_TE.shape[1] < 4 or not 0 < float(cos_TE[1, 1]) < 1:
        return LlamaConfig.rope_theta
    return float(f"{math.acos(float(cos_TE[1, 1])) ** (-cos_TE.shape[1] / 2):.4g}")


def _check_rotary(state: Mapping[str, Tensor], config: LlamaConfig, path: Path) -> None:
    """Refuse weights whose rotary tables differ from those that the configuration gives."""
    if "model.rotary_emb.cos" not in state:
        return
    positions_BT = torch.arange(len(state["model.rotary_emb.cos"]))[None]
    for name, half_B1TF in zip(
        ("cos", "sin"), cos_sin(positions_BT, config, torch.float32), strict=True
    ):
        theirs = state.get(f"model.rotary_emb.{name}")
        ours = torch.cat([half_B1TF[0, 0]] * 2, dim=-1)
        if (
            theirs is None
            or theirs.shape != ours.shape
            or not bool(((theirs - ours).abs() < _TABLE_ERROR).all())
        ):
            raise InputRefused(
                f"{path}: rotary_emb.{name} is not that of rope_theta = {config.rope_theta:g}, so the model would "
                "compute something else here: save the model that was trained"
            )
