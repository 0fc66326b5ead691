"""Files: only those of a folder itself are read; what is written is on the disk, or the reason is one clear line."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from monograph.errors import DiskFull, InputRefused
from monograph.files import is_file, resolved

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
                f"{folder}: no room to write ({error.strerror}); free some, or set `cache` or MONOGRAPH_HOME to another"
            ) from None
        what = f"{error.filename or folder}: cannot be written ({error.strerror or error})"
        raise InputRefused(f"{what}; set `cache` or MONOGRAPH_HOME to a folder of yours") from None


def inside(folder: Path, name: str) -> Path:
    """The regular file of that name in the folder; links may lead only into Hugging Face's cache of the same model.

    Raises:
        InputRefused: a name with a path in it, no such file, or a link that leads elsewhere.
    """
    path = folder / name
    if Path(name).name != name or not is_file(path):
        raise InputRefused(f"{folder}: {name!r} is not a file in this folder")
    home, target = resolved(folder), resolved(path)
    homes = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    if target.parent not in homes:
        raise InputRefused(f"{path}: is a link out of its folder, to {target}; put the file itself there")
    return path


def json_fault(error: ValueError | RecursionError) -> str:
    """Why `json.loads` refused a text, in a reader's words."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return "a number has too many digits" if "digits" in str(error) else str(error)


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
