"""What the laws share: one compiled step, as compiling costs more than everything else here, and a folder for runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from batches import packed, tiny_llama
from faults.harness import FaultServer
from laws.resumed import write_inputs
from monograph.optim import AdamW
from monograph.resident import Resident
from monograph.schedule import warmup_cosine


@pytest.fixture(scope="session")
def compiled_step() -> Resident:
    """A Llama of one layer whose whole step went through Inductor, warmed on packed rows in micro-batches of 4."""
    model = tiny_llama(num_hidden_layers=1)
    engine = Resident(model, optim=AdamW(lr=1e-2), schedule=warmup_cosine(2, 50), clip=0.5, micro_batch=4)
    assert engine.capture(packed(16)) is None
    return engine


@pytest.fixture(scope="session")
def faults() -> Iterator[FaultServer]:
    """The process whose forks meet faults; its imports are paid for once by a worker."""
    with FaultServer() as server:
        yield server


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own, no figures and short samples, which take most of the time."""
    monkeypatch.setattr("monograph.session.reporting.write_report", lambda *_: None)
    monkeypatch.setattr("monograph.session.reporting.SAMPLE_TOKENS", 4)
    monkeypatch.chdir(tmp_path)
    write_inputs(tmp_path)
    return tmp_path
