"""Members of a sweep before their training, so that their windows and scores can be timed."""

import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

from monograph.distributed.world import World
from monograph.engine import Engine
from monograph.ensemble import Ensemble
from monograph.ensemble.member import MemberEngine
from monograph.loss import Batch
from monograph.run.folder import Run
from monograph.session import warmup
from monograph.session.objective import RunWindows, SweptTask
from monograph.session.plan import RunPlan
from monograph.session.setup import BuiltRun
from monograph.sweeps.cohort import stack_windows
from monograph.sweeps.spec import have_own_rows

# What is timed is discarded, so there is no folder for it. Code that writes there gets an error.
_NO_FOLDER = Run(Path(os.devnull))


class Rehearsal:
    """Members with their engine, but without runs.

    Attributes:
        tasks: what each member learns from.
        engine: the engine of all members.
    """

    def __init__(self, built_runs: Sequence[BuiltRun], task: SweptTask, engine: Engine):
        """Give each member a task.

        Args:
            built_runs: the members' models.
            task: what they learn from.
            engine: the engine of these models.

        Raises:
            UsageError: the members' windows cannot be made together.
        """
        self.engine = engine
        self._built_runs = built_runs
        self.tasks = [
            _begun(task.for_member(), built.plan, engine, place)
            for place, built in enumerate(built_runs)
        ]
        self._readers = list[RunWindows]()
        self._windows: Iterator[Batch] | None = None
        if not task.prepares_windows:
            task.copy_reference_weights(self.tasks, engine)
            self._readers = [each.windows(0, None, ()) for each in self.tasks]
            joint_windows = task.joint_windows(self.tasks, self._readers, engine)
            self._windows = joint_windows or self._readers[0]

    @cached_property
    def window(self) -> Batch:
        """The first window that the members train on."""
        if self._windows is None:
            return first_window(self._built_runs, self.tasks[0])
        return self._next_window(self._windows)

    def window_s(self, updates: int) -> float:
        """Return the seconds for which an update waits for its window.

        They are the lower quartile over a few windows, since other programs delay some of them.

        Args:
            updates: the updates of each member's run. At most `CALIBRATION_SHARE` of their windows are
                made here, but at least one.
        """
        # Without this iterator, windows are prepared in the background, and an update waits for none.
        if self._windows is None:
            return 0.0
        windows = self._windows
        updates_per_window = self.tasks[0].updates_per_window

        def make_window() -> None:
            for _ in range(updates_per_window):
                self._next_window(windows)

        # If the engine is compiled, the code that makes windows may be, too. It is compiled for the first window
        # after the engine, so that one is not timed.
        if self.engine.step.scope != "none":
            make_window()
        timed_windows = max(1, int(warmup.CALIBRATION_SHARE * updates / updates_per_window))
        seconds = warmup.seconds_per_call(self.engine, make_window, max_timed=timed_windows)
        return seconds / updates_per_window

    def _next_window(self, windows: Iterator[Batch]) -> Batch:
        for reader in self._readers:
            reader.rows_consumed = 0  # so that the records never end
        return next(windows)

    def evaluation_s(self, rows: int) -> float:
        """Return the seconds in which all members score held-out rows: the least of a few evaluations.

        Args:
            rows: the number of rows. It is not used if sampled answers are scored.
        """

        def evaluate() -> None:
            self.tasks[0].evaluate_members(self.tasks, self.engine, rows, limit=rows)

        return warmup.seconds_per_call(self.engine, evaluate, max_timed=warmup.MIN_TIMED)


def _begun(task: SweptTask, plan: RunPlan, engine: Engine, place: int) -> SweptTask:
    """Return a member's task after it has got the member's engine."""
    member_engine = MemberEngine(engine, place) if isinstance(engine, Ensemble) else engine
    task.begin(_NO_FOLDER, member_engine, World(), lambda: plan)
    return task


def first_window(built_runs: Sequence[BuiltRun], task: SweptTask) -> Batch:
    """Return the first window that N members train on. Each tensor of the window has R rows.

    Args:
        built_runs: the members' models.
        task: what they learn from. Its windows are prepared in the background.

    Returns:
        [N, R, ...] if each member has its own rows, else [R, ...].
    """
    plans = [built.plan for built in built_runs]
    if not have_own_rows(plans):
        return task.first_window(plans[0])
    window_of_seed: dict[int, Batch] = {}
    for plan in plans:
        if plan.job.seed not in window_of_seed:
            window_of_seed[plan.job.seed] = task.first_window(plan)
    seeds = list(window_of_seed)
    indices = [seeds.index(plan.job.seed) for plan in plans]
    return stack_windows(list(window_of_seed.values()), indices)
