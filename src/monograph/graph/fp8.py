"""Compute linear layers, or the head, in 8-bit floating point.

A layer's forward product and the two products of its backward pass are in fp8, all else is in bf16,
and weights keep their own dtype. A head computes the logits and the gradient of the hidden states in
fp8, and the gradient of its weight in bf16 (`monograph.ops.cross_entropy`).

Shapes: M rows (all leading dimensions), K inputs, N outputs.
"""

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn

from monograph import compat
from monograph.errors import UsageError
from monograph.graph.lora import adapted_layers
from monograph.graph.siblings import families
from monograph.ops.autograd import Context
from monograph.ops.fp8 import (
    BACKWARD_DTYPE,
    FORWARD_DTYPE,
    SIDE_MULTIPLE,
    column_major,
    quantised_to_fp8,
)


def convert_(module: nn.Module, weight_names: Iterable[str]) -> list[str]:
    """Make linear layers of a module compute in fp8 in training mode, in place.

    In evaluation mode they compute as before. The layers stay the same objects, with their
    parameters, names and hooks.

    Args:
        module: the module.
        weight_names: names of weights; a weight that does not belong to a plain linear layer is ignored.

    Returns:
        The names of weights whose layers stay in bf16, because a side is not a multiple of 16.

    Raises:
        UsageError: no layer can compute in fp8, siblings are fused, or the module has adapters.
    """
    if adapted_layers(module):
        raise UsageError(
            "fp8 is for weights that are trained, but weights with adapters are frozen: use bf16"
        )
    if families(module):
        raise UsageError(
            "fp8 scales each weight by itself, so siblings cannot be fused: unfuse_siblings(model) first, or use bf16"
        )
    layers = {
        name: module.get_submodule(name.rpartition(".")[0])
        for name in weight_names
        if name.endswith(".weight")
    }
    linear_layers = {
        name: cast(nn.Linear, layer)
        for name, layer in layers.items()
        if type(layer).forward is nn.Linear.forward
    }
    left_in_bf16 = [
        name
        for name, layer in linear_layers.items()
        if any(side % SIDE_MULTIPLE for side in layer.weight.shape)
    ]
    if len(left_in_bf16) == len(linear_layers):
        raise UsageError(
            f"fp8 finds no linear layer inside a block with sides that are multiples of {SIDE_MULTIPLE}: use bf16"
        )
    for name in linear_layers.keys() - set(left_in_bf16):
        linear_layers[name].__class__ = Float8Linear
    return left_in_bf16


def convert_head_(module: nn.Module) -> None:
    """Let the default loss compute the head's products in fp8 while it trains, in place.

    Raises:
        UsageError: the module has adapters, its `lm_head` is missing or is not a plain linear layer,
            or a side of the head's weight is not a multiple of 16.
    """
    if adapted_layers(module):
        raise UsageError(
            "fp8_head is for a head that is trained, but beside adapters it is frozen: use bf16"
        )
    head = getattr(module, "lm_head", None)
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        raise UsageError("fp8_head needs a module whose lm_head is a plain linear layer: use bf16")
    vocabulary, width = head.weight.shape
    if vocabulary % SIDE_MULTIPLE or width % SIDE_MULTIPLE:
        raise UsageError(
            f"fp8_head needs a vocabulary and a width that are multiples of {SIDE_MULTIPLE}, not "
            f"{vocabulary:,} and {width:,}: use bf16"
        )
    head.__class__ = Float8Head


class Float8Head(nn.Linear):
    """A head whose products are fp8 in the default loss while it trains; see `convert_head_`."""


class Float8Linear(nn.Linear):
    """A linear layer whose products are fp8 in training mode; see `convert_`."""

    def forward(self, input: Tensor) -> Tensor:
        """Map [..., K] to [..., N] in bf16, or in evaluation mode as `nn.Linear` does."""
        if not self.training:
            return super().forward(input)
        output = fp8_linear(input, self.weight)
        return output if self.bias is None else output + self.bias.to(output.dtype)


def fp8_linear(input: Tensor, weight_NK: Tensor) -> Tensor:
    """Return input @ weight^T with operands rounded to fp8, one scale per tensor.

        y = q4(x) q4(W)^T        dx = q5(dy) q4(W)        dW = q5(dy)^T q4(x)

    q4 and q5 are `quantised_to_fp8` to e4m3 and e5m2. Sums are fp32, except in the forward product, in
    which a GPU may add up parts of a sum in fewer bits (its fast mode).

    Args:
        input: x, [..., K], K a multiple of 16.
        weight_NK: W, N a multiple of 16.

    Returns:
        [..., N], bf16. The gradients have the dtypes of x and W.
    """
    x_MK = input.reshape(-1, input.shape[-1])
    rows = len(x_MK)
    # The product dW sums over rows, so their number must be a multiple of 16 as well.
    x_MK = nn.functional.pad(x_MK, (0, 0, 0, -rows % SIDE_MULTIPLE))
    y_MN: Tensor = _Linear.apply(x_MK, weight_NK)
    return y_MN[:rows].view(*input.shape[:-1], -1)


class _LinearContext(Context):
    input_dtype: torch.dtype


class _Linear(torch.autograd.Function):
    """Compute the three products of `fp8_linear`."""

    @staticmethod
    def forward(ctx: _LinearContext, x_MK: Tensor, weight_NK: Tensor) -> Tensor:
        x8_MK, x_inverse_scale = quantised_to_fp8(x_MK, FORWARD_DTYPE)
        w8_NK, w_inverse_scale = quantised_to_fp8(weight_NK, FORWARD_DTYPE)
        # The input is saved in fp8. The weight is saved as it is, since it is in memory anyway, and
        # rounded again in the backward pass; its rounded copy would take more memory until then.
        ctx.save_for_backward(x8_MK, x_inverse_scale, weight_NK)
        ctx.input_dtype = x_MK.dtype
        return compat.scaled_mm(
            x8_MK, w8_NK.t(), x_inverse_scale, w_inverse_scale, torch.bfloat16, fast=True
        )

    @staticmethod
    def backward(ctx: _LinearContext, dy_MN: Tensor) -> tuple[Tensor, Tensor]:
        x8_MK, x_inverse_scale, weight_NK = ctx.saved_tensors
        dy8_MN, dy_inverse_scale = quantised_to_fp8(dy_MN, BACKWARD_DTYPE)
        w8_NK, w_inverse_scale = quantised_to_fp8(weight_NK, FORWARD_DTYPE)
        dx_MK = compat.scaled_mm(
            dy8_MN, column_major(w8_NK), dy_inverse_scale, w_inverse_scale, ctx.input_dtype
        )
        dw_NK = compat.scaled_mm(
            dy8_MN.t().contiguous(),
            column_major(x8_MK),
            dy_inverse_scale,
            x_inverse_scale,
            weight_NK.dtype,
        )
        return dx_MK, dw_NK
