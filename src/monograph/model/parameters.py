"""Count a model's parameters from its modules, which on the meta device have shapes and no memory.

Blocks of one kind have the same shapes, so one of each kind is built, once for a configuration.
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
_WHICH = {"num_hidden_layers", "pad_token_id", "bos_token_id", "eos_token_id"}  # these are no sizes


def layer_shapes(config: LlamaConfig, layer: int) -> Shapes:
    """Return the shapes of a block's parameters, by their names in the block.

    Raises:
        InputRefused: the sizes multiply to more bytes than a tensor can have.
    """
    kind = _kind(config, layer)
    return _block(config, next(each for each in range(layer + 1) if _kind(config, each) == kind))


def _kind(config: LlamaConfig, layer: int) -> tuple[bool, bool]:
    return config.is_linear(layer), config.is_mixture(layer)


@functools.lru_cache(maxsize=256)
def _block(config: LlamaConfig, layer: int) -> Shapes:
    return _built(config, lambda: Block(config, "auto", layer))


@functools.lru_cache(maxsize=256)
def outer_shapes(config: LlamaConfig) -> Shapes:
    """Return the shapes of the parameters outside the blocks, by full name, without a tied head."""
    whole = _built(config, lambda: Llama(_with(config, "num_hidden_layers", 1)))
    return {name: shape for name, shape in whole.items() if not name.startswith(_LAYERS)}


def _built(config: LlamaConfig, build: Callable[[], nn.Module]) -> Shapes:
    try:
        with torch.device("meta"):
            return {name: tuple(parameter.shape) for name, parameter in build().named_parameters()}
    except RuntimeError as error:
        raise InputRefused(
            f"a {config.model_type} of these sizes has a tensor of more bytes than 2^63: make it smaller"
        ) from error


def _with(config: LlamaConfig, key: str, value: int) -> LlamaConfig:
    """Return the configuration with another size, though no model may have it: its parts have
    shapes all the same.
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
    """Say of each axis of a parameter by which keys of the configuration it is as long as it is,
    for people.

    Each size is doubled in turn to see which axes become longer.
    """
    shape = _shape(config, name)
    sizes = {field.name: getattr(config, field.name) for field in fields(config)}
    longer = {
        key: _shape(_with(config, key, 2 * size), name)
        for key, size in sizes.items()
        if type(size) is int and key not in _WHICH
    }
    said = list[str]()
    for axis, size in enumerate(shape):
        keys = [key for key, other in longer.items() if other[axis] != size]
        numbers = math.prod(sizes[key] for key in keys)
        if all(longer[key][axis] == 2 * size for key in keys) and size % numbers == 0:
            factor = size // numbers
            said.append(" * ".join([*([str(factor)] if factor > 1 or not keys else []), *keys]))
        else:
            said.append(" and ".join(keys))
    return tuple(said)


def _shape(config: LlamaConfig, name: str) -> tuple[int, ...]:
    if not name.startswith(_LAYERS):
        return outer_shapes(config)[name]
    layer, _, inner = name.removeprefix(_LAYERS).partition(".")
    return layer_shapes(config, int(layer))[inner]


def block_matrices(
    config: LlamaConfig, layer: int, most: int | None = None
) -> list[tuple[int, ...]]:
    """Return the shapes of a block's matrices, those of each expert, or of `most` experts,
    included.
    """
    found = list[tuple[int, ...]]()
    for name, shape in layer_shapes(config, layer).items():
        stacks = 1 if len(shape) == 2 else most or shape[0]
        found += [shape[-2:]] * stacks if len(shape) > 1 and not name.endswith(".bias") else []
    return found


def matrices(config: LlamaConfig) -> list[tuple[int, ...]]:
    """Return the shapes of the matrices of all blocks."""
    return [
        shape
        for layer in range(config.num_hidden_layers)
        for shape in block_matrices(config, layer)
    ]


def block_multiplied(config: LlamaConfig, layer: int) -> list[tuple[int, ...]]:
    """Return the shapes of a block's matrices that a token is multiplied with: of experts, those of
    its own.
    """
    return block_matrices(config, layer, config.num_experts_per_tok)


def multiplied(config: LlamaConfig) -> list[tuple[int, ...]]:
    """Return the shapes of `block_multiplied` of all blocks."""
    return [
        shape
        for layer in range(config.num_hidden_layers)
        for shape in block_multiplied(config, layer)
    ]
