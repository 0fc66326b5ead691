"""Find the cache folder and the state folder, and manage compiled code in the cache.

The content of the cache, such as tokens and compiled code, can be made again. The content of the state
folder must not be lost.
"""

import hashlib
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

MOST_COMPILED_BYTES = 4 * 2**30  # a run's compiled step takes about 10 MB

# The code with which `keep_compiled` fills a new folder. Before its first graph, torch tests the
# processor's vector instructions and compiles its headers. Both take seconds, and the results are
# stored in the folder.
_COMPILE_SMALL_GRAPH = """
import torch
from monograph.graph.capture import compiled
compiled(lambda x: x + 1)(torch.ones(64))
"""

# The beginning of the code of each process of `start_python`. Its standard input ends when this
# process ends, even if this process is killed.
_EXIT_WITH_PARENT = """
import os, threading
threading.Thread(target=lambda: (os.read(0, 1), os._exit(1)), daemon=True).start()
"""


def cache_root(given: str | Path | None = None) -> tuple[Path, bool]:
    """Return the cache folder, and whether the user chose it.

    A caller that cannot write to a folder that the user chose must report an error, and use no other
    folder.

    Args:
        given: the value of the key `cache`; None for $MONOGRAPH_HOME or, if that is not set, the
            system's folder for caches.
    """
    if given is not None:
        return Path(os.path.expanduser(given)), True
    home = os.environ.get("MONOGRAPH_HOME")
    if home:
        return Path(os.path.expanduser(home)), True
    xdg = os.environ.get("XDG_CACHE_HOME")
    if xdg:
        return Path(xdg) / "monograph", False
    return Path(os.path.expanduser("~")) / ".cache" / "monograph", False


def state_root() -> Path:
    """Return the folder for data that a user must not lose or share.

    It is $MONOGRAPH_HOME or, if that is not set, a folder in the system's folder for state. A
    relative path in a variable is ignored, since it would be below the working folder, which may
    belong to another user.
    """
    # A variable that is not set gives Path(""), which is relative.
    home = Path(os.path.expanduser(os.environ.get("MONOGRAPH_HOME", "")))
    if home.is_absolute():
        return home
    xdg = Path(os.path.expanduser(os.environ.get("XDG_STATE_HOME", "")))
    if xdg.is_absolute():
        return xdg / "monograph"
    return Path(os.path.expanduser("~")) / ".local" / "state" / "monograph"


def calibration_file() -> Path:
    """Return the file that records how long updates took on this machine."""
    return cache_root()[0] / "calibration.json"


def keep_compiled() -> None:
    """Make torch store compiled code in the cache folder, by $TORCHINDUCTOR_CACHE_DIR.

    Torch's default is a temporary folder, which a reboot removes. If the variable is set already, or
    the cache folder cannot be written, torch's folder stays as it is.

    If the cache folder is new, another process compiles a small graph into it while this process goes
    on. So this process need not wait for what torch prepares before its first graph. If the files in
    the cache folder exceed `MOST_COMPILED_BYTES`, the least recently used are removed.
    """
    folder = compiled_folder()
    with suppress(OSError):
        is_new = not folder.exists()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            return
        torch_folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
        if torch_folder is None:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
        elif torch_folder != str(folder):
            return  # the user chose another folder, which is left alone
        if is_new:
            start_python(_COMPILE_SMALL_GRAPH)
        _remove_least_recent(folder)


def compiled_folder() -> Path:
    """Return the folder of compiled code in the cache; see `keep_compiled`."""
    return cache_root()[0] / "compiled"


def files_in(folder: Path) -> list[tuple[float, int, Path]]:
    """Return the time of last use, the size in bytes and the path of each file below a folder.

    The file that was used last comes first.
    """
    files = []
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            with suppress(OSError):  # another process may have just removed the file
                entry = path.lstat()
                if stat.S_ISREG(entry.st_mode):
                    last_use = max(entry.st_atime, entry.st_mtime)
                    files.append((last_use, entry.st_size, path))
    return sorted(files, reverse=True)


def _remove_least_recent(folder: Path) -> None:
    """If the files exceed MOST_COMPILED_BYTES, keep those last used, up to half of this size."""
    files = files_in(folder)
    if sum(size for _, size, _ in files) <= MOST_COMPILED_BYTES:
        return
    total_bytes = 0
    for _, size, path in files:
        total_bytes += size
        if total_bytes > MOST_COMPILED_BYTES // 2:
            with suppress(OSError):
                path.unlink()


def start_python(code: str, *arguments: str) -> subprocess.Popen[bytes]:
    """Start another Python process that prints nothing and ends with this process at the latest.

    A caller may drop the result. Then the module `subprocess` keeps it until the other process has
    ended, so the pipe to that process stays open.

    Args:
        code: what it runs. It can import what this process can, except from the working folder.
        *arguments: its sys.argv[1:].
    """
    # With -P, Python does not search the working folder, whose files may be a stranger's, for modules.
    command = [sys.executable, "-P", "-c", _EXIT_WITH_PARENT + code, *arguments]
    quiet = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet)


def is_compiled(key: str) -> bool:
    """Return whether the training step of a key was compiled into the cache before.

    A caller that gets False may compile the step in advance, in another process. That is of no use if
    torch has no lasting folder for compiled code, so the result is then True.

    Args:
        key: a text with everything on which the compiled code depends.
    """
    mark = _mark_file(key)
    return mark is None or mark.exists()


def mark_compiled(key: str) -> None:
    """Record in the cache that the training step of a key is compiled; see `is_compiled`."""
    mark = _mark_file(key)
    if mark:
        with suppress(OSError):
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()


def _mark_file(key: str) -> Path | None:
    """Return the path of the empty file that says that a step is compiled.

    It is in torch's folder for compiled code, which `keep_compiled` or the user has chosen. If neither has
    chosen one, the result is None.
    """
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    return Path(folder, "steps", key_digest(key)) if folder else None


def cached_answer(key: str, find: Callable[[], bool]) -> bool:
    """Return the answer to a yes-or-no question: from the cache, or by a call of `find`.

    Args:
        key: a text with the question, and everything on which the answer depends.
        find: finds the answer, which is then put into the cache.
    """
    folder = cache_root()[0] / "found"
    # The cache has an empty file for each question, and the end of the file's name is the answer.
    files = {answer: folder / f"{key_digest(key)}.{answer}" for answer in (True, False)}
    with suppress(OSError):
        for answer, path in files.items():
            if path.exists():
                return answer
    answer = find()
    with suppress(OSError):
        files[answer].parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        files[answer].touch()
    return answer


def key_digest(key: str) -> str:
    """Return the hex SHA-256 of a key, as a name for a file in the cache."""
    return hashlib.sha256(key.encode()).hexdigest()
