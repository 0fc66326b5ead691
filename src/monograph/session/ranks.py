"""Let several processes (ranks) train one run: check how they were started, agree on one folder,
and end with the same error.

Rank 0 decides, prints and writes; the others do the same work and print nothing. All ranks see one
folder. A launcher such as torchrun may restart all ranks after a failure; each such *attempt* finds
in `exit.json` how the attempt before ended. This file also builds the commands that are printed for
the user, so that they work unchanged in the same working folder.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from monograph import __version__
from monograph.config import build, check
from monograph.device import describe
from monograph.distributed.world import Place, World, lost, place
from monograph.errors import (
    Ended,
    InputRefused,
    MonographError,
    OutOfDeviceMemory,
    PeerLost,
    Stopped,
    UsageError,
)
from monograph.graph.trial import refused_by_others
from monograph.run.folder import Follower, Run
from monograph.run.progress import LABEL_WIDTH, Progress
from monograph.run.run_index import json_object, wait_until_free
from monograph.run.writing import discard
from monograph.session.record import ConfigRecord
from monograph.session.recorded import run_settings
from monograph.storage.reading import contents, exists, is_folder
from monograph.terminal import shell_words


def command(*arguments: str) -> str:
    """Return a command line that calls this program as it was called, with arguments quoted for the
    shell.
    """
    return shell_words(*_program(), *arguments)


def show(progress: Progress, label: str, *arguments: str) -> None:
    """Print a command line that calls this program, on a line that is never cut, so that it can be
    copied.
    """
    text = command(*arguments)
    if len(text) + LABEL_WIDTH < progress.screen.width:
        progress.line(label, text)
    else:
        print(text, file=sys.stderr)


def _program() -> list[str]:
    """Return the words by which a shell calls this program as it was called."""
    called = os.path.abspath(sys.argv[0])
    script = shutil.which("monograph")
    is_module = os.path.basename(called) == "__main__.py"
    # The shell's `monograph` is this program if it lies next to the Python that runs the module, or
    # if it is the script that was called.
    if script and is_module and _share_folder(script, sys.executable):
        return ["monograph"]
    if script and not is_module and os.path.realpath(script) == os.path.realpath(called):
        return ["monograph"]
    if is_module:
        return [_shortest_path(sys.executable), "-m", "monograph"]
    return [_shortest_path(called)]


def _share_folder(one: str, other: str) -> bool:
    return os.path.dirname(os.path.abspath(one)) == os.path.dirname(os.path.abspath(other))


def _shortest_path(path: str) -> str:
    """Return the path relative to the working folder if it is inside, else as it is.

    Links are not followed: .venv/bin/python is a link, and its target would be another Python.
    """
    relative = os.path.relpath(path)
    if relative.startswith(os.pardir):
        return path
    # A shell would look up a name without a slash in PATH.
    return relative if os.sep in relative else os.path.join(os.curdir, relative)


# The file in a run's folder that records the error with which an attempt of several ranks ended.
ENDED = "exit.json"
# How long a rank other than 0 waits for rank 0 to save and end. torchrun waits a little longer
# before it kills its processes.
PATIENCE_S = 25.0
TORCHRUN = "torchrun --standalone --nproc-per-node {} -m monograph train"


def meet(parallel: str, said: str, resumed: bool) -> World:
    """Wait until all ranks of this run have called this, and return them.

    Args:
        parallel: `train.parallel` as it is given.
        said: the key with its value, as an error begins.
        resumed: whether an earlier run is resumed; its own `train.parallel` is then checked later.

    Raises:
        UsageError: `train.parallel` is on for a single process, or off for several.
        PeerLost: some ranks did not call this in time.
    """
    own = place(srun=parallel != "none")
    if not resumed:
        require_launched(parallel, said, own)
    return World(own, lambda line: Progress().line("note", line))


def require_launched(parallel: str, said: str, own: Place | None) -> None:
    """Refuse a single process if several are needed, and several that would each train the same
    run.

    Args:
        parallel: `train.parallel`.
        said: the key with its value, as an error begins.
        own: this process's place among those that were started; None if it is alone.

    Raises:
        UsageError: the processes do not fit; the message shows the command.
    """
    if parallel != "none" and own is None:
        raise UsageError(
            f"{said} takes a process for each device: {TORCHRUN.format(2)} ... train.parallel={parallel}"
        )
    if parallel == "none" and own is not None and own.size > 1:
        raise UsageError(
            f"{said}, but {own.size} processes were started, which would each train the same run: add "
            "train.parallel=ddp or train.parallel=fsdp"
        )


def progress_of(world: World) -> Progress:
    """Print the header, and return the progress display; both show nothing on ranks other than 0."""
    progress = Progress(None if world.leads else open(os.devnull, "w", encoding="utf-8"))
    ranks = "" if world.alone else f", {world.size} ranks"
    progress.header(f"monograph {__version__}   {describe().summary}{ranks}")
    return progress


def again(world: World, run: Run, parallel: str) -> str:
    """Return the command line that resumes a run with the ranks that it has now.

    Args:
        world: the ranks.
        run: the run.
        parallel: the present `train.parallel`, which may differ from the one in config.toml.
    """
    changed: tuple[str, ...] = ()
    if run_settings(run, runs=()).train.parallel != parallel:
        changed = (f"train.parallel={parallel}",)
    if world.alone:
        return command("train", "--resume", run.handle, *changed)
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    launched = str(world.size) if restarts == "0" else f"{world.size} --max-restarts {restarts}"
    return " ".join([TORCHRUN.format(launched), "--resume", shell_words(run.handle), *changed])


def folder_of(world: World, out: Path | None, resume: str | None) -> tuple[Run, bool]:
    """Return the run of all ranks, and whether it is resumed.

    A run is also resumed if the launcher restarted the ranks after the run had begun.

    Args:
        world: the ranks.
        out: the run's folder, as --out names it; None without.
        resume: the run that --resume names; None without.

    Raises:
        UsageError: the ranks were restarted, and their run is unknown; or --resume names a
            checkpoint.
        InputRefused: see `Run.create` and `Run.open`.
    """
    folder = ""
    is_resumed = resume is not None
    if world.leads:
        # What an earlier attempt remembered, as the last statement of this block does.
        recalled = world.recall("run")
        known = out or (Path(recalled) if recalled else None)
        if resume:
            run = Run.open(resume, saved=False)
            if run.at_update is not None:
                raise UsageError(
                    f"--resume {resume}: a run is resumed from its newest checkpoint: name {run.folder}, "
                    f"or start a new run from this one with --from {resume}"
                )
        elif world.again and known is None:
            raise UsageError(
                "the ranks were started again: name the run's folder with --out, so that a restart can resume it"
            )
        elif world.again and known and Run(known).has_begun:
            run = Run(known)
            is_resumed = True
        else:
            run = Run.create(known)
        folder = str(run.folder if world.alone else run.folder.absolute())
        world.remember("run", folder)
    folder, is_resumed = world.broadcast([folder, is_resumed])
    run_class = Run if world.leads else Follower
    return run_class(Path(folder)), is_resumed


def agreed(world: World, record: ConfigRecord) -> ConfigRecord:
    """Return rank 0's settings on all ranks."""
    if world.alone:
        return record
    settings = record.settings
    values, origins, vouched = world.broadcast(
        [settings.pinned(), dict(settings.origins), dict(settings.vouched)]
    )
    checked = {
        key: check(key, value, origins[key], from_text=False) for key, value in values.items()
    }
    return ConfigRecord(build(checked, origins).vouching(vouched))


@contextmanager
def one_end(world: World, run: Run, unbegun: Callable[[], bool]) -> Iterator[int]:
    """Make only one rank report an error of the `with` block, and record the error for a restart.

    If the attempt before ended with an error that a restart does not fix, this one ends with the
    same error. If an error ends a single process before its run began, the run's folder is removed.

    Args:
        world: the ranks.
        run: the run.
        unbegun: returns whether the run has not begun, so that its folder has nothing of value.

    Yields:
        The maximum number of rows of a micro-batch, if the attempt before ran out of memory; else
        0.

    Raises:
        KeyboardInterrupt: the block was interrupted; the message has the command that resumes the
            run if it has begun.
        Ended: the attempt before ended with an error that a restart does not fix.
        PeerLost: another rank is gone.
        InputRefused: a user's module failed, or the run's folder is gone.
    """
    retry_rows = _require_not_ended(world, run.folder / ENDED)
    try:
        yield retry_rows
    except KeyboardInterrupt:
        if not (world.alone and run.has_begun):
            raise
        raise KeyboardInterrupt(f"continue: {command('train', '--resume', run.handle)}") from None
    except BaseException as raised:
        error = _ending(world, run, raised)
        if world.alone and exists(run.folder) and unbegun():
            discard(run)
        if error is raised:
            raise
        raise error from raised


def _ending(world: World, run: Run, error: BaseException) -> BaseException:
    """Return the error with which the run ends, and set its `told` if another rank reports it."""
    # Asked first, because the error of a lost connection may also come out of a user's module.
    if not world.alone and lost(error):
        peer = PeerLost(f"rank {world.rank}: another rank has ended, or was ended")
        peer.told = not world.leads
        return peer
    if not exists(run.folder):
        gone = "was moved or deleted while it was in use; what was saved before is where it went, for --resume"
        error = InputRefused(f"{run.folder}: {gone}")
    error = refused_by_others(error) or error
    if world.alone or not isinstance(error, MonographError):
        return error
    if isinstance(error, Stopped) and not world.leads:
        # A launcher may kill all processes once the first has ended, so rank 0, which saves, must
        # end first.
        wait_until_free(run.folder, PATIENCE_S)
        error.told = True
    else:
        error.told = not _record_end(run.folder / ENDED, error)
    return error


def _require_not_ended(world: World, file: Path) -> int:
    """Refuse a restart after an error that a restart does not fix; remove the record of another end.

    Args:
        world: the ranks.
        file: the run's `ENDED`.

    Returns:
        The maximum number of rows of a micro-batch, if the attempt before ran out of memory; else
        0.

    Raises:
        Ended: the attempt before ended with such an error.
    """
    before: dict[str, Any] | None = None
    if world.leads and world.attempt:
        before = json_object(contents(file) or b"")
    # A run that the user stopped can continue after a restart.
    if before and before["exit_code"] == Stopped.exit_code:
        before = None
    before = world.broadcast(before or None)
    retry_rows = int(before.get("retry_rows", 0)) if before else 0
    may_train = retry_rows or not before
    # A folder of this name was not written here, and is left alone.
    if world.leads and may_train and not is_folder(file):
        file.unlink(missing_ok=True)
    if before and not retry_rows:
        error = Ended(
            f"ended before with exit code {before['exit_code']}: {before['message']}",
            before["exit_code"],
        )
        error.told = not world.leads
        raise error
    return retry_rows


def _record_end(file: Path, error: MonographError) -> bool:
    """Record how the run ended; return False if another rank has already recorded an end."""
    try:
        with file.open("x", encoding="utf-8") as opened:
            ended = {"exit_code": error.exit_code, "message": str(error)}
            if isinstance(error, OutOfDeviceMemory) and error.retry_rows:
                ended["retry_rows"] = error.retry_rows
            opened.write(json.dumps(ended))
    except FileExistsError:
        return False
    except OSError:  # the disk may be full; the error is then reported without being recorded
        return True
    return True
