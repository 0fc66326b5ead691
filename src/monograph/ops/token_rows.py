"""Look up tokens in a frozen table [V, D] whose rows are replaced for a few tokens, and multiply
with it.

The replacing rows are a tensor of their own, which is trained. Only `with_replaced_rows` copies the table.

Shapes: V rows of the table, D channels, K trained rows, N tokens; ... any leading dimensions.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from monograph.ops.autograd import Context


class ReplacementRows(NamedTuple):
    """Rows that replace some rows of a table.

    Attributes:
        values_KD: the replacing rows, the only ones with a gradient.
        index_K: the positions in the table that they replace, distinct, int64.
        slot_V: for each row of the table its replacement's position in `values_KD`, -1 if it is not
            replaced.
    """

    values_KD: Tensor
    index_K: Tensor
    slot_V: Tensor


def with_replaced_rows(weight_VD: Tensor, rows: ReplacementRows) -> Tensor:
    """Return a copy of the table with the rows replaced, in the table's dtype.

    This is the reference for all other functions here.
    """
    return weight_VD.index_copy(0, rows.index_K, rows.values_KD.to(weight_VD.dtype))


def row_differences(weight_VD: Tensor, rows: ReplacementRows) -> Tensor:
    """Return the replacing rows minus the table's own, [K, D] in the table's dtype.

    The difference is exactly zero while both are equal.
    """
    return rows.values_KD.to(weight_VD.dtype) - weight_VD[rows.index_K]


def embedding_with_rows(tokens: Tensor, weight_VD: Tensor, rows: ReplacementRows) -> Tensor:
    """Look tokens up in the table with its rows replaced, as `F.embedding` does.

    Args:
        tokens: ids, [...] int64.
        weight_VD: the table, which gets no gradient.
        rows: the rows that replace some rows of the table.

    Returns:
        [..., D] in the table's dtype.
    """
    return _Lookup.apply(F.embedding(tokens, weight_VD), rows.slot_V[tokens], rows.values_KD)


def linear_with_rows(
    hidden: Tensor, weight_VD: Tensor, rows: ReplacementRows, bias_V: Tensor | None = None
) -> Tensor:
    """Apply `F.linear` with the table whose rows are replaced: [..., D] to [..., V].

        y = x W^T,   y[..., index] += x (rows - W[index])^T

    Rows that equal the table's own give the bits of the table alone.
    """
    output = F.linear(hidden, weight_VD, bias_V)
    return output.index_add(-1, rows.index_K, F.linear(hidden, row_differences(weight_VD, rows)))


class _LookupContext(Context):
    rows: int
    dtype: torch.dtype


class _Lookup(torch.autograd.Function):
    """Replace the looked-up rows of tokens whose rows are trained.

    The gradient of trained rows is a matrix product, because a scattered sum has no fixed order.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(embedded: Tensor, slots: Tensor, values_KD: Tensor) -> Tensor:
        replacements = values_KD.to(embedded.dtype)[slots.clamp_min(0)]
        return torch.where((slots >= 0).unsqueeze(-1), replacements, embedded)

    @staticmethod
    def setup_context(
        ctx: _LookupContext, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor
    ) -> None:
        _, slots, values_KD = inputs
        ctx.save_for_backward(slots)
        ctx.rows = values_KD.shape[0]
        ctx.dtype = values_KD.dtype

    @staticmethod
    def backward(ctx: _LookupContext, grad: Tensor) -> tuple[None, None, Tensor]:
        (slots,) = ctx.saved_tensors
        slot_K = torch.arange(ctx.rows, device=slots.device)
        is_slot_NK = (slots.flatten().unsqueeze(-1) == slot_K).to(grad.dtype)
        return None, None, (is_slot_NK.mT @ grad.flatten(0, -2)).to(ctx.dtype)
