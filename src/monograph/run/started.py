"""Record how a run was started, in starts.jsonl.

Each process that begins or resumes a run adds one line, a JSON object called a start.
"""

import json
import platform
import re
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from monograph import __version__
from monograph.errors import DiskFull, InputRefused, Unreadable
from monograph.run.folder import Run
from monograph.run.writing import write_atomically
from monograph.storage.reading import contents, exists, is_file, parse_json
from monograph.terminal import shell_words


def note_start(run: Run) -> None:
    """Add a start with this process's command, time and versions, and the working folder's commit.

    If the file cannot be written, nothing happens, since no run needs it.
    """
    start: dict[str, Any] = {
        "command": shell_words(_program(), *sys.argv[1:]),
        "time": time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(time.time())),
        "versions": {
            "monograph": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
    with suppress(Unreadable, InputRefused, OSError, ValueError):
        start["commit"] = _commit()
    lines = [json.dumps(known) for known in [*starts_of(run), start]]
    with suppress(DiskFull):
        write_atomically(run.starts, "".join(f"{line}\n" for line in lines))


def starts_of(run: Run) -> list[dict[str, Any]]:
    """Return the starts of a run, the oldest first, without damaged lines."""
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


def describe_start(run: Run) -> list[tuple[str, str]]:
    """Return (name, text) pairs that tell a person how a run was started."""
    starts = starts_of(run)
    if not starts:
        return []
    first = starts[0]
    pairs = [("command", starts[0]["command"])]
    pairs += [("continued by", start["command"]) for start in starts[1:]]
    pairs.append(("started", str(first.get("time"))))
    versions = first.get("versions")
    if isinstance(versions, dict):
        pairs.append(
            ("versions", ", ".join(f"{name} {version}" for name, version in versions.items()))
        )
    if first.get("commit"):
        pairs.append(("git commit of your folder", str(first["commit"])))
    return pairs


def _program() -> str:
    """Return the program's name as a person would type it."""
    name = Path(sys.argv[0]).name
    return "monograph" if name in ("__main__.py", "-m", "-c", "") else name


def _commit() -> str:
    """Return the commit of the git repository of the working folder; "" if there is none."""
    # Read from git's files. The program git would run programs that a repository's settings name.
    folder = Path.cwd()
    repository = next((each for each in (folder, *folder.parents) if exists(each / ".git")), None)
    if repository is None:
        return ""
    git = repository / ".git"
    if is_file(git):  # of a second working tree: the path of its own part of the repository
        git = repository / _text(git).removeprefix("gitdir: ")
    head = _text(git / "HEAD")
    if not head.startswith("ref: "):
        return _hash(head)
    branch = head.removeprefix("ref: ")
    shared = git / (_text(git / "commondir") or ".")
    packed = (line.partition(" ") for line in _text(shared / "packed-refs").splitlines())
    return _hash(_text(shared / branch)) or _hash(
        next((commit for commit, _, name in packed if name == branch), "")
    )


def _text(path: Path) -> str:
    return (contents(path) or b"").decode("utf-8", "replace").strip()


def _hash(text: str) -> str:
    return text[:12] if re.fullmatch("[0-9a-f]{40,64}", text) else ""
