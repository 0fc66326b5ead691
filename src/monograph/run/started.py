"""Record how a run was started: a line of starts.jsonl for each process that began it or went on with it."""

import json
import os
import platform
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from monograph import __version__
from monograph.errors import DiskFull, Unreadable
from monograph.run.folder import Run
from monograph.run.writing import write_whole
from monograph.storage.reading import contents, parse_json
from monograph.terminal import shell_words

PATIENCE_S = 5  # after which git is not waited for


def note_start(run: Run) -> None:
    """Add this process's command, versions and time, and the commit of the working folder, to the run's record.

    A run goes on without the record if it cannot be written.
    """
    start = {
        "command": shell_words(_program(), *sys.argv[1:]),
        "time": time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(time.time())),
        "versions": {"monograph": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "commit": _git("rev-parse", "--short=12", "HEAD"),
        "is_changed": bool(_git("status", "--porcelain", "--untracked-files=no")),
    }
    lines = [json.dumps(known) for known in [*starts_of(run), start]]
    with suppress(DiskFull):
        write_whole(run.starts, "".join(f"{line}\n" for line in lines))


def starts_of(run: Run) -> list[dict[str, Any]]:
    """Return what `note_start` recorded, the oldest first, without damaged lines, as nothing needs them."""
    content = b""
    with suppress(Unreadable, OSError):
        content = contents(run.starts) or b""
    found = []
    for line in content.splitlines():
        with suppress(ValueError, RecursionError):
            start = parse_json(line)
            if isinstance(start, dict) and isinstance(start.get("command"), str):
                found.append(start)
    return found


def told(run: Run) -> list[tuple[str, str]]:
    """Return (name, text) pairs on how a run was started, for people."""
    starts = starts_of(run)
    if not starts:
        return []
    first, pairs = starts[0], [("command", starts[0]["command"])]
    pairs += [("continued by", start["command"]) for start in starts[1:]]
    pairs.append(("started", str(first.get("time"))))
    versions = first.get("versions")
    if isinstance(versions, dict):
        pairs.append(("versions", ", ".join(f"{name} {version}" for name, version in versions.items())))
    if first.get("commit"):
        changed = ", with uncommitted changes" if first.get("is_changed") else ""
        pairs.append(("your git commit", f"{first['commit']}{changed}"))
    return pairs


def _program() -> str:
    """Return the program's name as a person would type it."""
    name = Path(sys.argv[0]).name
    return "monograph" if name in ("__main__.py", "-m", "-c", "") else name


def _git(*arguments: str) -> str:
    """Return what git says of the working folder; "" without git or outside a repository.

    A repository's settings can name programs, of which git would run its file watcher here.
    """
    command = ["git", "-c", "core.fsmonitor=false", *arguments]
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE_S,
            errors="replace", check=False,
        )  # fmt: skip
        if done.returncode == 0:
            return done.stdout.strip()
    return ""
