"""Read what the card and the system tell of a run's speed, and notice when the run has become
slower than it was.
"""

import importlib
import os
import statistics
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import ModuleType
from typing import Any

import torch

from monograph.device import clock, describe
from monograph.profiling.memory import swapped_bytes
from monograph.report.quantities import memory

READ_S = 1.0  # a card's own numbers are means over up to a second
STRETCH_S, STRETCH = 60.0, 10  # a stretch has at least so many seconds and rates
KNOWN = 2  # stretches that others are compared with, at least
SLOW, RECOVERED = 0.7, 0.85  # of the rate before
# less more memory in swap, or load, explains nothing
SWAPPED_BYTES = 2**26
LOADED = 0.5

_GAUGES: Mapping[str, Callable[[ModuleType, object], float]] = {
    "gpu_utilization_percent": lambda nvml, card: nvml.nvmlDeviceGetUtilizationRates(card).gpu,
    "gpu_memory_bytes": lambda nvml, card: nvml.nvmlDeviceGetMemoryInfo(card).used,
    "gpu_power_w": lambda nvml, card: nvml.nvmlDeviceGetPowerUsage(card) / 1000,
    "gpu_temperature_c": lambda nvml, card: nvml.nvmlDeviceGetTemperature(
        card, nvml.NVML_TEMPERATURE_GPU
    ),
    "gpu_clock_hz": lambda nvml, card: (
        nvml.nvmlDeviceGetClockInfo(card, nvml.NVML_CLOCK_SM) * 10**6
    ),
}
_HINTS: Mapping[str, Callable[[ModuleType, object], float]] = {
    "limits": lambda nvml, card: nvml.nvmlDeviceGetCurrentClocksEventReasons(card),
    "processes": lambda nvml, card: len(nvml.nvmlDeviceGetComputeRunningProcesses(card)),
}
# What NVML's bits of reasons for a lower clock mean.
_LIMITS = {
    0x04: "its power limit",
    0x08: "its hardware",
    0x20: "heat",
    0x40: "heat",
    0x80: "its power supply",
}


class Gauges:
    """The numbers of a GPU, from NVIDIA's library where it is installed (nvidia-ml-py), and of this
    process's host.

    The library asks the driver, so the device is not waited for. Whatever it refuses is left out.
    """

    def __init__(self, device: torch.device) -> None:
        """Find the card by its UUID, as the library numbers cards in another order than
        CUDA_VISIBLE_DEVICES.
        """
        self._nvml: ModuleType | None = None
        self._read_s = float("-inf")
        self._cores = describe(device).cores
        if device.type == "cuda":
            # It is missing, or finds no driver, or the device is a slice of a card.
            with suppress(Exception):
                nvml = importlib.import_module("pynvml")
                nvml.nvmlInit()
                self._card = nvml.nvmlDeviceGetHandleByUUID(
                    f"GPU-{torch.cuda.get_device_properties(device).uuid}"
                )
                self._nvml = nvml

    def read(self) -> dict[str, float]:
        """Return the card's numbers by their names in metrics.jsonl; none if they were read less
        than a second ago.
        """
        if self._nvml is None or clock() - self._read_s < READ_S:
            return {}
        self._read_s = clock()
        return self._of_card(_GAUGES)

    def hints(self) -> dict[str, float]:
        """Return numbers that may explain a lower speed, if they differ from those before."""
        return {"load": os.getloadavg()[0], "swapped": swapped_bytes(), **self._of_card(_HINTS)}

    def why(self, before: Mapping[str, float], now: Mapping[str, float]) -> str:
        """Return the likely reasons for a lower speed in words; "" if nothing tells any."""
        new = int(now.get("limits", 0)) & ~int(before.get("limits", 0))
        slowed = dict.fromkeys(
            f"the GPU is slowed by {name}" for bit, name in _LIMITS.items() if bit & new
        )
        then = before.get("processes", 0)
        processes = now.get("processes", 0)
        more_bytes = now["swapped"] - before["swapped"]
        loaded = now["load"] > max(self._cores, before["load"] + LOADED)
        reasons = [
            *slowed,
            f"{processes} processes use the GPU, {then} before" if processes > then else "",
            f"{memory(more_bytes)} of its memory went to swap"
            if more_bytes > SWAPPED_BYTES
            else "",
            f"load {now['load']:.1f} on {self._cores} cores, {before['load']:.1f} before"
            if loaded
            else "",
        ]
        return "; ".join(filter(None, reasons))

    def _of_card(
        self, wanted: Mapping[str, Callable[[ModuleType, object], float]]
    ) -> dict[str, float]:
        found = dict[str, float]()
        if self._nvml is None:
            return found
        for name, read in wanted.items():
            with suppress(Exception):  # this card, driver or moment has no such number
                found[name] = read(self._nvml, self._card)
        return found


class Alarm:
    """What notices that a run is slower than it was, once until it recovers.

        slow:       median rate of a stretch < 0.7 × median of the medians of earlier stretches
        recovered:  median rate of a stretch ≥ 0.85 × that

    Stretches that are slow are no part of what later ones are compared with. A median of rates does
    not see single updates that waited for a compiler or a rewind. Of an even number of stretches
    the lower middle counts, so one fast stretch at the beginning makes no alarm.
    """

    def __init__(self, gauges: Gauges) -> None:
        """Begin with no stretch."""
        self.gauges = gauges
        self.is_slow = False
        self._hints = gauges.hints()
        self._rates = list[float]()
        self._seconds = 0.0
        self._known = list[float]()

    def note(self, rate: float, seconds: float) -> dict[str, Any] | None:
        """Take the rate of some seconds of training; return both rates and the likely reason if the
        run became slow.
        """
        self._rates.append(rate)
        self._seconds += seconds
        if self._seconds < STRETCH_S or len(self._rates) < STRETCH:
            return None
        now = statistics.median(self._rates)
        hints = self.gauges.hints()
        self._rates = []
        self._seconds = 0.0
        before = statistics.median_low(self._known) if len(self._known) >= KNOWN else 0.0
        was_slow = self.is_slow
        self.is_slow = now < (RECOVERED if was_slow else SLOW) * before
        if not self.is_slow:
            self._known.append(now)
            self._hints = hints
        if was_slow or not self.is_slow:
            return None
        return {"tokens_per_s": now, "before": before, "why": self.gauges.why(self._hints, hints)}
