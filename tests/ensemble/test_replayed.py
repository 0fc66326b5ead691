"""Run: pytest tests/ensemble/test_replayed.py

An ensemble whose updates are captured once and replayed gives the bits of one that is
called. On a CPU `Tape` stands for the device that captures.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from monograph.ensemble import Ensemble
from monograph.graph.capture import stop_replaying
from monograph.graph.replay import WARM_UP, CudaGraphs, StaticInputs
from monograph.laws.comparisons import differing, outcome
from monograph.optim import AdamW
from monograph.schedule import warmup_cosine
from tape import Tape

MEMBERS = 3
on_a_gpu = pytest.param("cuda", marks=pytest.mark.gpu)
DEVICES = pytest.mark.parametrize("device", ["cpu", on_a_gpu])


class Net(nn.Module):
    """Has what differs between calls: dropout, running means, and a mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.3)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, rows):
        return self.down(self.drop(F.relu(self.up(self.norm(rows)))))


def loss(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"], reduction="sum"), batch["y"].numel()


def ensemble(device, *, schedule=None, made=Net, **options) -> Ensemble:
    torch.manual_seed(0)
    members = [made().to(device) for _ in range(MEMBERS)]
    # With decays that differ, no 0-d fp64 tensor is compared on a CPU: Dynamo would read its value in a
    # guard, which `Tape` takes for a wait.
    knobs = [{"lr": 1e-2 * (1 + n), "weight_decay": 0.1 * n} for n in range(MEMBERS)]
    return Ensemble(members, knobs, loss=loss, optim=AdamW, schedule=schedule, **options)


def recorder_on(device):
    return CudaGraphs(torch.device("cuda", 0)) if device == "cuda" else Tape()


def window(device, seed=0, rows=6):
    drawn = torch.Generator().manual_seed(seed)
    shapes = {"x": (rows, 4), "y": (rows, 2)}
    return {name: torch.randn(shape, generator=drawn).to(device) for name, shape in shapes.items()}


def trained(engine, device, updates=6):
    found = []
    for seed in range(updates):
        engine.accumulate(window(device, seed))
        found.append(engine.update())
    return outcome(engine.state(), found)


# ── an update ─────────────────────────────────────────────────────────────────────────────────────


@DEVICES
@pytest.mark.parametrize("schedule", [None, warmup_cosine(2, 6)], ids=["constant", "cosine"])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_an_update_that_is_replayed(device, schedule, clip):
    results = []
    for recorder in (None, recorder_on(device)):
        engine = ensemble(device, schedule=schedule, clip=clip, micro_batch=3)
        engine.step.recorder, engine.step.announce = recorder, pytest.fail
        assert engine.capture(window(device), "aot_eager") is None
        results.append(trained(engine, device))
    assert isinstance(engine.step.apply.function, StaticInputs)
    assert engine.step.apply.function.graph_count == 1
    assert not differing(*results)


def test_replayed_as_often_as_it_runs():
    engine = ensemble("cpu", micro_batch=3)
    engine.step.recorder = tape = Tape()
    assert engine.capture(window("cpu"), "aot_eager") is None
    # Both are warm, so no update of the run is called.
    assert tape.called == 2 * WARM_UP
    trained(engine, "cpu")
    assert tape.called == 2 * WARM_UP and tape.replays == 6 * 2 + 6
    assert stop_replaying(engine.step) and not stop_replaying(engine.step)


def test_a_frozen_member_and_a_clip_that_is_changed():
    """What a capture decided by is compared before each replay; what is on the device is read."""
    results = []
    for recorder in (None, Tape()):
        engine = ensemble("cpu", clip=1e-3, micro_batch=3)
        engine.step.recorder = recorder
        assert engine.capture(window("cpu"), "aot_eager") is None
        trained(engine, "cpu", 3)
        engine.freeze([1])
        trained(engine, "cpu", 2)
        engine.step.clip = engine.step.clip._replace(norm=1e3)
        results.append(trained(engine, "cpu"))
    assert not differing(*results)


# ── the learning rates ────────────────────────────────────────────────────────────────────────────


def test_a_schedule_is_called_once_an_update_and_rates_are_written_when_they_change():
    calls = []

    def schedule(index):
        calls.append(index)
        return 1.0 if index < 3 else 0.5

    engine = ensemble("cpu", schedule=schedule)
    for seed in range(5):
        engine.accumulate(window("cpu", seed))
        expected = tuple(1e-2 * (1 + n) * (1.0 if seed < 3 else 0.5) for n in range(MEMBERS))
        assert engine.update().lr == expected
        assert engine.step.lr.tolist() == list(expected)
    assert calls == [0, 1, 2, 3, 4]
