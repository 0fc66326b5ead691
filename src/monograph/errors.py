"""Exceptions for errors that are not bugs, with the exit code of the command line for each class."""

import difflib
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable

Warn = Callable[[str], None]  # a function that shows a warning, one line

# The most characters of a message. A message may quote a file, and is shortened if it is longer.
_MAX_MESSAGE_LENGTH = 1500
# Parts of messages of torch, oneDNN and Python when the host's memory, or the process's memory limit,
# is used up.
_HOST_IS_FULL = (
    "can't allocate memory",
    "could not create a primitive",
    "could not create a memory object",
    "can't start new thread",
)


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return `; did you mean X?` for the choice closest to `word`, or "" if none is close.

    Upper and lower case are taken as equal. A word of four letters or more with which one choice alone
    begins means that one. If no whole choice is close, the parts after the last dot are compared.
    """
    by_name = {choice.lower(): choice for choice in choices}
    by_last_part = {choice.rpartition(".")[2].lower(): choice for choice in by_name.values()}
    word = word.lower()
    last_part = word.rpartition(".")[2]
    longer = [name for name in by_name if name.startswith(word)]
    if len(word) >= 4 and len(longer) == 1:
        return f"; did you mean {by_name[longer[0]]}?"
    close_names = difflib.get_close_matches(word, by_name, n=1, cutoff=0.75)
    if close_names:
        return f"; did you mean {by_name[close_names[0]]}?"
    close_parts = difflib.get_close_matches(last_part, by_last_part, n=1, cutoff=0.7)
    if close_parts:
        return f"; did you mean {by_last_part[close_parts[0]]}?"
    return ""


def join_with_or(words: Iterable[str]) -> str:
    """Return words as a choice: "a, b or c"."""
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


def text_of_error(error: BaseException) -> str:
    """Return an exception's message; "" if its class, which may be a user's, fails to make one."""
    try:
        return str(error)
    except Exception:
        return ""


def host_is_full(error: BaseException) -> bool:
    """Return whether an error means that the host has no memory left for this process."""
    return isinstance(error, MemoryError) or any(
        words in text_of_error(error) for words in _HOST_IS_FULL
    )


class MonographError(Exception):
    """The base class of all errors that are shown as one line.

    Attributes:
        exit_code: the exit code of the command line.
        reported_elsewhere: whether another rank of the same run reports this error; None: all ranks
            raise it, and the first rank reports it.
    """

    exit_code = 1
    reported_elsewhere: bool | None = None

    def __str__(self) -> str:
        text = super().__str__()
        if len(text) <= _MAX_MESSAGE_LENGTH:
            return text
        return f"{text[: _MAX_MESSAGE_LENGTH // 2]} ... {text[-_MAX_MESSAGE_LENGTH // 3 :]}"


class UsageError(MonographError):
    """The command line or the configuration is wrong (a key, a type, a combination)."""

    exit_code = 2


class InputRefused(MonographError):
    """A given file or value is damaged, unsupported or does not fit; the message names it."""

    exit_code = 3


class Unreadable(MonographError):
    """The system failed to read a file or folder, so its content is unknown.

    It is not a subclass of InputRefused, because code that replaces a damaged file must not replace a
    file that could not be read.
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
        retry_rows: the number of rows of a micro-batch with which restarted ranks try again; 0: it
            cannot be smaller.
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
    """Write the traceback of the exception that is being handled to a file.

    Args:
        arguments: the arguments of the command line.

    Returns:
        The file's name. If no file could be written, how to see the traceback.
    """
    from monograph import __version__

    header = (
        f"monograph {__version__}, Python {sys.version}, {sys.platform}\narguments: {arguments}\n\n"
    )
    text = (header + traceback.format_exc()).encode("utf-8", "backslashreplace")
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
