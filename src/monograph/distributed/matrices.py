"""Orthogonalise matrices of which each rank has some rows.

All rows of a matrix are sent to one rank, its owner, which orthogonalises it and sends them back.

Shapes: n matrices [rows, cols] of the same shape on W ranks; rank r has R_r rows of each
(`monograph.distributed.rows.rank_rows`).
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from monograph.distributed.rows import rank_rows
from monograph.distributed.world import World


def orthogonalise_rows(
    world: World,
    own_rows: Sequence[Tensor],
    rows: int,
    first_owner: int,
    compute: torch.dtype,
    orthogonalise: Callable[[Tensor, torch.dtype], Tensor],
) -> list[Tensor]:
    """Orthogonalise n matrices with `orthogonalise(matrices, compute)`; a collective.

    Rank (first_owner + i) mod W is the owner of matrix i, so each matrix is computed by one rank. The
    other ranks send their rows to the owner and get them back: all ranks together send
    2 n rows cols (W - 1) / W numbers.

    Args:
        world: the ranks.
        own_rows: this rank's rows of each matrix, n tensors [R_r, cols].
        rows: the number of rows of a whole matrix.
        first_owner: the owner of the first matrix.
        compute: the dtype of products.
        orthogonalise: the optimizer's function of whole matrices [n, rows, cols].

    Returns:
        This rank's rows of each orthogonal matrix, n tensors [R_r, cols].
    """
    n = len(own_rows)
    cols = own_rows[0].shape[-1]
    own_size = own_rows[0].numel()
    # For each rank, the indices of the matrices that it owns.
    owned: list[list[int]] = [[] for _ in range(world.size)]
    for i in range(n):
        owned[(first_owner + i) % world.size].append(i)
    # For each rank, the rows that it has of each matrix.
    slices = [rank_rows(rank, world.size, rows) for rank in range(world.size)]
    # Matrices are sent in the order of their owners.
    order = [i for matrices in owned for i in matrices]
    sent_sizes = [len(matrices) * own_size for matrices in owned]
    # From each rank, this rank receives that rank's rows of all matrices that this rank owns.
    own_count = len(owned[world.rank])
    shapes = [(own_count, rank_slice.stop - rank_slice.start, cols) for rank_slice in slices]
    received_sizes = [math.prod(shape) for shape in shapes]
    sent = torch.cat([own_rows[i].flatten() for i in order])
    received = world.all_to_all(sent, sent_sizes, received_sizes)
    rows_of_ranks = [
        flat.view(shape) for flat, shape in zip(received.split(received_sizes), shapes, strict=True)
    ]
    orthogonal = orthogonalise(torch.cat(rows_of_ranks, dim=1), compute)
    # The rows are sent back in the same way, with the two lists of sizes exchanged.
    sent_back = torch.cat([orthogonal[:, rank_slice].flatten() for rank_slice in slices])
    own_orthogonal = world.all_to_all(sent_back, received_sizes, sent_sizes)
    own_orthogonal = own_orthogonal.view(n, *own_rows[0].shape)
    # The rows are in the owners' order; the caller gets them in the matrices' order.
    return [own_orthogonal[order.index(i)] for i in range(n)]
