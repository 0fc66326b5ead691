"""Run: pytest tests/test_step.py

What a step decides, by its equations, next to the runs in which other tests see it decide.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from batches import ragged, tiny_llama
from monograph.errors import UsageError
from monograph.graph import recompute
from monograph.graph.precision import Precision
from monograph.optim import AdamW
from monograph.resident import Resident
from monograph.step import Clip, Step, accumulate, guard


class Counting:
    """A loss that counts its targets, which are all rows."""

    def __call__(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        return model(batch).sum(), len(batch)

    def count(self, batch: Tensor) -> int:
        return len(batch)


def not_counting(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    """The same loss, whose targets only a forward pass counts."""
    return model(batch).sum(), len(batch)


def step_of(loss: Any = not_counting, **others: Any) -> Step:
    return Step(nn.Linear(3, 2), loss=loss, **others)


@pytest.mark.parametrize("clip", [None, 0.5, 100.0])
@pytest.mark.parametrize(
    "loss", [Counting(), not_counting], ids=["counted before", "counted by the forward pass"]
)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_norm_and_the_factor_of_an_update(
    precision: str, loss: Any, clip: float | None
) -> None:
    """norm = |g| f, factor = f min(1, clip / norm), with f = 1 / (loss scale), and 1 / count if it came afterwards."""
    step = step_of(loss, clip=clip, precision=Precision(precision))
    scale = float(step.loss_scale)
    assert scale == (1.0 if precision == "fp32" else 2.0**16)
    step.count.fill_(4.0)
    parts = [
        torch.tensor(9.0 * scale**2, dtype=torch.float64),
        torch.tensor(16.0 * scale**2, dtype=torch.float64),
    ]
    norm, factor, accepted = step.decide(parts)
    own = (1.0 if isinstance(loss, Counting) else 0.25) / scale
    expected = 5.0 * scale * own
    assert float(norm) == expected and bool(accepted) and int(step.applied) == 1
    # Fp64, and 1e-6 added.
    assert float(factor) == pytest.approx(own * min(1.0, (clip or 1e9) / expected), rel=1e-5)


@pytest.mark.parametrize(
    ("counter", "largest"),
    [("lr", "largest_lr"), ("count", None), ("loss_sum", None), ("norm", "largest_norm")],
)
def test_an_update_is_accepted_up_to_the_largest_numbers_and_not_beyond(
    counter: str, largest: str | None
) -> None:
    step = step_of()
    step.count.fill_(1.0)
    bound = torch.finfo(torch.float64).max if largest is None else float(getattr(step, largest))
    for value, accepted in (
        (bound, True),
        (math.nextafter(bound, math.inf), False),
        (torch.nan, False),
    ):
        norm = torch.ones((), dtype=torch.float64)
        (norm if counter == "norm" else getattr(step, counter)).fill_(value)
        assert bool(step.accepts(norm)) is accepted, value
    step = step_of()
    assert not bool(step.accepts(torch.ones(())))  # no target


def test_a_spike_is_one_of_the_gradient_and_of_the_mean_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[float] = []

    def judged(accepted: Tensor, grad_norm: Tensor, loss: Tensor, *_: Tensor) -> Tensor:
        seen.extend(map(float, (grad_norm, loss)))
        return accepted

    monkeypatch.setattr("monograph.step.step.without_spikes_", judged)
    step = step_of(clip=Clip(2.0, skip_spikes=True))
    step.count.fill_(4.0)
    step.loss_sum.fill_(10.0)
    step.decide([torch.tensor(64.0, dtype=torch.float64)])
    assert seen == [2.0, 2.5]


def test_what_is_kept_is_chosen_once_and_once_more_for_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen: list[bool] = []
    monkeypatch.setattr(
        recompute, "choose_kept_results", lambda *_, captured, **others: chosen.append(captured)
    )
    step = step_of()
    batch = torch.ones(2, 3)
    for scope in ("none", "blocks", "none", "whole"):
        step.scope = scope  # type: ignore[assignment]
        accumulate(step, [batch, batch])
    assert chosen == [False, True, False, True]


def test_weights_that_all_are_bf16_need_products_that_read_them() -> None:
    with pytest.raises(UsageError, match="which precision fp16 cannot use: take bf16 or fp8"):
        step_of(optim=AdamW(state="bf16", master_weights=False), precision=Precision("fp16"))
    assert (
        step_of(optim=AdamW(state="bf16", master_weights=False), precision=Precision("bf16"))
        .planes[0]
        .param.dtype
        == torch.bfloat16
    )


@pytest.mark.parametrize("moved", [-1, 1])
def test_parameters_that_lie_elsewhere_are_refused(
    moved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "trained_memory", lambda module: (0,))
    step = step_of()
    monkeypatch.setattr(guard, "trained_memory", lambda module: (moved,))
    with pytest.raises(UsageError, match="after the step was made: change the module first"):
        step([torch.ones(2, 3)])


@pytest.mark.parametrize(("rows", "micro_batch"), [(5, 2), (5, 3), (5, 4)])
def test_the_last_micro_batch_is_filled_up(rows: int, micro_batch: int) -> None:
    """So that a captured step has one graph."""
    engine = Resident(tiny_llama(num_hidden_layers=1), micro_batch=micro_batch)
    sizes = [len(batch["tokens"]) for batch in engine._micro_batches(ragged(rows))]
    assert sizes == [micro_batch] * -(-rows // micro_batch)


@pytest.mark.parametrize(
    ("window", "line"),
    [
        ([1], "a window is a list: expected a dict of tensors"),
        ({"a": 3.5}, "the window's 'a' is 3.5: expected a tensor that has rows as its dimension 0"),
        (
            {"a": np.ones((2, 1))},
            r"the window's 'a' is a ndarray of shape \[2, 1\]: expected a tensor",
        ),
        ({"a": torch.tensor(1)}, r"the window's 'a' is a Tensor of shape \[\]: expected a tensor"),
    ],
)
def test_what_is_no_window_is_named(window: Any, line: str) -> None:
    engine = Resident(nn.Linear(3, 2), loss=not_counting)
    with pytest.raises(UsageError, match=line):
        engine.accumulate(window)
