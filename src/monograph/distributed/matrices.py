"""Orthogonalise matrices of which every rank has some rows: each matrix is whole on one rank, its
owner, for a moment.

Shapes: n matrices [rows, cols] of one shape on W ranks; rank r has R_r rows of each (`rows_of`).
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from monograph.distributed.rows import rows_of
from monograph.distributed.world import World


def orthogonalised(
    world: World,
    own: Sequence[Tensor],
    rows: int,
    first: int,
    compute: torch.dtype,
    orthogonalise: Callable[[Tensor, torch.dtype], Tensor],
) -> list[Tensor]:
    """Return this rank's rows of the n orthogonal matrices `orthogonalise(whole, compute)`; a
    collective.

    Matrix i belongs to rank (first + i) mod W, so each is iterated on once in the world. A rank
    sends its rows of a matrix to the owner and gets them back: 2 n rows cols (W - 1) / W numbers
    are sent in all.

    Args:
        world: the ranks.
        own: this rank's rows of each matrix, [R_r, cols].
        rows: rows of a whole matrix.
        first: the owner of the first matrix.
        compute: the dtype of products.
        orthogonalise: the optimizer's function of whole matrices.
    """
    cols = own[0].shape[-1]
    mine = own[0].numel()
    ranks = range(world.size)
    belonging = [[i for i in range(len(own)) if (first + i) % world.size == rank] for rank in ranks]
    places = [rows_of(rank, world.size, rows) for rank in ranks]
    order = [i for those in belonging for i in those]
    shapes = [(len(belonging[world.rank]), place.stop - place.start, cols) for place in places]
    sent = [len(those) * mine for those in belonging]
    received = [math.prod(shape) for shape in shapes]
    parts = world.exchange(torch.cat([own[i].flatten() for i in order]), sent, received).split(
        received
    )
    whole = torch.cat([part.view(shape) for part, shape in zip(parts, shapes, strict=True)], dim=1)
    done = orthogonalise(whole, compute)
    back = torch.cat([done[:, place].flatten() for place in places])
    returned = world.exchange(back, received, sent).view(len(own), *own[0].shape)
    return [returned[order.index(i)] for i in range(len(own))]
