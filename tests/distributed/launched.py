"""Starts the ranks of a test, and never waits for them for ever."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

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


def ranks(program: Path, size: int, *arguments: object, timeout_s: float) -> list[str]:
    """The output of each rank of a program, which must all end well in time."""
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, str(program), *map(str, arguments)]
    started = [
        subprocess.Popen(
            command, env=environment() | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip
    return ended(started, timeout_s)


def ended(started: list[subprocess.Popen[str]], timeout_s: float) -> list[str]:
    """The output of processes that end with code 0 in time; else an AssertionError with the output, and the stacks."""
    until = time.monotonic() + timeout_s
    while any(each.poll() is None for each in started) and time.monotonic() < until:
        if any(each.poll() for each in started):  # one failed: the others would wait for it
            break
        time.sleep(0.05)
    late = [each for each in started if each.poll() is None]
    for each in late:
        each.send_signal(signal.SIGABRT)
    said = [each.communicate()[0] for each in started]
    codes = [each.returncode for each in started]
    stacks = "\n".join(f"---- rank {rank}, code {codes[rank]}\n{text}" for rank, text in enumerate(said))
    assert not late and not any(codes), stacks
    return said
