"""Write durably: either the data is on the disk, or one clear error says why not."""

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

_TEMPORARY, _LOCK = "monograph-", "in-use"


# No room, over quota, above the limit on a file's size.
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
FAILING = FULL | {errno.EIO}  # of the disk, and not of what was asked of it


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn the operating system's errors while writing under `folder` into Monograph's.

    Raises:
        DiskFull: there is no room, the user is over quota, the file is too large for the system's
            limit, or the disk fails.
        InputRefused: writing failed for any other reason.
    """
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise DiskFull(
                f"{folder}: no room to write ({error.strerror}); free some, or set `cache` or MONOGRAPH_HOME to another"
            ) from None
        if error.errno == errno.EIO:
            raise DiskFull(
                f"{error.filename or folder}: cannot be written ({error.strerror}); look at the disk, or set `cache` "
                "or MONOGRAPH_HOME to another"
            ) from None
        what = f"{error.filename or folder}: cannot be written ({error.strerror or error})"
        raise InputRefused(f"{what}; set `cache` or MONOGRAPH_HOME to a folder of yours") from None


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yield a new folder that is removed after the block or, if this process is killed, by the next
    call of anyone.

    A locked file in the folder shows that its process lives; the kernel frees the lock however the
    process ends.
    """
    with suppress(Unreadable):  # the parent folder of all temporary folders
        for other in entries(tempfile.gettempdir(), _TEMPORARY):
            # OSError: the lock is held, or it or the folder is gone or half made. Unreadable: it is
            # another user's.
            with suppress(OSError, Unreadable), open_input(other / _LOCK) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if other.lstat().st_uid == os.getuid():
                    shutil.rmtree(other)
    with tempfile.TemporaryDirectory(prefix=_TEMPORARY, ignore_cleanup_errors=True) as name:
        with open(Path(name, "new"), "xb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # The file gets this name locked, so no process sees it unlocked.
            os.rename(lock.name, Path(name, _LOCK))
            yield Path(name)


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Lock a folder for the `with` block; the kernel frees the lock however the process ends.

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
    """Create a file, or replace its content if it need not be `new`, and wait until it is on the
    disk.
    """
    with open(path, "xb" if new else "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's entries (new files, renames), would survive a
    power cut.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_below(folder: Path) -> None:
    """Wait until a folder and everything below it would survive a power cut."""
    for path in folder.iterdir():
        if stat.S_ISDIR(path.lstat().st_mode):
            sync_below(path)
        else:
            sync(path)
    sync(folder)
