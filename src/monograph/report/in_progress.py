"""Write the page of a run or a sweep in progress now and then, in a small share of its time."""

from collections.abc import Callable
from contextlib import suppress

from monograph.device import clock
from monograph.errors import DiskFull, InputRefused

IN_PROGRESS = "in progress"
REFRESH_S = 15  # between two writings of the page, and between two loads of it
SHARE = 0.01  # of the time, that writing it may take


class PageInProgress:
    """The page of something in progress, which goes on if the page cannot be written.

    Args:
        write: writes the page; it is given what the thing is, such as "in progress".
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._due_s = clock() + REFRESH_S

    def refresh(self) -> None:
        """Write the page if it was not written for a while."""
        if clock() < self._due_s:
            return
        began = clock()
        self.write(IN_PROGRESS)
        self._due_s = clock() + max(REFRESH_S, (clock() - began) / SHARE)

    def write(self, state: str) -> None:
        """Write the page of what is in this state."""
        with suppress(DiskFull, InputRefused, OSError):
            self._write(state)


def refresh_s(state: str) -> int:
    """Return the seconds after which the page of what is in this state loads itself again; 0 if it
    will not change.
    """
    return REFRESH_S if state == IN_PROGRESS else 0
