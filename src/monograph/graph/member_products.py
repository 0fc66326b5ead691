"""Compute a frozen linear layer with adapters for many members at once, in eager code.

    y_m = x_m W^T + (x_m A_m^T) B_m^T

The product with W has the rows of all members, and dequantises W once. The adapters' products add to its
result, forward and backward. So there is no separate pass over all members' rows that only scales or adds:
such a pass would be slow, because one member's rows may fit a CPU's cache, but all members' rows do not.

Shapes: M members, L rows of a member, K inputs, N outputs, R rank; V members of a transform.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from monograph.graph.frozen import frozen_gradient, frozen_product
from monograph.ops.autograd import Context, VmapInfo


def adapted_product(x: Tensor, A: Tensor, B: Tensor, stored: Sequence[Tensor]) -> Tensor:
    """Return x W^T + (x A^T) B^T, [..., N], in the dtype of x, A and B.

    Under vmap, which must not batch W, the members' products are computed together.

    Args:
        x: [..., K].
        A: [R, K].
        B: [N, R], with the adapter's scale.
        stored: the tensors of the frozen weight W, see `monograph.graph.frozen.frozen_product`.
    """
    x_1LK = x.reshape(1, -1, x.shape[-1])
    y_1LN, _ = _MembersProduct.apply(x_1LK, A[None], B[None], *stored)
    product: Tensor = y_1LN.view(*x.shape[:-1], -1)
    return product


class _MembersProduct(torch.autograd.Function):
    """Compute `adapted_product` for M members, and its gradients.

        y_m = x_m W^T + low_m B_m^T        low_m = x_m A_m^T
        dlow_m = dy_m B_m        dx_m = dy_m W + dlow_m A_m
        dA_m = dlow_m^T x_m      dB_m = dy_m^T low_m

    x is [1, L, K] if all members have the same rows. If also M > 1, x must not need a gradient.
    """

    @staticmethod
    def forward(
        x_MLK: Tensor, A_MRK: Tensor, B_MNR: Tensor, *stored: Tensor
    ) -> tuple[Tensor, Tensor]:
        members, outputs, _ = B_MNR.shape
        rows, length, inputs = x_MLK.shape
        low_MLR = x_MLK.expand(members, -1, -1) @ A_MRK.mT
        y_MLN = frozen_product(x_MLK.reshape(-1, inputs), (outputs, inputs), *stored)
        y_MLN = y_MLN.view(rows, length, outputs)
        if rows == members:
            y_MLN.baddbmm_(low_MLR, B_MNR.mT)
        else:
            y_MLN = torch.baddbmm(y_MLN, low_MLR, B_MNR.mT)
        return y_MLN, low_MLR

    @staticmethod
    def setup_context(
        ctx: Context, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]
    ) -> None:
        _y, low_MLR = output
        ctx.mark_non_differentiable(low_MLR)
        ctx.set_materialize_grads(False)  # or the backward pass would get zeros for `low`
        ctx.save_for_backward(*inputs, low_MLR)

    @staticmethod
    def backward(ctx: Context, dy_MLN: Tensor | None, _dlow: None) -> tuple[Tensor | None, ...]:
        x_MLK, A_MRK, B_MNR, *stored, low_MLR = ctx.saved_tensors
        no_grads = [None] * len(stored)
        if dy_MLN is None:  # nothing depends on the product
            return None, None, None, *no_grads
        members, outputs, _ = B_MNR.shape
        inputs = x_MLK.shape[-1]
        dB_MNR = dy_MLN.mT @ low_MLR
        dlow_MLR = dy_MLN @ B_MNR
        dA_MRK = dlow_MLR.mT @ x_MLK.expand(members, -1, -1)
        dx_MLK = None
        if ctx.needs_input_grad[0]:
            dy = dy_MLN.reshape(-1, outputs)
            dx_MLK = frozen_gradient(dy, (outputs, inputs), *stored).view_as(x_MLK)
            dx_MLK.baddbmm_(dlow_MLR, A_MRK)
        return dx_MLK, dA_MRK, dB_MNR, *no_grads

    @staticmethod
    def vmap(
        info: VmapInfo,
        in_dims: tuple[int | None, ...],
        x: Tensor,
        A: Tensor,
        B: Tensor,
        *stored: Tensor,
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        """Make the V members of a transform more members of the product."""
        x_dim, A_dim, B_dim, *stored_dims = in_dims
        if any(dim is not None for dim in stored_dims):
            raise RuntimeError("the frozen weight of a product of members must be one for all")
        A, B = (_with_members(each, dim, info) for each, dim in ((A, A_dim), (B, B_dim)))
        has_same_rows = x_dim is None and len(x) == 1
        if not has_same_rows or x.requires_grad:
            x = _with_members(x, x_dim, info)
        outputs = _MembersProduct.apply(x, A, B, *stored)
        y, low = (each.unflatten(0, (info.batch_size, -1)) for each in outputs)
        return (y, low), (0, 0)


def _with_members(tensor: Tensor, dim: int | None, info: VmapInfo) -> Tensor:
    """Return [V, M, ...], with V at `dim` (None: the same for all), as [V M, ...]."""
    if dim is None:
        return tensor.expand(info.batch_size, *tensor.shape).flatten(0, 1)
    return tensor.movedim(dim, 0).flatten(0, 1)
