"""Rows of tensors: which are whose, and planes of parameters of which FSDP2 gives each rank some rows.

Shapes: a parameter [n, ...] has rows 0 .. n - 1; W ranks have ceil(n / W) each, in their order, the last ones fewer or
none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from monograph.optim import Kind, Plane, trainable
from monograph.optim.planes import Slot


def rows_of(rank: int, size: int, rows: int) -> slice:
    """The rows of a rank among so many."""
    each = -(-rows // size)
    return slice(min(rank * each, rows), min((rank + 1) * each, rows))


def of_rows(own: Tensor, mesh: DeviceMesh, whole: Tensor) -> DTensor:
    """This rank's rows as a part of a tensor of the shape of `whole`."""
    shape, stride = whole.shape, torch.empty(whole.shape, device="meta").stride()
    return DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


def own_rows(tensor: Tensor, like: Tensor) -> Tensor:
    """A whole tensor as `like` lies on the ranks: this rank's rows of it, or itself."""
    if not isinstance(like, DTensor):
        return tensor
    mesh = like.device_mesh
    return of_rows(tensor[rows_of(mesh.get_local_rank(), mesh.size(), len(tensor))].to(mesh.device_type), mesh, tensor)


class OwnRows(Mapping[str, Tensor]):
    """Whole tensors, each cut when it is asked for to what this rank has of one of that name."""

    def __init__(self, tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]):
        """Cut `tensors` as those of `like` are."""
        self._tensors, self._like = tensors, like

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, name: str) -> Tensor:
        tensor, like = self._tensors[name], self._like.get(name)
        return tensor if like is None or like.shape != tensor.shape else own_rows(tensor, like)


@dataclass
class RowsPlane(Plane):
    """A plane of the rows that this rank has of one parameter: FSDP2 owns the memory of the weights."""

    def views(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """See `Plane.views`; the view is a part of a tensor in the parameter's shape."""
        [(name, parameter, _)] = self.slots
        local: Any = parameter
        yield name, of_rows(flat.view(local.to_local().shape), local.device_mesh, parameter)


def rows_planes(model: nn.Module, kinds: Mapping[str, Kind]) -> list[RowsPlane]:
    """A plane for each trainable parameter of a module that is sharded.

    `number` and `start` say where its elements lie in the planes of one process.
    """
    numbers: dict[Kind, int] = {}
    reached: dict[Kind, int] = {}
    made = []
    for name, parameter in trainable(model).items():
        sharded, kind = parameter, kinds[name]
        assert isinstance(sharded, DTensor)
        rows = rows_of(sharded.device_mesh.get_local_rank(), sharded.device_mesh.size(), len(parameter))
        before = reached.get(kind, 0) + rows.start * math.prod(parameter.shape[1:])
        reached[kind] = reached.get(kind, 0) + parameter.numel()
        local = sharded.to_local().detach().view(-1)
        start = torch.tensor(before, device=local.device)
        number = numbers.setdefault(kind, len(numbers))
        made.append(
            RowsPlane(kind, [Slot(name, parameter, 0)], local, torch.zeros_like(local), number, (local.numel(),), start)
        )
    return made
