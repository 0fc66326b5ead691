"""What happens after each update of a run: the update's numbers are logged and shown, and the run is
evaluated, sampled and saved.
"""

from typing import NamedTuple

from monograph import compat
from monograph.device import clock
from monograph.errors import Stopped
from monograph.planner import defaults
from monograph.report.metrics import printed_keys
from monograph.run.metrics_log import MetricsLog
from monograph.run.progress import Progress, TrainingBlock
from monograph.run.signals import StopSignal
from monograph.session import ranks
from monograph.session.measured_memory import log_memory
from monograph.session.reporting import DOUBT_AFTER_UPDATES, Reporter
from monograph.session.rewind import go_back, require_end
from monograph.session.session import Session
from monograph.session.update_clock import UpdateClock
from monograph.step import Update

# The display reads the last updates' numbers at most once in this time, because reading waits for
# the device.
SHOW_EVERY_S = 1.0


class DueWork(NamedTuple):
    """What is due after an update; the same on all ranks.

    Attributes:
        updates_done: the number of updates so far.
        is_last: whether the run ends with this update.
        goes_back: whether the run returns to an earlier checkpoint, because too many updates were
            skipped or a weight is not finite.
        saves: whether a checkpoint is written.
        stops: whether the run ends before its last update, because the user asked for it.
    """

    updates_done: int
    is_last: bool
    goes_back: bool
    saves: bool
    stops: bool


class AfterUpdate:
    """The work between two updates of a run.

    `note` returns the `DueWork` after an update. The other methods get it, and each does its part
    if that is due:

        after = AfterUpdate(...)
        for update in train(...):
            due = after.note(update)
            ...

    Attributes:
        since_shown: times the updates since numbers were last shown. The caller pauses it for the
            work that is not an update.
    """

    def __init__(
        self,
        session: Session,
        report: Reporter,
        block: TrainingBlock,
        stop: StopSignal,
        progress: Progress,
    ) -> None:
        """Start the run's clock, and score the initial weights if the task wants it.

        Args:
            session: the run.
            report: shows the run and writes its results.
            block: the part of the screen that shows the run while it trains.
            stop: notices that the user wants to stop or to save.
            progress: the display.
        """
        self.session = session
        self.report = report
        self.block = block
        self.stop_signal = stop
        self.progress = progress
        # Reading an update's numbers makes the host wait for the GPU, so it is done for ten updates
        # at once. Where an update is more than a step on text, the host waits anyway, e.g. to sample
        # answers.
        reads_each = not session.task.has_plain_updates or session.engine.step.device.type == "cpu"
        self.log = MetricsLog(session.run, every=1 if reads_each else 10)
        # The number of updates after which `_warn_if_nothing_learned` is called. A resumed run, or
        # one that began eagerly, may have made more than DOUBT_AFTER_UPDATES already.
        self._doubt_at = max(DOUBT_AFTER_UPDATES, session.engine.index + 1)
        self._graphs_before = compat.captured_graphs()  # any more are recompiles
        # `shorten_if_late` checks the time at least as often as this, even if train.eval_every is larger.
        self._check_every = defaults.interval(session.updates, defaults.EVALUATIONS)
        session.training_since_s = clock()
        if not session.engine.index and session.task.scores_initial_weights:
            report.evaluate(block, 0, limit=None)
        self.since_shown = UpdateClock()
        self._save_is_overdue = False
        self._score_text = ""

    def note(self, update: Update) -> DueWork:
        """Log an update, show its numbers if the last ones are old, and return what is due.

        All ranks must call this after each update, since they decide together.
        """
        session = self.session
        log = self.log
        updates_done = update.index + 1
        is_last = updates_done == session.updates
        self.since_shown.updates += 1
        self.report.recompiles = compat.captured_graphs() - self._graphs_before
        log_memory(session, updates_done)
        figures = session.task.figures(session.batches)
        wrote_rows = log.add(update, {**self.report.readings, "wall_s": session.spent_s, **figures})
        # After `add` has written rows, their numbers are on the host, so showing them costs nothing.
        if wrote_rows or is_last or self.since_shown.seconds > SHOW_EVERY_S:
            self._show(updates_done)
        if updates_done == self._doubt_at and not is_last:
            self._warn_if_nothing_learned()
        # Each value is true on all ranks if it is true on one.
        stop_requested, save_requested, has_diverged, is_skipping = session.world.any(
            self.stop_signal.requested is not None,
            self.stop_signal.save_requested,
            log.has_diverged,
            log.skipped_in_a_row > 0,
        )
        save_every = session.plan.intervals.save_every
        save_is_due = self._save_is_overdue or updates_done % save_every == 0
        # While updates are skipped, a due checkpoint is not written, since it might replace the one
        # from before them, which `go_back` needs.
        wants_save = (save_is_due and not is_skipping) or stop_requested or save_requested
        saves = is_last or (session.can_save and wants_save)
        # If the run could not be resumed from the present state, the checkpoint is written later.
        self._save_is_overdue = save_is_due and not session.can_save
        # A checkpoint of weights that are not finite must not be written.
        goes_back = has_diverged or (saves and bool(session.non_finite_parameters()))
        stops = stop_requested and saves and not is_last
        return DueWork(updates_done, is_last, goes_back=goes_back, saves=saves, stops=stops)

    def _warn_if_nothing_learned(self) -> None:
        """Print a warning if the rows show that the model has learned nothing so far."""
        self.log.flush()
        if doubt := self.report.doubt(self.session.run.rows()):
            self.progress.line("warning", f"so far, {doubt}")

    def _show(self, updates_done: int) -> None:
        """Show the numbers of the last update on the screen."""
        log = self.log
        log.flush()
        rate = self.report.note_rate(self.since_shown.updates, self.since_shown.seconds, log.last)
        scores = "   ".join(f"{name} {log.last[name]:.3f}" for name in printed_keys(log.last))
        # If the last row has no scores, the earlier ones stay on the screen.
        if scores:
            self._score_text = scores
        self.block.update(
            updates_done,
            tokens_per_s=rate,
            memory_bytes=self.session.peak_memory_bytes,
            loss=log.last["train_loss"],
            score=self._score_text,
            skipped=log.skipped,
        )
        self.since_shown.restart()

    def go_back(self) -> None:
        """Return to an earlier checkpoint, and begin a new log; see `rewind.go_back`."""
        self.log = go_back(self.session, self.log, self.progress)

    def evaluate(self, due: DueWork) -> None:
        """Score held-out records if that is due. The last evaluation is in `end`."""
        if due.updates_done % self.session.plan.intervals.eval_every == 0 and not due.is_last:
            self.log.flush()
            self.report.evaluate(self.block, due.updates_done, limit=defaults.CURVE_ROWS)

    def shorten_if_late(self, due: DueWork) -> None:
        """Shorten the run if it would take too long; see `Reporter.shorten_if_late`."""
        check_every = min(self.session.plan.intervals.eval_every, self._check_every)
        # A run with train.wall_minutes checks after each update, since it must not end late.
        has_deadline = self.session.deadline_s is not None
        is_due = has_deadline or due.updates_done % check_every == 0
        if is_due and not due.is_last:
            self.report.shorten_if_late(due.updates_done)
            self.block.set_end(self.session.updates)

    def sample(self, due: DueWork) -> None:
        """Show what the model writes if that is due. The last sample is in `end`."""
        is_due = due.updates_done in self.report.sample_updates() and not due.is_last
        if is_due and self.session.world.broadcast(self.report.deadline.can_sample_midway):
            self.log.flush()
            self.report.sample(self.block, due.updates_done)

    def save(self, due: DueWork) -> None:
        """Write a checkpoint if one is due, and refresh the page of the run."""
        if due.saves:
            self.log.flush()
            self.stop_signal.save_requested = False
            self.session.save()
        if self.session.world.leads:
            self.report.page.refresh()

    def raise_if_stopped(self, due: DueWork) -> None:
        """Raise an error that ends the run, if `due.stops`.

        Raises:
            Stopped: the message has the command that continues the run.
        """
        if not due.stops:
            return
        if self.session.world.leads:
            self.report.page.write("stopped")
        command = ranks.resume_command(
            self.session.world, self.session.run, self.session.plan.job.parallel
        )
        raise Stopped(f"saved at update {due.updates_done}; continue: {command}")

    def end(self) -> None:
        """Score and sample after the last update; see `Reporter.end`.

        Raises:
            Diverged: at least the second half of the updates was skipped.
        """
        require_end(self.session, self.log)
        self.report.end(self.block)
