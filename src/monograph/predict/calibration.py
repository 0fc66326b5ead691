"""How updates on a device differed from their prediction, in time and memory: kept, so that the next plan is right."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch

from monograph.device import Device, clock, default_device, measured_matmul_flops
from monograph.errors import InputRefused, Unreadable
from monograph.graph.precision import Precision
from monograph.predict.fake_memory import PASSING
from monograph.predict.footprint import Work
from monograph.predict.roofline import update_time
from monograph.storage.reading import contents, parse_json

SCHEMA = "monograph.calibration/1"
MOST = 9  # of what was seen, the newest of a kind; their median counts
# What an allocator takes beyond a trace is partly the same for all steps and partly grows with them, and nobody knows
# how much of each: it tells of steps whose activations and workspace are as large within this factor.
ALIKE = 2.0
# What passes in a step is believed to be smaller than its trace by this share of it at most (law 12).
LEAST = 0.05


class Calibration:
    """Ratios of measured to predicted time, by device and precision, and bytes beyond a traced peak, by scope as well.

    The file is a convenience: one that cannot be read is none, what cannot be written is forgotten, and nothing fails.
    """

    def __init__(self, file: Path) -> None:
        """Of a file, which need not be there."""
        self._file = file
        self._seen: dict[str, list[float]] = {}
        self._beyond: dict[str, list[tuple[int, int]]] = {}  # bytes beyond the trace, and what passes of the trace
        self._unread = False
        with suppress(InputRefused, ValueError, LookupError, AttributeError, TypeError, OverflowError, RecursionError):
            try:
                found = parse_json(contents(file) or b"")
            except Unreadable:
                self._unread = True
                return
            if found.get("schema") == SCHEMA:
                self._seen = {str(kind): [float(ratio) for ratio in ratios] for kind, ratios in found["seen"].items()}
                for kind, beyond in found.get("beyond", {}).items():
                    self._beyond[kind] = [(int(more), int(passing)) for more, passing in beyond]

    def slowness(self, device: Device, precision: str) -> float | None:
        """The median ratio on this device in this precision; None if there was none."""
        seen = [ratio for ratio in self._seen.get(_kind(device, precision), ()) if 0 < ratio < float("inf")]
        return statistics.median(seen) if seen else None

    def note(self, device: Device, work: Work, seconds: float, peak_flops: float) -> None:
        """Keep what an update took."""
        seen = self._seen.setdefault(_kind(device, work.precision), [])
        seen.append(seconds / update_time(work, device, peak_flops).total_s)
        del seen[:-MOST]
        self._write()

    def residual(self, device: Device, work: Work, traced: Mapping[str, int]) -> int:
        """Bytes by which such a step's peak differs from its trace on this device: the median of those alike, else 0.

        Alike are steps of the same precision and scope that pass, within a factor of two, as many bytes: the traced
        activations, loss head and workspace. Negative by no more than the workspace and a twentieth of what passes.

        Args:
            device: where.
            work: the step.
            traced: its peak by origin.
        """
        passing = _passing(traced)
        seen = self._beyond.get(_kind(device, work.precision, work.compile), ())
        alike = [more for more, then in seen if then <= ALIKE * passing and passing <= ALIKE * then]
        least = min(int(LEAST * passing), traced.get("workspace", 0))
        return max(-least, int(statistics.median(alike))) if alike else 0

    def note_memory(self, device: Device, work: Work, traced: Mapping[str, int], measured_bytes: int) -> None:
        """Keep how far the measured peak of a step is from its trace; more than all that passes is something else's."""
        more, passing = measured_bytes - sum(traced.values()), _passing(traced)
        if abs(more) > passing:
            return
        seen = self._beyond.setdefault(_kind(device, work.precision, work.compile), [])
        seen.append((more, passing))
        del seen[:-MOST]
        self._write()

    def _write(self) -> None:
        if self._unread:  # it would lose what was seen before
            return
        temporary = self._file.with_name(f"{self._file.name}.{os.getpid()}")
        with suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps({"schema": SCHEMA, "seen": self._seen, "beyond": self._beyond}))
            temporary.replace(self._file)
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _passing(traced: Mapping[str, int]) -> int:
    return sum(traced.get(origin, 0) for origin in PASSING)


def _kind(device: Device, *way: str) -> str:
    """Of times one for all ways to train in a precision: what was seen of one does not change their order."""
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    return ", ".join((device.name + threads, *way))


def peak_flops(device: Device, precisions: tuple[str, ...]) -> Mapping[str, float]:
    """FLOP/s by precision: the datasheet's; where it says nothing what this machine's default device is measured at."""
    known = dict(device.peak_flops)
    if "bf16" in known:
        known.setdefault("fp16", known["bf16"])
    dtypes = {name: Precision(name).dtype for name in precisions if name not in known}
    return known | {name: measured_matmul_flops(default_device(), dtype, 0.1) for name, dtype in dtypes.items()}


def measured_memory_bytes_per_s(seconds: float = 0.1) -> float:
    """Bytes/s of the host's memory: two vectors of 64 MiB added to a third, measured for about `seconds` after a call.

    What this machine reaches now, other load included, with the threads that torch has.
    """
    one, other, out = (torch.zeros(2**24) for _ in range(3))
    torch.add(one, other, out=out)
    count, start = 0, clock()
    while count == 0 or clock() - start < seconds:
        torch.add(one, other, out=out)
        count += 1
    return count * 3 * one.nbytes / (clock() - start)
