"""Report the progress of long work to its caller."""

import time
from collections.abc import Callable

# The caller's function. Its arguments are the stage, the units that are done, and the units in all,
# or None if their number is not known.
ProgressCallback = Callable[[str, int, int | None], None]

INTERVAL_S = 0.1  # the shortest time between two reports


class Meter:
    """A counter of the units of one stage of work, which reports at most every 0.1 s.

    Attributes:
        progress: the caller's function; None: nothing is reported.
        stage: the name of the stage, such as "bytes tokenised".
        total: the final value of `done`; None if it is not known.
        done: the units so far. In `monograph.data` they are bytes.
    """

    def __init__(self, progress: ProgressCallback | None, stage: str, total: int | None) -> None:
        self.progress = progress
        self.stage = stage
        self.total = total
        self.done = 0
        self._last_report_s = -INTERVAL_S
        self.add(0)  # Reports that the stage has begun.

    def add(self, amount: int) -> None:
        """Count `amount` more units. Report them if the last report is at least 0.1 s old."""
        self.done += amount
        now_s = time.monotonic()
        if self.progress is not None and now_s - self._last_report_s >= INTERVAL_S:
            self._last_report_s = now_s
            self.progress(self.stage, self.done, self.total)

    def finish(self) -> None:
        """Report the final count."""
        if self.progress is not None:
            self.progress(self.stage, self.done, self.total)
