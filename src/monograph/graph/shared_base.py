"""Copy a module without copying what is frozen in it, so that many sets of adapters have one base.

`monograph.Ensemble` trains such copies together, and holds their base once.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from monograph.errors import UsageError
from monograph.graph.experts import ExpertLinear
from monograph.graph.frozen import Int8Linear, NF4Linear
from monograph.graph.lora import (
    Lora,
    adapted_layers,
    remove_adapter,
    set_new_adapter,
    set_scale_and_dropout,
)
from monograph.graph.token_rows import tables_with_rows


def frozen_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are not trained; of a module with adapters, the base."""
    return [parameter for parameter in module.parameters() if not parameter.requires_grad]


def copy_sharing_frozen(module: nn.Module) -> nn.Module:
    """Return a copy of a module that shares with it what no training changes.

    The two share frozen parameters and constants, which are buffers outside of the state dict. The copy
    has copies of all other tensors. The tensors may have no data.
    """
    # The memo of copy.deepcopy has, by an object's id, what stands in the object's place in the copy. A
    # tensor with two names has one id, so tied tensors stay tied. The memo also has the copies of the
    # tensors that are not shared, because copy.deepcopy refuses tensors without data.
    memo: dict[int, Any] = {}
    for part in module.modules():
        for parameter in part._parameters.values():
            if parameter is not None and id(parameter) not in memo:
                is_own = parameter.requires_grad
                own = nn.Parameter(parameter.detach().clone()) if is_own else parameter
                memo[id(parameter)] = own
        for name, buffer in part._buffers.items():
            if buffer is not None and id(buffer) not in memo:
                is_constant = name in part._non_persistent_buffers_set
                memo[id(buffer)] = buffer if is_constant else buffer.clone()
    return copy.deepcopy(module, memo)


def copy_with_shared_base(module: nn.Module, lora: Lora, seed: int | None = None) -> nn.Module:
    """Return a copy of a module with adapters that has its own adapters and shares the base.

    The copy holds the same frozen parameters and constants (buffers outside of the state dict), not
    copies of them, so many sets of adapters take the memory of one base. `monograph.Ensemble` trains
    such modules together without copying the base.

    Args:
        module: a module with adapters.
        lora: the options of the copy's adapters. Only rank, alpha, rslora and dropout may differ from
            those of the module.
        seed: the seed of new adapters' values, as in `adapt`; None: the copy has the module's values,
            and its rank.

    Raises:
        UsageError: `seed` is None, but the rank is another one.
    """
    copied = copy_sharing_frozen(module)
    for name, layer in adapted_layers(copied).items():
        rank = layer.lora_A.weight.shape[-2]
        if seed is not None:
            set_new_adapter(layer, name, lora, seed)
        elif rank == lora.rank:
            set_scale_and_dropout(layer, lora)
        else:
            raise UsageError(
                f"rank = {lora.rank}: these adapters have the rank {rank}; adapters of another rank need a seed for "
                "their values"
            )
    return copied


def copy_without_adapters(module: nn.Module) -> nn.Module:
    """Return a copy of a module whose layers have no adapters, and which shares all other parameters
    and buffers with the module.

    Raises:
        UsageError: adapters are on experts, or rows of tokens are trained.
    """
    shared = (*module.parameters(), *module.buffers())
    copied = copy.deepcopy(module, {id(tensor): tensor for tensor in shared})
    if tables_with_rows(copied):
        raise UsageError(
            "rows of tokens are trained (lora.tokens), of which there is no plain form"
        )
    for name, layer in adapted_layers(copied).items():
        if isinstance(layer, ExpertLinear):
            raise UsageError(f"{name} has experts, of which there is no plain form")
        remove_adapter(layer)
        base_classes = (Int8Linear, NF4Linear, nn.Linear)
        layer.__class__ = next(each for each in base_classes if isinstance(layer, each))  # type: ignore[assignment]
    return copied


@torch.no_grad()
def compute_alike(modules: Sequence[nn.Module]) -> bool:
    """Return whether modules of one structure have the same outputs in evaluation mode.

    The seed, rank and scale of a new adapter do not matter, because it has no effect: its B is zero.
    """
    return all(_computes_as(modules[0], other) for other in modules[1:])


def _computes_as(one: nn.Module, other: nn.Module) -> bool:
    """Return whether two modules of one structure have the same outputs; see `compute_alike`."""
    new_factor_names = set[str]()  # A and B of the adapters that have no effect
    layers = zip(adapted_layers(one).items(), adapted_layers(other).values(), strict=True)
    for (name, layer), other_layer in layers:
        if not layer.lora_B.weight.any() and not other_layer.lora_B.weight.any():
            new_factor_names |= {f"{name}.lora_A.weight", f"{name}.lora_B.weight"}
        elif layer.scale != other_layer.scale:
            return False
    tensors = one.state_dict()
    other_tensors = other.state_dict()
    return all(
        # A shared base is not compared with itself.
        tensor.data_ptr() == other_tensors[name].data_ptr()
        or torch.equal(tensor, other_tensors[name])
        for name, tensor in tensors.items()
        if name not in new_factor_names
    )
