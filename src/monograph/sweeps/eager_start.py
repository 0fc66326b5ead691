"""Begin a sweep with updates that are computed without a graph, while another process compiles its
graphs.

A run begins in the same way, under the same conditions (`monograph.session.eager_start`). Here all
members of a group train at once, and all members make equally many updates, so that none has
learned more than another. Afterwards it is decided, from measured times of the compiled graphs, how
many train at once. Each round then starts from its members' checkpoints.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from monograph.device import clock
from monograph.ensemble import Ensemble
from monograph.errors import InputRefused, OutOfDeviceMemory, UsageError
from monograph.loop import train
from monograph.loss import Batch
from monograph.planner import defaults
from monograph.report.quantities import counted, duration
from monograph.run.metrics_log import MetricsLogs
from monograph.run.progress import Progress
from monograph.run.recorded_state import MOST
from monograph.schedule import constant
from monograph.session.brief import compiled_key
from monograph.session.eager_start import (
    EAGER_KEY,
    MAX_PATIENCE_S,
    PROCESS_BYTES,
    compiling,
    has_spare_core,
    patience_for,
)
from monograph.session.plan import Length
from monograph.session.resolve import resolve
from monograph.session.setup import BuiltRun
from monograph.storage.cache_dir import is_compiled, mark_compiled
from monograph.sweeps.cohort import (
    Cohort,
    begin_run,
    build_models,
    make_members_engine,
    open_cohort,
    set_schedules,
    with_length,
)
from monograph.sweeps.concurrency import TimedGroup, first_window, have_different_seeds
from monograph.sweeps.folder import Sweep

_COMPILING_PROGRAM = (
    "import sys; from monograph.sweeps.progress import compile_sweep; compile_sweep(sys.argv[1])"
)
# How many times a member's memory is needed at once: by the cohort that trains eagerly, and by each
# of the two processes when it measures a width.
MEMORY_FACTOR = 3


@dataclass
class EagerStart:
    """What a sweep did while its graphs were compiled.

    Attributes:
        updates: the number of updates that each member made; 0: nothing was done.
        length: the number of updates of the whole training that was expected then. The warm-up was
            a share of it.
        groups: each group's models and cohort.
        keys: for each group, the name of its graphs in the cache, see `compiled_key`.
    """

    updates: int = 0
    length: int = 0
    groups: list[tuple[list[BuiltRun], Cohort]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)

    def settle(self, updates: Sequence[int]) -> None:
        """Write settings and a checkpoint of every member.

        Args:
            updates: for each group, the number of updates of its members, which is now decided.
        """
        if not self.updates:
            return
        for (built_runs, cohort), group_updates in zip(self.groups, updates, strict=True):
            completed_runs = with_length(built_runs, group_updates)
            for session, built in zip(cohort.sessions, completed_runs, strict=True):
                session.set_plan(built.plan)
                begin_run(session)
            cohort.save()
        for key in self.keys:
            mark_compiled(key)

    def leave_uncompiled(self, timed_groups: Sequence[TimedGroup]) -> None:
        """Make plans without a graph for all members."""
        self.keys.clear()  # so that no graph is marked as compiled
        for index, timed_group in enumerate(timed_groups):
            timed_group.leave_uncompiled()
            # The models are built again for the sake of their plans; the cohort has been trained.
            built_runs = build_models(
                timed_group.group.members, timed_group.text, timed_group.machine
            )
            _, cohort = self.groups[index]
            self.groups[index] = (built_runs, cohort)


@contextmanager
def start_eagerly(
    sweep: Sweep, timed_groups: Sequence[TimedGroup], progress: Progress, *, alone: bool
) -> Iterator[EagerStart]:
    """Train all members until another process has compiled the graphs, if that is possible, and
    yield what was done. The members' runs stay locked in the block.

    Args:
        sweep: the sweep, of which nothing was trained yet.
        timed_groups: for each group, its measured times and engines.
        progress: the display.
        alone: whether no other process trains members of the sweep.
    """
    with ExitStack() as resources:
        start = EagerStart()
        if alone and _is_possible(timed_groups):
            if _open_cohorts(start, sweep, timed_groups, resources):
                _train(start, sweep, timed_groups, progress)
            else:
                resources.close()  # the cohorts that were opened before one could not be
                start = EagerStart()
        yield start


def _is_possible(timed_groups: Sequence[TimedGroup]) -> bool:
    """Return whether a sweep can begin eagerly: its length is given as a time, its graphs are to be
    compiled, and there is a core for the compiler.
    """
    if not has_spare_core(timed_groups[0].machine):
        return False
    plans = [timed_group.group.plan for timed_group in timed_groups]
    return not any(
        plan.updates
        or plan.job.span.epochs
        or plan.training.compile == "none"
        or plan.memory == "stream"
        or plan.job.recipe.code
        for plan in plans
    )


def _open_cohorts(
    start: EagerStart, sweep: Sweep, timed_groups: Sequence[TimedGroup], resources: ExitStack
) -> bool:
    """Build a cohort of each group, and return whether all members can train while the graphs
    compile.

    They cannot if memory does not hold all members, if no graph can hold a group, or if all graphs
    are already in the cache.

    Args:
        start: gets the cohorts and the names of the graphs.
        sweep: the sweep.
        timed_groups: for each group, its measured times and engines.
        resources: gets what must be closed afterwards: locks and cohorts.
    """
    needed_bytes = 2 * PROCESS_BYTES
    engines = []
    windows = []
    for timed_group in timed_groups:
        try:
            built_runs = build_models(
                timed_group.group.members, timed_group.text, timed_group.machine
            )
            engine = make_members_engine(
                built_runs, have_different_seeds(built_runs), timed_group.device
            )
        except (UsageError, InputRefused, OutOfDeviceMemory):
            # The reason is reported when `TimedGroup` tries fewer members.
            return False
        expected = built_runs[0].plan.expected
        if expected is None:
            return False
        needed_bytes += MEMORY_FACTOR * len(built_runs) * expected.peak_memory_bytes
        engines.append((built_runs, engine))
        windows.append(first_window(built_runs, timed_group.text))
    if needed_bytes > timed_groups[0].machine.free_memory_bytes:
        return False
    for timed_group, (built_runs, engine), window in zip(
        timed_groups, engines, windows, strict=True
    ):
        members = timed_group.group.members
        runs = resources.enter_context(sweep.lock_members(members))
        cohort = open_cohort(members, runs, built_runs, timed_group.text, engine)
        resources.callback(cohort.close)
        start.groups.append((built_runs, cohort))
        graph_key = compiled_key(cohort.sessions[0], window)
        start.keys.append(f"{counted(len(members), 'member')} {graph_key}")
    if all(map(is_compiled, start.keys)):
        return False
    return all(
        _can_train(cohort, window)
        for (_, cohort), window in zip(start.groups, windows, strict=True)
    )


def _can_train(cohort: Cohort, window: Batch) -> bool:
    """Compute an update without applying it, and return whether that succeeds."""
    engine = cohort.engine
    # Dropout's count of micro-batches, which a rehearsal increases.
    draw = engine.stacked_parameters.caller.draw.clone() if isinstance(engine, Ensemble) else None
    try:
        with engine.step.counters_kept():
            engine.rehearse(window)
    except (UsageError, InputRefused, OutOfDeviceMemory):
        return False
    if isinstance(engine, Ensemble) and draw is not None:
        engine.stacked_parameters.caller.draw.copy_(draw)
    return True


def _train(
    start: EagerStart, sweep: Sweep, timed_groups: Sequence[TimedGroup], progress: Progress
) -> None:
    """Train all members until the graphs are compiled or the patience for that is over."""
    cohorts = [cohort for _, cohort in start.groups]
    start.length, most_updates = _expected_updates(timed_groups, start)
    for built_runs, cohort in start.groups:
        plans = [
            resolve(built.plan, timed_groups[0].machine, Length(start.length))
            for built in built_runs
        ]
        set_schedules(cohort.engine, [constant(plan.intervals.warmup_updates) for plan in plans])
    logs = [
        MetricsLogs([session.run for session in cohort.sessions], every=1) for cohort in cohorts
    ]
    began = clock()
    patience_s = patience_for(timed_groups[0].group.plan.job.span.minutes, len(timed_groups))
    with (
        compiling(_COMPILING_PROGRAM, str(sweep.run.folder)) as is_over,
        progress.stage("start", "training eagerly while the graphs compile") as stage,
    ):
        # One update of each group's members at a time.
        trainings = [train(cohort.engine, cohort.windows) for cohort in cohorts]
        for updates in zip(*trainings, strict=True):
            spent_s = clock() - began
            for log, update in zip(logs, updates, strict=True):
                log.add(update, {"wall_s": spent_s, EAGER_KEY: True})
            start.updates = updates[0].index + 1
            stage.report("update", start.updates)
            if is_over() or spent_s > patience_s or start.updates >= max(1, most_updates // 2):
                break
        # The updates on a short text end before the graphs are compiled, since a run must not read
        # it too often.
        while not is_over() and clock() - began < patience_s:
            time.sleep(0.1)
        is_compiled_now = is_over()
        stage.result = f"{counted(start.updates, 'update')} of each member"
    if not is_compiled_now and patience_s < MAX_PATIENCE_S:
        start.leave_uncompiled(timed_groups)
        progress.line(
            "eager",
            f"training without compiling: the compiler was not ready in {duration(patience_s)}",
        )


def _expected_updates(timed_groups: Sequence[TimedGroup], start: EagerStart) -> tuple[int, int]:
    """Return how many updates each member will probably make, and the maximum that a run by the
    clock makes.
    """
    most = MOST
    seconds = 0.0  # of one update of all members
    for timed_group, (built_runs, _) in zip(timed_groups, start.groups, strict=True):
        plan = built_runs[0].plan
        assert plan.expected
        seconds += len(built_runs) * plan.expected.update_s
        most_of_group = defaults.most_updates(
            timed_group.text.train.per_epoch,
            plan.training.window_rows,
            plan.training.optim.weight_decay,
        )
        most = min(most, most_of_group)
    training_s = defaults.UPDATES_SHARE * 60 * timed_groups[0].group.plan.job.span.minutes
    return defaults.updates_in_time(training_s, seconds, most), most
