"""List the runs of a folder in the order of their creation, and read their run.lock.

run.lock contains the lock record, a JSON object; see `monograph.run.folder`.
"""

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

CONFIG = "config.toml"  # a run whose folder contains this file has begun
SWEEP = "sweep.json"  # a run whose folder contains this file is a sweep
POLL_S = 0.1  # seconds between two attempts to get a lock
_CHECKPOINT = re.compile(r"step-([0-9]{8,18})")
_SERIAL = re.compile(rb'\{"serial": (\d{1,18})[,}]')


def update_of_checkpoint(path: Path) -> int | None:
    """Return UPDATE if a path is RUN/checkpoints/step-UPDATE; None for any other path."""
    # A run may itself be in a folder called "checkpoints".
    if path.parent.name != "checkpoints" or is_file(path / "run.lock"):
        return None
    match = _CHECKPOINT.fullmatch(path.name)
    return int(match[1]) if match else None


def resolve_checkpoint(path: Path) -> Path:
    """Return the path of a checkpoint in the form that `update_of_checkpoint` knows; any other path
    unchanged.

    The path of a checkpoint has another form if it is a link, or if it is "." because the checkpoint is
    the working folder.
    """
    if update_of_checkpoint(path) is not None or not is_folder(path):
        return path
    resolved = without_links(path)
    return path if update_of_checkpoint(resolved) is None else resolved


def runs_in(root: Path) -> list[Path]:
    """Return the folders in `root` that are runs and have begun, oldest first."""
    return [folder for folder in folders_with_lock(root) if is_file(folder / CONFIG)]


def folders_with_lock(root: Path) -> list[Path]:
    """Return the folders in `root` that contain a run.lock, sorted by serial number and then by
    name.

    Folders that this user may not read are left out.

    Raises:
        Unreadable: a read fails for any other reason; the newest run is then unknown.
    """
    folders = []
    for folder in entries(root):
        try:
            if is_file(folder / "run.lock"):
                folders.append((serial_number(folder), _natural_key(folder.name), folder))
        except Unreadable as error:
            if error.errno != errno.EACCES:
                raise
    return [folder for *_, folder in sorted(folders)]


def _natural_key(name: str) -> list[tuple[int, str]]:
    """Return a sort key by which "a-10" comes after "a-9"."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdecimal() else (0, part) for part in parts]


def serial_number(folder: Path) -> int:
    """Return a run's serial number; 0 if run.lock does not contain one.

    The runs of a folder are numbered from 1 in the order of their creation.

    Raises:
        Unreadable: run.lock exists but cannot be read.
    """
    # Not parsed as JSON: each process rewrites the text after the number, which may be incomplete.
    match = _SERIAL.match(contents(folder / "run.lock") or b"")
    return int(match[1]) if match else 0


def lock_record(folder: Path) -> dict[str, Any]:
    """Return the JSON object in run.lock; empty if run.lock is damaged or is being written now.

    Raises:
        Unreadable: run.lock exists but cannot be read.
    """
    return json_object(contents(folder / "run.lock") or b"")


def wait_until_free(folder: Path, limit_s: float) -> bool:
    """Wait until no process holds the run's lock, and return whether the lock is free.

    Args:
        folder: the run's folder. If its run.lock cannot be opened, for example because
            the folder was removed, the lock counts as free.
        limit_s: the longest time to wait, in seconds.
    """
    end = time.monotonic() + limit_s
    with suppress(OSError, Unreadable), open_input(folder / "run.lock") as file:
        while time.monotonic() < end:
            try:
                # A shared lock, so that processes that wait do not hinder each other.
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(POLL_S)
            else:
                return True
        return False
    return True  # run.lock could not be opened


def json_object(text: str | bytes) -> dict[str, Any]:
    """Return the JSON object in a text; an empty dict if the text is not a JSON object."""
    with suppress(ValueError, RecursionError):
        value = parse_json(text)
        if isinstance(value, dict):
            return value
    return {}
