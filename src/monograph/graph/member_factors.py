"""Compute one of an adapter's two matrices for many members at once, where the backward pass adds its
gradient to the buffer of an update.

    y_m = x_m q(W_m)^T        dx_m = dy_m q(W_m)        total_m += dy_m^T x_m

q(W) is the weight as it was rounded once for the update. Without this, each weight would be rounded, and its
gradient widened and added, by kernels of their own: six for each adapted layer, beside its six products of
A and B. This is `monograph.ops.fused_gradients` for members.

Shapes: N members, L rows of a member, R outputs, K inputs.
"""

from typing import Any

import torch
from torch import Tensor

from monograph.graph.lora import Factor
from monograph.ops.autograd import Context
from monograph.ops.fused_gradients import FusedGradient, add_product_, fused_gradient_of


class MemberFactor(Factor):
    """One of the two matrices of all members' adapters. It is called inside of a transform of all members.

    Attributes:
        fused_gradient: the rounded matrices and summed gradients of all members, [N, R, K] each.
    """

    fused_gradient: FusedGradient

    def forward(self, input: Tensor) -> Tensor:
        """Map one member's [..., K] to [..., R]."""
        fused = fused_gradient_of(self)
        if fused is None:
            return super().forward(input)
        # The member's own weight tells autograd that there is something to train.
        product: Tensor = torch.ops.monograph.member_factor_product(
            input.to(fused.weight.dtype), self.weight, fused.weight, fused.total
        )
        return product


class _FactorContext(Context):
    total: Tensor


@torch.library.custom_op(
    "monograph::member_factor_products", mutates_args=(), tags=[torch.Tag.flexible_layout]
)
def _factor_products(x: Tensor, weight: Tensor, rounded: Tensor, total: Tensor) -> Tensor:
    """Compute the products of N members.

    Args:
        x: [N, L, K].
        weight: [N, R, K]; an argument so that autograd calls the backward pass.
        rounded: [N, R, K].
        total: [N, R, K], to which the backward pass adds.
    """
    return x @ rounded.mT


@_factor_products.register_fake
def _(x: Tensor, weight: Tensor, rounded: Tensor, total: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], rounded.shape[-2])


def _setup_context(
    ctx: _FactorContext, inputs: tuple[Tensor, Tensor, Tensor, Tensor], output: Tensor
) -> None:
    x_NLK, _weight, rounded_NRK, total_NRK = inputs
    ctx.save_for_backward(x_NLK, rounded_NRK)
    # The total is not a saved tensor: autograd refuses a saved tensor that has changed, and it changes
    # with each micro-batch.
    ctx.total = total_NRK


def _backward(ctx: _FactorContext, dy_NLR: Tensor) -> tuple[Tensor | None, ...]:
    x_NLK, rounded_NRK = ctx.saved_tensors
    add_product_(ctx.total, dy_NLR, x_NLK)
    dx_NLK = dy_NLR @ rounded_NRK if ctx.needs_input_grad[0] else None
    return dx_NLK, None, None, None


_factor_products.register_autograd(_backward, setup_context=_setup_context)


# vmap needs an operator to which its rule belongs. Autograd sees the operator that the rule calls.
_LIBRARY = torch.library.Library("monograph", "FRAGMENT")
_LIBRARY.define(
    "member_factor_product(Tensor x, Tensor weight, Tensor rounded, Tensor total) -> Tensor"
)


@torch.library.impl(_LIBRARY, "member_factor_product", "CompositeImplicitAutograd")
def _of_one(x: Tensor, weight: Tensor, rounded: Tensor, total: Tensor) -> Tensor:
    raise RuntimeError("the product of a member's adapter is for a transform of all members")


def _of_members(
    info: Any,
    in_dims: tuple[int | None, ...],
    x: Tensor,
    weight: Tensor,
    rounded: Tensor,
    total: Tensor,
) -> tuple[Tensor, int]:
    """Compute the product for a batch of members; see torch.library.register_vmap for the arguments."""
    x_dim, weight_dim, *dims_of_all = in_dims
    if weight_dim is None or any(dim is not None for dim in dims_of_all):
        raise RuntimeError("each member has a weight of its own, and the buffers hold all members")
    # If all members have the same rows, x is [..., K].
    x = x.expand(info.batch_size, *x.shape) if x_dim is None else x.movedim(x_dim, 0)
    y_NLR = _factor_products(x.flatten(1, -2), weight.movedim(weight_dim, 0), rounded, total)
    return y_NLR.unflatten(1, x.shape[1:-1]), 0


torch.library.register_vmap("monograph::member_factor_product", _of_members, lib=_LIBRARY)
