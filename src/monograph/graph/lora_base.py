"""Quantise the base, the frozen weights under adapters, and dequantise single weights of it."""

from collections.abc import Collection
from typing import Literal

import torch
from torch import Tensor, nn

from monograph.graph import inspect
from monograph.graph.experts import ExpertLinear, Int8Experts, NF4Experts
from monograph.graph.frozen import FrozenWeight, Int8Linear, NF4Linear
from monograph.graph.lora_targets import expert_layers, linear_layers
from monograph.graph.mmap_weights import codes_of

OptionalDevice = torch.device | None  # None: the device of the weights
Base = Literal["auto", "int8", "nf4"]
# For each format of a quantised base: the class of linear layers, and that of the experts of a mixture.
BASES: dict[str, tuple[type[FrozenWeight], type[FrozenWeight]]] = {
    "int8": (Int8Linear, Int8Experts),
    "nf4": (NF4Linear, NF4Experts),
}


def quantise_base(
    module: nn.Module,
    base: str,
    device: OptionalDevice,
    dense: Collection[str] = (),
    exact_scales: bool = False,
) -> None:
    """Quantise the weights of experts and of all linear layers except the head.

    A weight that its file has in this format is taken as it is, without rounding.

    Args:
        module: the module.
        base: the format, a key of `BASES`.
        device: where each layer is moved once it is quantised; None: layers are not moved.
        dense: names of layers that are not quantised.
        exact_scales: whether weights that are rounded here keep their scales in fp32; see `NF4Weight`.
    """
    linear_class, expert_class = BASES[base]
    shared = inspect.shared_parameters(module)
    for name, layer in {**linear_layers(module), **expert_layers(module)}.items():
        weight: Tensor = layer.weight  # type: ignore[assignment]
        if name in dense:
            continue
        # A weight that two layers share stays dense, because the other layer, such as an embedding, may
        # not be able to read a quantised one.
        if id(weight) in shared:
            continue
        codes = codes_of(weight, base)
        layer.__class__ = expert_class if isinstance(layer, ExpertLinear) else linear_class
        assert isinstance(layer, FrozenWeight)
        if codes is None:
            layer.freeze(weight, exact_scales)
        else:
            layer.adopt(codes)
        # Each layer is moved once it is quantised, so that the device never has the unquantised base.
        if device is not None:
            layer.to(device)


def base_weight(layer: nn.Linear | ExpertLinear) -> Tensor:
    """Return W, dequantised if the base is quantised."""
    return layer.dense() if isinstance(layer, FrozenWeight) else layer.weight
