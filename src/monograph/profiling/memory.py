"""Measure peak memory: of a device in a run, and of the CPU's allocator in a block of code."""

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
    """Return the peak of used memory since the start or the last `reset_peak_memory`, in bytes.

    On CUDA, this is the memory that tensors occupied (`torch.cuda.max_memory_allocated`), plus the
    memory that captured graphs keep for their replays. It does not include memory that the allocator
    caches, nor the CUDA context, which takes some hundred MB. While a graph is captured, its memory is
    occupied by tensors. So it is counted twice, unless the peak is reset after the captures.

    On a CPU, this is the process's peak resident set: tensors, code and libraries. It is VmHWM of
    /proc/self/status. On a system without /proc it is ru_maxrss of getrusage, which cannot be
    reset.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) + unused_graph_bytes(device)
    peak_bytes = _status_bytes("VmHWM")
    if peak_bytes is not None:
        return peak_bytes
    # In KiB, except on macOS, where it is in bytes.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def unused_graph_bytes(device: torch.device) -> int:
    """Return the bytes that captured graphs keep for their replays and no tensor occupies; 0 on a CPU.

    A graph's memory consists of whole segments: of 2 MiB for tensors of less than 1 MiB, and of 20 MiB for
    tensors of less than 10 MiB. `monograph plan` does not count what is left over in segments.
    """
    if device.type != "cuda":
        return 0
    statistics = torch.cuda.memory_stats(device)  # empty before the first tensor
    return _free_bytes_of_graphs(
        device,
        statistics.get("segment.all.allocated", 0),
        statistics.get("segment.all.freed", 0),
    )


def swapped_bytes() -> int:
    """Return the bytes of this process that are swapped out; 0 if the system does not tell."""
    return _status_bytes("VmSwap") or 0


def _status_bytes(name: str) -> int | None:
    """Return an entry of /proc/self/status (proc(5)) in bytes; None if there is no such entry."""
    with suppress(OSError):
        status = Path("/proc/self/status").read_text()
        match = re.search(rf"^{name}:\s+(\d+) kB", status, re.MULTILINE)
        return int(match[1]) * 1024 if match else None
    return None


# The result is cached, because counting takes milliseconds and this is called often.
@functools.lru_cache(maxsize=1)
def _free_bytes_of_graphs(device: torch.device, _allocated: int, _freed: int) -> int:
    """Return the bytes in the memory pools of captured graphs that no tensor occupies.

    Pool (0, 0) is the allocator's ordinary one; each graph has another pool.

    The bytes of segments that were allocated and freed so far are arguments only so that the cached result
    is not used after they have changed.
    """
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == device.index and tuple(segment["segment_pool_id"]) != (0, 0)
    )


def reset_peak_memory(device: torch.device) -> bool:
    """Reset the peak to the memory in use now, and return whether the system permits this."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        # 5 resets VmHWM; see proc(5).
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def ledger(
    planes: Iterable[Plane], planned: Mapping[str, int] | None, device: torch.device
) -> dict[str, dict[str, int]]:
    """Return the bytes of peak memory by origin.

    Args:
        planes: the planes, which are the flat buffers of parameters, gradients and moments
            (`monograph.optim.Plane`).
        planned: the planned bytes by origin; None: there is no plan, and the bytes of planes are
            returned as planned.
        device: the device that computes.

    Returns:
        "planned": the planned bytes by origin.
        "measured", on a GPU only: the bytes of planes by origin, and the rest of the measured peak,
        which is for activations, the loss head and workspace.
    """
    plane_bytes = {"weights": 0, "gradients": 0, "moments": 0}
    for plane in planes:
        plane_bytes["weights"] += plane.param.nbytes
        plane_bytes["gradients"] += plane.grad.nbytes
        plane_bytes["moments"] += sum(buffer.nbytes for buffer in plane.state.values())
    entries = {"planned": dict(planned) if planned else plane_bytes}
    if device.type == "cuda":
        rest = peak_memory_bytes(device) - sum(plane_bytes.values())
        entries["measured"] = {**plane_bytes, "activations, loss head, workspace": rest}
    return entries


class LiveBytes:
    """Counts the bytes that the CPU's allocator allocates inside a `with` block. The block runs slower.

        with LiveBytes() as live:
            loss(hidden, head).backward()
        live.peak_bytes, live.kept_bytes

    Temporaries inside an operator and buffers of compiled code are counted as well. Memory that was
    allocated before the block is not counted, even if it is freed in the block.

    Attributes:
        peak_bytes: the peak of bytes that were allocated in the block and not freed yet.
        kept_bytes: the bytes that were allocated in the block and are not freed at its end.

    Raises:
        DiskFull: at the end of the block, if the system's folder for temporary files has no space
            for a trace.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self.kept_bytes = 0
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
        live_addresses = set[int]()
        for address, size_bytes in self._allocations():
            if size_bytes > 0:
                live_addresses.add(address)
            elif address in live_addresses:
                live_addresses.remove(address)
            else:
                # The memory was allocated before the `with` block. The size of this event must not be used:
                # torch keeps the allocations of earlier profiles, and may give the size of an older
                # allocation at the same address.
                continue
            self.kept_bytes += size_bytes
            self.peak_bytes = max(self.peak_bytes, self.kept_bytes)

    def _allocations(self) -> list[tuple[int, int]]:
        """Return (address, bytes) of allocations in order of time; bytes are negative if freed."""
        # A trace file is the only public source of single allocations.
        with temporary_folder() as folder:
            path = folder / "trace.json"
            self._profile.export_chrome_trace(str(path))
            try:
                events = json.loads(read_input(path, most_bytes=None))["traceEvents"]
            except (OSError, ValueError):
                # torch does not report a failed write, so it is noticed only here.
                raise DiskFull(
                    f"{tempfile.gettempdir()}: a trace could not be written whole; free some space, or set TMPDIR"
                ) from None
        # Device type 0 is the CPU.
        on_cpu = [
            event
            for event in events
            if event.get("name") == "[memory]" and event["args"]["Device Type"] == 0
        ]
        on_cpu.sort(key=lambda event: (event["ts"], event["args"]["Ev Idx"]))
        return [(event["args"]["Addr"], event["args"]["Bytes"]) for event in on_cpu]
