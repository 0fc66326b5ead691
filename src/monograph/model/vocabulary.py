"""Add rows for tokens that a base lacks, and read and write trained rows of tokens in PEFT's
format.

A *row* is the row of a token in an embedding or in a head. A *table* is a layer with trained rows
(`monograph.graph.token_rows`).

PEFT's key `trainable_token_indices` is a list of ids, for the embedding and a tied head, or an
object by layer: {"embed_tokens": [...], "lm_head": [...]}. The tensor
`LAYER.token_adapter.trainable_tokens_delta` has the rows in the order of the list. They are the
rows themselves, although the name says "delta". A table with more rows than the base's is also
stored whole.

Shapes: V rows of a table, D hidden size.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeGuard

import torch
from torch import Tensor, nn

from monograph.errors import InputRefused
from monograph.graph.mmap_weights import MappedWeight, kept_dtype, replace_data
from monograph.graph.token_rows import ROWS, TableWithRows, tables
from monograph.model.files import DTYPES, StoredTensor, read_tensors
from monograph.model.llama import Llama
from monograph.text.tokenizer_file import MAX_VOCABULARY

KEY = "trainable_token_indices"
PREFIX = "base_model.model."  # The names of all of PEFT's tensors begin with it.
# Ends of names: of a whole table in PEFT's files, and of trained rows there and in Monograph.
_WHOLE_TABLE = ".token_adapter.base_layer.weight"
_PEFT_ROWS = ".token_adapter.trainable_tokens_delta"
_OWN_ROWS = f".{ROWS}"


def read_tokens(value: object, path: Path) -> tuple[int, ...]:
    """Return the ids of the trained rows, which must be the same for all layers.

    Args:
        value: the value of `KEY` in an adapter's configuration.
        path: the configuration's file, for errors.

    Raises:
        InputRefused: the value has another form, or the layers differ.
    """
    ids_by_layer = list(value.values()) if isinstance(value, dict) else [value or []]
    ids = ids_by_layer[0] if ids_by_layer else []
    if any(other_ids != ids for other_ids in ids_by_layer):
        raise InputRefused(
            f"{path}: {KEY} lists other tokens for one layer than for another, which is not read here"
        )
    if not _are_tokens(ids):
        raise InputRefused(f"{path}: {KEY} = {str(value)[:60]}: expected ids of tokens, each once")
    return tuple(ids)


def _are_tokens(ids: object) -> TypeGuard[list[int]]:
    """Return whether these are ids of tokens, each once."""
    if not isinstance(ids, list):
        return False
    # `type`, because a bool is an int.
    are_in_range = all(type(token) is int and 0 <= token < MAX_VOCABULARY for token in ids)
    return are_in_range and len(set(ids)) == len(ids)


def tokens_value(module: nn.Module) -> list[int] | dict[str, list[int]] | None:
    """Return the value of `KEY` for a module's trained rows; None if it has none."""
    ids_by_layer = {name: layer.token_index.tolist() for name, layer in tables(module).items()}
    if len(ids_by_layer) > 1:
        return {name.rpartition(".")[2]: ids for name, ids in ids_by_layer.items()}
    return next(iter(ids_by_layer.values()), None)


def peft_name(name: str) -> str:
    """Return PEFT's name for a tensor of an adapter."""
    if name.endswith(_OWN_ROWS):
        name = name.removesuffix(_OWN_ROWS) + _PEFT_ROWS
    return PREFIX + name


def own_tensors(
    stored: Mapping[str, StoredTensor], module: nn.Module, path: Path
) -> dict[str, StoredTensor]:
    """Return the tensors of PEFT's file by Monograph's names.

    Left out are whole tables, and the rows of a tied head, which repeat those of the embedding.

    Args:
        stored: the file's tensors by PEFT's names.
        module: the module into which they will be copied.
        path: the file, for errors.

    Raises:
        InputRefused: a whole table differs from the base's in a row that is not trained.
    """
    # `tables` has each table once; `layers` has a tied table under both of its names.
    first_names = {id(layer.token_rows): name for name, layer in tables(module).items()}
    layers = {
        name: layer for name, layer in module.named_modules() if isinstance(layer, TableWithRows)
    }
    renamed = dict[str, StoredTensor]()
    for stored_name, tensor in stored.items():
        name = stored_name.removeprefix(PREFIX)
        layer_name = name.removesuffix(_PEFT_ROWS).removesuffix(_WHOLE_TABLE)
        layer = layers.get(layer_name)
        if layer is None or name == layer_name:
            # Not of a table, such as a matrix of LoRA.
            renamed[name] = tensor
        elif name.endswith(_WHOLE_TABLE):
            _require_base_table(stored_name, tensor, layer, path)
        elif first_names[id(layer.token_rows)] == layer_name:
            renamed[layer_name + _OWN_ROWS] = tensor
    return renamed


def unlisted_rows(value: object, module: nn.Module) -> set[str]:
    """Return the names of a module's trained rows that a configuration does not list.

    For example, a list of ids does not name the rows of an untied head.

    Args:
        value: the value of `KEY` in the configuration.
        module: the module.
    """
    if isinstance(value, dict):
        listed_layers = set(value)
    else:
        embedding = next(iter(tables(module)), "")
        listed_layers = {embedding.rpartition(".")[2]}
    return {
        name + _OWN_ROWS for name in tables(module) if name.rpartition(".")[2] not in listed_layers
    }


def _require_base_table(name: str, stored: StoredTensor, layer: TableWithRows, path: Path) -> None:
    """Require that a stored whole table is the base's, but for the trained rows."""
    shape = list(layer.weight.shape)
    if list(stored.shape) != shape:
        raise InputRefused(
            f"{path}: {name} is a table of {list(stored.shape)}, and the base's is {shape}: put the "
            "tokenizer.json with the new tokens next to the adapter"
        )
    if stored.dtype not in DTYPES:
        raise InputRefused(
            f"{path}: {name} is stored as {stored.dtype}, not as one of {', '.join(DTYPES)}"
        )
    is_equal_VD = read_tensors({name: stored}, layer.weight.dtype)[name] == layer.weight
    is_equal_VD[layer.token_index] = True
    if not bool(torch.all(is_equal_VD)):
        row = int((~is_equal_VD.all(1)).nonzero()[0])
        raise InputRefused(
            f"{path}: {name} is a whole table, whose row {row} is not the base's: merge it with PEFT first"
        )


# Rows that are converted to float64 at a time. A whole large table in float64 may not fit in
# memory.
ROWS_AT_ONCE = 4096


@torch.no_grad()
def extend(model: Llama, known: int, tokens: int) -> None:
    """Set the rows of the tokens from `known` to `tokens` - 1 in the embedding and the head, in
    place.

        W[i] = mean of W[0] ... W[known - 1],   known <= i < tokens

    Rows are added if there are too few, and none is removed. Rows below `known` keep their bits. An
    untied head gets its own mean, and a tied head stays tied. To sample the rows around the mean
    would not be better (Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language
    Models"). The sum is in float64 and is rounded once, so its bits depend neither on the device
    nor on the dtype in which the folder was read.

    Args:
        model: a model on any device.
        known: number of tokens with which the model was trained, at most V.
        tokens: number of tokens of the tokenizer.
    """
    layers: list[nn.Embedding | nn.Linear] = [model.model.embed_tokens]
    if not model.config.tie_word_embeddings:
        layers.append(model.lm_head)
    for layer in layers:
        weight = layer.weight
        # A mapped weight is copied into memory, where it can be changed.
        in_memory = weight.detach().to(kept_dtype(weight), copy=isinstance(weight, MappedWeight))
        replace_data(weight, in_memory)
        layer.weight = _extended(weight, known, tokens)
    model.config = replace(model.config, vocab_size=max(model.config.vocab_size, tokens))
    model.tie_weights()
    model.model.embed_tokens.num_embeddings = model.config.vocab_size
    model.lm_head.out_features = model.config.vocab_size


def _extended(weight_VD: Tensor, known: int, tokens: int) -> Tensor:
    """Return the weight with the rows of `extend`: itself if it has enough rows, else a new one."""
    mean_D = _mean_row(weight_VD[:known]).to(weight_VD.dtype)
    missing = max(0, tokens - weight_VD.shape[0])
    if not missing:
        weight_VD[known:tokens] = mean_D
        return weight_VD
    extended_VD = torch.cat([weight_VD, weight_VD.new_empty(missing, weight_VD.shape[1])])
    extended_VD[known:tokens] = mean_D
    return nn.Parameter(extended_VD, requires_grad=weight_VD.requires_grad)


def _mean_row(rows_VD: Tensor) -> Tensor:
    """Return the mean of rows, [D], in fp32, or in fp64 for an fp64 table."""
    total_D = torch.stack([part.double().sum(0) for part in rows_VD.split(ROWS_AT_ONCE)]).sum(0)
    return (total_D / len(rows_VD)).to(torch.promote_types(rows_VD.dtype, torch.float32))
