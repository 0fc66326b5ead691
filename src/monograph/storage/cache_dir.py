"""Finds the folders for data that can be made again: tokens of a corpus, and code that torch compiled."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def cache_root(given: str | Path | None = None) -> tuple[Path, bool]:
    """Return the cache folder (`given`, $MONOGRAPH_HOME or the system's), and whether a person chose it.

    A folder that a person chose must work.
    """
    if given is not None:
        return Path(os.path.expanduser(given)), True
    if home := os.environ.get("MONOGRAPH_HOME"):
        return Path(os.path.expanduser(home)), True
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "monograph", False
    return Path(os.path.expanduser("~")) / ".cache" / "monograph", False


def state_root() -> Path:
    """Return the folder for data that a user must not lose or share: $MONOGRAPH_HOME or the system's.

    A relative path is ignored: it would be a folder of whoever owns the directory that this process was started in.
    """
    home, xdg = (Path(os.path.expanduser(os.environ.get(name, ""))) for name in ("MONOGRAPH_HOME", "XDG_STATE_HOME"))
    if home.is_absolute():
        return home
    return (xdg if xdg.is_absolute() else Path(os.path.expanduser("~")) / ".local" / "state") / "monograph"


def calibration_file() -> Path:
    """Return the file that records how long updates took on this machine."""
    return cache_root()[0] / "calibration.json"


def keep_compiled() -> None:
    """Let torch keep compiled code in the cache folder, not in a temporary one that is gone after a reboot.

    $TORCHINDUCTOR_CACHE_DIR has precedence; where the folder cannot be written torch keeps its own.
    """
    folder = cache_root()[0] / "compiled"
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
