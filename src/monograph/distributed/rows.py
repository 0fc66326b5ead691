"""Share out the rows of a tensor among ranks.

Of n rows, each of W ranks has the next ceil(n / W); the last ranks have fewer or none. On several
machines a mesh of ranks has two dimensions, the machine and the rank within it, and only the last
dimension shares out rows: each machine has all of them.
"""

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard


def rows_of(rank: int, size: int, rows: int) -> slice:
    """Return the slice of `rows` rows that rank number `rank` of `size` ranks has."""
    share = math.ceil(rows / size)
    return slice(min(rank * share, rows), min((rank + 1) * share, rows))


def among(mesh: DeviceMesh) -> tuple[int, int]:
    """Return (this rank's number, the number of ranks) among the ranks that share out rows."""
    return mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)


def place_of(tensor: DTensor) -> slice:
    """Return the slice of a sharded tensor's rows that this rank has."""
    place: slice | None = getattr(tensor, "place", None)
    return place or rows_of(*among(tensor.device_mesh), len(tensor))


def of_rows(own: Tensor, mesh: DeviceMesh, whole: Tensor, place: slice | None = None) -> DTensor:
    """Return a sharded tensor, of which this rank has the rows `own`.

    Args:
        own: this rank's rows.
        mesh: the ranks.
        whole: a tensor with the shape of the sharded tensor; its values are not used.
        place: which rows `own` are, if they are not those of `rows_of`; torch's functions cannot
            gather such a tensor. None: they are those of `rows_of`.
    """
    shape = whole.shape
    stride = torch.empty(whole.shape, device="meta").stride()
    placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    sharded = DTensor.from_local(own, mesh, placements, run_check=False, shape=shape, stride=stride)
    # Read by `place_of`.
    sharded.place = place  # type: ignore[attr-defined]
    return sharded


def own_rows(tensor: Tensor, like: Tensor) -> Tensor:
    """Shard a whole tensor as `like` is sharded; if `like` is not, return the tensor itself."""
    if not isinstance(like, DTensor):
        return tensor
    mesh = like.device_mesh
    place = place_of(like)
    return of_rows(tensor[place].to(mesh.device_type), mesh, tensor, place)


def whole_rows(tensor: Tensor) -> Tensor:
    """Return all rows of a tensor, which may be sharded.

    For a sharded tensor this is a collective of the ranks that share out the rows.
    """
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class OwnRows(Mapping[str, Tensor]):
    """A mapping of whole tensors that returns this rank's rows of each tensor.

    A tensor is cut when it is looked up.
    """

    def __init__(self, tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]):
        """Store the tensors.

        Args:
            tensors: the whole tensors, by name.
            like: tensors by name; a tensor of the same name and shape says how to shard.
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
        return own_rows(tensor, like)
