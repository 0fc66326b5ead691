"""Tries hostile inputs in forks with limits, and says of each what became of it.

    with HostileServer() as server:
        for trial in server.each("tokenizer.json", range(100), folder):
            ...trial.outcome

A fork has a gibibyte of memory more than the process had, SECONDS of the processor for each input,
and an audit hook that notes what no reading of a file may do: start a program, open a connection,
write outside of its folder, unpickle.
"""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

SECONDS = 5
MORE_BYTES = 1 << 30
FORBIDDEN = (
    "os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen", "pty.spawn", "socket.connect",
    "socket.getaddrinfo", "urllib.Request", "pickle.find_class", "shelve.open",
)  # fmt: skip
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


@dataclass(frozen=True)
class Trial:
    """One input: "used", "refused", or the name of what went wrong with its text."""

    seed: int
    outcome: str
    detail: str
    seconds: float
    violations: list[str]


class HostileServer:
    """The process that forks; closes with the `with` block."""

    def __enter__(self) -> HostileServer:
        path = os.pathsep.join(filter(None, sys.path))
        environment = {
            **os.environ,
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.communicate()

    def each(self, kind: str, seeds: Sequence[int], folder: Path) -> Iterator[Trial]:
        """Try inputs one after another; after one that ended its process a new one goes on."""
        assert self._process.stdin and self._process.stdout
        left = list(seeds)
        while left:
            print(json.dumps([kind, left, str(folder)]), file=self._process.stdin, flush=True)
            for line in iter(self._process.stdout.readline, "\n"):
                assert line, "the server ended; its stderr says why"
                trial = Trial(*json.loads(line))
                left.remove(trial.seed)
                yield trial


def watched(folder: str, violations: list[str]) -> None:
    """From here on, what no reading may do is noted."""
    own = (folder, "/dev/null", "/dev/shm", "/proc/self")

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event.startswith(FORBIDDEN) and not (
            event == "subprocess.Popen" and is_limited(arguments)
        ):
            violations.append(f"{event} {arguments!r}"[:200])
        elif event == "open" and isinstance(arguments[0], str) and (arguments[2] or 0) & WRITING:
            if not os.path.abspath(arguments[0]).startswith(own):
                violations.append(f"writes {arguments[0]}")

    sys.addaudithook(hook)


def is_limited(arguments: tuple[Any, ...]) -> bool:
    """Whether that starts one of the two programs that reading may start, both of them under
    limits.
    """
    from monograph.text import sandbox, tokenizer_trial

    return list(arguments[1])[:3] in [
        [sys.executable, "-P", each.__file__] for each in (sandbox, tokenizer_trial)
    ]


def tried(kind: str, seed: int, folder: str) -> tuple[str, str]:
    from hostile.inputs import KINDS
    from monograph.errors import MonographError

    try:
        KINDS[kind](random.Random(f"{kind} {seed}"), Path(folder))
    except MonographError as error:
        fine = error.exit_code in (2, 3, 4) and len(str(error)) < 2000
        return ("refused" if fine else type(error).__name__), str(error)[:300]
    except MemoryError:
        return "MemoryError", ""
    except BaseException as error:
        import traceback

        return type(error).__name__, traceback.format_exc()[-1500:]
    return "used", ""


def batch(kind: str, seeds: list[int], folder: str, answers: Any) -> None:
    """The fork: says each seed before it begins, so that one that ends the process is known."""
    violations: list[str] = []
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MORE_BYTES, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    watched(folder, violations)
    for seed in seeds:
        print(seed, file=answers, flush=True)
        used = resource.getrusage(resource.RUSAGE_SELF)
        before = used.ru_utime + used.ru_stime
        resource.setrlimit(resource.RLIMIT_CPU, (int(before) + SECONDS + 1, resource.RLIM_INFINITY))
        outcome, detail = tried(kind, seed, folder)
        used = resource.getrusage(resource.RUSAGE_SELF)
        seconds = used.ru_utime + used.ru_stime - before
        print(json.dumps([seed, outcome, detail, seconds, violations]), file=answers, flush=True)
        violations.clear()


def serve() -> None:
    import hostile.inputs  # noqa: F401 - whatever a fork needs
    from monograph.run.trust import with_mark

    # Makes this user's secret, which the first run that a fork prepares would do otherwise.
    with_mark("", {})
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        kind, seeds, folder = json.loads(line)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            os.chdir(folder)
            with os.fdopen(writer, "w") as report:
                batch(kind, seeds, folder, report)
            os._exit(0)
        os.close(writer)
        began, at = None, time.monotonic()
        with os.fdopen(reader) as report:
            for said in report:
                if said.startswith("["):
                    print(said, end="", file=answers, flush=True)
                    began = None
                else:
                    began, at = int(said), time.monotonic()
        _, status = os.waitpid(child, 0)
        if began is not None:
            how = (
                f"ended by signal {os.WTERMSIG(status)}"
                if os.WIFSIGNALED(status)
                else f"exit {status}"
            )
            print(json.dumps([began, how, "", time.monotonic() - at, []]), file=answers, flush=True)
        print(file=answers, flush=True)


if __name__ == "__main__":
    serve()
