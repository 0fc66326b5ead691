# Run: pytest tests/session/test_measured_memory.py
"""What a run's first updates took is kept for later plans where it tells them something, and
nowhere else.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from batches import tiny_config
from monograph.device import card_device
from monograph.distributed.world import World
from monograph.graph.remat import Remat
from monograph.optim import AdamW
from monograph.planner import Candidate
from monograph.predict.footprint import Work
from monograph.predict.roofline import Calibration
from monograph.session import measured_memory, warmup
from monograph.storage.cache_dir import calibration_file

CARD, MIB = card_device("H100"), 2**20
WORK = Work(
    tiny_config(),
    rows=4,
    length=16,
    optim=AdamW(),
    precision="bf16",
    compile="blocks",
    remat=0.5,
    window_rows=8,
    device_type="cuda",
)
BY_ORIGIN = {"weights": 500 * MIB, "activations": 90 * MIB, "workspace": 30 * MIB}
PLANNED = Candidate(WORK, 620 * MIB, 1.0, 1.0, None, BY_ORIGIN, residual_bytes=20 * MIB)


@pytest.fixture(autouse=True)
def _a_card(monkeypatch, tmp_path):
    monkeypatch.setenv("MONOGRAPH_HOME", str(tmp_path))
    monkeypatch.setattr(measured_memory, "describe", lambda device: CARD)
    monkeypatch.setattr(measured_memory, "peak_memory_bytes", lambda device: 625 * MIB)
    monkeypatch.setattr(measured_memory, "ledger", lambda *parts: {})


class Run:
    """A run on a card that is not there, as it was planned."""

    def __init__(
        self,
        device="cuda",
        planned=PLANNED,
        micro_batch=4,
        scope="blocks",
        remat=None,
        replayed=False,
        foreseen=True,
    ):
        step = SimpleNamespace(
            device=torch.device(device), scope=scope, remat=remat or Remat.Budget(0.5), planes=[]
        )
        step.micro_step = None
        self.replayed, self.engine, self.plan = (
            replayed,
            SimpleNamespace(step=step, micro_batch=micro_batch),
            SimpleNamespace(expected=planned),
        )
        self.run, self.world = SimpleNamespace(log=lambda row: None), World()
        self.task = SimpleNamespace(is_fully_planned=foreseen)

    def residual(self, monkeypatch, *updates):
        monkeypatch.setattr(measured_memory, "is_replayed", lambda step: self.replayed)
        for update in updates:
            measured_memory.log_memory(self, update)
        return Calibration(calibration_file()).residual(CARD, WORK, PLANNED.traced)


def test_the_first_update_tells_what_is_beyond_the_trace(monkeypatch):
    assert PLANNED.traced == BY_ORIGIN | {"workspace": 10 * MIB}
    # 625 measured, 600 traced, whatever was added to the plan.
    assert Run().residual(monkeypatch, 1) == 25 * MIB


def test_later_ones_tell_nothing_as_evaluations_and_samples_are_between_them(monkeypatch):
    assert Run().residual(monkeypatch, 2, 3, 100) == 0


@pytest.mark.parametrize(
    "other",
    [
        {"device": "cpu"},  # where the peak is all of the process
        {"planned": None},
        # Fits twice over, and was not traced.
        {"planned": replace(PLANNED, by_origin=None, residual_bytes=0)},
        {"micro_batch": 2},  # out of memory, stepped down
        {"remat": Remat.Full()},
        {"scope": "none"},  # could not be captured
        {"replayed": True},  # its pool is no part of any plan
        {"foreseen": False},  # teachers are none, either
    ],
)
def test_a_run_that_is_not_what_was_traced_tells_nothing(monkeypatch, other):
    assert Run(**other).residual(monkeypatch, 1) == 0


@pytest.mark.gpu
def test_on_a_gpu_the_peak_of_updates_is_the_allocator_s():
    engine = SimpleNamespace(step=SimpleNamespace(device=torch.device("cuda", 0)))
    before = warmup.measure_peak_bytes(SimpleNamespace(engine=engine))
    torch.empty(before + 2**20, dtype=torch.uint8, device="cuda")
    assert warmup.measure_peak_bytes(SimpleNamespace(engine=engine)) - before >= 2**20
