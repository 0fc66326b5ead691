"""Run: pytest tests/test_device.py."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import pytest
import torch

from monograph import device
from monograph.errors import UsageError

CPU = torch.device("cpu")


def test_a_cpu_is_described() -> None:
    found = device.describe(CPU)
    assert found.type == "cpu"
    assert 1 <= found.cores <= len(os.sched_getaffinity(0))
    assert 0 < found.free_memory_bytes <= found.memory_bytes
    assert found.peak_flops == {}
    assert found.summary.endswith("GiB, no GPU")


def test_bf16_is_found_as_torch_finds_it() -> None:
    if not hasattr(torch.cpu, "get_capabilities"):
        pytest.skip("this torch does not say what the CPU can do")
    can = torch.cpu.get_capabilities()
    expected = bool(can.get("avx512_bf16") or can.get("amx_bf16") or can.get("bf16"))
    assert device.describe(CPU).has_bf16 == expected


def fake_system(monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> None:
    monkeypatch.setattr(device, "_read", lambda path: files.get(path, ""))


def test_a_containers_limits_bound_cores_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/meminfo": "MemTotal: 99 kB\nMemAvailable: 3145728 kB\n",
        "/sys/fs/cgroup/cpu.max": "100000 100000",
        "/sys/fs/cgroup/memory.max": str(2**31),
        "/sys/fs/cgroup/memory.current": str(2**30),
    }
    fake_system(monkeypatch, files)
    found = device.describe(CPU)
    assert (found.cores, found.memory_bytes, found.free_memory_bytes) == (1, 2**31, 2**30)
    fake_system(
        monkeypatch,
        {**files, "/sys/fs/cgroup/cpu.max": "max 100000", "/sys/fs/cgroup/memory.max": "max"},
    )
    found = device.describe(CPU)
    assert found.cores == len(os.sched_getaffinity(0))
    assert found.free_memory_bytes == 3 * 2**30


def test_an_arm_cpu_with_bf16_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_system(monkeypatch, {"/proc/cpuinfo": "processor\t: 0\nFeatures\t: fp asimd bf16 i8mm\n"})
    assert device.describe(CPU).has_bf16
    fake_system(monkeypatch, {"/proc/cpuinfo": "processor\t: 0\nflags\t\t: sse avx avx512f\n"})
    assert not device.describe(CPU).has_bf16


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 2024",
            "535.183.01",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build",
            "580.65.06",
        ),
        ("", None),
    ],
)
def test_the_drivers_version_is_read(
    monkeypatch: pytest.MonkeyPatch, text: str, version: str | None
) -> None:
    fake_system(monkeypatch, {"/proc/driver/nvidia/version": text})
    assert device._nvidia_driver() == version


def test_summary_names_a_card_and_its_driver() -> None:
    card = device.Device(
        "NVIDIA H200", "cuda", 143_771 * 2**20, 2**30, 16, True, driver="580.65.06"
    )
    assert card.summary == "NVIDIA H200, 140 GiB, driver 580.65.06, 16 cores"


def test_measured_rate_is_operations_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that each product moves on by 0.05 s the rate is known, whatever this machine
    does.
    """
    now, products = [0.0], []

    def mm(left: torch.Tensor, right: torch.Tensor) -> None:
        now[0] += 0.05
        products.append(left.dtype)

    monkeypatch.setattr(device, "clock", lambda: now[0])
    monkeypatch.setattr(torch, "mm", mm)
    assert device.measured_matmul_flops(CPU, torch.bfloat16, seconds=0.3) == pytest.approx(
        2 * 1024**3 / 0.05
    )
    # One to warm up, one to learn how long it takes, six for 0.3 s.
    assert products == [torch.bfloat16] * 8


def test_measured_rate_of_this_machine_is_plausible() -> None:
    assert 1e8 < device.measured_matmul_flops(CPU, torch.float32, seconds=0.01) < 1e16


def test_a_missing_compiler_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no-such-compiler is not on the PATH" in str(device.compiler_obstacle())


def test_missing_python_headers_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "c++"
    compiler.touch(mode=0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert "Python.h is missing" in str(device.compiler_obstacle())
    (tmp_path / "Python.h").touch()
    assert device.compiler_obstacle() is None


@pytest.mark.gpu
def test_a_gpu_is_described_and_measured() -> None:
    card = device.default_device()
    found = device.describe(card)
    assert card == torch.zeros(1, device=card).device
    assert found.type == "cuda"
    assert found.free_memory_bytes <= found.memory_bytes
    assert found.driver is not None
    rate = device.measured_matmul_flops(card, torch.bfloat16)
    assert rate <= 1.05 * found.peak_flops.get("bf16", float("inf"))


def test_a_path_with_a_space_is_an_obstacle_that_says_so(monkeypatch, tmp_path):
    folder = tmp_path / "my models" / "torch"
    monkeypatch.setattr(device.torch, "__file__", str(folder / "__init__.py"))
    obstacle = device.compiler_obstacle()
    assert obstacle is not None and "space" in obstacle and str(folder) in obstacle


@pytest.mark.parametrize(("capability", "archs", "fits"), [
    ((7, 0), ["sm_75", "sm_80", "sm_90", "compute_120"], False),
    ((7, 5), ["sm_75", "sm_80", "sm_90", "compute_120"], True),
    ((10, 0), ["sm_75", "sm_90a"], True),
    ((9, 4), ["gfx90a", "gfx942"], True),
    ((9, 0), [], True),
])  # fmt: skip
def test_a_card_without_kernels_is_refused_before_it_is_used(
    capability: tuple[int, int], archs: list[str], fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: archs)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla V100")
    if fits:
        assert device.default_device() == torch.device("cuda", 1)
    else:
        with pytest.raises(
            UsageError, match=r"^Tesla V100: .* 7\.0, .* from 7\.5 on: .*CUDA_VISIBLE_DEVICES= "
        ):
            device.default_device()
