"""Run: pytest tests/test_forks.py (tests that are collected once and run in forks)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CONFTEST = """
import os
import pytest
from forks import Forks

def pytest_configure(config):
    config.pluginmanager.register(Forks(2))

@pytest.fixture(scope="session")
def resource():
    yield
    print("given back by", os.getpid(), file=open("log", "a"))

@pytest.fixture(autouse=True)
def logged(resource, request):
    print("ran", request.node.nodeid, os.getpid(), file=open("log", "a"))
"""
MEETING = """
import os
import time

def begin(name):
    open(name, "w").close()

def wait(name):
    end = time.monotonic() + 30
    while not os.path.exists(name):
        assert time.monotonic() < end, name
        time.sleep(0.005)
"""
# Tests of two files wait for each other, so that each worker has one of them at the same time: the
# first ones, as a worker takes its next file when its last test begins.
FILES = {
    "test_a.py": """
from meeting import begin, wait

def test_first():
    begin("first")
    wait("second")

def test_speaks():
    wait("listening")
    print("said by another")
    begin("said")
    wait("failing")
""",
    "test_b.py": """
import os
from meeting import begin, wait

def test_second():
    begin("second")
    wait("first")

def test_fails(tmp_path):
    begin("listening")
    wait("said")
    print("said before it failed")
    begin("failing")
    if os.environ.get("DIES"):
        os._exit(7)
    assert not tmp_path.parent.name.startswith("worker")
""",
    "test_c.py": "def test_third(): pass\n",
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for name, text in {"conftest.py": CONFTEST, "meeting.py": MEETING, **FILES}.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def run(place: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--basetemp", "made"]
    path = os.pathsep.join([str(ROOT / "tests"), str(ROOT / "src")])
    return subprocess.run(
        [*command, "-c", os.devnull, "--rootdir", str(place)],
        cwd=place,
        env={**os.environ, "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
    )


def test_each_test_runs_once_and_is_reported_as_alone(place: Path) -> None:
    done = run(place)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 4 passed" in done.stdout and "FAILED test_b.py::test_fails" in done.stdout
    assert done.stdout.count(" PASSED ") == 4, "by the process that was called alone"
    assert done.stdout.count("said before it failed\n") == 1
    assert "said by another" not in done.stdout
    log = (place / "log").read_text()
    ran = re.findall(r"^ran (\S+) (\d+)$", log, re.MULTILINE)
    assert len(ran) == len(dict(ran)) == 5
    workers = {pid for _, pid in ran}
    assert len(workers) == 2
    assert sorted(re.findall(r"given back by (\d+)", log)) == sorted(workers)


def test_a_worker_that_dies_ends_all_and_is_said(place: Path) -> None:
    done = run(place, DIES="1")
    assert done.returncode == pytest.ExitCode.INTERRUPTED, done.stdout + done.stderr
    assert "a worker ended with exit code 7 while it ran test_b.py::test_fails" in done.stdout
