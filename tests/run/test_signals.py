"""Run: pytest tests/run/test_signals.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import monograph
from clocks import HANG_S
from monograph.run.signals import StopSignal

SOURCE = Path(monograph.__file__).parents[1]


def run_script(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_stop_signal_is_noted_and_told(number: signal.Signals) -> None:
    told: list[str] = []
    with StopSignal(on_request=told.append) as stop:
        assert stop.requested is None
        os.kill(os.getpid(), number)
        assert stop.requested == number.name
        os.kill(os.getpid(), signal.SIGTERM)  # asked again, politely: still finishing
    assert stop.requested == number.name
    assert told == [number.name]


def test_a_save_can_be_asked_for_again_and_again() -> None:
    with StopSignal() as stop:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGUSR1)
            assert stop.save_requested
            stop.save_requested = False
    assert stop.requested is None


def test_former_handlers_return_even_after_an_error() -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    former = [signal.getsignal(number) for number in numbers]
    with pytest.raises(ZeroDivisionError), StopSignal():
        assert [signal.getsignal(number) for number in numbers] != former
        _ = 1 / 0
    assert [signal.getsignal(number) for number in numbers] == former


def test_what_nohup_ignores_stays_ignored() -> None:
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignal() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.requested is None
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, former)


@pytest.mark.parametrize("first", ["SIGINT", "SIGTERM"])
def test_a_further_ctrl_c_leaves_at_once_with_130(first: str) -> None:
    result = run_script(f"""
import os, signal
from monograph.run.signals import StopSignal
with StopSignal() as stop:
    os.kill(os.getpid(), signal.{first})
    try:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000): pass
    finally:
        print("cleaned up")
""")
    assert (result.returncode, result.stdout) == (130, "")
