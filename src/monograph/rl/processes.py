"""Score a model's answers by foreign code in processes of its own: programs by tests, any answers
by a user's function.

The tests of a program cannot be seen or cheated. Each solution runs in one process and its tests in
another, and only plain data goes between the two: None, booleans, numbers, texts, lists, tuples,
sets and dicts. So a result is compared where the solution cannot reach. A change that a function
makes in its arguments is not seen, and classes and other objects do not get through.

Both processes begin with an empty environment, without site-packages, with standard streams that
lead nowhere, and with limits (`worker.LIMITS`): 5 s of processor time, 512 MiB of address space, no
byte in a file, few open files. A filter of system calls forbids child processes and threads, and
what no limit counts or what would outlive them: shared memory, queues and semaphores of System V
and POSIX, keyrings, files in memory, new namespaces and mounts, sockets (`worker.FORBIDDEN`). They
are killed with the trainer. If the system lets this user make namespaces, they also see no other
process, and no file but the standard library and the system's libraries, read-only, in a root that
is in memory and ends with them; `confinement` says whether it does. Where it does not, as in most
containers, a solution can read and remove this user's files and end this user's processes, so that
`rewards` refuses to begin unless it is told.

Root becomes nobody, unless the system forbids that, as in some containers.

A score is a share of the tests, counted here: one verdict is read for each test, whatever the
tests' process writes. A test passes if it runs to its end. What a solution raises arrives in the
test as an exception of Python's own, but never as one that merely ends an iterator.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from monograph.device import describe
from monograph.errors import InputRefused
from monograph.rl import worker
from monograph.storage.code import Code
from monograph.storage.reading import is_folder, without_links
from monograph.terminal import one_line

_MOST_VERDICT_BYTES = len(b"false\n")
SECONDS = 10.0  # for all tests of one solution
_TRIAL = "import heapq, os\ndef least(of): return heapq.nsmallest(1, of)\ndef sees(path): return os.path.exists(path)"
_TRIALS = ["assert least([3, 2]) == [2]", "assert not sees('/etc')"]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that began a session, with all of its process group, and wait for it."""
    if process.returncode is None:  # its number is still its own
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class Solutions:
    """Scores programs, as many at once as there are cores."""

    def __init__(self) -> None:
        libraries = {str(Path(os.__file__).parents[1]), "/lib", "/lib64", "/usr/lib", "/usr/lib64"}
        self._folders = sorted(filter(is_folder, libraries))
        self._stopped = False

    def confinement(self) -> bool | None:
        """Return whether solutions are kept from files and the network; None if none can run here
        at all.
        """
        [share] = self.scores([(_TRIAL, _TRIALS)])
        return share == 1 if share else None

    def scores(self, solutions: Sequence[tuple[str, Sequence[str]]]) -> list[float]:
        """Return the share of passed tests of each (code, tests).

        The tests of a solution run one after another. Those that come after its death or after
        SECONDS have failed.
        """
        self._stopped = False
        with ThreadPoolExecutor(describe(torch.device("cpu")).cores) as pool:
            try:
                return list(pool.map(self._share, solutions))
            except BaseException:
                self._stopped = True
                pool.shutdown(cancel_futures=True)
                raise

    def _share(self, solution: tuple[str, Sequence[str]]) -> float:
        code, tests = solution
        deadline = time.monotonic() + SECONDS
        said = b""
        processes = []
        ours, judges = socket.socketpair()
        asking, asked = socket.socketpair()
        try:
            with judges, asking, asked:
                processes.append(self._start("solution", asked))
                processes.append(self._start("tests", judges, asking.fileno()))
            with suppress(ConnectionError):  # they died
                job = [code.encode("utf-8", "surrogatepass").decode("latin-1"), tests]
                ours.sendall(json.dumps(job).encode() + b"\n")
                ours.settimeout(0.1)
                # A verdict for each test is read, and no more, whatever the process writes.
                while (
                    said.count(b"\n") < len(tests)
                    and not self._stopped
                    and time.monotonic() < deadline
                ):
                    with suppress(TimeoutError):
                        more = ours.recv(_MOST_VERDICT_BYTES * len(tests))
                        if not more:
                            break
                        said += more
        finally:
            for process in processes:
                _end(process)
            ours.close()
        return said.split(b"\n")[: len(tests)].count(b"true") / len(tests)

    def _start(self, role: str, channel: socket.socket, other: int = 0) -> subprocess.Popen[bytes]:
        # In a session of its own, so that Ctrl-C does not end it: a run may still have to save.
        return subprocess.Popen(
            [sys.executable, "-I", "-S", worker.__file__, role, str(other), *self._folders],
            stdin=channel.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={},
            pass_fds=[other] if other else [],
            start_new_session=True,
        )


LARGEST = 1e6
ANSWER_SECONDS = 60.0  # for one answer, and for the imports of the file


class Function:
    """A function `score(prompt, completion, record)` of a Python file, whose process starts at the
    first call.

    It returns a number, or {name: number} of the parts whose sum the answer is worth.

    What the function prints goes to standard error. The process ends with the thread that made the
    first call.
    """

    def __init__(self, code: Code, sha256: str) -> None:
        """Take the function, and the digest of the file that may run."""
        self._code, self._sha256 = code, sha256
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process and run the file in it, if that has not been done.

        Raises:
            InputRefused: the file cannot be read, raises an exception, or has no such function.
            Unreadable: the system failed to read the file.
        """
        if self._process is not None:
            return
        source = self._code.vouched_source(self._sha256)
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(ANSWER_SECONDS)
        self._replies = self._socket.makefile("rb")
        with theirs:
            # In a session of its own, so that Ctrl-C does not end it: a run may still have to save.
            command = [sys.executable, "-P", "-u", worker.__file__, "function"]
            self._process = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=2, start_new_session=True
            )
        self._ended = weakref.finalize(self, _end, self._process)
        self._asked(
            "rl.reward",
            source.decode("latin-1"),
            str(without_links(self._code.path)),
            self._code.function,
        )

    def score(
        self, prompt: str, completion: str, record: Mapping[str, Any], where: str
    ) -> dict[str, float]:
        """Return the function's score of an answer by part; a plain number is the part "".

        Raises:
            InputRefused: see `start`; or the function raises, returns neither a finite number nor
                parts, takes more than ANSWER_SECONDS, or ends its process. The message begins with
                `where`.
        """
        self.start()
        reply = self._asked(
            where,
            self._code.function,
            worker.encoded([prompt, completion, record]),
            worker.encoded({}),
        )
        score = worker.decoded(reply)
        parts = parts_of(score)
        if parts is None:
            raise self._refused(where, f"returned {score!r:.60}")
        return parts

    def close(self) -> None:
        """End the process and its children; a later call starts a new one."""
        if self._process is not None:
            self._ended()
            self._replies.close()
            self._socket.close()
            self._process = None

    def _asked(self, where: str, *message: object) -> Any:
        process = self._process
        line = b""
        fault = None
        assert process
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
            line = self._replies.readline()
        except TimeoutError:
            fault = f"took more than {ANSWER_SECONDS:.0f} s"
        except ConnectionError:
            pass  # the process is dead
        finally:
            if not line.endswith(b"\n"):
                self.close()  # a late reply must not be taken for that to the next call
        if not line.endswith(b"\n"):
            raise self._refused(
                where, fault or f"ended its process (exit code {process.returncode})"
            )
        raised, result = json.loads(line)
        if raised:
            raise self._refused(where, f"raised {raised}: {result}")
        return result

    def _refused(self, where: str, fault: str) -> InputRefused:
        self.close()
        return refused(where, self._code.value, fault)


def parts_of(score: object) -> dict[str, float] | None:
    """Return the parts of what a function returned for an answer; None if it is no score."""
    parts = score if isinstance(score, Mapping) and score else {"": score}
    found: dict[str, float] = {}
    for name, part in parts.items():
        # NaN is in no range. Larger numbers would overflow in sums and gradients.
        if not isinstance(part, int | float) or not abs(part) <= LARGEST:
            return None
        if not isinstance(name, str) or not (name == "" or name.isidentifier()):
            return None
        found[name] = float(part)
    return found


def refused(where: str, function: str, fault: str) -> InputRefused:
    """Return the error of a function that scores no answer."""
    number = f"a number from -{LARGEST:g} to {LARGEST:g}"
    advice = f"correct it, so that it returns {number}, or such numbers by name, for every answer"
    return InputRefused(one_line(f"{where}: {function} {fault}: {advice}"))
