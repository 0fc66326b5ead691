"""What SIGINT (Ctrl-C) and SIGTERM do while the program starts, works and ends; never a traceback, never nothing said.

Training has signals of its own, which save (`monograph.run.signals`).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

Command = TypeVar("Command", bound=Callable[..., int])


def end_at_once(*_: Any) -> NoReturn:
    """Return the handler of interrupts while there is nothing to lose: a line, and exit code 130."""
    os.write(2, b"error: interrupted\n")
    os._exit(130)


def _terminate(*_: Any) -> NoReturn:
    os.write(2, b"error: terminated\n")
    os._exit(143)


def while_starting() -> None:
    """Imports take seconds, in which an interrupt would be a traceback. An ignored interrupt stays ignored."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and "RANK" not in os.environ:  # a launcher ends its ranks so
        signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_at_once)


def working(command: Command) -> Command:
    """Return the command, all of whose imports are done: from here on an interrupt is a KeyboardInterrupt."""
    if signal.getsignal(signal.SIGINT) is end_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return command


class Terminated(KeyboardInterrupt):
    """The same by SIGTERM: a line, and exit code 143."""


@contextmanager
def taken_back() -> Iterator[None]:
    """In the block SIGTERM takes back what is half made, as an interrupt does."""

    def end(*_: Any) -> NoReturn:
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def while_ending() -> None:
    """Another interrupt, while what was imported is taken down, ends that without a word."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
