"""Manage run folders: create them without races, lock them while in use, and log metrics as one
JSON object a line.

A folder with a `run.lock` is a run: the file is a JSON record with the run's serial number and the
current or last holder of the lock. A run has begun once `config.toml` exists; before that it has
nothing worth keeping and counts as empty.
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
    checkpoint_named,
    locked_in,
    parsed,
    placed,
    record,
    runs_in,
    serial,
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
MIXTURE = "mixture"  # SWEEP/mixture, which is no folder, names all members of a sweep together
TEACHERS = "teachers.json"  # a run's folder with this file learns from the members of a sweep
_BEFORE_IT_BEGAN = {
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
_RECORD = b'{"serial": '  # the first bytes of run.lock

# The numbers that a row may have, besides times, whose names end in their unit.
_NUMBERS = (*metrics.metric_keys(), "share")
# A function that says why a folder in runs/ cannot be what `last` means, such as "is a sweep"; ""
# if it can be.
WhyNot = Callable[[Path], str]
# The entries of a row that commands rely on, with their types.
_Row = create_model(
    "_Row",
    __config__=ConfigDict(strict=True),
    **dict.fromkeys(("update", "tokens", "diverged"), (int, 0)),  # type: ignore[call-overload]
    **dict.fromkeys(_NUMBERS, (float | None, None)),
    summary=(
        create_model("_Summary", __config__=ConfigDict(strict=True), update=(int, 0)) | None,
        None,
    ),
    sample=(str, ""),
)
_TIME = TypeAdapter[float | None](float | None, config=ConfigDict(strict=True))

# Descriptors of the locks that this process holds. A forked child inherits them, and the locks
# would outlive this process unless the child closed them.
_held: set[int] = set()


def _forget_inherited_locks() -> None:
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget_inherited_locks)


class Run:
    """A run's folder. `create` makes one and `open` finds one; `lock` it before writing anything.

    Attributes:
        folder: the run's folder.
        at: the update of the checkpoint by whose folder the run was named; None means the newest
            checkpoint.
    """

    def __init__(self, folder: Path, at: int | None = None) -> None:
        self.folder, self.at = folder, at
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
        """Make a new run in `out`, or in `root`/YYYY-MM-DD-HHMM, with -2, -3, ... after it if that
        minute has one.

        Raises InputRefused if `out` holds something or cannot be written, RunInUse if another
        process is writing a run there, and DiskFull. A run in `out` that was killed before it had
        begun is replaced.
        """
        with explained(Path(root if out is None else out)):
            run = cls(
                claim_new_folder(Path(root)) if out is None else _claim_given_folder(Path(out))
            )
            others = locked_in(run.folder.parent)
            number = 1 + (serial(others[-1]) if others else 0)
            for other in others:
                _drop_text(other)
            with _exclusive(run.lock_file) as descriptor:
                if not _is_as_good_as_empty(run.folder):
                    raise _already_a_run(run.folder)
                for name in _BEFORE_IT_BEGAN - {"run.lock"}:
                    (run.folder / name).unlink(missing_ok=True)
                run._sign(descriptor, number)
        return run

    @classmethod
    def open(cls, name: str | Path, root: str | Path = DEFAULT_ROOT, *, saved: bool = True) -> Self:
        """Return the run at path `name`; "last" is the newest run in `root`, and "last/..." a path
        inside one.

        The folder of a checkpoint names the run at that update, `Run.at`. The newest run has the
        highest serial number, which does not depend on the clock. With `saved`, "last" passes over
        newer runs without a checkpoint and newer sweeps, which a line on standard error says.
        Raises InputRefused, also for a sweep, of which one run must be named.
        """
        name = placed(Path(name))
        folder = _located(name, root, _why_no_model if saved else _why_not_begun)
        at = checkpoint_named(name)
        if is_file(folder / SWEEP):
            best = "best" if exists(folder / "best") else "members/000"
            raise InputRefused(
                f"{folder} is a sweep: name one of its runs, such as {Path(name) / best}"
            )
        return cls(folder, at)

    @staticmethod
    def located(name: str | Path, root: str | Path = DEFAULT_ROOT, *, saved: bool = True) -> Path:
        """Return the folder of the run or sweep called `name`; see `open`. Raises InputRefused."""
        return _located(name, root, _why_no_models if saved else _why_not_begun)

    @property
    def named(self) -> Path:
        """Return the folder that names this run: its own, or that of the checkpoint of update `at`."""
        return self.folder if self.at is None else self.checkpoints / f"step-{self.at:08d}"

    @property
    def begun(self) -> bool:
        """Return whether the run's settings are written; from then on it can be resumed."""
        return is_file(self.config)

    @property
    def handle(self) -> str:
        """Return this run's name on a command line: "last" while it is the newest in ./runs,
        otherwise its path.
        """
        with suppress(Unreadable):  # if a run.lock cannot be read, the newest run is unknown
            runs = runs_in(DEFAULT_ROOT)
            return (
                "last"
                if runs and without_links(runs[-1]) == without_links(self.folder)
                else str(self.folder)
            )
        return str(self.folder)

    @contextmanager
    def lock(self, new: bool = False) -> Iterator[None]:
        """Hold the run's lock for the `with` block; the kernel frees it however the process ends
        (flock(2)).

        Raises RunInUse, which names the process and host that hold it, and InputRefused for a `new`
        run that another process has begun since it was created here.
        """
        with _exclusive(self.lock_file) as descriptor:
            if new and self.begun:
                raise _already_a_run(self.folder)
            self._sign(descriptor, serial(self.folder))
            yield

    def _sign(self, descriptor: int, number: int) -> None:
        """Write the run's number and the holder into run.lock.

        Equal bytes at the beginning are not written again, so that even a power cut cannot lose the
        number. Leftover bytes at the end are cut off last, so that a reader never sees an empty
        file.
        """
        content = json.dumps(
            {"serial": number, "pid": os.getpid(), "host": socket.gethostname()}
        ).encode()
        kept = len(os.path.commonprefix([contents(self.lock_file) or b"", content]))
        with explained(self.lock_file):
            os.lseek(descriptor, kept, os.SEEK_SET)
            _write_all(descriptor, content[kept:])
            os.ftruncate(descriptor, len(content))
            os.fsync(descriptor)

    def log(self, *rows: Mapping[str, Any]) -> None:
        """Append each row to metrics.jsonl as one line; a kill after this returns does not lose it.

        NaN and infinities are written as null, since JSON has neither. Raises DiskFull and then
        leaves no partial line.
        """
        lines = (
            json.dumps(standard_json(row), allow_nan=False, separators=(", ", ": ")) for row in rows
        )
        content = "".join(f"{line}\n" for line in lines).encode()
        with explained(self.metrics), open(self.metrics, "ab", buffering=0) as file:
            before = os.fstat(file.fileno()).st_size
            try:
                _write_all(file.fileno(), content)
            except OSError:
                with suppress(OSError):
                    os.ftruncate(file.fileno(), before)
                raise

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows so far, without a last line that was cut off; raises InputRefused if one
        is damaged.
        """
        content = self._metrics()
        return self._parsed(content[: content.rfind(b"\n") + 1])

    def _metrics(self) -> bytes:
        try:
            # Without a limit, since a long run's metrics must stay readable.
            return read_input(self.metrics, None)
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise InputRefused(f"{self.metrics}: cannot be read: {error.strerror}") from None

    def _parsed(self, content: bytes) -> list[dict[str, Any]]:
        rows = [parsed(line) for line in content.splitlines()]
        for number, row in enumerate(rows, 1):
            try:
                _Row.model_validate(row or None)
                for key, value in row.items():
                    if key.endswith("_s"):
                        _TIME.validate_python(value)
            except ValidationError:
                instead = "put it back, or start a new run with --from"
                raise InputRefused(
                    f"{self.metrics}:{number}: not a row of metrics; {instead}"
                ) from None
        return rows

    @property
    def metrics_offset(self) -> int:
        """Return the length of metrics.jsonl in bytes, for a checkpoint to record."""
        entry = status(self.metrics)
        return entry.st_size if entry else 0

    def sync_metrics(self) -> int:
        """Flush the rows to disk, so that a power cut keeps them, before a checkpoint; return
        `metrics_offset`.
        """
        if exists(self.metrics):
            with explained(self.metrics):
                sync(self.metrics)
        return self.metrics_offset

    def metrics_digest(self, offset: int | None = None) -> str:
        """Return the hex SHA-256 of the rows before byte `offset`, or of all rows if it is None."""
        return hashlib.sha256(self._metrics()[:offset]).hexdigest()

    def truncate_metrics(self, offset: int, sha256: str | None = None) -> None:
        """Drop the rows after byte `offset`; raises what `require_metrics` does."""
        self.require_metrics(offset, sha256)
        if exists(self.metrics):
            with explained(self.metrics):
                os.truncate(self.metrics, offset)

    def require_metrics(self, offset: int, sha256: str | None) -> None:
        """Raise InputRefused if a row before byte `offset` is missing or damaged, or the rows'
        digest differs.
        """
        instead = "put the file back, or start a new run from this one with --from"
        if self.metrics_offset < offset:
            raise InputRefused(
                f"{self.metrics} has {self.metrics_offset} bytes but its checkpoint recorded {offset}: rows are "
                f"missing; {instead}"
            )
        if exists(self.metrics):
            self._parsed(self._metrics()[:offset])
            digest = self.metrics_digest(offset)
            if sha256 not in (None, digest):
                raise InputRefused(
                    f"{self.metrics}: expected rows of sha256 {sha256}, found {digest}; {instead}"
                )


def _located(name: str | Path, root: str | Path, why_not: WhyNot) -> Path:
    first, *inner = Path(name).parts or (".",)
    folder = placed(Path(name))
    if first == "last":
        runs = runs_in(Path(root))
        if not runs:
            raise InputRefused(f"no run in {Path(root)}/ yet: start one with `monograph train`")
        folder = _newest(runs, inner, why_not)
    folder = folder if checkpoint_named(folder) is None else folder.parent.parent
    if names_mixture(folder):
        again = f"monograph sweep --out {shell_words(folder.parent)} --distill"
        raise InputRefused(
            f"{folder} is all members of a sweep together, which only `evaluate` and `compare` take: `{again}` "
            f"trains one model on them, {folder.parent / 'distilled'}"
        )
    if not is_file(folder / "run.lock"):
        missing = "there is no such folder" if not exists(folder) else "it has no run.lock"
        some = runs_in(Path(root))[:-4:-1]  # three, the newest first
        hint = f"; newest runs: {', '.join(map(str, some))}" if some else ""
        hint = _meant(folder, root) or hint
        raise InputRefused(f"{folder} is not a run: {missing}{hint}")
    run = Run(folder)
    for path in (run.config, run.tokenizer, run.metrics, run.parent_file):
        if exists(path) and not is_file(path):
            raise InputRefused(f"{path}: expected a regular file; put it back")
    return folder


def _meant(name: str | Path, root: str | Path = DEFAULT_ROOT) -> str:
    """Return the end of an error that says which run has this name in the folder of runs; empty if
    none has.
    """
    path = Path(root) / name
    return f"; did you mean {path}?" if not exists(name) and is_file(path / "run.lock") else ""


def no_folder(name: str | Path) -> str:
    """Return the error for a name of a model that no folder has."""
    if meant := _meant(name):
        return f"{name}: no such folder{meant}"
    return f"{name}: no such folder; expected a run (`last` is the newest), a Hugging Face folder or hf://OWNER/NAME"


def _why_not_begun(folder: Path) -> str:
    return ""  # `runs_in` lists only what has begun


def _why_no_models(folder: Path) -> str:
    saved = any(checkpoint_named(path) is not None for path in entries(folder / "checkpoints"))
    return "" if saved or is_file(folder / SWEEP) else "has no checkpoint yet"


def _why_no_model(folder: Path) -> str:
    return "is a sweep" if is_file(folder / SWEEP) else _why_no_models(folder)


def _newest(runs: Sequence[Path], inner: Sequence[str], why_not: WhyNot) -> Path:
    """Return the newest of some runs, oldest first, that `last` can mean, or the path inside of the
    newest that has it.

    If there is none, it is the newest of all, whose error says what is missing.
    """
    passed_over = list[str]()
    for folder in reversed(runs):
        meant = folder.joinpath(*inner)
        if inner:
            obstacle = "" if exists(meant) else f"has no {Path(*inner)}"
        else:
            obstacle = why_not(folder)
        if not obstacle:
            _tell_of(meant, passed_over)
            return meant
        passed_over.append(f"{folder} {obstacle}")
    return runs[-1].joinpath(*inner)


def _tell_of(last: Path, passed_over: Sequence[str]) -> None:
    """Say which newer runs `last` does not mean, the newest first."""
    if passed_over:
        more = f" (and {len(passed_over) - 1} more)" if len(passed_over) > 1 else ""
        _tell(f"using {last}, as {passed_over[0]}{more}")


@functools.cache  # a command may ask several times what `last` is
def _tell(line: str) -> None:
    print(f"note: {line}", file=sys.stderr)


def names_mixture(path: Path) -> bool:
    """Return whether a path is SWEEP/mixture."""
    return path.name == MIXTURE and is_file(path.parent / SWEEP)


@contextmanager
def _exclusive(lock_file: Path) -> Iterator[int]:
    """Lock a file for the `with` block and yield its descriptor; raises RunInUse."""
    with explained(lock_file):
        descriptor = os.open(lock_file, os.O_RDWR | os.O_CREAT, 0o666)
    _held.add(descriptor)
    try:
        with explained(lock_file):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _in_use(lock_file.parent) from None
        yield descriptor
    finally:
        if descriptor in _held:  # in a forked child it is closed already
            _held.remove(descriptor)
            os.close(descriptor)


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn the system's error in writing `path` into one that says what the user can do."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            first = "look at the disk" if error.errno == errno.EIO else "free some space"
            raise DiskFull(
                f"cannot write {path}: {reason}; {first}, then go on with --resume"
            ) from error
        raise InputRefused(
            f"cannot write {path}: {reason}; name another folder with --out"
        ) from error


def claim_new_folder(root: Path) -> Path:
    """Make `root`/YYYY-MM-DD-HHMM, with -2, -3, ... after it if that minute has one already."""
    root.mkdir(parents=True, exist_ok=True)
    # Datetime ends at 9999.
    folder = wanted = root / time.strftime("%Y-%m-%d-%H%M", time.localtime(time.time()))
    attempt = 1
    while True:
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            attempt += 1
            folder = wanted.with_name(f"{wanted.name}-{attempt}")


def _claim_given_folder(folder: Path) -> Path:
    if exists(folder) and not is_folder(folder):
        raise InputRefused(f"{folder} is a file; name a folder that is new or empty")
    folder.mkdir(parents=True, exist_ok=True)
    if not exists(folder / "run.lock") and entries(folder):
        raise InputRefused(
            f"{folder} is not empty and holds no run; name a folder that is new or empty"
        )
    return folder


def _is_as_good_as_empty(folder: Path) -> bool:
    """Return whether `folder` holds only files of a run that was killed before it began."""
    record = contents(folder / "run.lock")
    # It may be cut off.
    ours = record is not None and _RECORD.startswith(record.rstrip(b"\0")[: len(_RECORD)])
    return ours and {path.name for path in entries(folder)} <= _BEFORE_IT_BEGAN


def _drop_text(folder: Path) -> None:
    """Remove the text of standard input from a run that was killed before it began, which a free
    lock shows.
    """
    run = Run(folder)
    with suppress(RunInUse, InputRefused, Unreadable, OSError):
        if exists(folder / "stdin") and not run.begun:
            with _exclusive(run.lock_file):
                if not run.begun:
                    (folder / "stdin").unlink()


def _already_a_run(folder: Path) -> InputRefused:
    again = f"continue it with --resume {shell_words(folder)}, or give another --name or --out"
    return InputRefused(f"{folder} already holds a run; {again}")


def _in_use(folder: Path) -> RunInUse:
    holder: dict[str, Any] = {}
    with suppress(Unreadable):  # the run is in use even if its record is unreadable
        holder = record(folder)
    who = (
        f"process {holder['pid']} on {holder['host']}"
        if {"pid", "host"} <= holder.keys()
        else "another process"
    )
    return RunInUse(
        f"{folder} is in use by {who}; wait for it, stop it, or name another folder with --out"
    )


def standard_json(value: object) -> Any:
    """Return a value with None for NaN and infinities, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: standard_json(inner) for key, inner in value.items()}
    return [standard_json(inner) for inner in value] if isinstance(value, list | tuple) else value


def _write_all(descriptor: int, content: bytes) -> None:
    while content:
        content = content[os.write(descriptor, content) :]


class Follower(Run):
    """A run in a process other than rank 0, which reads the run and never writes it."""

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
