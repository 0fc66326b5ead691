"""Open a run for training: read what it learns from, build the model, try a step, compile it and
fix the length.

*Eager* updates are computed without a compiled graph. A run may begin with some, while another
process compiles the step (`session.eager_start`).
"""

import math
from contextlib import ExitStack, closing, nullcontext
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from monograph import checkpointing
from monograph.data.sources import spooled_stdin
from monograph.device import clock, default_device, describe
from monograph.distributed.checkpoint import load_newest
from monograph.distributed.world import World
from monograph.errors import UsageError
from monograph.loss import Batch
from monograph.planner import defaults
from monograph.report.quantities import duration
from monograph.run import writing
from monograph.run.folder import Run
from monograph.run.progress import Progress, silent
from monograph.run.started import note_start
from monograph.session import eager_start, ranks
from monograph.session.brief import expected_whole_s, updates_given, why_uncompiled
from monograph.session.locked_run import LockedRun
from monograph.session.objective import Task
from monograph.session.objectives import open_task
from monograph.session.plan import RunPlan
from monograph.session.reporting import Reporter
from monograph.session.requirements import notes_on, require_possible
from monograph.session.resolve import resolve
from monograph.session.session import Session
from monograph.session.setup import agreed_plan, open_session
from monograph.session.warmup import choose_kernel, compile_step, fix_length, try_step
from monograph.storage.reading import exists

# If starting and ending a run take more than this share of train.wall_minutes, a note says so.
NOTED_SHARE = 0.25


class Started(NamedTuple):
    """The start of the program.

    Attributes:
        at_s: the time of `clock` at which it was started.
        took_s: the seconds from then until it began with the run.
    """

    at_s: float
    took_s: float


def open_run(locked: LockedRun, started: Started, exit_stack: ExitStack) -> Session:
    """Return a run's session, ready for its next update.

    Args:
        locked: the run, which has not finished.
        started: when the program was started.
        exit_stack: closes what is opened here when the run is over.

    Raises:
        UsageError: choices exclude one another, or the time of train.wall_minutes was over before
            the first update.
        InputRefused: the records, the model or the tokenizer cannot be used.
        OutOfDeviceMemory: nothing fits according to the planner.
    """
    folder = locked.folder
    world = locked.world
    progress = locked.progress
    # A run has begun if its folder has config.toml. It is resumed (below) if it also has a checkpoint.
    has_begun = folder.has_begun
    plan = _first_plan(locked, started, has_begun)
    require_time = partial(_require_time, plan, started)
    # Reading a text may take longer than train.wall_minutes, so each report of progress checks the
    # time.
    checking_time = nullcontext() if has_begun else progress.watched(require_time)
    # Rank 0 is the first to read the records, and the others find its results in the cache.
    with world.rank_0_first(), checking_time:
        task = exit_stack.enter_context(closing(open_task(folder, plan, progress, world.size)))
    # `open_or_resume(plan, progress=...)` opens or resumes this run.
    open_or_resume = partial(
        _open_or_resume, folder, task=task, world=world, retry_rows=locked.retry_rows
    )
    began = clock()
    session, resumed = open_or_resume(plan, progress=progress)
    opening_s = clock() - began
    window = try_step(session, progress)
    wall_minutes = plan.job.span.wall_minutes
    if wall_minutes and not resumed:
        session.deadline_s = started.at_s + 60 * wall_minutes
        session.reserved_s = defaults.seconds_for_end(started.took_s, 60 * wall_minutes)
    eager_reason = ""
    # An open choice is a key that is "auto" in the settings; here it is train.compile.
    if "compile" in plan.open_choices and not resumed:
        eager_reason = why_uncompiled(session, window, opening_s)
    if eager_reason:
        # The session is opened again, because without a compiler the planner makes other choices,
        # and answers are sampled by other code.
        first_session = session
        first_session.batches.close()
        plan = resolve(plan.with_decided_values({"train.compile": "none"}).record, describe())
        session, _ = open_or_resume(plan, progress=silent())
        choose_kernel(session, window, silent())
        session.deadline_s = first_session.deadline_s
        session.reserved_s = first_session.reserved_s
        session.eager_reason = eager_reason
    if not resumed:
        require_time("and a first try of the model")
    # If neither updates nor epochs are given, the length of the run is a time.
    if not resumed and not updates_given(session):
        progress.line("time", _time_line(session, window, started.at_s))
    made_eager_updates = False
    if resumed:
        compile_step(session, window, progress)
    else:
        made_eager_updates = eager_start.begin(
            session, window, progress, partial(_score_initial_weights, session, progress)
        )
    # The reference scores must be made before the first update. If there were eager updates,
    # `_score_initial_weights` has made them.
    if not made_eager_updates:
        task.prepare_reference_scores(resumed, session.batches.rows_per_window, progress)
    if not resumed:
        fix_length(session, progress)
        if world.leads:
            session.plan.record.write(folder)
        session.save()
    return session


def _first_plan(locked: LockedRun, started: Started, has_begun: bool) -> RunPlan:
    """Return the plan that all ranks have before the records are read; print notes on it.

    For a new run, rank 0 also writes config.toml, with which the run begins.

    Args:
        locked: the run, on all ranks, which must all call this.
        started: when the program was started.
        has_begun: whether the run has begun before, so that it is not new.

    Raises:
        UsageError: choices exclude one another.
    """
    folder = locked.folder
    world = locked.world
    progress = locked.progress
    machine = describe()
    record = ranks.agreed_record(world, locked.record)
    require_possible(record.settings, machine)
    plan = resolve(record, machine)
    for line in notes_on(plan, machine):
        progress.line("note", line)
    note = "" if has_begun else _short_time_note(plan.job.span.wall_minutes, started)
    if note:
        progress.line("time", note)
    if world.leads and not has_begun:
        plan = _keep_stdin(folder, plan, progress)
        plan.record.write(folder)
    if world.leads:
        note_start(folder)
    return agreed_plan(world, plan, machine)


def _score_initial_weights(session: Session, progress: Progress) -> None:
    """Before the first eager update, prepare what depends on the initial weights: the reference
    scores, and the first point of the curve.

    The point is logged, but not shown: the display of the training begins later, and reads the
    point from the log. Its row says that it is from the time of the eager updates (`EAGER_KEY`).
    """
    rows_per_window = session.batches.rows_per_window
    session.task.prepare_reference_scores(
        resumed=False, rows_per_window=rows_per_window, progress=progress
    )
    report = Reporter(session, silent())
    if session.task.scores_initial_weights:
        report.evaluate(report.training_block(), 0, limit=None, **{eager_start.EAGER_KEY: True})


def _require_time(plan: RunPlan, started: Started, doing: str) -> None:
    """Refuse to begin a run if the time of train.wall_minutes is over before its first update.

    Args:
        plan: the run's plan.
        started: when the program was started.
        doing: what the run was doing when the time was over, for the message.

    Raises:
        UsageError: the time is over.
    """
    minutes = plan.job.span.wall_minutes or math.inf
    if clock() - started.at_s > 60 * minutes:
        raise UsageError(
            f"train.wall_minutes = {minutes:g}: the time was over before the first update: starting took "
            f"{duration(started.took_s)}, then came reading ({doing}); give more time. `monograph data build` reads "
            "texts once, for all later runs"
        )


def _short_time_note(wall_minutes: float | None, started: Started) -> str:
    """Return a note if starting and ending a run take much of its train.wall_minutes, or else ""."""
    limit_s = 60 * (wall_minutes or math.inf)
    # Ending a run takes about END_STARTS times as long as starting it.
    start_and_end_s = started.took_s * (1 + defaults.END_STARTS)
    if start_and_end_s <= NOTED_SHARE * limit_s:
        return ""
    return (
        f"starting and ending a run takes about {duration(start_and_end_s)} of {duration(limit_s)}; "
        "reading the texts comes on top"
    )


def _time_line(session: Session, window: Batch, since_s: float) -> str:
    """Return the line that says how long a run trains, and how long it takes in all.

    It is for runs whose length is given as a time.

    Args:
        session: the session at its beginning.
        window: a window of it.
        since_s: the time of `clock` at which the program was started.
    """
    plan = session.plan
    span = plan.job.span
    training_s = min(60 * span.minutes, session.left_s)
    if not training_s:
        return f"preparation left nothing of {duration(60 * (span.wall_minutes or 0))}: one update, then the report"
    if span.wall_minutes is None:
        whole = f"about {duration(expected_whole_s(session, window, since_s))} in all"
    else:
        whole = f"at most {duration(60 * span.wall_minutes)} in all"
    compiling = "" if plan.training.compile == "none" else ", compiling"
    return f"{duration(training_s)} of training, {whole} with preparation{compiling} and report"


def _open_or_resume(
    folder: Run,
    plan: RunPlan,
    task: Task,
    world: World,
    retry_rows: int,
    progress: Progress,
) -> tuple[Session, bool]:
    """Open a run's session, at its beginning or where the run stopped.

    Args:
        folder: the run's folder.
        plan: the run's plan.
        task: what the run learns from.
        world: the ranks.
        retry_rows: see `LockedRun`.
        progress: the display.

    Returns:
        The session, and whether the run is resumed.
    """
    session = open_session(folder, plan, task, default_device(), progress, world)
    if world.leads and not exists(folder.tokenizer):
        writing.write_tokenizer(folder, session.records.tokenizer)
    session.engine.announce = partial(progress.line, "memory")
    session.engine.step.announce = partial(progress.line, "note")
    resumed = _load_checkpoint(session, progress)
    if retry_rows:
        micro_batch = min(session.engine.micro_batch or retry_rows, retry_rows)
        session.engine.micro_batch = micro_batch
        progress.line(
            "memory",
            f"the attempt before ran out of memory: micro_batch is now {micro_batch}, "
            "the update stays the same",
        )
    task.prepare_reference_weights(resumed)
    return session, resumed


def _load_checkpoint(session: Session, progress: Progress) -> bool:
    """Restore the run's newest checkpoint. If it has none, load the weights and the optimizer state
    of the run's parent (--from), if there is one.

    Returns:
        Whether the run is resumed.

    Raises:
        NoValidCheckpoint: the run has metrics of later updates, but no valid checkpoint.
    """
    world = session.world
    folder = session.run
    warn = partial(progress.line, "warning")
    was_saved = bool(checkpointing.list_checkpoints(folder.checkpoints))
    # If there is a checkpoint, the rows of metrics.jsonl are not read here: a run can be resumed
    # even if a row is damaged.
    if not was_saved:
        # Only eager updates come before the first checkpoint. So a run with rows of other updates
        # had a checkpoint. As that is gone, the run must not begin anew: `load_newest` raises.
        was_saved = any(eager_start.EAGER_KEY not in row for row in folder.rows())
    if world.broadcast(was_saved):
        session.restore(load_newest(world, folder.checkpoints, warn), progress)
        if world.leads and writing.repair_tokenizer(folder, session.records.tokenizer):
            warn(f"{folder.tokenizer}: was damaged, and is written again")
        progress.line(
            "resume", f"{folder.folder} from update {session.engine.index} of {session.updates}"
        )
        return True
    # Any rows come from a process that was stopped before its first checkpoint.
    folder.truncate_metrics(0)
    parent = writing.recorded_parent(folder)
    if parent:
        checkpoint = load_newest(world, parent.run.checkpoints, warn, at=parent.at_update)
        session.begin_from(checkpoint, parent.run)
        progress.line(
            "from", f"weights and optimizer of {parent.run.folder} after update {checkpoint.update}"
        )
    return False


def _keep_stdin(run: Run, plan: RunPlan, progress: Progress) -> RunPlan:
    """If data.source has "-", write the text of standard input to a file in the run's folder, from
    which later commands can read it again.

    Returns:
        The plan with that file in place of "-".
    """
    job = plan.job
    source = job.reading.source
    names = [source] if isinstance(source, str) else source
    if "-" not in names:
        return plan
    with progress.stage("text", "standard input") as stage:
        file = str(spooled_stdin(run.folder, stage.report))
        stage.result = f"kept as {file}"
    source = [file if name == "-" else name for name in names]
    record = job.record.with_decided_values({"data.source": source})
    job = replace(job, record=record, reading=replace(job.reading, source=source))
    return replace(plan, job=job)
