"""List the shapes of a model's parameters.

They are read from modules that are built on the meta device, which have shapes but no memory. Blocks
of one kind (`kind_of_block`) have the same shapes, so only one block of each kind is built, once for
each configuration.
"""

import copy
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import fields

import torch
from torch import nn

from monograph.errors import InputRefused
from monograph.model import layer_inputs
from monograph.model.config import LlamaConfig
from monograph.model.llama import Block, Llama, feed_forward_of, kind_of_block

Shapes = Mapping[str, tuple[int, ...]]
_LAYERS = "model.layers."
# Integers of a configuration that are not sizes of any tensor.
_NOT_SIZES = {
    "num_hidden_layers",
    "mtp_num_hidden_layers",
    "num_kv_shared_layers",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
}
# What a model of one layer has otherwise than the model.
_ONE_LAYER = {"num_hidden_layers": 1, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}


def block_shapes(config: LlamaConfig, layer: int) -> Shapes:
    """Return the shapes of a layer's parameters, by their names in its block.

    Raises:
        InputRefused: a tensor would have more bytes than a tensor can have.
    """
    # The first layer of the same kind has the same shapes. If it is always asked for, the cache builds only
    # one block of each kind.
    kind = kind_of_block(config, layer)
    first_of_kind = next(each for each in range(layer + 1) if kind_of_block(config, each) == kind)
    return _cached_block_shapes(config, first_of_kind)


@functools.lru_cache(maxsize=256)
def _cached_block_shapes(config: LlamaConfig, layer: int) -> Shapes:
    """Return the shapes of a layer's parameters, from a block that is built."""
    return _shapes_of_module(config, lambda: Block(config, "auto", layer))


@functools.lru_cache(maxsize=256)
def outer_shapes(config: LlamaConfig) -> Shapes:
    """Return the shapes of the parameters outside of the blocks, by their names in the model.

    A tied head is left out.
    """
    with_one_layer = config
    for key, value in _ONE_LAYER.items():
        with_one_layer = _replace_unchecked(with_one_layer, key, value)

    def build() -> nn.Module:
        model = Llama(with_one_layer)
        if config.hidden_size_per_layer_input:
            # Their sizes depend on the number of layers.
            layer_inputs.add_to_decoder(model.model, config)
        return model

    all_shapes = _shapes_of_module(config, build)
    return {name: shape for name, shape in all_shapes.items() if not name.startswith(_LAYERS)}


def _shapes_of_module(config: LlamaConfig, build: Callable[[], nn.Module]) -> Shapes:
    """Return the shapes of the parameters of the module that `build` makes, by name."""
    try:
        with torch.device("meta"):
            return {name: tuple(parameter.shape) for name, parameter in build().named_parameters()}
    except RuntimeError as error:
        raise InputRefused(
            f"a {config.model_type} of these sizes has a tensor of more bytes than 2^63: make it smaller"
        ) from error


def _replace_unchecked(config: LlamaConfig, key: str, value: int) -> LlamaConfig:
    """Return a copy of the configuration with another value, which is not checked.

    No model may have this value, but modules can still be built and have shapes.
    """
    changed = copy.copy(config)
    object.__setattr__(changed, key, value)
    return changed


def parameter_shapes(config: LlamaConfig) -> Shapes:
    """Return the shapes of all parameters, by their names in the model. A tied head is left out."""
    shapes = dict(outer_shapes(config))
    for layer in range(config.num_hidden_layers):
        for name, shape in block_shapes(config, layer).items():
            shapes[f"{_LAYERS}{layer}.{name}"] = shape
    return shapes


def axis_keys(config: LlamaConfig, name: str) -> tuple[str, ...]:
    """Return for each axis of a parameter, for messages, the keys on which its length depends.

    The keys are found by doubling the configuration's sizes one by one, to see which axes change.

    Args:
        config: the configuration.
        name: the parameter's name in the model.

    Returns:
        A text for each axis, such as "2 * num_attention_heads * head_dim".
    """
    shape = _shape(config, name)
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    sizes = {
        key: value for key, value in values.items() if type(value) is int and key not in _NOT_SIZES
    }
    shapes_if_doubled = {
        key: _shape(_replace_unchecked(config, key, 2 * size), name) for key, size in sizes.items()
    }
    texts = list[str]()
    for axis, length in enumerate(shape):
        keys = [key for key, other in shapes_if_doubled.items() if other[axis] != length]
        # If each of these sizes doubles the length, the length is their product times a number.
        product = math.prod(sizes[key] for key in keys)
        is_product = all(shapes_if_doubled[key][axis] == 2 * length for key in keys)
        if is_product and length % product == 0:
            factor = length // product
            factors = [str(factor), *keys]
            if keys and factor == 1:
                factors = keys
            texts.append(" * ".join(factors))
        else:
            texts.append(" and ".join(keys))
    return tuple(texts)


def _shape(config: LlamaConfig, name: str) -> tuple[int, ...]:
    """Return the shape of the parameter with this name in the model."""
    if not name.startswith(_LAYERS):
        return outer_shapes(config)[name]
    layer, _, inner = name.removeprefix(_LAYERS).partition(".")
    return block_shapes(config, int(layer))[inner]


def block_matrix_shapes(
    config: LlamaConfig, layer: int, *, only_active: bool = False
) -> list[tuple[int, ...]]:
    """Return the shapes of a layer's matrices. Each expert's matrix is listed by itself.

    Args:
        config: the configuration.
        layer: the layer.
        only_active: whether to include only the matrices that multiply a token. Matrices of experts that
            were not chosen for it are then left out.
    """
    feed_forward = feed_forward_of(config, layer)
    matrices = list[tuple[int, ...]]()
    for name, shape in block_shapes(config, layer).items():
        is_bias = name.endswith(".bias")
        if is_bias or len(shape) == 1:
            continue
        if len(shape) == 2:
            matrices.append(shape)
            continue
        # All experts' matrices, [experts, rows, columns]; or the weight of a recurrent layer's
        # convolution, [channels, 1, taps].
        count = shape[0]
        if only_active:
            count = feed_forward.active_matrices(config, name, count)
        matrices += [shape[-2:]] * count
    return matrices


def matrix_shapes(config: LlamaConfig) -> list[tuple[int, ...]]:
    """Return the shapes of the matrices of all blocks."""
    return [
        shape
        for layer in range(config.num_hidden_layers)
        for shape in block_matrix_shapes(config, layer)
    ]


def block_active_matrix_shapes(config: LlamaConfig, layer: int) -> list[tuple[int, ...]]:
    """Return the shapes of a layer's matrices that multiply a token."""
    return block_matrix_shapes(config, layer, only_active=True)


def active_matrix_shapes(config: LlamaConfig) -> list[tuple[int, ...]]:
    """Return the shapes of the matrices of all blocks that multiply a token."""
    return [
        shape
        for layer in range(config.num_hidden_layers)
        for shape in block_active_matrix_shapes(config, layer)
    ]
