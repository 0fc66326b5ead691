"""How this program was called, so that the commands it prints work as they stand, in the same folder."""

from __future__ import annotations

import os
import shutil
import sys

from monograph.run.progress import LABEL_WIDTH, Progress
from monograph.terminal import shell_words


def command(*arguments: str) -> str:
    """A command line that calls this program again; arguments are quoted for the shell where they need it."""
    return shell_words(*_program(), *arguments)


def show(progress: Progress, label: str, *arguments: str) -> None:
    """Print such a command line, never broken or cut: it must work as it stands."""
    text = command(*arguments)
    if len(text) + LABEL_WIDTH < progress.screen.width:
        progress.line(label, text)
    else:
        print(text, file=sys.stderr)


def _program() -> list[str]:
    called, found = os.path.abspath(sys.argv[0]), shutil.which("monograph")
    as_module = os.path.basename(called) == "__main__.py"
    if found and (_beside(found, sys.executable) if as_module else os.path.realpath(found) == os.path.realpath(called)):
        return ["monograph"]
    return [_here(sys.executable), "-m", "monograph"] if as_module else [_here(called)]


def _beside(one: str, other: str) -> bool:
    return os.path.dirname(os.path.abspath(one)) == os.path.dirname(os.path.abspath(other))


def _here(path: str) -> str:
    """The path from the current folder, if it is inside; links stay, as .venv/bin/python is one and means the .venv."""
    near = os.path.relpath(path)
    if near.startswith(os.pardir):
        return path
    return near if os.sep in near else os.path.join(os.curdir, near)
