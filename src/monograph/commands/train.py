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
    asked_s: float | None = None,
) -> None:
    """Train, or resume training; see the command line's help.

    `asked_s` is the time of `clock` at which the program was started; None: now.
    """
    if resume and out:
        raise UsageError(
            f"--out {out}: --resume goes on in the run's own folder; leave one of them out"
        )
    asked_s = clock() if asked_s is None else asked_s
    started = Started(asked_s, clock() - asked_s)
    # Before torch._dynamo is imported, which sets its own cache path in the environment.
    keep_compiled()
    settings, from_ = recorded.with_folder_as_init(settings, from_)
    settings = with_records(settings)
    # Otherwise settings recorded by a run come first; `open_run` checks the result.
    if not (resume or from_):
        require_possible(settings, describe())
        require_trained_model(objective_of(settings), settings.model.init)
    world = ranks.meet(
        settings.train.parallel, settings.said("train.parallel"), resumed=resume is not None
    )
    progress = ranks.progress_of(world)
    repeatable(default_device())
    parent = recorded.parent_named(from_) if from_ and world.leads else None
    folder, resumed = ranks.folder_of(world, out, resume)
    with (
        folder.lock(new=not resumed),
        ranks.one_end(
            world, folder, unbegun=lambda: not resumed and not exists(folder.checkpoints)
        ) as retry_rows,
    ):
        strange = ""
        if resumed:
            if world.leads:
                checkpointing.remove_leftovers(folder.checkpoints)
            settings = recorded.settings_to_resume(folder, settings if resume else Settings())
            strange = foreign_text_warning(folder, settings.data.source, settings.programs)
        elif parent:
            settings = recorded.settings_from_parent(parent.run, settings)
            writing.record_parent(folder, *parent)
            strange = foreign_text_warning(parent.run, settings.data.source, settings.programs)
        if strange:
            progress.line("warning", strange)
        summary = world.agreed(finished(folder) if resumed and world.leads else None)
        if summary:
            progress.line(
                "done",
                f"{folder.folder} has already finished, after {counted(summary['update'], 'update')}",
            )
            if world.leads:
                show_command(progress, "next", "train", "--from", folder.handle)
        else:
            ranks.require_launched(
                settings.train.parallel, settings.said("train.parallel"), world.own
            )
            with ExitStack() as held:
                session = open_run(folder, settings, world, progress, held, retry_rows, started)
                report = Reporter(session, progress)
                _loop(session, report, progress)
                measure_memory(session)
                session.task.store_measurements()
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
            after.stop(due)
            if due.is_last:  # earlier than planned if a cool-down was begun
                break
        after.end()
