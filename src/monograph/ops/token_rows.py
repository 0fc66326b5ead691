"""Trained rows of a table that is frozen otherwise: lookups in it and products with it, without a second table.

Shapes: V rows of the table, D their size, K trained rows, N tokens; ... any leading dimensions.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Rows(NamedTuple):
    """Rows that stand in the place of a table's own.

    Attributes:
        values_KD: the rows; alone in it they have a gradient.
        index_K: where they stand, int64, each once.
        slot_V: the other way round: the place in `values_KD` of each row of the table, -1 of one that is its own.
    """

    values_KD: Tensor
    index_K: Tensor
    slot_V: Tensor


def replaced(weight_VD: Tensor, rows: Rows) -> Tensor:
    """Return the table with the rows in it, a copy, in its dtype: what everything below is compared with."""
    return weight_VD.index_copy(0, rows.index_K, rows.values_KD.to(weight_VD.dtype))


def change(weight_VD: Tensor, rows: Rows) -> Tensor:
    """What is added to the table's own rows, [K, D] in its dtype: exactly zero while both are the same numbers."""
    return rows.values_KD.to(weight_VD.dtype) - weight_VD[rows.index_K]


def embedding(
    tokens: Tensor, weight_VD: Tensor, rows: Rows, impl: Literal["gathered", "reference"] = "gathered"
) -> Tensor:
    """`F.embedding` in the table with the rows in it: int64 [...] to [..., D] in the table's dtype.

    Args:
        tokens: ids.
        weight_VD: the table, which gets no gradient.
        rows: of it.
        impl: "gathered" looks in the table and in the rows; "reference" in a copy of the table.
    """
    if impl == "reference":
        return F.embedding(tokens, replaced(weight_VD, rows))
    looked_up: Tensor = _Lookup.apply(F.embedding(tokens, weight_VD), rows.slot_V[tokens], rows.values_KD)
    return looked_up


def linear(hidden: Tensor, weight_VD: Tensor, rows: Rows, bias_V: Tensor | None = None) -> Tensor:
    """`F.linear` with the table with the rows in it, [..., D] to [..., V]; rows that are its own leave its bits.

    y = x W^T,   y[..., index] += x (rows - W[index])^T
    """
    output = F.linear(hidden, weight_VD, bias_V)
    return output.index_add(-1, rows.index_K, F.linear(hidden, change(weight_VD, rows)))


class _Lookup(torch.autograd.Function):
    """The rows where a token has one; their gradient is a product, as sums by many threads have no order."""

    generate_vmap_rule = True

    @staticmethod
    def forward(embedded: Tensor, slots: Tensor, values_KD: Tensor) -> Tensor:
        own = values_KD.to(embedded.dtype)[slots.clamp_min(0)]
        return torch.where((slots >= 0).unsqueeze(-1), own, embedded)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1])
        ctx.rows, ctx.dtype = inputs[2].shape[0], inputs[2].dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:  # type: ignore[override]
        (slots,) = ctx.saved_tensors
        places_K = torch.arange(ctx.rows, device=slots.device)
        chosen_NK = (slots.flatten().unsqueeze(-1) == places_K).to(grad.dtype)
        return None, None, (chosen_NK.mT @ grad.flatten(0, -2)).to(ctx.dtype)
