"""Give each member an optimizer, and merge the members' optimizers into one.

A number is a tensor [N] in the merged optimizer if the members' values differ. Otherwise it stays a
number, which keeps the graph simple.

Shapes: N members.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from monograph.ensemble.knobs import Knobs
from monograph.errors import UsageError
from monograph.optim import Kind, Optimizer
from monograph.optim.optimizer import Knob

# The optimizer's fields in which members may differ; all other fields shape the graph.
_MEMBER_FIELDS = ("lr", "betas", "eps", "weight_decay", "momentum")

# Fields in which members may differ of a `Kind`, which says how a parameter is updated.
_MEMBER_FIELDS_OF_KIND = ("lr", "weight_decay", "momentum", "eps")


def member_optimizers(
    optim: Optimizer | type[Optimizer] | Sequence[Optimizer], knobs: Sequence[Mapping[str, Any]]
) -> list[Optimizer]:
    """Return one optimizer for each member.

    Args:
        optim: one optimizer (or its class) for all members, whose fields are replaced by the knobs
            of the same names; or one optimizer for each member.
        knobs: each member's knobs by name. A knob is a value that members differ in.

    Raises:
        UsageError: there are not as many optimizers as members, one is not an optimizer, or they
            differ in a field that must be equal.
    """
    if isinstance(optim, list | tuple):
        optims = list(optim)
        if len(optims) != len(knobs):
            raise UsageError(
                f"{len(optims)} optimizers for {len(knobs)} members: pass one, or one each"
            )
    else:
        common = optim
        if isinstance(optim, type) and issubclass(optim, Optimizer):
            common = optim()
        if not isinstance(common, Optimizer):
            raise UsageError(
                f"optim = {optim!r}: expected one of this package's, such as monograph.AdamW(lr=1e-3)"
            )
        names = _member_fields(common)
        optims = [
            replace(common, **{name: own[name] for name in names if name in own}) for own in knobs
        ]
    first = optims[0]
    for number, other in enumerate(optims):
        if type(other) is not type(first):
            raise UsageError(
                f"members 0 and {number} have different optimizers: members of one graph share its class"
            )
        # The fields of `groups` are compared where they act, in `merge_kinds`.
        for field in fields(other):
            if field.name in (*_MEMBER_FIELDS, "groups"):
                continue
            if getattr(other, field.name) != getattr(first, field.name):
                raise UsageError(
                    f"members 0 and {number} differ in the optimizer's {field.name}, which one graph shares; "
                    f"a member may have its own {', '.join(_MEMBER_FIELDS)}"
                )
    return optims


def _member_fields(optim: Optimizer) -> list[str]:
    """Return the names of an optimizer's fields in which members may differ."""
    return [field.name for field in fields(optim) if field.name in _MEMBER_FIELDS]


def require_read(knobs: Sequence[Any], optim: Optimizer) -> None:
    """Refuse a knob that changes nothing. Tables would list it as if members differed by it.

    Args:
        knobs: each member's knobs, after the member was built.
        optim: any member's optimizer.

    Raises:
        UsageError: nothing has read a knob, and the optimizer has no field of its name.
    """
    optimizer_fields = _member_fields(optim)
    read_by_ensemble = ["seed", *optimizer_fields]
    for member_knobs in knobs:
        # Whether the values of another mapping were read is not known.
        if not isinstance(member_knobs, Knobs):
            continue
        for name in Knobs.unread(member_knobs):
            if name not in read_by_ensemble:
                raise UsageError(
                    f"the knob {name} changes nothing: the function that builds a member does not read it, and of "
                    f"{type(optim).__name__} a member has its own {', '.join(optimizer_fields)}; "
                    "take it out, or read it"
                )


def dropout_seeds(knobs: Sequence[Mapping[str, Any]], device: torch.device) -> torch.Tensor:
    """Return the seeds of the members' dropout, [N] int64. By default a seed is the member's number.

    Raises:
        UsageError: a seed is not a whole number.
    """
    seeds = [own.get("seed", number) for number, own in enumerate(knobs)]
    for seed in seeds:
        if not isinstance(seed, int):
            raise UsageError(f"seed = {seed!r}: expected a whole number")
    return torch.tensor(seeds, dtype=torch.int64, device=device)


def merge_optimizers(optims: Sequence[Optimizer], device: torch.device) -> Optimizer:
    """Return one optimizer whose betas and eps are tensors [N] where the members' values differ.

    The learning rate is not merged: it changes with each update and is in `Step.lr`, [N].
    """
    beta1 = _merge_values([optim.betas[0] for optim in optims], device)
    beta2 = _merge_values([optim.betas[1] for optim in optims], device)
    eps = _merge_values([optim.eps for optim in optims], device)
    return replace(optims[0], betas=(beta1, beta2), eps=eps)


def merge_kinds(
    member_kinds: Sequence[Mapping[str, Kind]], device: torch.device
) -> dict[str, Kind]:
    """Return by name how each parameter is updated. Numbers are tensors [N] where the members'
    values differ.

    Parameters that share a kind in each member share one merged kind, so that they can share a
    plane.

    Args:
        member_kinds: for each member, its parameters' kinds by name.
        device: the device of the tensors.
    """
    merged: dict[tuple[Kind, ...], Kind] = {}  # by the members' kinds
    names = list(member_kinds[0])
    merged_by_name = {}
    for name in names:
        kinds = tuple(kind_of[name] for kind_of in member_kinds)
        if kinds not in merged:
            numbers: dict[str, Any] = {
                field: _merge_values([getattr(kind, field) for kind in kinds], device)
                for field in _MEMBER_FIELDS_OF_KIND
            }
            merged[kinds] = kinds[0]._replace(**numbers)
        merged_by_name[name] = merged[kinds]
    return merged_by_name


def _merge_values(values: Sequence[Knob], device: torch.device) -> Knob:
    """Return the members' common value, or if they differ a tensor [N] of their values, fp64."""
    if all(value == values[0] for value in values):
        return values[0]
    return torch.tensor(values, dtype=torch.float64, device=device)
