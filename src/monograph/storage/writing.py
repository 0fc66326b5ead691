"""Write files durably, lock folders, and make temporary folders."""

import errno
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from monograph.errors import DiskFull, InputRefused, Unreadable
from monograph.storage.reading import entries, open_input

_TEMPORARY = "monograph-"  # the prefix of temporary folders
_LOCK = "in-use"  # the file in a temporary folder that its process keeps locked

# Errors of a write that finds no room: no space is left, or a quota or the limit on a file's size is reached.
DISK_FULL_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
DISK_ERRORS = DISK_FULL_ERRORS | {errno.EIO}  # errors that the disk causes


@contextmanager
def cache_errors_explained(folder: Path) -> Iterator[None]:
    """Turn an OSError of the `with` block into an error that says what the user can do.

    The block writes into the cache.

    Args:
        folder: the folder into which the block writes. The message names it, or the file of the OSError.

    Raises:
        DiskFull: an error of `DISK_ERRORS`.
        InputRefused: any other OSError.
    """
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL_ERRORS:
            raise DiskFull(
                f"{folder}: no room to write ({error.strerror}); make room there, or set `cache` or MONOGRAPH_HOME to "
                "another folder"
            ) from None
        if error.errno == errno.EIO:
            raise DiskFull(
                f"{error.filename or folder}: cannot be written ({error.strerror}); look at the disk, or set `cache` "
                "or MONOGRAPH_HOME to another folder"
            ) from None
        raise InputRefused(
            f"{error.filename or folder}: cannot be written ({error.strerror or error}); set `cache` or MONOGRAPH_HOME "
            "to a folder of yours"
        ) from None


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yield a new folder, and remove it after the `with` block.

    If this process is killed, the next call of this function in any process removes the folder. A
    locked file in the folder shows that its process lives. The kernel frees the lock even if the
    process is killed.
    """
    with suppress(Unreadable):  # raised if the folder of all temporary folders cannot be listed
        for other in entries(tempfile.gettempdir(), _TEMPORARY):
            # OSError: a process holds the lock, or the file is not there yet, or not any more. Unreadable:
            # the folder belongs to another user.
            with suppress(OSError, Unreadable), open_input(other / _LOCK) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if other.lstat().st_uid == os.getuid():
                    shutil.rmtree(other)
    with tempfile.TemporaryDirectory(prefix=_TEMPORARY, ignore_cleanup_errors=True) as name:
        with open(Path(name, "new"), "xb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # The file is locked before it gets this name, so that no process finds it unlocked.
            os.rename(lock.name, Path(name, _LOCK))
            yield Path(name)


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock a folder during the `with` block, without waiting.

    The kernel frees the lock even if the process is killed.

    Raises:
        OSError: another process holds the lock, or there is no such folder.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def write_durably(path: Path, content: str | bytes, new: bool = True) -> None:
    """Write a file, and wait until its content is on the disk.

    Args:
        path: the file.
        content: its content.
        new: whether the file must not exist yet; otherwise its content is replaced.
    """
    with open(path, "xb" if new else "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of entries, would survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_below(folder: Path) -> None:
    """Wait until a folder and all files and folders below it would survive a power cut."""
    for path in folder.iterdir():
        if stat.S_ISDIR(path.lstat().st_mode):
            sync_below(path)
        else:
            sync(path)
    sync(folder)
