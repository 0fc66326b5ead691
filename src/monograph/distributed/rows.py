"""Share out a tensor's rows: of n rows each of W ranks has ceil(n / W), in order, the last ones
fewer or none.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard


def rows_of(rank: int, size: int, rows: int) -> slice:
    """Return the slice of a parameter's rows that one of `size` ranks holds."""
    share = -(-rows // size)
    return slice(min(rank * share, rows), min((rank + 1) * share, rows))


def among(mesh: DeviceMesh) -> tuple[int, int]:
    """Return this rank's number among those that share out rows, a mesh's last dimension, and how
    many these are.
    """
    return mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)


def place_of(tensor: DTensor) -> slice:
    """Return the slice of a sharded tensor's rows that this rank holds."""
    own: slice | None = getattr(tensor, "place", None)
    return own or rows_of(*among(tensor.device_mesh), len(tensor))


def of_rows(own: Tensor, mesh: DeviceMesh, whole: Tensor, place: slice | None = None) -> DTensor:
    """Return this rank's rows as the local part of a DTensor of the shape of `whole`.

    `place` says which rows they are, if they are not those of `rows_of`: torch's own functions then
    cannot gather them.
    """
    shape = whole.shape
    stride = torch.empty(whole.shape, device="meta").stride()
    placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    made = DTensor.from_local(own, mesh, placements, run_check=False, shape=shape, stride=stride)
    made.place = place  # type: ignore[attr-defined]
    return made


def own_rows(tensor: Tensor, like: Tensor) -> Tensor:
    """Return this rank's rows of a whole tensor where `like` is sharded, otherwise the tensor
    itself.
    """
    if not isinstance(like, DTensor):
        return tensor
    mesh = like.device_mesh
    place = place_of(like)
    return of_rows(tensor[place].to(mesh.device_type), mesh, tensor, place)


def whole_rows(tensor: Tensor) -> Tensor:
    """Return all rows of a tensor that may be sharded; then a collective of those that share out
    the rows.
    """
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class OwnRows(Mapping[str, Tensor]):
    """Whole tensors by name, each cut to this rank's rows when it is asked for."""

    def __init__(self, tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]):
        """Shard `tensors` as those of the same name in `like` are."""
        self._tensors, self._like = tensors, like

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        like = self._like.get(name)
        return tensor if like is None or like.shape != tensor.shape else own_rows(tensor, like)
