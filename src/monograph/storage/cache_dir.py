"""Where Monograph keeps what it could make again: tokens of a corpus, and code that torch compiled."""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from pathlib import Path


def cache_root(given: str | Path | None = None) -> tuple[Path, bool]:
    """The cache folder: `given`, $MONOGRAPH_HOME or the system's; and whether a person chose it (then it must work)."""
    if given is not None:
        return Path(os.path.expanduser(given)), True
    if home := os.environ.get("MONOGRAPH_HOME"):
        return Path(os.path.expanduser(home)), True
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "monograph", False
    return Path(os.path.expanduser("~")) / ".cache" / "monograph", False


def state_root() -> Path:
    """The folder for what a user must not lose or share, $MONOGRAPH_HOME or the system's.

    A relative path is passed over: it would mean a folder of whoever made the one that this process was started in.
    """
    home, xdg = (Path(os.path.expanduser(os.environ.get(name, ""))) for name in ("MONOGRAPH_HOME", "XDG_STATE_HOME"))
    if home.is_absolute():
        return home
    return (xdg if xdg.is_absolute() else Path(os.path.expanduser("~")) / ".local" / "state") / "monograph"


def calibration_file() -> Path:
    """Where it is kept how long updates took on this machine."""
    return cache_root()[0] / "calibration.json"


def keep_compiled() -> None:
    """Let torch keep compiled code there, not in a temporary folder that is gone after a reboot.

    $TORCHINDUCTOR_CACHE_DIR has precedence; where the folder cannot be written torch keeps its own. Libraries that were
    cut off by a full disk or a power cut are removed: torch takes a processor whose probes it cannot load for a lesser
    one, and then fails.
    """
    folder = cache_root()[0] / "compiled"
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
            for library in folder.glob("*/*.so"):
                if _is_cut_off(library):
                    library.unlink(missing_ok=True)


def _is_cut_off(library: Path) -> bool:
    """Whether a file ends before a part of it that would be loaded, as far as its kind (64-bit ELF) is known."""
    length = library.stat().st_size
    with library.open("rb") as file:
        head = file.read(64)
        if len(head) < 64:
            return True
        if not head.startswith(b"\x7fELF\x02"):
            return False
        [begin], (size, count) = struct.unpack_from("<Q", head, 32), struct.unpack_from("<HH", head, 54)
        file.seek(begin)
        table = file.read(size * count)
    if len(table) < size * count:
        return True
    parts = (struct.unpack_from("<QQQQQ", table, index * size + 8) for index in range(count))
    return any(length < offset + in_file for offset, _, _, in_file, _ in parts)
