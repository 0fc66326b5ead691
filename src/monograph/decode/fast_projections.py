"""The projections of a fast decode step: which layers its kernels can compute, and torch's products
for more rows than the kernels are fast for.

Shapes: B rows, K input and N output channels, M channels inside a feed-forward layer.
"""

from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from monograph.graph.fused_linears import Sibling
from monograph.model.layers import CentredRMSNorm, Linear, RMSNorm
from monograph.ops.decode_kernels import Activation, Norm
from monograph.ops.rms_norm import rms_norm

# Why the kernels cannot compute some projections.
NOT_SIDE_BY_SIDE = "some projections do not lie side by side, because of adapters or hooks"
NOT_PLAIN = "some projections have adapters or hooks"


def are_side_by_side(layers: list[Linear]) -> bool:
    """Return whether the weights of these layers are one tensor, in this order and without others."""
    first = layers[0]
    if not isinstance(first, Sibling) or first.family.weight is None:
        return False
    siblings = first.family.layers
    if len(siblings) != len(layers):
        return False
    return all(sibling is layer for sibling, layer in zip(siblings, layers, strict=True))


def is_plain(layer: nn.Linear) -> bool:
    """Return whether a layer's output is W x + b and no more."""
    has_hooks = layer._forward_hooks or layer._forward_pre_hooks
    return type(layer) is Linear and "forward" not in vars(layer) and not has_hooks


def family_weights(layer: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Return the weights and biases of a layer and its siblings, one after another in memory."""
    family = cast(Sibling, layer).family
    assert family.weight is not None
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
    gain_K = 1 + norm.gain_K if norm.is_centred else norm.gain_K
    return rms_norm(x_BK, gain_K, norm.eps)
