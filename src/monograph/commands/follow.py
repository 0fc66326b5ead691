"""`monograph follow`: send a run's metrics to a tracker, while it trains or afterwards, from a
process of its own.

The process that trains knows nothing of it: only `metrics.jsonl` and `config.toml` are read, and
nothing is written to the run. A run that goes back cuts rows off, which no tracker can; then the
run there is begun anew.
"""

import errno
import hashlib
import io
import os
import socket
import sys
import tempfile
import threading
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from monograph.errors import DiskFull, InputRefused, MonographError, RunInUse
from monograph.interrupts import taken_back
from monograph.report.quantities import counted
from monograph.report.trackers import Opener, Point, Settings, Tracker, tracker_named
from monograph.run.folder import Run, explained
from monograph.run.run_index import SWEEP, parsed, runs_in, wait_until_free
from monograph.storage.reading import contents, is_file, open_input, refusing, without_links

POLL_S = 1.0
# So many bytes before the next row are compared, to see that the run did not go back and write as
# many others: about twenty rows, each with its times.
COMPARED_BYTES = 4096


def run(run: str, *, to: str, out: Path | None) -> None:
    """Send the rows until no process holds the run; see the command line's help.

    What the tracker's library prints is left out: it has escape sequences, and is not the result.
    """
    folder = Run.located(run, saved=False)
    tracker = tracker_named(to)
    if out:
        with explained(out):
            out.mkdir(parents=True, exist_ok=True)
            # Some trackers write elsewhere, or wait, if they cannot write here.
            tempfile.TemporaryFile(dir=out).close()
    followed: dict[Path, _Followed] = {}
    over = False
    with (
        taken_back(),
        _refused(to),
        redirect_stdout(io.StringIO()),
        _watched_threads(),
        ExitStack() as trackers,
    ):
        while not over:
            # Asked first, so that no row comes after the last look.
            over = wait_until_free(folder, POLL_S)
            for each in _runs(folder):
                if each not in followed:
                    trackers.enter_context(_alone(each, to))
                    followed[each] = trackers.enter_context(closing(_Followed(each, tracker, out)))
                followed[each].send()
    if not any(each.rows for each in followed.values()):
        raise InputRefused(f"{folder} has no metrics yet: follow it while it trains, or afterwards")
    for one in (each for each in followed.values() if each.rows):
        print(f"{one.name}: {counted(one.rows, 'row')}, up to update {one.update}; {one.seen}")


def _runs(folder: Path) -> list[Path]:
    """Return the folders of the runs: a sweep's members and what learned from them, without its
    link to the best.
    """
    if is_file(folder / SWEEP):
        return [
            *dict.fromkeys(map(without_links, [*runs_in(folder / "members"), *runs_in(folder)]))
        ]
    return [without_links(folder)]


class _Followed:
    """A run and its place in the tracker, which is opened with the first row.

    Attributes:
        name: the run's name; that of a sweep's member is SWEEP/MEMBER.
        rows, update: how many rows the tracker has, and the last one's update.
        seen: how to look at them.
    """

    def __init__(self, folder: Path, tracker: Opener, out: Path | None):
        sweeps = [
            above.name for above in (folder.parent, folder.parent.parent) if is_file(above / SWEEP)
        ]
        self.name = "/".join([*sweeps, folder.name])
        self.rows = 0
        self.update = 0
        self.seen = ""
        self._run = Run(folder)
        self._tracker = tracker
        self._out = out
        self._open: Tracker | None = None
        self._config = b""
        self._before = b""
        self._offset = 0

    def send(self) -> None:
        """Send the rows since the last call, or all rows if earlier ones are void or the settings
        have changed.

        Settings change once, when a run knows the number of its updates.

        Raises:
            InputRefused: a row or `config.toml` is damaged.
            Unreadable: the system failed to read one.
        """
        config = contents(self._run.config) or b""
        content = self._content(self._offset - len(self._before))
        if config != self._config or not content.startswith(self._before):
            self.close()
            self.rows = 0
            self._config = config
            self._before = b""
            self._offset = 0
            content = self._content(0)
        added = content[len(self._before) : content.rfind(b"\n") + 1]  # a row may be half written
        if not added:
            return
        points = [
            self._point(number, line)
            for number, line in enumerate(added.splitlines(), self.rows + 1)
        ]
        if not self._open:
            self._open = self._tracker(
                self.name, _key(self._run.folder), self._settings(), self._out
            )
        self._open.write(points)
        self.rows, self.update, self.seen = self.rows + len(points), points[-1][0], self._open.view
        self._offset, self._before = (
            self._offset + len(added),
            (self._before + added)[-COMPARED_BYTES:],
        )

    def close(self) -> None:
        """Finish what is open in the tracker."""
        opened = self._open
        self._open = None
        if opened:
            opened.close()

    def _content(self, offset: int) -> bytes:
        with refusing(self._run.metrics):
            if not is_file(self._run.metrics):
                return b""
            with open_input(self._run.metrics) as file:
                file.seek(offset)
                return file.read()

    def _point(self, number: int, line: bytes) -> Point:
        row = parsed(line)
        update = row.pop("update", None)
        if type(update) is not int or not 0 <= update <= 10**15:
            raise InputRefused(f"{self._run.metrics}:{number}: not a row of metrics; put it back")
        return update, dict(_numbers(row))

    def _settings(self) -> Settings:
        try:
            sections = tomllib.loads(self._config.decode("utf-8-sig"))
            return {
                f"{section}.{key}": value
                for section, keys in sections.items()
                for key, value in keys.items()
            }
        except (ValueError, AttributeError, RecursionError):
            raise InputRefused(
                f"{self._run.config}: not the settings of a run; put it back"
            ) from None


def _key(folder: Path) -> str:
    return hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]


@contextmanager
def _alone(folder: Path, to: str) -> Iterator[None]:
    """Keep away a second call, which would take the run in the tracker away from this one.

    The lock is a socket's name without a file: the run is not touched, and the kernel frees it
    however this ends.
    """
    with socket.socket(socket.AF_UNIX) as lock:
        try:
            lock.bind(f"\0monograph follow {_key(folder)} {to}")
        except OSError as error:
            if error.errno == errno.EADDRINUSE:  # other systems than Linux have no such names
                raise RunInUse(
                    f"{folder}: another process sends this run to {to}; wait, or end it first"
                ) from None
        yield


def _numbers(
    row: Mapping[str, Any], prefix: str = "", depth: int = 3
) -> Iterator[tuple[str, float]]:
    """Yield the finite numbers of a row; those of an object inside have its name before theirs."""
    for name, value in row.items():
        if isinstance(value, int | float) and abs(value) <= sys.float_info.max:
            yield prefix + name, float(value)
        elif isinstance(value, Mapping) and depth:
            yield from _numbers(value, f"{prefix}{name}/", depth - 1)


@contextmanager
def _watched_threads() -> Iterator[None]:
    """Raise at the end of the block what ended a thread of the tracker's library in it, which
    Python only prints.
    """
    faults: list[BaseException] = []

    def fell(thread: threading.ExceptHookArgs) -> None:
        if thread.exc_value is not None:
            faults.append(thread.exc_value)

    before = threading.excepthook, sys.unraisablehook
    threading.excepthook = fell
    # Of an object that is removed; what it could not write is no news.
    sys.unraisablehook = lambda fault: None
    try:
        yield
    finally:
        threading.excepthook, sys.unraisablehook = before
    if faults:
        raise faults[0]


@contextmanager
def _refused(to: str) -> Iterator[None]:
    """Turn an error of the tracker's library into one line."""
    try:
        yield
    except MonographError:
        raise
    except Exception as error:
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
        if full or "disk is full" in str(error):  # SQLite's words, which MLflow's error repeats
            raise DiskFull(
                f"{to}: its files cannot be written: {error}; see the disk, then follow again"
            ) from error
        raise InputRefused(f"{to}: {type(error).__name__}: {error}") from error
