"""Compute a CPU's grouped products of 16 bits as one batched product of every group's first C rows.

oneDNN compiles code for each new shape of a product, which takes longer than most of these products
do, and the sizes of groups change with each update. So the batch has one shape for any groups:
C = 1.25 P / E, rounded up to a multiple of `CAPACITY_UNIT`.

A group with more than C rows needs a further product, whose rows are padded to a multiple of C:
`product` computes the rows after the first C, `outer` the whole group again.

Shapes: P rows, E groups, N outputs, K inputs, C rows of the batch for each group, X = E C places in
the batch, Y of them empty, R further rows of one group.
"""

import functools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Rows for each group, on average, from which a batch is worth its cost. With fewer, many groups
# have no rows, and a batch would still read their matrices.
MIN_MEAN_ROWS = 16
CAPACITY_UNIT = 16
_CAPACITY_PER_MEAN_ROWS = 1.25


class _Batch(NamedTuple):
    """The places of rows in a batch.

    Attributes:
        capacity: C.
        row_X: the row at each place; an arbitrary row at an empty place.
        empty_Y: the empty places.
        place_P: each row's place; an arbitrary place for a row after its group's first C.
        larger: the groups with more than C rows, and all their rows.
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
    units = math.ceil(_CAPACITY_PER_MEAN_ROWS * rows / (groups * CAPACITY_UNIT))
    capacity = CAPACITY_UNIT * units
    sizes_E = ends_E.diff(prepend=ends_E.new_zeros(1))
    begins_E = ends_E - sizes_E
    row_EC = begins_E[:, None] + torch.arange(capacity)
    place_minus_row_E = torch.arange(groups) * capacity - begins_E
    place_P = torch.arange(rows) + place_minus_row_E.repeat_interleave(sizes_E)
    return _Batch(
        capacity=capacity,
        row_X=row_EC.flatten().clamp(max=rows - 1),
        empty_Y=(row_EC >= ends_E[:, None]).flatten().nonzero()[:, 0],
        place_P=place_P.clamp(max=groups * capacity - 1),
        larger=[
            (group, slice(end - size, end))
            for group, (size, end) in enumerate(zip(sizes_E.tolist(), ends, strict=True))
            if size > capacity
        ],
    )


def product(input_PK: Tensor, weight_ENK: Tensor, ends_E: Tensor) -> Tensor:
    """Return each row's product with its group's matrix, [P, N].

    See `monograph.graph.grouped.grouped_linear`.
    """
    batch = _batch(tuple(ends_E.tolist()), len(input_PK))
    input_ECK = input_PK.index_select(0, batch.row_X).unflatten(0, (len(ends_E), -1))
    out_PN = (input_ECK @ weight_ENK.mT).flatten(0, 1).index_select(0, batch.place_P)
    for group, rows in batch.larger:
        further_RK = input_PK[rows][batch.capacity :]
        padded_RK = F.pad(further_RK, (0, 0, 0, -len(further_RK) % batch.capacity))
        out_PN[rows][batch.capacity :] = (padded_RK @ weight_ENK[group].mT)[: len(further_RK)]
    return out_PN


def outer(left_PN: Tensor, right_PK: Tensor, ends_E: Tensor) -> Tensor:
    """Return the sum over a group's rows of left[p] right[p]^T, [E, N, K]."""
    batch = _batch(tuple(ends_E.tolist()), len(left_PN))
    left_XN = left_PN.index_select(0, batch.row_X)
    # An empty place has an arbitrary row of `right`, which a row of zeros multiplies.
    left_XN.index_fill_(0, batch.empty_Y, 0)
    right_XK = right_PK.index_select(0, batch.row_X)
    left_ECN = left_XN.unflatten(0, (len(ends_E), -1))
    right_ECK = right_XK.unflatten(0, (len(ends_E), -1))
    sum_ENK = left_ECN.mT @ right_ECK
    for group, rows in batch.larger:
        size = rows.stop - rows.start
        padding = (0, 0, 0, -size % batch.capacity)
        # One product of all the group's rows: a sum of two products would be rounded twice.
        sum_ENK[group] = F.pad(left_PN[rows], padding).mT @ F.pad(right_PK[rows], padding)
    return sum_ENK
