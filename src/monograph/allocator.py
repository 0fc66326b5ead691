"""Let the C library keep freed memory of tensors on the host, instead of returning it to the system."""

import ctypes
import functools
import os
from contextlib import suppress

# The numbers of two parameters of mallopt(3).
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
# Environment variables with which a user sets these parameters, or others that belong to them.
_USER_VARIABLES = {
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "GLIBC_TUNABLES",
}
KEPT_BYTES = 2**30  # the most freed memory that stays with the process
LARGE_BYTES = 2**26  # a freed block of this size or more goes back to the system immediately


@functools.cache
def keep_freed_memory() -> None:
    """Let glibc keep freed blocks and use them for new ones.

    If the user has set glibc's parameters, they stay. With other C libraries nothing is done. By
    default, glibc returns freed blocks of some MB to the system. Each page of the next such block then
    costs a page fault: 5,000 faults and a tenth of the time of an update of `micro`, or 27,000 faults
    and a third of the time if it is not compiled (dev/log.md).
    """
    if not _USER_VARIABLES & os.environ.keys():
        # Another C library has no mallopt.
        with suppress(AttributeError, OSError):
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(_TRIM_THRESHOLD, KEPT_BYTES)
            mallopt(_MMAP_THRESHOLD, LARGE_BYTES)
