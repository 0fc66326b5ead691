"""Exceptions for errors that are not bugs, and the exit code that the command line returns for each
class.
"""

import difflib
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable

Warn = Callable[[str], None]  # shows a line about something that stops nothing

_LONGEST = 1500  # characters; a longer message, which may quote a file, is shortened
# Messages of torch, oneDNN and Python when the host's memory, or the process's memory limit, is
# used up.
_HOST_IS_FULL = (
    "can't allocate memory",
    "could not create a primitive",
    "could not create a memory object",
    "can't start new thread",
)


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return `; did you mean X?` for the choice closest to `word`, or "" if none is close.

    Capitals count for nothing. If no whole choice is close, the parts after the last dot are
    compared.
    """
    full = {choice.lower(): choice for choice in choices}
    last = {choice.rpartition(".")[2].lower(): choice for choice in full.values()}
    word = word.lower()
    near = [full[choice] for choice in difflib.get_close_matches(word, full, n=1, cutoff=0.75)]
    near = near or [
        last[part]
        for part in difflib.get_close_matches(word.rpartition(".")[2], last, n=1, cutoff=0.7)
    ]
    return f"; did you mean {near[0]}?" if near else ""


def join_with_or(words: Iterable[str]) -> str:
    """Return words as a choice: "a, b or c"."""
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


def said_by(error: BaseException) -> str:
    """Return an exception's message, or "" if its class, which may be a user's, raises while making
    one.
    """
    try:
        return str(error)
    except Exception:
        return ""


def host_is_full(error: BaseException) -> bool:
    """Return whether an error means that the host has no memory left for this process."""
    return isinstance(error, MemoryError) or any(words in said_by(error) for words in _HOST_IS_FULL)


class MonographError(Exception):
    """The base class of all errors that are shown as one line; the command line exits with
    `exit_code`.

    Attributes:
        exit_code: the process's exit code.
        told: whether another rank of the same run reports this error; None if all ranks raise it
            and the first reports it.
    """

    exit_code = 1
    told: bool | None = None

    def __str__(self) -> str:
        text = super().__str__()
        return (
            text
            if len(text) <= _LONGEST
            else f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 3 :]}"
        )


class UsageError(MonographError):
    """The command line or the configuration is wrong (a key, a type, a combination)."""

    exit_code = 2


class InputRefused(MonographError):
    """A given file or value is damaged, unsupported or does not fit; the message names it."""

    exit_code = 3


class Unreadable(MonographError):
    """The system failed to read a file or folder, so its content is unknown.

    This is not an InputRefused: code that replaces or regenerates a damaged file must not do so
    with an unread one.
    """

    exit_code = 3

    def __init__(self, message: str, errno: int = 0):
        super().__init__(message)
        self.errno = errno


class NoValidCheckpoint(MonographError):
    """No checkpoint of the run passed verification."""

    exit_code = 4


class Diverged(MonographError):
    """Too many updates in a row had a non-finite loss or gradient."""

    exit_code = 5


class OutOfDeviceMemory(MonographError):
    """The smallest micro-batch does not fit the device.

    Attributes:
        retry_rows: the rows of the micro-batches with which restarted ranks try again; 0 if none
            could be fewer.
    """

    exit_code = 6
    retry_rows = 0


class DiskFull(MonographError):
    """A file could not be written; the files that were on the disk before are untouched."""

    exit_code = 7


class RunInUse(MonographError):
    """Another process holds the run folder's lock, or sends the run to the same tracker."""

    exit_code = 8


class Stopped(MonographError):
    """A signal asked the run to stop, and it stopped after saving."""

    exit_code = 75


class PeerLost(MonographError):
    """Another process of the same run is gone, and this one cannot go on without it."""


class Ended(MonographError):
    """The run ended earlier with an error that a restart does not fix."""

    def __init__(self, message: str, exit_code: int = 1):
        super().__init__(message)
        self.exit_code = exit_code


def bug_report(arguments: list[str]) -> str:
    """Write the exception being handled to a file and return the file's name, or else how to see
    the traceback.
    """
    from monograph import __version__

    head = (
        f"monograph {__version__}, Python {sys.version}, {sys.platform}\narguments: {arguments}\n\n"
    )
    text = (head + traceback.format_exc()).encode("utf-8", "backslashreplace")
    path = None
    try:
        descriptor, path = tempfile.mkstemp(prefix="monograph-bug-", suffix=".txt")
        with open(descriptor, "wb") as file:
            file.write(text)
    except OSError:
        if path:
            os.unlink(path)
        return "what MONOGRAPH_DEBUG=1 prints (no file could be written)"
    return path
