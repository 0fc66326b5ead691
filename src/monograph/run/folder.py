"""Create, find and lock run folders, and read and write their metrics.

A folder that contains `run.lock` is a run. `run.lock` is a JSON object, the lock record: the run's
serial number, and the process and host that held the lock last. The runs of a folder are numbered in the
order of their creation. A run has begun once `config.toml` exists. A run that has not begun contains
nothing worth keeping, so `Run.create` may replace it. `metrics.jsonl` has one JSON object on each line,
called a row. `stdin` is a copy of the data if the run reads them from standard input.

A sweep is a folder of many runs, its members (`monograph.sweeps`), and is itself a run folder with the
file sweep.json.
"""

import errno
import fcntl
import functools
import hashlib
import json
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from pydantic import ConfigDict, TypeAdapter, ValidationError, create_model

from monograph.errors import DiskFull, InputRefused, RunInUse, Unreadable
from monograph.report import metrics
from monograph.run.run_index import (
    SWEEP,
    folders_with_lock,
    json_object,
    lock_record,
    resolve_checkpoint,
    runs_in,
    serial_number,
    update_of_checkpoint,
)
from monograph.storage.reading import (
    contents,
    entries,
    exists,
    is_file,
    is_folder,
    read_input,
    status,
    without_links,
)
from monograph.storage.writing import sync
from monograph.terminal import shell_words

DEFAULT_ROOT = Path("runs")
# The name SWEEP/mixture means all members of a sweep, evaluated together. No such folder exists.
MIXTURE = "mixture"
# A run whose folder contains this file is distilled from the members of a sweep.
TEACHERS = "teachers.json"
# The files that a run folder may contain before the run has begun. NAME.partial is a file that is
# being written, and gets its final name once it is complete.
_FILES_BEFORE_BEGIN = {
    "run.lock",
    "from.json",
    "from.partial",
    "config.partial",
    "stdin",
    SWEEP,
    "sweep.partial",
    "exit.json",
    TEACHERS,
    "teachers.partial",
    "starts.jsonl",
    "starts.partial",
}
_LOCK_RECORD_START = b'{"serial": '  # the first bytes of run.lock

# A function that takes a run's folder. It returns why "last" cannot mean this run, such as "is a
# sweep", or "" if it can.
ObstacleOf = Callable[[Path], str]
# The numbers that a row may have, besides times, whose names end in "_s" (seconds). "share" is how
# much of the run was done when a sample was written, from 0 to 1.
_NUMBERS = (*metrics.metric_keys(), "share")
_STRICT = ConfigDict(strict=True)  # values are not converted to other types
# The entries of a row's summary that commands rely on, as name=(type, default). The last row of a run
# that ended has a summary.
_Summary = create_model("_Summary", __config__=_STRICT, update=(int, 0))
# The entries of a row that commands rely on. A row and a summary may have other entries.
_Row = create_model(
    "_Row",
    __config__=_STRICT,
    update=(int, 0),
    tokens=(int, 0),
    diverged=(int, 0),
    stopped=(int, 0),
    win_probability=(float, 0.0),
    **dict.fromkeys(_NUMBERS, (float | None, None)),  # type: ignore[call-overload]
    summary=(_Summary | None, None),
    sample=(str, ""),
)
# The type of an entry that is a time in seconds.
_TIME = TypeAdapter[float | None](float | None, config=ConfigDict(strict=True))

# File descriptors of the locks that this process holds. A forked child inherits the descriptors,
# and a lock is free only after every copy of its descriptor is closed. So the child closes its own.
_held_locks: set[int] = set()


def _close_inherited_locks() -> None:
    for descriptor in _held_locks:
        os.close(descriptor)
    _held_locks.clear()


os.register_at_fork(after_in_child=_close_inherited_locks)


class Run:
    """A run's folder and the paths of its files.

    `create` makes a new run, and `open` finds an existing one. Hold `lock` while you write into the
    folder.

    Attributes:
        folder: the run's folder.
        at_update: the update of the checkpoint to read, if the user named the run by the folder of a
            checkpoint; None for the newest checkpoint.
        parent_file: the file that names the run from which this one branches
            (`monograph.run.writing`).
        starts: the file with the commands that began and resumed the run (`monograph.run.started`).
        config, checkpoints, report, tokenizer, metrics, lock_file: the paths of the run's other files
            and folders, which may not exist yet.
    """

    def __init__(self, folder: Path, at_update: int | None = None) -> None:
        self.folder = folder
        self.at_update = at_update
        self.config = folder / "config.toml"
        self.checkpoints = folder / "checkpoints"
        self.report = folder / "report.html"
        self.tokenizer = folder / "tokenizer.json"
        self.metrics = folder / "metrics.jsonl"
        self.parent_file = folder / "from.json"
        self.starts = folder / "starts.jsonl"
        self.lock_file = folder / "run.lock"

    @classmethod
    def create(cls, out: str | Path | None = None, root: str | Path = DEFAULT_ROOT) -> Self:
        """Make a new run folder, write its lock record, and return the run.

        Args:
            out: the folder, which must be new or empty, or contain a run that was killed before it
                began. None for a new folder in `root`, see `claim_new_folder`.
            root: the folder of all runs.

        Raises:
            InputRefused: `out` contains anything else, or cannot be written.
            RunInUse: another process holds the lock of the run in `out`.
            DiskFull: there is no space left.
        """
        with write_errors_explained(Path(root if out is None else out)):
            if out is None:
                folder = claim_new_folder(Path(root))
            else:
                folder = _claim_given_folder(Path(out))
            run = cls(folder)
            neighbours = folders_with_lock(run.folder.parent)  # sorted by serial number
            newest_serial = serial_number(neighbours[-1]) if neighbours else 0
            # This frees the space of runs that were killed before they began.
            for neighbour in neighbours:
                _remove_stdin_copy(neighbour)
            with _locked(run.lock_file) as descriptor:
                if not _can_be_replaced(run.folder):
                    raise _already_a_run(run.folder)
                for name in _FILES_BEFORE_BEGIN - {"run.lock"}:
                    (run.folder / name).unlink(missing_ok=True)
                run._write_lock_record(descriptor, newest_serial + 1)
        return run

    @classmethod
    def open(
        cls, name: str | Path, root: str | Path = DEFAULT_ROOT, *, needs_checkpoint: bool = True
    ) -> Self:
        """Return the run that a user names.

        Args:
            name: the path of a run or of one of its checkpoints, which sets `Run.at_update`. "last" is the
                run in `root` with the highest serial number. Times are not compared, since a clock may be wrong.
                "last/PATH" is a path inside that run.
            root: the folder of all runs.
            needs_checkpoint: whether "last" means the newest run that has a checkpoint. Newer sweeps, and
                newer runs without one, are then passed over, and a line on standard error says so.

        Raises:
            InputRefused: there is no such run, or the name is that of a whole sweep.
        """
        name = resolve_checkpoint(Path(name))
        folder = _locate(name, root, _obstacle_to_one_model if needs_checkpoint else _no_obstacle)
        at_update = update_of_checkpoint(name)
        if is_file(folder / SWEEP):
            example = "best" if exists(folder / "best") else "members/000"
            raise InputRefused(
                f"{folder} is a sweep: name one of its runs, such as {Path(name) / example}"
            )
        return cls(folder, at_update)

    @staticmethod
    def locate(
        name: str | Path, root: str | Path = DEFAULT_ROOT, *, needs_checkpoint: bool = True
    ) -> Path:
        """Return the folder of the run or of the sweep that a user names; see `open`.

        Raises:
            InputRefused: there is no such run or sweep.
        """
        return _locate(name, root, _obstacle_to_models if needs_checkpoint else _no_obstacle)

    @property
    def named_path(self) -> Path:
        """Return the path that names this run: the checkpoint of update `at_update`, or the run's folder."""
        if self.at_update is None:
            return self.folder
        return self.checkpoints / f"step-{self.at_update:08d}"

    @property
    def has_begun(self) -> bool:
        """Return whether config.toml is written. From then on the run can be resumed."""
        return is_file(self.config)

    @property
    def handle(self) -> str:
        """Return this run's name for a command line: "last" for the newest run in ./runs, or the
        path.
        """
        with suppress(Unreadable):  # if a run.lock cannot be read, the newest run is unknown
            runs = runs_in(DEFAULT_ROOT)
            if runs and without_links(runs[-1]) == without_links(self.folder):
                return "last"
        return str(self.folder)

    @contextmanager
    def lock(self, new: bool = False) -> Iterator[None]:
        """Hold the run's lock during the `with` block.

        The kernel frees the lock even if the process is killed (flock(2)).

        Args:
            new: whether this process is to begin the run, so that it must not have begun yet.

        Raises:
            RunInUse: another process holds the lock; the message names the process and its host.
            InputRefused: the run is `new` here, but another process has begun it.
        """
        with _locked(self.lock_file) as descriptor:
            if new and self.has_begun:
                raise _already_a_run(self.folder)
            self._write_lock_record(descriptor, serial_number(self.folder))
            yield

    def _write_lock_record(self, descriptor: int, serial: int) -> None:
        """Write the run's serial number and this process into run.lock.

        Args:
            descriptor: the file descriptor of run.lock.
            serial: the run's serial number.
        """
        lock_record = {"serial": serial, "pid": os.getpid(), "host": socket.gethostname()}
        content = json.dumps(lock_record).encode()
        # Only the bytes from the first difference on are written. The serial number comes first and stays
        # the same, so a power cut during the write cannot lose it.
        old_content = contents(self.lock_file) or b""
        unchanged_bytes = len(os.path.commonprefix([old_content, content]))
        with write_errors_explained(self.lock_file):
            os.lseek(descriptor, unchanged_bytes, os.SEEK_SET)
            _write_all(descriptor, content[unchanged_bytes:])
            # The file is truncated after the write, so that no reader finds an empty file.
            os.ftruncate(descriptor, len(content))
            os.fsync(descriptor)

    def log(self, *rows: Mapping[str, Any]) -> None:
        """Append each row to metrics.jsonl as one line.

        A process that is killed after this returns does not lose the rows. NaN and infinities are
        written as null, since JSON has neither.

        Raises:
            DiskFull: there is no space left; the file then ends as before, without a partial line.
        """
        lines = []
        for row in rows:
            text = json.dumps(standard_json(row), allow_nan=False, separators=(", ", ": "))
            lines.append(f"{text}\n")
        content = "".join(lines).encode()
        with write_errors_explained(self.metrics), open(self.metrics, "ab", buffering=0) as file:
            size_before = os.fstat(file.fileno()).st_size
            try:
                _write_all(file.fileno(), content)
            except OSError:
                with suppress(OSError):
                    os.ftruncate(file.fileno(), size_before)
                raise

    def rows(self) -> list[dict[str, Any]]:
        """Return the complete rows of metrics.jsonl.

        The last line is left out if it does not end with a line end, since a kill may have cut it.

        Raises:
            InputRefused: a complete row is damaged.
        """
        content = self._read_metrics()
        complete_lines = content[: content.rfind(b"\n") + 1]
        return self._checked_rows(complete_lines)

    def _read_metrics(self) -> bytes:
        """Return the bytes of metrics.jsonl, or none if the file does not exist."""
        try:
            # No limit on the size, since the metrics of a long run must stay readable.
            return read_input(self.metrics, None)
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise InputRefused(f"{self.metrics}: cannot be read: {error.strerror}") from None

    def _checked_rows(self, content: bytes) -> list[dict[str, Any]]:
        """Return the rows in some bytes of metrics.jsonl, which are complete lines.

        Raises:
            InputRefused: a row is damaged; the message names its line.
        """
        rows = [json_object(line) for line in content.splitlines()]
        for number, row in enumerate(rows, 1):
            try:
                # `json_object` returns {} for a line that is not a JSON object. `_Row` would accept {}, so
                # it is given None instead, which it refuses.
                _Row.model_validate(row or None)
                for key, value in row.items():
                    if key.endswith("_s"):
                        _TIME.validate_python(value)
            except ValidationError:
                raise InputRefused(
                    f"{self.metrics}:{number}: not a row of metrics; put it back, or start a new run with --from"
                ) from None
        return rows

    @property
    def metrics_offset(self) -> int:
        """Return the length of metrics.jsonl in bytes, which each checkpoint records."""
        entry = status(self.metrics)
        return entry.st_size if entry else 0

    def sync_metrics(self) -> int:
        """Flush metrics.jsonl to disk, so that a power cut cannot lose rows.

        Returns:
            `metrics_offset`.
        """
        if exists(self.metrics):
            with write_errors_explained(self.metrics):
                sync(self.metrics)
        return self.metrics_offset

    def metrics_digest(self, offset: int | None = None) -> str:
        """Return the hex SHA-256 of the rows before byte `offset`; None means all rows."""
        return hashlib.sha256(self._read_metrics()[:offset]).hexdigest()

    def truncate_metrics(self, offset: int, sha256: str | None = None) -> None:
        """Remove the rows after byte `offset`, if `require_metrics` raises no error.

        The arguments are those of `require_metrics`.
        """
        self.require_metrics(offset, sha256)
        if exists(self.metrics):
            with write_errors_explained(self.metrics):
                os.truncate(self.metrics, offset)

    def require_metrics(self, offset: int, sha256: str | None) -> None:
        """Require that metrics.jsonl still has the rows that a checkpoint recorded.

        Args:
            offset: the length of metrics.jsonl at that checkpoint, in bytes.
            sha256: the digest of the rows before `offset`; None for older checkpoints, which did
                not record it.

        Raises:
            InputRefused: a row before `offset` is missing or damaged, or the digest differs.
        """
        remedy = "put the file back, or start a new run from this one with --from"
        if self.metrics_offset < offset:
            raise InputRefused(
                f"{self.metrics} has {self.metrics_offset} bytes but its checkpoint recorded {offset}: rows are "
                f"missing; {remedy}"
            )
        if exists(self.metrics):
            # Older checkpoints have no digest, but a damaged row is noticed in any case.
            self._checked_rows(self._read_metrics()[:offset])
            digest = self.metrics_digest(offset)
            if sha256 not in (None, digest):
                raise InputRefused(
                    f"{self.metrics}: expected rows of sha256 {sha256}, found {digest}; {remedy}"
                )


def _locate(name: str | Path, root: str | Path, obstacle_of: ObstacleOf) -> Path:
    """Return the folder of the run or sweep that a user names; raises InputRefused."""
    first, *inner = Path(name).parts or (".",)  # Path(".") has no parts
    folder = resolve_checkpoint(Path(name))
    if first == "last":
        runs = runs_in(Path(root))
        if not runs:
            raise InputRefused(f"no run in {Path(root)}/ yet: start one with `monograph train`")
        folder = _newest_usable(runs, inner, obstacle_of)
    if update_of_checkpoint(folder) is not None:
        folder = folder.parent.parent  # from RUN/checkpoints/step-UPDATE to RUN
    if names_mixture(folder):
        distill = f"monograph sweep --out {shell_words(folder.parent)} --distill"
        raise InputRefused(
            f"{folder} means all members of a sweep together; only `evaluate` and `compare` take it: `{distill}` "
            f"trains one model on them, {folder.parent / 'distilled'}"
        )
    if not is_file(folder / "run.lock"):
        reason = "it has no run.lock" if exists(folder) else "there is no such folder"
        newest_first = [*reversed(runs_in(Path(root)))]
        hint = _suggestion(folder, root)
        if newest_first and not hint:
            hint = f"; newest runs: {', '.join(map(str, newest_first[:3]))}"
        raise InputRefused(f"{folder} is not a run: {reason}{hint}")
    run = Run(folder)
    for path in (run.config, run.tokenizer, run.metrics, run.parent_file):
        if exists(path) and not is_file(path):
            raise InputRefused(f"{path}: expected a regular file; put it back")
    return folder


def _suggestion(name: str | Path, root: str | Path = DEFAULT_ROOT) -> str:
    """Return "; did you mean ROOT/NAME?" if NAME does not exist, but ROOT/NAME is a run; else ""."""
    path = Path(root) / name
    if not exists(name) and is_file(path / "run.lock"):
        return f"; did you mean {path}?"
    return ""


def no_folder(name: str | Path) -> str:
    """Return the error message for the name of a model if there is no such folder."""
    hint = _suggestion(name)
    if hint:
        return f"{name}: no such folder{hint}"
    return f"{name}: no such folder; expected a run (`last` is the newest), a Hugging Face folder or hf://OWNER/NAME"


# Three functions of the type `ObstacleOf`. Each returns why "last" cannot mean the run in a folder.


def _no_obstacle(folder: Path) -> str:
    return ""  # any run that has begun is usable, and runs that have not begun do not come here


def _obstacle_to_models(folder: Path) -> str:
    """Return why a folder has no model: it has no checkpoint and is not a sweep."""
    if is_file(folder / SWEEP):
        return ""
    paths = entries(folder / "checkpoints")
    has_checkpoint = any(update_of_checkpoint(path) is not None for path in paths)
    return "" if has_checkpoint else "has no checkpoint yet"


def _obstacle_to_one_model(folder: Path) -> str:
    """Return why a folder is not one run with a checkpoint."""
    return "is a sweep" if is_file(folder / SWEEP) else _obstacle_to_models(folder)


def _newest_usable(runs: Sequence[Path], inner: Sequence[str], obstacle_of: ObstacleOf) -> Path:
    """Return the path that "last" or "last/PATH" means.

    Args:
        runs: the runs, oldest first; at least one.
        inner: the parts of PATH. If there are any, the newest run that contains PATH is meant.
        obstacle_of: without PATH, the newest run for which this returns "" is meant.

    Returns:
        The path. If no run is usable, it is that of the newest run, so that the caller's error says
        what the newest run lacks.
    """
    passed_over = list[str]()
    for folder in reversed(runs):
        path = folder.joinpath(*inner)
        if not inner:
            obstacle = obstacle_of(folder)
        elif exists(path):
            obstacle = ""
        else:
            obstacle = f"has no {Path(*inner)}"
        if not obstacle:
            _report_passed_over(path, passed_over)
            return path
        passed_over.append(f"{folder} {obstacle}")
    return runs[-1].joinpath(*inner)


def _report_passed_over(last: Path, passed_over: Sequence[str]) -> None:
    """Print which path "last" means, and why it is not a newer run.

    Args:
        last: the path.
        passed_over: each newer run with its obstacle, the newest first. If empty, nothing is
            printed.
    """
    if passed_over:
        more = f" (and {len(passed_over) - 1} more)" if len(passed_over) > 1 else ""
        _print_note_once(f"using {last}, as {passed_over[0]}{more}")


@functools.cache  # prints the same line only once, since a command may ask for "last" repeatedly
def _print_note_once(line: str) -> None:
    print(f"note: {line}", file=sys.stderr)


def names_mixture(path: Path) -> bool:
    """Return whether a path is SWEEP/mixture; see `MIXTURE`."""
    return path.name == MIXTURE and is_file(path.parent / SWEEP)


@contextmanager
def _locked(lock_file: Path) -> Iterator[int]:
    """Lock a run.lock during the `with` block, without waiting, and yield its file descriptor.

    Raises:
        RunInUse: another process holds the lock.
        InputRefused, DiskFull: the file cannot be opened or locked.
    """
    with write_errors_explained(lock_file):
        descriptor = os.open(lock_file, os.O_RDWR | os.O_CREAT, 0o666)
    _held_locks.add(descriptor)
    try:
        with write_errors_explained(lock_file):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _in_use(lock_file.parent) from None
        yield descriptor
    finally:
        # In a forked child, `_close_inherited_locks` has already closed the child's descriptor.
        if descriptor in _held_locks:
            _held_locks.remove(descriptor)
            os.close(descriptor)


@contextmanager
def write_errors_explained(path: Path) -> Iterator[None]:
    """Turn an OSError of the `with` block into an error that says what the user can do.

    Args:
        path: the file or folder that the block writes; the message names it.

    Raises:
        DiskFull: the disk is full or fails, or a quota or file size limit is reached.
        InputRefused: any other OSError.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            remedy = "look at the disk" if error.errno == errno.EIO else "free some space"
            raise DiskFull(
                f"cannot write {path}: {reason}; {remedy}, then go on with --resume"
            ) from error
        raise InputRefused(
            f"cannot write {path}: {reason}; name another folder with --out"
        ) from error


def claim_new_folder(root: Path) -> Path:
    """Make the folder `root`/YYYY-MM-DD-HHMM and return it.

    If the folder exists, the name ends with -2, -3, ... instead.
    """
    root.mkdir(parents=True, exist_ok=True)
    # Not `datetime`, which fails on a clock beyond the year 9999.
    wanted = root / time.strftime("%Y-%m-%d-%H%M", time.localtime(time.time()))
    folder = wanted
    attempt = 1
    while True:
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            attempt += 1
            folder = wanted.with_name(f"{wanted.name}-{attempt}")


def _claim_given_folder(folder: Path) -> Path:
    """Make a folder for a run if it does not exist, and return it.

    Raises:
        InputRefused: `folder` is a file, or contains other files than those of a run.
    """
    if exists(folder) and not is_folder(folder):
        raise InputRefused(f"{folder} is a file; name a folder that is new or empty")
    folder.mkdir(parents=True, exist_ok=True)
    if not exists(folder / "run.lock") and entries(folder):
        raise InputRefused(
            f"{folder} is not empty and holds no run; name a folder that is new or empty"
        )
    return folder


def _can_be_replaced(folder: Path) -> bool:
    """Return whether a folder has a run that has not begun, and nothing else.

    Such a folder has a run.lock that this package wrote. All its other files are ones that a run writes
    before it begins.
    """
    content = contents(folder / "run.lock")
    if content is None:
        return False
    # Any beginning of what a run writes is accepted, even an empty one. `_locked` makes an empty run.lock,
    # and a kill or a power cut may leave it cut after any byte, or with zeros at its end.
    first_bytes = content.rstrip(b"\0")[: len(_LOCK_RECORD_START)]
    if not _LOCK_RECORD_START.startswith(first_bytes):
        return False
    return {path.name for path in entries(folder)} <= _FILES_BEFORE_BEGIN


def _remove_stdin_copy(folder: Path) -> None:
    """Remove the copy of standard input from a run that was killed before it began.

    Nothing else would remove this file, which may be large. A run whose lock is held is still
    starting and keeps its copy. Errors are ignored, since no later step depends on the removal.
    """
    run = Run(folder)
    with suppress(RunInUse, InputRefused, Unreadable, OSError):
        if exists(folder / "stdin") and not run.has_begun:
            with _locked(run.lock_file):
                # Asked again, since another process may have begun the run before this one had the lock.
                if not run.has_begun:
                    (folder / "stdin").unlink()


def _already_a_run(folder: Path) -> InputRefused:
    """Return the error for a folder in which a new run cannot begin, since it has one."""
    remedy = f"continue it with --resume {shell_words(folder)}, or give another --name or --out"
    return InputRefused(f"{folder} already holds a run; {remedy}")


def _in_use(folder: Path) -> RunInUse:
    """Return the error for a run whose lock another process holds."""
    holder: dict[str, Any] = {}
    with suppress(Unreadable):  # the run is in use even if its record is unreadable
        holder = lock_record(folder)
    who = "another process"
    if "pid" in holder and "host" in holder:
        who = f"process {holder['pid']} on {holder['host']}"
    return RunInUse(
        f"{folder} is in use by {who}; wait for it, stop it, or name another folder with --out"
    )


def standard_json(value: object) -> Any:
    """Return a copy of a value for JSON, with None for each NaN and infinity, which JSON lacks."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: standard_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [standard_json(inner) for inner in value]
    return value


def _write_all(descriptor: int, content: bytes) -> None:
    """Write all bytes, since one call of os.write may write only some."""
    rest = content
    while rest:
        written = os.write(descriptor, rest)
        rest = rest[written:]


class Follower(Run):
    """A run in a process other than rank 0. It writes nothing, since rank 0 alone writes the run."""

    @contextmanager
    def lock(self, new: bool = False) -> Iterator[None]:
        """Do nothing, since rank 0 holds the lock."""
        yield

    def log(self, *rows: Mapping[str, Any]) -> None:
        """Do nothing."""

    def rows(self) -> list[dict[str, Any]]:
        """Return no rows, since rank 0 may be writing them."""
        return []

    def sync_metrics(self) -> int:
        """Return `metrics_offset` without writing."""
        return self.metrics_offset

    def metrics_digest(self, offset: int | None = None) -> str:
        """Return an empty string, since rank 0 records the digest."""
        return ""

    def truncate_metrics(self, offset: int, sha256: str | None = None) -> None:
        """Do nothing."""
