"""`monograph follow`: send a run's metrics to a tracker, during its training or afterwards.

This is a separate process. It reads only `metrics.jsonl` and `config.toml`, and writes nothing into
the run's folder. A run that goes back to a checkpoint removes the rows after it. A tracker cannot
remove rows, so the run that it shows is then replaced by a new one with all rows.
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
from monograph.interrupts import raise_on_sigterm
from monograph.report.quantities import counted
from monograph.report.trackers import Opener, SettingsByKey, TrackedPoint, Tracker, tracker_named
from monograph.run.folder import Run, write_errors_explained
from monograph.run.run_index import SWEEP, json_object, runs_in, wait_until_free
from monograph.storage.reading import contents, is_file, open_input, refusing, without_links
from monograph.storage.writing import DISK_ERRORS

POLL_S = 1.0  # seconds between two looks at the metrics
# At most this many of the bytes that were sent last are read again before new rows are sent. They have
# changed if the run has gone back to a checkpoint and written other rows: rows differ at least in their
# times, and this many bytes are about twenty rows.
COMPARED_BYTES = 4096


def run(run: str, *, to: str, out: Path | None) -> None:
    """Send rows until no process trains the run; see the command line's help."""
    folder = Run.locate(run, needs_checkpoint=False)
    tracker = tracker_named(to)
    if out:
        with write_errors_explained(out):
            out.mkdir(parents=True, exist_ok=True)
            # This tests whether `out` can be written. If it cannot, some trackers would write elsewhere, or
            # wait.
            tempfile.TemporaryFile(dir=out).close()
    followed: dict[Path, _Followed] = {}  # by the run's folder
    is_over = False
    with (
        raise_on_sigterm(),  # a SIGTERM ends this process as Ctrl-C does
        _tracker_errors_explained(to),
        redirect_stdout(io.StringIO()),  # drops what the tracker's library prints
        _thread_errors_raised(),
        ExitStack() as trackers,
    ):
        while not is_over:
            # This comes before the rows are read. So if no process trains the run any more, the rows that
            # are read below are the last ones.
            is_over = wait_until_free(folder, POLL_S)
            for run_folder in _runs_to_follow(folder):
                if run_folder not in followed:
                    trackers.enter_context(_lock_following(run_folder, to))
                    new_run = _Followed(run_folder, tracker, out)
                    followed[run_folder] = trackers.enter_context(closing(new_run))
                followed[run_folder].send()
    runs_with_rows = [each for each in followed.values() if each.rows]
    if not runs_with_rows:
        raise InputRefused(f"{folder} has no metrics yet: follow it while it trains, or afterwards")
    for each in runs_with_rows:
        print(
            f"{each.name}: {counted(each.rows, 'row')}, up to update {each.update}; {each.how_to_view}"
        )


def _runs_to_follow(folder: Path) -> list[Path]:
    """Return the folders of a run or, for a sweep, of its members and of the runs that were
    distilled from them.

    The link SWEEP/best leads to a member, so that member is found twice, but returned once.
    """
    if not is_file(folder / SWEEP):
        return [without_links(folder)]
    runs = [*runs_in(folder / "members"), *runs_in(folder)]
    distinct_folders = dict.fromkeys(map(without_links, runs))  # in the same order
    return list(distinct_folders)


class _Followed:
    """A run whose rows are sent to a tracker. The tracker is opened with the first row.

    Attributes:
        name: the run's name; for a member of a sweep SWEEP/MEMBER.
        rows: number of rows that the tracker has.
        update: the update of the last of them.
        how_to_view: a text that says how to look at them.
    """

    def __init__(self, folder: Path, open_tracker: Opener, out: Path | None):
        """Take the run's folder, the function that opens the tracker, and the folder of --out."""
        # A member's folder is SWEEP/members/MEMBER; that of a distilled run is SWEEP/RUN.
        parents = (folder.parent, folder.parent.parent)
        sweeps = [parent.name for parent in parents if is_file(parent / SWEEP)]
        self.name = "/".join([*sweeps, folder.name])
        self.rows = 0
        self.update = 0
        self.how_to_view = ""
        self._run = Run(folder)
        self._open_tracker = open_tracker
        self._out = out
        self._tracker: Tracker | None = None
        self._config = b""  # the settings that were sent
        self._sent_bytes = 0  # the number of bytes of metrics.jsonl that were sent
        self._last_sent = b""  # the last of the sent bytes, at most COMPARED_BYTES

    def send(self) -> None:
        """Send the rows since the last call.

        If the run has gone back or its settings have changed, all rows are sent to a new run of the
        tracker. Settings change once, when a run knows its number of updates.

        Raises:
            InputRefused: a row or `config.toml` is damaged.
            Unreadable: the system failed to read a file.
        """
        config = contents(self._run.config) or b""
        # The bytes that were sent last are read again, and compared.
        content = self._read_metrics(self._sent_bytes - len(self._last_sent))
        if config != self._config or not content.startswith(self._last_sent):
            self.close()
            self.rows = 0
            self._config = config
            self._last_sent = b""
            self._sent_bytes = 0
            content = self._read_metrics(0)
        # Only whole lines are sent, because the last row may be half written.
        new_lines = content[len(self._last_sent) : content.rfind(b"\n") + 1]
        if not new_lines:
            return
        numbered_lines = enumerate(new_lines.splitlines(), self.rows + 1)
        points = [self._point(number, line) for number, line in numbered_lines]
        if not self._tracker:
            key = _run_key(self._run.folder)
            self._tracker = self._open_tracker(self.name, key, self._settings(), self._out)
        self._tracker.write(points)
        last_update, _ = points[-1]
        self.rows += len(points)
        self.update = last_update
        self.how_to_view = self._tracker.view
        self._sent_bytes += len(new_lines)
        self._last_sent = (self._last_sent + new_lines)[-COMPARED_BYTES:]

    def close(self) -> None:
        """Close the tracker if it is open."""
        tracker = self._tracker
        self._tracker = None  # first, so that it is not closed again if closing fails
        if tracker:
            tracker.close()

    def _read_metrics(self, offset: int) -> bytes:
        """Return the bytes of metrics.jsonl from an offset on."""
        with refusing(self._run.metrics):
            if not is_file(self._run.metrics):
                return b""
            with open_input(self._run.metrics) as file:
                file.seek(offset)
                return file.read()

    def _point(self, number: int, line: bytes) -> TrackedPoint:
        """Return the update and the numbers of a row; `number` is its line, for the message."""
        row = json_object(line)
        update = row.pop("update", None)
        # `type` is compared because True is an int, too. No run has more updates (`recorded_state.MAX_COUNT`).
        if type(update) is not int or not 0 <= update <= 10**15:
            raise InputRefused(f"{self._run.metrics}:{number}: not a row of metrics; put it back")
        return update, dict(_finite_numbers(row))

    def _settings(self) -> SettingsByKey:
        """Return {SECTION.KEY: value} of the run's config.toml.

        Raises:
            InputRefused: the file is damaged.
        """
        try:
            # utf-8-sig also reads a file with a byte order mark, as some editors write it.
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


def _run_key(folder: Path) -> str:
    """Return a short text that differs from folder to folder."""
    return hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]


@contextmanager
def _lock_following(folder: Path, to: str) -> Iterator[None]:
    """Refuse a second process that sends the same run to the same tracker, during the `with` block.

    Two processes would replace each other's run in the tracker. The lock is the name of a socket
    without a file, so nothing is written into the run's folder. The kernel frees the name even if
    this process is killed.

    Raises:
        RunInUse: another process sends this run to the tracker.
    """
    with socket.socket(socket.AF_UNIX) as lock:
        try:
            lock.bind(f"\0monograph follow {_run_key(folder)} {to}")
        except OSError as error:
            # Another error comes from a system other than Linux, which has no such names. There is
            # then no lock.
            if error.errno == errno.EADDRINUSE:
                raise RunInUse(
                    f"{folder}: another process sends this run to {to}; wait, or end it first"
                ) from None
        yield


def _finite_numbers(
    row: Mapping[str, Any], prefix: str = "", depth: int = 3
) -> Iterator[tuple[str, float]]:
    """Yield (name, value) of each finite number in a row.

    Args:
        row: the row, or an object in it.
        prefix: what stands before the names: the names of the outer objects, each with a slash.
        depth: how many levels of objects inside `row` are read; deeper ones are left out.
    """
    for name, value in row.items():
        # A larger int has no float. The comparison is false for NaN, and for infinity, too.
        if isinstance(value, int | float) and abs(value) <= sys.float_info.max:
            yield prefix + name, float(value)
        elif isinstance(value, Mapping) and depth:
            yield from _finite_numbers(value, f"{prefix}{name}/", depth - 1)


@contextmanager
def _thread_errors_raised() -> Iterator[None]:
    """Raise, at the end of the `with` block, the first error that ended another thread.

    The tracker's library writes in threads, and Python would only print their errors.
    """
    errors: list[BaseException] = []

    def record_error(thread: threading.ExceptHookArgs) -> None:
        if thread.exc_value is not None:
            errors.append(thread.exc_value)

    former_hooks = threading.excepthook, sys.unraisablehook
    threading.excepthook = record_error
    # The errors of objects that are deleted are not printed either, because the first error has the reason.
    sys.unraisablehook = lambda fault: None
    try:
        yield
    finally:
        threading.excepthook, sys.unraisablehook = former_hooks
    if errors:
        raise errors[0]


@contextmanager
def _tracker_errors_explained(to: str) -> Iterator[None]:
    """Turn any error of the tracker's library in the `with` block into DiskFull or InputRefused."""
    try:
        yield
    except MonographError:
        raise
    except Exception as error:
        is_disk = getattr(error, "errno", None) in DISK_ERRORS
        # MLflow's error has no errno, only SQLite's words.
        if is_disk or "disk is full" in str(error):
            raise DiskFull(
                f"{to}: its files cannot be written: {error}; see the disk, then follow again"
            ) from error
        raise InputRefused(f"{to}: {type(error).__name__}: {error}") from error
