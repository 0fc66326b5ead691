"""Run: pytest tests/test_clip.py (updates that stand out are skipped, by a rule that they cannot
move).
"""

from __future__ import annotations

import functools
import math
import random
import statistics
from dataclasses import replace
from typing import Any

import pytest
import torch

from batches import captured_to_train, copied, ragged, tiny_llama
from monograph.config import load
from monograph.device import describe
from monograph.errors import InputRefused, UsageError
from monograph.graph.precision import Precision
from monograph.loop import EngineState
from monograph.loss import token_loss
from monograph.optim import AdamW, ParameterKind
from monograph.optim.adamw import ADAMW
from monograph.resident import Resident
from monograph.session.requirements import require_compatible
from monograph.session.resolve import resolve
from monograph.step import Clip
from monograph.step.clip import (
    WINDOW,
    is_spike,
    largest_lr,
    log_norm_and_loss,
    make_splittable_,
    reciprocal,
    remember_,
)

SPIKE = 2 * WINDOW


class ByHand:
    """The rule in plain Python."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.losses: list[float] = []

    def skips(self, norm: float, loss: float) -> bool:
        far = False
        if len(self.norms) >= WINDOW:
            far = all([
                self.is_far(math.log(norm), [math.log(each) for each in self.norms[-WINDOW:]], lambda middle: 0.05),
                self.is_far(loss, self.losses[-WINDOW:], lambda middle: 0.01 * abs(middle)),
            ])  # fmt: skip
        skipped = far or not (math.isfinite(norm) and math.isfinite(loss))
        if not skipped:
            self.norms.append(norm)
            self.losses.append(loss)
        return skipped

    @staticmethod
    def is_far(found: float, recent: list[float], least) -> bool:
        middle = statistics.median_low(recent)
        deviation = 1.4826 * statistics.median_low(abs(each - middle) for each in recent)
        return found - middle > 6 * max(deviation, least(middle))


def a_run(seed: int) -> list[tuple[float, float]]:
    """(norm, loss) of 500 updates, falling, some of them spikes of one kind or of both, some not
    finite.
    """
    draws, found = random.Random(seed), []
    for index in range(500):
        norm, loss = (
            draws.lognormvariate(0, 0.2) * (1 + 5 / (1 + index)),
            2 + 4 / (1 + index / 20) + draws.gauss(0, 0.03),
        )
        kind = draws.random() if index > 20 else 1.0
        norm *= draws.uniform(1, 40) if kind < 0.05 else 1
        loss += draws.uniform(0, 4) if kind < 0.04 else 0
        norm = draws.choice([math.nan, math.inf]) if kind > 0.99 and index > 20 else norm
        loss = 1e30 if 0.97 < kind < 0.98 else loss
        norm = 1e30 if 0.972 < kind < 0.98 else norm
        found.append((norm, loss))
    return found


@pytest.mark.parametrize("seed", range(6))
def test_the_rule_is_the_one_by_hand(seed: int) -> None:
    by_hand, recent, applied, skipped = (
        ByHand(),
        torch.zeros(2, WINDOW, dtype=torch.float64),
        torch.tensor(0),
        0,
    )
    for norm, loss in a_run(seed):
        found = log_norm_and_loss(
            *(torch.tensor(each, dtype=torch.float64) for each in (norm, loss))
        )
        finite = torch.tensor(math.isfinite(norm) and math.isfinite(loss))
        accepted = finite & ~is_spike(found, recent, applied)
        remember_(recent, found, applied, accepted)
        applied += accepted
        assert bool(accepted) is not by_hand.skips(norm, loss)
        skipped += not accepted
    assert bool(recent.isfinite().all()) and 0.02 < skipped / 500 < 0.1
    assert sorted(recent[1].tolist()) == sorted(by_hand.losses[-WINDOW:])


def test_members_are_judged_by_their_own_past() -> None:
    """Numbers of N members give what each gives alone, remembered numbers included, near the
    limits, too.
    """
    draws = torch.Generator().manual_seed(0)
    scales = torch.tensor([1.0, 5.0, 50.0], dtype=torch.float64).view(3, 1, 1)
    recent = scales * (1.0 + 0.2 * torch.randn(3, 2, WINDOW, dtype=torch.float64, generator=draws))
    applied, alone, judged = torch.full((3,), WINDOW + 5), recent.clone(), []
    for _ in range(40):
        found = scales[..., 0] * (1.8 + torch.rand(3, 2, dtype=torch.float64, generator=draws))
        spikes = is_spike(found, recent, applied)
        remember_(recent, found, applied, ~spikes)
        for member in range(3):
            assert spikes[member] == is_spike(found[member], alone[member], applied[member])
            remember_(alone[member], found[member], applied[member], ~spikes[member])
        judged += spikes.tolist()
    assert 20 < sum(judged) < 100 and torch.equal(recent, alone)


def test_a_run_that_hardly_varies_takes_steps_of_six_times_a_hundredth() -> None:
    recent = torch.stack([torch.zeros(WINDOW), torch.full((WINDOW,), 3.0)]).double()
    losses = {3.17: False, 3.19: True}  # 3 + 6 * 1 % of 3 = 3.18; the norm is far away
    for loss, expected in losses.items():
        found = torch.tensor([1.0, loss], dtype=torch.float64)
        assert bool(is_spike(found, recent, torch.tensor(WINDOW))) is expected


@pytest.mark.parametrize(
    ("precision", "dtype", "moved"),
    [("bf16", torch.float32, True), ("bf16", torch.float64, False), ("fp32", torch.float32, False)],
)
def test_weights_are_made_splittable_in_bf16(
    precision: str, dtype: torch.dtype, moved: bool
) -> None:
    odd = torch.tensor(1.0 + 2**-8, dtype=dtype)  # halfway between two numbers of bf16
    param = odd.clone()
    make_splittable_(param, Precision(precision))
    assert bool(param != odd) is moved


def test_the_largest_rate_has_no_product_above_the_bound() -> None:
    """bound / max(1, factor max(1, decay) of each kind), for each member."""
    largest, factors, decays = 1e19, [0.25, 3.0, 10.0], [0.5, 7.0, 0.0]
    kinds = [
        ParameterKind(ADAMW, factor, decay) for factor, decay in zip(factors, decays, strict=True)
    ]
    expected = [1e19, 1e19 / 21, 1e19 / 10]
    assert [float(largest_lr([kind], largest)) for kind in kinds] == expected
    assert float(largest_lr(kinds, largest)) == 1e19 / 21
    members = ParameterKind(ADAMW, torch.tensor(factors), torch.tensor(decays))
    assert largest_lr([members, kinds[0]], largest).tolist() == expected


def test_a_count_of_nothing_divides_nothing() -> None:
    counts = [0.0, 0.25, 1.0, 3.0, 1e9]
    assert reciprocal(torch.tensor(counts, dtype=torch.float64)).tolist() == [
        1.0,
        4.0,
        1.0,
        1 / 3,
        1e-9,
    ]


def test_no_number_of_spikes_widens_what_is_accepted() -> None:
    recent, applied = torch.randn(2, WINDOW, dtype=torch.float64), torch.tensor(WINDOW)
    spike, usual = torch.full((2,), 50.0, dtype=torch.float64), recent.clone()
    for _ in range(3 * WINDOW):
        accepted = ~is_spike(spike, recent, applied)
        remember_(recent, spike, applied, accepted)
        assert not accepted
    assert torch.equal(recent, usual)


def spike() -> dict[str, torch.Tensor]:
    """Wrong targets of an almost finished model are what no update before was like."""
    window = ragged(4)
    return window | {
        "targets": torch.where(window["targets"] >= 0, (window["targets"] + 7) % 61, -100)
    }


def engine(clip: Clip, backend: Any = None) -> Resident:
    made = Resident(
        tiny_llama(num_hidden_layers=1), loss=token_loss, optim=AdamW(lr=3e-3), clip=clip
    )
    if backend:
        captured_to_train(made, ragged(4), backend)
    return made


def skips(trained: Resident, window: dict[str, torch.Tensor]) -> int:
    trained.accumulate(window)
    return int(trained.update().skipped)


@functools.cache
def before_the_spike(backend: str | None) -> tuple[Resident, EngineState]:
    trained = engine(Clip(1.0, skip_spikes=True), backend)
    assert not any(skips(trained, ragged(4)) for _ in range(SPIKE))
    return trained, copied(trained.state())


@pytest.mark.parametrize("backend", [None, pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_a_spike_costs_one_update_and_is_not_remembered(backend: str | None) -> None:
    """Law: the run with the spike is the run that never had it, in bits."""

    trained, state = before_the_spike(backend)
    trained.load_state(state)
    assert [skips(trained, window) for window in (spike(), *[ragged(4)] * 7)] == [1] * 8
    found = copied(trained.state())
    trained.load_state(state)
    trained.step.index += 1
    assert [skips(trained, ragged(4)) for _ in range(7)] == [0] * 7
    expected = trained.state()
    assert all(torch.equal(found.model[name], expected.model[name]) for name in found.model)
    assert found.scalars["recent"] == expected.scalars["recent"]


def test_what_is_remembered_is_part_of_the_state() -> None:
    first, state = before_the_spike(None)
    first.load_state(state)
    without = {name: value for name, value in state.scalars.items() if name != "recent"}
    second, forgetful, all_taken = *(engine(first.step.clip) for _ in range(2)), engine(Clip(1.0))
    second.load_state(state)
    forgetful.load_state(replace(state, scalars={**state.scalars, "recent": [[1e9] * WINDOW] * 2}))
    all_taken.load_state(replace(state, scalars=without))
    assert [skips(of, spike()) for of in (first, second, forgetful, all_taken)] == [1, 1, 0, 0]
    with pytest.raises(InputRefused, match="the saved state lacks 'recent'"):
        second.load_state(replace(state, scalars=without))
    for wrong in (None, "x", [0.0], [[1.0] * WINDOW] * 3, {"a": 1}):
        with pytest.raises(
            InputRefused, match=rf"'recent' does not fit: expected .*float64 .* of \[2, {WINDOW}\]"
        ):
            second.load_state(replace(state, scalars={**state.scalars, "recent": wrong}))


def test_what_the_key_says() -> None:
    def of(value: object, **more: object) -> Clip | None:
        given = {"optim.grad_clip": value} | {f"optim.{key}": each for key, each in more.items()}
        return resolve(load(None, given, {}), describe()).training.clip

    assert of(0.5) == Clip(0.5, skip_spikes=True) and resolve(
        load(None, {}, {}), describe()
    ).training.clip == Clip(1.0, skip_spikes=True)
    assert of(0.5, skip_spikes=False) == Clip(0.5) and of("none") is None
    assert of(0.5, skip_spikes=True) == of(0.5, skip_spikes="auto") == of(0.5)
    for wrong in ("0", "1:", "-1", "all"):
        with pytest.raises(
            UsageError, match="optim.grad_clip = .*: expected a number above 0, or none"
        ):
            of(wrong)
    with pytest.raises(
        UsageError, match="optim.skip_spikes = true needs gradients that are clipped"
    ):
        require_compatible(load(None, {"optim.grad_clip": "none", "optim.skip_spikes": True}, {}))
