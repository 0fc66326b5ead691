"""List the runs of a folder in the order of their creation, and read their run.lock."""

import errno
import fcntl
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from monograph.errors import Unreadable
from monograph.storage.reading import (
    contents,
    entries,
    is_file,
    is_folder,
    open_input,
    parse_json,
    without_links,
)

CONFIG = "config.toml"  # a folder with this file is a run that has begun
SWEEP = "sweep.json"  # a run's folder with this file is a sweep's
POLL_S = 0.1
_CHECKPOINT = re.compile(r"step-([0-9]{8,18})")
_SERIAL = re.compile(rb'\{"serial": (\d{1,18})[,}]')


def checkpoint_named(path: Path) -> int | None:
    """Return the update of the checkpoint that a path RUN/checkpoints/step-UPDATE names; None for
    any other path.
    """
    inside = path.parent.name == "checkpoints" and not is_file(path / "run.lock")
    match = _CHECKPOINT.fullmatch(path.name) if inside else None
    return int(match[1]) if match else None


def placed(path: Path) -> Path:
    """Return the path, resolved only if that names a checkpoint: the path is a link to one, or `.`
    inside one.
    """
    if (
        checkpoint_named(path) is None
        and is_folder(path)
        and checkpoint_named(without_links(path)) is not None
    ):
        return without_links(path)
    return path


def runs_in(root: Path) -> list[Path]:
    """Return the folders of `root` that are runs and have begun, oldest first."""
    return [folder for folder in locked_in(root) if is_file(folder / CONFIG)]


def locked_in(root: Path) -> list[Path]:
    """Return the folders of `root` that have a run.lock, oldest first; those of equal number by
    name.

    Folders that this user may not read are left out. Raises Unreadable for other failures, since
    the newest run is then unknown.
    """
    folders = []
    for folder in entries(root):
        try:
            if is_file(folder / "run.lock"):
                folders.append((serial(folder), _natural(folder.name), folder))
        except Unreadable as error:
            if error.errno != errno.EACCES:
                raise
    return [folder for *_, folder in sorted(folders)]


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key by which "a-10" comes after "a-9"."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name)]


def serial(folder: Path) -> int:
    """Return a run's number, which counts from 1 in the order of creation in a folder; 0 if
    run.lock has none.

    Each process rewrites the text after the number, so that may be cut off. Raises Unreadable.
    """
    match = _SERIAL.match(contents(folder / "run.lock") or b"")
    return int(match[1]) if match else 0


def record(folder: Path) -> dict[str, Any]:
    """Return the record in run.lock; empty if it is damaged or another process is still writing it.

    Raises Unreadable.
    """
    return parsed(contents(folder / "run.lock") or b"")


def wait_until_free(folder: Path, limit_s: float) -> bool:
    """Wait until no other process holds the run's lock, at most `limit_s` seconds; return whether
    none does.

    If that cannot be asked, as the folder is gone, none does.
    """
    end = time.monotonic() + limit_s
    with suppress(OSError, Unreadable), open_input(folder / "run.lock") as file:
        while time.monotonic() < end:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(POLL_S)
            else:
                return True
        return False
    return True


def parsed(text: str | bytes) -> dict[str, Any]:
    """Return the JSON object in a text; an empty one if the text is no JSON object."""
    with suppress(ValueError, RecursionError):
        value = parse_json(text)
        return value if isinstance(value, dict) else {}
    return {}
