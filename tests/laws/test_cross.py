# Run: pytest tests/laws/test_cross.py    (all combinations: -m slow)
"""Laws 1, 2, 3, 9 and 10 where precision, recomputation, compile scope and accumulation meet.

The fast set has every pair of choices, the slow one every combination.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from batches import copied, flat_gradient, packed, tiny_llama
from monograph.graph.precision import Precision
from monograph.graph.remat import Remat
from monograph.optim import AdamW
from monograph.resident import Resident
from numerics import relative_error

PRECISIONS = ("fp32", "bf16", "fp16", "fp8")
POLICIES = (Remat.Off(), Remat.Pointwise(), Remat.Budget(0.3), Remat.Full(), Remat.Offload())
SCOPES = ("none", "whole", "blocks")
ROWS = 6
SPLITS = (ROWS, 4)  # rows of a micro-batch: all at once, or two, the second one filled up


def possible(precision, policy, scope, split):
    """What is sent to the host crosses between graphs; the refusal is a test of its own."""
    return (policy, scope) != (Remat.Offload(), "whole")


CROSS = [each for each in itertools.product(PRECISIONS, POLICIES, SCOPES, SPLITS) if possible(*each)]


def pairwise():
    """A part of the cross that has every pair of choices: each time the combination with the most new ones."""
    seen, chosen = set(), []

    def pairs(each):
        return set(itertools.combinations(enumerate(each), 2))

    while new := max(CROSS, key=lambda each: len(pairs(each) - seen)):
        if not pairs(new) - seen:
            return chosen
        seen |= pairs(new)
        chosen.append(new)


def engine(precision, policy, split, dtype=torch.float32):
    return Resident(
        tiny_llama(dtype), optim=AdamW(lr=1e-2), clip=0.5, precision=Precision(precision), remat=policy,
        micro_batch=split,
    )  # fmt: skip


def gradient(engine, batch):
    """Of a window, unscaled; what was accumulated is forgotten again."""
    engine.accumulate(batch)
    found = flat_gradient(engine.model).clone() / engine.step.loss_scale
    engine.step.discard()
    return found


def separate_gradient(batch):
    """The slow, obviously correct path: float64, every document a row of its own, one dense loss, one backward pass."""
    model, losses, count = tiny_llama(torch.float64), [], 0
    for row in range(ROWS):
        for part in (slice(0, 10), slice(10, None)):
            targets = batch["targets"][row, part]
            logits = model(batch["tokens"][row : row + 1, part])[0] @ model.lm_head.weight.T
            losses.append(torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum"))
            count += int((targets != -100).sum())
    loss = torch.stack(losses).nansum() / count
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def check(precision, policy, scope, split):
    batch = packed(ROWS)
    exact = separate_gradient(batch)
    naive = relative_error(gradient(engine(precision, Remat.Off(), ROWS), batch), exact)
    mine = engine(precision, policy, split)
    if scope != "none":
        assert mine.capture(batch, "aot_eager", scope) is None
    # Laws 1, 2 and 9. fp8 rounds by the largest number of a micro-batch: another split, other roundings as large.
    assert relative_error(gradient(mine, batch), exact) <= 2 * naive + 1e-6
    if scope == "none":  # law 3: bits
        assert torch.equal(gradient(mine, batch), gradient(engine(precision, Remat.Off(), split), batch))
    # Law 10: taken up after two updates, bits of the third.
    for seed in range(2):
        mine.accumulate(packed(ROWS, seed))
        mine.update()
    kept = copied(mine.state())
    resumed = engine(precision, policy, split)
    resumed.load_state(kept)
    if scope != "none":
        assert resumed.capture(batch, "aot_eager", scope) is None
    for each in (mine, resumed):
        each.accumulate(packed(ROWS, 2))
        each.update()
    for one, two in zip(mine.state().model.values(), resumed.state().model.values(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize(("precision", "policy", "scope", "split"), pairwise())
def test_every_pair(precision, policy, scope, split):
    check(precision, policy, scope, split)


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "policy", "scope", "split"), CROSS)
def test_every_combination(precision, policy, scope, split):
    check(precision, policy, scope, split)


def test_the_pairs_are_all_there():
    wanted = {pair for each in CROSS for pair in itertools.combinations(enumerate(each), 2)}
    assert {pair for each in pairwise() for pair in itertools.combinations(enumerate(each), 2)} == wanted
    assert len(pairwise()) <= 30
