"""Run: pytest tests/sweeps/test_brief.py (a sweep that is over before a step would be compiled is
not compiled).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from commands.inputs import TINY, with_texts
from monograph.commands.sweep import run
from monograph.config import load
from monograph.device import default_device, describe
from monograph.run.progress import silent
from monograph.session import warmup
from monograph.session.resolve import resolve
from monograph.sweeps import concurrency
from monograph.sweeps import progress as sweep_progress
from monograph.sweeps.concurrency import TimedGroup
from monograph.sweeps.folder import Sweep
from monograph.sweeps.progress import SweepProgress

OPEN = [argument for argument in TINY if not argument.startswith("train.compile")]


def test_a_brief_sweep_is_not_compiled_and_goes_on_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def capture(*_: object, **__: object) -> None:
        raise AssertionError("something was compiled")

    monkeypatch.setattr(warmup, "capture_engine", capture)
    monkeypatch.setattr(warmup, "CALIBRATION_S", 0.0)
    monkeypatch.setattr(sweep_progress, "write_sweep_report", lambda *_: None)
    monkeypatch.chdir(with_texts(tmp_path))
    run(
        [*OPEN, "optim.lr=1e-3,1e-2"],
        samples=None,
        verify=None,
        out=Path("s"),
        distill=False,
        prune=None,
        json=False,
    )
    assert "not compiled: " in capsys.readouterr().err
    for member in ("000", "001"):
        assert (
            load(Path("s/members", member, "config.toml"), {}, {}, recorded=True).train.compile
            == "none"
        )
    # The decision is recorded, and not made again.
    monkeypatch.setattr(concurrency, "MIN_COMPILE_S", 0.0)
    again = SweepProgress(Sweep.open(Path("s")), silent())
    again.prepare(default_device(), describe())
    assert [member.plan.training.compile for member in again.members if member.plan] == [
        "none",
        "none",
    ]


@pytest.mark.parametrize(
    ("minutes", "cores", "brief"), [(0.3, 2, True), (0.9, 2, False), (0.9, 1, True)]
)
def test_a_sweep_by_the_clock_that_is_shorter_than_compiling_is_not_compiled(
    minutes: float, cores: int, brief: bool
) -> None:
    """With a second core it trains while it compiles, and compiling has to be shorter than all of
    it.
    """
    plan = resolve(load(None, {"model.preset": "nano", "train.minutes": minutes}, {}), describe())
    machine = replace(describe(), type="cpu", cores=cores)
    timed_group = SimpleNamespace(
        group=SimpleNamespace(plan=plan), machine=machine, given_updates=0
    )
    assert TimedGroup.is_brief(timed_group) == brief  # type: ignore[arg-type]


@pytest.mark.parametrize("length", ["train.updates=1e9", "train.minutes=1.1"])
def test_a_long_sweep_is_compiled(
    length: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Compiled(Exception):
        pass

    def capture(*_: object, **__: object) -> None:
        raise Compiled

    monkeypatch.setattr(warmup, "capture_engine", capture)
    monkeypatch.setattr("monograph.sweeps.eager_start._is_possible", lambda _: False)
    monkeypatch.chdir(with_texts(tmp_path))
    long = [argument.replace("train.updates=8", length) for argument in OPEN]
    with pytest.raises(Compiled):
        run(
            [*long, "optim.lr=1e-3,1e-2"],
            samples=None,
            verify=None,
            out=Path("s"),
            distill=False,
            prune=None,
            json=False,
        )
