"""Make the command lines that are printed for the user to copy.

They call this program as it was called, so they work unchanged in the same working folder.
"""

import os
import shutil
import sys
from collections.abc import Sequence

from rich.cells import cell_len

from monograph.run.progress import LABEL_WIDTH, Progress
from monograph.terminal import shell_words

# What a shell reads as the end of a line that goes on.
_CONTINUED = " \\"
_INDENT = "    "


def command_line(*arguments: str) -> str:
    """Return a command line that calls this program as it was called, with arguments quoted for the
    shell.
    """
    return shell_words(*_program(), *arguments)


def show_command(progress: Progress, label: str, *arguments: str) -> None:
    """Print a command line that calls this program, so that it can be copied.

    A long one is continued on further lines, as a shell continues it. If a word is longer than a line,
    the command is printed on one line, which is not cut.
    """
    words = [shell_words(word) for word in (*_program(), *arguments)]
    room = progress.screen.width - LABEL_WIDTH
    lines = _continued_lines(words, room)
    if all(cell_len(line) <= room for line in lines):
        progress.line(label, *lines)
    else:
        print(" ".join(words), file=sys.stderr)


def _continued_lines(words: Sequence[str], room: int) -> list[str]:
    """Return a command on as few lines of at most `room` columns as its words allow.

    Each line but the last ends with a backslash, and each but the first is indented.
    """
    lines = [words[0]]
    for number, word in enumerate(words[1:], 1):
        is_last = number == len(words) - 1
        longer = f"{lines[-1]} {word}"
        needed = cell_len(longer)
        if not is_last:
            needed += len(_CONTINUED)
        if needed <= room:
            lines[-1] = longer
        else:
            lines[-1] += _CONTINUED
            lines.append(_INDENT + word)
    return lines


def _program() -> list[str]:
    """Return the words by which a shell calls this program as it was called."""
    called = os.path.abspath(sys.argv[0])
    script = shutil.which("monograph")
    is_module = os.path.basename(called) == "__main__.py"
    # The shell's `monograph` is this program if it is in the folder of the Python that runs the
    # module, or if it is the script that was called.
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
