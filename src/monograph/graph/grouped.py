"""Compute grouped products: rows are sorted by group, and each group has a matrix of its own.

The groups of a mixture are its experts. `ends` says where each group's rows end:

        y[p] = W[e] x[p]    for the rows  ends[e - 1] <= p < ends[e]

Two operators compute y and the gradient of W. A compiler calls them as they are, without tracing their
code. So the shapes in a graph do not depend on the sizes of groups, and on a GPU the host does not wait
for `ends`. Each operator has these implementations:

    CPU, fp32 where MKL is slow       `matmul.cpp`
    CPU, 16 bits, many rows           one batched product (`monograph.graph.grouped_batches`)
    CPU, otherwise                    a loop over groups
    GPU, if the host need not wait    torch's grouped products: bf16, rows of whole 16 bytes, compute capability 9 or 10
    GPU, otherwise                    batched products of blocks of rows (`monograph.graph.grouped_blocks`)

Under vmap, each member of an ensemble has groups of its own in one call of the operator.

Shapes: P rows, E groups, N outputs, K inputs, D channels.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from monograph.graph import grouped_batches, grouped_blocks
from monograph.graph.matmul import grouped_out, grouped_outer_out, mkl_is_slow
from monograph.ops.autograd import Context, VmapInfo
from monograph.ops.fused_gradients import fused_gradient_of
from monograph.ops.padded_rows import LEAST_ROWS_OF_SHORT_SUMS, padded_count
from monograph.ops.unwritten import zero_if_unwritten_

# Major compute capabilities on which torch's grouped products do not copy `ends` to the host, see
# aten/src/ATen/native/cuda/GroupedBlas.cpp.
_CAPABILITIES_WITHOUT_HOST_WAITS = (9, 10)


def product_dtype(input: Tensor) -> torch.dtype:
    """Return the dtype of an input's products: autocast's if it is enabled, else the input's."""
    device_type = input.device.type
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return input.dtype


def grouped_linear(input_PK: Tensor, weight_ENK: Tensor, ends_E: Tensor) -> Tensor:
    """Return the products of each group's rows with its matrix.

    Args:
        input_PK: rows, sorted by group.
        weight_ENK: the groups' matrices. If they have the attribute `fused_gradient`
            (`monograph.ops.fused_gradients`), the backward pass adds their gradient to its `total`.
        ends_E: the index of the row after each group's last one, int32, ascending; the last is P.

    Returns:
        [P, N], in the dtype of products (`product_dtype`).
    """
    dtype = product_dtype(input_PK)
    input_PK = input_PK.to(dtype)
    fused = fused_gradient_of(weight_ENK)
    if fused is None:
        return product(input_PK, weight_ENK.to(dtype), ends_E)
    # The products read the rounded weight. `weight_ENK` itself is passed so that autograd runs the backward
    # pass even if the input needs no gradient.
    return _FusedGrouped.apply(input_PK, weight_ENK, fused.weight.to(dtype), fused.total, ends_E)


def _groups_with_rows(ends_E: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield the number and the rows of each group that is not empty."""
    begin = 0
    for group, end in enumerate(ends_E.tolist()):
        if end > begin:
            yield group, slice(begin, end)
        begin = end


def _uses_torch(rows: Tensor, *widths: int) -> bool:
    """Return whether a GPU computes products of these widths by torch's grouped products.

    It does if the host then need not wait for the GPU.
    """
    is_aligned = all(width % 8 == 0 for width in widths)  # rows of whole 16 bytes
    if rows.dtype != torch.bfloat16 or not is_aligned:
        return False
    major, _ = torch.cuda.get_device_capability(rows.device)
    return major in _CAPABILITIES_WITHOUT_HOST_WAITS


def _product_by_torch(input_PK: Tensor, weight_ENK: Tensor, ends_E: Tensor) -> Tensor:
    """Return `product` by torch's grouped products."""
    return torch._grouped_mm(input_PK.contiguous(), weight_ENK.mT, offs=ends_E)


def _outer_by_torch(left_PN: Tensor, right_PK: Tensor, ends_E: Tensor) -> Tensor:
    """Return `_outer` by torch's grouped products."""
    return torch._grouped_mm(left_PN.contiguous().mT, right_PK.contiguous(), offs=ends_E)


def _uses_own_code(rows: Tensor) -> bool:
    """Return whether a CPU computes products of such rows by `matmul.cpp`."""
    return rows.dtype == torch.float32 and mkl_is_slow()


def _uses_batches(rows: Tensor, ends_E: Tensor) -> bool:
    """Return whether a CPU computes products as one batch: in 16 bits, with enough rows on average."""
    return rows.dtype.itemsize == 2 and len(rows) >= grouped_batches.MIN_MEAN_ROWS * len(ends_E)


def plain_product(input_PK: Tensor, weight_ENK: Tensor, ends_E: Tensor) -> Tensor:
    """Return `grouped_linear` of an input and a weight of the same dtype, [P, N], without a gradient.

    It is for eager code, in which a call of it is cheaper than a call of the operator.
    """
    if input_PK.is_cuda:
        if _uses_torch(input_PK, *weight_ENK.shape[1:]):
            return _product_by_torch(input_PK, weight_ENK, ends_E)
        return grouped_blocks.product(input_PK, weight_ENK, ends_E)
    product_PN = input_PK.new_empty(len(input_PK), weight_ENK.shape[1])
    if _uses_own_code(input_PK):
        grouped_out(input_PK, weight_ENK.mT, ends_E, out=product_PN)
        return product_PN
    if _uses_batches(input_PK, ends_E):
        return grouped_batches.product(input_PK, weight_ENK, ends_E)
    for group, rows in _groups_with_rows(ends_E):
        count = rows.stop - rows.start
        # For long sums an Intel Xeon needs 16 rows. They are not given to it, because steps of decoding have few
        # rows for each group: their products would take 1.2 to 1.9 times as long (dev/log.md).
        padding = padded_count(count, LEAST_ROWS_OF_SHORT_SUMS) - count
        if padding == 0:
            torch.mm(input_PK[rows], weight_ENK[group].mT, out=product_PN[rows])
            continue
        # Without the padding, a row's bits would depend on the size of its group.
        padded_rows = F.pad(input_PK[rows], (0, 0, 0, padding))
        product_PN[rows] = (padded_rows @ weight_ENK[group].mT)[:count]
    return product_PN


product = torch.library.custom_op("monograph::grouped_linear", plain_product, mutates_args=())


@torch.library.custom_op("monograph::grouped_outer", mutates_args=())
def _outer(left_PN: Tensor, right_PK: Tensor, ends_E: Tensor) -> Tensor:
    """Return the sum over each group's rows p of left[p] right[p]^T, [E, N, K]."""
    if left_PN.is_cuda:
        if _uses_torch(left_PN, left_PN.shape[1], right_PK.shape[1]):
            return _outer_by_torch(left_PN, right_PK, ends_E)
        return grouped_blocks.outer(left_PN, right_PK, ends_E)
    if _uses_own_code(left_PN):
        sum_ENK = left_PN.new_empty(len(ends_E), left_PN.shape[1], right_PK.shape[1])
        grouped_outer_out(left_PN, right_PK, ends_E, out=sum_ENK)
        return sum_ENK
    if _uses_batches(left_PN, ends_E):
        return grouped_batches.outer(left_PN, right_PK, ends_E)
    sum_ENK = left_PN.new_zeros(len(ends_E), left_PN.shape[1], right_PK.shape[1])
    for group, rows in _groups_with_rows(ends_E):
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
    """Return the FLOPs of either operator by its shapes: 2 P N K."""
    return 2 * left[0] * left[1] * right[1]


@product.register_fake
def _(input_PK: Tensor, weight_ENK: Tensor, ends_E: Tensor) -> Tensor:
    return input_PK.new_empty(input_PK.shape[0], weight_ENK.shape[1])


@_outer.register_fake
def _(left_PN: Tensor, right_PK: Tensor, ends_E: Tensor) -> Tensor:
    return left_PN.new_empty(ends_E.shape[0], left_PN.shape[1], right_PK.shape[1])


def _save_for_backward(ctx: Context, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _product_backward(ctx: Context, grad_PN: Tensor) -> tuple[Tensor | None, ...]:
    input_PK, weight_ENK, ends_E = ctx.saved_tensors
    needs_input_grad, needs_weight_grad, _ = ctx.needs_input_grad
    input_grad = product(grad_PN, weight_ENK.mT, ends_E) if needs_input_grad else None
    weight_grad = _outer(grad_PN, input_PK, ends_E) if needs_weight_grad else None
    return input_grad, weight_grad, None


product.register_autograd(_product_backward, setup_context=_save_for_backward)


def _vmap_rule(operator: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, int]]:
    """Return the operator's rule for vmap, which computes all members' groups in one call."""

    def call_with_members_as_groups(
        info: VmapInfo, in_dims: tuple[int | None, ...], *tensors: Tensor
    ) -> tuple[Tensor, int]:
        members = info.batch_size
        left, right, ends = (
            tensor.expand(members, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip(tensors, in_dims, strict=True)
        )
        # The members' rows follow one another in one tensor. So the ends of each member's groups are
        # raised by the number of rows of the members before it.
        member_index = torch.arange(members, dtype=ends.dtype, device=ends.device)[:, None]
        ends = ends + member_index * left.shape[1]
        result = operator(left.flatten(0, 1), right.flatten(0, 1), ends.flatten())
        return result.unflatten(0, (members, -1)), 0

    return call_with_members_as_groups


_product_of_members = _vmap_rule(product)


@product.register_vmap
def _product_under_vmap(
    info: VmapInfo,
    in_dims: tuple[int | None, ...],
    left: Tensor,
    right: Tensor,
    ends: Tensor,
) -> tuple[Tensor, int]:
    """Compute `product` for all members.

    If they share the matrices, which are then a frozen base, the rows of all members are sorted by
    their group. So each matrix is read once, not once for each member.
    """
    left_dim, right_dim, ends_dim = in_dims
    if right_dim is not None or left_dim is None or ends_dim is None:
        return _product_of_members(info, in_dims, left, right, ends)
    # M is the number of members.
    left_MPK = left.movedim(left_dim, 0)
    ends_ME = ends.movedim(ends_dim, 0)
    members, rows, _ = left_MPK.shape
    # `ends` has the index after each group's last row. So row p is in the group whose number is the
    # number of ends that are at most p.
    row_MP = torch.arange(rows, dtype=ends.dtype, device=ends.device).expand(members, rows)
    group_MP = torch.searchsorted(ends_ME.contiguous(), row_MP.contiguous(), right=True)
    order = group_MP.flatten().argsort(stable=True)
    ends_E = ends_ME.sum(0, dtype=ends.dtype)
    sorted_out = product(left_MPK.flatten(0, 1)[order], right, ends_E)
    out = torch.empty_like(sorted_out).index_copy(0, order, sorted_out)
    return out.unflatten(0, (members, rows)), 0


_outer.register_vmap(_vmap_rule(_outer))


class _FusedContext(Context):
    weight: Tensor
    total: Tensor


class _FusedGrouped(torch.autograd.Function):
    """Compute `product`; the backward pass adds the gradient of the weight to `total`."""

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
        # The total is not a saved tensor: autograd refuses a saved tensor that has changed, and the
        # backward passes of other layers may change the total.
        ctx.total = total_ENK
        ctx.weight = weight_ENK
        return product(input_PK, rounded_ENK, ends_E)

    @staticmethod
    def backward(ctx: _FusedContext, grad_PN: Tensor) -> tuple[Tensor | None, ...]:
        input_PK, rounded_ENK, ends_E = ctx.saved_tensors
        zero_if_unwritten_(ctx.total, ctx.weight)
        ctx.total.add_(_outer(grad_PN, input_PK, ends_E))
        return product(grad_PN, rounded_ENK.mT, ends_E), None, None, None, None


class _AddBias(torch.autograd.Function):
    """Compute `add_bias`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(rows_PN: Tensor, bias_EN: Tensor, ends_E: Tensor) -> Tensor:
        row_P1 = torch.arange(rows_PN.shape[0], device=rows_PN.device)[:, None]
        # The group of a row is the number of groups that end at it or before it.
        group_P = (row_P1 >= ends_E).sum(-1)
        return rows_PN + bias_EN[group_P]

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        _rows, _bias, ends_E = inputs
        ctx.save_for_backward(ends_E)

    @staticmethod
    def backward(ctx: Context, grad_PN: Tensor) -> tuple[Tensor | None, ...]:
        (ends_E,) = ctx.saved_tensors
        ones_P1 = grad_PN.new_ones(grad_PN.shape[0], 1)
        bias_grad_E1N = _outer(ones_P1, grad_PN, ends_E)
        return grad_PN, bias_grad_E1N[:, 0], None


def add_bias(rows_PN: Tensor, bias_EN: Tensor, ends_E: Tensor) -> Tensor:
    """Add to each row the bias of its group, [P, N].

    The bias's gradient is a grouped product, so it is summed in the same order every time.
    """
    return _AddBias.apply(rows_PN, bias_EN, ends_E)


class _PermuteRows(torch.autograd.Function):
    """Compute `permute_rows`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(rows_PD: Tensor, order_P: Tensor, inverse_P: Tensor) -> Tensor:
        return rows_PD[order_P]

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        _rows, _order, inverse_P = inputs
        ctx.save_for_backward(inverse_P)

    @staticmethod
    def backward(ctx: Context, grad_PD: Tensor) -> tuple[Tensor | None, ...]:
        (inverse_P,) = ctx.saved_tensors
        return grad_PD[inverse_P], None, None


def permute_rows(rows_PD: Tensor, order_P: Tensor, inverse_P: Tensor) -> Tensor:
    """Return `rows[order]`, [P, D]. Its gradient is gathered, not summed by index as autograd would.

    Args:
        rows_PD: rows.
        order_P: a permutation of rows.
        inverse_P: the inverse permutation, by which the gradient is gathered.
    """
    return _PermuteRows.apply(rows_PD, order_P, inverse_P)
