"""Describe this machine: GPU or CPU, memory, datasheet rates, compiler, and the clock for timing."""

import os
import re
import shutil
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from monograph.cards import card_named, card_rates
from monograph.errors import UsageError

clock = time.perf_counter  # monotonic seconds; the wall clock may jump


@dataclass(frozen=True)
class Device:
    """A compute device: this machine's, or a card that the planner plans for.

    Attributes:
        name: the card's name as its driver gives it, or the CPU's model name.
        type: "cuda" or "cpu".
        memory_bytes: the card's memory, or the host memory that this process may use, within its
            cgroup's limits.
        free_memory_bytes: the part of `memory_bytes` that is free now; all of it if the system, such
            as macOS, does not say.
        peak_flops: datasheet FLOP/s by precision: "fp32", "tf32", "bf16", "fp8", and "fp16" if its
            rate differs from bf16's. Empty for a card that is not in the table, for a MIG slice and
            for a CPU; see `measured_matmul_flops`.
        bandwidth_bytes_per_s: datasheet memory bandwidth; None if unknown.
        cores: CPU cores that this process may use (within its affinity and cgroup quota).
        has_bf16: whether bf16 matrix products run in hardware.
        has_fp8: whether fp8 matrix products run in hardware.
        driver: the NVIDIA kernel driver's version; None if there is none.
        link_bytes_per_s: datasheet rate between card and host, one way, None if unknown.
    """

    name: str
    type: str
    memory_bytes: int
    free_memory_bytes: int
    cores: int = field(default_factory=lambda: _cores())  # a lambda, as `_cores` is defined below
    has_bf16: bool = False
    peak_flops: Mapping[str, float] = field(default_factory=dict)
    bandwidth_bytes_per_s: float | None = None
    driver: str | None = None
    has_fp8: bool = False
    link_bytes_per_s: float | None = None

    @property
    def summary(self) -> str:
        """Return one line for the first screen, such as "2 cores, 24 GiB, no GPU"."""
        cores = f"{self.cores} core{'s' if self.cores != 1 else ''}"
        memory = f"{self.memory_bytes / 2**30:.0f} GiB"
        if self.type == "cpu":
            return f"{cores}, {memory}, no GPU"
        driver = f", driver {self.driver}" if self.driver else ""
        return f"{self.name}, {memory}{driver}, {cores}"


def card_device(name: str) -> Device:
    """Return a card of `CARDS` as a device, with its datasheet's values and all of its memory free.

    Args:
        name: the card's name, in any usual spelling.

    Raises:
        UsageError: there is no such card.
    """
    card = card_named(name)
    flops = card.rates.flops
    return Device(
        name=card.name,
        type="cuda",
        memory_bytes=card.memory_bytes,
        free_memory_bytes=card.memory_bytes,
        has_bf16="bf16" in flops,
        has_fp8="fp8" in flops,
        peak_flops=flops,
        bandwidth_bytes_per_s=card.rates.bandwidth_bytes_per_s,
        link_bytes_per_s=card.link_bytes_per_s,
    )


def default_device() -> torch.device:
    """Return this process's current CUDA device with its index, or the CPU if there is no GPU.

    Raises:
        UsageError: the GPU is older than any that this build of torch has kernels for.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", torch.cuda.current_device())
    major, minor = torch.cuda.get_device_capability(device)
    # Names such as "sm_80", for compute capability 8.0; other entries of the list are no machine code.
    matches = [re.match(r"sm_(\d+)", arch) for arch in torch.cuda.get_arch_list()]
    oldest = min((int(match[1]) for match in matches if match), default=0)
    if 10 * major + minor < oldest:
        raise UsageError(
            f"{torch.cuda.get_device_name(device)}: its compute capability is {major}.{minor}, and this build of torch "
            f"has kernels from {oldest / 10} on: install another build, or set CUDA_VISIBLE_DEVICES= to use the CPU"
        )
    return device


def describe(device: torch.device | None = None) -> Device:
    """Describe a device, without measuring anything. None: `default_device()`."""
    device = default_device() if device is None else device
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        capability = torch.cuda.get_device_capability(device)
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        rates = card_rates(name)
        return Device(
            name=name,
            type="cuda",
            memory_bytes=total_bytes,
            free_memory_bytes=free_bytes,
            has_bf16=capability >= (8, 0),  # Ampere
            peak_flops=rates.flops if rates else {},
            bandwidth_bytes_per_s=rates.bandwidth_bytes_per_s if rates else None,
            driver=_nvidia_driver(),
            has_fp8=capability >= (8, 9),  # Ada
        )
    name, instructions = cpu_model()
    total_bytes, free_bytes = _host_memory()
    return Device(
        name=name,
        type="cpu",
        memory_bytes=total_bytes,
        free_memory_bytes=free_bytes,
        has_bf16=not instructions.isdisjoint({"avx512_bf16", "amx_bf16", "bf16"}),
    )


def synchronize(device: torch.device) -> None:
    """Wait until all work queued on `device` is done; a CPU has no queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def tensor_on(
    values: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Return numbers as a tensor on `device`, without waiting for the copy."""
    # The copy is from pinned memory, because the host waits for a copy from other memory.
    on_host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return on_host.to(device, non_blocking=True)


def measured_matmul_flops(device: torch.device, dtype: torch.dtype, seconds: float = 0.3) -> float:
    """Measure the FLOP/s of n x n matrix products (2 n³ operations each) for about `seconds`, after
    a warm-up call.

    n is 8192 on a GPU and 1024 on a CPU. Other load on the machine lowers the result.
    """
    n = 8192 if device.type == "cuda" else 1024
    generator = torch.Generator(device=device).manual_seed(0)
    left = torch.randn(n, n, device=device, generator=generator).to(dtype)
    right = torch.randn(n, n, device=device, generator=generator).to(dtype)

    def seconds_for(count: int) -> float:
        """Return the seconds that `count` products take."""
        synchronize(device)
        start = clock()
        for _ in range(count):
            torch.mm(left, right)
        synchronize(device)
        return clock() - start

    seconds_for(1)  # the warm-up
    count = max(1, round(seconds / seconds_for(1)))
    return 2 * n**3 * count / seconds_for(count)


def compiler_obstacle() -> str | None:
    """Return why torch.compile cannot build CPU kernels here, and what to do; None if it can.

    Inductor calls the compiler that CXX names (g++ by default, clang++ on macOS) and includes
    Python.h.
    """
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        return f"no C++ compiler: {compiler} is not on the PATH (install one, or name it in CXX)"
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").exists():
        return f"no Python headers: {headers}/Python.h is missing (install python{sys.version_info.major}-dev)"
    torch_folder = Path(torch.__file__).parent
    if " " in str(torch_folder):
        # torch 2.13 passes -L to the linker without quotes.
        return f"torch cannot call the compiler from a path with a space: move {torch_folder} to one without"
    return None


def _cores() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    # The file has the CPU time that the cgroup may use in a period, or the word "max".
    quota_us, _, period_us = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    if quota_us.isdigit():
        cores = min(cores, max(1, int(quota_us) // int(period_us)))
    return cores


def _host_memory() -> tuple[int, int]:
    """Return the total and the available bytes of memory: of the host, or of the cgroup if it has less."""
    total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = re.search(r"^MemAvailable:\s+(\d+) kB", _read("/proc/meminfo"), re.MULTILINE)
    free_bytes = int(available[1]) * 1024 if available else total_bytes
    limit = _read("/sys/fs/cgroup/memory.max")
    used = _read("/sys/fs/cgroup/memory.current")
    if limit.isdigit() and used.isdigit():
        total_bytes = min(total_bytes, int(limit))
        free_bytes = min(free_bytes, max(0, int(limit) - int(used)))
    return total_bytes, free_bytes


def cpu_model() -> tuple[str, frozenset[str]]:
    """Return the CPU's model name and instruction-set flags, from /proc/cpuinfo.

    The flags are in the line `flags` on x86 and `Features` on ARM. The file is read because torch's
    function for this, `torch.cpu.get_capabilities`, is not in torch 2.11.
    """
    text = _read("/proc/cpuinfo")
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    name = model[1].strip() if model else "CPU"
    return name, frozenset(flags[1].split() if flags else ())


def _nvidia_driver() -> str | None:
    """Return the version of the NVIDIA kernel driver; None if there is none."""
    # A line such as "... Kernel Module  535.183.01 ...", or "... Kernel Module for x86_64  580.65.06 ..."
    match = re.search(
        r"Kernel Module\D*?(?:for \S+\s+)?(\d+\.\d+[.\d]*)", _read("/proc/driver/nvidia/version")
    )
    return match[1] if match else None


def _read(path: str) -> str:
    """Return the text of a system file, or "" if this system has no such file."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
