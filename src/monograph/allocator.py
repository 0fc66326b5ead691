"""Let the C library keep the memory that tensors on the host gave back."""

import ctypes
import functools
import os
from contextlib import suppress

# Parameters of mallopt(3), and the environment's variables that set the same.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_SET_BY_USER = {
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "GLIBC_TUNABLES",
}
KEPT_BYTES = 2**30  # at most so much of it stays with the process
LARGE_BYTES = 2**26  # a block of this size or more goes back to the system at once


@functools.cache
def keep_freed_memory() -> None:
    """Let glibc keep freed blocks for the next ones; what the user has set stays, and other C
    libraries are left alone.

    By default it returns blocks of some MB to the system, and every page of the next one then costs
    a fault: 5,000 faults in an update of `micro`, 27,000 if it is not compiled, and a tenth or a
    third of its time (dev/log.md).
    """
    if not _SET_BY_USER & os.environ.keys():
        with suppress(AttributeError, OSError):
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(_TRIM_THRESHOLD, KEPT_BYTES)
            mallopt(_MMAP_THRESHOLD, LARGE_BYTES)
