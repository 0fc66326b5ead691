"""What the laws share: a process whose forks meet faults, and a folder for runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from faults.harness import FaultServer
from laws.resumed import write_inputs


@pytest.fixture(scope="session")
def faults() -> Iterator[FaultServer]:
    """The process whose forks meet faults; its imports are paid for once by a worker."""
    with FaultServer() as server:
        yield server


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own; no figures, short samples, and the machine not measured, which take most
    of the time.
    """
    monkeypatch.setattr("monograph.session.reporting.write_report", lambda *_: None)
    monkeypatch.setattr("monograph.session.reporting.SAMPLE_TOKENS", 4)
    monkeypatch.setattr("monograph.commands.train.measure_memory", lambda session: None)
    monkeypatch.setattr("monograph.predict.roofline._measured_flops", lambda *_: 1e10)
    monkeypatch.chdir(tmp_path)
    write_inputs(tmp_path)
    return tmp_path
