# Run: pytest tests/ensemble/test_member_losses.py
"""A loss that is a module has buffers of its own for each member, in eager mode and in one graph of
gradient and update.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from batches import captured_to_train
from monograph.ensemble import Ensemble
from monograph.laws.comparisons import member_is_alone, outcome
from monograph.loop import train
from monograph.optim import AdamW
from monograph.resident import Resident

N, UPDATES = 3, 3


class Centred(nn.Module):
    """Squared errors less their mean over the update, which is known after a pass over its rows."""

    sums: Tensor
    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sums", torch.zeros(2, dtype=torch.float64))
        self.register_buffer("centre", torch.zeros((), dtype=torch.float64))

    @contextmanager
    def update_of(self, index: int, batches: Any, score: Any, over_ranks: Any) -> Iterator[None]:
        self.sums.zero_()
        score(batches)
        total, count = self.sums.clone().unbind(-1)
        self.centre.copy_(total / count)
        try:
            yield
        finally:
            self.centre.zero_()

    def forward(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        errors = model(batch["x"]) - batch["y"]
        self.sums.add_(torch.stack([errors.detach().sum(), torch.ones_like(errors).sum()]))
        return (errors - self.centre).square().sum(), self.count(batch)

    def count(self, batch: Any) -> Tensor:
        return torch.ones_like(batch["y"]).sum().long()


def windows(each: bool) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(3)
    lead = [N] if each else []
    return [
        {
            "x": torch.randn(*lead, 4, 5, generator=draw, dtype=torch.float64),
            "y": torch.randn(*lead, 4, 2, generator=draw, dtype=torch.float64),
        }
        for _ in range(UPDATES)
    ]


@pytest.mark.parametrize("each", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(("micro_batch", "captured"), [(2, False), (None, False), (None, True)])
def test_a_member_s_loss_is_that_of_the_member_alone(
    micro_batch: int | None, captured: bool, each: bool
) -> None:
    members = [nn.Linear(5, 2).double() for _ in range(N)]
    copies = copy.deepcopy(members)
    given = Centred()
    engine = Ensemble(members, loss=given, optim=AdamW(lr=0.1), micro_batch=micro_batch, each=each)
    if captured:
        captured_to_train(engine, windows(each)[0])
        assert engine._updates_in_one_graph
    updates = list(train(engine, windows(each)))
    for i, model in enumerate(copies):
        own = [
            {name: tensor[i] if each else tensor for name, tensor in window.items()}
            for window in windows(each)
        ]
        alone = Resident(model, loss=Centred(), optim=AdamW(lr=0.1), micro_batch=micro_batch)
        expected = outcome(alone.state(), list(train(alone, own)))
        found = outcome(engine.member_state(i), updates, member=i)
        assert member_is_alone(found, expected | outcome(alone.state()))
        sums = engine.member_loss(i).sums  # type: ignore[attr-defined]
        torch.testing.assert_close(sums, alone.loss.sums)  # type: ignore[attr-defined]
    assert not given.sums.any() and given.sums.shape == (2,), "the caller's loss stays as it is"
