"""Let several processes (ranks) train one run: check how they were started, agree on one folder,
and end with the same error.

Rank 0 decides, prints and writes; the others do the same work and print nothing. All ranks see the
same folder. A launcher such as torchrun may start all ranks again after a failure. Each start is an
*attempt*, and `exit.json` says with which error the attempt before it ended.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from monograph import __version__
from monograph.config import build, checked_value
from monograph.device import describe
from monograph.distributed.world import Place, World, is_rank_lost, read_place
from monograph.errors import (
    Ended,
    InputRefused,
    MonographError,
    OutOfDeviceMemory,
    PeerLost,
    Stopped,
    UsageError,
)
from monograph.graph.trial import refusal_of_user_error
from monograph.run.folder import Follower, Run
from monograph.run.progress import Progress
from monograph.run.run_index import json_object, wait_until_free
from monograph.run.writing import discard
from monograph.session.record import ConfigRecord
from monograph.session.recorded import run_settings
from monograph.session.shown_commands import command_line
from monograph.storage.reading import contents, exists, is_folder
from monograph.terminal import shell_words

# The file in a run's folder that records the error with which an attempt of several ranks ended.
END_RECORD = "exit.json"
# How long a rank other than 0 waits for rank 0 to save and end. torchrun waits a little longer
# before it kills its processes.
PATIENCE_S = 25.0
# The command line that starts several ranks; their number is in the braces.
TORCHRUN = "torchrun --standalone --nproc-per-node {} -m monograph train"


def meet(parallel: str, said: str, resumed: bool) -> World:
    """Wait until all ranks of this run have called this, and return them.

    Args:
        parallel: `train.parallel` as it is given.
        said: the origin, the key and its value, with which an error begins.
        resumed: whether a run is resumed. Then the `train.parallel` that the run recorded is
            checked later.

    Raises:
        UsageError: `train.parallel` is on for a single process, or off for several.
        PeerLost: some ranks did not call this in time.
    """
    own = read_place(srun=parallel != "none")
    if not resumed:
        require_launched(parallel, said, own)
    return World(own, lambda line: Progress().line("note", line))


def require_launched(parallel: str, said: str, own: Place | None) -> None:
    """Refuse one process if `train.parallel` needs several, and several without `train.parallel`.

    Args:
        parallel: `train.parallel`.
        said: the origin, the key and its value, with which an error begins.
        own: this process's place among those that were started; None if it is alone.

    Raises:
        UsageError: the number of processes does not fit; the message says what to do.
    """
    if parallel != "none" and own is None:
        raise UsageError(
            f"{said} needs a process for each device: {TORCHRUN.format(2)} ... train.parallel={parallel}"
        )
    if parallel == "none" and own is not None and own.size > 1:
        raise UsageError(
            f"{said}, but {own.size} processes were started, which would each train the same run: add "
            "train.parallel=ddp or train.parallel=fsdp"
        )


def start_display(world: World) -> Progress:
    """Print the header, and return the display. On ranks other than 0 nothing is shown."""
    # None means standard error.
    screen = None if world.leads else open(os.devnull, "w", encoding="utf-8")
    progress = Progress(screen)
    ranks = "" if world.alone else f", {world.size} ranks"
    progress.header(f"monograph {__version__}   {describe().summary}{ranks}")
    return progress


def resume_command(world: World, run: Run, parallel: str) -> str:
    """Return the command line that resumes a run with the present number of ranks.

    Args:
        world: the ranks.
        run: the run.
        parallel: the present `train.parallel`, which may differ from the one in config.toml.
    """
    changes: tuple[str, ...] = ()
    if run_settings(run, code_keys=()).train.parallel != parallel:
        changes = (f"train.parallel={parallel}",)
    if world.alone:
        return command_line("train", "--resume", run.handle, *changes)
    # `TORCHRUN` has braces for the number of ranks. Another option of torchrun can follow it there.
    size_and_restarts = str(world.size)
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if restarts != "0":
        size_and_restarts += f" --max-restarts {restarts}"
    launch = TORCHRUN.format(size_and_restarts)
    return " ".join([launch, "--resume", shell_words(run.handle), *changes])


def agreed_run(world: World, out: Path | None, resume: str | None) -> tuple[Run, bool]:
    """Return the run that all ranks train, and whether it is resumed.

    Rank 0 makes or finds the folder. A run is also resumed if the launcher started the ranks again
    after the run had begun.

    Args:
        world: the ranks.
        out: the run's folder, as --out names it; None without.
        resume: the run that --resume names; None without.

    Raises:
        UsageError: the ranks were started again, and nothing says which run they train; or --resume
            names a checkpoint.
        InputRefused: see `Run.create` and `Run.open`.
    """
    folder = ""
    is_resumed = resume is not None
    if world.leads:
        # If an earlier attempt made a new folder, it has stored the folder's name with the
        # launcher, as the end of this block does.
        stored = world.recall("run")
        known_folder = out or (Path(stored) if stored else None)
        if resume:
            run = Run.open(resume, needs_checkpoint=False)
            if run.at_update is not None:
                raise UsageError(
                    f"--resume {resume}: a run is resumed from its newest checkpoint: name {run.folder}, "
                    f"or start a new run from this one with --from {resume}"
                )
        elif world.was_restarted and known_folder is None:
            raise UsageError(
                "the ranks were started again: name the run's folder with --out, so that a restart can resume it"
            )
        elif world.was_restarted and known_folder and Run(known_folder).has_begun:
            run = Run(known_folder)
            is_resumed = True
        else:
            run = Run.create(known_folder)
        # Other ranks may have another working directory, so they get an absolute path.
        shared_folder = run.folder if world.alone else run.folder.absolute()
        folder = str(shared_folder)
        world.remember("run", folder)
    folder, is_resumed = world.broadcast([folder, is_resumed])
    # A `Follower` writes nothing.
    run_class = Run if world.leads else Follower
    return run_class(Path(folder)), is_resumed


def agreed_record(world: World, record: ConfigRecord) -> ConfigRecord:
    """Return rank 0's settings on all ranks, which must all call this."""
    if world.alone:
        return record
    settings = record.settings
    values, origins, vouched = world.broadcast(
        [settings.given_values(), dict(settings.origins), dict(settings.vouched)]
    )
    # The values were sent as JSON, which has no tuples. Checking gives each its type again.
    checked = {
        key: checked_value(key, value, origins[key], from_text=False)
        for key, value in values.items()
    }
    return ConfigRecord(build(checked, origins).vouching(vouched))


@contextmanager
def report_error_once(
    world: World, run: Run, continue_command: Callable[[], str], has_not_begun: Callable[[], bool]
) -> Iterator[int]:
    """Let only one rank report an error of the `with` block, and record the error for the next
    attempt.

    If the previous attempt ended with an error that would occur again, this attempt ends with the
    same error before it begins the block. If an error ends a single process before its run began,
    the run's folder is removed.

    Args:
        world: the ranks.
        run: the run.
        continue_command: returns the command that continues the run.
        has_not_begun: returns whether the run has not begun, so that its folder has nothing of value.

    Yields:
        The maximum number of rows of a micro-batch if the previous attempt ran out of memory; else
        0.

    Raises:
        KeyboardInterrupt: the block was interrupted; the message has the command that continues the
            run if it has begun.
        Ended: the previous attempt ended with an error that would occur again.
        PeerLost: another rank is gone.
        InputRefused: a user's module failed, or the run's folder is gone.
    """
    retry_rows = _require_not_ended(world, run.folder / END_RECORD)
    try:
        yield retry_rows
    except KeyboardInterrupt:
        if not (world.alone and run.has_begun):
            raise
        raise KeyboardInterrupt(f"continue: {continue_command()}") from None
    except BaseException as raised:
        error = _final_error(world, run, raised)
        if world.alone and exists(run.folder) and has_not_begun():
            discard(run)
        if error is raised:
            raise  # an error must not become its own cause
        raise error from raised


def _final_error(world: World, run: Run, error: BaseException) -> BaseException:
    """Return the error with which this process ends. If its `reported_elsewhere` is true,
    this process does not print it, because another rank does.

    Args:
        world: the ranks.
        run: the run.
        error: the error of the `with` block of `report_error_once`.
    """
    # This comes first, because the error of a lost connection may also come out of a user's module.
    if not world.alone and is_rank_lost(error):
        peer = PeerLost(f"rank {world.rank}: another rank has ended, or was ended")
        peer.reported_elsewhere = not world.leads
        return peer
    if not exists(run.folder):
        gone = "was moved or deleted while it was in use; what was saved before is where it went, for --resume"
        error = InputRefused(f"{run.folder}: {gone}")
    # An error in the user's own code becomes a refusal that names this code.
    error = refusal_of_user_error(error) or error
    if world.alone or not isinstance(error, MonographError):
        return error
    if isinstance(error, Stopped) and not world.leads:
        # A launcher may kill all processes once the first has ended, so rank 0, which saves, must
        # end first.
        wait_until_free(run.folder, PATIENCE_S)
        error.reported_elsewhere = True
    else:
        error.reported_elsewhere = not _record_end(run.folder / END_RECORD, error)
    return error


def _require_not_ended(world: World, file: Path) -> int:
    """Refuse an attempt after an error that would occur again; otherwise remove the record of how
    the previous attempt ended.

    Args:
        world: the ranks.
        file: the file `END_RECORD` of the run.

    Returns:
        The maximum number of rows of a micro-batch if the previous attempt ran out of memory; else
        0.

    Raises:
        Ended: the previous attempt ended with such an error.
    """
    # The error with which the previous attempt ended, as `_record_end` writes it. None if there is
    # no such error, or if the file cannot be read.
    end: dict[str, Any] | None = None
    if world.leads and world.attempt:
        end = json_object(contents(file) or b"") or None
    # A run that the user stopped can continue.
    if end and end["exit_code"] == Stopped.exit_code:
        end = None
    end = world.broadcast(end)
    retry_rows = int(end.get("retry_rows", 0)) if end else 0
    # If memory ran out, this attempt may have enough with fewer rows. Any other error would recur.
    if end and not retry_rows:
        error = Ended(
            f"ended before with exit code {end['exit_code']}: {end['message']}",
            end["exit_code"],
        )
        error.reported_elsewhere = not world.leads
        raise error
    # A folder of this name was not written by a run, and is left alone.
    if world.leads and not is_folder(file):
        file.unlink(missing_ok=True)
    return retry_rows


def _record_end(file: Path, error: MonographError) -> bool:
    """Record how the attempt ended, and return whether this rank reports the error.

    The rank that records its error first reports it: only one rank can create the file.
    """
    try:
        with file.open("x", encoding="utf-8") as opened:
            end = {"exit_code": error.exit_code, "message": str(error)}
            if isinstance(error, OutOfDeviceMemory) and error.retry_rows:
                end["retry_rows"] = error.retry_rows
            opened.write(json.dumps(end))
    except FileExistsError:
        return False
    except OSError:  # the disk may be full; the error is then reported without being recorded
        return True
    return True
