"""Run: pytest tests/graph/test_member_factors.py (adapters of members whose products add their gradients)"""

from __future__ import annotations

import pytest
import torch

from adapted import trained
from batches import tiny_llama
from monograph.ensemble import Ensemble
from monograph.graph.lora import Lora, adapt
from monograph.graph.precision import Precision
from monograph.graph.shared_base import copy_with_shared_base
from monograph.optim import AdamW

UPDATES = 3
# The cases in which each matrix of an adapter is multiplied by itself in eager code.
CASES = {
    "of two rates": (Lora(4, dropout=0.1), Lora(4, dropout=0.3)),
    "of two ranks, dora on nf4": (Lora(2, dora=True, base="nf4"), Lora(4, dora=True, base="nf4")),
}


def members(lora: Lora, other: Lora, precision: str = "fp32") -> Ensemble:
    """Return an ensemble of two, each with trained adapters of its own."""
    first = tiny_llama(torch.float32)
    adapt(first, lora)
    both = [first, copy_with_shared_base(first, other, seed=5)]
    for number, member in enumerate(both):
        trained(member, seed=number)
    knobs = [{"lr": 1e-3, "seed": 3}, {"lr": 3e-3, "seed": 4}]
    return Ensemble(
        both, knobs, optim=AdamW, clip=1.0, precision=Precision(precision), micro_batch=2
    )


def gradients(engine: Ensemble, updates: int = UPDATES) -> list[torch.Tensor]:
    """Train on micro-batches, and return the planes' gradients before each update."""
    found = []
    for seed in range(updates):
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(32, (4, 9), generator=generator)
        engine.accumulate({"tokens": tokens, "targets": tokens.roll(-1, -1)})
        found += [plane.grad.clone() for plane in engine.step.planes]
        engine.update()
    return found


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_autograd(name: str) -> None:
    expected = gradients(members(*CASES[name]))
    engine = members(*CASES[name])
    engine.stacked_parameters.fuse_gradients_of_adapters()
    for ours, reference in zip(gradients(engine), expected, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_captured_gradients_are_those_of_autograd() -> None:
    """In bf16, whose rounding of each matrix before the product is the same."""
    tokens = torch.zeros(2, 9, dtype=torch.int64)
    window = {"tokens": tokens, "targets": tokens}
    found = []
    for fused in (False, True):
        engine = members(Lora(4), Lora(2), "bf16")
        if fused:
            engine.stacked_parameters.fuse_gradients_of_adapters()
        assert engine.capture(window, "aot_eager") is None
        found.append(gradients(engine))
    for ours, reference in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(
            ours, reference, rtol=0, atol=0.02 * float(reference.abs().max())
        )
