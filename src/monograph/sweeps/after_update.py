"""What happens after each update of a round's members, which train at once: the same as after that
of a single run.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from monograph.device import clock
from monograph.errors import Stopped
from monograph.run.metrics_log import MetricsLogs
from monograph.run.progress import SweepDisplay
from monograph.run.signals import StopSignal
from monograph.session.ranks import command
from monograph.step import Update
from monograph.sweeps.batch import MemberBatch
from monograph.sweeps.progress import SweepProgress

EVERY = 10  # updates between two reads of losses from the device


class Moment(NamedTuple):
    """What is due after an update.

    Attributes:
        done: the number of updates so far.
        is_last: whether the round ends with it.
        all_lost: whether no member learns any more.
        stopping: whether the user asked the sweep to stop.
    """

    done: int
    is_last: bool
    all_lost: bool
    stopping: bool


class AfterUpdate:
    """The work between two updates of a round; see `monograph.session.after_update.AfterUpdate`."""

    def __init__(
        self,
        batch: MemberBatch,
        updates: int,
        state: SweepProgress,
        block: SweepDisplay,
        stop: StopSignal,
    ) -> None:
        """Open the members' logs and start the clock; `updates` are those of each member."""
        self.batch = batch
        self.updates = updates
        self.state = state
        self.block = block
        self.stop_signal = stop
        self.logs = MetricsLogs([session.run for session in batch.sessions], EVERY)
        self._intervals = batch.sessions[0].plan.intervals
        self._shown = batch.engine.index
        self._shown_s = clock()

    def note(self, update: Update) -> Moment:
        """Log an update, show the members' numbers now and then, freeze those that diverged; return
        what is due.
        """
        batch = self.batch
        done = update.index + 1
        is_last = done == self.updates
        stopping = self.stop_signal.requested is not None
        rate = self.state.rate / len(batch.members) or None
        written = self.logs.add(update, {"tokens_per_s": rate, "wall_s": self.state.spent_s})
        if written or is_last or stopping:
            self._show(done, is_last)
        return Moment(done, is_last, len(batch.ended) == len(batch.members), stopping)

    def _show(self, done: int, is_last: bool) -> None:
        logs = self.logs
        logs.flush()
        self.state.trained(self.batch, done - self._shown, clock() - self._shown_s)
        self.block.update(self.state.done, self.state.figures)
        self._shown = done
        self._shown_s = clock()
        lost = logs.diverged(self.updates if is_last else None)
        self.batch.freeze({place: logs.ended[place] for place in lost})

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of the block out of the updates' rate."""
        began = clock()
        yield
        self._shown_s += clock() - began

    def evaluate(self, moment: Moment) -> None:
        """Score held-out text, if that is due."""
        if moment.done % self._intervals.eval_every == 0 or moment.is_last or moment.all_lost:
            self.logs.flush()
            self.state.evaluate(self.batch, moment.done, last=moment.is_last)
            self.block.refresh_table()

    def save(self, moment: Moment) -> None:
        """Write a checkpoint of each member, if that is due, and the page of the sweep so far."""
        due = moment.done % self._intervals.save_every == 0 or moment.is_last
        if due or moment.stopping or self.stop_signal.save_requested:
            self.logs.flush()
            self.stop_signal.save_requested = False
            self.batch.save()
        if self.state.world.leads:
            self.state.page.refresh()

    def stop(self, moment: Moment) -> None:
        """End the sweep, if the user asked for that and the round does not end anyway.

        Raises:
            Stopped: the message has the command that goes on.
        """
        if not moment.stopping or moment.is_last or moment.all_lost:
            return
        if self.state.world.leads:
            self.state.page.write("stopped")
        again = command("sweep", "--out", str(self.state.sweep.run.folder))
        raise Stopped(f"saved at update {moment.done} of {self.updates}; continue: {again}")

    def drop_work(self, moment: Moment) -> None:
        """Take the updates that nobody needs any more off the display's work."""
        self.block.drop_work(len(self.batch.members) * (self.updates - moment.done))
