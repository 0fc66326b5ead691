"""Make the command lines that are printed for the user to copy.

They call this program as it was called, so they work unchanged in the same working folder.
"""

import os
import shutil
import sys

from monograph.run.progress import LABEL_WIDTH, Progress
from monograph.terminal import shell_words


def command_line(*arguments: str) -> str:
    """Return a command line that calls this program as it was called, with arguments quoted for the
    shell.
    """
    return shell_words(*_program(), *arguments)


def show_command(progress: Progress, label: str, *arguments: str) -> None:
    """Print a command line that calls this program, on a line that is never cut, so that it can be
    copied.
    """
    text = command_line(*arguments)
    if len(text) + LABEL_WIDTH < progress.screen.width:
        progress.line(label, text)
    else:
        print(text, file=sys.stderr)


def _program() -> list[str]:
    """Return the words by which a shell calls this program as it was called."""
    called = os.path.abspath(sys.argv[0])
    script = shutil.which("monograph")
    is_module = os.path.basename(called) == "__main__.py"
    # The shell's `monograph` is this program if it lies next to the Python that runs the module, or
    # if it is the script that was called.
    if script and is_module and _share_folder(script, sys.executable):
        return ["monograph"]
    if script and not is_module and os.path.realpath(script) == os.path.realpath(called):
        return ["monograph"]
    if is_module:
        return [_shortest_path(sys.executable), "-m", "monograph"]
    return [_shortest_path(called)]


def _share_folder(one: str, other: str) -> bool:
    """Return whether two files are in the same folder."""
    return os.path.dirname(os.path.abspath(one)) == os.path.dirname(os.path.abspath(other))


def _shortest_path(path: str) -> str:
    """Return the path relative to the working folder if the file is inside it, else unchanged.

    Links are not followed: .venv/bin/python is a link, and its target would be another Python.
    """
    relative = os.path.relpath(path)
    if relative.startswith(os.pardir):
        return path
    # A shell would look up a name without a slash in PATH.
    return relative if os.sep in relative else os.path.join(os.curdir, relative)
