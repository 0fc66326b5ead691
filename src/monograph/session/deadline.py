"""Keep a whole run within the time that it is allowed: when its updates end, and what is done after them."""

import math
from dataclasses import dataclass

from monograph.data.corpus import Corpus
from monograph.planner.defaults import CURVE_ROWS
from monograph.session.session import Session

SETTLED = 0.7  # of the time for updates, after which the machine's speed is known well enough to end them earlier
SCORING = 0.2  # of the whole time, which the last evaluation takes at most


@dataclass
class Deadline:
    """What a run's end costs, as far as it was measured, and the time that is left; a run without a limit has all.

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
        left_s = session.left_s - self._end_s(per_update_s)
        begun_s = session.spent_s - session.elapsed_s
        if left_s >= per_update_s * (session.updates - update):
            return 0
        if left_s > per_update_s and begun_s < SETTLED * (begun_s + left_s):
            return 0
        return min(session.updates, update + max(1, int(left_s / per_update_s)))

    @property
    def rows(self) -> int | None:
        """Return how many held-out rows the last evaluation has time for; None for all."""
        session = self.session
        if not isinstance(session.corpus, Corpus) or not self.row_s or math.isinf(session.left_s):
            return None
        fitting = max(CURVE_ROWS, int(min(session.left_s, self._most_scoring_s) / self.row_s))
        return fitting if fitting < len(session.corpus.held_out) else None

    def allows(self, samples: float) -> bool:
        """Return whether there is time for a text as long as so many samples."""
        return self.session.left_s >= samples * self.sample_s

    def _end_s(self, per_update_s: float) -> float:
        """Return the seconds of the last evaluation, the last sample and measuring the memory of an update."""
        session = self.session
        held_out = len(session.corpus.held_out) if isinstance(session.corpus, Corpus) else 0
        row_s = self.row_s or session.scoring_s(1, per_update_s)
        scoring_s = min(held_out * row_s, max(self._most_scoring_s, CURVE_ROWS * row_s))
        return scoring_s + self.sample_s + per_update_s

    @property
    def _most_scoring_s(self) -> float:
        return SCORING * 60 * (self.session.plan.wall_minutes or math.inf)
