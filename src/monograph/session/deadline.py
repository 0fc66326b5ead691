"""Keep a whole run within the time that it is allowed: when its updates end, and what is done after
them.
"""

import math
from dataclasses import dataclass

from monograph.device import clock
from monograph.planner.defaults import CURVE_ROWS
from monograph.session.session import Session

# Of the time for updates, after which the machine's speed is known well enough to end them earlier.
SETTLED = 0.7
SCORING = 0.2  # of the whole time, which the last evaluation takes at most
FIGURES = 0.5  # of what is kept for the report, which drawing its PNG files takes at least
SAMPLE = 0.02  # of the whole time, which a sample before the end takes at most


@dataclass
class Deadline:
    """What a run's end costs, as far as it was measured, and the time that is left; a run without a
    limit has all.

    Attributes:
        session: the run.
        row_s: seconds of scoring a held-out row; 0 before the first.
        sample_s: seconds of writing a sample; 0 before the first.
    """

    session: Session
    row_s: float = 0.0
    sample_s: float = 0.0

    def last(self, update: int, per_update_s: float) -> int:
        """Return the number of updates after which the run should end; 0 if that stays as it is.

        Args:
            update: the number of updates done.
            per_update_s: seconds of an update.
        """
        session = self.session
        left_s = session.left_s - self.end_s(per_update_s)
        begun_s = session.spent_s - session.elapsed_s
        if left_s >= per_update_s * (session.updates - update):
            return 0
        if left_s > per_update_s and begun_s < SETTLED * (begun_s + left_s):
            return 0
        ends = update + max(1, int(left_s / per_update_s))
        return ends if ends < session.updates else 0

    def rows(self, per_update_s: float) -> int | None:
        """Return how many held-out rows the last evaluation has time for; None for all."""
        session = self.session
        if math.isinf(session.left_s):
            return None
        row_s = self._row_s(per_update_s)
        fitting = (
            max(CURVE_ROWS, int(min(session.left_s, self._share_s(SCORING)) / row_s))
            if row_s
            else math.inf
        )
        return int(fitting) if fitting < session.task.held_out_rows else None

    def allows(self, samples: float) -> bool:
        """Return whether there is time for a text as long as so many samples."""
        return self.session.left_s >= samples * self.sample_s

    @property
    def samples_midway(self) -> bool:
        """Return whether a sample takes little enough of the time to be written before the end."""
        return self.sample_s <= self._share_s(SAMPLE)

    @property
    def figures(self) -> bool:
        """Return whether there is time to draw the report's PNG files, which takes most of what is
        kept for it.
        """
        session = self.session
        return session.ends_s is None or session.ends_s - clock() >= FIGURES * session.end_s

    def end_s(self, per_update_s: float) -> float:
        """Return the seconds of the last evaluation, the last sample and measuring the memory of an
        update.
        """
        row_s = self._row_s(per_update_s)
        scoring_s = min(
            self.session.task.held_out_rows * row_s, max(self._share_s(SCORING), CURVE_ROWS * row_s)
        )
        return scoring_s + self.sample_s + per_update_s

    def _row_s(self, per_update_s: float) -> float:
        return self.row_s or self.session.scoring_s(1, per_update_s)

    def _share_s(self, share: float) -> float:
        """Return a share of the whole time."""
        minutes = self.session.plan.job.span.wall_minutes
        return math.inf if minutes is None or self.session.ends_s is None else share * 60 * minutes
