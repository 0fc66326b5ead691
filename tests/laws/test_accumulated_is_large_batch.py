# Run: pytest tests/laws/test_accumulated_is_large_batch.py
"""Law 2: any split of an update's rows into micro-batches gives the large batch's gradient, token for token."""

from __future__ import annotations

import random
from dataclasses import asdict

import pytest
import torch
from torch import nn

from batches import flat_gradient, large_batch_gradient, ragged, rows_of, tiny_llama
from monograph.graph.capture import capture
from monograph.resident import Resident
from monograph.step import Step, accumulate
from numerics import relative_error

ROWS = 16
BOUND = {torch.float32: 1e-6, torch.float64: 1e-12}


def split(batch, cuts):
    edges = [0, *cuts, len(batch["tokens"])]
    return [rows_of(batch, a, b) for a, b in zip(edges, edges[1:], strict=False)]


def accumulated(step, micro_batches):
    step.discard()
    accumulate(step, micro_batches)
    return flat_gradient(step.model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_equal_splits(dtype, size):
    batch, step = ragged(ROWS), Step(tiny_llama(dtype))
    exact = large_batch_gradient(step.model, batch)
    assert relative_error(accumulated(step, split(batch, range(size, ROWS, size))), exact) <= BOUND[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_random_splits(dtype):
    step, rng, worst = Step(tiny_llama(dtype)), random.Random(0), 0.0
    for case in range(200):
        if case % 20 == 0:
            batch = ragged(rng.randint(2, ROWS), seed=case)
            exact = large_batch_gradient(step.model, batch)
        rows = len(batch["tokens"])
        cuts = sorted(rng.sample(range(1, rows), rng.randint(0, rows - 1)))
        worst = max(worst, relative_error(accumulated(step, split(batch, cuts)), exact))
    assert worst <= BOUND[dtype]


@pytest.mark.parametrize("rows", [16, 13, 5])
@pytest.mark.parametrize("micro_batch", [4, 7])
def test_engine_fills_the_last_micro_batch_without_changing_anything(rows, micro_batch):
    batch = ragged(rows, seed=rows)
    engine = Resident(tiny_llama(torch.float64), micro_batch=micro_batch)
    exact = large_batch_gradient(engine.model, batch)
    engine.accumulate(batch)
    assert relative_error(flat_gradient(engine.model), exact) <= 1e-12
    assert int(engine.step.count) == int((batch["targets"] != -100).sum())


def test_compiled(compiled_step):
    worst = 0.0
    for seed, rows in enumerate((16, 12, 9)):
        batch = ragged(rows, seed=seed)
        exact = large_batch_gradient(compiled_step.model, batch)
        compiled_step.step.discard()
        compiled_step.accumulate(batch)
        worst = max(worst, relative_error(flat_gradient(compiled_step.model), exact))
    assert worst <= 1e-6


def test_a_loss_that_cannot_count_gives_the_same_update():
    def loss(model, batch):
        hidden = model(batch["tokens"])
        logits = hidden @ model.lm_head.weight.T
        total = nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum")
        return total, (batch["targets"] != -100).sum()

    batch = ragged(ROWS)
    counted, uncounted = (Step(tiny_llama(torch.float64), clip=0.5, **kw) for kw in ({}, {"loss": loss}))
    for _ in range(3):
        one, other = counted(split(batch, [3, 9])), uncounted(split(batch, [1, 2, 11]))
        torch.testing.assert_close(asdict(one), asdict(other), rtol=1e-12, atol=0)
    for name, tensor in counted.model.state_dict().items():
        torch.testing.assert_close(tensor, uncounted.model.state_dict()[name], rtol=0, atol=1e-9)


def test_no_target_at_all_changes_nothing():
    step = Step(tiny_llama())
    before = {k: v.clone() for k, v in step.model.state_dict().items()}
    batch = ragged(4)
    batch["targets"].fill_(-100)
    result = step([batch])
    assert int(result.skipped) == 1 and all(torch.equal(v, before[k]) for k, v in step.model.state_dict().items())


@pytest.mark.parametrize("size, at_least", [(8, 0.05), (4, 0.05), (2, 0.1), (1, 0.2)])
def test_mean_of_means_would_fail(size, at_least):
    """The rule that most trainers use is off by tens of per cent on the same rows: the bound above can fail."""
    batch, model = ragged(ROWS), tiny_llama(torch.float64)
    means = [large_batch_gradient(model, part) for part in split(batch, range(size, ROWS, size))]
    assert relative_error(torch.stack(means).mean(0), large_batch_gradient(model, batch)) > at_least


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 5, 16])
def test_on_a_gpu(size):
    batch = {name: tensor.cuda() for name, tensor in ragged(ROWS).items()}
    step = capture(Step(tiny_llama().cuda()))
    exact = large_batch_gradient(step.model, batch)
    assert relative_error(accumulated(step, split(batch, range(size, ROWS, size))), exact) <= 1e-6
