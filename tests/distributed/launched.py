"""Starts the ranks of a test, and never waits for them for ever."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from clocks import HANG_S
from commands.forked import CLI, Command, CommandServer, Done

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def environment() -> dict[str, str]:
    """Of a rank, but for its number: one thread each, stacks shown by SIGABRT."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    return os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}


def started(
    server: CommandServer,
    folder: Path,
    size: int,
    *arguments: object,
    call: str = CLI,
    **variables: str | list[str],
) -> list[Command]:
    """The ranks of a command, which are forks: without torchrun, whose own imports take seconds in
    each rank.

    A variable that is a list has a value for each rank.
    """
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    if torch.cuda.device_count() < size:  # NCCL refuses two ranks on one card
        shared["CUDA_VISIBLE_DEVICES"] = ""
    places = list[dict[str, str]]()
    for rank in range(size):
        given = {
            name: value if isinstance(value, str) else value[rank]
            for name, value in variables.items()
        }
        places.append(given | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
    return [
        server.start(folder, *map(str, arguments), env=each, call=call, figures=0)
        for each in places
    ]


def ranks(
    server: CommandServer,
    folder: Path,
    size: int,
    *arguments: object,
    call: str = CLI,
    **variables: str | list[str],
) -> list[Done]:
    """How the ranks of a command ended: the first that fails ends all, as a launcher has it."""
    running = started(server, folder, size, *arguments, call=call, **variables)
    done = dict[int, Done]()
    while len(done) < size:
        for rank in {*range(size)} - done.keys():
            if running[rank].is_over():
                done[rank] = running[rank].wait()
                for other in {*range(size)} - done.keys() if done[rank].code != 0 else ():
                    running[other].signal(signal.SIGTERM)
        time.sleep(0.02)
    return [done[rank] for rank in range(size)]


class Torchrun:
    """A command under torchrun, as a person would start it; its workers can be killed."""

    def __init__(
        self,
        size: int,
        folder: Path,
        *arguments: object,
        restarts: int = 0,
        meeting: Sequence[str] = ("--standalone",),
        name: str = "torchrun",
        **variables: str,
    ):
        """Start `monograph` with so many ranks in a folder; they meet those of other launchers as
        `meeting` says.
        """
        self.out, self.err = folder / f"{name}.out", folder / f"{name}.err"
        command = [
            sys.executable, "-m", "torch.distributed.run", *meeting, "--nproc-per-node", str(size),
            "--max-restarts", str(restarts), "-m", "monograph", *map(str, arguments),
        ]  # fmt: skip
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment() | variables,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def workers(self) -> list[int]:
        """Processes of the ranks that are there now."""
        try:
            found = (
                Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
                .read_text()
                .split()
            )
        except OSError:
            return []
        return [int(pid) for pid in found if b"monograph" in _command_line(int(pid))]

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that the ranks do."""
        end = time.monotonic() + HANG_S
        while not condition():
            assert time.monotonic() < end and self.process.poll() is None, self.err.read_text()
            time.sleep(0.1)

    def wait(self) -> int:
        """The exit code of torchrun; an AssertionError with every rank's stack if it does not end
        in time.
        """
        try:
            return self.process.wait(HANG_S)
        except subprocess.TimeoutExpired:
            for pid in self.workers():
                os.kill(pid, signal.SIGABRT)
            time.sleep(1)
            raise AssertionError(
                f"did not end in {HANG_S} s\n{self.err.read_text()[-8000:]}"
            ) from None
        finally:
            self.stop()

    def stop(self) -> None:
        """End whatever is left of it, and wait until no rank holds the run's lock any more."""
        workers = self.workers()
        for pid in [*workers, self.process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        while any(map(_is_running, workers)):
            time.sleep(0.01)


def _is_running(pid: int) -> bool:
    """Whether a process may still hold locks: it has no command line while it ends, but its files
    until all threads do.

    Its first thread may be a zombie before the others are, so each one is asked.
    """
    try:
        threads = [(thread / "stat").read_text() for thread in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return Path(f"/proc/{pid}").exists()  # a thread ended meanwhile, or all of them did
    return any(thread.rpartition(")")[2].split()[0] not in "ZX" for thread in threads)


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
