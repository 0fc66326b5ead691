"""CUDA's functions by ctypes, and what the driver's tests say about them."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path
from typing import Any

from pretended_gpu import card

NON_BLOCKING = 1  # flag of a stream, to which the default stream is nothing
NO_TIMING = 2  # flag of an event
GLOBAL, THREAD_LOCAL, RELAXED = range(3)  # modes of a capture
TO_DEVICE = 1
IN_CAPTURE = "in a capture"


class Dim3(ctypes.Structure):
    _fields_ = [("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint)]


def call(name: str, *arguments: Any) -> int:
    """Return the error of a call. Integers are passed as 64 bits; a callee that wants fewer takes
    the lower.
    """
    passed = [ctypes.c_void_p(each) if isinstance(each, int) else each for each in arguments]
    error: int = getattr(card.driver, name)(*passed)
    return error


def made(name: str, *arguments: Any) -> int:
    """Return the handle or address that a call writes to where its first argument points."""
    handle = ctypes.c_void_p()
    assert call(name, ctypes.byref(handle), *arguments) == 0
    return handle.value or 0


def stream(flags: int = NON_BLOCKING) -> int:
    return made("cudaStreamCreateWithFlags", flags)


def event(flags: int = NO_TIMING) -> int:
    return made("cudaEventCreateWithFlags", flags)


def recorded(on: int) -> int:
    new = event()
    assert call("cudaEventRecord", new, on) == 0
    return new


def memory(size: int = 4096) -> int:
    return made("cudaMalloc", size)


def pinned(size: int = 4096) -> int:
    return made("cudaHostAlloc", size, 0)


def work(on: int) -> None:
    """Give a stream something to do."""
    card.launch("test", "work", on)


def launch(
    grid: tuple[int, int, int] = (1, 1, 1), block: tuple[int, int, int] = (1, 1, 1), shared: int = 0
) -> int:
    """Return the error of a launch on the default stream of a kernel that has not registered."""
    return call("cudaLaunchKernel", 8, Dim3(*grid), Dim3(*block), 0, shared, 0)


def refused(rule: str, error: int, name: str, *arguments: Any) -> None:
    """Make a call that breaks one rule: it returns this error, and there is one fault more, which
    says so.
    """
    before = len(card.faults())
    assert call(name, *arguments) == error
    assert [(fault.rule, fault.error) for fault in card.faults()[before:]] == [(rule, error)]


PTX = """
.version 8.7
.target sm_{sm}
.address_size 64
.visible .entry probe(.param .u64 first, .param .u32 number, .param .u64 second)
{{
    .reg .u64 %address;
    .reg .u32 %value;
    .shared .align 4 .b8 own[2048];
    ld.param.u64 %address, [first];
    ld.param.u32 %value, [number];
    st.shared.u32 [own], %value;
    bar.sync 0;
    ld.shared.u32 %value, [own + 4];
    st.global.u32 [%address], %value;
    ld.param.u64 %address, [second];
    st.global.u32 [%address], %value;
    ret;
}}
"""
OWN_SHARED = 2048  # bytes, in the PTX above


def cubin(folder: Path) -> bytes:
    """Return a kernel `probe` of two pointers and a number between them, compiled by Triton's
    assembler.
    """
    import triton

    assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    sm = os.environ["PRETENDED_SM"]
    source, target = folder / "probe.ptx", folder / "probe.cubin"
    source.write_text(PTX.format(sm=sm))
    # The compiler needs no driver.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    subprocess.run([assembler, f"-arch=sm_{sm}", source, "-o", target], check=True, env=environment)
    return target.read_bytes()
