# Run: pytest tests/graph/test_capture.py
"""Capturing one's own step: what goes wrong is said in one line, whether captured or not."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import monograph as mono
from batches import ragged, tiny_llama
from monograph import compat
from monograph.errors import UsageError
from monograph.graph.capture import CaptureFailed, capture, compiled
from monograph.resident import Resident
from monograph.step import Step

ROWS = torch.ones(2, 3)


def step_of(loss):
    return Step(nn.Linear(3, 1), loss=loss)


@pytest.mark.parametrize(
    "prepare", [lambda step: step, lambda step: capture(step, "eager")], ids=["eager", "captured"]
)
def test_a_loss_without_a_count_is_told_what_to_return(prepare):
    step = prepare(step_of(lambda model, batch: model(batch).mean()))
    with pytest.raises(UsageError, match=r"must return \(sum of the losses, number of targets\)"):
        step([ROWS])


def test_the_count_may_be_a_plain_number():
    assert int(step_of(lambda model, batch: (model(batch).sum(), 2))([ROWS]).count) == 2


@pytest.mark.parametrize("window", [{"x": ROWS}, ROWS], ids=["dict", "tensor"])
def test_a_bare_batch_is_no_window(window):
    step = step_of(lambda model, batch: (model(batch).sum(), torch.tensor(2)))
    with pytest.raises(UsageError, match=r"not a (dict|Tensor): pass \[batch\]"):
        step(window)


def test_what_cannot_be_traced_fails_in_one_line_that_names_the_place():
    def loss(model, batch):
        total = model(batch).sum()
        return (total if total.item() > 0 else -total), torch.tensor(2)

    with pytest.raises(CaptureFailed, match="test_capture.py") as caught:
        capture(step_of(loss), "eager")([ROWS])
    assert "\n" not in str(caught.value) and caught.value.__cause__ is None


@torch._dynamo.config.patch(recompile_limit=2)
def test_what_is_compiled_anew_at_each_call_ends_in_one_line():
    class Cooling(nn.Linear):
        factor = 1.0

        def forward(self, x):
            self.factor *= 0.9
            return super().forward(x) * self.factor

    step = capture(Step(Cooling(3, 1), loss=lambda model, batch: (model(batch).sum(), 2)), "eager")
    with pytest.raises(
        CaptureFailed,
        match="it was compiled too often: an attribute of the module changes between calls",
    ):
        for _ in range(8):
            step([ROWS])


def test_a_capture_that_fails_leaves_the_hooks_of_saved_tensors_on():
    class Filling(nn.Linear):
        def __init__(self):
            super().__init__(3, 3)
            self.register_buffer("square", torch.rand(3, 3))

        def forward(self, x):
            self.square.fill_diagonal_(0.2)
            return super().forward(x) * self.square[1]

    engine = mono.Ensemble(
        [Filling(), Filling()], loss=lambda model, batch: (model(batch["x"]).sum(), 2)
    )
    assert "mutation" in engine.capture({"x": ROWS}, "aot_eager")
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        torch.ones(2, requires_grad=True).square().sum().backward()


def test_an_error_of_the_module_itself_is_in_the_line():
    with pytest.raises((RuntimeError, CaptureFailed), match="reduction dim"):
        capture(step_of(lambda model, batch: (model(batch).sum(), torch.tensor(2))), "eager")(
            [torch.ones(2, 5)]
        )


def scaled_gradient(factor):
    """A function whose forward is the same for every factor, and whose backward is not."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.sin()

        @staticmethod
        def backward(ctx, grad):
            return grad * factor

    return lambda x: Scaled.apply(x).sum()


@pytest.mark.slow
def test_a_custom_function_is_cached_between_runs_and_never_mistaken_for_another(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    hits, gradients = [], []
    for factor in (2.0, 3.0, 2.0):
        torch.compiler.reset()  # what a new process starts with: only the files are left
        before = counters["aot_autograd"]["autograd_cache_hit"]
        x = torch.zeros(3, requires_grad=True)
        compiled(scaled_gradient(factor))(x).backward()
        hits.append(counters["aot_autograd"]["autograd_cache_hit"] - before)
        gradients.append(x.grad.tolist())
    assert gradients == [[2.0] * 3, [3.0] * 3, [2.0] * 3]
    assert hits == [0, 0, 1]


@pytest.mark.slow
@torch._dynamo.config.patch(recompile_limit=2)
def test_a_process_may_capture_more_steps_than_dynamo_keeps_variants_of_one_function(monkeypatch):
    monkeypatch.setattr(compat, "allow_variants", lambda: None)
    for width in range(2, 6):
        model = nn.Sequential(nn.Sequential(nn.Linear(3, width), nn.Tanh()), nn.Linear(width, 1))
        step, plain = (
            Step(each, loss=lambda m, batch: (m(batch).sum(), 2))
            for each in (model, copy.deepcopy(model))
        )
        assert capture(step, "eager", "blocks")([ROWS]).loss == plain([ROWS]).loss


def test_a_backward_pass_that_does_not_compile_leaves_the_step_eager(monkeypatch):
    """torch compiles it when it first runs, outside of the captured functions; a GPU may be too
    small for a kernel.
    """

    class NoTritonConfigsError(RuntimeError):
        pass

    def backward(loss):
        raise NoTritonConfigsError("out of resource: triton_7 Required: 81920")

    engine = Resident(tiny_llama(), micro_batch=2)
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "backward", backward)
        assert engine.capture(ragged(2), "eager") == "out of resource: triton_7 Required: 81920"
    assert engine.step.scope == "none"
    engine.accumulate(ragged(2))
    assert engine.update().grad_norm.isfinite()
