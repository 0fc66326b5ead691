"""Run: pytest tests/test_parts.py (where the time of an update went)"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from batches import ragged, tiny_llama
from monograph.resident import Resident
from monograph.step.parts import Parts


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
    assert engine.step.parts.read() == {}
    for _ in range(2):
        began = time.perf_counter()
        engine.accumulate(ragged(6))
        engine.update()
        whole = time.perf_counter() - began
        parts = engine.step.parts.read()
        assert parts.keys() == {"forward_s", "backward_s", "optimizer_s"}
        assert parts["forward_s"] >= 0.06 and parts["backward_s"] >= 0.12 and parts["optimizer_s"] > 0
        assert sum(parts.values()) <= whole
    engine.accumulate(ragged(6))
    assert engine.step.parts.read() == parts  # until the next update is done


def test_a_window_that_failed_is_in_no_part() -> None:
    engine = Resident(nn.Linear(2, 1), loss=lambda model, batch: (model(batch["x"]).sum(), batch["n"].sum()))
    window = {"x": torch.ones(1, 2), "n": torch.ones(1)}
    with pytest.raises(RuntimeError):
        engine.accumulate({"x": torch.ones(1, 3), "n": torch.ones(1)})
    time.sleep(0.1)
    engine.accumulate(window)
    engine.update()
    assert sum(engine.step.parts.read().values()) < 0.1


class Event:
    """An event of a GPU that records at once and is done when the test says so."""

    clock, done = 0.0, True

    def __init__(self, enable_timing: bool):
        assert enable_timing

    def record(self) -> None:
        self.at = Event.clock

    def query(self) -> bool:
        return Event.done

    def elapsed_time(self, later: Event) -> float:
        return 1000 * (later.at - self.at)


def test_on_a_gpu_events_are_read_once_done_and_a_launch_of_both_passes_is_one_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    capturing = [False]
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    parts = Parts(torch.device("cuda"))

    def update(at: float, *marks: tuple[str, float]) -> None:
        Event.clock = at
        parts.begin("forward")
        for name, Event.clock in marks:
            parts.begin(name)
        Event.clock += 1
        parts.end()

    update(0, ("backward", 2), ("forward", 5), ("backward", 7), ("forward", 10), ("optimizer", 10.5))
    assert parts.read() == {"forward_s": 4.5, "backward_s": 6, "optimizer_s": 1}
    Event.done = False
    assert parts.read() == {}
    Event.done = capturing[0] = True
    parts.begin("backward")  # in a capture
    parts.begin("forward")
    capturing[0] = False
    update(20, ("optimizer", 23))
    assert parts.read() == {"passes_s": 3, "optimizer_s": 1}
