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
from monograph.session.plan import Plan
from monograph.session.record import ConfigRecord, write_config
from monograph.session.reporting import Reporter
from monograph.session.requirements import notes_on, require_possible
from monograph.session.resolve import resolve
from monograph.session.session import Session
from monograph.session.setup import agreed_plan, open_session
from monograph.session.warmup import choose_kernel, compile_step, fix_length, try_step
from monograph.storage.reading import exists

# Of a run's whole time, from which on it is said that starting and ending it take so much.
SHARE_OF_LEAST = 0.25


class Started(NamedTuple):
    """When the program was started, as a time of `clock`, and the seconds that it took until it
    began with the run.
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
        folder: the run's folder, locked.
        settings: those of the run.
        world: the ranks that train it together.
        progress: the display.
        held: closes what is opened here when the run is over.
        retry_rows: the micro-batch of an attempt after one that ran out of memory; 0: none did.
        started: when the program was started.
    """
    machine = describe()
    record = ranks.agreed(world, ConfigRecord(settings))
    require_possible(record.settings, machine)
    plan = resolve(record, machine)
    for line in notes_on(plan, machine):
        progress.line("note", line)
    began_before = folder.begun
    if not began_before and (least := _least(plan.job.span.wall_minutes, started)):
        progress.line("time", least)
    if world.leads and not began_before:
        plan = _keeping_stdin(folder, plan, progress)
        write_config(folder, plan.record.settings)
    if world.leads:
        note_start(folder)
    plan = agreed_plan(world, plan, machine)
    in_time = partial(_require_time, plan, started)
    with world.first(), nullcontext() if began_before else progress.watched(in_time):
        task = held.enter_context(closing(open_task(folder, plan, progress, world.size)))
    opened = partial(_opened, folder, task=task, world=world, retry_rows=retry_rows)
    began = clock()
    session, resumed = opened(plan, progress=progress)
    opening_s = clock() - began
    window = try_step(session, progress)
    wall_minutes = plan.job.span.wall_minutes
    if wall_minutes and not resumed:
        session.ends_s = started.at_s + 60 * wall_minutes
        session.end_s = defaults.end_s(started.took_s, 60 * wall_minutes)
    why = ""
    if "compile" in plan.open and not resumed:
        why = why_uncompiled(session, window, opening_s)
    if why:
        session.batches.close()
        ends = session.ends_s, session.end_s
        # Where nothing is compiled, the planner chooses otherwise, and answers are drawn otherwise.
        plan = resolve(plan.noting({"train.compile": "none"}).record, machine)
        session, _ = opened(plan, progress=silent())
        choose_kernel(session, window, silent())
        session.ends_s, session.end_s = ends
        session.eager_reason = why
    if not resumed:
        in_time("and a first try of the model")
    if not (resumed or updates_given(session)):
        progress.line("time", _times(session, window, started.at_s))
    early = False
    if resumed:
        compile_step(session, window, progress)
    else:
        early = eager_start.begin(
            session, window, progress, partial(_score_untrained, session, progress)
        )
    if not early:
        task.score_reference(resumed, session.batches.rows_per_window, progress)
    if not resumed:
        fix_length(session, progress)
        if world.leads:
            write_config(folder, session.plan.record.settings)
        session.save()
    return session


def _score_untrained(session: Session, progress: Progress) -> None:
    """Score the weights before the first update, which comes before the step is compiled."""
    session.task.score_reference(False, session.batches.rows_per_window, progress)
    report = Reporter(session, silent())
    if session.task.scores_untrained:  # the run's own block, which begins later, shows it
        report.evaluate(report.block(), 0, limit=None, **{eager_start.MARK: True})


def _require_time(plan: Plan, started: Started, doing: str) -> None:
    """Require that a run of limited time has some left before its first update; `doing` is how far
    it has come.

    Raises:
        UsageError: it has none.
    """
    minutes = plan.job.span.wall_minutes or math.inf
    if clock() - started.at_s > 60 * minutes:
        raise UsageError(
            f"train.wall_minutes = {minutes:g}: the time was over before the first update: starting took "
            f"{duration(started.took_s)}, then came reading ({doing}); give more time. `monograph data build` reads "
            "texts once, for all later runs"
        )


def _least(wall_minutes: float | None, started: Started) -> str:
    """Return what a run of limited time takes besides reading and training, if that is much of it;
    else "".
    """
    limit_s = 60 * (wall_minutes or math.inf)
    least_s = started.took_s * (1 + defaults.END_STARTS)
    if least_s <= SHARE_OF_LEAST * limit_s:
        return ""
    return f"to start and to end a run takes about {duration(least_s)} of {duration(limit_s)}; reading comes on top"


def _times(session: Session, window: Batch, asked_s: float) -> str:
    """Return how long a run by the clock trains, and how long it will take in all."""
    plan = session.plan
    span = plan.job.span
    whole = f"about {duration(expected_whole_s(session, window, asked_s))} in all"
    if span.wall_minutes is not None:
        whole = f"at most {duration(60 * span.wall_minutes)} in all"
    parts = (
        "preparation and report"
        if plan.training.compile == "none"
        else "preparation, compiling and report"
    )
    training_s = min(60 * span.minutes, session.left_s)
    if not training_s:
        return f"preparation left nothing of {duration(60 * (span.wall_minutes or 0))}: one update, then the report"
    return f"{duration(training_s)} of training, {whole} with {parts}"


def _opened(
    folder: Run,
    plan: Plan,
    task: Task,
    world: World,
    retry_rows: int,
    progress: Progress,
) -> tuple[Session, bool]:
    """Open the session at its beginning or where it stopped; return it, and whether it resumes."""
    session = open_session(folder, plan, task, default_device(), progress, world)
    if world.leads and not exists(folder.tokenizer):
        writing.write_tokenizer(folder, session.corpus.tokenizer)
    session.engine.announce = partial(progress.line, "memory")
    session.engine.step.announce = partial(progress.line, "note")
    resumed = _taken_up(session, progress)
    if retry_rows:
        session.engine.micro_batch = min(session.engine.micro_batch or retry_rows, retry_rows)
        smaller = f"micro_batch is now {session.engine.micro_batch}, the update stays the same"
        progress.line("memory", f"the attempt before ran out of memory: {smaller}")
    task.keep_reference(resumed)
    return session, resumed


def _taken_up(session: Session, progress: Progress) -> bool:
    """Resume from the run's newest checkpoint, or begin from another run's weights; return whether
    the run resumes.
    """
    world = session.world
    folder = session.run
    warn = partial(progress.line, "warning")
    saved = bool(checkpointing.candidates(folder.checkpoints))
    if world.agreed(saved or any(eager_start.MARK not in row for row in folder.rows())):
        session.restore(newest(world, folder.checkpoints, warn), progress)
        if world.leads and writing.mended_tokenizer(folder, session.corpus.tokenizer):
            warn(f"{folder.tokenizer}: was damaged, and is written again")
        progress.line(
            "resume", f"{folder.folder} from update {session.engine.index} of {session.updates}"
        )
        return True
    folder.truncate_metrics(0)  # of a process that was stopped before its first checkpoint
    if parent := writing.recorded_parent(folder):
        begun = newest(world, parent.run.checkpoints, warn, at=parent.at)
        session.branch(begun, parent.run)
        progress.line(
            "from", f"weights and optimizer of {parent.run.folder} after update {begun.update}"
        )
    return False


def _keeping_stdin(run: Run, plan: Plan, progress: Progress) -> Plan:
    """Keep the text of standard input in the run's folder, where resume, evaluation and branches
    read it again.
    """
    job = plan.job
    source = job.reading.source
    named = [source] if isinstance(source, str) else source
    if "-" not in named:
        return plan
    with progress.stage("text", "standard input") as stage:
        kept = str(spooled_stdin(run.folder, stage.report))
        stage.result = f"kept as {kept}"
    source = [kept if name == "-" else name for name in named]
    record = job.record.noted({"data.source": source})
    return replace(
        plan, job=replace(job, record=record, reading=replace(job.reading, source=source))
    )
