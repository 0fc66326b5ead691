"""Run: pytest tests/pretended_gpu/test_launches.py (what a launch may ask for, and what cubins say
of their kernels).

In the environment that `python tests/pretended_gpu/environment.py make` makes, under its `run`.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from pretended_gpu import card
from pretended_gpu.card import Grid, Launch
from pretended_gpu.cuda import OWN_SHARED, Dim3, call, cubin, launch, made, refused


@pytest.mark.parametrize(
    ("grid", "block", "shared", "error"),
    [
        ((0, 1, 1), (1, 1, 1), 0, 9),
        ((1, 1, 0), (1, 1, 1), 0, 9),
        ((2**31, 1, 1), (1, 1, 1), 0, 9),
        ((1, 65536, 1), (1, 1, 1), 0, 9),
        ((1, 1, 65536), (1, 1, 1), 0, 9),
        ((2**31 - 1, 65535, 65535), (1, 1, 1), 0, 0),
        ((1, 1, 1), (0, 1, 1), 0, 9),
        ((1, 1, 1), (1025, 1, 1), 0, 9),
        ((1, 1, 1), (32, 33, 1), 0, 9),
        ((1, 1, 1), (1, 1, 65), 0, 9),
        ((1, 1, 1), (32, 1, 32), 0, 0),
        ((1, 1, 1), (1, 1, 1), 49153, 1),
        ((1, 1, 1), (1, 1, 1), 49152, 0),
    ],
)
def test_what_a_launch_may_ask_for(
    grid: tuple[int, int, int], block: tuple[int, int, int], shared: int, error: int
) -> None:
    before, launched = len(card.faults()), card.counts().launches
    with card.logged() as log:
        assert launch(grid, block, shared) == error
    faults = card.faults()[before:]
    assert [(fault.rule, fault.error) for fault in faults] == ([("launch", error)] if error else [])
    threads = block[0] * block[1] * block[2]
    expected = Launch("torch", "?", Grid(*grid), threads, shared, 0, 0, "-")
    assert log.records == (faults if error else [expected])
    assert card.counts().launches - launched == (not error)
    assert launch() == 0  # which leaves an earlier error
    assert card.driver.cudaGetLastError() == error and card.driver.cudaGetLastError() == 0


def test_a_kernel_of_a_library_has_its_name_and_may_ask_for_more_shared_memory() -> None:
    most = ctypes.c_int()
    # A block's, if the kernel asks.
    assert call("cudaDeviceGetAttribute", ctypes.byref(most), 97, 0) == 0
    kernel, name = 0x1234, ctypes.create_string_buffer(b"big")
    call("__cudaRegisterFunction", 0, kernel, 0, name, 0, 0, 0, 0, 0, 0)
    arguments = (kernel, Dim3(1, 1, 1), Dim3(1, 1, 1), 0, most.value, 0)
    refused("launch", 1, "cudaLaunchKernel", *arguments)
    assert call("cudaFuncSetAttribute", kernel, 8, most.value + 1) == 1
    assert call("cudaFuncSetAttribute", kernel, 8, most.value) == 0
    with card.logged() as log:
        assert call("cudaLaunchKernel", *arguments) == 0
    assert [each.name for each in log.of(Launch)] == ["big"]


@pytest.fixture
def probe(tmp_path: Path) -> bytes:
    return cubin(tmp_path)


def attributes(function: int) -> list[int]:
    """Return registers, bytes of shared memory, most threads."""
    value = ctypes.c_int()
    return [
        call("cuFuncGetAttribute", ctypes.byref(value), each, function) or value.value
        for each in (4, 1, 0)
    ]


def driver_launch(function: int, threads: int, shared: int = 0) -> tuple[object, ...]:
    return ("cuLaunchKernel", function, 1, 1, 1, threads, 1, 1, shared, 0, 0, 0)


def test_a_cubin_says_what_its_kernel_needs(probe: bytes, tmp_path: Path) -> None:
    path = tmp_path / "probe.cubin"
    module = made("cuModuleLoad", str(path).encode())
    function = made("cuModuleGetFunction", module, b"probe")
    assert call("cuModuleGetFunction", ctypes.byref(ctypes.c_void_p()), module, b"prob") == 500
    few, own, most = attributes(function)
    assert 0 < few < 32 and own == OWN_SHARED and most == 1024
    with card.logged() as log:
        assert call(*driver_launch(function, 1024)) == 0
    assert log.records == [Launch("triton", "probe", Grid(1, 1, 1), 1024, 0, 0, 0, "-")]
    # The number of registers is the second word of attribute 0x2f.
    at = probe.index(b"\x04\x2f\x08\x00") + 8
    greedy = probe[:at] + (72).to_bytes(4, "little") + probe[at + 4 :]
    module = made("cuModuleLoadData", greedy)
    function = made("cuModuleGetFunction", module, b"probe")
    assert attributes(function) == [72, OWN_SHARED, 896]
    refused("launch", 701, *driver_launch(function, 928))
    refused("launch", 1, *driver_launch(function, 1025))
    assert call(*driver_launch(function, 896)) == 0
    assert card.driver.cudaGetLastError() == 0  # which does not know of the driver's errors


def test_a_kernels_own_shared_memory_counts(probe: bytes) -> None:
    function = made("cuModuleGetFunction", made("cuModuleLoadData", probe), b"probe")
    most = ctypes.c_int()
    assert call("cudaDeviceGetAttribute", ctypes.byref(most), 97, 0) == 0
    refused("launch", 1, *driver_launch(function, 1, 49152 - OWN_SHARED + 1))
    assert call(*driver_launch(function, 1, 49152 - OWN_SHARED)) == 0
    assert call("cuFuncSetAttribute", function, 8, most.value - OWN_SHARED + 1) == 1
    assert call("cuFuncSetAttribute", function, 8, most.value - OWN_SHARED) == 0
    assert call(*driver_launch(function, 1, most.value - OWN_SHARED)) == 0
    refused("launch", 1, *driver_launch(function, 1, most.value - OWN_SHARED + 1))
