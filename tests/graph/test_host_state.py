"""Run: pytest tests/graph/test_host_state.py"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from monograph.graph.replay import HostState


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.BatchNorm1d(3)
        self.heat, self.mean = 0.5, torch.zeros(3)


class Owner:
    def __init__(self) -> None:
        self.part, self.calls, self.function = Part(), 0, print


CHANGES: dict[str, Callable[[Owner], object]] = {
    "heat": lambda owner: setattr(owner.part, "heat", 0.25),
    "mean": lambda owner: setattr(owner.part, "mean", owner.part.mean.clone()),
    "running_mean": lambda owner: setattr(owner.part.inner, "running_mean", torch.zeros(3)),
    "weight": lambda owner: setattr(owner.part.inner, "weight", nn.Parameter(torch.ones(3))),
    "training": lambda owner: owner.part.inner.eval(),
    "requires_grad": lambda owner: owner.part.inner.weight.requires_grad_(False),
    "new": lambda owner: setattr(owner.part, "new", object()),
    "calls": lambda owner: setattr(owner, "calls", 0.0),
    "function": lambda owner: setattr(owner, "function", len),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_is_named(name: str) -> None:
    owner = Owner()
    state = HostState(owner.part, owner, attributes=[(owner, "function")])
    assert state.changed_attribute() is None
    CHANGES[name](owner)
    assert state.changed_attribute() == name


def test_numbers_in_tensors_and_equal_values_are_no_change() -> None:
    owner = Owner()
    state = HostState(owner.part, owner)
    owner.part.inner(torch.randn(4, 3))
    owner.part.mean.add_(1)
    owner.part.heat = float("0.5")
    with torch.no_grad():
        owner.part.inner.weight.mul_(2)
    assert state.changed_attribute() is None
