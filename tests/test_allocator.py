"""Run: pytest tests/test_allocator.py (freed memory stays with the process, unless the user says
otherwise).
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

# Takes and gives back 16 MB a few times, as a step's tensors do, and prints how many pages had to
# be fetched.
TAKES_AND_GIVES = """
import ctypes, resource, sys
from monograph.allocator import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
def go():
    blocks = [libc.malloc(ctypes.c_size_t(2**24)) for _ in range(4)]
    for block in blocks:
        libc.memset(block, 1, 2**24)
    for block in blocks:
        libc.free(block)
go(), go()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
go(), go(), go()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(way: str, **environment: str) -> int:
    command = [sys.executable, "-c", TAKES_AND_GIVES, way]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told")
def test_a_step_finds_its_memory_where_it_left_it() -> None:
    pages = 3 * 4 * 2**24 // 4096
    assert faults("given back") > pages / 2
    assert faults("kept") < pages / 100
    assert faults("kept", MALLOC_TRIM_THRESHOLD_="131072") > pages / 2, (
        "the user's own choice stays"
    )
