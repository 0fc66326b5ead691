"""Shared parts of the benchmarks: a quiet process, interleaved rounds, medians, a table, and the
machine in the JSON.

Import it before torch: how OpenMP's threads wait is read when torch is loaded.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
# A thread that spins while it waits takes the core from the one that it waits for: on a busy
# machine 20 times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces itself on stderr
# A benchmark measures the source tree that contains it, installed or not.
sys.path.insert(0, str(ROOT / "src"))

import torch  # noqa: E402
from torch.profiler import ProfilerActivity, profile, record_function  # noqa: E402

from monograph import __version__  # noqa: E402
from monograph.device import clock, describe, synchronize  # noqa: E402
from monograph.profiling.memory import LiveBytes  # noqa: E402

# ── arguments and results ─────────────────────────────────────────────────────────────────────────


def arguments(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the arguments that every script takes."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the numbers there as JSON")
    parser.add_argument(
        "--smoke", action="store_true", help="tiny sizes, seconds: shows that the script works"
    )
    return parser


def machine() -> dict[str, Any]:
    """Return where the numbers are measured: device, versions, threads, and how busy the machine
    was before.
    """
    # The driver of tests/pretended_gpu.
    device, pretended = describe(), hasattr(ctypes.CDLL(None), "card_log")
    return {
        "device": f"pretended {device.name}" if pretended else device.name,
        "type": "pretended" if pretended else device.type,
        "cores": device.cores,
        "memory_bytes": device.memory_bytes,
        "driver": device.driver,
        "threads": torch.get_num_threads(),
        "omp_wait_policy": os.environ["OMP_WAIT_POLICY"],
        "load_average": os.getloadavg()[0],
        "monograph": __version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "system": platform.platform(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def result(
    name: str, settings: Mapping[str, Any], cases: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Return a benchmark's JSON object without its `cases`, schema `monograph-benchmark-NAME-1`."""
    return {
        "schema": f"monograph-benchmark-{name}-1",
        "machine": machine(),
        "settings": dict(settings),
        "cases": list(cases),
    }


def write(path: Path | None, found: Mapping[str, Any]) -> None:
    """Write the JSON if a file was asked for; a stop at any moment leaves the old file or the new
    one.
    """
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")
    unfinished.replace(path)


def print_machine(found: Mapping[str, Any]) -> None:
    """Print one line about the machine that measured the table below it."""
    at = found["machine"]
    print(
        f"{at['device']}, {at['cores']} cores, {at['threads']} threads, load {at['load_average']:.1f} before; "
        f"torch {at['torch']}, Python {at['python']}, monograph {at['monograph']}"
    )


def print_table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print columns: the first one left-aligned, numbers right-aligned."""
    lines = [list(headers), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(headers))]
    for line in lines:
        cells = [
            line[0].ljust(widths[0]),
            *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True)),
        ]
        print("  ".join(cells).rstrip())


# ── time ──────────────────────────────────────────────────────────────────────────────────────────


class Timing(NamedTuple):
    """Seconds of one call: wall time, and CPU time of all threads (which does not count other
    programs).
    """

    wall_s: float
    cpu_s: float


def timed(run: Callable[[], object], device: torch.device) -> Timing:
    """Time one call, until the device has finished."""
    synchronize(device)
    wall, cpu = clock(), time.process_time()
    run()
    synchronize(device)
    return Timing(clock() - wall, time.process_time() - cpu)


def interleaved(
    cases: Mapping[str, Callable[[], object]], rounds: int, device: torch.device
) -> dict[str, list[Timing]]:
    """Time every case once per round, in reversed order every other round, so that disturbances
    affect all alike.

    Warm the cases before.
    """
    times: dict[str, list[Timing]] = {name: [] for name in cases}
    for name in turns(cases, rounds):
        times[name].append(timed(cases[name], device))
    return times


def turns(names: Iterable[str], rounds: int) -> list[str]:
    """Yield every name once per round, in reversed order every other round: a b c, c b a, a b c."""
    there = list(names)
    return [name for index in range(rounds) for name in there[:: 1 if index % 2 == 0 else -1]]


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return median, lowest, highest, and all values in order of measurement."""
    return {
        "median": statistics.median(values),
        "low": min(values),
        "high": max(values),
        "values": list(values),
    }


def ratios(above: Sequence[Timing], below: Sequence[Timing]) -> dict[str, dict[str, Any]]:
    """Return above / below round by round, in wall time and in CPU time."""
    pairs = list(zip(above, below, strict=True))
    return {
        "wall": spread([a.wall_s / b.wall_s for a, b in pairs]),
        "cpu": spread([a.cpu_s / b.cpu_s for a, b in pairs]),
    }


def shown(values: Mapping[str, Any], digits: int = 2) -> str:
    """Return `1.18 (1.15-1.24)`: the median and the range."""
    return f"{values['median']:.{digits}f} ({values['low']:.{digits}f}-{values['high']:.{digits}f})"


# ── the command line ──────────────────────────────────────────────────────────────────────────────


def called(home: Path, *arguments: str) -> str:
    """Return the output of `monograph ARGUMENTS` in a folder that is also its home."""
    environment = os.environ | {
        "HOME": str(home),
        "PYTHONPATH": os.pathsep.join(
            [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
    }
    done = subprocess.run(
        [sys.executable, "-m", "monograph", *arguments],
        cwd=home, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"monograph {' '.join(arguments)}: exit {done.returncode}\n{done.stderr}")
    return done.stdout


def command(home: Path, *arguments: str) -> tuple[dict[str, Any], float]:
    """Return the object that `monograph ARGUMENTS --json` prints last, and the seconds it took."""
    began = clock()
    found: dict[str, Any] = json.loads(called(home, *arguments, "--json").splitlines()[-1])
    return found, clock() - began


# ── memory and waiting ────────────────────────────────────────────────────────────────────────────


def live_peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Return the most bytes that one call holds at any moment beyond those allocated before it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with LiveBytes() as live:
        run()
    return live.peak_bytes


_MARK = "monograph: counted region"
_WAITING_CALLS = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpy",
)
_TO_HOST = "Memcpy DtoH"


class HostSyncs:
    """Counts, inside a `with` block, the events that make the host wait for the GPU or copy data
    from it to the host.

    `counts` maps each kind to how often it happened: CUDA runtime calls that wait, and copies from
    device to host (which wait too, or will once their value is used). Without a GPU it is None,
    since nothing can wait.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.counts: dict[str, int] | None = None

    def __enter__(self) -> HostSyncs:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self._profile = profile(
                activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True
            )
            self._profile.__enter__()
            self._mark = record_function(_MARK)
            self._mark.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.device.type != "cuda":
            return
        self._mark.__exit__(kind, error, trace)
        torch.cuda.synchronize(self.device)
        self._profile.__exit__(kind, error, trace)
        if error is not None:
            return
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            self._profile.export_chrome_trace(str(path))
            self.counts = count_waits(json.loads(path.read_bytes())["traceEvents"])


def count_waits(events: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Count waiting runtime calls inside the marked region of a profiler trace, and all its copies
    from device to host.

    The copies are the GPU's own events, which may lie after the region that launched them; nothing
    outside it copies.
    """
    mark = next(
        event
        for event in events
        if event.get("name") == _MARK and event.get("cat") == "user_annotation"
    )
    begin, end = mark["ts"], mark["ts"] + mark["dur"]
    counts: dict[str, int] = {}
    for event in events:
        name = str(event.get("name"))
        waits = (
            event.get("cat") == "cuda_runtime"
            and name in _WAITING_CALLS
            and begin <= event["ts"] <= end
        )
        if waits or (event.get("cat") == "gpu_memcpy" and name.startswith(_TO_HOST)):
            counts[name] = counts.get(name, 0) + 1
    return counts
