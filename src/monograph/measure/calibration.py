"""How long updates took on a device over what the roofline says: kept between runs, so that the next plan is right."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch

from monograph.device import Device, default_device, measured_matmul_flops
from monograph.graph.precision import Precision
from monograph.measure.footprint import Work
from monograph.measure.roofline import update_time

SCHEMA = "monograph.calibration/1"
MOST = 9  # of what was seen, the newest of a kind; their median counts


class Calibration:
    """Ratios of measured to predicted time, by device and precision; a file that cannot be read is none.

    The file is a convenience: what cannot be written is forgotten, and nothing fails.
    """

    def __init__(self, file: Path) -> None:
        """Of a file, which need not be there."""
        self._file = file
        self._seen: dict[str, list[float]] = {}
        with suppress(OSError, ValueError, AttributeError, TypeError):
            found = json.loads(file.read_text())
            if found.get("schema") == SCHEMA:
                self._seen = {str(kind): [float(ratio) for ratio in ratios] for kind, ratios in found["seen"].items()}

    def slowness(self, device: Device, precision: str) -> float | None:
        """The median ratio on this device in this precision; None if there was none."""
        seen = [ratio for ratio in self._seen.get(_kind(device, precision), ()) if 0 < ratio < float("inf")]
        return statistics.median(seen) if seen else None

    def note(self, device: Device, work: Work, seconds: float, peak_flops: float) -> None:
        """Keep what an update took."""
        seen = self._seen.setdefault(_kind(device, work.precision), [])
        seen.append(seconds / update_time(work, device, peak_flops).total_s)
        del seen[:-MOST]
        temporary = self._file.with_name(f"{self._file.name}.{os.getpid()}")
        with suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps({"schema": SCHEMA, "seen": self._seen}))
            temporary.replace(self._file)
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _kind(device: Device, precision: str) -> str:
    """One for all ways to train, so that what was seen of one does not change their order."""
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    return f"{device.name}{threads}, {precision}"


def peak_flops(device: Device, precisions: tuple[str, ...]) -> Mapping[str, float]:
    """FLOP/s by precision: the datasheet's; where it says nothing what this machine's default device is measured at."""
    known = dict(device.peak_flops)
    if "bf16" in known:
        known.setdefault("fp16", known["bf16"])
    dtypes = {name: Precision(name).dtype for name in precisions if name not in known}
    return known | {name: measured_matmul_flops(default_device(), dtype, 0.1) for name, dtype in dtypes.items()}
