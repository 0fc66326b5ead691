"""Writing so that a file is on the disk, and so that a full or forbidden disk is one clear line."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from monograph.errors import DiskFull, InputRefused

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turns the operating system's errors while writing under `folder` into ours.

    Raises:
        DiskFull: no room, or over quota.
        InputRefused: anything else.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise DiskFull(
                f"{folder}: no room to write ({error.strerror}); free some, or use another `cache`"
            ) from None
        what = f"cannot be written ({error.strerror or error})"
        raise InputRefused(f"{folder}: {what}; set `cache` or MONOGRAPH_HOME to a folder of yours") from None


def write_durably(path: Path, text: str) -> None:
    """Create a UTF-8 file and wait until it is on the disk."""
    with open(path, "x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until a folder's entries are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
