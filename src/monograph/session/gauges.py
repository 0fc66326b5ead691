"""Read numbers of the GPU and the system that may explain a run's speed, and notice when the run has
become slower.

A *rate* is the number of tokens per second in about a second. A *stretch* is about a minute of
training, whose rates have a median.
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

# A GPU's numbers are means over up to a second, so they are not read more often.
MIN_READ_INTERVAL_S = 1.0
MIN_STRETCH_S = 60.0
MIN_STRETCH_RATES = 10
MIN_EARLIER_STRETCHES = 2  # a stretch is compared with the earlier ones if there are this many
SLOW_SHARE = 0.7  # a stretch is slow if its rate is below this share of the usual rate
RECOVERED_SHARE = 0.85  # a slow run has recovered if it reaches this share of the usual rate
# A smaller increase of memory in swap, or of the load, does not explain a lower speed.
MIN_SWAPPED_BYTES = 2**26
MIN_LOAD_INCREASE = 0.5

# By name, functions that read a number from NVIDIA's library, given the library and the GPU.
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
# Functions of the same kind, for numbers that may explain a lower speed.
_HINTS: Mapping[str, Callable[[ModuleType, object], float]] = {
    "limits": lambda nvml, card: nvml.nvmlDeviceGetCurrentClocksEventReasons(card),
    "processes": lambda nvml, card: len(nvml.nvmlDeviceGetComputeRunningProcesses(card)),
}
# What each bit of NVML's reasons for a lower clock rate means: what slows the GPU. NVML has two
# bits for heat, one of the driver and one of the hardware.
_LIMITS = {
    0x04: "its power limit",
    0x08: "its hardware",
    0x20: "heat",
    0x40: "heat",
    0x80: "its power supply",
}


class Gauges:
    """The numbers of a GPU, from NVIDIA's library (nvidia-ml-py) if it is installed, and of the
    host.

    The library asks the driver, so reading does not wait for the GPU's work. Numbers that the
    library refuses are left out.
    """

    def __init__(self, device: torch.device) -> None:
        """Find the GPU in NVIDIA's library.

        It is found by its UUID, because the library numbers GPUs in another order than
        CUDA_VISIBLE_DEVICES.
        """
        self._nvml: ModuleType | None = None
        self._last_read_s = float("-inf")
        self._cores = describe(device).cores
        if device.type == "cuda":
            # An exception means that the library is missing or finds no driver, or that the device
            # is a slice of a GPU.
            with suppress(Exception):
                nvml = importlib.import_module("pynvml")
                nvml.nvmlInit()
                self._card = nvml.nvmlDeviceGetHandleByUUID(
                    f"GPU-{torch.cuda.get_device_properties(device).uuid}"
                )
                self._nvml = nvml

    def read(self) -> dict[str, float]:
        """Return the GPU's numbers by their names in metrics.jsonl; {} if they were read less than
        `MIN_READ_INTERVAL_S` ago.
        """
        if self._nvml is None or clock() - self._last_read_s < MIN_READ_INTERVAL_S:
            return {}
        self._last_read_s = clock()
        return self._of_card(_GAUGES)

    def hints(self) -> dict[str, float]:
        """Return numbers that may explain a lower speed if they differ from earlier ones."""
        return {"load": os.getloadavg()[0], "swapped": swapped_bytes(), **self._of_card(_HINTS)}

    def why(self, before: Mapping[str, float], now: Mapping[str, float]) -> str:
        """Return the likely reasons for a lower speed in words; "" if none is known.

        Args:
            before: the `hints` at the time of the higher speed.
            now: the present `hints`.
        """
        new_limits = int(now.get("limits", 0)) & ~int(before.get("limits", 0))
        # Two bits mean heat; the dict has each name only once.
        names = dict.fromkeys(name for bit, name in _LIMITS.items() if bit & new_limits)
        reasons = [f"the GPU is slowed by {name}" for name in names]
        processes_before = before.get("processes", 0)
        processes = now.get("processes", 0)
        if processes > processes_before:
            reasons.append(f"{processes} processes use the GPU, {processes_before} before")
        newly_swapped = now["swapped"] - before["swapped"]
        if newly_swapped > MIN_SWAPPED_BYTES:
            reasons.append(f"{memory(newly_swapped)} of its memory went to swap")
        # A load below the number of cores leaves some cores free.
        if now["load"] > max(self._cores, before["load"] + MIN_LOAD_INCREASE):
            reasons.append(
                f"load {now['load']:.1f} on {self._cores} cores, {before['load']:.1f} before"
            )
        return "; ".join(reasons)

    def _of_card(
        self, readers: Mapping[str, Callable[[ModuleType, object], float]]
    ) -> dict[str, float]:
        """Return the numbers that these functions read, except those that the GPU does not have."""
        numbers = dict[str, float]()
        if self._nvml is None:
            return numbers
        for name, read in readers.items():
            # This GPU or driver may not have the number, or not at this moment.
            with suppress(Exception):
                numbers[name] = read(self._nvml, self._card)
        return numbers


class Alarm:
    """Notices that a run has become slower. It reports this once, and again only after the run has
    recovered.

        usual rate:  median of the median rates of earlier stretches that were not slow
        slow:        median rate of a stretch < 0.7 × usual rate
        recovered:   median rate of a stretch ≥ 0.85 × usual rate

    The median of a stretch ignores single updates that waited for a compiler or a rewind. The
    median over an even number of stretches is the lower of the two in the middle, so one fast
    stretch at the beginning does not raise an alarm.
    """

    def __init__(self, gauges: Gauges) -> None:
        """Begin the first stretch."""
        self.gauges = gauges
        self.is_slow = False
        # The rates of the present stretch, and its seconds so far.
        self._rates = list[float]()
        self._seconds = 0.0
        # The medians of the earlier stretches that were not slow, and the hints at the last of them.
        self._usual_rates = list[float]()
        self._usual_hints = gauges.hints()

    def note(self, rate: float, seconds: float) -> dict[str, Any] | None:
        """Note the rate of some seconds of training.

        Args:
            rate: tokens per second.
            seconds: the seconds of training with this rate.

        Returns:
            If the run has become slow with this call: the present rate, the usual rate, and the
            likely reason. Else None.
        """
        self._rates.append(rate)
        self._seconds += seconds
        if self._seconds < MIN_STRETCH_S or len(self._rates) < MIN_STRETCH_RATES:
            return None
        # The stretch is complete.
        rate_of_stretch = statistics.median(self._rates)
        hints = self.gauges.hints()
        self._rates = []
        self._seconds = 0.0
        usual_rate = 0.0  # as long as it is not known; no stretch is slower than this
        if len(self._usual_rates) >= MIN_EARLIER_STRETCHES:
            usual_rate = statistics.median_low(self._usual_rates)
        was_slow = self.is_slow
        min_share = RECOVERED_SHARE if was_slow else SLOW_SHARE
        self.is_slow = rate_of_stretch < min_share * usual_rate
        if not self.is_slow:
            self._usual_rates.append(rate_of_stretch)
            self._usual_hints = hints
        if was_slow or not self.is_slow:
            return None
        why = self.gauges.why(self._usual_hints, hints)
        return {"tokens_per_s": rate_of_stretch, "before": usual_rate, "why": why}
