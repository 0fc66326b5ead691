"""The memory of this process."""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path
from typing import NamedTuple


def resident_bytes() -> int:
    """The memory in use, without what the allocator has for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class MemoryInUse(NamedTuple):
    """What objects and arrays take. The holes between them do not count, which grow with what happens to
    coincide.
    """

    malloc_bytes: int  # of glibc's allocator, which tensors use
    python_blocks: int  # of Python's own allocator, for small objects


class _Mallinfo2(ctypes.Structure):
    # The fields of glibc's `struct mallinfo2`, in their order.
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def memory_in_use() -> MemoryInUse:
    """The memory that is allocated and not freed."""
    gc.collect()
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Mallinfo2
    found = mallinfo2()
    return MemoryInUse(found.uordblks + found.hblkhd, sys.getallocatedblocks())
