"""What happens after each update of a run: its numbers are logged and shown, it is evaluated,
sampled and saved.
"""

from collections.abc import Iterator
from contextlib import contextmanager
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
from monograph.session.reporting import DOUBTED_AT, Reporter
from monograph.session.rewind import go_back, require_end
from monograph.session.session import Session
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

    after = AfterUpdate(...)
    for update in train(...):
        due = after.note(update)
        ...
    """

    def __init__(
        self,
        session: Session,
        report: Reporter,
        block: TrainingBlock,
        stop: StopSignal,
        progress: Progress,
    ) -> None:
        """Start the run's clock, and score the weights that the run begins from if its task wants
        it.
        """
        self.session = session
        self.report = report
        self.block = block
        self.stop_signal = stop
        self.progress = progress
        # Reading an update's numbers makes the host wait for the GPU, so it is done for ten updates
        # at once. A run that is not plain waits anyway, e.g. to sample answers from the weights.
        reads_each = not session.task.is_plain or session.engine.step.device.type == "cpu"
        self.log = MetricsLog(session.run, every=1 if reads_each else 10)
        # A resumed run, or one that began eagerly, may be past DOUBTED_AT.
        self._doubted_at = max(DOUBTED_AT, session.engine.index + 1)
        self._graphs_before = compat.captured_graphs()
        # The interval of `keep_time`, which `eval_every` of the settings may exceed.
        self._check_every = defaults.interval(session.updates, defaults.EVALUATIONS)
        session.training_since_s = clock()
        if not session.engine.index and session.task.scores_untrained:
            report.evaluate(block, 0, limit=None)
        self._shown_at_s = clock()
        self._updates_since_shown = 0
        self._save_is_overdue = False
        self._score_text = ""

    def note(self, update: Update) -> DueWork:
        """Log an update, show its numbers now and then, and return what is due.

        A collective: all ranks call it after each update.
        """
        session, log = self.session, self.log
        done = update.index + 1
        is_last = done == session.updates
        self._updates_since_shown += 1
        self.report.recompiles = compat.captured_graphs() - self._graphs_before
        session.account(done)
        figures = session.task.figures(session.batches)
        written = log.add(update, {**self.report.readings, "wall_s": session.spent_s, **figures})
        # When `add` has just written rows, their numbers are on the host and cost nothing.
        if written or is_last or clock() - self._shown_at_s > SHOW_EVERY_S:
            self._show(done)
        if done == self._doubted_at and not is_last:
            self._warn_if_useless()
        stop_requested, save_requested, is_lost, is_skipping = session.world.any(
            self.stop_signal.requested is not None,
            self.stop_signal.save_requested,
            log.is_lost,
            log.streak > 0,
        )
        is_due = self._save_is_overdue or done % session.plan.intervals.save_every == 0
        # While updates are skipped, a due checkpoint is not written: `go_back` needs one from
        # before them.
        wants_save = (is_due and not is_skipping) or stop_requested or save_requested
        saves = is_last or (session.can_save and wants_save)
        self._save_is_overdue = is_due and not session.can_save
        goes_back = is_lost or (saves and bool(session.non_finite()))
        stops = stop_requested and saves and not is_last
        return DueWork(done, is_last, goes_back, saves, stops)

    def _warn_if_useless(self) -> None:
        """Print a warning if the updates so far taught the model nothing."""
        self.log.flush()
        if why := self.report.doubt(self.session.run.rows()):
            self.progress.line("warning", f"so far, {why}")

    def _show(self, done: int) -> None:
        log = self.log
        log.flush()
        seconds = clock() - self._shown_at_s
        rate = self.report.note_rate(self._updates_since_shown, seconds, log.last)
        scores = "   ".join(f"{name} {log.last[name]:.3f}" for name in printed_keys(log.last))
        # A row without scores leaves the earlier ones on the screen.
        self._score_text = scores or self._score_text
        self.block.update(
            done,
            tokens_per_s=rate,
            memory_bytes=self.session.peak_memory_bytes,
            loss=log.last["train_loss"],
            score=self._score_text,
            skipped=log.skipped,
        )
        self._updates_since_shown = 0
        self._shown_at_s = clock()

    def go_back(self) -> None:
        """Return to an earlier checkpoint, and begin a new log; see `rewind.go_back`."""
        self.log = go_back(self.session, self.log, self.progress)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time of the `with` block as training in the rate of updates."""
        began = clock()
        yield
        self._shown_at_s += clock() - began

    def evaluate(self, due: DueWork) -> None:
        """Score held-out records, if that is due; the last evaluation comes after the loop."""
        if due.updates_done % self.session.plan.intervals.eval_every == 0 and not due.is_last:
            self.log.flush()
            self.report.evaluate(self.block, due.updates_done, limit=defaults.CURVE_ROWS)

    def keep_time(self, due: DueWork) -> None:
        """Begin the cool-down early, if the time will not suffice."""
        check_every = min(self.session.plan.intervals.eval_every, self._check_every)
        # A run with train.wall_minutes checks after each update, since it must not end late.
        is_limited = self.session.ends_s is not None
        is_due = is_limited or due.updates_done % check_every == 0
        if is_due and not due.is_last:
            self.report.keep_time(due.updates_done)
            self.block.set_end(self.session.updates)

    def sample(self, due: DueWork) -> None:
        """Show what the model writes, if that is due; the last sample comes after the loop."""
        is_due = due.updates_done in self.report.sample_updates() and not due.is_last
        if is_due and self.session.world.agreed(self.report.deadline.can_sample_midway):
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

    def stop(self, due: DueWork) -> None:
        """End the run if `due.stops`.

        Raises:
            Stopped: the message has the command that continues the run.
        """
        if not due.stops:
            return
        if self.session.world.leads:
            self.report.page.write("stopped")
        again = ranks.again(self.session.world, self.session.run, self.session.plan.job.parallel)
        raise Stopped(f"saved at update {due.updates_done}; continue: {again}")

    def end(self) -> None:
        """Score and sample a last time; see `Reporter.end`.

        Raises:
            Diverged: at least the second half of the updates was skipped.
        """
        require_end(self.session, self.log)
        self.report.end(self.block)
