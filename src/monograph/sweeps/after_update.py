"""What happens after each update of a round, whose members train at once.

`monograph.session.after_update` does the same for a single run, in the same order.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from monograph.errors import Diverged, InputRefused, Stopped
from monograph.loss import Batch
from monograph.run.metrics_log import MetricsLogs
from monograph.run.progress import SweepDisplay
from monograph.run.signals import StopSignal
from monograph.session.shown_commands import command_line
from monograph.session.update_clock import UpdateClock
from monograph.step import Update
from monograph.sweeps.cohort import Cohort
from monograph.sweeps.looks import Looks
from monograph.sweeps.progress import SweepProgress

READ_EVERY = 10  # updates between two reads of losses from the device


class RoundState(NamedTuple):
    """The state of a round after an update, by which the work after it is decided.

    Attributes:
        updates_done: the number of updates so far.
        is_last: whether it is the round's last update.
        is_look: whether all held-out rows are scored now, to stop members early now or later.
        all_diverged: whether every member has diverged.
        stopping: whether the user asked the sweep to stop.
        can_save: whether the members could be resumed from checkpoints of the present state.
    """

    updates_done: int
    is_last: bool
    is_look: bool
    all_diverged: bool
    stopping: bool
    can_save: bool


class AfterUpdateOfRound:
    """The work between two updates of a round; see `monograph.session.after_update.AfterUpdate`.

    Attributes:
        since_shown: counts and times the updates since numbers were last shown.
    """

    def __init__(
        self,
        cohort: Cohort,
        updates: int,
        looks: Looks,
        sweep_progress: SweepProgress,
        display: SweepDisplay,
        stop: StopSignal,
    ) -> None:
        """Open the members' logs, score the initial weights if the task wants it, and start the clock.

        Args:
            cohort: the members of a round, and what trains them.
            updates: the number of updates of each member.
            looks: when the members are looked at, to stop some of them early.
            sweep_progress: the state of the sweep.
            display: the live bar and table.
            stop: the user's signals.
        """
        self.cohort = cohort
        self.updates = updates
        self.looks = looks
        self.sweep_progress = sweep_progress
        self.display = display
        self.stop_signal = stop
        # An update that is more than a step on text waits for the device anyway, e.g. to sample.
        read_every = READ_EVERY if cohort.tasks[0].has_plain_updates else 1
        self.logs = MetricsLogs([session.run for session in cohort.sessions], read_every)
        self._intervals = cohort.sessions[0].plan.intervals
        self._save_is_overdue = False
        if not cohort.engine.index and cohort.tasks[0].scores_initial_weights:
            with self._saving_if_a_reward_fails():
                unscored = sweep_progress.evaluate_initial(cohort)
            self._freeze_silent(unscored)
            display.refresh_table()
        self.since_shown = UpdateClock()

    def windows(self) -> Iterator[Batch]:
        """Yield the members' windows, until all members have diverged.

        Raises:
            InputRefused: a reward failed; checkpoints are written before this is raised.
        """
        cohort = self.cohort
        while True:
            try:
                with self._saving_if_a_reward_fails():
                    window = next(cohort.windows, None)
            except Diverged:  # the logits of all members that were left are not finite
                self._freeze_silent(range(len(cohort.members)))
                self.display.shorten_bar(len(cohort.members) * (self.updates - cohort.engine.index))
                return
            if window is None:
                return
            yield window

    @contextmanager
    def _saving_if_a_reward_fails(self) -> Iterator[None]:
        """Write checkpoints if a reward fails in the block, so that nothing is lost."""
        cohort = self.cohort
        try:
            yield
        except InputRefused:
            if cohort.tasks[0].saves_if_window_fails and cohort.engine.index and cohort.can_save:
                self.logs.flush()
                cohort.save()
            raise

    def note(self, update: Update) -> RoundState:
        """Log an update, and return the state of the round after it.

        After some updates the members' numbers are shown, and members that diverged are frozen.
        """
        cohort = self.cohort
        done = update.index + 1
        self.since_shown.updates += 1
        is_last = done == self.updates
        stopping = self.stop_signal.requested is not None
        member_rate = None  # before the first measurement
        if self.sweep_progress.rate:
            member_rate = self.sweep_progress.rate / len(cohort.members)
        entries = {"tokens_per_s": member_rate, "wall_s": self.sweep_progress.spent_s}
        were_written = self.logs.add(
            update, [{**entries, **figures} for figures in cohort.figures()]
        )
        is_look = done in self.looks.scored
        # At a look, all numbers are shown, as the cohort may end here.
        if were_written or is_last or is_look or stopping:
            self._show(is_last)
        all_diverged = len(cohort.divergences) == len(cohort.members)
        return RoundState(done, is_last, is_look, all_diverged, stopping, cohort.can_save)

    def _show(self, is_last: bool) -> None:
        """Write and show the members' numbers, and freeze members that diverged."""
        logs = self.logs
        logs.flush()
        self.sweep_progress.count_trained(
            self.cohort, self.since_shown.updates, self.since_shown.seconds
        )
        self.display.update(self.sweep_progress.done, self.sweep_progress.speed_text)
        self.since_shown.restart()
        newly_diverged = logs.find_diverged(self.updates if is_last else None)
        self.cohort.freeze({place: logs.divergences[place] for place in newly_diverged})
        self._freeze_silent(self.cohort.windows.left_out)

    def _freeze_silent(self, places: Collection[int]) -> None:
        """Freeze members that have no finite logits, if they are not frozen yet.

        Args:
            places: their places in the round.
        """
        silent = [place for place in places if place not in self.cohort.divergences]
        if silent:
            self.logs.flush()
            self.logs.note_diverged(silent)
            self.cohort.freeze({place: self.logs.divergences[place] for place in silent})

    def evaluate(self, round_state: RoundState) -> None:
        """Score held-out text, if it is time for that."""
        if (
            round_state.updates_done % self._intervals.eval_every == 0
            or round_state.is_last
            or round_state.is_look
            or round_state.all_diverged
        ):
            self.logs.flush()
            with self._saving_if_a_reward_fails():
                unscored = self.sweep_progress.evaluate(
                    self.cohort,
                    round_state.updates_done,
                    scores_all=round_state.is_last or round_state.is_look,
                )
            self._freeze_silent(unscored)
            self.display.refresh_table()

    def save(self, round_state: RoundState) -> None:
        """Write a checkpoint of each member, if it is time for that or the user asked for it.

        The leading rank also writes the page of the sweep so far.
        """
        is_due = (
            self._save_is_overdue
            or round_state.updates_done % self._intervals.save_every == 0
            or round_state.is_look
        )
        wants_save = is_due or round_state.stopping or self.stop_signal.save_requested
        # If the members could not be resumed from the present state, they are saved later.
        self._save_is_overdue = is_due and not round_state.can_save
        if round_state.is_last or (wants_save and round_state.can_save):
            self.logs.flush()
            self.stop_signal.save_requested = False
            self.cohort.save()
        if self.sweep_progress.world.leads:
            self.sweep_progress.page.refresh()

    def raise_if_stopped(self, round_state: RoundState) -> None:
        """End the sweep if the user asked to stop, unless the round ends anyway.

        Raises:
            Stopped: the sweep is to end; the message has the command that continues the sweep.
        """
        ends_anyway = round_state.is_last or round_state.all_diverged
        stops_now = round_state.stopping and round_state.can_save and not ends_anyway
        if not stops_now:
            return
        if self.sweep_progress.world.leads:
            self.sweep_progress.page.write("stopped")
        continue_command = command_line("sweep", "--out", str(self.sweep_progress.sweep.run.folder))
        raise Stopped(
            f"saved at update {round_state.updates_done} of {self.updates}; continue: {continue_command}"
        )

    def shorten_bar(self, round_state: RoundState) -> None:
        """Subtract the updates that the round will not make from the total of the progress bar."""
        remaining = self.updates - round_state.updates_done
        self.display.shorten_bar(len(self.cohort.members) * remaining)
