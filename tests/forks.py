"""`pytest --forks N`: tests are collected once, and then run by N forks of the process. Each fork takes
the next file of tests when it begins the last test of the one before.

Workers that start from nothing, as those of pytest-xdist do, would each import torch and collect all
tests, which takes eight CPU seconds a worker.

Of a process's threads, a fork has only the one that forked. So no library may have started threads
before: PyTorch is limited to one thread, and tokenizers and Arrow may start theirs only in the forks.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NoReturn

import pytest

# Variables that keep libraries from starting threads; each fork removes them.
UNTIL_FORKED = {
    "TOKENIZERS_PARALLELISM": "false",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
# What some test of nearly every fork imports, so that it is imported once for all of them.
SHARED = ("matplotlib.pyplot", "transformers.models.llama.modeling_llama")
MANY_FILES = 100  # more than anybody names by hand
NUMBER_BYTES = 4  # of a file's number, as the workers read it from the queue


def file_of(test: str) -> str:
    """Return the file of a test, given the test's node id."""
    return test.partition("::")[0]


@dataclass
class Worker:
    """A fork, as its parent process sees it."""

    pid: int
    reports: Connection
    running: str = "no test"

    def ended(self) -> str:
        """Wait until the fork has ended, and return how it ended."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


class Forks:
    """Runs the collected tests in `count` forks, which take the files in the order of collection."""

    def __init__(self, count: int) -> None:
        self.count = count
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        os.environ.update(UNTIL_FORKED)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        config = session.config
        is_broken = session.testsfailed and not config.option.continue_on_collection_errors
        if is_broken or config.option.collectonly:
            return None  # so that pytest's own loop runs, and reports it
        files = [
            list(tests) for _, tests in groupby(session.items, lambda item: file_of(item.nodeid))
        ]
        for module in SHARED if len(files) > MANY_FILES else ():
            with suppress(ImportError):
                importlib.import_module(module)
        gc.freeze()
        # The queue is a pipe with the numbers of all files, from which the workers read.
        queue, filled = os.pipe()
        os.write(filled, b"".join(number.to_bytes(NUMBER_BYTES) for number in range(len(files))))
        os.close(filled)
        workers: list[Worker] = []
        try:
            for number in range(min(self.count, len(files))):
                workers.append(_forked(session, files, queue, number))
            _logged(session, workers)
        finally:
            os.close(queue)
            for worker in workers:
                os.kill(worker.pid, signal.SIGKILL)
                worker.ended()
        return True


def _logged(session: pytest.Session, workers: list[Worker]) -> None:
    """Log what the workers report, and remove each worker from the list when it has no more tests."""
    hook = session.config.hook
    while workers:
        ready = wait([worker.reports for worker in workers])
        for worker in [each for each in workers if each.reports in ready]:
            try:
                said = worker.reports.recv()
            except EOFError:
                workers.remove(worker)
                raise session.Interrupted(
                    f"a worker ended with {worker.ended()} while it ran {worker.running}"
                ) from None
            if said is None:
                workers.remove(worker)
                worker.ended()
            elif isinstance(said, str):
                worker.running = said
            else:
                report = hook.pytest_report_from_serializable(config=session.config, data=said)
                hook.pytest_runtest_logreport(report=report)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)


def _forked(
    session: pytest.Session, files: list[list[pytest.Item]], queue: int, number: int
) -> Worker:
    reading, writing = Pipe(duplex=False)
    folder = session.config._tmp_path_factory.mktemp(f"worker{number}", numbered=False)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        writing.close()
        return Worker(pid, reading)
    reading.close()
    _become_worker(session, files, queue, folder, writing)


def _become_worker(
    session: pytest.Session,
    files: list[list[pytest.Item]],
    queue: int,
    folder: Path,
    reports: Connection,
) -> NoReturn:
    code = 1
    try:
        for name in UNTIL_FORKED:
            del os.environ[name]
        manager = session.config.pluginmanager
        # The fork needs files of its own for what its tests print, and a folder for temporary files.
        capture = manager.get_plugin("capturemanager")
        capture.stop_global_capturing()
        capture.start_global_capturing()
        capture.suspend_global_capture(in_=True)
        session.config._tmp_path_factory._basetemp = folder
        manager.unregister(name="terminalreporter")
        manager.register(Reporter(session.config, reports))
        if (costs := manager.get_plugin("costs")) is not None:
            costs.begin()
        tests = _tests(files, queue)
        test = next(tests, None)
        while test is not None and not session.shouldfail:
            reports.send(test.nodeid)
            following = next(tests, None)  # None: pytest tears down all fixtures after this test
            test.config.hook.pytest_runtest_protocol(item=test, nextitem=following)
            test = following
        reports.send(None)
        code = 0
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(code)


def _tests(files: list[list[pytest.Item]], queue: int) -> Iterator[pytest.Item]:
    """Yield the tests of the next file in the queue, again and again until the queue is empty."""
    while number := os.read(queue, NUMBER_BYTES):
        yield from files[int.from_bytes(number)]


class Reporter:
    """Sends a worker's reports."""

    def __init__(self, config: pytest.Config, reports: Connection) -> None:
        self.config = config
        self.reports = reports

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.reports.send(
            self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        )
