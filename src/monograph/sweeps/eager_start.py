"""Begin a sweep eagerly: make updates without a graph while another process compiles the graphs.

A run begins in the same way, under the same conditions (`monograph.session.eager_start`). Here all
members of a group train at once, and all members make the same number of updates, so that none has
learned more than another. When the graphs are compiled, their measured times decide how many members
train at once from then on. Each round then starts from its members' checkpoints.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from monograph.device import clock
from monograph.ensemble import Ensemble
from monograph.errors import InputRefused, OutOfDeviceMemory, UsageError
from monograph.loop import train
from monograph.loss import Batch
from monograph.planner import defaults
from monograph.report.quantities import counted, duration
from monograph.run.metrics_log import MetricsLogs
from monograph.run.progress import Progress
from monograph.run.recorded_state import MAX_COUNT
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
    base_bytes,
    begin_run,
    make_members_engine,
    open_cohort,
    set_schedules,
    with_length,
)
from monograph.sweeps.concurrency import TimedGroup, plans_of
from monograph.sweeps.folder import Sweep
from monograph.sweeps.members_memory import MembersMemory
from monograph.sweeps.rehearsal import first_window
from monograph.sweeps.spec import have_own_rows

_COMPILING_PROGRAM = (
    "import sys; from monograph.sweeps.progress import compile_sweep; compile_sweep(sys.argv[1])"
)
# How many times the memory of all members may be needed at once: for the cohorts that train eagerly, and
# in each of the two processes for the widths that it measures.
MEMORY_FACTOR = 3


class _EagerGroup(NamedTuple):
    """The models of a group's members, and the cohort that trains them all at once."""

    built_runs: list[BuiltRun]
    cohort: Cohort


@dataclass
class EagerStart:
    """What a sweep did while its graphs were compiled.

    Attributes:
        updates: the number of updates that each member made; 0: the sweep did not begin eagerly.
        expected_length: the number of updates of the whole training that was expected then. The
            warm-up was a share of it.
        groups: each group's models and cohort.
        graph_keys: for each group, the name of its graphs in the cache, see `compiled_key`.
    """

    updates: int = 0
    expected_length: int = 0
    groups: list[_EagerGroup] = field(default_factory=list)
    graph_keys: list[str] = field(default_factory=list)

    def save(self, updates: Sequence[int]) -> None:
        """Write settings and a checkpoint of every member, from which its round continues.

        Args:
            updates: for each group, the number of updates of its members, which is decided by now.
        """
        if not self.updates:
            return
        for (built_runs, cohort), group_updates in zip(self.groups, updates, strict=True):
            completed_runs = with_length(built_runs, group_updates)
            for session, built in zip(cohort.sessions, completed_runs, strict=True):
                session.set_plan(built.plan)
                begin_run(session)
            cohort.save()
        for key in self.graph_keys:
            mark_compiled(key)

    def leave_uncompiled(self, timed_groups: Sequence[TimedGroup]) -> None:
        """Change the plans of all members so that they train without a graph to the end."""
        self.graph_keys.clear()  # so that no graph is marked as compiled
        for index, timed_group in enumerate(timed_groups):
            timed_group.leave_uncompiled()
            # The models are built again only for their new plans. The cohort stays, as it has been trained.
            built_runs = timed_group.build(timed_group.group.members)
            self.groups[index] = _EagerGroup(built_runs, self.groups[index].cohort)


@contextmanager
def start_eagerly(
    sweep: Sweep, timed_groups: Sequence[TimedGroup], progress: Progress, *, alone: bool
) -> Iterator[EagerStart]:
    """Train all members eagerly until another process has compiled the graphs, if that is possible.

    What was done is yielded. The members' runs stay locked until the end of the `with` block.

    Args:
        sweep: the sweep, of which nothing was trained yet.
        timed_groups: for each group, its measured times and engines.
        progress: the display.
        alone: whether no other process trains members of the sweep.
    """
    with ExitStack() as resources:
        start = EagerStart()
        if alone and _is_possible(timed_groups):
            can_train = _open_cohorts(start, sweep, timed_groups, resources)
            if can_train:
                _train(start, sweep, timed_groups, progress)
            else:
                # Some cohorts may have been opened before it was known that not all can train.
                resources.close()
                start = EagerStart()
        yield start


def _is_possible(timed_groups: Sequence[TimedGroup]) -> bool:
    """Return whether a sweep can begin eagerly.

    It can if all of this is true:

    - its length is given as a time;
    - its graphs are to be compiled, and there is a core for the compiler;
    - its models are of this package, and are not streamed;
    - it samples no answers.
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
        or plan.job.objective.samples_answers
        for plan in plans
    )


def _open_cohorts(
    start: EagerStart, sweep: Sweep, timed_groups: Sequence[TimedGroup], resources: ExitStack
) -> bool:
    """Build a cohort of each group, so that all members can train while the graphs compile.

    Args:
        start: gets the cohorts and the names of the graphs.
        sweep: the sweep.
        timed_groups: for each group, its measured times and engines.
        resources: gets what must be closed afterwards: locks and cohorts.

    Returns:
        Whether the members can and should train now. They cannot if the memory does not hold all of
        them, if some group does not fit one graph, or if an update fails. They should not if all
        graphs are in the cache already.
    """
    needed_bytes = 2 * PROCESS_BYTES  # this process, and the one that compiles
    engines = []
    windows = []
    for timed_group in timed_groups:
        try:
            built_runs = timed_group.build(timed_group.group.members)
            engine = make_members_engine(
                built_runs, have_own_rows(plans_of(built_runs)), timed_group.device
            )
        except (UsageError, InputRefused, OutOfDeviceMemory):
            # The reason is reported when `TimedGroup` tries fewer members.
            return False
        expected = built_runs[0].plan.expected
        if expected is None:  # it is not known how much memory a member needs
            return False
        members_memory = MembersMemory(
            expected,
            [built.plan for built in built_runs],
            base_bytes(built_runs[0]),
            timed_group.machine.free_memory_bytes // MEMORY_FACTOR,
            eager=True,
        )
        needed_bytes += MEMORY_FACTOR * members_memory.planned_bytes(len(built_runs))
        engines.append((built_runs, engine))
        windows.append(first_window(built_runs, timed_group.task))
    if needed_bytes > timed_groups[0].machine.free_memory_bytes:
        return False
    for timed_group, (built_runs, engine), window in zip(
        timed_groups, engines, windows, strict=True
    ):
        members = timed_group.group.members
        runs = resources.enter_context(sweep.lock_members(members))
        cohort = open_cohort(members, runs, built_runs, timed_group.task, engine)
        resources.callback(cohort.close)
        start.groups.append(_EagerGroup(built_runs, cohort))
        graph_key = compiled_key(cohort.sessions[0], window)
        start.graph_keys.append(f"{counted(len(members), 'member')} {graph_key}")
    if all(map(is_compiled, start.graph_keys)):
        return False
    return all(
        _can_train(group.cohort, window)
        for group, window in zip(start.groups, windows, strict=True)
    )


def _can_train(cohort: Cohort, window: Batch) -> bool:
    """Compute an update without applying it, and return whether that succeeds."""
    engine = cohort.engine
    # A rehearsal increases the number of micro-batches by which dropout draws, so it is restored.
    dropout_count = None
    if isinstance(engine, Ensemble):
        dropout_count = engine.stacked_parameters.caller.draw.clone()
    try:
        with engine.step.counters_kept():
            engine.rehearse(window)
    except (UsageError, InputRefused, OutOfDeviceMemory):
        return False
    if isinstance(engine, Ensemble) and dropout_count is not None:
        engine.stacked_parameters.caller.draw.copy_(dropout_count)
    return True


def _train(
    start: EagerStart, sweep: Sweep, timed_groups: Sequence[TimedGroup], progress: Progress
) -> None:
    """Train all members until the graphs are compiled, or until that has taken too long."""
    cohorts = [group.cohort for group in start.groups]
    max_updates = _max_updates(timed_groups, start)
    start.expected_length = _expected_updates(timed_groups, start, max_updates)
    for built_runs, cohort in start.groups:
        plans = [
            resolve(built.plan, timed_groups[0].machine, Length(start.expected_length))
            for built in built_runs
        ]
        set_schedules(cohort.engine, [constant(plan.intervals.warmup_updates) for plan in plans])
    for cohort in cohorts:
        cohort.prepare_references(False, progress)
        if cohort.tasks[0].scores_initial_weights:
            cohort.score(0, None, **{EAGER_KEY: True})
    logs = []
    for cohort in cohorts:
        runs = [session.run for session in cohort.sessions]
        logs.append(MetricsLogs(runs, every=1))
    began = clock()
    max_wait_s = patience_for(timed_groups[0].group.plan.job.span.minutes, len(timed_groups))
    with (
        compiling(_COMPILING_PROGRAM, str(sweep.run.folder)) as has_compiler_ended,
        progress.stage("start", "training eagerly while the graphs compile") as stage,
    ):
        # The groups take turns: each makes one update before any makes the next.
        trainings = [train(cohort.engine, cohort.windows) for cohort in cohorts]
        for updates in zip(*trainings, strict=True):
            spent_s = clock() - began
            for cohort, log, update in zip(cohorts, logs, updates, strict=True):
                entries = {"wall_s": spent_s, EAGER_KEY: True}
                log.add(update, [{**entries, **figures} for figures in cohort.figures()])
            start.updates = updates[0].index + 1
            stage.report("update", start.updates)
            # A short text allows only `max_updates`. Half of them are left for the graphs.
            is_half_done = start.updates >= max(1, max_updates // 2)
            if has_compiler_ended() or spent_s > max_wait_s or is_half_done:
                break
        # After half of the updates of a short text, wait without training.
        while not has_compiler_ended() and clock() - began < max_wait_s:
            time.sleep(0.1)
        are_compiled = has_compiler_ended()
        stage.result = f"{counted(start.updates, 'update')} of each member"
    # If the training is so long that the wait has its maximum, it is worth compiling in any case.
    if not are_compiled and max_wait_s < MAX_PATIENCE_S:
        start.leave_uncompiled(timed_groups)
        progress.line(
            "eager",
            f"training without compiling: the compiler was not ready in {duration(max_wait_s)}",
        )


def _max_updates(timed_groups: Sequence[TimedGroup], start: EagerStart) -> int:
    """Return the maximum number of updates of each member, which a short text limits."""
    max_updates = MAX_COUNT
    for timed_group, group in zip(timed_groups, start.groups, strict=True):
        training = group.built_runs[0].plan.training
        max_of_group = timed_group.task.max_updates(
            training.window_rows, training.optim.weight_decay
        )
        max_updates = min(max_updates, max_of_group or MAX_COUNT)
    return max_updates


def _expected_updates(
    timed_groups: Sequence[TimedGroup], start: EagerStart, max_updates: int
) -> int:
    """Return how many updates each member will probably make in the time of the sweep."""
    update_all_s = 0.0  # one update of all members
    for group in start.groups:
        plan = group.built_runs[0].plan
        assert plan.expected  # `_open_cohorts` refuses a group without it
        update_all_s += len(group.built_runs) * plan.expected.update_s
    training_s = defaults.UPDATES_SHARE * 60 * timed_groups[0].group.plan.job.span.minutes
    return defaults.updates_in_time(training_s, update_all_s, max_updates)
