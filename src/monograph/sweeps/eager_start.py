"""Begin a sweep with updates that are computed without a graph, while another process compiles its
graphs.

It is done where a run does it (`monograph.session.eager_start`). Each group of members is a batch
of its own, and all members make equally many updates, so that none has learned more than another.
How many train at once is decided after that, from measured times of what was compiled; each round
goes on from the members' checkpoints.
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
    MARK,
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
from monograph.sweeps.batch import (
    MemberBatch,
    begin_run,
    engine_of,
    models_of,
    of_length,
    opened,
    set_schedules,
)
from monograph.sweeps.concurrency import Timing, first_window, several
from monograph.sweeps.folder import Sweep

_CHILD = (
    "import sys; from monograph.sweeps.progress import compile_sweep; compile_sweep(sys.argv[1])"
)
# Times that a member's memory is taken at once: eagerly, and by both processes where they measure a
# width.
HELD = 3


@dataclass
class EagerStart:
    """What a sweep did while its graphs were compiled.

    Attributes:
        updates: the number of updates that each member made; 0: nothing was done.
        length: the number of updates that was expected then, of which the warm-up is a share.
        groups: each group's models and batch.
        keys: see `compiled_key`, one for each group.
    """

    updates: int = 0
    length: int = 0
    groups: list[tuple[list[BuiltRun], MemberBatch]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)

    def settle(self, updates: Sequence[int]) -> None:
        """Write settings and a checkpoint of every member, now that the number of updates of each
        group is known.
        """
        if not self.updates:
            return
        for (built_runs, batch), in_all in zip(self.groups, updates, strict=True):
            for session, built in zip(batch.sessions, of_length(built_runs, in_all), strict=True):
                session.complete(built.plan)
                begin_run(session)
            batch.save()
        for key in self.keys:
            mark_compiled(key)

    def leave_uncompiled(self, timings: Sequence[Timing]) -> None:
        """Have all members go on without a graph, by plans that are made for that."""
        self.keys.clear()
        for number, timing in enumerate(timings):
            timing.leave_uncompiled()
            built_runs = models_of(timing.group.members, timing.text, timing.machine)
            self.groups[number] = (built_runs, self.groups[number][1])


@contextmanager
def begun(
    sweep: Sweep, timings: Sequence[Timing], progress: Progress, *, alone: bool
) -> Iterator[EagerStart]:
    """Train all members until another process has compiled the graphs, if that pays; hold their
    runs for the block.

    Args:
        sweep: the sweep, of which nothing was trained yet.
        timings: a timing for each group of its members.
        progress: the display.
        alone: whether no other process trains members of it.
    """
    with ExitStack() as held:
        start = EagerStart()
        if alone and _is_possible(timings):
            if _opened(start, sweep, timings, held):
                _train(start, sweep, timings, progress)
            else:
                held.close()
                start = EagerStart()
        yield start


def _is_possible(timings: Sequence[Timing]) -> bool:
    """Return whether the clock decides on the length, and each group would be compiled on another
    core.
    """
    if not has_spare_core(timings[0].machine):
        return False
    plans = [timing.group.plan for timing in timings]
    return not any(
        plan.updates
        or plan.job.span.epochs
        or plan.training.compile == "none"
        or plan.memory == "stream"
        or plan.job.recipe.code
        for plan in plans
    )


def _opened(start: EagerStart, sweep: Sweep, timings: Sequence[Timing], held: ExitStack) -> bool:
    """Build the batch of each group; return False if memory does not hold all, no graph does, or
    all is compiled.
    """
    needed_bytes = 2 * PROCESS_BYTES
    built = []
    windows = []
    for timing in timings:
        try:
            built_runs = models_of(timing.group.members, timing.text, timing.machine)
            engine = engine_of(built_runs, several(built_runs), timing.device)
        except (
            UsageError,
            InputRefused,
            OutOfDeviceMemory,
        ):  # which is said where one at a time is tried
            return False
        if (expected := built_runs[0].plan.expected) is None:
            return False
        needed_bytes += HELD * len(built_runs) * expected.peak_memory_bytes
        built.append((built_runs, engine))
        windows.append(first_window(built_runs, timing.text))
    if needed_bytes > timings[0].machine.free_memory_bytes:
        return False
    for timing, (built_runs, engine), window in zip(timings, built, windows, strict=True):
        members = timing.group.members
        runs = held.enter_context(sweep.holding(members))
        batch = opened(members, runs, built_runs, timing.text, engine)
        held.callback(batch.close)
        start.groups.append((built_runs, batch))
        start.keys.append(
            f"{counted(len(members), 'member')} {compiled_key(batch.sessions[0], window)}"
        )
    if all(map(is_compiled, start.keys)):
        return False
    return all(
        _trains(batch, window) for (_, batch), window in zip(start.groups, windows, strict=True)
    )


def _trains(batch: MemberBatch, window: Batch) -> bool:
    """Return whether these members can train together, by an update that is thrown away."""
    engine = batch.engine
    draw = engine.stacked.members.draw.clone() if isinstance(engine, Ensemble) else None
    try:
        with engine.step.counters_kept():
            engine.rehearse(window)
    except (UsageError, InputRefused, OutOfDeviceMemory):
        return False
    if isinstance(engine, Ensemble) and draw is not None:
        engine.stacked.members.draw.copy_(draw)
    return True


def _train(start: EagerStart, sweep: Sweep, timings: Sequence[Timing], progress: Progress) -> None:
    batches = [batch for _, batch in start.groups]
    start.length, most = _lengths(timings, start)
    for built_runs, batch in start.groups:
        plans = [
            resolve(built.plan, timings[0].machine, Length(start.length)) for built in built_runs
        ]
        set_schedules(batch.engine, [constant(plan.intervals.warmup_updates) for plan in plans])
    logs = [MetricsLogs([session.run for session in batch.sessions], every=1) for batch in batches]
    began = clock()
    patient_s = patience_for(timings[0].group.plan.job.span.minutes, len(timings))
    with (
        compiling(_CHILD, str(sweep.run.folder)) as is_over,
        progress.stage("start", "training eagerly while the graphs compile") as stage,
    ):
        for updates in zip(*(train(batch.engine, batch.windows) for batch in batches), strict=True):
            spent_s = clock() - began
            for log, update in zip(logs, updates, strict=True):
                log.add(update, {"wall_s": spent_s, MARK: True})
            start.updates = updates[0].index + 1
            stage.report("update", start.updates)
            if is_over() or spent_s > patient_s or start.updates >= max(1, most // 2):
                break
        # A short text is read often enough before.
        while not is_over() and clock() - began < patient_s:
            time.sleep(0.1)
        is_compiled_now = is_over()
        stage.result = f"{counted(start.updates, 'update')} of each member"
    if not is_compiled_now and patient_s < MAX_PATIENCE_S:
        start.leave_uncompiled(timings)
        progress.line(
            "eager",
            f"training without compiling: the compiler was not ready in {duration(patient_s)}",
        )


def _lengths(timings: Sequence[Timing], start: EagerStart) -> tuple[int, int]:
    """Return how many updates each member will probably make, and the most that the time can end
    with.
    """
    most = MOST
    seconds = 0.0
    for timing, (built_runs, _) in zip(timings, start.groups, strict=True):
        plan = built_runs[0].plan
        assert plan.expected
        seconds += len(built_runs) * plan.expected.update_s
        most = min(
            most,
            defaults.most_updates(
                timing.text.train.per_epoch,
                plan.training.window_rows,
                plan.training.optim.weight_decay,
            ),
        )
    training_s = defaults.UPDATES_SHARE * 60 * timings[0].group.plan.job.span.minutes
    return defaults.updates_for(training_s, seconds, most), most
