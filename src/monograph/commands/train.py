"""`monograph train`: turn text and time into a trained model, its figures and its checkpoints."""

import json as jsonlib
from contextlib import ExitStack
from pathlib import Path

from monograph import checkpointing
from monograph.config import Settings
from monograph.device import clock, default_device, describe
from monograph.errors import UsageError
from monograph.loop import train
from monograph.report.quantities import counted
from monograph.run import writing
from monograph.run.folder import standard_json
from monograph.run.progress import Progress
from monograph.run.signals import StopSignal
from monograph.session import ranks, recorded
from monograph.session.after_update import AfterUpdate
from monograph.session.objectives import objective_of, with_records
from monograph.session.recorded import foreign_text_warning
from monograph.session.reporting import Reporter, finished
from monograph.session.requirements import require_possible, require_trained_model
from monograph.session.rewind import windows
from monograph.session.session import Session
from monograph.session.setup import repeatable
from monograph.session.shown_commands import show_command
from monograph.session.start import Started, open_run
from monograph.session.warmup import measure_memory
from monograph.storage.cache_dir import keep_compiled
from monograph.storage.reading import exists


def run(
    settings: Settings,
    *,
    out: Path | None,
    resume: str | None,
    from_: str | None,
    json: bool,
    program_start_s: float | None = None,
) -> None:
    """Train, or resume training; see the command line's help.

    Args:
        settings: the settings that the command line gives.
        out: the folder of a new run; None: a new one in runs/.
        resume: the run to resume, as --resume names it.
        from_: the run to begin from, as --from names it.
        json: whether to print the run's summary as JSON.
        program_start_s: the time of `clock` at which the program was started; None: now.
    """
    if resume and out:
        raise UsageError(
            f"--out {out}: --resume goes on in the run's own folder; leave one of them out"
        )
    program_start_s = clock() if program_start_s is None else program_start_s
    started = Started(program_start_s, clock() - program_start_s)
    # Before torch._dynamo is imported, which sets its own cache path in the environment.
    keep_compiled()
    settings, from_ = recorded.with_folder_as_init(settings, from_)
    settings = with_records(settings)
    # A run that is resumed, or begun from another, adds the settings that the other run recorded.
    # Those are checked together with these, by `open_run`.
    if not (resume or from_):
        require_possible(settings, describe())
        require_trained_model(objective_of(settings), settings.model.init)
    world = ranks.meet(
        settings.train.parallel, settings.said("train.parallel"), resumed=resume is not None
    )
    progress = ranks.progress_of(world)
    repeatable(default_device())
    parent = recorded.parent_named(from_) if from_ and world.leads else None
    this_run, is_resumed = ranks.folder_of(world, out, resume)
    with (
        this_run.lock(new=not is_resumed),
        ranks.report_error_once(
            world,
            this_run,
            has_not_begun=lambda: not is_resumed and not exists(this_run.checkpoints),
        ) as retry_rows,
    ):
        warning = ""
        if is_resumed:
            if world.leads:
                checkpointing.remove_leftovers(this_run.checkpoints)
            # Without --resume, a launcher has restarted the ranks of a run that had just begun. It
            # has recorded what its command line gives.
            changes = settings if resume else Settings()
            settings = recorded.settings_to_resume(this_run, changes)
            warning = foreign_text_warning(this_run, settings.data.source, settings.programs)
        elif parent:
            settings = recorded.settings_from_parent(parent.run, settings)
            writing.record_parent(this_run, *parent)
            warning = foreign_text_warning(parent.run, settings.data.source, settings.programs)
        if warning:
            progress.line("warning", warning)
        summary = world.broadcast(finished(this_run) if is_resumed and world.leads else None)
        if summary:
            progress.line(
                "done",
                f"{this_run.folder} has already finished, after {counted(summary['update'], 'update')}",
            )
            if world.leads:
                show_command(progress, "next", "train", "--from", this_run.handle)
        else:
            ranks.require_launched(
                settings.train.parallel, settings.said("train.parallel"), world.own
            )
            with ExitStack() as resources:
                session = open_run(
                    this_run, settings, world, progress, resources, retry_rows, started
                )
                report = Reporter(session, progress)
                _loop(session, report, progress)
                measure_memory(session)  # for the summary
                session.task.store_measurements()  # for the plans of later runs
                summary = report.finish() if world.leads else {}
        world.leave()
    if json and world.leads:
        print(jsonlib.dumps(standard_json(summary)))


def _loop(session: Session, report: Reporter, progress: Progress) -> None:
    with (
        report.block() as block,
        StopSignal(lambda name: block.note(f"{name}: saving after this update")) as stop,
    ):
        after = AfterUpdate(session, report, block, stop, progress)
        for update in train(session.engine, windows(session), session.updates):
            due = after.note(update)
            if due.goes_back:
                after.go_back()
                continue
            with after.paused():
                after.evaluate(due)
                after.keep_time(due)
                after.sample(due)
                after.save(due)
            after.raise_if_stopped(due)
            if due.is_last:  # earlier than planned if a cool-down was begun
                break
        after.end()
