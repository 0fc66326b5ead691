"""Merge adapters into the weights that they adapt, in place or one weight at a time for an export.

`merge` changes a module. `plain_parameters` does not change it, but yields the parameters that it
would have after `merge`, with no more than one merged weight in memory.

Shapes: N outputs, K inputs, E experts.
"""

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from monograph.graph import inspect
from monograph.graph.experts import ExpertLinear
from monograph.graph.frozen import FrozenWeight
from monograph.graph.lora import FACTORS, AnyAdapted, adapted_layers, remove_adapter
from monograph.graph.lora_base import base_weight
from monograph.graph.mmap_weights import kept_dtype, replace_data, require_finite
from monograph.graph.token_rows import TableWithRows, merge_rows, tables_with_rows
from monograph.ops.row_norms import row_norms
from monograph.ops.token_rows import with_replaced_rows


@torch.no_grad()
def merge(module: nn.Module) -> None:
    """Turn every adapted layer, one after another, into a plain layer that computes the same.

    The new weight is `merged_weight(layer)`. A quantised weight becomes a dense one, in the dtype of the
    module's weights that are not quantised, or in fp32 if these have several dtypes. The trained rows
    of tokens are written into the embedding and the head. Frozen weights stay frozen.
    """
    dense_modules = [m for m in module.modules() if not isinstance(m, (*FACTORS, FrozenWeight))]
    dtypes = {kept_dtype(p) for m in dense_modules for p in m.parameters(recurse=False)}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    for layer in adapted_layers(module).values():
        weight = merged_weight(layer)
        remove_adapter(layer)
        if isinstance(layer, FrozenWeight):
            stored_names = [name for name in layer._parameters if name != "bias"]
            for name in stored_names:
                del layer._parameters[name]
            layer._buffers.clear()  # the table of NF4's 16 values
            layer.register_parameter("weight", nn.Parameter(weight.to(dtype), requires_grad=False))
        else:
            replace_data(layer.weight, weight)
        layer.__class__ = ExpertLinear if isinstance(layer, ExpertLinear) else nn.Linear  # type: ignore[assignment]
    merge_rows(module)


@torch.no_grad()
def merged_weight(layer: AnyAdapted) -> Tensor:
    """Return a layer's weight with its adapter merged in.

        round(W + s B A),   with DoRA  round(g (W + s B A)),  see `Adapted`

    The sum is fp32, or fp64 if W or B is, and is rounded once to W's dtype.

    Returns:
        A new tensor, [N, K], or [E, N, K] of experts.
    """
    weight = base_weight(layer)
    weight_dtype = kept_dtype(weight)
    adapted_dtype = torch.promote_types(weight_dtype, layer.lora_B.weight.dtype)
    sum_dtype = torch.promote_types(adapted_dtype, torch.float32)
    B_A = layer.lora_B.weight.to(sum_dtype) @ layer.lora_A.weight.to(sum_dtype)
    total = weight.detach().to(sum_dtype, copy=True).add_(B_A, alpha=layer.scale)
    magnitude = layer.lora_magnitude_vector
    if magnitude is not None:
        norms = row_norms(total).to(magnitude.dtype)
        gain = magnitude.to(sum_dtype) / norms
        total *= gain[:, None]
    return total.to(weight_dtype)


class UnreadTensor(NamedTuple):
    """The description of a tensor, with a function that reads its numbers when they are needed.

    So an export needs memory for only one tensor at a time.

    Attributes:
        name: the tensor's name.
        like: a meta tensor of its shape and dtype.
        read: a function that returns the tensor. A merged weight is computed at each call.
    """

    name: str
    like: Tensor
    read: Callable[[], Tensor]


def plain_parameters(module: nn.Module) -> Iterator[UnreadTensor]:
    """Yield each parameter that a module would have after `merge`. The module is not changed.

    Adapters must be on dense weights, not on quantised ones. `UnreadTensor.read` raises InputRefused if
    a value is NaN or infinite.
    """
    module = inspect.unwrapped(module)
    adapted = adapted_layers(module)
    row_tables = tables_with_rows(module)
    factors = [child for child in module.modules() if isinstance(child, FACTORS)]
    trained_ids = {id(p) for factor in factors for p in factor.parameters()}
    trained_ids |= {id(layer.lora_magnitude_vector) for layer in adapted.values()}
    trained_ids |= {id(table.token_rows) for table in row_tables.values()}
    # `named_parameters` has a head that is tied to the embedding only once; the state dict has it twice.
    for name, parameter in module.named_parameters():
        if id(parameter) in trained_ids:
            continue
        owner, _, attribute = name.rpartition(".")
        is_weight = attribute == "weight"
        layer = adapted.get(owner) if is_weight else None
        table = row_tables.get(owner) if is_weight else None
        like = torch.empty(parameter.shape, dtype=kept_dtype(parameter), device="meta")
        yield UnreadTensor(name, like, functools.partial(_read, name, parameter, layer, table))


def _read(
    name: str, parameter: nn.Parameter, layer: AnyAdapted | None, table: TableWithRows | None
) -> Tensor:
    """Return the value of a parameter of the merged module.

    Args:
        name: the parameter's name.
        parameter: the parameter.
        layer: the adapted layer, if the parameter is the weight of one, or None.
        table: the embedding or head with trained rows, if the parameter is the weight of one, or None.
    """
    if layer is not None:
        return require_finite(merged_weight(layer), name)
    value = parameter.detach().to(kept_dtype(parameter))
    if table is not None:
        value = with_replaced_rows(value, table.rows).detach()
    return require_finite(value, name)
