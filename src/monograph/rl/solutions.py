"""Score a model's programs by tests that they cannot see or cheat.

Each solution runs in one process and its tests in another, and only plain data goes between the two: None, booleans,
numbers, texts, lists, tuples, sets and dicts. So a result is compared where the solution cannot reach. A change that a
function makes in its arguments is not seen, and classes and other objects do not get through.

Both processes begin in an empty folder, with an empty environment, without site-packages, with standard streams that
lead nowhere, and with limits (`worker.LIMITS`): 5 s of processor time, 512 MiB of address space, no child process, no
thread, no byte in a file, few open files. They are killed with the trainer. On Linux they also see no network, no other
process, and no file but the standard library and the system's libraries, read-only, if the system lets this user make
namespaces; `confinement` says whether it does. Where it does not, as in most containers, a solution can read and remove
this user's files, end this user's processes, and use the network: then run the training where that does no harm.

Root becomes nobody, since the kernel does not count root's processes. A solution may only fork if the system forbids
that to root, as in some containers. Its children end with its namespace; if there is none either, they are killed with
its process group, and one that leaves the group survives.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch

from monograph.device import describe
from monograph.rl import worker
from monograph.storage.reading import is_folder

SECONDS = 10.0  # for all tests of one solution
_TRIAL = "import heapq, os\ndef least(of): return heapq.nsmallest(1, of)\ndef sees(path): return os.path.exists(path)"
_TRIALS = ["assert least([3, 2]) == [2]", "assert not sees('/etc')"]


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that began a session, with all of its process group, and wait for it."""
    if process.returncode is None:  # its number is still its own
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class Solutions:
    """Scores programs, as many at once as there are cores."""

    def __init__(self) -> None:
        self._root = tempfile.TemporaryDirectory(prefix="monograph-solutions-")
        os.chmod(self._root.name, 0o755)  # nobody must be able to enter it
        libraries = {str(Path(os.__file__).parents[1]), "/lib", "/lib64", "/usr/lib", "/usr/lib64"}
        self._folders = sorted(filter(is_folder, libraries))
        for folder in self._folders:
            os.makedirs(self._root.name + folder, exist_ok=True)
        self._stopped = False

    def confinement(self) -> bool | None:
        """Return whether solutions are kept from files and the network; None if none can run here at all."""
        [share] = self.scores([(_TRIAL, _TRIALS)])
        return share == 1 if share else None

    def scores(self, solutions: Sequence[tuple[str, Sequence[str]]]) -> list[float]:
        """Return the share of passed tests of each (code, tests).

        The tests of a solution run one after another. Those that come after its death or after SECONDS have failed.
        """
        self._stopped = False
        with ThreadPoolExecutor(describe(torch.device("cpu")).cores) as pool:
            try:
                return list(pool.map(self._share, solutions))
            except BaseException:
                self._stopped = True
                pool.shutdown(cancel_futures=True)
                raise

    def close(self) -> None:
        """Remove the folder in which solutions run."""
        self._root.cleanup()

    def _share(self, solution: tuple[str, Sequence[str]]) -> float:
        code, tests = solution
        deadline, verdicts, processes = time.monotonic() + SECONDS, b"", []
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
                while not self._stopped and time.monotonic() < deadline:
                    with suppress(TimeoutError):
                        if not (said := ours.recv(1 << 16)):
                            break
                        verdicts += said
        finally:
            for process in processes:
                end(process)
            ours.close()
        return verdicts.count(b"true") / len(tests)

    def _start(self, role: str, channel: socket.socket, other: int = 0) -> subprocess.Popen[bytes]:
        # In a session of its own, so that Ctrl-C does not end it: a run may still have to save.
        return subprocess.Popen(
            [sys.executable, "-I", "-S", worker.__file__, role, str(other), self._root.name, *self._folders],
            stdin=channel.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=self._root.name,
            env={},
            pass_fds=[other] if other else [],
            start_new_session=True,
        )
