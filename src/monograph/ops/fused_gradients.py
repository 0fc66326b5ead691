"""Compute linear layers and embeddings that add their weights' gradients to other tensors.

        y = x q(W)^T        dx = dy q(W)        total += dy^T x

q(W) is the weight in the dtype of the products. The sum is part of the matrix product, as in
Megatron's fused layers, and autograd gets no gradient of W. Otherwise separate kernels would write,
cast and add each gradient.

Shapes: V rows, D channels.
"""

from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from monograph import compat
from monograph.ops.autograd import Context

_linear, _embedding = F.linear, F.embedding


class Fused(NamedTuple):
    """The value of a weight's attribute `fused`.

    Attributes:
        weight: the weight, in the dtype of the products if it was rounded before; otherwise each
            product rounds it.
        total: the sum of the weight's gradients, in their dtype.
    """

    weight: Tensor
    total: Tensor


def fusing() -> AbstractContextManager[None]:
    """Return a context in which layers add the gradients of weights with the attribute `fused`.

    Their backward passes add them.
    """
    return compat.replace_functional({"linear": linear, "embedding": embedding})


def fused_of(owner: object) -> Fused | None:
    """Return the attribute `fused` of a weight or a family of weights; None outside of `fusing`."""
    return getattr(owner, "fused", None) if F.linear is linear else None


def linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, owner: object = None
) -> Tensor:
    """Return `F.linear`, in the dtype of the products if the weight is fused.

    Args:
        input: see `F.linear`.
        weight: see `F.linear`.
        bias: see `F.linear`.
        owner: the family of weights whose attribute `fused` counts; None: the weight's own.
    """
    fused = fused_of(weight if owner is None else owner)
    if fused is None:
        return _linear(input, weight, bias)
    kind = input.device.type
    dtype = (
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else fused.weight.dtype
    )
    narrow = None if bias is None else bias.to(dtype)
    return _Linear.apply(input.to(dtype), weight, narrow, fused.weight.to(dtype), fused.total)


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Return `F.embedding`; rows at `padding_idx` add no gradient.

    With `max_norm`, `scale_grad_by_freq` or `sparse` the weight's gradient is left to autograd.
    """
    fused = fused_of(weight)
    if fused is None or max_norm is not None or scale_grad_by_freq or sparse:
        return _embedding(
            input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse
        )
    return _Embedding.apply(input, weight, fused.total, padding_idx)


class _LinearContext(Context):
    total: Tensor


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _LinearContext,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rounded: Tensor,
        total: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(input, rounded)
        # An attribute, because autograd refuses a saved tensor that has changed, and the backward
        # passes of other layers may change this one.
        ctx.total = total
        return _linear(input, rounded, bias)

    @staticmethod
    def backward(ctx: _LinearContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, rounded = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        add_product_(ctx.total, rows, input.flatten(0, -2))
        return grad @ rounded, None, rows.sum(0) if ctx.needs_input_grad[2] else None, None, None


class _EmbeddingContext(Context):
    total: Tensor
    padding_idx: int | None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _EmbeddingContext,
        tokens: Tensor,
        weight: Tensor,
        total: Tensor,
        padding_idx: int | None,
    ) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.total = total
        ctx.padding_idx = padding_idx
        return _embedding(tokens, weight)

    @staticmethod
    def backward(ctx: _EmbeddingContext, grad: Tensor) -> tuple[None, ...]:
        (tokens,) = ctx.saved_tensors
        if ctx.padding_idx is not None:
            grad = grad.masked_fill((tokens == ctx.padding_idx).unsqueeze(-1), 0)
        ctx.total.index_add_(0, tokens.flatten(), grad.flatten(0, -2).to(ctx.total.dtype))
        return None, None, None, None


def block_rows(device_type: str, columns: int) -> int:
    """Return how many rows of this many columns are computed at a time in in-place work.

    On a CPU they are as many as its cache holds.
    """
    return max(1, (8 if device_type == "cpu" else 512) * 2**20 // (4 * columns))


# An operator, because a compiler would fuse plain sums into one kernel that reads the products of
# all chunks of a loss, [V, D] each, and so keep all of them in memory. `flexible_layout`, because
# rows may be padded, and a contiguous layout would need a copy.
@torch.library.custom_op(
    "monograph::add_product_", mutates_args=("total",), tags=[torch.Tag.flexible_layout]
)
def add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left^T @ right to `total`, with any leading dimensions.

    On a GPU, the sum of bf16 products is fp32.
    """
    if total.is_cuda:
        # cuBLAS adds to the result in fp32, without a kernel and a tensor for the product.
        add = torch.ops.aten.addmm if total.ndim == 2 else torch.ops.aten.baddbmm
        if left.dtype == total.dtype:
            add.out(total, left.mT, right, out=total)
        else:
            add.dtype_out(total, left.mT, right, total.dtype, out=total)
        return
    # Some rows of `total` at a time, because a CPU writes the product and reads it again, which its
    # cache should hold.
    rows = block_rows("cpu", total.shape[-1])
    for part, columns in zip(total.split(rows, dim=-2), left.split(rows, dim=-1), strict=True):
        part.add_(columns.mT @ right)


@add_product_.register_fake
def _(total: Tensor, left: Tensor, right: Tensor) -> None:
    pass


@add_product_.register_vmap
def _(info, in_dims, total, left, right):  # type: ignore[no-untyped-def]
    front = [
        t if dim is None else t.movedim(dim, 0)
        for t, dim in zip((total, left, right), in_dims, strict=True)
    ]
    add_product_(*front)
    return None, None
