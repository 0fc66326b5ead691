"""Compute grouped products (`monograph.graph.grouped`) as batched products of blocks of rows.

It is used on a GPU where torch has no grouped products of its own, or where they would make the host
wait for the GPU. A group's rows are padded with zeros to whole blocks, and each block is multiplied by a
copy of its group's matrix. No shape depends on the sizes of groups: there is always room for the
largest number of blocks that these rows could need.

The copies need memory. So blocks are computed in chunks. The copies of a chunk have together at most
`MAX_COPIED_ELEMENTS` elements, unless a single block has more.

Shapes: P rows, E groups, N outputs, K inputs, B blocks of C rows, X = N K.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

MAX_COPIED_ELEMENTS = 2**27
MIN_BLOCK_ROWS = 16  # rows that tensor cores multiply at once
MAX_BLOCK_ROWS = 128  # enough to hide the copies of matrices


class _Blocks(NamedTuple):
    """The places of rows in the blocks. A block has C places, each with one row or empty.

    Attributes:
        group_B: each block's group; an arbitrary group for a block without rows.
        row_BC: the index of the row at each place; an arbitrary one at an empty place.
        has_row_BC: whether the place has a row.
        place_P: each row's place, counted through all blocks.
    """

    group_B: Tensor
    row_BC: Tensor
    has_row_BC: Tensor
    place_P: Tensor


def _blocks(ends_E: Tensor, rows: int) -> _Blocks:
    """Return the places of rows in blocks.

    Args:
        ends_E: the index of the row after each group's last one.
        rows: the number of rows.
    """
    groups = len(ends_E)
    # The mean group's size, rounded up to a power of two, within the limits.
    mean_size = 1 << max(0, rows // groups - 1).bit_length()
    size = min(MAX_BLOCK_ROWS, max(MIN_BLOCK_ROWS, mean_size))
    ends_E = ends_E.long()
    begins_E = torch.cat([ends_E.new_zeros(1), ends_E[:-1]])
    block_counts_E = (ends_E - begins_E + size - 1) // size
    # Group e has the blocks from `block_begins_E[e]` up to, but without, `block_ends_E[e]`.
    block_ends_E = block_counts_E.cumsum(0)
    block_begins_E = block_ends_E - block_counts_E
    # Each group that has rows may have, besides full blocks, one that is not full.
    max_blocks = rows // size + min(groups, rows)
    block_B = torch.arange(max_blocks, device=ends_E.device)
    # The group of a block is the number of groups whose blocks end at it or before it. The same is true
    # of rows.
    group_B = torch.searchsorted(block_ends_E, block_B, right=True).clamp(max=groups - 1)
    first_row_B = begins_E[group_B] + (block_B - block_begins_E[group_B]) * size
    row_BC = first_row_B[:, None] + torch.arange(size, device=ends_E.device)
    row_P = torch.arange(rows, device=ends_E.device)
    group_P = torch.searchsorted(ends_E, row_P, right=True)
    return _Blocks(
        group_B=group_B,
        row_BC=row_BC.clamp(max=rows - 1),
        has_row_BC=row_BC < ends_E[group_B][:, None],
        place_P=block_begins_E[group_P] * size + row_P - begins_E[group_P],
    )


def _in_blocks(rows_PK: Tensor, blocks: _Blocks) -> Tensor:
    """Return the rows in their blocks, [B, C, K], with zeros at empty places."""
    return rows_PK[blocks.row_BC] * blocks.has_row_BC[..., None].to(rows_PK.dtype)


def _chunks(blocks: _Blocks, elements_per_block: int) -> Iterator[slice]:
    """Yield the chunks of blocks, which are computed one after another."""
    size = max(1, MAX_COPIED_ELEMENTS // elements_per_block)
    for begin in range(0, len(blocks.group_B), size):
        yield slice(begin, begin + size)


def product(input_PK: Tensor, weight_ENK: Tensor, ends_E: Tensor) -> Tensor:
    """Return each row's product with its group's matrix, [P, N].

    See `monograph.graph.grouped.grouped_linear`.
    """
    blocks = _blocks(ends_E, len(input_PK))
    input_BCK = _in_blocks(input_PK, blocks)
    products = [
        input_BCK[chunk] @ weight_ENK[blocks.group_B[chunk]].mT
        for chunk in _chunks(blocks, weight_ENK.shape[1] * weight_ENK.shape[2])
    ]
    return torch.cat(products).flatten(0, 1)[blocks.place_P]


def outer(left_PN: Tensor, right_PK: Tensor, ends_E: Tensor) -> Tensor:
    """Return the sum over each group's rows p of left[p] right[p]^T, [E, N, K].

    Blocks are added up in fp32, or in float64 if the rows are float64.
    """
    blocks = _blocks(ends_E, len(left_PN))
    left_BCN = _in_blocks(left_PN, blocks)
    right_BCK = _in_blocks(right_PK, blocks)
    group_E = torch.arange(len(ends_E), device=ends_E.device)
    sum_dtype = torch.promote_types(left_PN.dtype, torch.float32)
    sum_EX = left_PN.new_zeros(len(ends_E), left_PN.shape[1] * right_PK.shape[1], dtype=sum_dtype)
    for chunk in _chunks(blocks, sum_EX.shape[1]):
        outer_BNK = left_BCN[chunk].mT @ right_BCK[chunk]
        # Blocks are added up by a product with zeros and ones, because `index_add_` adds in an
        # arbitrary order on a GPU.
        is_of_group_EB = (group_E[:, None] == blocks.group_B[chunk]).to(sum_EX.dtype)
        sum_EX.addmm_(is_of_group_EB, outer_BNK.flatten(1).to(sum_EX.dtype))
    return sum_EX.to(left_PN.dtype).view(len(ends_E), left_PN.shape[1], right_PK.shape[1])
