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
    lines = [json.dumps(each_start) for each_start in [*starts_of(run), start]]
    with suppress(DiskFull):
        write_atomically(run.starts, "".join(f"{line}\n" for line in lines))


def starts_of(run: Run) -> list[dict[str, Any]]:
    """Return the starts of a run, the oldest first, without damaged lines."""
    content = b""
    with suppress(Unreadable, OSError):
        content = contents(run.starts) or b""
    starts = []
    for line in content.splitlines():
        with suppress(ValueError, RecursionError):
            start = parse_json(line)
            if isinstance(start, dict) and isinstance(start.get("command"), str):
                starts.append(start)
    return starts


def describe_start(run: Run) -> list[tuple[str, str]]:
    """Return (name, text) pairs that tell a person how a run was started."""
    starts = starts_of(run)
    if not starts:
        return []
    first, *later = starts
    pairs = [("command", first["command"])]
    pairs += [("continued by", start["command"]) for start in later]
    pairs.append(("started", str(first.get("time"))))
    versions = first.get("versions")
    if isinstance(versions, dict):
        text = ", ".join(f"{name} {version}" for name, version in versions.items())
        pairs.append(("versions", text))
    if first.get("commit"):
        pairs.append(("git commit of your folder", str(first["commit"])))
    return pairs


def _program() -> str:
    """Return the program's name as a person would type it."""
    name = Path(sys.argv[0]).name
    return "monograph" if name in ("__main__.py", "-m", "-c", "") else name


def _commit() -> str:
    """Return the commit of the git repository of the working folder; "" if there is none."""
    # This reads git's files and does not call git. The settings of a repository may name programs, which
    # git would run.
    folder = Path.cwd()
    repository = next((path for path in (folder, *folder.parents) if exists(path / ".git")), None)
    if repository is None:
        return ""
    git = repository / ".git"
    # In a second working tree, .git is a file with the path of the tree's own git folder.
    if is_file(git):
        git = repository / _text(git).removeprefix("gitdir: ")
    head = _text(git / "HEAD")
    if not head.startswith("ref: "):
        return _short_hash(head)
    branch = head.removeprefix("ref: ")  # such as refs/heads/main
    shared_git = git / (_text(git / "commondir") or ".")  # has the branches of all working trees
    commit = _short_hash(_text(shared_git / branch))
    if commit:
        return commit
    # A branch without a file has a line "COMMIT BRANCH" in packed-refs.
    for line in _text(shared_git / "packed-refs").splitlines():
        commit, _, name = line.partition(" ")
        if name == branch:
            return _short_hash(commit)
    return ""


def _text(path: Path) -> str:
    """Return the text of a file, without white space around it; "" if there is no such file."""
    return (contents(path) or b"").decode("utf-8", "replace").strip()


def _short_hash(text: str) -> str:
    """Return the first 12 digits of a commit's hash; "" if the text is no hash."""
    return text[:12] if re.fullmatch("[0-9a-f]{40,64}", text) else ""
