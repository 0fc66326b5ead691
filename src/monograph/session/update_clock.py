"""Time the updates between two times that a run or a sweep shows its numbers."""

from collections.abc import Iterator
from contextlib import contextmanager

from monograph.device import clock


class UpdateClock:
    """Counts updates and the seconds that they took, without those of other work.

    Attributes:
        updates: the number of updates since the last restart.
    """

    def __init__(self) -> None:
        """Start now, with no updates."""
        self.updates = 0
        self._since_s = clock()

    @property
    def seconds(self) -> float:
        """Return the seconds of the updates since the last restart."""
        return clock() - self._since_s

    def restart(self) -> None:
        """Start again, as a new clock."""
        self.updates = 0
        self._since_s = clock()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of the `with` block out of the seconds."""
        began = clock()
        yield
        self._since_s += clock() - began
