"""Measure peak memory: of the device over a run, and of the CPU allocator over a region of code."""

import functools
import json
import re
import resource
import sys
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

import torch
from torch.profiler import ProfilerActivity, profile

from monograph import compat
from monograph.errors import DiskFull
from monograph.optim import Plane
from monograph.storage.reading import read_input
from monograph.storage.writing import temporary_folder


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory used since the start or the last `reset_peak_memory`, in bytes.

    On CUDA this is the memory that tensors occupied (`torch.cuda.max_memory_allocated`), without
    the caching allocator's slack and the context of some hundred MB, plus the memory that captured
    graphs hold for their replays. The latter counts twice unless the peak is reset after the
    captures. On a CPU this is the process's peak resident set, tensors, code and libraries
    together: VmHWM of /proc/self/status; where there is no /proc, ru_maxrss of getrusage, which
    cannot be reset.
    """
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)  # empty before the first tensor
        held = _held_by_graphs(
            device, stats.get("segment.all.allocated", 0), stats.get("segment.all.freed", 0)
        )
        return torch.cuda.max_memory_allocated(device) + held
    if (peak_bytes := _status_bytes("VmHWM")) is not None:
        return peak_bytes
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def swapped_bytes() -> int:
    """Return how much of this process's memory is swapped out; 0 where the system does not tell."""
    return _status_bytes("VmSwap") or 0


def _status_bytes(name: str) -> int | None:
    """Return an entry of /proc/self/status (proc(5)) in bytes; None if this system has none."""
    with suppress(OSError):
        match = re.search(
            rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE
        )
        return int(match[1]) * 1024 if match else None
    return None


@functools.lru_cache(maxsize=1)  # counting takes milliseconds and is asked for often
def _held_by_graphs(device: torch.device, _allocated: int, _freed: int) -> int:
    """Return the unoccupied bytes in the memory pools of captured graphs.

    The segments' bytes are arguments so that the cached result is dropped when they change.
    """
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == device.index and tuple(segment["segment_pool_id"]) != (0, 0)
    )


def reset_peak_memory(device: torch.device) -> bool:
    """Reset the peak to the present use, and return whether the system permits it.

    On a CPU this writes 5 to /proc/self/clear_refs, see proc(5).
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def ledger(
    planes: Iterable[Plane], planned: Mapping[str, int] | None, device: torch.device
) -> dict[str, dict[str, int]]:
    """Return the bytes of peak memory by origin, as planned and, on a GPU, as measured; unknown
    parts are left out.

    The bytes of the planes are known exactly. The rest of the measured peak is activations, loss
    head and workspace in one number.
    """
    static = {"weights": 0, "gradients": 0, "moments": 0}
    for plane in planes:
        static["weights"] += plane.param.nbytes
        static["gradients"] += plane.grad.nbytes
        static["moments"] += sum(buffer.nbytes for buffer in plane.state.values())
    entries = {"planned": dict(planned) if planned else static}
    if device.type == "cuda":
        rest = peak_memory_bytes(device) - sum(static.values())
        entries["measured"] = {**static, "activations, loss head, workspace": rest}
    return entries


class LiveBytes:
    """A count of the bytes that the CPU's allocator has handed out inside a `with` block, which
    slows the code down.

        with LiveBytes() as live:
            loss(hidden, head).backward()
        live.peak_bytes, live.kept_bytes

    Temporaries inside an operator and buffers of compiled code count, as the allocator sees them.
    Memory allocated before the block never counts, freed inside it or not.

    Attributes:
        peak_bytes: the most bytes at any moment that were allocated inside the block and not yet
            freed.
        kept_bytes: the bytes of these that are still allocated at its end.

    Raises:
        DiskFull: at the end of the block, if the system's folder for temporary files has no room
            for a trace.
    """

    def __init__(self) -> None:
        self.peak_bytes = self.kept_bytes = 0
        self._profile = profile(
            activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
        )

    def __enter__(self) -> Self:
        compat.quiet_profiler()
        self._profile.__enter__()
        compat.parse_no_events(self._profile)
        return self

    def __exit__(self, *raised: object) -> None:
        self._profile.__exit__(*raised)
        if raised[0] is not None:
            return
        live_bytes = dict[int, int]()  # by address
        for address, size_bytes in self._allocations():
            if size_bytes > 0:
                live_bytes[address] = size_bytes
            # torch keeps the allocations of earlier profiles for ever: the size that it gives for a
            # block that existed before may be that of an older block, long freed, at the same
            # address.
            elif live_bytes.pop(address, None) is None:
                continue
            self.kept_bytes += size_bytes
            self.peak_bytes = max(self.peak_bytes, self.kept_bytes)

    def _allocations(self) -> list[tuple[int, int]]:
        """Return (address, signed bytes) in order of time from the trace file, the only public
        source of them.
        """
        with temporary_folder() as folder:
            path = folder / "trace.json"
            self._profile.export_chrome_trace(str(path))
            try:
                events = json.loads(read_input(path, None))["traceEvents"]
            except (OSError, ValueError):  # torch does not report a failed write
                raise DiskFull(
                    f"{tempfile.gettempdir()}: a trace could not be written whole; free some space, or set TMPDIR"
                ) from None
        memory = [
            event
            for event in events
            if event.get("name") == "[memory]" and event["args"]["Device Type"] == 0
        ]
        memory.sort(key=lambda event: (event["ts"], event["args"]["Ev Idx"]))
        return [(event["args"]["Addr"], event["args"]["Bytes"]) for event in memory]
