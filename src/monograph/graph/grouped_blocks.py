"""Compute grouped products as batched ones of blocks of rows, each with a copy of its group's
matrix.

For GPUs and dtypes for which torch has no grouped products that leave the host alone. A group's
rows are filled up with zeros to whole blocks, and there is room for as many blocks as there could
be, so no shape depends on the groups. Some blocks are computed at a time, so that copies of
matrices have at most `MOST` numbers, or are one.

Shapes: P rows, E groups, N outputs, K inputs, B blocks of C rows.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

MOST = 2**27
# Of a block: tensor cores multiply 16; larger ones hide the copies of matrices.
LEAST_ROWS, MOST_ROWS = 16, 128


class _Blocks(NamedTuple):
    """The places of rows in blocks.

    Attributes:
        group_B: each block's group; that of a block without rows is any.
        row_BC: the row at each place.
        filled_BC: whether the place has a row.
        place_P: each row's place, counted through all blocks.
    """

    group_B: Tensor
    row_BC: Tensor
    filled_BC: Tensor
    place_P: Tensor


def _blocks(ends_E: Tensor, rows: int) -> _Blocks:
    groups = len(ends_E)
    size = min(MOST_ROWS, max(LEAST_ROWS, 1 << max(0, rows // groups - 1).bit_length()))
    ends_E = ends_E.long()
    begins_E = torch.cat([ends_E.new_zeros(1), ends_E[:-1]])
    # A group's last block may be short: at most one for each group that has rows, besides whole
    # ones.
    blocks_E = (ends_E - begins_E + size - 1) // size
    after_E = blocks_E.cumsum(0)
    block_B = torch.arange(rows // size + min(groups, rows), device=ends_E.device)
    group_B = torch.searchsorted(after_E, block_B, right=True).clamp(max=groups - 1)
    first_B = begins_E[group_B] + (block_B - (after_E - blocks_E)[group_B]) * size
    row_BC = first_B[:, None] + torch.arange(size, device=ends_E.device)
    row_P = torch.arange(rows, device=ends_E.device)
    group_P = torch.searchsorted(ends_E, row_P, right=True)
    place_P = (after_E - blocks_E)[group_P] * size + row_P - begins_E[group_P]
    return _Blocks(group_B, row_BC.clamp(max=rows - 1), row_BC < ends_E[group_B][:, None], place_P)


def _cut(rows_PK: Tensor, blocks: _Blocks) -> Tensor:
    return rows_PK[blocks.row_BC] * blocks.filled_BC[..., None].to(rows_PK.dtype)


def _parts(blocks: _Blocks, numbers: int) -> Iterator[slice]:
    step = max(1, MOST // numbers)
    yield from (slice(begin, begin + step) for begin in range(0, len(blocks.group_B), step))


def product(input_PK: Tensor, weight_ENK: Tensor, ends_E: Tensor) -> Tensor:
    """Return each row's product with its group's matrix, [P, N]; see
    `monograph.graph.grouped.grouped_linear`.
    """
    blocks = _blocks(ends_E, len(input_PK))
    input_BCK = _cut(input_PK, blocks)
    parts = _parts(blocks, weight_ENK.shape[1] * weight_ENK.shape[2])
    found = [input_BCK[part] @ weight_ENK[blocks.group_B[part]].mT for part in parts]
    return torch.cat(found).flatten(0, 1)[blocks.place_P]


def outer(left_PN: Tensor, right_PK: Tensor, ends_E: Tensor) -> Tensor:
    """Return the sum over a group's rows of left[p] right[p]^T, [E, N, K].

    Blocks are summed by a product with zeros and ones, as `index_add_` adds in any order on a GPU.
    """
    blocks = _blocks(ends_E, len(left_PN))
    left_BCN = _cut(left_PN, blocks)
    right_BCK = _cut(right_PK, blocks)
    numbers_E = torch.arange(len(ends_E), device=ends_E.device)
    sum_EX = left_PN.new_zeros(
        len(ends_E), left_PN.shape[1] * right_PK.shape[1], dtype=torch.float32
    )
    sum_EX = sum_EX.to(torch.promote_types(left_PN.dtype, torch.float32))
    for part in _parts(blocks, sum_EX.shape[1]):
        member_EB = (numbers_E[:, None] == blocks.group_B[part]).to(sum_EX.dtype)
        outer_BNK = left_BCN[part].mT @ right_BCK[part]
        sum_EX.addmm_(member_EB, outer_BNK.flatten(1).to(sum_EX.dtype))
    return sum_EX.to(left_PN.dtype).view(len(ends_E), left_PN.shape[1], right_PK.shape[1])
