# Run: pytest tests/session/test_attention_kernel.py
"""A run's attention kernel: measured on its shapes on a GPU alone, said once, kept by a resume."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from batches import packed, ragged, tiny_llama
from monograph.device import card_device
from monograph.distributed.world import World
from monograph.session import warmup
from monograph.session.warmup import capture_engine, choose_kernel, kept_or_fastest

TIMES = {"torch": 2.0, "cudnn": 1.0, "flash": 2.0}


def session(model, device="cuda", kernel=None, micro_batch=2):
    engine = SimpleNamespace(
        step=SimpleNamespace(device=torch.device(device)), model=model, micro_batch=micro_batch
    )
    plan = SimpleNamespace(training=SimpleNamespace(precision="fp8"))
    return SimpleNamespace(engine=engine, plan=plan, kernel=kernel, world=World())


@pytest.fixture
def measured(monkeypatch):
    """What was asked of the device, which is not there."""
    asked = []

    def time_kernels(*shape):
        asked.append(shape)
        return dict(TIMES)

    monkeypatch.setattr(warmup, "time_kernels", time_kernels)
    return asked


def choose(run, window):
    said = []
    choose_kernel(run, window, SimpleNamespace(line=lambda *words: said.append(words)))
    return said


def kernels(model):
    return {block.self_attn.kernel for block in model.model.layers}


def test_the_fastest_on_the_runs_shapes_is_used_and_said_in_one_line(measured):
    run = session(tiny_llama())
    said = choose(run, ragged(6))
    assert measured == [(2, (4, 2), 24, 8, torch.bfloat16, torch.device("cuda"))]
    assert (
        run.kernel == "cudnn"
        and kernels(run.engine.model) == {"cudnn"}
        and run.engine.model.attention == "auto"
    )
    assert said == [("attention", "cudnn; times as fast as torch's choice: cudnn 2.00, flash 1.00")]


@pytest.mark.parametrize(
    ("model", "device", "window"),
    [
        (tiny_llama(), "cpu", ragged(2)),
        (tiny_llama(), "cuda", packed(2)),
        (tiny_llama(model_type="mistral", sliding_window=8), "cuda", ragged(2)),
        (nn.Linear(2, 2), "cuda", ragged(2)),
    ],
)
def test_nothing_is_measured_where_there_is_no_choice(measured, model, device, window):
    run = session(model, device)
    assert not choose(run, window) and not measured and run.kernel is None


def test_a_window_that_no_row_outgrows_is_none(measured):
    choose(run := session(tiny_llama(model_type="mistral", sliding_window=24)), ragged(2))
    assert run.kernel == "cudnn"


def test_a_resumed_run_keeps_its_kernel_where_it_can_be_run(measured):
    run = session(tiny_llama(), kernel="flash")
    choose(run, ragged(6))
    assert run.kernel == "flash" and kernels(run.engine.model) == {"flash"}
    assert (
        kept_or_fastest(TIMES, "torch") == "torch"
        and kept_or_fastest(TIMES, "efficient") == "cudnn"
    )


def test_without_memory_to_measure_in_nothing_changes_and_nothing_is_said(monkeypatch):
    monkeypatch.setattr(warmup, "time_kernels", lambda *shape: {})
    run = session(tiny_llama())
    assert not choose(run, ragged(2)) and kernels(run.engine.model) == {"torch"}


TOO_LARGE = "out of resource: triton_tem_fused_flex_attention_backward_7 Required: 114688 Hardware limit: 101376"


@pytest.mark.parametrize(
    ("card", "reasons", "left", "attention"),
    [
        ("H100", [None], None, "auto"),
        ("H100", ["no"], "no", "auto"),
        ("H100", [TOO_LARGE, None], None, "sdpa"),
        ("H100", [TOO_LARGE, "no"], "no", "sdpa"),
        ("T4", [None], None, "sdpa"),
    ],
)
def test_where_flex_attention_does_not_fit_the_gpu_a_graph_has_dense_masks(
    card, reasons, left, attention, monkeypatch
):
    """Nor is it taken where it has no tensor cores."""
    monkeypatch.setattr(warmup, "describe", lambda device: card_device(card))
    run, coming = session(tiny_llama(), kernel="cudnn"), iter(reasons)
    run.engine.capture = lambda window, scope: next(coming)
    assert (
        capture_engine(run.engine, packed(2), "whole", "cudnn") == left
        and next(coming, "all asked") == "all asked"
    )
    assert run.engine.model.attention == attention
    assert attention == "auto" or kernels(run.engine.model) == {"cudnn"}
