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

SHOWN_S = 1.0  # after so long, the numbers of the last updates are read; this waits for the device


class Moment(NamedTuple):
    """What is due after an update; all ranks have the same.

    Attributes:
        done: the number of updates so far.
        is_last: whether the run ends with it.
        goes_back: whether the run returns to an earlier checkpoint, as it does not learn any more.
        saves: whether a checkpoint is written.
        stops: whether the user asked the run to stop, and it can.
    """

    done: int
    is_last: bool
    goes_back: bool
    saves: bool
    stops: bool


class AfterUpdate:
    """The work between two updates of a run.

    after = AfterUpdate(...)
    for update in train(...):
        moment = after.note(update)
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
        """Score the weights that the run begins from, if it shows that, and start the clock."""
        self.session = session
        self.report = report
        self.block = block
        self.stop_signal = stop
        self.progress = progress
        # Reading an update's numbers waits for a GPU to finish it, as drawing answers from its
        # weights does anyway.
        reads_each = not session.task.is_plain or session.engine.step.device.type == "cpu"
        self.log = MetricsLog(session.run, every=1 if reads_each else 10)
        # Some updates may have come before this.
        self._doubted_at = max(DOUBTED_AT, session.engine.index + 1)
        self._graphs = compat.captured_graphs()
        # Whether the time suffices.
        self._check_every = defaults.interval(session.updates, defaults.EVALUATIONS)
        session.training_since_s = clock()
        if not session.engine.index and session.task.scores_untrained:
            report.evaluate(block, 0, limit=None)
        self._shown_s = clock()
        self._since_shown = 0
        self._save_is_overdue = False
        self._score = ""

    def note(self, update: Update) -> Moment:
        """Log an update, show its numbers now and then, and return what is due."""
        session, log = self.session, self.log
        done = update.index + 1
        is_last = done == session.updates
        self._since_shown += 1
        self.report.recompiles = compat.captured_graphs() - self._graphs
        session.account(done)
        figures = session.task.figures(session.batches)
        written = log.add(update, {**self.report.read, "wall_s": session.spent_s, **figures})
        if written or is_last or clock() - self._shown_s > SHOWN_S:
            self._show(done)
        if done == self._doubted_at and not is_last:
            self._doubt()
        stopping, asked, lost, skipping = session.world.any(
            self.stop_signal.requested is not None,
            self.stop_signal.save_requested,
            log.is_lost,
            log.streak > 0,
        )
        # No checkpoint is due while updates are skipped, so that `go_back` finds one from before
        # them.
        due = self._save_is_overdue or done % session.plan.intervals.save_every == 0
        saves = is_last or (session.can_save and ((due and not skipping) or stopping or asked))
        self._save_is_overdue = due and not session.can_save
        goes_back = lost or (saves and bool(session.non_finite()))
        return Moment(done, is_last, goes_back, saves, stopping and saves and not is_last)

    def _doubt(self) -> None:
        self.log.flush()
        if why := self.report.doubt(self.session.run.rows()):
            self.progress.line("warning", f"so far, {why}")

    def _show(self, done: int) -> None:
        log = self.log
        log.flush()
        rate = self.report.rate(self._since_shown, clock() - self._shown_s, log.last)
        shown = "   ".join(f"{name} {log.last[name]:.3f}" for name in printed_keys(log.last))
        self._score = shown or self._score
        self.block.update(
            done,
            tokens_per_s=rate,
            memory_bytes=self.session.peak_memory_bytes,
            loss=log.last["train_loss"],
            score=self._score,
            skipped=log.skipped,
        )
        self._since_shown = 0
        self._shown_s = clock()

    def go_back(self) -> None:
        """Return to an earlier checkpoint; see `rewind.go_back`."""
        self.log = go_back(self.session, self.log, self.progress)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of the block out of the updates' rate."""
        began = clock()
        yield
        self._shown_s += clock() - began

    def evaluate(self, moment: Moment) -> None:
        """Score held-out records, if that is due; the last evaluation comes after the loop."""
        if moment.done % self.session.plan.intervals.eval_every == 0 and not moment.is_last:
            self.log.flush()
            self.report.evaluate(self.block, moment.done, limit=defaults.CURVE_ROWS)

    def keep_time(self, moment: Moment) -> None:
        """Begin the cool-down early, if the time will not suffice."""
        limited = self.session.ends_s is not None
        due = (
            limited
            or moment.done % min(self.session.plan.intervals.eval_every, self._check_every) == 0
        )
        if due and not moment.is_last:
            self.report.keep_time(moment.done)
            self.block.ends_at(self.session.updates)

    def sample(self, moment: Moment) -> None:
        """Show what the model writes, if that is due; the last sample comes after the loop."""
        due = moment.done in self.report.sample_updates() and not moment.is_last
        if due and self.session.world.agreed(self.report.deadline.samples_midway):
            self.log.flush()
            self.report.sample(self.block, moment.done)

    def save(self, moment: Moment) -> None:
        """Write a checkpoint, if that is due, and the page of the run so far."""
        if moment.saves:
            self.log.flush()
            self.stop_signal.save_requested = False
            self.session.save()
        if self.session.world.leads:
            self.report.page.refresh()

    def stop(self, moment: Moment) -> None:
        """End the run, if the user asked for that.

        Raises:
            Stopped: the message has the command that goes on.
        """
        if not moment.stops:
            return
        if self.session.world.leads:
            self.report.page.write("stopped")
        again = ranks.again(self.session.world, self.session.run, self.session.plan.job.parallel)
        raise Stopped(f"saved at update {moment.done}; continue: {again}")

    def end(self) -> None:
        """Refuse the end of a run that has stopped learning, then score and sample a last time; see
        `Reporter.end`.
        """
        require_end(self.session, self.log)
        self.report.end(self.block)
