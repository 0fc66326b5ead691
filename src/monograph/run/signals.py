"""Handle signals during training.

The first stop signal lets the loop finish its update and save. A second Ctrl-C ends the process.
"""

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, Self

from monograph.terminal import takes_escapes

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignal:
    """A context manager that notes signals; the training loop asks it between updates.

        with StopSignal() as stop:
            for update in train(...):
                if stop.save_requested:
                    save()
                    stop.save_requested = False
                if stop.requested:
                    save()
                    raise Stopped

    A SIGINT after the first stop signal ends the process immediately with exit code 130. Nothing is
    lost, because a checkpoint gets its name only once it is complete. The former handlers are
    restored when the block ends. Only the main thread may enter the block, since Python runs signal
    handlers there.

    Attributes:
        requested: the name of the first stop signal: SIGINT, SIGTERM or SIGHUP. None until one
            arrives.
        save_requested: whether SIGUSR1 arrived. The loop sets it back once it has saved.
    """

    def __init__(self, on_request: Callable[[str], None] | None = None) -> None:
        """Note no signals yet.

        Args:
            on_request: called with the name of the first stop signal. It runs between two bytecodes
                of the main thread's work, so it should only print.
        """
        self.requested: str | None = None
        self.save_requested = False
        self._on_request = on_request
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in _STOP_SIGNALS:
            # A signal that nohup or a shell's & made this process ignore stays ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._former[number] = signal.signal(number, self._stop)
        self._former[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._save)
        return self

    def __exit__(self, *raised: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self.requested is None:
            self.requested = signal.Signals(number).name
            if self._on_request is not None:
                self._on_request(self.requested)
        elif number == signal.SIGINT:
            if takes_escapes(sys.stderr):
                with suppress(OSError):  # the terminal is gone
                    # Show the cursor, end colours.
                    os.write(sys.stderr.fileno(), b"\x1b[?25h\x1b[0m\n")
            os._exit(130)

    def _save(self, number: int, frame: FrameType | None) -> None:
        self.save_requested = True
