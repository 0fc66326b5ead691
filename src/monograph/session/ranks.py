"""Let several processes train one run: check how they were started, agree on one folder, and end
alike.

Rank 0 decides, prints and writes; the others do the same work and print nothing. All ranks see one
folder. This file also builds the commands that are printed for the user, so that they work
unchanged in the same working folder.
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
from monograph.run.run_index import parsed, wait_until_free
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
    """Print a command line that calls this program, on one line and never cut, so that it can be
    copied.
    """
    text = command(*arguments)
    if len(text) + LABEL_WIDTH < progress.screen.width:
        progress.line(label, text)
    else:
        print(text, file=sys.stderr)


def _program() -> list[str]:
    called = os.path.abspath(sys.argv[0])
    script = shutil.which("monograph")
    as_module = os.path.basename(called) == "__main__.py"
    # `monograph` means this program if it is the script that was called, or next to the Python that
    # runs the module.
    if script and (
        _in_one_folder(script, sys.executable)
        if as_module
        else os.path.realpath(script) == os.path.realpath(called)
    ):
        return ["monograph"]
    return [_here(sys.executable), "-m", "monograph"] if as_module else [_here(called)]


def _in_one_folder(one: str, other: str) -> bool:
    return os.path.dirname(os.path.abspath(one)) == os.path.dirname(os.path.abspath(other))


def _here(path: str) -> str:
    """Return the path relative to the working folder if it is inside; links stay, since
    .venv/bin/python is one.
    """
    near = os.path.relpath(path)
    inside = near if os.sep in near else os.path.join(os.curdir, near)
    return path if near.startswith(os.pardir) else inside


ENDED = "exit.json"
PATIENCE_S = 25.0  # torchrun waits a little longer for processes that it has told to end
TORCHRUN = "torchrun --standalone --nproc-per-node {} -m monograph train"


def meet(parallel: str, said: str, resumed: bool) -> World:
    """Wait for the ranks of this run and return them once all are there.

    Args:
        parallel: `train.parallel` as it is given.
        said: the key, as an error begins with it.
        resumed: whether an earlier run goes on; its own settings are then checked later.

    Raises:
        UsageError: `train.parallel` is on for a single process, or off for several.
        PeerLost: some ranks did not come.
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
        said: the key, as an error begins with it.
        own: this process's place among those that were started; None: it is alone.

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
    """Return the progress display, with its header printed; on ranks other than 0 it shows nothing."""
    progress = Progress(None if world.leads else open(os.devnull, "w", encoding="utf-8"))
    ranks = "" if world.alone else f", {world.size} ranks"
    progress.header(f"monograph {__version__}   {describe().summary}{ranks}")
    return progress


def again(world: World, run: Run, parallel: str) -> str:
    """Return the command line that continues a run as it trains now, which may differ from its
    config.toml.
    """
    changed = (
        ()
        if run_settings(run, runs=()).train.parallel == parallel
        else (f"train.parallel={parallel}",)
    )
    if world.alone:
        return command("train", "--resume", run.handle, *changed)
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    launched = str(world.size) if restarts == "0" else f"{world.size} --max-restarts {restarts}"
    return " ".join([TORCHRUN.format(launched), "--resume", shell_words(run.handle), *changed])


def folder_of(world: World, out: Path | None, resume: str | None) -> tuple[Run, bool]:
    """Return the run of all ranks, and whether it goes on; it does, too, if the launcher restarted
    the ranks.

    Raises:
        UsageError: the ranks were restarted, and nothing says which run is theirs; or a checkpoint
            is to be resumed.
        InputRefused: see `Run.create` and `Run.open`.
    """
    folder = ""
    goes_on = resume is not None
    if world.leads:
        recalled = world.recall("run")
        known = out or (Path(recalled) if recalled else None)
        if resume:
            run = Run.open(resume, saved=False)
            if run.at is not None:
                raise UsageError(
                    f"--resume {resume}: a run goes on from its newest checkpoint: name {run.folder}, "
                    f"or start a new run from this one with --from {resume}"
                )
        elif world.again and known is None:
            raise UsageError(
                "the ranks were started again: name the run's folder with --out, which a restart goes on"
            )
        elif world.again and known and Run(known).begun:
            run = Run(known)
            goes_on = True
        else:
            run = Run.create(known)
        folder = str(run.folder if world.alone else run.folder.absolute())
        world.remember("run", folder)
    folder, goes_on = world.agreed([folder, goes_on])
    return (Run if world.leads else Follower)(Path(folder)), goes_on


def agreed(world: World, record: ConfigRecord) -> ConfigRecord:
    """Return rank 0's settings on all ranks."""
    if world.alone:
        return record
    settings = record.settings
    values, origins, vouched = world.agreed(
        [settings.pinned(), dict(settings.origins), dict(settings.vouched)]
    )
    checked = {
        key: check(key, value, origins[key], from_text=False) for key, value in values.items()
    }
    return ConfigRecord(build(checked, origins).vouching(vouched))


@contextmanager
def one_end(world: World, run: Run, unbegun: Callable[[], bool]) -> Iterator[int]:
    """Make only one rank report an error of the `with` block, and record the error so that a
    restart ends with it, too.

    If an error ends a single process before its run began, the run's folder is removed. The block
    gets the most rows that a micro-batch may have because the attempt before ran out of memory, or
    0.

    Raises:
        KeyboardInterrupt: the block was interrupted; the message has the command that goes on, if
            there is one.
        Ended: the attempt before ended with an error that a restart does not fix.
        PeerLost: another rank is gone.
        InputRefused: a user's module failed, or the run's folder is gone.
    """
    retry_rows = _require_not_ended(world, run.folder / ENDED)
    try:
        yield retry_rows
    except KeyboardInterrupt:
        if not (world.alone and run.begun):
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
    """Return the error with which the run ends, and mark whether another rank reports it (`told`)."""
    # A user's module, too, may fail to reach the ranks that hold its weights.
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
        # A launcher may end all processes with the first that ends.
        wait_until_free(run.folder, PATIENCE_S)
        error.told = True
    else:
        error.told = not _first(run.folder / ENDED, error)
    return error


def _require_not_ended(world: World, kept: Path) -> int:
    before: dict[str, Any] | None = (
        parsed(contents(kept) or b"") if world.leads and world.attempt else None
    )
    # A run that was only stopped goes on after a restart.
    before = world.agreed(before if before and before["exit_code"] != Stopped.exit_code else None)
    retry_rows = int(before.get("retry_rows", 0)) if before else 0
    if world.leads and (retry_rows or not before) and not is_folder(kept):
        kept.unlink(missing_ok=True)
    if before and not retry_rows:
        error = Ended(
            f"ended before with exit code {before['exit_code']}: {before['message']}",
            before["exit_code"],
        )
        error.told = not world.leads
        raise error
    return retry_rows


def _first(kept: Path, error: MonographError) -> bool:
    """Record how the run ended; return False if another rank has done so already."""
    try:
        with kept.open("x", encoding="utf-8") as file:
            ended = {"exit_code": error.exit_code, "message": str(error)}
            if isinstance(error, OutOfDeviceMemory) and error.retry_rows:
                ended["retry_rows"] = error.retry_rows
            file.write(json.dumps(ended))
    except FileExistsError:
        return False
    except OSError:  # a full disk may be the reason for the end
        return True
    return True
