# Run: pytest tests/laws/test_members_are_one_program.py
"""Law 5 beyond fp32: members in fewer bits and with recomputation are what they are alone, in no
more operators.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from batches import ragged, tiny_llama
from daily import nightly
from monograph.ensemble import Ensemble
from monograph.graph.capture import capture
from monograph.graph.precision import Precision
from monograph.graph.remat import Remat
from monograph.laws.comparisons import error_within
from monograph.loop import train
from monograph.optim import AdamW
from monograph.profiling.memory import LiveBytes
from monograph.resident import Resident
from zoo import zoo

ZOO, N = zoo(), 3


def test_loss_scale_and_skips_are_each_members_own():
    models = [tiny_llama(seed=seed) for seed in range(N)]
    with torch.no_grad():
        models[1].lm_head.weight.mul_(1e6)
    engine = Ensemble(models, precision=Precision("fp16"))
    list(train(engine, [ragged(2, 0)] * 2))
    scales = engine.step.loss_scale.tolist()
    assert scales[1] < scales[0] == scales[2] == 2.0**16
    assert engine.step.skipped.tolist() == [0, 2, 0]


class Operators(TorchDispatchMode):
    """Counts the operators that reach a device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "name",
    nightly(
        ["mlp", "conv", "our llama", "llama, padded", "lstm", "t5", "vit"],
        ["conv", "our llama", "lstm"],
    ),
)
def test_more_members_are_no_more_operators(name):
    kind, counts = ZOO[name], []
    for size in (2, 7):
        engine = Ensemble(
            [kind.build(seed).train() for seed in range(size)], loss=kind.loss, clip=1.0
        )
        list(train(engine, [kind.batch(0)]))
        with Operators() as operators:
            list(train(engine, [kind.batch(1)]))
        counts.append(operators.count)
    assert counts[0] == counts[1] > 0


@pytest.mark.slow  # by day test_recomputed_is_stored.py, whose budgets are the same without members
def test_what_is_recomputed_is_what_was_stored():
    """Law 3 for members: bits of the losses, norms and weights, for less memory."""
    windows, found, peaks = [ragged(32, step) for step in range(2)], [], []
    for share in (1.0, 0.5):
        models = [tiny_llama(torch.float64, seed, num_hidden_layers=1) for seed in range(N)]
        engine = Ensemble(models, clip=1.0, remat=Remat.Budget(share), micro_batch=16)
        # By the engine's own method evaluation would be captured, too.
        capture(engine.step, "aot_eager")
        list(train(engine, windows[:1]))
        with LiveBytes() as live:
            seen = [(update.loss, update.grad_norm) for update in train(engine, windows)]
        peaks.append(live.peak_bytes)
        found.append([*(part for each in seen for part in each), *engine.model.parameters()])
    assert all(torch.equal(stored, recomputed) for stored, recomputed in zip(*found, strict=True))
    assert peaks[1] < 0.75 * peaks[0]


def test_bf16_is_as_exact_as_alone():
    """Losses and norms of all members within twice the error that the same models alone have in
    bf16, against fp64.
    """
    windows = [ragged(8, seed) for seed in range(4)]

    def trained(precision, dtype, make):
        engine = make([tiny_llama(dtype, seed) for seed in range(N)], precision)
        return torch.stack(
            [torch.stack([update.loss, update.grad_norm]) for update in train(engine, windows)]
        )

    def alone(models, precision):
        return [Resident(model, optim=AdamW(lr=1e-2), precision=precision) for model in models]

    members = trained(
        Precision("bf16"),
        torch.float32,
        lambda m, p: Ensemble(m, optim=AdamW(lr=1e-2), precision=p),
    )
    naive, exact = (
        torch.stack(
            [trained(Precision(name), dtype, lambda m, p, i=i: alone(m, p)[i]) for i in range(N)],
            -1,
        )
        for name, dtype in (("bf16", torch.float32), ("fp32", torch.float64))
    )
    assert error_within(members, naive, exact)
