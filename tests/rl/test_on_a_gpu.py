"""Run: pytest tests/rl/test_on_a_gpu.py (on a card, or on a pretended one: make gpu-less ARGS=tests/rl)."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from batches import tiny_llama
from laws import test_preference_is_its_equation as pairs
from monograph.evaluation import evaluate
from monograph.graph.precision import Precision
from monograph.optim import AdamW
from monograph.resident import Resident
from monograph.rl.loss import Kl, PolicyLoss
from monograph.rl.objectives import Objective, ratio_of
from rewarded import OPTIONS, apart, windows

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("objective", ["grpo", "gspo"])
def test_ratios_and_a_kl_term_are_captured(objective: Objective) -> None:
    """Two updates of one draw, and then a new one, with a reference that the model came from."""
    kl = Kl("k2", 0.1)
    options = replace(OPTIONS, exact=False, packed=True, length=64, prompts=2, updates=2, kl=kl, objective=objective)
    loss = PolicyLoss(1.0, ratio_of(objective, 2), kl)
    rollouts = windows(options, device="cuda", loss=loss, micro_batch=2)
    engine = rollouts.drawer.engine
    rollouts.drawer.reference = [plane.param.clone() for plane in engine.step.planes]
    assert engine.capture(next(rollouts)) is None
    loss.taken()
    next(rollouts)  # the second window of the draw that the capture was made with
    for fresh in (True, False, True):
        engine.accumulate(next(rollouts))
        figures = loss.taken()
        assert rollouts.is_fresh == fresh and abs(figures["ratio"] - 1) < (1e-4 if fresh else 0.5)
        assert int(engine.update().skipped) == 0
    assert figures["kl"] > 0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_pairs_are_compared_in_a_captured_step(precision: str) -> None:
    rows, model = pairs.rows_of(pairs.pairs(6)), tiny_llama(vocab_size=pairs.VOCABULARY).to("cuda")
    loss = pairs.loss_of("dpo:0.3", rows).to("cuda")
    engine = Resident(model, loss=loss, optim=AdamW(lr=1e-2), precision=Precision(precision), micro_batch=2)
    window = pairs.window(rows)
    assert engine.capture(window) is None
    loss.recording.fill_(True)
    evaluate(engine, rows, batch_rows=len(rows))
    loss.recording.fill_(False)
    assert bool((loss.reference[1:] < 0).all())
    losses = []
    for _ in range(3):
        engine.accumulate(window)
        losses.append(float(engine.update().loss))
    assert losses[0] == pytest.approx(math.log(2), rel=1e-5 if precision == "fp32" else 0.05)
    assert losses[2] < losses[1] < losses[0]


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
