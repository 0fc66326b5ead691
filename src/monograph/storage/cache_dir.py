"""Find the folders for data that can be made again (tokens, compiled code), and for state that must not be lost."""

import atexit
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path


def cache_root(given: str | Path | None = None) -> tuple[Path, bool]:
    """Return the cache folder (`given`, $MONOGRAPH_HOME or the system's), and whether the user chose it.

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
    """Return the folder for data that a user must not lose or share: $MONOGRAPH_HOME or the system's.

    Relative paths are ignored: such a folder could belong to another user, the owner of the working directory.
    """
    home, xdg = (Path(os.path.expanduser(os.environ.get(name, ""))) for name in ("MONOGRAPH_HOME", "XDG_STATE_HOME"))
    if home.is_absolute():
        return home
    return (xdg if xdg.is_absolute() else Path(os.path.expanduser("~")) / ".local" / "state") / "monograph"


def calibration_file() -> Path:
    """Return the file that records how long updates took on this machine."""
    return cache_root()[0] / "calibration.json"


def keep_compiled() -> None:
    """Let torch keep compiled code in the cache folder, since its default is a temporary one, gone after a reboot.

    $TORCHINDUCTOR_CACHE_DIR has precedence. If the cache folder cannot be written, torch's default stays. While this
    process goes on, another one fills a new folder with what the first graph would wait for.
    """
    folder = cache_root()[0] / "compiled"
    with suppress(OSError):
        new = not folder.exists()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK) and os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder)) == str(folder):
            if new:
                _compile_aside()


# It makes torch try the processor's vector instructions and compile its headers, which takes seconds.
_FIRST_GRAPH = """
import torch
from monograph.graph.capture import compiled
compiled(lambda x: x + 1)(torch.ones(64))
"""


def _compile_aside() -> None:
    quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    process = subprocess.Popen([sys.executable, "-P", "-c", _FIRST_GRAPH], **quiet)  # type: ignore[call-overload]
    atexit.register(process.kill)
