"""Planes: the parameters of a module in a few flat buffers.

A plane is one contiguous buffer that holds every parameter that is updated in one way; the module's parameters and
their gradients are views of it. One update is then a handful of large operations whatever the number of parameters
(measured on a CPU: compiling AdamW over 110 separate tensors took 48 s, over two flat buffers 3.6 s).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from monograph.errors import UsageError


class Kind(NamedTuple):
    """How a parameter is updated; parameters of one kind share a plane.

    Attributes:
        lr: factor of the optimizer's learning rate.
        weight_decay: decoupled decay.
        matrix: (rows, cols) of a matrix that Muon updates; None: AdamW.
        momentum: Muon's.
    """

    lr: float
    weight_decay: float
    matrix: tuple[int, int] | None = None
    momentum: float = 0.0


class Slot(NamedTuple):
    """Where one parameter lies in its plane."""

    name: str
    parameter: nn.Parameter
    offset: int


@dataclass
class Plane:
    """The parameters of one kind as flat buffers, all of the plane's `size` elements.

    Attributes:
        kind: how they are updated.
        slots: the parameters, in the module's order.
        param: [size] in the parameters' dtype; the module's parameters are views of it.
        grad: [size] same dtype; the parameters' `.grad` are views of it.
        state: the optimizer's buffers by name, each [size].
    """

    kind: Kind
    slots: list[Slot]
    param: Tensor
    grad: Tensor
    state: dict[str, Tensor] = field(default_factory=dict)

    def views(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """(parameter name, view of `flat` in the parameter's shape) for each parameter."""
        for name, parameter, offset in self.slots:
            yield name, flat[offset : offset + parameter.numel()].view(parameter.shape)

    def link(self) -> None:
        """Point every parameter's `.grad` at the plane, whatever anybody set it to since."""
        for (_, parameter, _), (_, view) in zip(self.slots, self.views(self.grad), strict=True):
            parameter.grad = view


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by name; tied ones once, under their first name.

    Raises:
        UsageError: there is none, or they have different dtypes or devices.
    """
    found = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not found:
        raise UsageError("the module has no trainable parameter: every requires_grad is False")
    places = {(p.dtype, p.device) for p in found.values()}
    if len(places) > 1:
        raise UsageError(f"trainable parameters must share one dtype and device, found {sorted(map(str, places))}")
    return found


def planes(parameters: Mapping[str, nn.Parameter], kinds: Mapping[str, Kind]) -> list[Plane]:
    """Move parameters into planes, one for each kind.

    Values, names, dtypes and devices stay; tied parameters stay tied. Afterwards the parameters are views, so load
    weights and move the module to its device before.

    Args:
        parameters: by name.
        kinds: of each, by the same names.
    """
    members: dict[Kind, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in parameters.items():
        members.setdefault(kinds[name], []).append((name, parameter))
    return [_plane(kind, those) for kind, those in members.items()]


def _plane(kind: Kind, members: list[tuple[str, nn.Parameter]]) -> Plane:
    param = torch.cat([p.detach().flatten() for _, p in members])
    offsets = [0]
    for _, p in members:
        offsets.append(offsets[-1] + p.numel())
    plane = Plane(
        kind, [Slot(n, p, o) for (n, p), o in zip(members, offsets, strict=False)], param, torch.zeros_like(param)
    )
    for (_, parameter, _), (_, view) in zip(plane.slots, plane.views(param), strict=True):
        parameter.data = view
    plane.link()
    return plane
