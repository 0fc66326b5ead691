"""Compute products whose rows are sorted into groups, each with a matrix of its own, as experts are
applied.

        y[p] = W[e] x[p]    for the rows  ends[e - 1] <= p < ends[e]

The two operators are opaque to a compiler, no shape depends on the groups, and on a GPU the host
reads nothing. On a CPU they loop over groups, in fp32 on AMD processors in our own code, or are one
batched product in 16 bits (`monograph.graph.grouped_batches`). On a GPU they are torch's grouped
products where these leave the host alone: in bf16, on compute capability 9 and 10, with rows of
whole 16 bytes. Elsewhere they are batched products of blocks of rows
(`monograph.graph.grouped_blocks`). Members under vmap become further groups.

Shapes: P rows, E groups, N outputs, K inputs.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from monograph.graph import grouped_batches, grouped_blocks
from monograph.graph.matmul import grouped_out, grouped_outer_out, mkl_is_slow
from monograph.ops.autograd import Batched, Context
from monograph.ops.filled import filled_up
from monograph.ops.fused_gradients import fused_of

_WITHOUT_HOST = (9, 10)  # major compute capabilities, see aten/src/ATen/native/cuda/GroupedBlas.cpp


def product_dtype(input: Tensor) -> torch.dtype:
    """Return the dtype of an input's products: its own, or autocast's."""
    kind = input.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype


def grouped_linear(input_PK: Tensor, weight_ENK: Tensor, ends_E: Tensor) -> Tensor:
    """Return the products of each group's rows with its matrix, [P, N], in the dtype of products.

    Args:
        input_PK: rows, sorted by group.
        weight_ENK: the groups' matrices; if they are fused (`monograph.ops.fused_gradients`), their
            gradients are added to the total.
        ends_E: the row after each group's last one, int32, ascending; the last is P.
    """
    dtype = product_dtype(input_PK)
    fused = fused_of(weight_ENK)
    if fused is None:
        return product(input_PK.to(dtype), weight_ENK.to(dtype), ends_E)
    return _Fused.apply(input_PK.to(dtype), weight_ENK, fused.weight.to(dtype), fused.total, ends_E)


def _groups(ends_E: Tensor) -> Iterator[tuple[int, slice]]:
    begin = 0
    for group, end in enumerate(ends_E.tolist()):
        if end > begin:
            yield group, slice(begin, end)
        begin = end


def _by_torch(rows: Tensor, *widths: int) -> bool:
    """Return whether torch's grouped products of these widths leave the host alone."""
    fits = rows.dtype == torch.bfloat16 and all(width % 8 == 0 for width in widths)
    return fits and torch.cuda.get_device_capability(rows.device)[0] in _WITHOUT_HOST


def _product_by_torch(input_PK: Tensor, weight_ENK: Tensor, ends_E: Tensor) -> Tensor:
    return torch._grouped_mm(input_PK.contiguous(), weight_ENK.mT, offs=ends_E)


def _outer_by_torch(left_PN: Tensor, right_PK: Tensor, ends_E: Tensor) -> Tensor:
    return torch._grouped_mm(left_PN.contiguous().mT, right_PK.contiguous(), offs=ends_E)


def _by_own_code(rows: Tensor) -> bool:
    """Return whether products are those of `matmul.cpp`, whose threads share all groups."""
    return rows.dtype == torch.float32 and mkl_is_slow()


def _by_batches(rows: Tensor, ends_E: Tensor) -> bool:
    """Return whether a CPU's products of 16 bits are batched: where there are rows enough for all
    groups.
    """
    return rows.dtype.itemsize == 2 and len(rows) >= grouped_batches.LEAST * len(ends_E)


@torch.library.custom_op("monograph::grouped_linear", mutates_args=())
def product(input_PK: Tensor, weight_ENK: Tensor, ends_E: Tensor) -> Tensor:
    """Return `grouped_linear` of tensors of one dtype."""
    if input_PK.is_cuda:
        multiply = (
            _product_by_torch
            if _by_torch(input_PK, *weight_ENK.shape[1:])
            else grouped_blocks.product
        )
        return multiply(input_PK, weight_ENK, ends_E)
    product_PN = input_PK.new_empty(len(input_PK), weight_ENK.shape[1])
    if _by_own_code(input_PK):
        grouped_out(input_PK, weight_ENK.mT, ends_E, out=product_PN)
        return product_PN
    if _by_batches(input_PK, ends_E):
        return grouped_batches.product(input_PK, weight_ENK, ends_E)
    for group, rows in _groups(ends_E):
        count = rows.stop - rows.start
        if filled_up(count) == count:
            torch.mm(input_PK[rows], weight_ENK[group].mT, out=product_PN[rows])
            continue
        # Or a row's bits would depend on the size of its group.
        some_PK = F.pad(input_PK[rows], (0, 0, 0, filled_up(count) - count))
        product_PN[rows] = (some_PK @ weight_ENK[group].mT)[:count]
    return product_PN


@torch.library.custom_op("monograph::grouped_outer", mutates_args=())
def _outer(left_PN: Tensor, right_PK: Tensor, ends_E: Tensor) -> Tensor:
    """Return sum over a group's rows of left[p] right[p]^T, [E, N, K]."""
    if left_PN.is_cuda:
        by_torch = _by_torch(left_PN, left_PN.shape[1], right_PK.shape[1])
        return (_outer_by_torch if by_torch else grouped_blocks.outer)(left_PN, right_PK, ends_E)
    if _by_own_code(left_PN):
        sum_ENK = left_PN.new_empty(len(ends_E), left_PN.shape[1], right_PK.shape[1])
        grouped_outer_out(left_PN, right_PK, ends_E, out=sum_ENK)
        return sum_ENK
    if _by_batches(left_PN, ends_E):
        return grouped_batches.outer(left_PN, right_PK, ends_E)
    sum_ENK = left_PN.new_zeros(len(ends_E), left_PN.shape[1], right_PK.shape[1])
    for group, rows in _groups(ends_E):
        torch.mm(left_PN[rows].mT, right_PK[rows], out=sum_ENK[group])
    return sum_ENK


@register_flop_formula([torch.ops.monograph.grouped_linear, torch.ops.monograph.grouped_outer])
def _flops(
    left: tuple[int, ...],
    right: tuple[int, ...],
    *_: object,
    out_shape: tuple[int, ...],
    **__: object,
) -> int:
    """Return the FLOPs of an operator by its shapes: two for each row, input and output."""
    return 2 * left[0] * left[1] * right[1]


@product.register_fake
def _(input_PK: Tensor, weight_ENK: Tensor, ends_E: Tensor) -> Tensor:
    return input_PK.new_empty(input_PK.shape[0], weight_ENK.shape[1])


@_outer.register_fake
def _(left_PN: Tensor, right_PK: Tensor, ends_E: Tensor) -> Tensor:
    return left_PN.new_empty(ends_E.shape[0], left_PN.shape[1], right_PK.shape[1])


def _save(ctx: Context, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Context, grad_PN: Tensor) -> tuple[Tensor | None, ...]:
    input_PK, weight_ENK, ends_E = ctx.saved_tensors
    of_input, of_weight, _ = ctx.needs_input_grad
    return (
        product(grad_PN, weight_ENK.mT, ends_E) if of_input else None,
        _outer(grad_PN, input_PK, ends_E) if of_weight else None,
        None,
    )


product.register_autograd(_backward, setup_context=_save)


def _of_members(operator: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, int]]:
    """Return the rule for a batched call: members are further groups."""

    def batched(
        info: Batched, in_dims: tuple[int | None, ...], *tensors: Tensor
    ) -> tuple[Tensor, int]:
        members = info.batch_size
        one, other, ends = (
            tensor.expand(members, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip(tensors, in_dims, strict=True)
        )
        before = torch.arange(members, dtype=ends.dtype, device=ends.device)[:, None] * one.shape[1]
        found = operator(one.flatten(0, 1), other.flatten(0, 1), (ends + before).flatten())
        return found.unflatten(0, (members, -1)), 0

    return batched


product.register_vmap(_of_members(product))
_outer.register_vmap(_of_members(_outer))


class _FusedContext(Context):
    total: Tensor


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _FusedContext,
        input_PK: Tensor,
        weight_ENK: Tensor,
        rounded_ENK: Tensor,
        total_ENK: Tensor,
        ends_E: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(input_PK, rounded_ENK, ends_E)
        ctx.total = total_ENK  # not saved, as other layers' backward passes may change it before
        return product(input_PK, rounded_ENK, ends_E)

    @staticmethod
    def backward(ctx: _FusedContext, grad_PN: Tensor) -> tuple[Tensor | None, ...]:
        input_PK, rounded_ENK, ends_E = ctx.saved_tensors
        ctx.total.add_(_outer(grad_PN, input_PK, ends_E))
        return product(grad_PN, rounded_ENK.mT, ends_E), None, None, None, None


class _Added(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(rows_PN: Tensor, bias_EN: Tensor, ends_E: Tensor) -> Tensor:
        numbers_P1 = torch.arange(rows_PN.shape[0], device=rows_PN.device)[:, None]
        return rows_PN + bias_EN[(numbers_P1 >= ends_E).sum(-1)]

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Context, grad_PN: Tensor) -> tuple[Tensor | None, ...]:
        ones_P1 = grad_PN.new_ones(grad_PN.shape[0], 1)
        return grad_PN, _outer(ones_P1, grad_PN, *ctx.saved_tensors)[:, 0], None


def added(rows_PN: Tensor, bias_EN: Tensor, ends_E: Tensor) -> Tensor:
    """Return each group's rows plus its bias, whose gradient is summed as that of a matrix, in one
    order.
    """
    return _Added.apply(rows_PN, bias_EN, ends_E)


class _Rearranged(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(rows_PD: Tensor, order_P: Tensor, inverse_P: Tensor) -> Tensor:
        return rows_PD[order_P]

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Context, grad_PD: Tensor) -> tuple[Tensor | None, ...]:
        return grad_PD[ctx.saved_tensors[0]], None, None


def rearranged(rows_PD: Tensor, order_P: Tensor, inverse_P: Tensor) -> Tensor:
    """Return `rows[order]`; `inverse` is the inverse permutation, by which the gradient needs no
    sum over indices.
    """
    return _Rearranged.apply(rows_PD, order_P, inverse_P)
