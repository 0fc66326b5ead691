"""Handle SIGINT (Ctrl-C) and SIGTERM while the program starts, works and ends: print one line,
never a traceback.

Training has its own handlers, which save a checkpoint first (`monograph.run.signals`).
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn, TypeVar

Command = TypeVar("Command", bound=Callable[..., int | None])


def end_at_once(*_: object) -> NoReturn:
    """Handle SIGINT while there is nothing to lose: print a line and exit with code 130."""
    _leave("interrupted", 130)


def _terminate(*_: object) -> NoReturn:
    _leave("terminated", 143)


def _leave(why: str, code: int) -> NoReturn:
    # An error here would be raised in the work that was interrupted, which may take no notice of it
    # and go on.
    with suppress(OSError):  # nobody reads any more
        os.write(2, f"error: {why}\n".encode())
    os._exit(code)


def while_starting() -> None:
    """Replace Python's handlers during the imports, which take seconds; a signal that was ignored
    stays ignored.
    """
    # A launcher such as torchrun sets RANK and ends its ranks by SIGTERM; such a rank prints
    # nothing.
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and "RANK" not in os.environ:
        signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_at_once)


def working(command: Command) -> Command:
    """Return the command, whose imports are done, and let SIGINT raise KeyboardInterrupt from now
    on.
    """
    if signal.getsignal(signal.SIGINT) is end_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return command


class Terminated(KeyboardInterrupt):
    """A SIGTERM that was turned into an exception; the program ends with a line and exit code 143."""


@contextmanager
def taken_back() -> Iterator[None]:
    """Let SIGTERM raise `Terminated` inside the block, so that half-made results are removed as
    after Ctrl-C.
    """

    def end(*_: object) -> NoReturn:
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Let a signal inside the block, in which an ended command waits for its threads, end the
    process with a line.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, end_at_once)
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def while_ending() -> None:
    """Let a further SIGINT end the interpreter's shutdown silently."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
