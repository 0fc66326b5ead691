"""File modes that bind root too, so that tests of what may not be read or written run as every
user.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

# linux/capability.h
VERSION, DAC_OVERRIDE, DAC_READ_SEARCH = 0x20080522, 1 << 1, 1 << 2


@contextmanager
def binding_modes() -> Iterator[None]:
    """Inside the block this thread, and what it starts, has laid down root's right to pass over
    file modes.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(VERSION, 0)
    # Effective, permitted, inheritable: the lower 32 of each, then the upper.
    before = (ctypes.c_uint32 * 6)()
    assert libc.capget(header, before) == 0, os.strerror(ctypes.get_errno())
    inside = (ctypes.c_uint32 * 6)(*before)
    inside[0] &= ~(DAC_OVERRIDE | DAC_READ_SEARCH)
    assert libc.capset(header, inside) == 0, os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        assert libc.capset(header, before) == 0, os.strerror(ctypes.get_errno())
