"""Keep a run within `train.wall_minutes`: decide when its updates must end, and what there is time
for after them.

`Session.left_s` is the time that is left for training, evaluation and samples, without
`Session.reserved_s`, the time for the report.
"""

import math
from dataclasses import dataclass

from monograph.device import clock
from monograph.planner.defaults import CURVE_ROWS
from monograph.session.session import Session

# After this share of the time for updates, the machine's speed is known well enough to shorten a
# run.
SETTLED_SHARE = 0.7
SCORING_SHARE = 0.2  # the last evaluation takes at most this share of train.wall_minutes
SAMPLE_SHARE = 0.02  # and a sample before the end of training at most this share
# PNG files are drawn only if at least this share of `Session.reserved_s` is left.
FIGURES_SHARE = 0.5


@dataclass
class Deadline:
    """Decides what a run still has time for, by the measured seconds of scoring and sampling.

    A run without `train.wall_minutes` has time for everything.

    Attributes:
        session: the run.
        row_s: seconds of scoring a held-out row; 0 before the first evaluation.
        sample_s: seconds of writing a sample; 0 before the first sample.
    """

    session: Session
    row_s: float = 0.0
    sample_s: float = 0.0

    def shorter_length(self, update: int, per_update_s: float) -> int:
        """Return the number of updates after which the run should end; 0 if its length need not
        change.

        Args:
            update: the number of updates done.
            per_update_s: seconds of an update.
        """
        session = self.session
        left_s = session.left_s - self.closing_s(per_update_s)
        if left_s >= per_update_s * (session.updates - update):
            return 0
        # While there is time for another update, wait until the speed is known.
        trained_s = session.spent_s - session.elapsed_s  # by this process
        is_speed_known = trained_s >= SETTLED_SHARE * (trained_s + left_s)
        if left_s > per_update_s and not is_speed_known:
            return 0
        # At least one more update is made, because the schedule can only end at an update that is
        # still to come.
        new_length = update + max(1, int(left_s / per_update_s))
        return new_length if new_length < session.updates else 0

    def affordable_rows(self, per_update_s: float) -> int | None:
        """Return how many held-out rows the last evaluation has time for; None means all.

        There are at least `CURVE_ROWS`, the number of rows for each point of the curve.
        """
        session = self.session
        if math.isinf(session.left_s):
            return None
        row_s = self._expected_row_s(per_update_s)
        if not row_s:
            return None
        scoring_s = min(session.left_s, self._share_s(SCORING_SHARE))
        rows = max(CURVE_ROWS, int(scoring_s / row_s))
        return rows if rows < session.task.held_out_rows else None

    def has_time_for_samples(self, count: float) -> bool:
        """Return whether there is time to write a text as long as `count` samples."""
        return self.session.left_s >= count * self.sample_s

    @property
    def can_sample_midway(self) -> bool:
        """Return whether a sample is quick enough to be written before the end of training."""
        return self.sample_s <= self._share_s(SAMPLE_SHARE)

    @property
    def has_time_for_figures(self) -> bool:
        """Return whether there is time to draw the report's PNG files, the slowest part of it."""
        session = self.session
        return (
            session.deadline_s is None
            or session.deadline_s - clock() >= FIGURES_SHARE * session.reserved_s
        )

    def closing_s(self, per_update_s: float) -> float:
        """Return the seconds between the last update and the report: for the last evaluation, the
        last sample, and the update that measures memory.
        """
        row_s = self._expected_row_s(per_update_s)
        all_rows_s = self.session.task.held_out_rows * row_s
        scoring_s = min(all_rows_s, max(self._share_s(SCORING_SHARE), CURVE_ROWS * row_s))
        return scoring_s + self.sample_s + per_update_s

    def _expected_row_s(self, per_update_s: float) -> float:
        """Return the seconds of scoring a row: measured, or estimated before the first evaluation."""
        return self.row_s or self.session.scoring_s(1, per_update_s)

    def _share_s(self, share: float) -> float:
        """Return the seconds of a share of `train.wall_minutes`; infinite without a limit."""
        minutes = self.session.plan.job.span.wall_minutes
        if minutes is None or self.session.deadline_s is None:
            return math.inf
        return share * 60 * minutes
