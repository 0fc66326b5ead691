"""Run: pytest tests/rl/test_on_a_gpu.py (on a card, or on a pretended one: make gpu-less ARGS=tests/rl)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from monograph.graph.precision import Precision
from rewarded import OPTIONS, apart, windows

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("precision", "captured"), [("fp32", False), ("bf16", False), ("bf16", True)])
def test_answers_are_drawn_from_what_was_learned(precision: str, captured: bool) -> None:
    """Two updates; each draw reads the weights of the update before, as its log-probabilities show."""
    options = replace(OPTIONS, exact=False, packed=True, length=64, prompts=2)
    rollouts = windows(options, device="cuda", precision=Precision(precision), micro_batch=2)
    engine = rollouts.drawer.engine
    if captured:
        rollouts.drawer.updates = lambda: 10**6  # long enough that decoding is captured, too
        assert engine.capture(next(rollouts)) is None
    for _ in range(2):
        apart(rollouts)
        engine.accumulate(next(rollouts))
        largest, number = apart(rollouts)
        assert number > 10 and largest < (1e-4 if precision == "fp32" else 0.5)
        assert int(engine.update().skipped) == 0
    assert [generator.compiled for _, generator in [rollouts.drawer._made]] == [captured]  # the one that has drawn
