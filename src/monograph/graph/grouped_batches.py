"""Compute a CPU's grouped products of 16 bits as one batched product of the first rows of every
group.

oneDNN writes code for each shape of a product, which takes longer than most products do, and
groups' sizes change with each update. Here all shapes are those of C rows, 1.25 P / E and more;
what larger groups have beyond that is computed group by group, filled up to multiples of C.

Shapes: P rows, E groups, N outputs, K inputs.
"""

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Rows for each group on average: with fewer, many groups have none, and their matrices are read in
# vain.
LEAST = 16
_SPARE = 1.25


class _Batch(NamedTuple):
    """The places [E, C] of rows.

    Attributes:
        capacity: C.
        row_X: the row at each place; any at a place without one.
        empty_Y: the places without a row.
        place_P: each row's place; any for a row after its group's first C.
        larger: the groups with more than C rows, and their rows.
    """

    capacity: int
    row_X: Tensor
    empty_Y: Tensor
    place_P: Tensor
    larger: list[tuple[int, slice]]


@functools.lru_cache(2)  # a layer's three products and their backward passes have the same groups
def _batch(ends: tuple[int, ...], rows: int) -> _Batch:
    groups = len(ends)
    ends_E = torch.tensor(ends)
    capacity = LEAST * -int(-_SPARE * rows // (groups * LEAST))
    sizes_E = ends_E.diff(prepend=ends_E.new_zeros(1))
    begins_E = ends_E - sizes_E
    row_EC = begins_E[:, None] + torch.arange(capacity)
    shift_E = torch.arange(groups) * capacity - begins_E
    place_P = torch.arange(rows) + shift_E.repeat_interleave(sizes_E)
    sizes = enumerate(zip(sizes_E.tolist(), ends, strict=True))
    return _Batch(
        capacity,
        row_EC.flatten().clamp(max=rows - 1),
        (row_EC >= ends_E[:, None]).flatten().nonzero()[:, 0],
        place_P.clamp(max=groups * capacity - 1),
        [(group, slice(end - size, end)) for group, (size, end) in sizes if size > capacity],
    )


def product(input_PK: Tensor, weight_ENK: Tensor, ends_E: Tensor) -> Tensor:
    """Return each row's product with its group's matrix, [P, N]; see
    `monograph.graph.grouped.grouped_linear`.
    """
    batch = _batch(tuple(ends_E.tolist()), len(input_PK))
    input_ECK = input_PK.index_select(0, batch.row_X).unflatten(0, (len(ends_E), -1))
    out_PN = (input_ECK @ weight_ENK.mT).flatten(0, 1).index_select(0, batch.place_P)
    for group, rows in batch.larger:
        further_RK = input_PK[rows][batch.capacity :]
        filled_RK = F.pad(further_RK, (0, 0, 0, -len(further_RK) % batch.capacity))
        out_PN[rows][batch.capacity :] = (filled_RK @ weight_ENK[group].mT)[: len(further_RK)]
    return out_PN


def outer(left_PN: Tensor, right_PK: Tensor, ends_E: Tensor) -> Tensor:
    """Return the sum over a group's rows of left[p] right[p]^T, [E, N, K]."""
    batch = _batch(tuple(ends_E.tolist()), len(left_PN))
    # Whatever `right` has at places without a row is multiplied by 0.
    left_XN = left_PN.index_select(0, batch.row_X).index_fill_(0, batch.empty_Y, 0)
    right_XK = right_PK.index_select(0, batch.row_X)
    left_ECN, right_ECK = (each.unflatten(0, (len(ends_E), -1)) for each in (left_XN, right_XK))
    sum_ENK = left_ECN.mT @ right_ECK
    for group, rows in batch.larger:
        fill = (0, 0, 0, -(rows.stop - rows.start) % batch.capacity)
        sum_ENK[group] = F.pad(left_PN[rows], fill).mT @ F.pad(right_PK[rows], fill)
    return sum_ENK
