"""Round tensors to 8-bit floating point, and multiply by a weight that was rounded in this way.

In equations, q4 rounds to e4m3 (FORWARD_DTYPE) and q5 to e5m2 (BACKWARD_DTYPE): 8 bits with 4 or 5 bits of
exponent.

Shapes: C tokens, D hidden size, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from monograph import compat

# Gradients need more range and fewer digits than weights and activations (Micikevicius et al. 2022,
# "FP8 Formats for Deep Learning", 2209.05433).
FORWARD_DTYPE, BACKWARD_DTYPE = torch.float8_e4m3fn, torch.float8_e5m2
SIDE_MULTIPLE = 16  # the hardware multiplies matrices whose sides are multiples of this
# Lower bound of what counts as a tensor's largest element, so that the scale is finite.
MIN_LARGEST_ELEMENT = 2.0**-100
EXPONENT_BITS = 0x7F800000  # the mask that rounds a positive fp32 number down to a power of two


def quantised_to_fp8(
    values: Tensor, dtype: torch.dtype, largest: float | None = None
) -> tuple[Tensor, Tensor]:
    """Round to fp8 after scaling by the largest power of two that keeps every element in range.

    Scaling by a power of two is exact. NaN and infinity are not changed.

    Args:
        values: the tensor.
        dtype: an 8-bit floating dtype.
        largest: an upper bound of the elements' absolute values; None: their maximum is computed.

    Returns:
        The scaled values in `dtype`, and the factor that undoes the scaling, 0-d fp32.
    """
    if largest is None:
        size = values.abs().amax().float().clamp_min(MIN_LARGEST_ELEMENT)
    else:
        size = torch.full((), largest, device=values.device)
    ratio = torch.finfo(dtype).max / size
    scale = (ratio.view(torch.int32) & EXPONENT_BITS).view(torch.float32)
    return (values.float() * scale).to(dtype), scale.reciprocal()


def column_major(matrix: Tensor) -> Tensor:
    """Return the matrix in column-major layout, as the fp8 product needs its right operand."""
    return matrix.t().contiguous().t()


class Float8Weight(NamedTuple):
    """A classifier's weight, rounded to e4m3 once for all chunks of tokens.

    Attributes:
        weight_VD: the rounded weight, row-major.
        columns_VD: the same numbers, column-major.
        inverse_scale: what undoes its scaling, 0-d fp32.
    """

    weight_VD: Tensor
    columns_VD: Tensor
    inverse_scale: Tensor

    @classmethod
    def of(cls, weight_VD: Tensor) -> "Float8Weight":
        """Round a weight whose sides are multiples of 16."""
        weight8_VD, inverse_scale = quantised_to_fp8(weight_VD, FORWARD_DTYPE)
        return cls(weight8_VD, column_major(weight8_VD), inverse_scale)

    def logits(self, hidden_CD: Tensor) -> Tensor:
        """Return q4(x) q4(W)^T, [C, V] in bf16; a GPU may accumulate parts in less than fp32."""
        hidden8_CD, inverse_scale = quantised_to_fp8(hidden_CD, FORWARD_DTYPE)
        return compat.scaled_mm(
            hidden8_CD,
            self.weight_VD.t(),
            inverse_scale,
            self.inverse_scale,
            torch.bfloat16,
            fast=True,
        )

    def hidden_gradient(self, grad_CV: Tensor, largest: float) -> Tensor:
        """Return q5(dz) q4(W), [C, D] in bf16.

        Args:
            grad_CV: dz.
            largest: an upper bound of its elements' absolute values. The scale is made from it, so
                that no kernel has to read dz to find their maximum.
        """
        grad8_CV, inverse_scale = quantised_to_fp8(grad_CV, BACKWARD_DTYPE, largest)
        return compat.scaled_mm(
            grad8_CV, self.columns_VD, inverse_scale, self.inverse_scale, torch.bfloat16
        )
