"""Compute linear layers and embeddings whose backward pass adds the weight's gradient to a buffer.

        y = x q(W)^T        dx = dy q(W)        total += dy^T x

q(W) is the weight in the dtype of the products, and `total` the buffer in which an update's gradients
are summed. The matrix product adds to this sum itself, as in Megatron's gradient accumulation fusion, and
autograd gets no gradient of W. Otherwise separate kernels would write, cast and add each gradient. A total
may be `unwritten` (unwritten.py): it then has numbers of an earlier update, and the first product replaces
them.

Inside the context `fused_gradients()`, layers do this for each weight that has the attribute
`fused_gradient`.

Shapes: V rows of the weight, D channels.
"""

from contextlib import AbstractContextManager
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monograph import compat
from monograph.ops.autograd import Context
from monograph.ops.unwritten import take, zero_if_unwritten_

M = TypeVar("M", bound=nn.Module)
# Torch's own functions, which `fused_gradients` replaces in `F`.
_linear, _embedding = F.linear, F.embedding


class FusedGradient(NamedTuple):
    """The value of a weight's attribute `fused_gradient`.

    Attributes:
        weight: the weight, in the dtype of the products if it was rounded before; otherwise each
            product rounds it.
        total: the sum of the weight's gradients, in their dtype.
    """

    weight: Tensor
    total: Tensor


# The classes of models that `takes_no_gradients` has marked.
_TAKE_NO_GRADIENTS = set[type[nn.Module]]()


def takes_no_gradients(model: type[M]) -> type[M]:
    """Declare, as a decorator, that a model's forward pass computes no gradients itself.

    A forward pass that does, for example by `torch.autograd.grad`, may need the gradients of weights,
    which fused layers do not give to autograd. The declaration is not inherited, since a subclass may
    have another forward pass.
    """
    _TAKE_NO_GRADIENTS.add(model)
    return model


def may_fuse(model: type[nn.Module]) -> bool:
    """Return whether `takes_no_gradients` has marked this class, so that its gradients may be fused."""
    return model in _TAKE_NO_GRADIENTS


def fused_gradients() -> AbstractContextManager[None]:
    """Return a context for forward passes whose layers add their weights' gradients to `total`.

    It replaces `F.linear` and `F.embedding` by this file's functions.
    """
    return compat.replace_functional({"linear": linear, "embedding": embedding})


def gradients_are_fused() -> bool:
    """Return whether this is called inside the context `fused_gradients()`."""
    return F.linear is linear


def fused_gradient_of(owner: object) -> FusedGradient | None:
    """Return the attribute of a weight or a family of weights; None outside of `fused_gradients()`."""
    return getattr(owner, "fused_gradient", None) if gradients_are_fused() else None


def linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, owner: object = None
) -> Tensor:
    """Return `F.linear`; with a fused gradient, it is in the dtype of the products.

    Args:
        input: see `F.linear`.
        weight: see `F.linear`.
        bias: see `F.linear`.
        owner: the object whose attribute `fused_gradient` is used; None: the weight itself. It is
            another object if several layers are one product (`monograph.graph.fused_linears`).
    """
    fused = fused_gradient_of(weight if owner is None else owner)
    if fused is None:
        return _linear(input, weight, bias)
    device_type = input.device.type
    dtype = fused.weight.dtype
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
    rounded_bias = None if bias is None else bias.to(dtype)
    return _Linear.apply(input.to(dtype), weight, rounded_bias, fused.weight.to(dtype), fused.total)


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
    fused = fused_gradient_of(weight)
    if fused is None or max_norm is not None or scale_grad_by_freq or sparse:
        return _embedding(
            input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse
        )
    return _Embedding.apply(input, weight, fused.total, padding_idx)


class _LinearContext(Context):
    weight: Tensor
    total: Tensor


class _Linear(torch.autograd.Function):
    """Compute `linear` with a fused gradient.

    `rounded` and `total` are the fields of `FusedGradient`. The forward pass does not read `weight`. It is
    an argument so that autograd calls the backward pass even if the input needs no gradient, and because
    `monograph.ops.unwritten` finds the total by its weight.
    """

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
        # The total is not a saved tensor: autograd refuses a saved tensor that has changed, and the
        # backward passes of other layers may change the total.
        ctx.total = total
        ctx.weight = weight
        return _linear(input, rounded, bias)

    @staticmethod
    def backward(ctx: _LinearContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, rounded = ctx.saved_tensors
        grad_rows = grad.flatten(0, -2)
        add_product_(ctx.total, grad_rows, input.flatten(0, -2), ctx.weight)
        needs_bias_grad = ctx.needs_input_grad[2]
        bias_grad = grad_rows.sum(0) if needs_bias_grad else None
        return grad @ rounded, None, bias_grad, None, None


class _EmbeddingContext(Context):
    weight: Tensor
    total: Tensor
    padding_idx: int | None


class _Embedding(torch.autograd.Function):
    """Compute `embedding` with a fused gradient; `total` is that of `FusedGradient`."""

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
        ctx.weight = weight
        ctx.padding_idx = padding_idx
        return _embedding(tokens, weight)

    @staticmethod
    def backward(ctx: _EmbeddingContext, grad: Tensor) -> tuple[None, ...]:
        (tokens,) = ctx.saved_tensors
        if ctx.padding_idx is not None:
            grad = grad.masked_fill((tokens == ctx.padding_idx).unsqueeze(-1), 0)
        zero_if_unwritten_(ctx.total, ctx.weight)
        ctx.total.index_add_(0, tokens.flatten(), grad.flatten(0, -2).to(ctx.total.dtype))
        return None, None, None, None


def block_rows(device_type: str, columns: int) -> int:
    """Return how many fp32 rows of this number of columns are computed at a time.

    They take at most 8 MiB on a CPU, to fit its cache, and at most 512 MiB on a GPU.
    """
    block_bytes = (8 if device_type == "cpu" else 512) * 2**20
    return max(1, block_bytes // (4 * columns))


# This is a custom operator for a loss that adds the products of several chunks, [V, D] each, to one total.
# A compiler would fuse plain sums into one kernel that reads all of these products, so all of them would be
# in memory at the same time. It has the tag `flexible_layout` because rows may be padded; a contiguous
# layout would need a copy.
@torch.library.custom_op(
    "monograph::add_product_", mutates_args=("total",), tags=[torch.Tag.flexible_layout]
)
def add_product_(total: Tensor, left: Tensor, right: Tensor, weight: Tensor | None = None) -> None:
    """Add left^T @ right to `total`, with any leading dimensions.

    On a GPU, the sum of bf16 products is fp32.

    Args:
        total: [..., V, D].
        left: [..., C, V].
        right: [..., C, D].
        weight: the weight whose gradients `total` sums, or the first of several such weights. If the
            total is `unwritten`, the product replaces its numbers. None: `total` sums something else,
            and is never unwritten.
    """
    is_first = take(total, weight)
    if total.is_cuda and is_first:
        multiply = torch.ops.aten.mm if total.ndim == 2 else torch.ops.aten.bmm
        if left.dtype == total.dtype:
            multiply.out(left.mT, right, out=total)
        else:
            multiply.dtype_out(left.mT, right, total.dtype, out=total)
        return
    if total.is_cuda:
        # cuBLAS adds to the result in fp32, without a kernel and a tensor for the product.
        add = torch.ops.aten.addmm if total.ndim == 2 else torch.ops.aten.baddbmm
        if left.dtype == total.dtype:
            add.out(total, left.mT, right, out=total)
        else:
            add.dtype_out(total, left.mT, right, total.dtype, out=total)
        return
    # Only a part of the rows of `total` is computed at a time: a CPU writes their product and reads it
    # again, so the product should fit into its cache.
    rows = block_rows("cpu", total.shape[-1])
    for part, columns in zip(total.split(rows, dim=-2), left.split(rows, dim=-1), strict=True):
        product_of_part = columns.mT @ right
        if is_first:
            part.copy_(product_of_part)
        else:
            part.add_(product_of_part)


@add_product_.register_fake
def _(total: Tensor, left: Tensor, right: Tensor, weight: Tensor | None = None) -> None:
    pass


@add_product_.register_vmap
def _(info, in_dims, total, left, right, weight=None):  # type: ignore[no-untyped-def]
    with_member_axis_first = [
        tensor if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip((total, left, right), in_dims[:3], strict=True)
    ]
    add_product_(*with_member_axis_first)
    return None, None


@torch.library.custom_op("monograph::product", mutates_args=(), tags=[torch.Tag.flexible_layout])
def product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return left^T @ right in `dtype`, as the beginning of a sum; `add_product_` adds further products.

    On a GPU, as in `add_product_`, the sum of bf16 products is fp32.

    Args:
        left: [C, V].
        right: [C, D].
        dtype: the dtype of left, or a wider one.

    Returns:
        [V, D].
    """
    if left.is_cuda and left.dtype != dtype:
        return torch.mm(left.mT, right, out_dtype=dtype)
    return (left.mT @ right).to(dtype)


@product.register_fake
def _(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    return left.new_empty(left.shape[1], right.shape[1], dtype=dtype)


# This is a custom operator for a total that changes twice in a graph, as it does if the head is tied to the
# embedding. A compiler would not add to such a total in place. It would make a new tensor of the sum, and
# copy the result of all changes to the total.
@torch.library.custom_op("monograph::add_scaled_", mutates_args=("total",))
def add_scaled_(total: Tensor, grad: Tensor, factor: Tensor, weight: Tensor | None = None) -> None:
    """Add factor * grad to `total`.

    Args:
        total: any shape.
        grad: of the same shape and dtype.
        factor: 0-d, of the same dtype.
        weight: see `add_product_`.
    """
    is_first = take(total, weight)
    if total.is_cuda and total.is_contiguous() and grad.is_contiguous():
        from monograph.ops.scaled_sum_kernel import launch

        launch(total, grad, factor, is_first)
    elif is_first:
        torch.mul(grad, factor, out=total)
    else:
        total.add_(grad * factor)


@add_scaled_.register_fake
def _(total: Tensor, grad: Tensor, factor: Tensor, weight: Tensor | None = None) -> None:
    pass
