# Run: pytest tests/test_optim.py
"""Planes and AdamW, against torch's optimizer and an independent loop in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from batches import tiny_llama
from monograph.errors import UsageError
from monograph.optim import AdamW, planes
from monograph.step import Step


def loss(model, batch):
    return model(batch).square().sum(), torch.tensor(batch.shape[0])


def network(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)).to(dtype)


@pytest.mark.parametrize("clip", [None, 0.1])
def test_ten_updates_equal_torch_s_adamw(clip):
    ours, theirs = network(), network()
    step = Step(ours, loss=loss, optim=AdamW(lr=0.03, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2), clip=clip)
    groups = [
        {"params": [p for p in theirs.parameters() if p.ndim >= 2], "weight_decay": 0.2},
        {"params": [p for p in theirs.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.03, betas=(0.8, 0.9), eps=1e-6)
    for seed in range(10):
        batch = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        result = step([batch[:1], batch[1:]])
        optimizer.zero_grad()
        (loss(theirs, batch)[0] / 4).backward()
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), clip if clip else math.inf)
        optimizer.step()
        assert float(result.grad_norm) == pytest.approx(float(norm), rel=1e-12)
    for mine, its in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-11, atol=1e-13)


def test_one_scalar_by_hand():
    """The equation itself, number by number, independent of torch's optimizer."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.constant_(model.weight, 2.0)
    step = Step(
        model, loss=lambda m, b: ((m.weight * b).sum(), torch.tensor(1)), optim=AdamW(0.1, (0.5, 0.75), 1e-3, 0.25)
    )
    p, m, v = 2.0, 0.0, 0.0
    for t, g in enumerate((3.0, -1.0, 0.5), start=1):
        step([torch.tensor(g, dtype=torch.float64)])
        m, v = 0.5 * m + 0.5 * g, 0.75 * v + 0.25 * g * g
        p = p * (1 - 0.1 * 0.25) - 0.1 * (m / (1 - 0.5**t)) / (math.sqrt(v / (1 - 0.75**t)) + 1e-3)
        assert model.weight.item() == pytest.approx(p, rel=1e-13)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
def test_a_non_finite_gradient_skips_exactly_that_update(poison):
    clean, poisoned = (Step(network(torch.float32), loss=loss, clip=1.0) for _ in range(2))
    batches = [torch.randn(4, 5, generator=torch.Generator().manual_seed(s)) for s in range(6)]
    for batch in batches:
        clean([batch])
    for i, batch in enumerate(batches):
        if i == 3:
            result = poisoned([batches[0], torch.full((2, 5), poison)])
            assert int(result.skipped) == 1
        result = poisoned([batch])
    assert int(result.skipped) == 1 and result.index == 6
    for mine, its in zip(clean.planes, poisoned.planes, strict=True):
        assert torch.equal(mine.param, its.param)
        assert all(torch.equal(mine.state[k], its.state[k]) for k in mine.state)


def test_planes_keep_names_values_and_ties():
    model = tiny_llama(tie_word_embeddings=True)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    groups = planes(model)
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert sum(p.param.numel() for p in groups) == sum(p.numel() for p in model.parameters())
    assert [p.decay for p in groups] == [True, False]
    assert all(slot.parameter.ndim >= 2 for slot in groups[0].slots) and all(
        slot.parameter.ndim < 2 for slot in groups[1].slots
    )
    groups[0].param.zero_()
    assert not model.model.embed_tokens.weight.any()


def test_gradients_that_somebody_dropped_are_linked_again():
    step = Step(network(), loss=loss)
    step.model.zero_grad(set_to_none=True)
    assert float(step([torch.ones(2, 5, dtype=torch.float64)]).grad_norm) > 0


def test_frozen_parameters_stay():
    model = network()
    model[0].weight.requires_grad_(False)
    before = model[0].weight.clone()
    Step(model, loss=loss)([torch.ones(2, 5, dtype=torch.float64)])
    assert torch.equal(model[0].weight, before)


def test_nothing_to_train_and_mixed_dtypes_are_refused():
    with pytest.raises(UsageError, match="no trainable parameter"):
        planes(network().requires_grad_(False))
    mixed = network()
    mixed[0].float()
    with pytest.raises(UsageError, match="one dtype and device"):
        planes(mixed)
