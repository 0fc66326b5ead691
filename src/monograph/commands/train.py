"""`monograph train`: turn text and time into a trained model, its figures and its checkpoints."""

import json as jsonlib
from contextlib import ExitStack
from pathlib import Path

from monograph.config import Settings
from monograph.device import clock
from monograph.errors import UsageError
from monograph.loop import train
from monograph.run.folder import standard_json
from monograph.run.progress import Progress
from monograph.run.signals import StopSignal
from monograph.session.after_update import AfterUpdate
from monograph.session.locked_run import locked_run
from monograph.session.reporting import Reporter
from monograph.session.rewind import windows
from monograph.session.session import Session
from monograph.session.start import Started, open_run
from monograph.session.warmup import measure_memory
from monograph.storage.cache_dir import keep_compiled


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
    # This must come before the import of torch._dynamo, which sets its own cache path in the environment.
    keep_compiled()
    with (
        locked_run(settings, out=out, resume=resume, from_=from_) as locked,
        ExitStack() as resources,
    ):
        leads = locked.world.leads  # True in one of the processes that train together
        summary = locked.summary  # that of a finished run, which --resume names
        if summary is None:
            session = open_run(locked, started, resources)
            report = Reporter(session, locked.progress)
            _loop(session, report, locked.progress)
            measure_memory(session)  # for the summary
            session.task.store_measurements()  # for the plans of later runs
            summary = report.finish() if leads else {}
    if json and leads:
        print(jsonlib.dumps(standard_json(summary)))


def _loop(session: Session, report: Reporter, progress: Progress) -> None:
    """Train to the end of the run or until the user stops it.

    What is due after an update follows it: an evaluation, samples, or a checkpoint; or the run goes back
    to an earlier checkpoint, because many updates in a row were skipped.
    """
    with (
        report.training_block() as block,
        StopSignal(lambda name: block.note(f"{name}: saving after this update")) as stop,
    ):
        after = AfterUpdate(session, report, block, stop, progress)
        for update in train(session.engine, windows(session), session.updates):
            due = after.note(update)
            if due.goes_back:
                after.go_back()
                continue
            with after.since_shown.paused():  # the speed that is shown is that of the updates alone
                after.evaluate(due)
                after.shorten_if_late(due)
                after.sample(due)
                after.save(due)
            after.raise_if_stopped(due)
            if due.is_last:  # earlier than planned if a cool-down was begun
                break
        after.end()
