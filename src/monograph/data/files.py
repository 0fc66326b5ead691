"""Files: an input is a regular file of bounded size; what is written is on the disk, or one clear line says why not."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from monograph.errors import DiskFull, InputRefused, Unreadable
from monograph.files import MOST_JSON_BYTES, entries, is_file, open_input, read_input, resolved

_TEMPORARY, _LOCK = "monograph-", "in-use"
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


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A new folder that goes away with the `with` block, or, if this process is killed, when the next one is made.

    A locked file in it says that its process lives; the kernel frees the lock however that process ends.
    """
    with suppress(Unreadable):  # the folder of them all
        for other in entries(tempfile.gettempdir(), _TEMPORARY):
            # Not there: no such folder, or one half made. Unreadable: another person's.
            with suppress(OSError, Unreadable), open_input(other / _LOCK) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if other.lstat().st_uid == os.getuid():
                    shutil.rmtree(other)
    with tempfile.TemporaryDirectory(prefix=_TEMPORARY, ignore_cleanup_errors=True) as name:
        with open(Path(name, "new"), "xb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.rename(lock.name, Path(name, _LOCK))  # whoever finds the name finds it locked
            yield Path(name)


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


class KeyTwice(ValueError):
    """An object has a key twice, of which every reader would take another value."""


def object_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of a decoder's pairs; raises KeyTwice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise KeyTwice(next(key for key in counts if counts[key] > 1))
    return found


_ONCE = json.JSONDecoder(object_pairs_hook=object_once)


def parse_json(text: str | bytes | bytearray) -> Any:
    """A JSON value, none of whose objects has a key twice.

    Raises:
        ValueError: it is none, or `KeyTwice`; see `json_fault`.
        RecursionError: it is nested too deeply.
    """
    return _ONCE.decode(text if isinstance(text, str) else text.decode(json.detect_encoding(text), "surrogatepass"))


def read_json(path: Path, instead: str = "", most_bytes: int = MOST_JSON_BYTES) -> dict[str, Any]:
    """The JSON object in a file that may be anybody's.

    Args:
        path: the file.
        instead: ends the message of what is wrong, with what to do.
        most_bytes: a larger file is not read.

    Raises:
        InputRefused: the file holds something else, or a key twice.
    """
    try:
        values = parse_json(read_input(path, most_bytes))
    except OSError as error:
        raise InputRefused(f"{path}: cannot be read: {error.strerror}{instead}") from None
    except (ValueError, RecursionError) as error:
        raise InputRefused(f"{path}: cannot be read as JSON: {json_fault(error)}{instead}") from None
    if not isinstance(values, dict):
        raise InputRefused(f"{path}: expected a JSON object{instead}")
    return values


def json_fault(error: ValueError | RecursionError) -> str:
    """Why `parse_json` refused a text, in a reader's words."""
    if isinstance(error, KeyTwice):
        return f"has the key {ascii(str(error)[:40])} twice in one object"
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
