"""Find the run that `monograph train` was asked for, lock its folder, and complete its settings.

A resumed run adds the settings that it has recorded itself. A run that begins from another one adds
those that the other run has recorded.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from monograph import checkpointing
from monograph.config import Settings
from monograph.device import default_device, describe
from monograph.distributed.world import World
from monograph.report.quantities import counted
from monograph.run import writing
from monograph.run.folder import Run
from monograph.run.progress import Progress
from monograph.session import ranks, recorded
from monograph.session.objectives import objective_of, with_records
from monograph.session.record import ConfigRecord
from monograph.session.reporting import final_summary
from monograph.session.requirements import require_possible, require_trained_model
from monograph.session.setup import make_repeatable
from monograph.session.shown_commands import command_line, show_command
from monograph.storage.reading import exists


class LockedRun(NamedTuple):
    """A run whose folder is locked for this process.

    Attributes:
        folder: the run.
        record: its settings, the same on all ranks.
        world: the ranks that train it together.
        progress: the display.
        retry_rows: the maximum number of rows of a micro-batch if the launcher has started the
            ranks again because the previous attempt ran out of memory; else 0.
        summary: the results of a run that has already finished, the same on all ranks; None if
            there is something to train.
    """

    folder: Run
    record: ConfigRecord
    world: World
    progress: Progress
    retry_rows: int
    summary: dict[str, Any] | None


@contextmanager
def locked_run(
    settings: Settings, *, out: Path | None, resume: str | None, from_: str | None
) -> Iterator[LockedRun]:
    """Lock a new or an existing run for the block, on all ranks that a launcher started.

    An error of the block is reported by one rank, see `ranks.report_error_once`.

    Args:
        settings: the settings that the command line gives.
        out: the folder of a new run; None means a new one in runs/.
        resume: the run to resume, as --resume names it.
        from_: the run to begin from, as --from names it.

    Raises:
        UsageError: choices exclude one another.
        InputRefused: a run that is named cannot be used.
    """
    settings, from_ = recorded.with_folder_as_init(settings, from_)
    settings = with_records(settings)
    # With --resume or --from, recorded settings are added below. `open_run` checks them all
    # together.
    if not (resume or from_):
        require_possible(settings, describe())
        require_trained_model(objective_of(settings), settings.model.init)
    world = ranks.meet(
        settings.train.parallel, settings.quoted("train.parallel"), resumed=resume is not None
    )
    progress = ranks.start_display(world)
    make_repeatable(default_device())
    parent = recorded.parent_named(from_) if from_ and world.leads else None
    folder, is_resumed = ranks.agreed_run(world, out, resume)
    with (
        folder.lock(new=not is_resumed),
        ranks.report_error_once(
            world,
            folder,
            continue_command=lambda: command_line("train", "--resume", folder.handle),
            has_not_begun=lambda: not is_resumed and not exists(folder.checkpoints),
        ) as retry_rows,
    ):
        warning = ""
        if is_resumed:
            if world.leads:
                checkpointing.remove_leftovers(folder.checkpoints)
            # Without --resume, a launcher has restarted the ranks of a run that had begun, with the
            # same command line. The run has recorded the settings of that line, so none change.
            changes = settings if resume else Settings()
            settings = recorded.settings_to_resume(folder, changes)
            warning = recorded.foreign_text_warning(folder, settings.data.source, settings.programs)
        elif parent:
            settings = recorded.settings_from_parent(parent.run, settings)
            writing.record_parent(folder, *parent)
            warning = recorded.foreign_text_warning(
                parent.run, settings.data.source, settings.programs
            )
        if warning:
            progress.line("warning", warning)
        summary = final_summary(folder) if is_resumed and world.leads else None
        summary = world.broadcast(summary)
        if summary:
            progress.line(
                "done",
                f"{folder.folder} has already finished, after {counted(summary['update'], 'update')}",
            )
            if world.leads:
                show_command(progress, "next", "train", "--from", folder.handle)
        else:
            ranks.require_launched(
                settings.train.parallel, settings.quoted("train.parallel"), world.place
            )
        yield LockedRun(
            folder, ConfigRecord(settings), world, progress, retry_rows, summary or None
        )
        # All ranks leave together. This is not done after an error of the block, since other ranks
        # might never come here.
        world.leave()
