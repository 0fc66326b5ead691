"""Read files and folders without mistaking an unreadable file for a missing one.

`Path.exists` and similar functions return False after some system errors, and in newer Pythons
after all of them. `glob` finds nothing in a folder that cannot be listed. Code that then concludes
that a run has not begun, or that a checkpoint is incomplete, destroys data. So all access to a
user's files goes through this module.
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

# The largest size of a JSON file. The largest that is needed is an index of weights, with about 100
# bytes per tensor.
MAX_JSON_BYTES = 1 << 24
# Errors after which it is certain that there is nothing at the path, or something other than a
# file. A socket gives ENXIO.
_NOT_A_FILE = {
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
    """Return the errno of an error, or None if the error has none.

    The errors of safetensors and torch have no attribute `errno`, but a message such as
    "No such file or directory (os error 2)".
    """
    number = getattr(error, "errno", None)
    if number:
        return int(number)
    message = str(error)
    for digits in re.findall(r"\((?:os error )?(\d{1,3})\)", message):
        # The system's own text for the number must be there, too.
        if os.strerror(int(digits)) in message:
            return int(digits)
    return None


def unreadable(path: str | os.PathLike[str], error: BaseException) -> InputRefused | Unreadable:
    """Return an error that says which file could not be read, why, and what to do.

    Args:
        path: the file, if `error` does not name one.
        error: the error of the read.

    Returns:
        InputRefused if there is no file at the path, otherwise Unreadable.
    """
    number = error_number(error) or 0
    filename = getattr(error, "filename", None)
    file = filename if isinstance(filename, str) else path
    reason = getattr(error, "strerror", None)
    if not reason:
        reason = os.strerror(number) if number else error
    fault = f"{file}: cannot be read: {reason}"
    if number in _NOT_A_FILE:
        return InputRefused(f"{fault}; name one that is there, or leave it out")
    remedy = _REMEDIES.get(number, "run again when it can be")
    return Unreadable(f"{fault}; {remedy}", number)


@contextmanager
def readable(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn an OSError of the `with` block into Unreadable, unless it says that there is no file.

    Raises:
        Unreadable: the system failed to read. The message names the file of the system's error or,
            if that names none, `path`.
        OSError: there is nothing at the path, or something other than a file.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or error.errno in _NOT_A_FILE:
            raise
        raise unreadable(path, error) from error


@contextmanager
def refusing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn an OSError of the `with` block into InputRefused or Unreadable, see `unreadable`."""
    try:
        yield
    except OSError as error:
        raise unreadable(path, error) from None


def open_input(path: Path) -> BinaryIO:
    """Open a regular file for reading.

    No other function of the package opens a user's file. Reads of the opened file may fail, too, so
    they must be wrapped in `readable`.

    Raises:
        Unreadable: the system failed to open the file.
        OSError: there is nothing at the path, or a folder, a FIFO, a device or a socket.
    """
    with readable(path):
        try:
            # Without O_NONBLOCK, opening a FIFO would wait for a writer.
            file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
        except ValueError:
            raise OSError(errno.EINVAL, "no file has a NUL in its name", str(path)) from None
        try:
            # A read from a FIFO may wait forever, and a device may never end.
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(errno.EINVAL, "is not a regular file", str(path))
        except OSError:
            file.close()
            raise
    return file


def read_input(path: Path, most_bytes: int | None = MAX_JSON_BYTES) -> bytes:
    """Return the content of a user's file. Bytes that are added while it is read are left out.

    Args:
        path: the file.
        most_bytes: the largest size of a file that is read; None for no limit.

    Raises:
        Unreadable: the system failed to read the file.
        OSError: there is no such file, see `open_input`; or the file is larger than `most_bytes`.
    """
    with readable(path), open_input(path) as file:
        size = os.fstat(file.fileno()).st_size
        if most_bytes is not None and size > most_bytes:
            if most_bytes >= 2**20:
                bound = f"{most_bytes // 2**20} MiB"
            else:
                bound = f"{most_bytes // 2**10} KiB"
            raise OSError(
                errno.EINVAL, f"is larger than {bound}, which no such file needs", str(path)
            )
        return file.read(size)


def contents(path: Path, most_bytes: int | None = MAX_JSON_BYTES) -> bytes | None:
    """Return the content of a file; None if there is no such file.

    Raises:
        Unreadable: the system failed to read the file.
        InputRefused: the file is larger than `most_bytes`.
    """
    with refusing(path):
        return read_input(path, most_bytes) if is_file(path) else None


def status(path: str | os.PathLike[str], follow: bool = True) -> os.stat_result | None:
    """Return `os.stat` of a path; None if there is nothing at the path.

    Args:
        path: the path of a file, a folder or anything else.
        follow: whether to describe the target of a symbolic link rather than the link.

    Raises:
        Unreadable: the system failed to tell.
    """
    # A name with a NUL gives ValueError. `readable` raises Unreadable, which is not suppressed, because it is no
    # OSError.
    with suppress(OSError, ValueError), readable(path):
        return os.stat(path, follow_symlinks=follow)
    return None


def exists(path: str | os.PathLike[str]) -> bool:
    """Return whether there is anything at a path; raises Unreadable."""
    return status(path) is not None


def is_file(path: str | os.PathLike[str]) -> bool:
    """Return whether there is a regular file at a path; raises Unreadable."""
    entry = status(path)
    return entry is not None and stat.S_ISREG(entry.st_mode)


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Return whether there is a folder at a path; raises Unreadable."""
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
    """Return in words what there is at a path, such as "a folder", "a link to nothing" or "nothing".

    Raises:
        Unreadable: the system failed to tell.
    """
    if status(path, follow=False) is None:
        return "nothing"
    target = status(path)
    if target is None:
        return "a link to nothing"
    return _KINDS.get(stat.S_IFMT(target.st_mode), "something else")


def free_bytes(folder: Path) -> int:
    """Return the number of free bytes on the disk of a folder. The folder need not exist yet."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if exists(path))
    return shutil.disk_usage(nearest).free


def entries(folder: str | os.PathLike[str], prefix: str = "") -> list[Path]:
    """Return the entries of a folder whose names begin with `prefix`, sorted by name.

    The list is empty if there is no such folder.

    Raises:
        Unreadable: the system failed to list the folder.
    """
    with suppress(OSError, ValueError), readable(folder):
        return [
            Path(folder, name) for name in sorted(os.listdir(folder)) if name.startswith(prefix)
        ]
    return []


def matching(pattern: str | os.PathLike[str]) -> list[Path]:
    """Return the paths that match a pattern, with the rules of `glob.glob(recursive=True)`.

    Raises:
        Unreadable: the system failed to list a folder, which `glob` would ignore.
    """
    path = Path(pattern)
    parts = path.parts[1:] if path.anchor else path.parts  # the anchor of "/a/*" is "/"
    return sorted(set(_matching(Path(path.anchor), parts)), key=str)


def _matching(folder: Path, parts: tuple[str, ...]) -> Iterator[Path]:
    """Yield the paths below a folder that match the parts of a pattern; some may come twice."""
    if not parts:
        yield folder
        return
    first = parts[0]
    rest = parts[1:]
    if not glob.has_magic(first):
        # Only the last part of the path is tested: a folder that is missing has no entries anyway.
        if rest or exists(folder / first):
            yield from _matching(folder / first, rest)
        return
    # "**" matches either nothing, or a folder and then "**" again.
    if first == "**" and (rest or is_folder(folder)):
        yield from _matching(folder, rest)
    for entry in entries(folder):
        if entry.name.startswith(".") and not first.startswith("."):
            continue  # as in a shell, a hidden file is only matched by a part that begins with a dot
        if first == "**" and is_folder(entry):
            yield from _matching(entry, parts)
        elif fnmatch.fnmatchcase(entry.name, first) and (not rest or is_folder(entry)):
            yield from _matching(entry, rest)


def resolved(path: Path) -> Path:
    """Return the real path of a file that exists, with all links followed.

    Raises:
        InputRefused: there is nothing at the path.
        Unreadable: a part of the path cannot be read.
    """
    try:
        with readable(path):
            return path.resolve(strict=True)
    except (OSError, RuntimeError) as error:  # RuntimeError comes from links in a circle
        raise InputRefused(f"{path}: there is no such file") from error


def without_links(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path, with links followed as far as the path exists.

    Raises:
        InputRefused: links in the path form a circle, or the path contains a NUL.
        Unreadable: a part of the path cannot be read.
    """
    try:
        with readable(path):
            return Path(path).resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise InputRefused(
            f"{path}: is no path, or its links lead in a circle; name another"
        ) from error


def file_inside(folder: Path, name: str, hint: str = "") -> Path:
    """Return the path of a regular file in a folder that a stranger may have made.

    The file may be a link into Hugging Face's cache of the same model. Any other link that leads
    out of the folder is refused, since it could lead to any file of the user.

    Args:
        folder: the folder.
        name: the file's name.
        hint: what the error says in addition if there is no such file.

    Raises:
        InputRefused: the name contains a path, there is no such file, or a link leads elsewhere.
    """
    path = folder / name
    if Path(name).name != name or not is_file(path):
        raise InputRefused(f"{folder}: {name!r} is not a file in this folder{hint}")
    real_folder = resolved(folder)
    target = resolved(path)
    allowed = [real_folder]
    # In the cache, MODEL/snapshots/REVISION has links to MODEL/blobs. `folder` is a REVISION, or a
    # folder in it.
    for parent in real_folder.parents[:2]:
        if parent.name == "snapshots":
            allowed.append(parent.parent / "blobs")
    if target.parent not in allowed:
        raise InputRefused(
            f"{path}: is a link out of its folder, to {target}; put the file itself there"
        )
    return path


class KeyTwice(ValueError):
    """A JSON object has a key twice. Programs differ in which of the two values they read."""


def object_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a dict of the (key, value) pairs of a JSON object. JSON decoders can call it for each object.

    Raises:
        KeyTwice: a key is there twice.
    """
    values = dict(pairs)
    if len(values) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise KeyTwice(next(key for key in counts if counts[key] > 1))
    return values


_DECODER = json.JSONDecoder(object_pairs_hook=object_once)


def parse_json(text: str | bytes | bytearray) -> Any:
    """Parse JSON text in which no object has a key twice.

    Raises:
        ValueError: the text is not JSON, or an object has a key twice (`KeyTwice`); see
            `json_fault`.
        RecursionError: the text is nested too deeply.
    """
    if not isinstance(text, str):
        text = text.decode(json.detect_encoding(text), "surrogatepass")  # as json.loads does
    return _DECODER.decode(text)


def read_json(path: Path, advice: str = "", most_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Read the JSON object in an untrusted file.

    Args:
        path: the file.
        advice: the end of the error message, which says what to do and begins with "; ".
        most_bytes: the largest size of a file that is read.

    Raises:
        InputRefused: the file is missing, too large or not a JSON object, or an object has a key
            twice.
        Unreadable: the system failed to read the file.
    """
    try:
        values = parse_json(read_input(path, most_bytes))
    except OSError as error:
        raise InputRefused(f"{path}: cannot be read: {error.strerror}{advice}") from None
    except (ValueError, RecursionError) as error:
        raise InputRefused(f"{path}: cannot be read as JSON: {json_fault(error)}{advice}") from None
    if not isinstance(values, dict):
        raise InputRefused(f"{path}: expected a JSON object{advice}")
    return values


def json_fault(error: ValueError | RecursionError) -> str:
    """Return in plain words why `parse_json` raised an error."""
    if isinstance(error, KeyTwice):
        return f"has the key {ascii(str(error)[:40])} twice in one object"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if "digits" in str(error):  # Python's limit on the digits of an integer
        return "a number has too many digits"
    return str(error)
