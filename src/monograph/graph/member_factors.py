"""Compute the products of one of an adapter's two matrices for many members at once.

The backward pass adds the matrix's gradient to the buffer that sums the gradients of an update:

    y_m = x_m q(W_m)^T        dx_m = dy_m q(W_m)        total_m += dy_m^T x_m

q(W) is the weight as it was rounded once for the update. Without this file, separate kernels would round each
weight, and widen and add its gradient: six kernels for each adapted layer, in addition to those of its six
products with A and B. This is `monograph.ops.fused_gradients` for members.

The totals of all matrices are parts of one plane, [N, size]. A part is not contiguous: between its rows are
rows of other parts. So a compiler cannot tell that parts do not overlap. It would copy each part before it
is written, and back at the end: four kernels for each adapted layer. Therefore a compiled graph gets the
plane, not its parts.

Shapes: N members, L rows of a member, R outputs, K inputs.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from monograph.graph.lora import Factor
from monograph.ops.autograd import Context
from monograph.ops.fused_gradients import add_product_, gradients_are_fused


class MemberGradient(NamedTuple):
    """Where the gradients of one matrix of all members' adapters are summed.

    Attributes:
        weight: [N, R, K], the matrices in the dtype of the products.
        plane: [N, size], the summed gradients of all parameters of a plane.
        offset: the index of the matrix's first element in a member's row of the plane.
    """

    weight: Tensor
    plane: Tensor
    offset: int


class MemberFactor(Factor):
    """One of the two matrices of all members' adapters. It is called inside of a transform of all members.

    Attributes:
        member_gradient: its matrices and summed gradients.
    """

    member_gradient: MemberGradient

    def forward(self, input: Tensor) -> Tensor:
        """Map one member's [..., K] to [..., R]."""
        if not gradients_are_fused():
            return super().forward(input)
        weight, plane, offset = self.member_gradient
        # The member's own weight tells autograd that there is something to train.
        product: Tensor = torch.ops.monograph.member_factor_product(
            input.to(weight.dtype), self.weight, weight, plane, offset
        )
        return product


class _FactorContext(Context):
    plane: Tensor
    offset: int


@torch.library.custom_op(
    "monograph::member_factor_products", mutates_args=(), tags=[torch.Tag.flexible_layout]
)
def _factor_products(
    x: Tensor, weight: Tensor, rounded: Tensor, plane: Tensor, offset: int
) -> Tensor:
    """Compute the products of N members.

    Args:
        x: [N, L, K].
        weight: [N, R, K]; an argument so that autograd calls the backward pass.
        rounded: [N, R, K].
        plane: [N, size], to which the backward pass adds.
        offset: see `MemberGradient`.
    """
    return x @ rounded.mT


@_factor_products.register_fake
def _(x: Tensor, weight: Tensor, rounded: Tensor, plane: Tensor, offset: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], rounded.shape[-2])


@torch.library.custom_op("monograph::add_member_products_", mutates_args=("plane",))
def _add_products_(plane: Tensor, dy: Tensor, x: Tensor, offset: int) -> None:
    """Add dy^T x, [N, R, K], to the part of a plane that begins at `offset`.

    Args:
        plane: [N, size].
        dy: [N, L, R].
        x: [N, L, K].
        offset: see `MemberGradient`.
    """
    shape = dy.shape[-1], x.shape[-1]
    total_NRK = plane[:, offset : offset + math.prod(shape)].unflatten(-1, shape)
    add_product_(total_NRK, dy, x)


@_add_products_.register_fake
def _(plane: Tensor, dy: Tensor, x: Tensor, offset: int) -> None:
    pass


def _setup_context(
    ctx: _FactorContext, inputs: tuple[Tensor, Tensor, Tensor, Tensor, int], output: Tensor
) -> None:
    x_NLK, _weight, rounded_NRK, plane, offset = inputs
    ctx.save_for_backward(x_NLK, rounded_NRK)
    # The plane is not a saved tensor: autograd refuses a saved tensor that has changed, and it changes
    # with each layer.
    ctx.plane = plane
    ctx.offset = offset


def _backward(ctx: _FactorContext, dy_NLR: Tensor) -> tuple[Tensor | None, ...]:
    x_NLK, rounded_NRK = ctx.saved_tensors
    _add_products_(ctx.plane, dy_NLR, x_NLK, ctx.offset)
    dx_NLK = dy_NLR @ rounded_NRK if ctx.needs_input_grad[0] else None
    return dx_NLK, None, None, None, None


_factor_products.register_autograd(_backward, setup_context=_setup_context)


# A rule of vmap belongs to an operator, which is this one. The rule replaces it by the operator above,
# `member_factor_products`, whose backward pass autograd calls. torch's cache of compiled graphs knows the
# rule only by the name of its operator, see `monograph.ensemble.call`.
_LIBRARY = torch.library.Library("monograph", "FRAGMENT")
_LIBRARY.define(
    "member_factor_product(Tensor x, Tensor weight, Tensor rounded, Tensor plane, int offset) -> Tensor"
)


@torch.library.impl(_LIBRARY, "member_factor_product", "CompositeImplicitAutograd")
def _of_one(x: Tensor, weight: Tensor, rounded: Tensor, plane: Tensor, offset: int) -> Tensor:
    raise RuntimeError("the product of a member's adapter is for a transform of all members")


def _of_members(
    info: Any,
    in_dims: tuple[int | None, ...],
    x: Tensor,
    weight: Tensor,
    rounded: Tensor,
    plane: Tensor,
    offset: int,
) -> tuple[Tensor, int]:
    """Compute the product for a batch of members; see torch.library.register_vmap for the arguments."""
    x_dim, weight_dim, *dims_of_all = in_dims
    if weight_dim is None or any(dim is not None for dim in dims_of_all):
        raise RuntimeError("each member has a weight of its own, and the buffers hold all members")
    # If all members have the same rows, x is [..., K].
    x = x.expand(info.batch_size, *x.shape) if x_dim is None else x.movedim(x_dim, 0)
    weight = weight.movedim(weight_dim, 0)
    y_NLR = _factor_products(x.flatten(1, -2), weight, rounded, plane, offset)
    return y_NLR.unflatten(1, x.shape[1:-1]), 0


torch.library.register_vmap("monograph::member_factor_product", _of_members, lib=_LIBRARY)
