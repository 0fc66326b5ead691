"""Compute a CPU's grouped products of 16 bits as one batched product of every group's first C rows.

oneDNN compiles code for each new shape of a product, which takes longer than most of these products
do, and the sizes of groups change with each update. So the batch has the same shape whatever the sizes
of groups are: it has places for C rows of each group, with C = 1.25 P / E, rounded up to a multiple of
`CAPACITY_UNIT`.

A group with more than C rows needs a second product, outside of the batch. In `product`, the second
product has the rows after the first C. In `outer`, it has all rows of the group, and its result
replaces that of the batch. Its rows are padded to a multiple of C, so that there are few shapes.

Shapes: P rows, E groups, N outputs, K inputs, C places of each group in the batch (its capacity),
X = E C places in the batch, Y of them empty, R further rows of one group.
"""

import functools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# From this mean number of rows in a group, a batch is worth its cost. With fewer, many groups have
# no rows, and a batch would still read their matrices.
MIN_MEAN_ROWS = 16
CAPACITY_UNIT = 16
_CAPACITY_PER_MEAN_ROWS = 1.25


class _Batch(NamedTuple):
    """The places of rows in the batch.

    Attributes:
        capacity: C.
        row_X: the index of the row at each place; an arbitrary one at an empty place.
        empty_Y: the empty places.
        place_P: each row's place; an arbitrary one for a row after its group's first C.
        oversized: each group with more than C rows, and the slice of all its rows.
    """

    capacity: int
    row_X: Tensor
    empty_Y: Tensor
    place_P: Tensor
    oversized: list[tuple[int, slice]]


# Cached, because a layer's three products and their backward passes have the same groups.
@functools.lru_cache(2)
def _batch(ends: tuple[int, ...], rows: int) -> _Batch:
    """Return the places of rows in the batch.

    Args:
        ends: the index of the row after each group's last one.
        rows: the number of rows.
    """
    groups = len(ends)
    ends_E = torch.tensor(ends)
    units = math.ceil(_CAPACITY_PER_MEAN_ROWS * rows / (groups * CAPACITY_UNIT))
    capacity = CAPACITY_UNIT * units
    sizes_E = ends_E.diff(prepend=ends_E.new_zeros(1))
    begins_E = ends_E - sizes_E
    row_EC = begins_E[:, None] + torch.arange(capacity)
    # Row p of group e, whose rows begin at b, has the place e C + (p - b).
    place_minus_row_E = torch.arange(groups) * capacity - begins_E
    place_P = torch.arange(rows) + place_minus_row_E.repeat_interleave(sizes_E)
    sizes_and_ends = zip(sizes_E.tolist(), ends, strict=True)
    rows_of_groups = [slice(end - size, end) for size, end in sizes_and_ends]
    return _Batch(
        capacity=capacity,
        row_X=row_EC.flatten().clamp(max=rows - 1),
        empty_Y=(row_EC >= ends_E[:, None]).flatten().nonzero()[:, 0],
        place_P=place_P.clamp(max=groups * capacity - 1),
        oversized=[
            (group, rows_of_group)
            for group, rows_of_group in enumerate(rows_of_groups)
            if rows_of_group.stop - rows_of_group.start > capacity
        ],
    )


def product(input_PK: Tensor, weight_ENK: Tensor, ends_E: Tensor) -> Tensor:
    """Return each row's product with its group's matrix, [P, N].

    See `monograph.graph.grouped.grouped_linear`.
    """
    batch = _batch(tuple(ends_E.tolist()), len(input_PK))
    input_ECK = input_PK.index_select(0, batch.row_X).unflatten(0, (len(ends_E), -1))
    out_PN = (input_ECK @ weight_ENK.mT).flatten(0, 1).index_select(0, batch.place_P)
    for group, rows in batch.oversized:
        further_RK = input_PK[rows][batch.capacity :]
        padded_RK = F.pad(further_RK, (0, 0, 0, -len(further_RK) % batch.capacity))
        out_PN[rows][batch.capacity :] = (padded_RK @ weight_ENK[group].mT)[: len(further_RK)]
    return out_PN


def outer(left_PN: Tensor, right_PK: Tensor, ends_E: Tensor) -> Tensor:
    """Return the sum over each group's rows p of left[p] right[p]^T, [E, N, K]."""
    batch = _batch(tuple(ends_E.tolist()), len(left_PN))
    left_XN = left_PN.index_select(0, batch.row_X)
    # Zeros on the left are enough: they multiply whatever row of `right` is at an empty place.
    left_XN.index_fill_(0, batch.empty_Y, 0)
    right_XK = right_PK.index_select(0, batch.row_X)
    left_ECN = left_XN.unflatten(0, (len(ends_E), -1))
    right_ECK = right_XK.unflatten(0, (len(ends_E), -1))
    sum_ENK = left_ECN.mT @ right_ECK
    for group, rows in batch.oversized:
        size = rows.stop - rows.start
        padding = (0, 0, 0, -size % batch.capacity)
        # One product of all the group's rows: a sum of two products would be rounded twice.
        sum_ENK[group] = F.pad(left_PN[rows], padding).mT @ F.pad(right_PK[rows], padding)
    return sum_ENK
