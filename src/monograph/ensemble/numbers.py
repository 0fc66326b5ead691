"""The members' optimizers as one: a number that differs between them is a tensor of one for each.

Shapes: N members.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from monograph.errors import UsageError
from monograph.optim import Kind, Optimizer
from monograph.optim.planes import Knob

# The optimizer's fields that each member may have a value of its own of; the rest shapes the update.
OF_OPTIMIZER = ("lr", "betas", "eps", "weight_decay", "momentum")

NUMBERS = ("lr", "weight_decay", "momentum", "eps")  # of a kind


def optimizers(
    optim: Optimizer | type[Optimizer] | Sequence[Optimizer], knobs: Sequence[Mapping[str, Any]]
) -> list[Optimizer]:
    """One optimizer for each member.

    Args:
        optim: one for all, whose fields the knobs of those names replace; or one each.
        knobs: of each member, by name.

    Raises:
        UsageError: not as many as members, or they differ in a field that cannot differ.
    """
    if isinstance(optim, Sequence):
        each = list(optim)
        if len(each) != len(knobs):
            raise UsageError(f"{len(each)} optimizers for {len(knobs)} members: pass one, or one each")
    else:
        first = optim() if isinstance(optim, type) else optim
        own = [field.name for field in fields(first) if field.name in OF_OPTIMIZER]
        each = [replace(first, **{name: of[name] for name in own if name in of}) for of in knobs]
    for number, other in enumerate(each):
        if type(other) is not type(each[0]):
            raise UsageError(f"members 0 and {number} have different optimizers; those of one graph share its kind")
        shared = (field.name for field in fields(other) if field.name not in (*OF_OPTIMIZER, "groups"))
        if odd := next((name for name in shared if getattr(other, name) != getattr(each[0], name)), None):
            raise UsageError(
                f"members 0 and {number} differ in the optimizer's {odd}, which one graph shares; "
                f"a member may have its own {', '.join(OF_OPTIMIZER)}"
            )
    return each


def merged(optims: Sequence[Optimizer], device: torch.device) -> Optimizer:
    """One optimizer whose numbers are tensors [N] where the members' differ; its rate is not among them."""
    one, other = zip(*(optim.betas for optim in optims), strict=True)
    betas: Any = knob(one, device), knob(other, device)
    eps: Any = knob([optim.eps for optim in optims], device)
    return replace(optims[0], betas=betas, eps=eps)


def kinds(of_members: Sequence[Mapping[str, Kind]], device: torch.device) -> dict[str, Kind]:
    """How each parameter is updated, by name: factors and decays are tensors [N] where the members' differ."""
    found: dict[tuple[Kind, ...], Kind] = {}
    for each in zip(*(of.values() for of in of_members), strict=True):
        numbers = {name: knob([getattr(kind, name) for kind in each], device) for name in NUMBERS}
        found.setdefault(each, each[0]._replace(**numbers))
    return {name: found[tuple(of[name] for of in of_members)] for name in of_members[0]}


def knob(values: Sequence[Any], device: torch.device) -> Knob:
    """The members' common value, or a tensor [N] of theirs, fp64."""
    if all(value == values[0] for value in values):
        common: float = values[0]
        return common
    return torch.tensor(values, dtype=torch.float64, device=device)
