"""What every test runs under: no network, repeatable examples, and GPU tests skipped where there is
no GPU.
"""

from __future__ import annotations

import gc
import getpass
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from bytecode import compile_all
from costs import UNKNOWN_CPU_S, Costs, measured_cpu_s
from forks import Forks, file_of
from nights import Bounded, is_of_night

if TYPE_CHECKING:
    from commands.forked import CommandServer

# What tests make, such as syntax trees and graphs, is many small objects that live on: by the usual
# thresholds a tenth of all the seconds would go into looking for garbage among them.
gc.set_threshold(50_000, 20, 50)
gc.disable()  # until all tests are collected, which frees nothing
# A variable of the person who runs the tests must not change what they test.
for name in [name for name in os.environ if name.startswith("MONOGRAPH_")]:
    del os.environ[name]
os.environ["HF_HUB_OFFLINE"] = "1"
# What a shell or nohup lets a program in the background ignore, it and its children would go on to
# ignore.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# One cache of compiled code for all workers, runs and commands: torch's own, not that of each
# worker's home.
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR",
    str(Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"),
)
# Figures are drawn to files only.
os.environ["MPLBACKEND"] = "Agg"
# What the command line sets: threads that wait without spinning, or a busy machine makes every test
# slow.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Workers that share the cores have one thread each, and start no pool of compilers, which imports
# torch for seconds.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Inductor is to believe what the processor says of its vectors: to try each kind takes every process
# that captures a second, and the first one eight.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# The same examples everywhere, so that red is the change's fault; --hypothesis-profile=explore
# looks for new ones.
settings.register_profile(
    "repeatable", derandomize=True, max_examples=50, deadline=None, database=None, print_blob=True
)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--night",
        type=date.fromisoformat,
        metavar="DATE",
        help="of the tests, that night's share only",
    )
    parser.addoption(
        "--minutes", type=float, metavar="M", help="with --night: a share that takes no longer"
    )
    parser.addoption(
        "--forks",
        type=int,
        metavar="N",
        help="collect once, then run the files in N forks of this process",
    )
    parser.addoption(
        "--costs",
        nargs="?",
        const="",
        metavar="FILE",
        help="CPU seconds by file; write them as JSON",
    )


def pytest_configure(config: pytest.Config) -> None:
    forks = config.getoption("--forks")
    # The process that is about to start workers.
    if forks or getattr(config.option, "numprocesses", None):
        compile_all(config)
    if forks:
        config.pluginmanager.register(Forks(forks))
    if config.getoption("--costs") is not None:
        config.pluginmanager.register(
            Costs(config.getoption("--costs"), added=config.getoption("--night") is not None),
            "costs",
        )
    if config.getoption("--minutes") is not None:
        if config.getoption("--night") is None:
            raise pytest.UsageError(
                "--minutes M goes with --night DATE, whose share of the slow tests it bounds"
            )
        config.pluginmanager.register(
            Bounded(config.getoption("--night"), config.getoption("--minutes"))
        )


@pytest.fixture(scope="session", autouse=True)
def _caches_are_the_tests_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["MONOGRAPH_HOME"] = str(tmp_path_factory.mktemp("monograph-home"))


@pytest.fixture(scope="session")
def server(_caches_are_the_tests_own: None) -> Iterator[CommandServer]:
    """The command line in forks of one process: its imports, seconds of them, are paid for once by
    a worker.
    """
    from commands.forked import CommandServer

    with CommandServer() as forks:
        yield forks


@pytest.fixture(autouse=True)
def _torch_begins_alike() -> Iterator[None]:
    """A test that draws without a seed draws the same numbers whatever ran before it: red is the
    change's fault.

    And a run turns torch's deterministic mode on for its process; a graph that was captured without
    it is then none.
    """
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)
    yield
    if (
        torch := sys.modules.get("torch")
    ) is not None and torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.fixture(autouse=True)
def _signals_are_handled_as_before() -> Iterator[None]:
    """A handler that a test left behind would end whatever test a signal reaches next.

    A command that was interrupted leaves one on purpose: its process is about to end.
    """
    before = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def pytest_collection_finish() -> None:
    """Leave all that was imported out of the collections to come, each of which would look through
    it.

    And have Dynamo not time its guards, for which it empties the processor's caches after each
    frame that it compiles; and have the seeds of accelerators that are not in use not note from
    where they were set, for which all that was called is looked up, in a test some sixty frames.
    """
    if (guards := sys.modules.get("torch._dynamo.guards")) is not None:
        guards.profile_guard_manager = lambda *_: 0.0
    if "torch" in sys.modules:
        for accelerator in ("cuda", "mtia", "xpu"):
            module = sys.modules[f"torch.{accelerator}"]
            module.traceback = SimpleNamespace(format_stack=list)
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `--night` a date's share of the tests is left.

    Workers take the dearest files first, so that none begins a long one when the others have
    nothing left to do.

    `gpu` tests are skipped where torch sees no CUDA device; torch is asked only if there are any.
    """
    night = config.getoption("--night")
    if night is not None and config.getoption("--minutes") is None:
        config.hook.pytest_deselected(
            items=[item for item in items if not is_of_night(item.nodeid, night)]
        )
        items[:] = [item for item in items if is_of_night(item.nodeid, night)]
    if config.getoption("--forks") or "PYTEST_XDIST_WORKER" in os.environ:
        cost = measured_cpu_s()
        items.sort(key=lambda item: -cost.get(file_of(item.nodeid), UNKNOWN_CPU_S))
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; torch sees none here"))
