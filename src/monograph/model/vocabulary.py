"""Add rows for new tokens to a model, and read and write the trained rows of tokens of adapters.

A *row* is the row of one token in an embedding or in a head. A *table* is an embedding or a head of
which some rows are trained and the others are frozen (`monograph.graph.token_rows`).

Adapters are in PEFT's format. Its key `trainable_token_indices` is a list of ids, for the embedding
and a tied head, or an object with a list for each layer: {"embed_tokens": [...], "lm_head": [...]}.
The tensor `LAYER.token_adapter.trainable_tokens_delta` has the trained rows in the order of the list.
They are the rows themselves, although the name says "delta". If a table has more rows than the
base's, PEFT also stores the whole table.

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
from monograph.graph.token_rows import ROWS, TableWithRows, tables_with_rows
from monograph.model import layer_inputs
from monograph.model.files import DTYPES, StoredTensor, read_tensors
from monograph.model.llama import Llama
from monograph.text.tokenizer_file import MAX_VOCABULARY

TRAINABLE_TOKENS_KEY = "trainable_token_indices"
PEFT_PREFIX = "base_model.model."  # of the names of all tensors in PEFT's files
# The ends of tensors' names: a whole table in PEFT's files, trained rows in PEFT's files, and trained
# rows in Monograph.
_WHOLE_TABLE = ".token_adapter.base_layer.weight"
_PEFT_ROWS = ".token_adapter.trainable_tokens_delta"
_OWN_ROWS = f".{ROWS}"


def read_trainable_tokens(value: object, path: Path) -> tuple[int, ...]:
    """Return the ids of the tokens whose rows are trained, which must be the same for all layers.

    Args:
        value: the value of `TRAINABLE_TOKENS_KEY` in an adapter's configuration; None: no rows.
        path: the configuration's file, for errors.

    Raises:
        InputRefused: the value has another form, or the layers differ.
    """
    ids_of_layers = [value or []]
    if isinstance(value, dict):
        ids_of_layers = list(value.values())
    ids = ids_of_layers[0] if ids_of_layers else []
    if any(other_ids != ids for other_ids in ids_of_layers):
        raise InputRefused(
            f"{path}: {TRAINABLE_TOKENS_KEY} lists other tokens for one layer than for another, which is not read here"
        )
    if not _are_tokens(ids):
        raise InputRefused(
            f"{path}: {TRAINABLE_TOKENS_KEY} = {str(value)[:60]}: expected ids of tokens, each once"
        )
    return tuple(ids)


def _are_tokens(ids: object) -> TypeGuard[list[int]]:
    """Return whether these are ids of tokens, each once."""
    if not isinstance(ids, list):
        return False
    # `type`, because a bool is an int.
    are_in_range = all(type(token) is int and 0 <= token < MAX_VOCABULARY for token in ids)
    return are_in_range and len(set(ids)) == len(ids)


def trainable_tokens_value(module: nn.Module) -> list[int] | dict[str, list[int]] | None:
    """Return the value of `TRAINABLE_TOKENS_KEY` for a module's trained rows; None if it has none."""
    ids_by_layer = {
        name: layer.token_index.tolist() for name, layer in tables_with_rows(module).items()
    }
    if not ids_by_layer:
        return None
    if len(ids_by_layer) == 1:
        return next(iter(ids_by_layer.values()))
    return {_last_name(path): ids for path, ids in ids_by_layer.items()}


def _last_name(path: str) -> str:
    """Return the last name of a module's path, such as "lm_head"."""
    return path.rpartition(".")[2]


def peft_name(name: str) -> str:
    """Return PEFT's name for a tensor of an adapter."""
    if name.endswith(_OWN_ROWS):
        name = name.removesuffix(_OWN_ROWS) + _PEFT_ROWS
    return PEFT_PREFIX + name


def tensors_by_own_names(
    stored: Mapping[str, StoredTensor], module: nn.Module, path: Path
) -> dict[str, StoredTensor]:
    """Return the tensors of PEFT's file by Monograph's names.

    Whole tables are left out, and so are the rows of a tied head, which repeat those of the embedding.

    Args:
        stored: the file's tensors by PEFT's names.
        module: the module with the adapters into which they will be copied.
        path: the file, for errors.

    Raises:
        InputRefused: a whole table differs from the base's in a row that is not trained.
    """
    # `tables_with_rows` has each table once; `layers` has a tied table under both of its names.
    first_names = {id(layer.token_rows): name for name, layer in tables_with_rows(module).items()}
    layers = {
        name: layer for name, layer in module.named_modules() if isinstance(layer, TableWithRows)
    }
    renamed = dict[str, StoredTensor]()
    for stored_name, tensor in stored.items():
        name = stored_name.removeprefix(PEFT_PREFIX)
        layer_name = name.removesuffix(_PEFT_ROWS).removesuffix(_WHOLE_TABLE)
        layer = layers.get(layer_name)
        if layer is None or name == layer_name:
            # This is not a tensor of a table, but for example a matrix of LoRA.
            renamed[name] = tensor
        elif name.endswith(_WHOLE_TABLE):
            _require_base_table(stored_name, tensor, layer, path)
        elif first_names[id(layer.token_rows)] == layer_name:
            renamed[layer_name + _OWN_ROWS] = tensor
    return renamed


def unlisted_rows(value: object, module: nn.Module) -> set[str]:
    """Return the names of trained rows that are in layers which a configuration does not list.

    For example, a list of ids stands for the embedding alone, and not for an untied head.

    Args:
        value: the value of `TRAINABLE_TOKENS_KEY` in the configuration.
        module: the module.
    """
    if isinstance(value, dict):
        listed_layers = set(value)
    else:
        embedding_path = next(iter(tables_with_rows(module)), "")
        listed_layers = {_last_name(embedding_path)}
    return {
        path + _OWN_ROWS
        for path in tables_with_rows(module)
        if _last_name(path) not in listed_layers
    }


def _require_base_table(name: str, stored: StoredTensor, layer: TableWithRows, path: Path) -> None:
    """Require that a stored whole table equals the base's in all rows that are not trained."""
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
    is_equal_VD[layer.token_index] = True  # trained rows may differ
    if not bool(torch.all(is_equal_VD)):
        first_different = (~is_equal_VD.all(1)).nonzero()[0]
        row = int(first_different)
        raise InputRefused(
            f"{path}: {name} is a whole table, whose row {row} is not the base's: merge it with PEFT first"
        )


# The number of rows that are converted to float64 at a time, because a large table in float64 may not
# fit in memory.
ROWS_AT_ONCE = 4096


@torch.no_grad()
def set_new_rows(model: Llama, known: int, tokens: int) -> None:
    """Give new tokens rows in the embedding, in the head and in the table of layers' inputs, in place: the
    mean of all known rows.

        W[i] = mean of W[0] ... W[known - 1],   known <= i < tokens

    Rows are added if there are too few, and none is removed. Rows below `known` keep their bits. The
    means of the embedding and of an untied head differ; a tied head stays tied. Rows that are sampled
    around the mean would not be better (Hewitt 2021, "Initializing New Word Embeddings for Pretrained
    Language Models"). The sum is in float64 and is rounded once, so its bits depend neither on the
    device nor on the dtype in which the folder was read.

    Args:
        model: a model on any device.
        known: number of tokens with which the model was trained, at most V.
        tokens: number of tokens of the tokenizer, with the new ones.
    """
    layers: list[nn.Embedding | nn.Linear] = [model.model.embed_tokens]
    if not model.config.tie_word_embeddings:
        layers.append(model.lm_head)
    if model.config.hidden_size_per_layer_input:
        layers.append(layer_inputs.table_of(model.model))
    for layer in layers:
        weight = layer.weight
        # A mapped weight is copied into memory, because a mapped file must not be changed.
        in_memory = weight.detach().to(kept_dtype(weight), copy=isinstance(weight, MappedWeight))
        replace_data(weight, in_memory)
        layer.weight = _with_new_rows(weight, known, tokens)
    rows = max(model.config.vocab_size, tokens)
    input_rows = model.config.vocab_size_per_layer_input
    if input_rows:
        input_rows = max(input_rows, tokens)
    model.config = replace(model.config, vocab_size=rows, vocab_size_per_layer_input=input_rows)
    model.tie_weights()
    for layer in layers:
        if isinstance(layer, nn.Embedding):
            layer.num_embeddings = layer.weight.shape[0]
    model.lm_head.out_features = model.config.vocab_size


def _with_new_rows(weight_VD: Tensor, known: int, tokens: int) -> Tensor:
    """Return the weight with the rows that `set_new_rows` sets.

    If the weight has enough rows it is changed in place, otherwise the result is a new parameter.
    """
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
