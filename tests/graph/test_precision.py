# Run: pytest tests/graph/test_precision.py
"""fp16 with a loss scale: its gradient, its decisions against a loop, what is skipped, resumed and
refused.
"""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from batches import flat_gradient, large_batch_gradient, ragged, rows_of, tiny_llama
from monograph.config import load
from monograph.device import describe
from monograph.errors import InputRefused, UsageError
from monograph.graph.precision import Precision
from monograph.laws.comparisons import relative_error
from monograph.loss import TokenLoss
from monograph.optim import AdamW
from monograph.resident import Resident
from monograph.session.requirements import require_possible
from monograph.step import Step

FP16 = Precision("fp16", loss_scale=2.0**10, grow_after=3)
# A toy: on a CPU fp16 products are 30 times slower than fp32 ones.
TOY = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def tiny_gradient(model, batch):
    """A loss whose gradient is the batch / 2^14, in fp16."""
    return (model.weight.half() * batch.half()).sum().float() / 2**14, torch.tensor(1)


def one_weight():
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 0.5)
    return model


def test_the_gradient_is_as_close_as_a_fixed_scale_on_dense_logits():
    batch = ragged(4, length=8)
    truth = large_batch_gradient(tiny_llama(torch.float64, **TOY), batch)

    def gradient(loss):
        engine = Resident(tiny_llama(**TOY), loss=loss, precision=FP16, micro_batch=2)
        engine.accumulate(batch)
        return flat_gradient(engine.model) / FP16.loss_scale

    naive = relative_error(gradient(TokenLoss("reference")), truth)
    assert 1e-5 < naive < 1e-2, "it must really have been computed in fp16"
    assert relative_error(gradient(TokenLoss()), truth) <= 2 * naive


class InFp32(nn.Linear):
    """A layer that leaves autocast."""

    def forward(self, rows):
        with torch.autocast("cpu", enabled=False):
            return rows @ self.weight.T


@pytest.mark.slow
def test_a_captured_backward_pass_has_eager_s_bits_where_a_module_leaves_autocast():
    def gradient(backend):
        torch.manual_seed(0)
        loss = lambda model, batch: (model(batch["rows"]).sum(), torch.tensor(8))  # noqa: E731
        engine = Resident(
            InFp32(8, 8, bias=False), loss=loss, precision=Precision("bf16"), micro_batch=4
        )
        rows = {"rows": torch.randn(4, 8)}
        assert backend is None or engine.capture(rows, backend=backend) is None
        engine.accumulate(rows)
        return flat_gradient(engine.model)

    eager = gradient(None)
    assert not torch.equal(eager, eager.bfloat16().float())
    assert torch.equal(gradient("aot_eager"), eager)


def test_a_gradient_below_fp16_s_range_arrives():
    for precision, arrives in (
        (Precision("fp16"), True),
        (Precision("fp16", loss_scale=1.0), False),
    ):
        # Fp16's smallest is 2^-24.
        step = Step(one_weight(), loss=tiny_gradient, precision=precision)
        assert float(step([torch.tensor(2.0**-13)]).grad_norm) == (2.0**-27 if arrives else 0)


@settings(max_examples=30)
@given(st.lists(st.sampled_from(["good", "overflow", "no target"]), max_size=30))
def test_the_scale_s_decisions_are_those_of_a_loop(events):
    scale, good = torch.tensor(4.0), torch.tensor(0)
    expected, run = 4.0, 0
    for event in events:
        finite, accepted = torch.tensor(event != "overflow"), torch.tensor(event == "good")
        FP16.rescale_(scale, good, finite=finite, accepted=accepted)
        if event == "overflow":
            expected, run = max(1.0, expected / 2), 0
        elif event == "good":
            run += 1
            if run == 3:
                expected, run = expected * 2, 0
        assert (float(scale), int(good)) == (expected, run)


@pytest.mark.parametrize(
    ("place", "backend"),
    [
        (0, None),
        (1, None),
        (2, None),
        (1, "eager"),
        pytest.param(1, "aot_eager", marks=pytest.mark.slow),
    ],
)
def test_an_overflow_anywhere_in_a_window_is_one_decision(place, backend):
    """One of three micro-batches overflows: nothing changes but the scale, once, and later updates
    are the same.
    """
    batch = {"x": torch.ones(3, 1)}
    poisoned = {"x": batch["x"].clone().index_fill_(0, torch.tensor(place), 2.0**14)}

    def loss(model, part):
        return (model.weight.half() * part["x"].half()).sum(), torch.tensor(3.0).long()

    clean, skipping = (
        Resident(one_weight(), loss=loss, optim=AdamW(lr=0.1), precision=FP16, micro_batch=1)
        for _ in range(2)
    )
    if backend:
        # Every test captures anew, and torch allows eight graphs of a function.
        torch.compiler.reset()
        assert skipping.capture(batch, backend) is None
    for window in (batch, poisoned, batch):
        skipping.accumulate(window)
        last = skipping.update()
    for _ in range(2):
        clean.accumulate(batch)
        clean.update()
    assert int(last.skipped) == 1 and last.index == 2
    assert skipping.state().scalars == {
        "index": 3, "applied": 2, "tokens": 18, "skipped": 1, "loss_scale": 2.0**9, "good": 1,
    }  # fmt: skip
    assert torch.equal(clean.model.weight, skipping.model.weight)
    for name, moment in clean.state().optimizer.items():
        assert torch.equal(moment, skipping.state().optimizer[name]), name


def test_any_split_is_skipped_alike():
    batch, results = ragged(4, length=8), []
    for size in (1, 2, 4):
        step = Step(tiny_llama(**TOY), precision=dataclasses.replace(FP16, loss_scale=2.0**24))
        window = [rows_of(batch, start, start + size) for start in range(0, 4, size)]
        results.append([(int(step(window).skipped), float(step.loss_scale)) for _ in range(3)])
    assert results[0] == results[1] == results[2] and results[0][0] == (1, 2.0**23)


def test_resumed_is_uninterrupted():
    """In bits, across an overflow and a growth; the window's rows are what differs from update to
    update.
    """
    windows = [ragged(4, seed=seed, length=8) for seed in range(9)]
    precision = dataclasses.replace(FP16, loss_scale=2.0**19)
    whole = Resident(tiny_llama(**TOY), precision=precision, micro_batch=2)
    seen = []
    for number, window in enumerate(windows):
        if number in (1, 5):
            seen.append((number, copy.deepcopy(whole.state())))
        whole.accumulate(window)
        last = whole.update()
    assert 0 < int(last.skipped) < 9 and int(whole.step.good) < int(whole.step.applied), (
        "it must skip and grow"
    )
    for number, state in seen:
        resumed = Resident(tiny_llama(seed=1, **TOY), precision=precision, micro_batch=2)
        resumed.load_state(state)
        for window in windows[number:]:
            resumed.accumulate(window)
            assert resumed.update().index >= number
        mine, its = resumed.state(), whole.state()
        assert mine.scalars == its.scalars
        assert all(torch.equal(mine.model[n], t) for n, t in its.model.items())
        assert all(torch.equal(mine.optimizer[n], t) for n, t in its.optimizer.items())


def test_a_state_without_a_scale_is_refused():
    with pytest.raises(
        InputRefused, match=r"lacks 'good': it was saved with another train.precision"
    ):
        Resident(one_weight(), precision=FP16).load_state(Resident(one_weight()).state())


@pytest.mark.parametrize(
    ("name", "word"), [("fp16", "30 times slower"), ("fp8", "no fp8 arithmetic")]
)
def test_what_the_device_has_no_arithmetic_for_is_refused_by_name(name, word):
    cpu = dataclasses.replace(describe(torch.device("cpu")), has_bf16=True)
    with pytest.raises(
        UsageError, match=rf"command line: train.precision = {name}: .*{word}.*; use bf16"
    ):
        require_possible(load(None, {"train.precision": name}, {}), cpu)
    able = dataclasses.replace(cpu, type="cuda", has_fp8=True)
    require_possible(load(None, {"train.precision": name}, {}), able)
    # Such as a T4; on a CPU, bf16 is computed as well as anywhere.
    old = dataclasses.replace(able, has_bf16=False)
    with pytest.raises(
        UsageError, match=r"train.precision = bf16: .*no bf16 arithmetic.*; use fp16 or fp32"
    ):
        require_possible(load(None, {"train.precision": "bf16"}, {}), old)
    for fine in ("auto", "fp32", "bf16"):
        require_possible(load(None, {"train.precision": fine}, {}), cpu)
    with pytest.raises(UsageError, match="'int4' is not one of fp32, bf16, fp16, fp8"):
        Precision("int4")
