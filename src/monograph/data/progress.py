"""Report the progress of long work to its caller, as progress(stage, units done, units in all or
None).
"""

import time
from collections.abc import Callable

Progress = Callable[[str, int, int | None], None]

INTERVAL_S = 0.1


class Meter:
    """A counter of one stage of work that calls `progress(stage, done, total)` at most every 0.1 s.

    Args:
        progress: the caller's function, or None to count only.
        stage: the name of the stage ("sources", "tokenizer", "bytes tokenised", "verify", ...).
        total: the final value of `done`, in the stage's unit (bytes everywhere in this folder);
            None if unknown.
    """

    def __init__(self, progress: Progress | None, stage: str, total: int | None) -> None:
        self.progress = progress
        self.stage = stage
        self.total = total
        self.done = 0
        self._told_s = -INTERVAL_S
        self.add(0)

    def add(self, amount: int) -> None:
        """Count `amount` more units, and report if the last report is at least 0.1 s old."""
        self.done += amount
        now_s = time.monotonic()
        if self.progress is not None and now_s - self._told_s >= INTERVAL_S:
            self._told_s = now_s
            self.progress(self.stage, self.done, self.total)

    def finish(self) -> None:
        """Report the final count."""
        if self.progress is not None:
            self.progress(self.stage, self.done, self.total)
