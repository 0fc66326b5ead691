"""Run: pytest tests/session/test_gauges.py (a card's numbers in the metrics, and a run that becomes
slower).
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from laws.resumed import SETTINGS, start, write_inputs
from monograph.commands import follow
from monograph.resident import Resident
from monograph.run.folder import Run
from monograph.session import gauges as room
from monograph.session import update_clock
from monograph.session.gauges import Alarm, Gauges
from monograph.session.reporting import Reporter
from monograph.session.session import Session

CUDA = torch.device("cuda", 1)
UUIDS = ("d0d7a2b5-0000-4000-8000-000000000000", "d0d7a2b5-1111-4111-8111-111111111111")
NUMBERS = {
    "gpu_utilization_percent": 93,
    "gpu_memory_bytes": 3 * 2**30,
    "gpu_power_w": 312.5,
    "gpu_temperature_c": 71,
    "gpu_clock_hz": 1_980_000_000,
}


class Refused(Exception):
    """Stands in for NVMLError."""


class Nvml:
    """Stands in for pynvml, with the units of NVML: per cent, bytes, milliwatts, degrees, MHz."""

    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM = 0, 1

    def __init__(self) -> None:
        self.refused, self.limits, self.processes, self.asked = set[str](), 0x04, 1, list[str]()

    def __getattr__(self, name: str) -> Any:
        def call(card: str = "", *which: int) -> Any:
            if name in self.refused:
                raise Refused("GPU is lost")
            self.asked.append(card)
            return {
                "nvmlInit": None,
                "nvmlDeviceGetHandleByUUID": card,
                "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=93, memory=40),
                "nvmlDeviceGetMemoryInfo": SimpleNamespace(
                    total=80 * 2**30, used=3 * 2**30, free=77 * 2**30
                ),
                "nvmlDeviceGetPowerUsage": 312_500,
                "nvmlDeviceGetTemperature": 71 if which == (0,) else None,
                "nvmlDeviceGetClockInfo": 1980 if which == (1,) else None,
                "nvmlDeviceGetCurrentClocksEventReasons": self.limits,
                "nvmlDeviceGetComputeRunningProcesses": [
                    SimpleNamespace(pid=number) for number in range(self.processes)
                ],
            }[name]

        return call


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    library = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setattr(room, "describe", lambda device: SimpleNamespace(cores=2))
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(uuid=UUIDS[device.index]),
        raising=False,
    )
    return library


def test_a_card_s_numbers_have_their_units_and_are_read_once_a_second(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(room, "clock", lambda: now[0])
    card = Gauges(CUDA)
    assert card.read() == NUMBERS
    now[0] += 0.9
    assert card.read() == {}
    now[0] += 0.2
    assert card.read() == NUMBERS


def test_the_card_is_the_one_that_torch_computes_on(nvml: Nvml) -> None:
    """Whatever CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER say: NVML numbers all cards, in the order
    of the bus.
    """
    Gauges(CUDA).read()
    assert set(nvml.asked) == {"", f"GPU-{UUIDS[1]}"}


def test_what_the_library_refuses_is_left_out(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MIN_READ_INTERVAL_S", 0)
    card = Gauges(CUDA)
    nvml.refused = {"nvmlDeviceGetPowerUsage", "nvmlDeviceGetCurrentClocksEventReasons"}
    assert card.read() == {name: value for name, value in NUMBERS.items() if name != "gpu_power_w"}
    assert card.hints().keys() == {"load", "swapped", "processes"}
    nvml.refused |= {
        f"nvmlDeviceGet{name}"
        for name in ("UtilizationRates", "MemoryInfo", "Temperature", "ClockInfo")
    }
    assert card.read() == {}


@pytest.mark.parametrize("missing", ["library", "driver", "card", "device"])
def test_without_the_library_a_driver_or_a_card_there_is_nothing(
    nvml: Nvml, missing: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if missing == "library":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    nvml.refused = {"driver": {"nvmlInit"}, "card": {"nvmlDeviceGetHandleByUUID"}}.get(
        missing, set()
    )
    card = Gauges(torch.device("cpu") if missing == "device" else CUDA)
    assert card.read() == {} and card.hints().keys() == {"load", "swapped"}
    assert capfd.readouterr() == ("", "")


def test_the_real_library_has_what_is_asked_for() -> None:
    pynvml = pytest.importorskip("pynvml")
    for read in chain(room._GAUGES.values(), room._HINTS.values()):
        assert all(
            hasattr(pynvml, name)
            for name in read.__code__.co_names
            if name.lower().startswith("nvml")
        )
    assert {bit for name, bit in vars(pynvml).items() if name.startswith("nvmlClocksEventReason") and (
        "Thermal" in name or "HwSlowdown" in name or "PowerCap" in name or "PowerBrake" in name
    )} == set(room._LIMITS)  # fmt: skip


# ── a run that becomes slower ─────────────────────────────────────────────────────────────────────


class Still:
    """Gauges of a machine on which nothing changes."""

    def hints(self) -> dict[str, float]:
        return {}

    def why(self, before: object, now: object) -> str:
        return ""


def alarms(
    seconds: Iterator[float] | list[float], rate: float = 1000.0
) -> list[tuple[int, float, float]]:
    """(update, rate, rate before) of each alarm, for updates that take so many seconds."""
    alarm, found = Alarm(Still()), []  # type: ignore[arg-type]
    for update, update_s in enumerate(seconds, 1):
        if event := alarm.note(rate / update_s, update_s):
            found.append((update, event["tokens_per_s"], event["before"]))
    return found


def noisy(seconds: float, updates: int, seed: int = 0) -> list[float]:
    draws = random.Random(seed)
    return [seconds * draws.uniform(0.8, 1.2) for _ in range(updates)]


@pytest.mark.parametrize("update_s", [0.05, 1.0, 20.0])
def test_a_run_at_half_its_speed_is_noticed_once_until_it_recovers(update_s: float) -> None:
    long = round(max(400 / update_s, 60))
    steady, slow = noisy(update_s, long), noisy(2 * update_s, long, 1)
    ((update, now, before),) = alarms(steady + slow)
    assert now == pytest.approx(500 / update_s, rel=0.1) and before == pytest.approx(
        1000 / update_s, rel=0.1
    )
    assert long < update <= long + 2 * max(room.MIN_STRETCH_S / update_s, room.MIN_STRETCH_RATES)
    assert len(alarms(steady + slow + steady + slow)) == 2


@pytest.mark.parametrize(
    "seconds",
    [
        [60.0] + [1.0] * 300,  # a first update that waits for a compiler
        # One that waits for it later, and one for a rewind.
        [1.0] * 150 + [90.0] + [1.0] * 150 + [90.0],
        [1.0] * 300 + [1.35] * 300,  # a little slower
        [0.5] * 30 + [1.0] * 600,  # fast for a moment
        [0.5] * 120 + [1.0] * 600,  # and for the first stretch
        *(noisy(1.0, 2000, seed) for seed in range(5)),
        [0.001] * 5000,
    ],
)
def test_noise_is_no_alarm(seconds: list[float]) -> None:
    assert alarms(seconds) == []


def test_the_likely_reasons_are_what_has_changed(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "swapped_bytes", lambda: swapped[0])
    monkeypatch.setattr(room.os, "getloadavg", lambda: load)
    swapped, load = [2**20], (2.2, 2.0, 2.0)
    card = Gauges(CUDA)
    before = card.hints()
    assert card.why(before, card.hints()) == ""
    nvml.limits, nvml.processes, swapped[0], load = 0x64, 2, 2**20 + 2**30, (4.5, 3.0, 2.0)
    assert card.why(before, card.hints()).split("; ") == [
        "the GPU is slowed by heat", "2 processes use the GPU, 1 before", "1.00 GiB of its memory went to swap",
        "load 4.5 on 2 cores, 2.2 before",
    ]  # fmt: skip
    nvml.refused = {
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetComputeRunningProcesses",
    }
    load = (1.9, 2.0, 2.0)
    assert card.why(before, card.hints()) == "1.00 GiB of its memory went to swap"


def test_a_run_says_so_in_its_metrics_to_trackers_and_on_the_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Updates of 15 s, from the 41st on of 30 s; evaluations and saves that take minutes are no
    part of them.
    """
    monkeypatch.chdir(tmp_path)
    write_inputs(tmp_path)
    monkeypatch.setattr("monograph.session.reporting.write_report", lambda *_: None)
    now = [0.0]

    def taking(owner: type, name: str, seconds: Any) -> None:
        true = getattr(owner, name)

        def timed(self: Any, *arguments: Any, **named: Any) -> Any:
            now[0] += seconds(self)
            return true(self, *arguments, **named)

        monkeypatch.setattr(owner, name, timed)

    taking(Resident, "update", lambda engine: 15.0 if engine.index < 40 else 30.0)
    taking(Reporter, "evaluate", lambda reporter: 600.0)
    taking(Session, "save", lambda session: 300.0)
    monkeypatch.setattr(update_clock, "clock", lambda: now[0])
    monkeypatch.setattr(Gauges, "read", lambda gauges: NUMBERS)
    monkeypatch.setattr(Gauges, "why", lambda gauges, before, now: "the GPU is slowed by heat")
    start("run", SETTINGS | {"train.updates": 60, "train.save_every": 7})
    rows = Run(Path("run")).rows()
    (event,) = [row for row in rows if "slower" in row]
    now_, before = event["slower"]["tokens_per_s"], event["slower"]["before"]
    assert event["update"] == 50 and event["tokens"] > 0 and before == pytest.approx(2 * now_)
    first, *later = [row for row in rows if "train_loss" in row]
    assert not first.keys() & NUMBERS.keys() and all(
        row.items() >= NUMBERS.items() for row in later
    )
    assert all(row["tokens_per_s"] == pytest.approx(before) for row in later[:-20])
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "slower: " in line]
    assert line.endswith("before: the GPU is slowed by heat")
    assert (
        dict(follow._finite_numbers(event)).items()
        >= {"slower/tokens_per_s": now_, "slower/before": before}.items()
    )
    assert dict(follow._finite_numbers(later[-1])).items() >= NUMBERS.items()
