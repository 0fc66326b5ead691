"""What a fast decode step must know about its linear layers.

This file finds out whether the kernels of `monograph.ops.layer_kernels` can compute some layers, and why
not. It returns the tensors of layers in the form in which these kernels take them. And it has the same
products by torch's operators, which are faster for many rows.

A family is a group of layers whose weights are next to each other in one tensor, such as the projections
to queries, keys and values (`monograph.graph.fused_linears`).

Shapes: B rows, K input and N output channels, M channels inside a feed-forward layer.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monograph.decode.banked_layers import (
    Banked,
    BankedHead,
    BankedInt8Linear,
    BankedLinear,
    BankedNF4Linear,
)
from monograph.graph.frozen import FrozenWeight, Int8Linear, NF4Linear, NF4Weight
from monograph.graph.fused_linears import Sibling
from monograph.graph.lora import Adapted, LoraInt8Linear, LoraLinear, LoraNF4Linear
from monograph.model.layers import CentredRMSNorm, Linear, RMSNorm
from monograph.ops.decode_kernels import Norm
from monograph.ops.layer_kernels import (
    Activation,
    LowRank,
    LowRankBank,
    StoredLayer,
    WeightForm,
    fits,
)
from monograph.ops.rms_norm import rms_norm

# Reasons why the kernels cannot compute some layers.
NOT_SIDE_BY_SIDE = "some projections do not lie side by side, because of adapters or hooks"
NOT_PLAIN = "some projections have adapters or hooks"
SEVERAL_DTYPES = "the weights have several dtypes"
# How each class of layer that the kernels can compute stores its weight.
FORMS: dict[type[nn.Module], WeightForm] = {
    Linear: "dense",
    nn.Linear: "dense",  # a layer whose adapter was merged
    Sibling: "dense",
    LoraLinear: "dense",
    BankedLinear: "dense",
    Int8Linear: "int8",
    LoraInt8Linear: "int8",
    BankedInt8Linear: "int8",
    NF4Linear: "nf4",
    LoraNF4Linear: "nf4",
    BankedNF4Linear: "nf4",
}


def are_side_by_side(layers: list[Linear]) -> bool:
    """Return whether these layers are a whole family, in this order."""
    first = layers[0]
    if not isinstance(first, Sibling) or first.family.weight is None:
        return False
    siblings = first.family.layers
    return len(siblings) == len(layers) and all(
        sibling is layer for sibling, layer in zip(siblings, layers, strict=True)
    )


def is_plain(layer: nn.Linear) -> bool:
    """Return whether a layer only computes W x + b, and by itself, not as a part of a family."""
    # A layer whose adapter was merged is an `nn.Linear`.
    return type(layer) in (Linear, nn.Linear) and not has_hooks(layer)


def is_plain_head(head: nn.Linear) -> bool:
    """Return whether a head only computes W x, except for rows that a bank's adapters have of their own."""
    return is_plain(head) or (type(head) is BankedHead and not has_hooks(head))


def has_hooks(layer: nn.Module) -> bool:
    """Return whether a layer computes more than its class says."""
    return bool(layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer))


def obstacle_of_product(layers: list[Linear], dtype: torch.dtype) -> str | None:
    """Return why a single launch cannot compute some layers, or None if it can.

    Args:
        layers: the layers, which all read the same input.
        dtype: the dtype of the input.
    """
    forms = {FORMS.get(type(layer)) for layer in layers}
    if None in forms or any(map(has_hooks, layers)):
        return "some projections have hooks or a forward pass of their own"
    if len(forms) > 1:
        return "some projections that read the same tensor are stored in different forms"
    form = cast(WeightForm, forms.pop())
    summed = layers[0].in_features
    if not fits(form, summed):
        multiple = 64 if form == "nf4" else 16
        return f"the kernels need widths that are multiples of {multiple}, not {summed}"
    if form == "dense" and any(layer.weight.dtype != dtype for layer in layers):
        return SEVERAL_DTYPES
    if form == "nf4" and not _have_one_table(layers):
        return "some weights in 4 bits of the same product have other tables or scales"
    adapters = [layer for layer in layers if isinstance(layer, Adapted)]
    if any(layer.lora_magnitude_vector is not None for layer in adapters):
        return "the kernels do not have adapters with magnitudes (DoRA)"
    have_biases = {layer.bias is not None for layer in layers}
    adapter_forms = {
        (layer.scale, layer.lora_A.weight.shape, layer.lora_A.weight.dtype) for layer in adapters
    }
    if len(have_biases) > 1 or len(adapter_forms) > 1:
        return "some adapters or biases of the same product are not alike"
    return None


def _have_one_table(layers: list[Linear]) -> bool:
    """Return whether weights in 4 bits have the same table of numbers and the same dtype of scales.

    A folder may have some of them in nf4 and others in fp4, and a kernel reads one table for all layers.
    """
    in_4_bits = [layer for layer in layers if isinstance(layer, NF4Weight)]
    scale_types = {layer.levels.dtype for layer in in_4_bits}
    return len(scale_types) == 1 and len({layer.numbers for layer in in_4_bits}) == 1


def joined_tensors(layers: list[Linear]) -> tuple[Tensor, Tensor | None] | None:
    """Return one tensor with the weights of these layers, one after another, and one with their biases.

    Returns:
        The weights and the biases, which are None if there are none. Or None instead of both: the weights
        are not next to each other in memory, or a layer has an adapter, a hook or a weight in few bits.
    """
    first = layers[0]
    if len(layers) == 1:
        return (first.weight, first.bias) if is_plain(first) else None
    if not are_side_by_side(layers) or any(map(has_hooks, layers)):
        return None
    return family_weights(first)


def tensors_of(layer: nn.Linear) -> StoredLayer:
    """Return the tensors of a layer as the kernels take them."""
    form = FORMS[type(layer)]
    stored = layer.stored_tensors() if isinstance(layer, FrozenWeight) else (layer.weight,)
    adapter: LowRank | LowRankBank | None = None
    if isinstance(layer, Adapted):
        adapter = LowRank(layer.lora_A.weight, layer.lora_B.weight, layer.scale)
    elif isinstance(layer, Banked):
        slot_B = layer.bank.slot_B
        if slot_B is not None:
            scale_S = layer.bank.scale_S
            adapter = LowRankBank(
                layer.bank_A_SRK, layer.bank_B_SRN, scale_S, layer.bank_gain_SN, slot_B
            )
    return StoredLayer(form, stored, layer.bias, adapter)


def family_weights(layer: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Return the joined weights of all layers of a layer's family, and their joined biases or None."""
    family = cast(Sibling, layer).family
    assert family.weight is not None  # the callers have checked this by `are_side_by_side`
    return family.weight, family.bias


def norm_of(layer: RMSNorm) -> Norm:
    """Return a norm as the kernels take it."""
    return Norm(layer.weight, layer.eps, isinstance(layer, CentredRMSNorm))


def torch_project(
    x_BK: Tensor,
    weight_NK: Tensor,
    norm: Norm | None = None,
    bias_N: Tensor | None = None,
    residual_BN: Tensor | None = None,
) -> Tensor:
    """Return what `project` returns, by torch's operators."""
    if norm is not None:
        x_BK = _normalised(x_BK, norm)
    y_BN = F.linear(x_BK, weight_NK, bias_N)
    return y_BN if residual_BN is None else residual_BN + y_BN


def torch_project_gated(
    x_BK: Tensor, weight_NK: Tensor, norm: Norm, activation: Activation
) -> Tensor:
    """Return what `project_gated` returns, by torch's operators."""
    gate_BM, up_BM = F.linear(_normalised(x_BK, norm), weight_NK).chunk(2, -1)
    if activation == "gelu":
        return F.gelu(gate_BM, approximate="tanh") * up_BM
    return F.silu(gate_BM) * up_BM


def _normalised(x_BK: Tensor, norm: Norm) -> Tensor:
    """Return the RMS norm of x; a centred norm stores its gain minus 1."""
    gain_K = 1 + norm.gain_K if norm.is_centred else norm.gain_K
    return rms_norm(x_BK, gain_K, norm.eps)
