"""Write the page of a run or a sweep while it is in progress, in a small share of its time."""

from collections.abc import Callable
from contextlib import suppress

from monograph.device import clock
from monograph.errors import DiskFull, InputRefused

IN_PROGRESS = "in progress"
REFRESH_S = 15  # the page is written at most this often, and a browser loads it this often
SHARE = 0.01  # writing the page may take at most this share of the time


class PageInProgress:
    """The page of a run or a sweep that is in progress.

    Errors in writing the page are ignored, since the run must not end for them.

    Args:
        write: writes the page. Its argument is the state that the page shows, such as
            "in progress".
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._due_s = clock() + REFRESH_S

    def refresh(self) -> None:
        """Write the page if it is due."""
        if clock() < self._due_s:
            return
        began_s = clock()
        self.write(IN_PROGRESS)
        # A page that took long to write is next due later.
        self._due_s = clock() + max(REFRESH_S, (clock() - began_s) / SHARE)

    def write(self, state: str) -> None:
        """Write the page now; `state` is the state that it shows."""
        with suppress(DiskFull, InputRefused, OSError):
            self._write(state)


def refresh_s(state: str) -> int:
    """Return the seconds after which a page that shows `state` reloads itself; 0 for never."""
    return REFRESH_S if state == IN_PROGRESS else 0
