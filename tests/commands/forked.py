"""The real command line in forks of one process that has imported everything once: a command costs
no import.

with CommandServer() as monograph:
    done = monograph.run(folder, "train", "--out", "run")       # done.code, done.out, done.err
    command = monograph.start(folder, "train"); command.signal(signal.SIGKILL); done =
    command.wait()
"""

from __future__ import annotations

import gc
import importlib
import itertools
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import monograph
from clocks import HANG_S
from modes import binding_modes

PROGRAM = str(Path(monograph.__file__).with_name("__main__.py"))
CLI = "monograph.cli:main"


@dataclass(frozen=True)
class Done:
    """How a command ended: exit code (None if a signal ended it), signal, and what it wrote."""

    code: int | None
    signal: int
    out: str
    err: str


class Command:
    """A command that runs."""

    def __init__(self, server: CommandServer, pid: int, folder: Path) -> None:
        self.pid, self._server, self._folder = pid, server, folder

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def until(self, condition: Callable[[], bool], seconds: float = HANG_S) -> None:
        """Wait for something that the command does before it ends."""
        end = time.monotonic() + seconds
        while not condition():
            over = self.is_over() and not condition()
            assert not over and time.monotonic() < end, (self._folder / "err").read_text()
            time.sleep(0.002)

    @property
    def out(self) -> str:
        """What it has written so far."""
        written = self._folder / "out"
        return written.read_text(errors="replace") if written.exists() else ""

    def is_over(self) -> bool:
        return bool(self._server.ask(over=self.pid))

    def wait(self) -> Done:
        status = self._server.ask(wait=self.pid)
        code = None if os.WIFSIGNALED(status) else os.waitstatus_to_exitcode(status)
        out, err = ((self._folder / name).read_text(errors="replace") for name in ("out", "err"))
        return Done(code, os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0, out, err)


class CommandServer:
    """The process that forks; closes with the `with` block."""

    def __enter__(self) -> CommandServer:
        self._texts = tempfile.TemporaryDirectory()
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OMP_NUM_THREADS": "1",  # a fork does not take other threads along
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # as the command line says before torch is imported
        }
        self._server = subprocess.Popen(
            [sys.executable, __file__],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._begun = itertools.count()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.communicate()
        self._texts.cleanup()

    def ask(self, **what: object) -> int:
        """Have a command begun, and get its process, or have one waited for, and get its status; or
        is it `over`?
        """
        assert self._server.stdin and self._server.stdout
        print(json.dumps(what), file=self._server.stdin, flush=True)
        return int(self._server.stdout.readline())

    def start(
        self,
        folder: Path,
        *arguments: str,
        program: str = PROGRAM,
        env: Mapping[str, str] | None = None,
        stdin: Path | None = None,
        call: str = CLI,
        **limits: int,
    ) -> Command:
        """Begin a command in `folder`, with the file `stdin` as its standard input; it may `call`
        another function.

        Only with `figures=1` it draws figures, which take most of a small run's time, and writes
        long samples; with `page=1` it writes a run's page alone, as a run does that has no time for
        more. Only with `memory=1` it measures the memory of an update after a run. With `at_once=1` a
        sweep finds that any number of members at once takes as long as one, and compiling no time, so
        that a busy machine does not decide how it trains.
        `file_bytes` limits the size of its files, `reader=0` gives it a standard output that nobody
        reads any more, `modes=1` lets file modes bind it even as root, and `terminal=1` a terminal
        for both streams, whose text comes back as `out`.
        """
        texts = Path(self._texts.name, str(next(self._begun)))
        texts.mkdir()
        case = {
            "folder": str(folder),
            "texts": str(texts),
            "argv": [program, *arguments],
            "env": {**(env or {})},
            "stdin": str(stdin or os.devnull),
            "call": call,
            **limits,
        }
        return Command(self, self.ask(**case), texts)

    def run(
        self,
        folder: Path,
        *arguments: str,
        program: str = PROGRAM,
        env: Mapping[str, str] | None = None,
        stdin: Path | None = None,
        **limits: int,
    ) -> Done:
        return self.start(
            folder, *arguments, program=program, env=env, stdin=stdin, **limits
        ).wait()


def carry_out(case: dict[str, object]) -> None:
    """The fork: becomes the command, for good."""
    import numpy
    import torch

    import monograph.commands.train
    import monograph.session.reporting
    import monograph.sweeps.progress
    from monograph.report.run_report import write_run_page
    from monograph.run.progress import Progress
    from monograph.sweeps.concurrency import TimedGroup, WidthTime

    os.chdir(str(case["folder"]))
    os.environ.update(case["env"])  # type: ignore[call-overload]
    os.dup2(os.open(str(case["stdin"]), os.O_RDONLY), 0)
    sys.stdin = os.fdopen(0, closefd=False)  # what the server has read ahead is not this command's
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(
            os.open(Path(str(case["texts"]), name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
            descriptor,
        )
    if not case.get("reader", 1):
        reading, writing = os.pipe()
        os.dup2(writing, 1)
        os.close(reading)
    shown = on_a_terminal() if case.get("terminal") else None
    # What the server's streams know of their files, such as that one can be sought in, is not so of
    # these.
    encoding = os.environ.get("PYTHONIOENCODING")
    sys.stdout, sys.stderr = (os.fdopen(each, "w", 1, encoding, closefd=False) for each in (1, 2))
    if not case.get("memory"):
        monograph.commands.train.measure_memory = lambda session: None
    if case.get("at_once"):
        time_width = TimedGroup._time

        def equally_fast(group: TimedGroup, width: int, progress: Progress) -> WidthTime:
            time_width(group, width, progress)
            return WidthTime(update_s=1.0, compile_s=0.0)

        TimedGroup._time = equally_fast  # type: ignore[method-assign]
    if "file_bytes" in case:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (case["file_bytes"], resource.RLIM_INFINITY))  # type: ignore[arg-type]
    for_good = ExitStack()
    if case.get("modes"):
        for_good.enter_context(binding_modes())
    if not case.get("figures"):
        of_page = (
            (lambda *given: write_run_page(*given, "")) if case.get("page") else lambda *_: None
        )
        monograph.session.reporting.write_report = of_page
        monograph.sweeps.progress.write_sweep_report = lambda *_: None
        monograph.session.reporting.SAMPLE_TOKENS = 4  # 48 would take longer than all updates
    signal.alarm(HANG_S)
    # Every new process has random numbers of its own; those of forks would be alike.
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(int.from_bytes(os.urandom(4), "little"))
    sys.argv = case["argv"]  # type: ignore[assignment]
    code: object = 1
    module, name = str(case["call"]).split(":")
    try:
        code = getattr(importlib.import_module(module), name)()
    except SystemExit as end:
        code = end.code
    except BaseException:  # which no command lets out
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        if shown:
            os.closerange(1, 3)
            shown.join()
        os._exit(int(str(code or 0)))


def on_a_terminal() -> threading.Thread:
    """Both output streams become a terminal, whose text a thread writes to where standard output
    went.
    """
    (reading, writing), text = os.openpty(), os.dup(1)

    def copy() -> None:
        with suppress(OSError):  # EIO: the writing end is closed
            while chunk := os.read(reading, 65536):
                os.write(text, chunk)

    for descriptor in (1, 2):
        os.dup2(writing, descriptor)
    os.close(writing)
    thread = threading.Thread(target=copy)
    thread.start()
    return thread


def serve() -> None:
    import matplotlib.backends.backend_agg  # noqa: F401 - whatever a command imports late
    import matplotlib.backends.backend_svg
    import matplotlib.style  # noqa: F401
    import PIL.Image
    import torch._dynamo
    import torch._inductor.config  # noqa: F401

    import monograph.commands.chat
    import monograph.commands.check
    import monograph.commands.compare
    import monograph.commands.data
    import monograph.commands.evaluate
    import monograph.commands.export
    import monograph.commands.generate
    import monograph.commands.keys
    import monograph.commands.profile
    import monograph.commands.recipes
    import monograph.commands.runs
    import monograph.commands.sweep
    import monograph.commands.train  # noqa: F401
    import monograph.session.warmup
    from monograph.cli import command_tree

    # Three updates say how long one takes: a sweep of this size would spend most of its time on
    # measuring fifty.
    monograph.session.warmup.CALIBRATION_S = 0.0
    command_tree()
    PIL.Image.preinit()
    gc.collect()
    gc.freeze()  # no fork looks through, and so copies, what was imported

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        case = json.loads(line)
        if "wait" in case:
            print(os.waitpid(case["wait"], 0)[1], file=answers, flush=True)
            continue
        if "over" in case:
            ended = os.waitid(os.P_PID, case["over"], os.WEXITED | os.WNOHANG | os.WNOWAIT)
            print(int(ended is not None), file=answers, flush=True)
            continue
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            carry_out(case)
        print(child, file=answers, flush=True)


if __name__ == "__main__":
    serve()
