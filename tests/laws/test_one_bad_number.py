"""Run: pytest tests/laws/test_one_bad_number.py (one number that is not finite, anywhere, costs
exactly one update).
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from batches import captured_to_train, copied, ragged, tiny_llama
from monograph.ensemble import Ensemble
from monograph.errors import UsageError
from monograph.loop import EngineState
from monograph.loss import token_loss
from monograph.optim import AdamW, Group, Muon
from monograph.resident import Resident
from monograph.schedule import warmup_cosine
from monograph.stream import Placement, Streamed

ROWS, MICRO_BATCH, WIDTH, UPDATES = 8, 2, 6, 4
NUMBERS = (math.nan, math.inf, -math.inf)
PLACES = ("data", "activation", "gradient", "loss")


class Probe(nn.Module):
    """A regression whose batch may carry a number that is not finite to any place."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, data: Tensor, activation: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(data)) + activation[:, None]).squeeze(-1)


def probe_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    errors = (model(batch["data"], batch["activation"]) - batch["wanted"]).square() * batch[
        "counted"
    ]
    return spoiled(errors.sum(), batch), batch["counted"].sum()


def llama_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    loss_sum, count = token_loss(model, batch)
    return spoiled(loss_sum, batch), count


def spoiled(loss: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """The loss, its value or its gradient alone not finite where the batch says so."""
    bad = (batch["gradient"] != 0).any()
    # The root's slope at 0 is infinite, and 0 times that is no number; the value is 0.
    slope = torch.where(bad, loss * 0, torch.ones_like(loss)).sqrt() - torch.where(bad, 0.0, 1.0)
    return loss + slope + batch["loss"].sum().detach()


def window(index: int, bad: tuple[str, int, float] | None = None) -> dict[str, Tensor]:
    """The rows of an update, one of which carries `bad`: place, row, number."""
    draws = torch.Generator().manual_seed(index)
    batch = {name: torch.zeros(ROWS) for name in ("activation", "gradient", "loss")}
    batch |= {
        "data": torch.randn(ROWS, WIDTH, generator=draws),
        "wanted": torch.randn(ROWS, generator=draws),
    }
    batch["counted"] = torch.ones(ROWS, dtype=torch.bool)
    return with_bad(batch, bad)


def texts(index: int, bad: tuple[str, int, float] | None = None) -> dict[str, Tensor]:
    return with_bad(
        ragged(ROWS, seed=index) | {name: torch.zeros(ROWS) for name in ("gradient", "loss")}, bad
    )


def with_bad(batch: dict[str, Tensor], bad: tuple[str, int, float] | None) -> dict[str, Tensor]:
    if bad:
        place, row, number = bad
        batch[place][row] = number
    return batch


OPTIONS: dict[str, Any] = {
    "schedule": warmup_cosine(2, 20),
    "clip": 1.0,
    "micro_batch": MICRO_BATCH,
}


def engine(kind: str, backend: str = "eager") -> Resident:
    if kind in ("streamed", "llama"):
        made = {"loss": llama_loss, "optim": Muon(lr=1e-2, ema=0.9), **OPTIONS}
        model = tiny_llama()
        return (
            Streamed(model, placement=Placement(), **made)
            if kind == "streamed"
            else Resident(model, **made)
        )
    made = Resident(Probe(), loss=probe_loss, optim=AdamW(lr=1e-2, ema=0.9), **OPTIONS)
    if kind == "captured":
        captured_to_train(made, window(99), backend)
    return made


def tensors(of: Resident) -> dict[str, Tensor]:
    state = of.state()
    return {
        name: tensor.clone()
        for part in (state.model, state.optimizer)
        for name, tensor in part.items()
    }


def equal(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return mine.keys() == theirs.keys() and all(
        torch.equal(mine[name], theirs[name]) for name in mine
    )


def never_had(
    reference: Resident, start: EngineState, windows: list[dict[str, Tensor]], bad_update: int
) -> Any:
    """The slow way: the bad update is not made, only counted."""
    reference.load_state(start)
    for index, rows in enumerate(windows):
        if index == bad_update:
            reference.step.index += 1
        else:
            reference.accumulate(rows)
            reference.update()
    return tensors(reference)


@pytest.mark.parametrize(
    ("kind", "stride"),
    [
        ("eager", 5),
        ("captured", 7),
        pytest.param("streamed", 11, marks=pytest.mark.slow),
        *(
            pytest.param(kind, 1, marks=pytest.mark.slow)
            for kind in ("eager", "captured", "llama", "streamed")
        ),
    ],
)
def test_it_costs_exactly_one_update(kind: str, stride: int) -> None:
    """By day every so manyth case, such that each update, micro-batch, place and number is there."""
    of_text = kind in ("llama", "streamed")
    rows, places = (texts, PLACES[2:]) if of_text else (window, PLACES)
    micro_batches = range(0, ROWS, MICRO_BATCH)
    cases = list(itertools.product(range(1, UPDATES - 1), micro_batches, places, NUMBERS))
    trained = engine(kind, "eager" if stride > 1 else "aot_eager")
    start, windows = copied(trained.state()), [rows(index) for index in range(UPDATES)]
    expected = {at: never_had(trained, start, windows, at) for at in range(1, UPDATES - 1)}
    for at, row, place, number in cases[::stride]:
        trained.load_state(start)
        for index in range(UPDATES):
            before = tensors(trained) if index == at else {}
            trained.accumulate(rows(index, (place, row, number) if index == at else None))
            done = trained.update()
            assert int(done.skipped) == int(index >= at), (at, row, place, number)
            if index == at:
                assert equal(tensors(trained), before), (at, row, place, number)
                assert not (done.loss.isfinite() and done.grad_norm.isfinite()), "it is in the log"
        assert trained.index == UPDATES and int(trained.step.applied) == UPDATES - 1
        assert equal(tensors(trained), expected[at]), (at, row, place, number)


@pytest.mark.parametrize("place", PLACES)
def test_it_costs_an_ensemble_one_update_of_one_member(place: str) -> None:
    options = {"loss": probe_loss, "optim": AdamW(lr=1e-2), "each": True, **OPTIONS}

    def together(bad: tuple[str, int, float] | None) -> Ensemble:
        members = Ensemble([Probe(seed) for seed in range(3)], **options)
        for index in range(UPDATES):
            own = [
                window(10 * member + index, bad if (member, index) == (1, 2) else None)
                for member in range(3)
            ]
            members.accumulate({name: torch.stack([each[name] for each in own]) for name in own[0]})
            done = members.update()
        assert done.skipped.tolist() == [0, int(bad is not None), 0]
        return members

    sound, spoilt = together(None), together((place, 5, math.nan))
    for member, alike in enumerate([True, False, True]):
        pairs = zip(
            sound.members[member].parameters(), spoilt.members[member].parameters(), strict=True
        )
        assert all(torch.equal(mine, other) for mine, other in pairs) is alike
        assert all(
            bool(parameter.isfinite().all()) for parameter in spoilt.members[member].parameters()
        )


# ---- the rate, and a gradient whose square overflows ---------------------------------------------

HUGE = 1e60  # finite, as a schedule's factor is, and beyond fp32


def scheduled(kind: str, factor: float, at: int = 1) -> Resident:
    options: dict[str, Any] = {**OPTIONS, "schedule": lambda index: factor if index == at else 1.0}
    if kind == "ensemble":
        return Ensemble([Probe(), Probe(1)], loss=probe_loss, **options)
    if kind in ("streamed", "backward"):
        placement = Placement(when="backward" if kind == "backward" else "sweep")
        options["clip"] = None if kind == "backward" else 1.0
        return Streamed(tiny_llama(), loss=llama_loss, placement=placement, **options)
    made = Resident(Probe(), loss=probe_loss, **options)
    if kind == "captured":
        captured_to_train(made, window(99), "aot_eager")
    return made


@pytest.mark.parametrize(
    "kind",
    ["eager", pytest.param("captured", marks=pytest.mark.slow), "ensemble", "streamed", "backward"],
)
def test_a_rate_that_overflows_costs_exactly_one_update(kind: str) -> None:
    rows = texts if kind in ("streamed", "backward") else window
    trained = scheduled(kind, HUGE)
    start = copied(trained.state())
    for index in range(3):
        trained.accumulate(rows(index))
        done = trained.update()
        assert set(done.skipped.flatten().tolist()) == {int(index >= 1)}
    mine = tensors(trained)
    assert equal(mine, never_had(trained, start, [rows(index) for index in range(3)], 1))


STEEP = {
    "a group's factor": {"groups": [Group("first.*", lr=1e39)]},
    "weight decay": {"weight_decay": 1e42},
    "a group's decay": {"groups": [Group("first.*", weight_decay=1e42)]},
    "both": {"lr": 1e19, "weight_decay": 1e20},
    "moments in bf16": {"weight_decay": 1e42, "state": "bf16"},
    "moments in 8 bits": {"weight_decay": 1e42, "state": "8bit"},
}


@pytest.mark.parametrize(
    "make", [AdamW, functools.partial(Muon, matrices=["*first.weight"])], ids=["adamw", "muon"]
)
@pytest.mark.parametrize("how", STEEP)
def test_what_multiplies_the_rate_overflows_no_weight(how: str, make: Any) -> None:
    steep = make(**STEEP[how])
    engines: list[Any] = [Resident(Probe(), loss=probe_loss, optim=steep)]
    if steep.state == "fp32":
        engines.append(Ensemble([Probe(), Probe(1)], loss=probe_loss, optim=[make(), steep]))
    for trained in engines:
        for index in range(2):
            trained.accumulate(window(index))
            done = trained.update()
        member = trained.members[1] if isinstance(trained, Ensemble) else trained.model
        assert done.skipped.flatten().tolist()[-1] == 2 and int(done.skipped.sum()) == 2
        before = list(Probe(int(isinstance(trained, Ensemble))).parameters())
        assert all(torch.equal(*pair) for pair in zip(member.parameters(), before, strict=True))


@pytest.mark.parametrize("factor", [math.nan, math.inf, -1.0, None, True])
@pytest.mark.parametrize("kind", ["eager", "ensemble", "streamed"])
def test_a_schedule_that_returns_no_rate_is_refused_before_it_does_anything(
    kind: str, factor: Any
) -> None:
    trained, rows = scheduled(kind, factor, at=0), texts if kind == "streamed" else window
    before = {name: tensor.clone() for name, tensor in trained.model.named_parameters()}
    trained.accumulate(rows(0))
    with pytest.raises(
        UsageError, match=rf"the schedule returned {factor} for update 0: expected a factor"
    ):
        trained.update()
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in trained.model.named_parameters()
    )


@pytest.mark.parametrize("optim", [AdamW(lr=1e-2), AdamW(lr=1e-2, betas=(0.0, 0.99))])
def test_a_gradient_whose_square_overflows_leaves_no_moment_that_is_infinite(optim: AdamW) -> None:
    """Its norm is finite, and an infinite second moment would hold the weight still for good, in
    silence.
    """

    def steep(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        return (model(batch["x"]) * batch["slope"]).sum(), 1

    engine = Resident(nn.Linear(2, 1), loss=steep, optim=optim)
    for slope in (1.0, 1e25, 1.0):
        engine.accumulate({"x": torch.ones(1, 2), "slope": torch.tensor([slope])})
        done = engine.update()
    assert int(done.skipped) == 1
    assert all(bool(tensor.isfinite().all()) for tensor in engine.state().optimizer.values())
