"""Add a scaled tensor to another one by a Triton kernel; see `monograph.ops.fused_gradients.add_scaled_`.

The grid has one axis, with a program for each T elements of the tensors.
"""

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

_ELEMENTS_AT_ONCE: Final = 2048


@triton.jit
def _add_scaled(total, grad, factor, size, IS_FIRST: tl.constexpr, T: tl.constexpr):
    """Add factor * grad to T elements of the total, or write it to them if it is the first summand."""
    element_T = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    is_element_T = element_T < size
    total_at_T = total + element_T
    grad_T = tl.load(grad + element_T, mask=is_element_T, eviction_policy="evict_first")
    sum_T = grad_T * tl.load(factor)
    if not IS_FIRST:
        sum_T += tl.load(total_at_T, mask=is_element_T)
    tl.store(total_at_T, sum_T, mask=is_element_T)


def launch(total: Tensor, grad: Tensor, factor: Tensor, is_first: bool) -> None:
    """Launch the kernel.

    Args:
        total: contiguous; it is changed.
        grad: contiguous.
        factor: 0-d.
        is_first: whether the total is written, because it holds no sum yet.
    """
    size = total.numel()
    if size:
        _add_scaled[(triton.cdiv(size, _ELEMENTS_AT_ONCE),)](
            total, grad, factor, size, IS_FIRST=is_first, T=_ELEMENTS_AT_ONCE
        )
