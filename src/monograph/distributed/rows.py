"""Shard tensors by rows, gather them, and say which rows a rank has.

Each of W ranks has the next ceil(n / W) of n rows; the last ranks have fewer or none. If the mesh of
ranks has two dimensions, the machine and the rank within it, only the last one shares out rows: each
machine has all of them.
"""

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard


def rank_rows(rank: int, size: int, rows: int) -> slice:
    """Return which of `rows` rows one rank has, if `size` ranks share them out."""
    rows_per_rank = math.ceil(rows / size)
    return slice(min(rank * rows_per_rank, rows), min((rank + 1) * rows_per_rank, rows))


def rank_and_size(mesh: DeviceMesh) -> tuple[int, int]:
    """Return this rank's number among the ranks that share out rows, and their number."""
    return mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)


def own_slice(tensor: DTensor) -> slice:
    """Return the slice of a sharded tensor's rows that this rank has."""
    unusual_slice: slice | None = getattr(tensor, "unusual_slice", None)  # see `shard_from_rows`
    if unusual_slice is not None:
        return unusual_slice
    rank, ranks = rank_and_size(tensor.device_mesh)
    return rank_rows(rank, ranks, len(tensor))


def shard_from_rows(
    own_rows: Tensor, mesh: DeviceMesh, unsharded: Tensor, unusual_slice: slice | None = None
) -> DTensor:
    """Make a sharded tensor of the rows that each rank has.

    Args:
        own_rows: this rank's rows.
        mesh: the ranks.
        unsharded: a tensor with the shape of the sharded tensor; its values are not used.
        unusual_slice: which rows `own_rows` are; torch's functions cannot gather such a tensor. None:
            the rows that `rank_rows` gives this rank.
    """
    shape = unsharded.shape
    stride = torch.empty(shape, device="meta").stride()  # that of a contiguous tensor
    placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    sharded = DTensor.from_local(
        own_rows, mesh, placements, run_check=False, shape=shape, stride=stride
    )
    sharded.unusual_slice = unusual_slice  # type: ignore[attr-defined] # for `own_slice`
    return sharded


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Shard a tensor as `like` is sharded; if `like` is not, return the tensor itself."""
    if not isinstance(like, DTensor):
        return tensor
    mesh = like.device_mesh
    rows = own_slice(like)
    return shard_from_rows(tensor[rows].to(mesh.device_type), mesh, tensor, rows)


def gather_rows(tensor: Tensor) -> Tensor:
    """Return a tensor with all of its rows, whether it is sharded or not.

    For a sharded tensor this is a collective of the ranks that share out the rows.
    """
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class OwnRows(Mapping[str, Tensor]):
    """A mapping of unsharded tensors, which gives this rank's rows of each.

    A tensor is sharded when it is looked up.
    """

    def __init__(self, tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]):
        """Store the tensors.

        Args:
            tensors: the unsharded tensors, by name.
            like: tensors by name. One of the same name and shape says how a tensor is sharded; without
                it, the tensor is given as it is.
        """
        self._tensors = tensors
        self._like = like

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        like = self._like.get(name)
        if like is None or like.shape != tensor.shape:
            return tensor
        return shard_like(tensor, like)
