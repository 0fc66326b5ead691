"""Give each member its optimizer, and merge their kinds, in which a number that differs is a tensor
[N].

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

# Fields of a `Kind` in which members may differ; so are its betas, each by itself.
_NUMBERS = ("lr", "weight_decay", "eps")


def optimizers(
    optim: Optimizer | type[Optimizer] | Sequence[Optimizer], knobs: Sequence[Mapping[str, Any]]
) -> list[Optimizer]:
    """Return one optimizer for each member.

    Args:
        optim: one optimizer for all, whose fields are replaced by the knobs of the same names; or
            one for each member.
        knobs: each member's knobs by name.

    Raises:
        UsageError: there are not as many optimizers as members, one is no optimizer, or they differ
            in a field that must be equal.
    """
    if isinstance(optim, list | tuple):
        optims = list(optim)
        if len(optims) != len(knobs):
            raise UsageError(
                f"{len(optims)} optimizers for {len(knobs)} members: pass one, or one each"
            )
    else:
        first = optim() if isinstance(optim, type) and issubclass(optim, Optimizer) else optim
        if not isinstance(first, Optimizer):
            raise UsageError(
                f"optim = {optim!r}: expected one of this package's, such as monograph.AdamW(lr=1e-3)"
            )
        optims = [
            replace(first, **{name: own[name] for name in first.may_differ if name in own})
            for own in knobs
        ]
    for number, other in enumerate(optims):
        if type(other) is not type(optims[0]):
            raise UsageError(
                f"members 0 and {number} have different optimizers; those of one graph share its kind"
            )
        # All other fields shape the graph, which all members share.
        shared = (
            field.name for field in fields(other) if field.name not in (*other.may_differ, "groups")
        )
        if odd := next(
            (name for name in shared if getattr(other, name) != getattr(optims[0], name)), None
        ):
            raise UsageError(
                f"members 0 and {number} differ in the optimizer's {odd}, which one graph shares; "
                f"a member may have its own {', '.join(other.may_differ)}"
            )
    return optims


def require_read(knobs: Sequence[Any], optim: Optimizer) -> None:
    """Refuse a knob that changes nothing, as tables would list it although its members are equal.

    Args:
        knobs: each member's knobs, after the member was built.
        optim: any member's optimizer.

    Raises:
        UsageError: nothing has read a knob, and the optimizer has no field of its name.
    """
    # The ensemble itself reads seeds and the optimizer's numbers.
    own = ["seed", *optim.may_differ]
    for member_knobs in knobs:
        unread = Knobs.unread(member_knobs) if isinstance(member_knobs, Knobs) else []
        if name := next((name for name in unread if name not in own), None):
            raise UsageError(
                f"the knob {name} changes nothing: the function that builds a member does not read it, and of "
                f"{type(optim).__name__} a member has its own {', '.join(own[1:])}; take it out, or read it"
            )


def seeds(knobs: Sequence[Mapping[str, Any]], device: torch.device) -> torch.Tensor:
    """Return the seeds of the members' dropout, [N] int64; by default a member's number.

    Raises:
        UsageError: a seed is no whole number.
    """
    seeds = [own.get("seed", number) for number, own in enumerate(knobs)]
    if odd := [seed for seed in seeds if not isinstance(seed, int)]:
        raise UsageError(f"seed = {odd[0]!r}: expected a whole number")
    return torch.tensor(seeds, dtype=torch.int64, device=device)


def kinds(of_members: Sequence[Mapping[str, Kind]], device: torch.device) -> dict[str, Kind]:
    """Return how each parameter is updated, by name; numbers are tensors [N] where the members'
    differ.
    """
    by_kind: dict[tuple[Kind, ...], Kind] = {}
    for of_parameter in zip(*(of.values() for of in of_members), strict=True):
        numbers: dict[str, Any] = {
            name: _knob([getattr(kind, name) for kind in of_parameter], device) for name in _NUMBERS
        }
        betas = zip(*(kind.betas for kind in of_parameter), strict=True)
        numbers["betas"] = tuple(_knob(of_moment, device) for of_moment in betas)
        by_kind.setdefault(of_parameter, of_parameter[0]._replace(**numbers))
    return {name: by_kind[tuple(of[name] for of in of_members)] for name in of_members[0]}


def _knob(values: Sequence[Knob], device: torch.device) -> Knob:
    """Return the members' common value, or else a tensor [N] of their values, fp64."""
    if all(value == values[0] for value in values):
        return values[0]
    return torch.tensor(values, dtype=torch.float64, device=device)
