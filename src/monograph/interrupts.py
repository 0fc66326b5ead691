"""Handle SIGINT (Ctrl-C) and SIGTERM while the program starts, works and ends.

The program prints one line and never a traceback. Training has its own handlers, which save a
checkpoint first (`monograph.run.signals`).
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn, TypeVar

Command = TypeVar("Command", bound=Callable[..., int | None])


def end_at_once(*_: object) -> NoReturn:
    """Handle SIGINT while there is nothing to lose: print a line and exit with code 130."""
    _exit_at_once("interrupted", 130)


def _terminate(*_: object) -> NoReturn:
    _exit_at_once("terminated", 143)


def _exit_at_once(reason: str, code: int) -> NoReturn:
    # `os._exit` ends the process even where an exception would be caught by the interrupted work.
    with suppress(OSError):  # the reader of stderr may be gone
        os.write(2, f"error: {reason}\n".encode())
    os._exit(code)


def handle_while_starting() -> None:
    """Replace Python's handlers during the imports, which take seconds.

    A signal that the parent process made Python ignore stays ignored.
    """
    # A launcher such as torchrun sets RANK, and ends its ranks by SIGTERM. Then a rank prints nothing.
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and "RANK" not in os.environ:
        signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_at_once)


def interruptible(command: Command) -> Command:
    """Return a command, and let SIGINT raise KeyboardInterrupt from now on.

    This is called once the command's imports are done: `interruptible(command)(...)`.
    """
    if signal.getsignal(signal.SIGINT) is end_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return command


class Terminated(KeyboardInterrupt):
    """A SIGTERM as an exception. If it is not caught, the program ends with a line and exit code 143."""


@contextmanager
def raise_on_sigterm() -> Iterator[None]:
    """Let SIGTERM raise `Terminated` in the `with` block, so that the code in it can clean up.

    The code then removes incomplete results, as after Ctrl-C.
    """

    def handle(*_: object) -> NoReturn:
        raise Terminated

    handler_before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler_before)


@contextmanager
def end_at_once_inside() -> Iterator[None]:
    """Let SIGINT and SIGTERM print a line and end the process immediately, in the `with` block.

    In the block, a command that has done its work waits for its threads.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, end_at_once)
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def handle_while_ending() -> None:
    """Let a further SIGINT end the interpreter's shutdown silently."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
