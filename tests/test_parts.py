"""Run: pytest tests/test_parts.py (where the time of an update went)"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from batches import ragged, tiny_llama
from monograph.resident import Resident
from monograph.run.folder import Run
from monograph.run.metrics_log import MetricsLog, metrics_rows
from monograph.step.parts import PartTimer, seconds
from monograph.stream.engine import Streamed


class Slow(torch.autograd.Function):
    """Takes 20 ms forward and 40 backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(0.02)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        time.sleep(0.04)
        return grads[0]


def test_every_moment_of_an_update_is_in_one_part() -> None:
    """Of three micro-batches, in two updates."""
    engine = Resident(tiny_llama(), micro_batch=2)
    engine.model.model.norm.register_forward_hook(lambda module, args, out: Slow.apply(out))
    for _ in range(2):
        began = time.perf_counter()
        engine.accumulate(ragged(6))
        update = engine.update()
        whole = time.perf_counter() - began
        parts = seconds(update.marks)
        assert parts.keys() == {"forward_s", "backward_s", "optimizer_s"}
        assert (
            parts["forward_s"] >= 0.06 and parts["backward_s"] >= 0.12 and parts["optimizer_s"] > 0
        )
        assert sum(parts.values()) <= whole


def test_a_window_that_failed_is_in_no_part() -> None:
    engine = Resident(
        nn.Linear(2, 1), loss=lambda model, batch: (model(batch["x"]).sum(), batch["n"].sum())
    )
    window = {"x": torch.ones(1, 2), "n": torch.ones(1)}
    with pytest.raises(RuntimeError):
        engine.accumulate({"x": torch.ones(1, 3), "n": torch.ones(1)})
    time.sleep(0.1)
    engine.accumulate(window)
    assert sum(seconds(engine.update().marks).values()) < 0.1


class Event:
    """An event of a GPU that records at once."""

    clock = 0.0

    def __init__(self, enable_timing: bool):
        assert enable_timing

    def record(self) -> None:
        self.at = Event.clock

    def elapsed_time(self, later: Event) -> float:
        return 1000 * (later.at - self.at)


def test_on_a_gpu_a_launch_of_both_passes_is_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    capturing = [False]
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    parts = PartTimer(torch.device("cuda"))

    def update(at: float, *marks: tuple[str, float]) -> dict[str, float]:
        Event.clock = at
        parts.begin("forward")
        for name, Event.clock in marks:
            parts.begin(name)
        Event.clock += 1
        return seconds(parts.end())

    found = update(
        0, ("backward", 2), ("forward", 5), ("backward", 7), ("forward", 10), ("optimizer", 10.5)
    )
    assert found == {"forward_s": 4.5, "backward_s": 6, "optimizer_s": 1}
    capturing[0] = True
    parts.begin("backward")
    parts.begin("forward")
    capturing[0] = False
    assert update(20, ("optimizer", 23)) == {"passes_s": 3, "optimizer_s": 1}


def test_the_row_of_an_update_has_its_own_and_a_member_s_has_none(tmp_path: Path) -> None:
    engine = Resident(tiny_llama())
    engine.accumulate(ragged(2))
    update = engine.update()
    log = MetricsLog(Run.create(tmp_path / "run"), every=1)
    log.add(update, {})
    assert {name: log.last[name] for name in ("forward_s", "backward_s", "optimizer_s")} == seconds(
        update.marks
    )
    assert "forward_s" not in metrics_rows([replace(update, lr=(0.1,))])[0][0]
    streamed = Streamed(tiny_llama())
    streamed.accumulate(ragged(2))
    assert not seconds(streamed.update().marks)
