"""Compute a gated delta net in a decode step, by the kernels of `monograph.ops.delta_net_kernels`.

`delta_net_step` computes `monograph.model.delta_net.GatedDeltaNet` for one token per row, with the norm
before it and the addition to the residual stream, in four launches.

Shape suffixes: B rows, D hidden size, P columns of all projections, C channels of the convolution, X
any number of channels.
"""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from monograph.decode.fast_projections import (
    NOT_PLAIN,
    NOT_SIDE_BY_SIDE,
    SEVERAL_DTYPES,
    are_side_by_side,
    family_weights,
    has_hooks,
    is_plain,
)
from monograph.model.delta_net import GatedDeltaNet
from monograph.model.layer_types import L2_NORM_EPS
from monograph.model.layers import Linear
from monograph.model.recurrent import LayerState
from monograph.ops.decode_kernels import Norm, channels_at_once
from monograph.ops.delta_net_kernels import (
    MAX_HEAD,
    MAX_TAPS,
    DeltaNetParameters,
    DeltaNetShape,
    convolve_token,
    delta_rule_token,
)


def obstacle_of_delta_net(delta_net: GatedDeltaNet, dtype: torch.dtype) -> str | None:
    """Return why the kernels cannot compute a delta net in this dtype, or None if they can."""
    if max(delta_net.key_dim, delta_net.value_dim) > MAX_HEAD:
        return (
            f"the kernels of delta nets need heads of at most {MAX_HEAD} channels, "
            f"not {delta_net.key_dim} and {delta_net.value_dim}"
        )
    taps = delta_net.conv1d.weight.shape[-1]
    if taps > MAX_TAPS:
        return f"the kernels of delta nets convolve at most {MAX_TAPS} tokens, not {taps}"
    out_proj = delta_net.out_proj
    if not channels_at_once(out_proj.in_features):
        return f"the kernels need widths that are multiples of 16, not {out_proj.in_features}"
    if not are_side_by_side(_projections(delta_net)):
        return NOT_SIDE_BY_SIDE
    if not is_plain(out_proj) or any(map(has_hooks, _projections(delta_net))):
        return NOT_PLAIN
    if any(parameter.dtype != dtype for parameter in delta_net.parameters()):
        return SEVERAL_DTYPES
    return None


def delta_net_step(
    delta_net: GatedDeltaNet,
    hidden_BD: Tensor,
    norm: Norm,
    position_B: Tensor,
    recurrence: LayerState,
    project: Callable[..., Tensor],
) -> Tensor:
    """Return hidden + delta_net(norm(hidden)) for one token per row.

    Args:
        delta_net: a layer without an `obstacle_of_delta_net`.
        hidden_BD: the residual stream.
        norm: the norm before the layer.
        position_B: the tokens' positions, int64.
        recurrence: the layer's state, to which new tokens are added.
        project: `monograph.ops.layer_kernels.project`, or for many rows `torch_project`.
    """
    # The weights of all projections, one after another. They have no biases.
    weight_PD, _ = family_weights(_projections(delta_net)[0])
    projected_BP = project(hidden_BD, weight_PD, norm)
    shape = _shape(delta_net)
    convolved_BC, is_new_B = convolve_token(
        projected_BP,
        delta_net.conv1d.weight,
        position_B,
        recurrence.count_B,
        recurrence.limit_B,
        recurrence.inputs_BKC,
        shape,
    )
    parameters = DeltaNetParameters(
        A_log_H=delta_net.A_log,
        dt_bias_H=delta_net.dt_bias,
        gain_V=delta_net.norm.weight,
        eps=delta_net.norm.eps,
        l2_eps=L2_NORM_EPS,
    )
    out_BX = delta_rule_token(
        convolved_BC,
        projected_BP,
        parameters,
        is_new_B,
        recurrence.state_BHEV,
        recurrence.count_B,
        shape,
    )
    return project(out_BX, delta_net.out_proj.weight, residual_BN=hidden_BD)


def _projections(delta_net: GatedDeltaNet) -> list[Linear]:
    """Return the input projections of a delta net, in the order of their columns."""
    return [cast(Linear, getattr(delta_net, name)) for name in delta_net.siblings]


def _shape(delta_net: GatedDeltaNet) -> DeltaNetShape:
    key_heads = delta_net.qkv_widths[0] // delta_net.key_dim
    return DeltaNetShape(
        key_heads=key_heads,
        value_heads=key_heads * delta_net.value_heads_per_key_head,
        key_dim=delta_net.key_dim,
        value_dim=delta_net.value_dim,
        by_key_head=delta_net.by_key_head,
    )
