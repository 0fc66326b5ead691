"""For every I/O operation of a callable and every kind of fault: run it in a fork, strike there,
yield what is left.

    with FaultServer() as faults:
        for outcome in faults.every_operation(scenario, prepared, scratch):
            ...check outcome.folder, then go on in it...

A scenario is a module-level function of one folder; all that it writes below that folder is
counted. It runs in a fork of a process which has imported the scenario's module once, so that a
case costs milliseconds, not an import of torch.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
# In the order of the shim's enum. `short`: a write moves half of its bytes and says so, which is
# not an error; `full`: no space (ENOSPC) for this operation or from here on; `broken`: the device
# fails (EIO), an fsync's delayed write too.
EVERY_FAULT = ("kill", "torn", "short", "full-once", "full", "broken-once", "broken")
# Reads that fail: this one, or from here on, which is every read of the same file where the file's
# disk is the trouble (EIO, ESTALE), and every read where it is the process (EMFILE, ENOMEM). Python
# calls again after EINTR until it works.
ERRORS = ("EIO", "EMFILE", "ENOMEM", "ESTALE", "EINTR")
EVERY_UNREAD = tuple(error + lasting for error in ERRORS for lasting in ("", " from here on"))[:-1]
MODES = ("record", *EVERY_FAULT, "record-reads", *EVERY_UNREAD)
WRITES = ("write", "pwrite", "writev", "pwritev", "fwrite", "sendfile", "copy_file_range")
READS = ("close", "open")  # a broken disk still does these
DELETES = ("unlink", "rmdir", *READS)  # and a full one these

Scenario = Callable[[Path], object]


@dataclass(frozen=True)
class Operation:
    """One line of the shim's journal; paths are relative to the scenario's folder."""

    name: str
    path: str
    detail: str


@dataclass(frozen=True)
class Outcome:
    """What a scenario left behind.

    Attributes:
        folder: the scenario's folder as the fault left it; removed when the next outcome is asked
            for.
        mode, number, operation: where the fault struck (number counts from 1; 0 and None for a
            recording).
        error: name of the exception that left the scenario and its text, if one did.
        signal: the signal that ended it, 0 for none.
        journal: the operations it carried out (empty if killed).
    """

    folder: Path
    mode: str
    number: int
    operation: Operation | None
    error: tuple[str, str] | None
    signal: int
    journal: list[Operation]

    @property
    def killed(self) -> bool:
        return self.signal == signal.SIGKILL


def unavailable() -> str | None:
    """Why the harness cannot run here, or None."""
    if not sys.platform.startswith("linux"):
        return "the fault shim needs Linux (LD_PRELOAD, /proc)"
    if not _compiler():
        return "the fault shim needs a C compiler (cc, gcc or clang)"
    return None


def build_shim() -> Path:
    """Compile the shim unless this source has been compiled before."""
    source = HERE / "shim.c"
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"monograph-faults-{os.getuid()}-{digest}" / "shim.so"
    if not library.exists():
        library.parent.mkdir(mode=0o700, exist_ok=True)
        unfinished = library.with_suffix(f".{os.getpid()}")
        flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"]
        subprocess.run(
            [_compiler(), *flags, "-o", unfinished, source, "-ldl", "-lpthread"], check=True
        )
        unfinished.rename(library)
    return library


class FaultServer:
    """The process that carries the shim; closes with the `with` block."""

    def __init__(self) -> None:
        shim = build_shim()
        preloaded = " ".join(filter(None, [str(shim), os.environ.get("LD_PRELOAD")]))
        environment = {
            **os.environ,
            "LD_PRELOAD": preloaded,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OMP_NUM_THREADS": "1",  # a fork does not take other threads along
            # Memory in pages of 2 MB, of which a fork copies the table in a fifth of the time.
            "PYTHONMALLOC": "malloc",
            "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        }
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "server.py"), str(shim)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> FaultServer:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._process.communicate()

    def run(
        self, scenario: Scenario, folder: Path, mode: str = "record", number: int = 0
    ) -> Outcome:
        """Carry out the scenario once in the folder, with a fault at its operation `number`."""
        if "<locals>" in scenario.__qualname__ or "<lambda>" in scenario.__qualname__:
            raise TypeError(f"{scenario.__qualname__}: a scenario must be a module-level function")
        case = {
            "file": inspect.getsourcefile(scenario),
            "function": scenario.__qualname__,
            "folder": str(folder.resolve()),
            "mode": MODES.index(mode),
            "at": number,
        }
        answer = self._ask(case)
        if number and not answer["struck"]:
            raise AssertionError(
                f"{mode} at operation {number} never struck: the scenario is not deterministic"
            )
        journal = [Operation(*line.split("\t")) for line in answer["journal"].splitlines()]
        error = tuple(answer["error"]) if answer["error"] else None
        return Outcome(folder, mode, number, None, error, answer["signal"], journal)

    def record(
        self, scenario: Scenario, prepared: Path, scratch: Path, mode: str = "record"
    ) -> list[Operation]:
        """The scenario's operations, or with "record-reads" its reads, when nothing goes wrong; it
        must not raise.
        """
        folder = _fresh_copy(prepared, scratch)
        outcome = self.run(scenario, folder, mode)
        shutil.rmtree(folder)
        if outcome.error or outcome.signal:
            raise AssertionError(
                f"the scenario fails without any fault: {outcome.error}, signal {outcome.signal}"
            )
        return outcome.journal

    def every_operation(
        self,
        scenario: Scenario,
        prepared: Path,
        scratch: Path,
        modes: Sequence[str] = EVERY_FAULT,
        stride: int = 1,
        journal: list[Operation] | None = None,
    ) -> Iterator[Outcome]:
        """Strike at each operation in each mode to which it can happen, each time on a fresh copy
        of `prepared`.

        `journal`: the operations, or reads, when nothing goes wrong, if these have been recorded
        before. The modes are either all of EVERY_FAULT or all of EVERY_UNREAD. Where a case is dear
        each mode strikes every `stride`-th operation to which it can happen, and the next mode
        those after them, so that each meets some mode.
        """
        reads = modes[0] in EVERY_UNREAD
        journal = journal or self.record(
            scenario, prepared, scratch, "record-reads" if reads else "record"
        )
        for place, mode in enumerate(modes):
            struck = [
                (number, each) for number, each in enumerate(journal, 1) if applies(mode, each)
            ]
            for number, operation in struck[place % stride :: stride]:
                folder = _fresh_copy(prepared, scratch)
                outcome = self.run(scenario, folder, mode, number)
                yield Outcome(
                    folder, mode, number, operation, outcome.error, outcome.signal, outcome.journal
                )
                shutil.rmtree(folder)

    def _ask(self, case: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        print(json.dumps(case), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise AssertionError(
                f"the fault server ended with {self._process.wait()}; its stderr says why"
            )
        return json.loads(line)


def applies(mode: str, operation: Operation) -> bool:
    """Whether this fault can happen to this operation."""
    if mode in ("torn", "short"):
        return operation.name in WRITES and int(operation.detail) > 1
    # Killed before a read, a folder is as it is when killed before what comes next.
    if mode in EVERY_UNREAD:
        return True
    never = {"kill": READS, "full-once": ("open",), "full": DELETES, "broken": READS}
    return operation.name not in never.get(mode, ())


def _compiler() -> str | None:
    return next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)


def _fresh_copy(prepared: Path, scratch: Path) -> Path:
    folder = Path(tempfile.mkdtemp(dir=scratch)).resolve()
    shutil.copytree(prepared, folder, dirs_exist_ok=True, symlinks=True)
    return folder
