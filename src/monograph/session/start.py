"""Open a run for training: read what it learns from, build the model, try a step, compile it and
fix the length.
"""

import math
from contextlib import ExitStack, closing, nullcontext
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from monograph import checkpointing
from monograph.config import Settings
from monograph.data.sources import spooled_stdin
from monograph.device import clock, default_device, describe
from monograph.distributed.checkpoint import newest
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
from monograph.session.objective import Task
from monograph.session.objectives import open_task
from monograph.session.plan import RunPlan
from monograph.session.record import ConfigRecord, write_config
from monograph.session.reporting import Reporter
from monograph.session.requirements import notes_on, require_possible
from monograph.session.resolve import resolve
from monograph.session.session import Session
from monograph.session.setup import agreed_plan, open_session
from monograph.session.warmup import choose_kernel, compile_step, fix_length, try_step
from monograph.storage.reading import exists

# If starting and ending a run take more than this share of train.wall_minutes, a line says so.
NOTED_SHARE = 0.25


class Started(NamedTuple):
    """The start of the program.

    Attributes:
        at_s: its time, as a time of `clock`.
        took_s: the seconds from then until the program began with the run.
    """

    at_s: float
    took_s: float


def open_run(
    folder: Run,
    settings: Settings,
    world: World,
    progress: Progress,
    held: ExitStack,
    retry_rows: int,
    started: Started,
) -> Session:
    """Return a run's session, ready for its next update.

    Args:
        folder: the run's folder, which the caller has locked.
        settings: the settings of the run.
        world: the ranks that train it together.
        progress: the display.
        held: closes what is opened here when the run is over.
        retry_rows: the maximum number of rows of a micro-batch if the attempt before ran out of
            memory; 0 if none did.
        started: when the program was started.

    Raises:
        UsageError: choices exclude one another, or train.wall_minutes were over too early.
        InputRefused: the records, the model or the tokenizer cannot be used.
        OutOfDeviceMemory: nothing fits according to the planner.
    """
    machine = describe()
    record = ranks.agreed(world, ConfigRecord(settings))
    require_possible(record.settings, machine)
    plan = resolve(record, machine)
    for line in notes_on(plan, machine):
        progress.line("note", line)
    began_before = folder.begun
    note = "" if began_before else _short_time_note(plan.job.span.wall_minutes, started)
    if note:
        progress.line("time", note)
    if world.leads and not began_before:
        plan = _keep_stdin(folder, plan, progress)
        write_config(folder, plan.record.settings)
    if world.leads:
        note_start(folder)
    plan = agreed_plan(world, plan, machine)
    in_time = partial(_require_time, plan, started)
    # Reading a text may take longer than the run's time; each report of progress asks for that.
    watch = nullcontext() if began_before else progress.watched(in_time)
    with world.first(), watch:
        task = held.enter_context(closing(open_task(folder, plan, progress, world.size)))
    open_session_of = partial(
        _open_or_resume, folder, task=task, world=world, retry_rows=retry_rows
    )
    began = clock()
    session, resumed = open_session_of(plan, progress=progress)
    opening_s = clock() - began
    window = try_step(session, progress)
    wall_minutes = plan.job.span.wall_minutes
    if wall_minutes and not resumed:
        session.ends_s = started.at_s + 60 * wall_minutes
        session.end_s = defaults.end_s(started.took_s, 60 * wall_minutes)
    eager_reason = ""
    if "compile" in plan.open and not resumed:
        eager_reason = why_uncompiled(session, window, opening_s)
    if eager_reason:
        # The session is opened again, because without a compiler the planner makes other choices,
        # and answers are sampled by other code.
        session.batches.close()
        ends_s, end_s = session.ends_s, session.end_s
        plan = resolve(plan.noting({"train.compile": "none"}).record, machine)
        session, _ = open_session_of(plan, progress=silent())
        choose_kernel(session, window, silent())
        session.ends_s, session.end_s = ends_s, end_s
        session.eager_reason = eager_reason
    if not resumed:
        in_time("and a first try of the model")
    if not (resumed or updates_given(session)):
        progress.line("time", _times(session, window, started.at_s))
    made_eager_updates = False
    if resumed:
        compile_step(session, window, progress)
    else:
        made_eager_updates = eager_start.begin(
            session, window, progress, partial(_score_untrained, session, progress)
        )
    # The reference is scored before the first update, so `_score_untrained` did it already if there
    # were eager updates.
    if not made_eager_updates:
        task.score_reference(resumed, session.batches.rows_per_window, progress)
    if not resumed:
        fix_length(session, progress)
        if world.leads:
            write_config(folder, session.plan.record.settings)
        session.save()
    return session


def _score_untrained(session: Session, progress: Progress) -> None:
    """Score the weights before the first eager update: the reference, and the curve's first point.

    Nothing is shown here. The point is logged, and the run's own display, which begins later, reads
    it from the log.
    """
    session.task.score_reference(False, session.batches.rows_per_window, progress)
    report = Reporter(session, silent())
    if session.task.scores_untrained:
        report.evaluate(report.block(), 0, limit=None, **{eager_start.MARK: True})


def _require_time(plan: RunPlan, started: Started, doing: str) -> None:
    """Refuse to begin a run whose train.wall_minutes are over before its first update.

    Args:
        plan: the run's plan.
        started: when the program was started.
        doing: how far the run has come, for the message.

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
    """Return a note that starting and ending a run take much of its train.wall_minutes; "" if they
    do not.
    """
    limit_s = 60 * (wall_minutes or math.inf)
    least_s = started.took_s * (1 + defaults.END_STARTS)
    if least_s <= NOTED_SHARE * limit_s:
        return ""
    return f"to start and to end a run takes about {duration(least_s)} of {duration(limit_s)}; reading comes on top"


def _times(session: Session, window: Batch, since_s: float) -> str:
    """Return the line on how long a run by the clock trains, and how long it takes in all.

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
        retry_rows: see `open_run`.
        progress: the display.

    Returns:
        The session, and whether the run is resumed.
    """
    session = open_session(folder, plan, task, default_device(), progress, world)
    if world.leads and not exists(folder.tokenizer):
        writing.write_tokenizer(folder, session.corpus.tokenizer)
    session.engine.announce = partial(progress.line, "memory")
    session.engine.step.announce = partial(progress.line, "note")
    resumed = _load_checkpoint(session, progress)
    if retry_rows:
        micro_batch = min(session.engine.micro_batch or retry_rows, retry_rows)
        session.engine.micro_batch = micro_batch
        smaller = f"micro_batch is now {micro_batch}, the update stays the same"
        progress.line("memory", f"the attempt before ran out of memory: {smaller}")
    task.keep_reference(resumed)
    return session, resumed


def _load_checkpoint(session: Session, progress: Progress) -> bool:
    """Restore the run's newest checkpoint; without one, load the weights of the run's parent, if it
    has one (--from).

    Returns:
        Whether the run is resumed.

    Raises:
        NoValidCheckpoint: metrics of a begun run exist, but no sound checkpoint.
    """
    world = session.world
    folder = session.run
    warn = partial(progress.line, "warning")
    is_saved = bool(checkpointing.candidates(folder.checkpoints))
    # Only eager updates come before the first checkpoint. So a run with other rows had one, and
    # must not begin anew if it is gone: `newest` then raises. The rows of a run with a checkpoint
    # are not read here, since a damaged row does not hinder a resume.
    if world.agreed(is_saved or any(eager_start.MARK not in row for row in folder.rows())):
        session.restore(newest(world, folder.checkpoints, warn), progress)
        if world.leads and writing.mended_tokenizer(folder, session.corpus.tokenizer):
            warn(f"{folder.tokenizer}: was damaged, and is written again")
        progress.line(
            "resume", f"{folder.folder} from update {session.engine.index} of {session.updates}"
        )
        return True
    # The rows are of a process that was stopped before its first checkpoint.
    folder.truncate_metrics(0)
    if parent := writing.recorded_parent(folder):
        begun = newest(world, parent.run.checkpoints, warn, at=parent.at)
        session.branch(begun, parent.run)
        progress.line(
            "from", f"weights and optimizer of {parent.run.folder} after update {begun.update}"
        )
    return False


def _keep_stdin(run: Run, plan: RunPlan, progress: Progress) -> RunPlan:
    """Write the text of standard input to the run's folder, where resume, evaluation and branches
    read it again.

    Returns:
        The plan with that file in place of "-" in data.source.
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
    record = job.record.noted({"data.source": source})
    job = replace(job, record=record, reading=replace(job.reading, source=source))
    return replace(plan, job=job)
