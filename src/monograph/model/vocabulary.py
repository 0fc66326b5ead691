"""Add rows for tokens that a base lacks, and read and write trained rows of tokens in PEFT's
format.

PEFT's key `trainable_token_indices` is a list of ids for the embedding and a tied head, or an
object that names the
layers: {"embed_tokens": [...], "lm_head": [...]}. The tensors
`LAYER.token_adapter.trainable_tokens_delta` hold the rows themselves in the order of the list, in
spite of their name. A table that has grown is also stored as a whole.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeGuard

import torch
from torch import Tensor, nn

from monograph.errors import InputRefused
from monograph.graph.mmap_weights import MappedWeight, keep, kept_dtype
from monograph.graph.token_rows import ROWS, TableWithRows, tables
from monograph.model.files import DTYPES, Stored, read_tensors
from monograph.model.llama import Llama
from monograph.text.tokenizer_file import MAX_VOCABULARY

KEY = "trainable_token_indices"
PREFIX = "base_model.model."  # begins the name of every tensor
_TABLE = ".token_adapter.base_layer.weight"
_THEIRS = ".token_adapter.trainable_tokens_delta"
_OURS = f".{ROWS}"


def read_tokens(value: object, path: Path) -> tuple[int, ...]:
    """Return the ids in the configuration's value, which must be the same for all layers.

    Raises:
        InputRefused: the value has another form, or the layers differ.
    """
    lists = list(value.values()) if isinstance(value, dict) else [value or []]
    ids = lists[0] if lists else []
    if any(other != ids for other in lists):
        raise InputRefused(
            f"{path}: {KEY} lists other tokens for one layer than for another, which is not read here"
        )
    if not _are_tokens(ids):
        raise InputRefused(f"{path}: {KEY} = {str(value)[:60]}: expected ids of tokens, each once")
    return tuple(ids)


def _are_tokens(ids: object) -> TypeGuard[list[int]]:
    """Return whether these are ids of tokens, each once."""
    if not isinstance(ids, list) or not all(
        type(token) is int and 0 <= token < MAX_VOCABULARY for token in ids
    ):
        return False
    return len(set(ids)) == len(ids)


def written_tokens(module: nn.Module) -> list[int] | dict[str, list[int]] | None:
    """Return the configuration's value for a module's trained rows."""
    by_layer = {name: layer.token_index.tolist() for name, layer in tables(module).items()}
    if len(by_layer) > 1:
        return {name.rpartition(".")[2]: ids for name, ids in by_layer.items()}
    return next(iter(by_layer.values()), None)


def to_peft(name: str) -> str:
    """Return PEFT's name for a tensor of an adapter."""
    return PREFIX + (name.removesuffix(_OURS) + _THEIRS if name.endswith(_OURS) else name)


def own_rows(stored: Mapping[str, Stored], module: nn.Module, path: Path) -> dict[str, Stored]:
    """Return the tensors of a file by Monograph's names, without those that repeat others or the
    base.

    Raises:
        InputRefused: a whole table that is not the base's.
    """
    first = {id(layer.token_rows): name for name, layer in tables(module).items()}
    layers = {
        name: layer for name, layer in module.named_modules() if isinstance(layer, TableWithRows)
    }
    renamed = dict[str, Stored]()
    for full, tensor in stored.items():
        name = full.removeprefix(PREFIX)
        layer_name = name.removesuffix(_THEIRS).removesuffix(_TABLE)
        layer = layers.get(layer_name)
        if layer is None or name == layer_name:
            renamed[name] = tensor
        elif name.endswith(_TABLE):
            _require_same(full, tensor, layer, path)
        elif first[id(layer.token_rows)] == layer_name:
            renamed[layer_name + _OURS] = tensor
    return renamed


def left_out(value: object, module: nn.Module) -> set[str]:
    """Return the names of a module's trained rows that a configuration does not list, such as an
    untied head's.
    """
    named = (
        set(value)
        if isinstance(value, dict)
        else {next(iter(tables(module)), "").rpartition(".")[2]}
    )
    return {name + _OURS for name in tables(module) if name.rpartition(".")[2] not in named}


def _require_same(name: str, stored: Stored, layer: TableWithRows, path: Path) -> None:
    rows = list(layer.weight.shape)
    if list(stored.shape) != rows:
        raise InputRefused(
            f"{path}: {name} is a table of {list(stored.shape)}, and the base's is {rows}: put the tokenizer.json with "
            "the new tokens next to the adapter"
        )
    if stored.dtype not in DTYPES:
        raise InputRefused(
            f"{path}: {name} is stored as {stored.dtype}, not as one of {', '.join(DTYPES)}"
        )
    same = read_tensors({name: stored}, layer.weight.dtype)[name] == layer.weight
    same[layer.token_index] = True
    if not bool(torch.all(same)):
        row = f"row {int((~same.all(1)).nonzero()[0])}"
        raise InputRefused(
            f"{path}: {name} is a whole table, whose {row} is not the base's: merge it with PEFT first"
        )


# Rows converted to float64 at a time, which for a whole large table would not fit in memory.
ROWS_AT_ONCE = 4096


@torch.no_grad()
def extend(model: Llama, known: int, tokens: int) -> None:
    """Give the tokens from `known` to `tokens` - 1 a row each, in place.

        W[i] = mean of W[0] ... W[known - 1],   known <= i < tokens

    Spare rows are used first, missing ones are added, and none is removed. Rows below `known` keep
    their bits; an untied head gets its own mean, a tied one stays tied. Drawing around the mean
    would be no better (Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language
    Models"). The sum is in float64 and rounded once, so that its bits depend neither on the device
    nor on the dtype in which the folder was read.

    Args:
        model: a model on any device.
        known: number of tokens that the model was trained with, at most V.
        tokens: number of tokens of the tokenizer.
    """
    layers: list[nn.Embedding | nn.Linear] = [model.model.embed_tokens]
    if not model.config.tie_word_embeddings:
        layers.append(model.lm_head)
    for layer in layers:
        weight = layer.weight
        keep(weight, weight.detach().to(kept_dtype(weight), copy=isinstance(weight, MappedWeight)))
        layer.weight = _extended(weight, known, tokens)
    model.config = replace(model.config, vocab_size=max(model.config.vocab_size, tokens))
    model.tie_weights()
    model.model.embed_tokens.num_embeddings = model.lm_head.out_features = model.config.vocab_size


def _extended(weight_VD: Tensor, known: int, tokens: int) -> Tensor:
    missing = max(0, tokens - weight_VD.shape[0])
    extended_VD = (
        torch.cat([weight_VD, weight_VD.new_empty(missing, weight_VD.shape[1])])
        if missing
        else weight_VD
    )
    extended_VD[known:tokens] = _mean(weight_VD[:known]).to(weight_VD.dtype)
    return (
        nn.Parameter(extended_VD, requires_grad=weight_VD.requires_grad) if missing else weight_VD
    )


def _mean(rows_VD: Tensor) -> Tensor:
    """Return the mean row, [D], in fp32, or in fp64 for an fp64 table."""
    total_D = torch.stack([part.double().sum(0) for part in rows_VD.split(ROWS_AT_ONCE)]).sum(0)
    return (total_D / len(rows_VD)).to(torch.promote_types(rows_VD.dtype, torch.float32))
