"""Give each member an optimizer, and merge the members' kinds of updates.

A `ParameterKind` says how a parameter is updated, with numbers such as its learning rate. In a merged one, a
number in which members differ is a tensor [N]. The others stay numbers, which keeps the graph simple.

Shapes: N members.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from monograph.ensemble.knobs import Knobs
from monograph.errors import UsageError
from monograph.optim import Optimizer, ParameterKind
from monograph.optim.optimizer import Knob

# Fields of a `ParameterKind` in which members may differ. They may also differ in each of its betas.
_MEMBER_FIELDS_OF_KIND = ("lr", "weight_decay", "eps")


def member_optimizers(
    optim: Optimizer | type[Optimizer] | Sequence[Optimizer], knobs: Sequence[Mapping[str, Any]]
) -> list[Optimizer]:
    """Return one optimizer for each member.

    Args:
        optim: one optimizer (or its class) for all members, whose fields are replaced by the knobs
            of the same names; or one optimizer for each member.
        knobs: each member's knobs by name. A knob is a value in which members differ.

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
        optims = []
        for member_knobs in knobs:
            replaced = {
                name: member_knobs[name] for name in common.may_differ if name in member_knobs
            }
            optims.append(replace(common, **replaced))
    first = optims[0]
    for number, other in enumerate(optims):
        if type(other) is not type(first):
            raise UsageError(
                f"members 0 and {number} have different optimizers: members of one graph share its class"
            )
        # Members may also differ in the numbers of their groups of parameters (`Optimizer.groups`).
        for field in fields(other):
            if field.name in (*other.may_differ, "groups"):
                continue
            if getattr(other, field.name) != getattr(first, field.name):
                raise UsageError(
                    f"members 0 and {number} differ in the optimizer's {field.name}, which one graph shares; "
                    f"a member may have its own {', '.join(other.may_differ)}"
                )
    return optims


def require_used_knobs(knobs: Sequence[Any], optim: Optimizer) -> None:
    """Refuse a knob that changes nothing. Reports would list it as if members differed by it.

    Args:
        knobs: each member's knobs, after the member was built.
        optim: any member's optimizer.

    Raises:
        UsageError: nothing has read a knob, and the optimizer has no field of its name.
    """
    read_by_ensemble = ["seed", *optim.may_differ]
    for member_knobs in knobs:
        # Whether the values of another mapping were read is not known.
        if not isinstance(member_knobs, Knobs):
            continue
        for name in Knobs.unread(member_knobs):
            if name not in read_by_ensemble:
                raise UsageError(
                    f"the knob {name} changes nothing: the function that builds a member does not read it, and of "
                    f"{type(optim).__name__} a member has its own {', '.join(optim.may_differ)}; "
                    "take it out, or read it"
                )


def dropout_seeds(knobs: Sequence[Mapping[str, Any]], device: torch.device) -> torch.Tensor:
    """Return the seeds of the members' dropout, [N] int64. By default a seed is the member's
    number.

    Raises:
        UsageError: a seed is not a whole number.
    """
    seeds = [member_knobs.get("seed", number) for number, member_knobs in enumerate(knobs)]
    for seed in seeds:
        if not isinstance(seed, int):
            raise UsageError(f"seed = {seed!r}: expected a whole number")
    return torch.tensor(seeds, dtype=torch.int64, device=device)


def merge_kinds(
    member_kinds: Sequence[Mapping[str, ParameterKind]], device: torch.device
) -> dict[str, ParameterKind]:
    """Return each parameter's merged kind by the parameter's name.

    If two parameters have the same kind in every member, they get the same merged kind, so that they can
    share a plane.

    Args:
        member_kinds: for each member, its parameters' kinds by name.
        device: the device of the tensors.
    """
    merged: dict[tuple[ParameterKind, ...], ParameterKind] = {}  # by the members' kinds
    merged_by_name = {}
    for name in member_kinds[0]:
        kinds = tuple(kinds_by_name[name] for kinds_by_name in member_kinds)
        if kinds not in merged:
            numbers: dict[str, Any] = {
                field: _merge_values([getattr(kind, field) for kind in kinds], device)
                for field in _MEMBER_FIELDS_OF_KIND
            }
            betas_of_members = zip(*(kind.betas for kind in kinds), strict=True)
            numbers["betas"] = tuple(_merge_values(betas, device) for betas in betas_of_members)
            merged[kinds] = kinds[0]._replace(**numbers)
        merged_by_name[name] = merged[kinds]
    return merged_by_name


def _merge_values(values: Sequence[Knob], device: torch.device) -> Knob:
    """Return the members' common value, or if they differ a tensor [N] of their values, fp64."""
    if all(value == values[0] for value in values):
        return values[0]
    return torch.tensor(values, dtype=torch.float64, device=device)
