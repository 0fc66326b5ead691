# Run: pytest tests/ensemble/test_buffers.py
"""Buffers that the forward pass sets, instead of writing in them: each member's own, as alone, or
refused.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from monograph.ensemble import Ensemble
from monograph.errors import InputRefused
from monograph.laws.comparisons import relative_error
from monograph.loop import train
from monograph.optim import AdamW
from monograph.resident import Resident

N, ROWS, BOUND = 3, 4, 1e-10


class Averaging(nn.Module):
    """Its outputs depend on a mean of all that it has seen, kept as people keep it."""

    mean: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.ones(()))  # of no dimension, as temperatures are
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        """[B, 3] to [B, 2]."""
        if self.training:
            self.mean = (
                0.9 * self.mean + 0.1 * x.detach().mean(0) * self.linear.weight.detach().norm()
            )
            self.seen = self.seen + 1
        out: Tensor = self.linear(x - self.mean) * self.scale
        return out


class Growing(Averaging):
    """Its buffer gets longer."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, 3] to [B, 2]."""
        self.mean = torch.cat([self.mean, x.detach().mean(0)])
        out: Tensor = self.linear(x)
        return out


class Late(Averaging):
    """Its buffer is none at first."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", None)

    def forward(self, x: Tensor) -> Tensor:
        """[B, 3] to [B, 2]."""
        self.last = x.detach().mean(0)
        out: Tensor = self.linear(x)
        return out


def squares(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Of the outputs."""
    return model(batch["x"]).square().sum(), len(batch["x"])


def built(kind: type[nn.Module]) -> list[nn.Module]:
    """Members of their own numbers."""
    torch.manual_seed(0)
    return [kind().double() for _ in range(N)]


def windows(count: int) -> list[dict[str, Tensor]]:
    """The same ones each time."""
    generator = torch.Generator().manual_seed(1)
    return [
        {"x": torch.randn(ROWS, 3, generator=generator, dtype=torch.float64)} for _ in range(count)
    ]


# By day laws/test_member_is_solo.py captures windows of several micro-batches.
@pytest.mark.parametrize(
    ("backend", "micro_batch"),
    [
        (None, ROWS),
        (None, ROWS // 2),
        pytest.param("aot_eager", ROWS, marks=pytest.mark.slow),
        pytest.param("aot_eager", ROWS // 2, marks=pytest.mark.slow),
    ],
)
def test_a_buffer_that_is_set_is_each_members_own(backend, micro_batch):
    members = built(Averaging)
    alone = copy.deepcopy(members)
    options = {"loss": squares, "micro_batch": micro_batch}
    engine = Ensemble(members, optim=AdamW(lr=1e-2), **options)
    if backend:
        assert engine.capture(windows(1)[0], backend) is None
    losses = torch.stack([update.loss for update in train(engine, windows(4))])
    for i, model in enumerate(alone):
        solo = Resident(model, optim=AdamW(lr=1e-2), **options)
        expected = torch.stack([update.loss for update in train(solo, windows(4))])
        assert relative_error(losses[:, i], expected) < BOUND
        assert relative_error(members[i].mean, model.mean) < BOUND
        assert int(members[i].seen) == int(model.seen) == 4 * ROWS // micro_batch
    assert not torch.equal(members[0].mean, members[1].mean)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager"])
def test_a_model_alone_begins_with_its_buffers_as_they_were(backend):
    """What warming a graph up sets is taken back."""
    [model, *_] = built(Averaging)
    engine = Resident(model, loss=squares)
    assert engine.capture(windows(1)[0], backend) is None
    assert int(model.seen) == 0 and not model.mean.any()


def test_one_of_another_shape_is_refused_with_its_name():
    engine = Ensemble(built(Growing), loss=squares)
    with pytest.raises(
        InputRefused, match=r"sets the buffer mean, \[3\] float64, to \[6\] float64"
    ):
        next(train(engine, windows(1)))


def test_one_that_is_none_at_first_is_refused_with_its_name():
    engine = Ensemble(built(Late), loss=squares)
    with pytest.raises(InputRefused, match=r"sets the buffer last, nothing, to \[3\] float64"):
        next(train(engine, windows(1)))
