"""Compute linear layers in 8-bit floating point.

A layer's forward product and the two products of its backward pass are in fp8, all else is in bf16,
and weights keep their own dtype.

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

# Gradients need more range and fewer digits than weights and activations (Micikevicius et al. 2022,
# "FP8 Formats for Deep Learning", 2209.05433).
FORWARD_DTYPE, BACKWARD_DTYPE = torch.float8_e4m3fn, torch.float8_e5m2
SIDE_MULTIPLE = 16  # the hardware multiplies matrices whose sides are multiples of this
# Lower bound of what counts as a tensor's largest element, so that the scale is finite.
MIN_LARGEST_ELEMENT = 2.0**-100
EXPONENT_BITS = 0x7F800000  # the mask that rounds a positive fp32 number down to a power of two


def convert_(module: nn.Module, weights: Iterable[str]) -> list[str]:
    """Make linear layers of a module compute in fp8 in training mode, in place.

    In evaluation mode they compute as before. The layers stay the same objects, with their
    parameters, names and hooks.

    Args:
        module: the module.
        weights: names of weights; a weight that does not belong to a plain linear layer is ignored.

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
        for name in weights
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

    q4 and q5 are `quantised_to_fp8` to e4m3 and e5m2. Sums are fp32; the forward product's may use
    the hardware's fast mode.

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


def quantised_to_fp8(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round to fp8 after scaling by the largest power of two that keeps every element in range.

    Scaling by a power of two is exact. NaN and infinity are not changed.

    Returns:
        The scaled values in `dtype`, and the factor that undoes the scaling, 0-d fp32.
    """
    largest = values.abs().amax().float().clamp_min(MIN_LARGEST_ELEMENT)
    ratio = torch.finfo(dtype).max / largest
    scale = (ratio.view(torch.int32) & EXPONENT_BITS).view(torch.float32)
    return (values.float() * scale).to(dtype), scale.reciprocal()


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
            dy8_MN, _column_major(w8_NK), dy_inverse_scale, w_inverse_scale, ctx.input_dtype
        )
        dw_NK = compat.scaled_mm(
            dy8_MN.t().contiguous(),
            _column_major(x8_MK),
            dy_inverse_scale,
            x_inverse_scale,
            weight_NK.dtype,
        )
        return dx_MK, dw_NK


def _column_major(matrix: Tensor) -> Tensor:
    """Return the matrix in column-major layout, as the fp8 product needs its right operand."""
    return matrix.t().contiguous().t()
