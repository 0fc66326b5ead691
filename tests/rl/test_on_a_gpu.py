"""Run: pytest tests/rl/test_on_a_gpu.py (on a card, or on a pretended one: make gpu-less
ARGS=tests/rl).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from batches import tiny_llama
from laws import test_preference_is_its_equation as pairs
from monograph.decode.cache import KVCache
from monograph.decode.prompt_reader import Continuation, PromptReader
from monograph.evaluation import evaluate
from monograph.graph.lora import Lora
from monograph.graph.precision import Precision
from monograph.optim import AdamW
from monograph.resident import Resident
from monograph.rl.advantages import ratio_of
from monograph.rl.form import AnswerForm
from monograph.rl.loss import Kl, PolicyLoss
from monograph.rl.rewards import FormName
from played import PLAYED, episodes
from rewarded import OPTIONS, apart, prompts, windows

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("advantage", "pattern"),
    [pytest.param("grpo", "", marks=pytest.mark.slow), ("gspo", "[a-z]+[0-9]")],
)
def test_ratios_a_kl_term_and_a_form_are_captured(advantage: str, pattern: str) -> None:
    """Two updates of one draw, and then a new one, with a reference that the model came from."""
    kl = Kl("k2", 0.1)
    options = replace(
        OPTIONS,
        exact=False,
        packed=True,
        length=64,
        prompts=2,
        updates=2,
        kl=kl,
        advantage=advantage,
    )
    asked = prompts("2+2=", "a", "the longest of them", "7")
    ends, cuda = {asked.tokenizer.eos_id}, torch.device("cuda")
    form = AnswerForm(FormName("regex", pattern), asked, ends, cuda) if pattern else None
    loss = PolicyLoss(1.0, ratio_of(advantage, 2), kl, form=form)
    rollouts = windows(options, device="cuda", loss=loss, micro_batch=2)
    engine = rollouts.drawer.engine
    rollouts.drawer.reference = [plane.param.clone() for plane in engine.step.planes]
    assert engine.capture(next(rollouts)) is None
    loss.take_figures()
    next(rollouts)  # the second window of the draw that the capture was made with
    for fresh in (True, False, True):
        engine.accumulate(next(rollouts))
        figures = loss.take_figures()
        assert rollouts.is_fresh == fresh and abs(figures["ratio"] - 1) < (1e-4 if fresh else 0.5)
        assert int(engine.update().skipped) == 0
    assert figures["kl"] > 0


@pytest.mark.parametrize(
    ("name", "precision"),
    [("dpo", "fp32"), pytest.param("kto", "bf16", marks=pytest.mark.slow)],
)
def test_answers_are_compared_in_a_captured_step(name: str, precision: str) -> None:
    rows = pairs.rows_of(pairs.pairs(6, labelled=name == "kto"))
    model, loss = (
        tiny_llama(vocab_size=pairs.VOCABULARY).to("cuda"),
        pairs.loss_of(name, rows).to("cuda"),
    )
    engine = Resident(
        model, loss=loss, optim=AdamW(lr=1e-2), precision=Precision(precision), micro_batch=2
    )
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
    first = math.log(2)
    if name == "kto":  # half of each answer's weight, as policy and reference are the same
        weights = pairs.PARAMETERS[name]
        good = float((rows.labels[rows.labels != 0] > 0).mean())
        first = 0.5 * (
            weights["desirable_weight"] * good + weights["undesirable_weight"] * (1 - good)
        )
    assert losses[0] == pytest.approx(first, rel=1e-5 if precision == "fp32" else 0.05)
    assert losses[2] < losses[1] < losses[0]


@pytest.mark.parametrize(
    ("precision", "captured"), [("fp32", False), ("bf16", False), ("bf16", True)]
)
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
    # The one that has drawn.
    assert [generator.compiled for _, generator in [rollouts.drawer._cached_generator]] == [
        captured
    ]


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_episodes_go_on_in_their_rows_and_are_scored_as_they_were_drawn(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes over what the environment says are captured, and compiled if the run is long."""
    continued, continue_rows = [], PromptReader.continue_rows

    def counted(reader: PromptReader, source: KVCache, rows: Sequence[Continuation]) -> None:
        continued.extend(rows)
        continue_rows(reader, source, rows)

    monkeypatch.setattr(PromptReader, "continue_rows", counted)
    options = replace(PLAYED, exact=False, packed=True, length=64, prompts=2)
    rollouts = episodes(options, device="cuda", micro_batch=2)
    engine = rollouts.drawer.engine
    if compiled:
        rollouts.drawer.updates = lambda: 10**6  # long enough that decoding is compiled, too
        assert engine.capture(next(rollouts)) is None
    for _ in range(2):
        apart(rollouts)
        continued.clear()
        engine.accumulate(next(rollouts))
        largest, number = apart(rollouts)
        assert number > 10 and largest < 1e-4
        assert len(continued) == round((rollouts.numbers["turns"] - 1) * 8) > 0
        assert int(engine.update().skipped) == 0
    [(mode, _)] = [rollouts.drawer._cached_generator]
    assert mode == ("compiled" if compiled else "captured")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_answers_are_drawn_by_kernels_from_the_adapters_of_the_last_update(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a base in 4 bits; bf16 is autocast's, and in fp32 the steps are captured."""
    from monograph.decode import fast_forward

    multiplied, multiply = [], fast_forward.multiply
    monkeypatch.setattr(
        fast_forward, "multiply", lambda *given: multiplied.append(given) or multiply(*given)
    )
    options = replace(OPTIONS, exact=False, packed=True, length=64, prompts=2, group=3)
    shape = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
    }
    rollouts = windows(
        options,
        device="cuda",
        shape=shape,
        lora=Lora(rank=2, base="nf4"),
        precision=Precision(precision),
        micro_batch=2,
    )
    engine = rollouts.drawer.engine
    for _ in range(2):
        engine.accumulate(next(rollouts))
        largest, number = apart(rollouts)
        assert number > 10 and largest < (1e-4 if precision == "fp32" else 0.5)
        assert int(engine.update().skipped) == 0
    assert multiplied
    [(mode, _)] = [rollouts.drawer._cached_generator]
    assert mode == ("captured" if precision == "fp32" else "eager")
