"""Read files and folders without mistaking an unreadable file for a missing one.

`Path.exists` and similar functions return False on some system errors, in newer Pythons on all of
them, and `glob` finds no files in a folder that cannot be listed. A decision based on that (that a
run has not begun, that a checkpoint is incomplete, that a number starts at 0) costs data. So all
access to a user's files goes through this module.
"""

import errno
import fnmatch
import glob
import json
import os
import re
import shutil
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from monograph.errors import InputRefused, Unreadable

MOST_JSON_BYTES = 1 << 24  # an index of weights has about 100 bytes per tensor
# Errors which make certain that nothing is there, or something other than a file.
# ENXIO is a socket's.
_CERTAIN = {
    errno.EINVAL,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENXIO,
}
_REMEDIES = {
    errno.EACCES: "check its permissions",
    errno.EPERM: "check its permissions",
    errno.EMFILE: "allow more open files (ulimit -n)",
    errno.ENFILE: "wait until other programs close some",
    errno.ENOMEM: "free some memory, then run again",
}


def error_number(error: BaseException) -> int | None:
    """Return the errno of an error, or None; safetensors and torch only mention it in their
    messages.
    """
    if number := getattr(error, "errno", None):
        return int(number)
    written = map(int, re.findall(r"\((?:os error )?(\d{1,3})\)", str(error)))
    return next((number for number in written if os.strerror(number) in str(error)), None)


def unreadable(path: str | os.PathLike[str], error: BaseException) -> InputRefused | Unreadable:
    """Return an error that says which file could not be read, why, and what to do.

    It is InputRefused if nothing is there, or something other than a file; else Unreadable.
    """
    number = error_number(error) or 0
    named = getattr(error, "filename", None)
    reason = getattr(error, "strerror", None) or (os.strerror(number) if number else error)
    why = f"{named if isinstance(named, str) else path}: cannot be read: {reason}"
    if number in _CERTAIN:
        return InputRefused(f"{why}; name one that is there, or leave it out")
    return Unreadable(f"{why}; {_REMEDIES.get(number, 'run again when it can be')}", number)


@contextmanager
def readable(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn the system's errors in the block into `Unreadable`, except for those in `_CERTAIN`.

    Raises:
        Unreadable: the system failed to read; the message names the file of the system's error,
            else `path`.
        OSError: nothing is there, or something other than a file.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or error.errno in _CERTAIN:
            raise
        raise unreadable(path, error) from error


@contextmanager
def refusing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn the system's errors in the block into those of `unreadable`."""
    try:
        yield
    except OSError as error:
        raise unreadable(path, error) from None


def open_input(path: Path) -> BinaryIO:
    """Open a user's file for reading; nothing else in the package does. Wrap reads of the file in
    `readable`.

    Only regular files are opened: a FIFO may wait for its writer for ever, and a device may never
    end.

    Raises:
        Unreadable: see `readable`.
        OSError: nothing is there, or it is a folder, a FIFO, a device or a socket.
    """
    with readable(path):  # O_NONBLOCK, as opening a FIFO would wait for its writer
        try:
            file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
        except ValueError:
            raise OSError(errno.EINVAL, "no file has a NUL in its name", str(path)) from None
        try:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(errno.EINVAL, "is not a regular file", str(path))
        except OSError:
            file.close()
            raise
    return file


def read_input(path: Path, most_bytes: int | None = MOST_JSON_BYTES) -> bytes:
    """Return the content of a user's file, reading no more bytes than the file system reports.

    Raises:
        Unreadable: see `readable`.
        OSError: see `open_input`; or the file has more than `most_bytes` (None: no limit), and was
            not read.
    """
    with readable(path), open_input(path) as file:
        size = os.fstat(file.fileno()).st_size
        if most_bytes is not None and size > most_bytes:
            bound = f"{most_bytes >> 20} MiB" if most_bytes >> 20 else f"{most_bytes >> 10} KiB"
            raise OSError(
                errno.EINVAL, f"is larger than {bound}, which no such file needs", str(path)
            )
        return file.read(size)


def contents(path: Path, most_bytes: int | None = MOST_JSON_BYTES) -> bytes | None:
    """Return the content of a file, or None if there is no such file.

    Raises:
        Unreadable: see `readable`.
        InputRefused: the file is larger than `most_bytes`.
    """
    with refusing(path):
        return read_input(path, most_bytes) if is_file(path) else None


def status(path: str | os.PathLike[str], follow: bool = True) -> os.stat_result | None:
    """Return `os.stat` of a path, or None if nothing is there; raise Unreadable.

    Args:
        path: the path of a file, folder or anything else.
        follow: whether a symbolic link stands for its target; otherwise for itself.
    """
    with suppress(OSError, ValueError), readable(path):  # ValueError comes from a name with a NUL
        return os.stat(path, follow_symlinks=follow)
    return None


def exists(path: str | os.PathLike[str]) -> bool:
    """Return whether something is there; raise Unreadable."""
    return status(path) is not None


def is_file(path: str | os.PathLike[str]) -> bool:
    """Return whether a regular file is there; raise Unreadable."""
    entry = status(path)
    return entry is not None and stat.S_ISREG(entry.st_mode)


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Return whether a folder is there; raise Unreadable."""
    entry = status(path)
    return entry is not None and stat.S_ISDIR(entry.st_mode)


_KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFBLK: "a device",
    stat.S_IFCHR: "a device",
}


def kind_of(path: str | os.PathLike[str]) -> str:
    """Return what is there in words, such as "a folder", "a link to nothing" or "nothing"; raise
    Unreadable.
    """
    own = status(path, follow=False)
    if own is None:
        return "nothing"
    meant = status(path)
    if meant is None:
        return "a link to nothing"
    return _KINDS.get(stat.S_IFMT(meant.st_mode), "something else")


def free_bytes(folder: Path) -> int:
    """Return what is free on the disk of a folder, or of its nearest parent that exists."""
    return shutil.disk_usage(
        next(path for path in (folder, *folder.absolute().parents) if exists(path))
    ).free


def entries(folder: str | os.PathLike[str], prefix: str = "") -> list[Path]:
    """Return a folder's entries that begin with `prefix`, sorted; [] if there is no such folder.
    Raise Unreadable.
    """
    with suppress(OSError, ValueError), readable(folder):
        return [
            Path(folder, name) for name in sorted(os.listdir(folder)) if name.startswith(prefix)
        ]
    return []


def matching(pattern: str | os.PathLike[str]) -> list[Path]:
    """Return the paths that match a pattern like `glob.glob`, but raise Unreadable if a folder
    cannot be listed.
    """
    path = Path(pattern)
    return sorted(set(_matching(Path(path.anchor), path.parts[bool(path.anchor) :])), key=str)


def _matching(folder: Path, parts: tuple[str, ...]) -> Iterator[Path]:
    if not parts:
        yield folder
        return
    first, *_ = parts
    if not glob.has_magic(first):
        if parts[1:] or exists(folder / first):
            yield from _matching(folder / first, parts[1:])
        return
    if first == "**" and (parts[1:] or is_folder(folder)):
        yield from _matching(folder, parts[1:])
    for entry in entries(folder):
        if entry.name.startswith(".") and not first.startswith("."):
            continue
        if first == "**" and is_folder(entry):
            yield from _matching(entry, parts)
        elif fnmatch.fnmatchcase(entry.name, first) and (not parts[1:] or is_folder(entry)):
            yield from _matching(entry, parts[1:])


def resolved(path: Path) -> Path:
    """Return the real path of a file, with all links followed.

    Raises:
        InputRefused: nothing is there.
        Unreadable: a part of its path cannot be read.
    """
    try:
        with readable(path):
            return path.resolve(strict=True)
    except (OSError, RuntimeError) as error:  # RuntimeError comes from links in a circle
        raise InputRefused(f"{path}: there is no such file") from error


def without_links(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path, with links followed as far as the path exists.

    Raises:
        InputRefused: links in the path form a circle, or it is not a valid path (it contains a
            NUL).
        Unreadable: a part of the path cannot be read.
    """
    try:
        with readable(path):
            return Path(path).resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise InputRefused(
            f"{path}: is no path, or its links lead in a circle; name another"
        ) from error


def inside(folder: Path, name: str) -> Path:
    """Return the path of a regular file in the folder; a link may only lead into Hugging Face's
    cache of that model.

    Raises:
        InputRefused: the name contains a path, there is no such file, or a link leads elsewhere.
    """
    path = folder / name
    if Path(name).name != name or not is_file(path):
        raise InputRefused(f"{folder}: {name!r} is not a file in this folder")
    home = resolved(folder)
    target = resolved(path)
    # A snapshot's own folder, or a folder in it.
    homes = [
        home,
        *(above.parent / "blobs" for above in home.parents[:2] if above.name == "snapshots"),
    ]
    if target.parent not in homes:
        raise InputRefused(
            f"{path}: is a link out of its folder, to {target}; put the file itself there"
        )
    return path


class KeyTwice(ValueError):
    """An object in JSON has a key twice, so that different readers would take different values."""


def object_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the dict of a JSON decoder's (key, value) pairs; raise KeyTwice."""
    once = dict(pairs)
    if len(once) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise KeyTwice(next(key for key in counts if counts[key] > 1))
    return once


_ONCE = json.JSONDecoder(object_pairs_hook=object_once)


def parse_json(text: str | bytes | bytearray) -> Any:
    """Parse JSON text in which no object has a key twice.

    Raises:
        ValueError: the text is not JSON, or an object has a key twice (`KeyTwice`); see
            `json_fault`.
        RecursionError: the text is nested too deeply.
    """
    return _ONCE.decode(
        text if isinstance(text, str) else text.decode(json.detect_encoding(text), "surrogatepass")
    )


def read_json(path: Path, instead: str = "", most_bytes: int = MOST_JSON_BYTES) -> dict[str, Any]:
    """Read the JSON object in an untrusted file.

    Args:
        path: the file.
        instead: the end of the error message, which says what to do.
        most_bytes: the largest size; a larger file is refused.

    Raises:
        InputRefused: the file is missing, too large, or not a JSON object, or an object has a key
            twice.
        Unreadable: see `readable`.
    """
    try:
        values = parse_json(read_input(path, most_bytes))
    except OSError as error:
        raise InputRefused(f"{path}: cannot be read: {error.strerror}{instead}") from None
    except (ValueError, RecursionError) as error:
        raise InputRefused(
            f"{path}: cannot be read as JSON: {json_fault(error)}{instead}"
        ) from None
    if not isinstance(values, dict):
        raise InputRefused(f"{path}: expected a JSON object{instead}")
    return values


def json_fault(error: ValueError | RecursionError) -> str:
    """Return why `parse_json` refused a text, in plain words."""
    if isinstance(error, KeyTwice):
        return f"has the key {ascii(str(error)[:40])} twice in one object"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return "a number has too many digits" if "digits" in str(error) else str(error)
