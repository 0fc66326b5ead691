"""Run: pytest tests/ensemble/test_member.py (one member of an ensemble as an engine, which a
sweep's runs save)
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from batches import copied
from monograph.ensemble import Ensemble
from monograph.ensemble.member import MemberEngine
from monograph.errors import InputRefused, UsageError
from monograph.loop import EngineState

WINDOW = {"x": torch.ones(2, 3)}


def squares(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return model(batch["x"]).square().sum(), torch.tensor(2.0)


@pytest.fixture
def ensemble() -> Ensemble:
    torch.manual_seed(0)
    made = Ensemble([nn.Linear(3, 1) for _ in range(3)], loss=squares)
    made.accumulate(WINDOW)
    made.update()
    return made


def test_a_member_takes_its_own_state_and_leaves_the_others(ensemble: Ensemble) -> None:
    one = MemberEngine(ensemble, 1)
    states = [copied(ensemble.member_state(number)) for number in range(3)]
    one.load_state(states[0])
    for number, expected in enumerate([states[0], states[0], states[2]]):
        found = ensemble.member_state(number)
        assert all(
            torch.equal(found.model[name], tensor) for name, tensor in expected.model.items()
        )
        assert all(
            torch.equal(found.optimizer[name], tensor)
            for name, tensor in expected.optimizer.items()
        )
        assert found.scalars == expected.scalars


def test_a_state_that_does_not_fit_changes_nothing(ensemble: Ensemble) -> None:
    one = MemberEngine(ensemble, 1)
    before = copied(one.state())
    other = {name: tensor + 1 for name, tensor in before.model.items()}
    for state in (
        EngineState(other, {}, before.scalars),
        EngineState(other, before.optimizer, {}),
        EngineState(other, before.optimizer, before.scalars | {"applied": "many"}),
    ):
        with pytest.raises(InputRefused):
            one.load_state(state)
    assert all(
        torch.equal(tensor, before.model[name]) for name, tensor in one.state().model.items()
    )


def test_a_member_is_scored_alone_and_trained_by_the_ensemble(ensemble: Ensemble) -> None:
    one = MemberEngine(ensemble, 2)
    loss_sum, count = one.evaluate(WINDOW)
    torch.testing.assert_close(loss_sum.float(), squares(one.model, WINDOW)[0])
    assert float(count) == 2
    for train in (lambda: one.accumulate(WINDOW), one.update):
        with pytest.raises(UsageError, match="train together"):
            train()
    one.micro_batch = 1
    assert ensemble.micro_batch == 1 and one.index == ensemble.index == 1
