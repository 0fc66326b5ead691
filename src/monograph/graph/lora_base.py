"""Quantise the base, the frozen weights under adapters, and dequantise single weights of it."""

from typing import Literal

import torch
from torch import Tensor, nn

from monograph.graph import inspect
from monograph.graph.experts import ExpertLinear, Int8Experts, NF4Experts
from monograph.graph.frozen import FrozenWeight, Int8Linear, NF4Linear
from monograph.graph.lora_targets import expert_layers, linear_layers

OptionalDevice = torch.device | None  # None: the device of the weights
Base = Literal["auto", "int8", "nf4"]
# For each format of a quantised base: the class of linear layers, and that of the experts of a mixture.
BASES: dict[str, tuple[type[FrozenWeight], type[FrozenWeight]]] = {
    "int8": (Int8Linear, Int8Experts),
    "nf4": (NF4Linear, NF4Experts),
}


def quantise_base(module: nn.Module, base: str, device: OptionalDevice) -> None:
    """Quantise the weights of experts and of all linear layers except the head.

    Args:
        module: the module.
        base: the format, a key of `BASES`.
        device: where each layer is moved once it is quantised; None: layers are not moved.
    """
    linear_class, expert_class = BASES[base]
    shared = inspect.shared_parameters(module)
    for layer in (*linear_layers(module).values(), *expert_layers(module).values()):
        weight = layer.weight
        # A weight that two layers share stays dense, because the other layer, such as an embedding, may
        # not be able to read a quantised one.
        if id(weight) in shared:
            continue
        layer.__class__ = expert_class if isinstance(layer, ExpertLinear) else linear_class
        layer.freeze(weight)  # type: ignore[operator]
        # Each layer is moved once it is quantised, so that the device never has the unquantised base.
        if device is not None:
            layer.to(device)


def base_weight(layer: nn.Linear | ExpertLinear) -> Tensor:
    """Return W, dequantised if the base is quantised."""
    return layer.dense() if isinstance(layer, FrozenWeight) else layer.weight
