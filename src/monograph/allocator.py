"""Let the C library keep freed memory of tensors on the host, instead of returning it to the system."""

import ctypes
import functools
import os
from contextlib import suppress

# Parameters of mallopt(3), and the environment's variables that set the same.
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
_SET_BY_USER = {
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "GLIBC_TUNABLES",
}
KEPT_BYTES = 2**30  # the most freed memory that stays with the process
LARGE_BYTES = 2**26  # a freed block of this size or more goes back to the system at once


@functools.cache
def keep_freed_memory() -> None:
    """Let glibc keep freed blocks and use them for new ones.

    What the user has set stays, and nothing is done with other C libraries. By default, glibc returns
    freed blocks of some MB to the system. Each page of the next such block then costs a page fault:
    5,000 faults and a tenth of the time of an update of `micro`, or 27,000 faults and a third of the
    time if it is not compiled (dev/log.md).
    """
    if not _SET_BY_USER & os.environ.keys():
        # Another C library has no mallopt.
        with suppress(AttributeError, OSError):
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(_TRIM_THRESHOLD, KEPT_BYTES)
            mallopt(_MMAP_THRESHOLD, LARGE_BYTES)
