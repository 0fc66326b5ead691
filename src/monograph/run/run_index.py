"""Which runs a folder holds, in the order in which they were made, and what their run.lock says."""

from __future__ import annotations

import errno
import fcntl
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from monograph.errors import Unreadable
from monograph.storage.reading import contents, entries, is_file, is_folder, open_input, parse_json, without_links

CONFIG = "config.toml"  # makes a claimed folder a run that has begun
SWEEP = "sweep.json"  # makes a run's folder a sweep's
POLL_S = 0.1
_CHECKPOINT = re.compile(r"step-([0-9]{8,18})")
_SERIAL = re.compile(rb'\{"serial": (\d{1,18})[,}]')


def checkpoint_named(path: Path) -> int | None:
    """The update of the checkpoint that a path RUN/checkpoints/step-UPDATE names, None of another path."""
    inside = path.parent.name == "checkpoints" and not is_file(path / "run.lock")
    found = _CHECKPOINT.fullmatch(path.name) if inside else None
    return int(found[1]) if found else None


def placed(path: Path) -> Path:
    """The path; where it leads if only that is called as a checkpoint's folder is: a link to one, or `.` in one."""
    if checkpoint_named(path) is None and is_folder(path) and checkpoint_named(without_links(path)) is not None:
        return without_links(path)
    return path


def runs_in(root: Path) -> list[Path]:
    """Folders of `root` that are runs which have begun, oldest first."""
    return [folder for folder in locked_in(root) if is_file(folder / CONFIG)]


def locked_in(root: Path) -> list[Path]:
    """Folders of `root` that have a lock, oldest first; two that were created at the same moment, by name.

    Not those of other people, which may not be looked at. Raises Unreadable: which run is the newest is then unknown.
    """
    found = []
    for folder in entries(root):
        try:
            if is_file(folder / "run.lock"):
                found.append((serial(folder), _natural(folder.name), folder))
        except Unreadable as error:
            if error.errno != errno.EACCES:
                raise
    return [folder for *_, folder in sorted(found)]


def _natural(name: str) -> list[tuple[int, str]]:
    """A sort key by which "a-10" comes after "a-9"."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]


def serial(folder: Path) -> int:
    """A run's number, from 1, in the order in which the runs of its folder were made; 0 if its run.lock does not say.

    What follows the number is written anew by each process, and may be cut off. Raises Unreadable.
    """
    found = _SERIAL.match(contents(folder / "run.lock") or b"")
    return int(found[1]) if found else 0


def record(folder: Path) -> dict[str, Any]:
    """What run.lock says; nothing where it is damaged, or another process is between creating and writing it.

    Raises Unreadable.
    """
    return parsed(contents(folder / "run.lock") or b"")


def wait_until_free(folder: Path, limit_s: float) -> None:
    """Wait until no other process holds the run, or so long."""
    end = time.monotonic() + limit_s
    with suppress(OSError, Unreadable), open_input(folder / "run.lock") as file:
        while time.monotonic() < end:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(POLL_S)
            else:
                return


def parsed(text: bytes) -> dict[str, Any]:
    """The JSON object that a text is; nothing where it is none."""
    with suppress(ValueError, RecursionError):
        found = parse_json(text)
        return found if isinstance(found, dict) else {}
    return {}
