"""Count a model's parameters from modules on the meta device, which have shapes but no memory.

Blocks of one kind have the same shapes, so only one block of each kind is built, once for each
configuration.
"""

import copy
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import fields

import torch
from torch import nn

from monograph.errors import InputRefused
from monograph.model.config import LlamaConfig
from monograph.model.llama import Block, Llama

Shapes = Mapping[str, tuple[int, ...]]
_LAYERS = "model.layers."
# Integers of a configuration that are not sizes of a tensor.
_NOT_SIZES = {"num_hidden_layers", "pad_token_id", "bos_token_id", "eos_token_id"}


def layer_shapes(config: LlamaConfig, layer: int) -> Shapes:
    """Return the shapes of a block's parameters, by their names in the block.

    Raises:
        InputRefused: a tensor would have more bytes than a tensor can have.
    """
    kind = _kind(config, layer)
    # The first layer of the kind, for which `_block_shapes` may have an answer.
    first = next(each for each in range(layer + 1) if _kind(config, each) == kind)
    return _block_shapes(config, first)


def _kind(config: LlamaConfig, layer: int) -> tuple[bool, bool]:
    """Return whether a layer is a delta net, and whether it has a mixture."""
    return config.is_delta_net(layer), config.is_mixture(layer)


@functools.lru_cache(maxsize=256)
def _block_shapes(config: LlamaConfig, layer: int) -> Shapes:
    return _parameter_shapes(config, lambda: Block(config, "auto", layer))


@functools.lru_cache(maxsize=256)
def outer_shapes(config: LlamaConfig) -> Shapes:
    """Return the shapes of the parameters outside the blocks, by full name, without a tied head."""
    with_one_layer = _replace_unchecked(config, "num_hidden_layers", 1)
    all_shapes = _parameter_shapes(config, lambda: Llama(with_one_layer))
    return {name: shape for name, shape in all_shapes.items() if not name.startswith(_LAYERS)}


def _parameter_shapes(config: LlamaConfig, build: Callable[[], nn.Module]) -> Shapes:
    """Return the shapes of a module's parameters, by name. `build` makes the module."""
    try:
        with torch.device("meta"):
            return {name: tuple(parameter.shape) for name, parameter in build().named_parameters()}
    except RuntimeError as error:
        raise InputRefused(
            f"a {config.model_type} of these sizes has a tensor of more bytes than 2^63: make it smaller"
        ) from error


def _replace_unchecked(config: LlamaConfig, key: str, value: int) -> LlamaConfig:
    """Return the configuration with another size, without the checks of a configuration.

    A model may not have this size, but its modules still have shapes.
    """
    changed = copy.copy(config)
    object.__setattr__(changed, key, value)
    return changed


def shapes(config: LlamaConfig) -> Shapes:
    """Return the shapes of all parameters by full name, without a tied head."""
    found = dict(outer_shapes(config))
    for layer in range(config.num_hidden_layers):
        found |= {
            f"{_LAYERS}{layer}.{name}": shape for name, shape in layer_shapes(config, layer).items()
        }
    return found


def keys_of(config: LlamaConfig, name: str) -> tuple[str, ...]:
    """Return, for messages, the keys of the configuration on which each axis of a parameter depends.

    Each size is doubled in turn to find the axes that change.

    Returns:
        A text for each axis, such as "2 * num_attention_heads * head_dim".
    """
    shape = _shape(config, name)
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    sizes = {
        key: value for key, value in values.items() if type(value) is int and key not in _NOT_SIZES
    }
    doubled = {
        key: _shape(_replace_unchecked(config, key, 2 * size), name) for key, size in sizes.items()
    }
    texts = list[str]()
    for axis, length in enumerate(shape):
        keys = [key for key, other_shape in doubled.items() if other_shape[axis] != length]
        product = math.prod(sizes[key] for key in keys)
        all_double = all(doubled[key][axis] == 2 * length for key in keys)
        if all_double and length % product == 0:
            factor = length // product
            factors = keys if keys and factor == 1 else [str(factor), *keys]
            texts.append(" * ".join(factors))
        else:
            texts.append(" and ".join(keys))
    return tuple(texts)


def _shape(config: LlamaConfig, name: str) -> tuple[int, ...]:
    if not name.startswith(_LAYERS):
        return outer_shapes(config)[name]
    layer, _, inner = name.removeprefix(_LAYERS).partition(".")
    return layer_shapes(config, int(layer))[inner]


def block_matrices(
    config: LlamaConfig, layer: int, experts: int | None = None
) -> list[tuple[int, ...]]:
    """Return the shapes of a block's matrices.

    Args:
        config: the configuration.
        layer: the block.
        experts: the number of experts whose matrices are included; None: all experts.
    """
    found = list[tuple[int, ...]]()
    for name, shape in layer_shapes(config, layer).items():
        is_bias = name.endswith(".bias")
        if is_bias or len(shape) == 1:
            continue
        if len(shape) == 2:
            found.append(shape)
        else:
            found += [shape[-2:]] * (experts or shape[0])
    return found


def matrices(config: LlamaConfig) -> list[tuple[int, ...]]:
    """Return the shapes of the matrices of all blocks."""
    return [
        shape
        for layer in range(config.num_hidden_layers)
        for shape in block_matrices(config, layer)
    ]


def block_multiplied(config: LlamaConfig, layer: int) -> list[tuple[int, ...]]:
    """Return the shapes of a block's matrices that multiply a token, with only a token's experts."""
    return block_matrices(config, layer, config.num_experts_per_tok)


def multiplied(config: LlamaConfig) -> list[tuple[int, ...]]:
    """Return the shapes of `block_multiplied` of all blocks."""
    return [
        shape
        for layer in range(config.num_hidden_layers)
        for shape in block_multiplied(config, layer)
    ]
