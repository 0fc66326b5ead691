"""Find the folders for data that can be made again (tokens, compiled code), and for state that must
not be lost.
"""

import hashlib
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def cache_root(given: str | Path | None = None) -> tuple[Path, bool]:
    """Return the cache folder (`given`, $MONOGRAPH_HOME or the system's), and whether the user
    chose it.

    If the user chose a folder that cannot be written, that is an error and no other folder is used.
    """
    if given is not None:
        return Path(os.path.expanduser(given)), True
    if home := os.environ.get("MONOGRAPH_HOME"):
        return Path(os.path.expanduser(home)), True
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "monograph", False
    return Path(os.path.expanduser("~")) / ".cache" / "monograph", False


def state_root() -> Path:
    """Return the folder for data that a user must not lose or share: $MONOGRAPH_HOME or the
    system's.

    Relative paths are ignored: such a folder could belong to another user, the owner of the working
    directory.
    """
    home, xdg = (
        Path(os.path.expanduser(os.environ.get(name, "")))
        for name in ("MONOGRAPH_HOME", "XDG_STATE_HOME")
    )
    if home.is_absolute():
        return home
    return (
        xdg if xdg.is_absolute() else Path(os.path.expanduser("~")) / ".local" / "state"
    ) / "monograph"


def calibration_file() -> Path:
    """Return the file that records how long updates took on this machine."""
    return cache_root()[0] / "calibration.json"


def keep_compiled() -> None:
    """Let torch keep compiled code in the cache folder, since its default is a temporary one, gone
    after a reboot.

    $TORCHINDUCTOR_CACHE_DIR has precedence. If the cache folder cannot be written, torch's default
    stays. While this process goes on, another one fills a new folder with what the first graph
    would wait for. A folder that has grown beyond `MOST_COMPILED_BYTES` loses the half that was
    used longest ago.
    """
    folder = compiled_folder()
    with suppress(OSError):
        new = not folder.exists()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK) and os.environ.setdefault(
            "TORCHINDUCTOR_CACHE_DIR", str(folder)
        ) == str(folder):
            if new:
                python_aside(_FIRST_GRAPH)
            _trim(folder)


MOST_COMPILED_BYTES = 4 * 2**30  # a run's compiled step takes about 10 MB


def compiled_folder() -> Path:
    """Return the folder in which torch keeps compiled code unless $TORCHINDUCTOR_CACHE_DIR names
    another.
    """
    return cache_root()[0] / "compiled"


def files_in(folder: Path) -> list[tuple[float, int, Path]]:
    """Return (time of last use, bytes, path) of each file in a folder and those below, the one used
    last first.

    Another process may remove some of them meanwhile.
    """
    files = []
    for place, _, names in os.walk(folder):
        for path in (Path(place, name) for name in names):
            with suppress(OSError):
                entry = path.lstat()
                if stat.S_ISREG(entry.st_mode):
                    files.append((max(entry.st_atime, entry.st_mtime), entry.st_size, path))
    return sorted(files, reverse=True)


def _trim(folder: Path) -> None:
    files = files_in(folder)
    if sum(size for _, size, _ in files) <= MOST_COMPILED_BYTES:
        return
    kept = 0
    for _, size, path in files:
        kept += size
        if kept > MOST_COMPILED_BYTES // 2:
            with suppress(OSError):
                path.unlink()


# It makes torch try the processor's vector instructions and compile its headers, which takes
# seconds.
_FIRST_GRAPH = """
import torch
from monograph.graph.capture import compiled
compiled(lambda x: x + 1)(torch.ones(64))
"""


# Its standard input ends when this process does, even if that was killed.
_ENDS_WITH_ITS_PARENT = """
import os, threading
threading.Thread(target=lambda: (os.read(0, 1), os._exit(1)), daemon=True).start()
"""


def python_aside(code: str, *arguments: str) -> subprocess.Popen[bytes]:
    """Let another process of this Python run this package's `code`, silently; it ends with this
    process at the latest.

    It reads `arguments` in sys.argv, and finds modules as this process does, but not in the working
    folder.
    """
    command = [sys.executable, "-P", "-c", _ENDS_WITH_ITS_PARENT + code, *arguments]
    quiet = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet)


def is_compiled(key: str) -> bool:
    """Return whether the step of this key was compiled into the cache before; True if there is no
    cache.
    """
    return (mark := _mark(key)) is None or mark.exists()


def mark_compiled(key: str) -> None:
    """Note that the step of this key is compiled."""
    if mark := _mark(key):
        with suppress(OSError):
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()


def _mark(key: str) -> Path | None:
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    return Path(folder, "steps", digest(key)) if folder else None


def found_once(key: str, find: Callable[[], bool]) -> bool:
    """Return what `find` returned when it was first called with this key, which the cache folder
    keeps.
    """
    answers = {
        answer: cache_root()[0] / "found" / f"{digest(key)}.{answer}" for answer in (True, False)
    }
    with suppress(OSError):
        for answer, path in answers.items():
            if path.exists():
                return answer
    found = find()
    with suppress(OSError):
        answers[found].parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        answers[found].touch()
    return found


def digest(key: str) -> str:
    """Return a name for a key of the cache."""
    return hashlib.sha256(key.encode()).hexdigest()
