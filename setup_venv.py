"""Makes `.venv` with the tested packages, saying what it does; `make train` and `make test` call
it.

Instant when nothing changed. Standard library only, since nothing is installed yet.

Usage: python3 setup_venv.py [dev]        (dev: what the tests need, too)
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import queue
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "monograph-setup.json"
LOG = VENV / "monograph-setup.log"
TERMINAL = sys.stderr.isatty()
WIDTH = 74


def main() -> int:
    """Returns the exit code: 0 ready, 1 an installation failed, 2 this Python cannot be used."""
    if importlib.util.find_spec("ensurepip") is None:
        say(
            "this Python cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv"
        )
        return 2
    extra = "dev" if "dev" in sys.argv[1:] else ""
    wanted, have = fingerprint(), stamp()
    if (
        have.get("fingerprint") == wanted
        and have.get("extra") in (extra, "dev")
        and made_by_this_python()
    ):
        return 0
    install(extra)
    # Written last, so that an interrupted setup simply runs again.
    STAMP.write_text(json.dumps({"fingerprint": wanted, "extra": extra}))
    return 0


def install(extra: str) -> None:
    """Three visible steps."""
    gpu = nvidia()
    say(gpu or "no NVIDIA GPU found (no nvidia-smi); everything also runs on a CPU")
    # pip would compile on one core and wait for it, also the half of all code that nobody imports.
    pip = [str(PYTHON), "-m", "pip", "install", "--no-compile", "--constraint", "constraints.txt"]
    with Step(f".venv, Python {sys.version_info[0]}.{sys.version_info[1]}") as step:
        if not made_by_this_python():
            emptied(VENV)
            step.doing = "making the environment"
            step.run([sys.executable, "-m", "venv", str(VENV)])
        # A recent pip, because only that one tells a program that reads its output how far a
        # download is.
        step.run([*pip, "pip"])
    pip += ["--progress-bar", "raw"]
    with Step("torch") as step:
        step.run([*pip, "torch", "setuptools"])
        step.title = torch_build(step)
    # pip fetches and unpacks the rest on one core; another one compiles torch.
    with compiling(cores=1) as torch_compiler, Step("the rest of constraints.txt") as step:
        # torch brought setuptools, which is all that building this project takes.
        step.run(
            [
                *pip,
                "--no-build-isolation",
                "--editable",
                ".[dev]" if extra else ".[serve,gguf,tensorboard]",
            ]
        )
        step.doing = "compiling"
        step.wait(torch_compiler)
        # Of the many libraries that only tests use, the tests compile what they import.
        if not extra:
            with compiling(cores=0) as compiler:
                step.wait(compiler)
        more = len(step.installed) - 1
        step.title = (
            f"{more} more from constraints.txt, and monograph itself"
            if more > 0
            else "monograph itself"
        )


@contextmanager
def compiling(cores: int) -> Iterator[subprocess.Popen[bytes]]:
    """Compiles what is installed and is not compiled yet, apart from libraries' own tests.

    By one core, or by as many, or by all that there are (0).

    A file that cannot be compiled, such as one for a later Python, is none that is imported, so
    that is no failure.
    """
    (packages,) = (VENV / "lib").glob("python*/site-packages")
    libraries_tests = r"/(tests|testing)/"
    command = [
        str(PYTHON),
        "-m",
        "compileall",
        "-qq",
        "-j",
        str(cores),
        "-x",
        libraries_tests,
        str(packages),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def emptied(folder: Path) -> None:
    """Makes or empties a folder. `venv --clear` would empty it too, but with the log that it is
    writing to.
    """
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        if old.is_dir() and not old.is_symlink():
            shutil.rmtree(old)
        else:
            old.unlink()


def made_by_this_python() -> bool:
    """Whether `.venv` is there, and of the same Python as this one."""
    settings = VENV / "pyvenv.cfg"
    return (
        PYTHON.exists() and settings.exists() and platform.python_version() in settings.read_text()
    )


def torch_build(step: Step) -> str:
    """For example `torch 2.13.0 (CPU build, 190 MB)`."""
    found = next((name for name in step.installed if name.startswith("torch-")), "")
    if not found:
        return "torch is there already"
    version, _, local = found.removeprefix("torch-").partition("+")
    cuda = local.startswith("cu") or any(name.startswith("nvidia") for name in step.installed)
    if nvidia() and not cuda:
        say("a GPU is here, but this package index has torch's CPU build, which does not use it")
    return f"torch {version} ({'CUDA' if cuda else 'CPU'} build{step.torch_size})"


class Step:
    """One line of the transcript: a title, dots, seconds; while it runs, what pip is doing and how
    far it is.
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self.doing = "asking the package index"
        self.torch_size = ""
        self.megabytes = 0.0  # of the packages fetched so far
        self.installed: list[str] = []
        self.start = self.shown = time.monotonic()

    def __enter__(self) -> Step:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            dots = "." * max(3, WIDTH - len(self.title))
            say(f"{self.title} {dots} {time.monotonic() - self.start:.0f} s")

    def run(self, command: list[str]) -> None:
        """Runs a command; what it prints goes to the log, and its end is shown if it fails."""
        lines: queue.Queue[str | None] = queue.Queue()
        tail: list[str] = []
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        threading.Thread(target=pump, args=(process.stdout, lines), daemon=True).start()
        with LOG.open("a") as log:
            while (line := next_line(lines)) is not None:
                if line and not line.startswith("Progress "):
                    log.write(line)
                    tail = [*tail[-11:], line]
                self.read(line)
                self.tick()
        if process.wait():
            say(f"{self.title}: failed")
            sys.stderr.write("".join(tail))
            unreached = re.search(
                r"(?i)connection|timed out|name resolution|max retries", "".join(tail)
            )
            guess = "Is there a network? " if unreached else ""
            say(f"all that was said: .venv/{LOG.name}. {guess}The same command goes on from here")
            raise SystemExit(1)

    def wait(self, process: subprocess.Popen[bytes]) -> None:
        """Waits for a program that prints nothing."""
        while process.poll() is None:
            self.tick()
            time.sleep(0.1)

    def read(self, line: str) -> None:
        """Takes from a line of pip's what it is doing now."""
        if match := re.match(r"Progress (\d+) of (\d+)", line):
            percent = 100 * int(match[1]) // max(1, int(match[2]))
            self.doing = re.sub(r"(, \d+ %)?$", f", {percent} %", self.doing, count=1)
        elif match := re.match(
            r"\s*(?:Downloading|Using cached) (\S+?-\d[^-]*)-\S+ \(([^)]*)\)", line
        ):
            self.doing = f"downloading {match[1]}, {match[2]}"
            self.fetched(match[2])
            if match[1].startswith("torch-"):
                self.torch_size = f", {match[2]}"
        elif match := re.match(r"(Collecting|Processing) (\S+)", line):
            self.collecting(Path(match[2]))
        elif line.startswith("Installing collected packages: "):
            number = line.count(",") + 1
            size = (
                f"{self.megabytes / 1e3:.1f} GB"
                if self.megabytes >= 1e3
                else f"{self.megabytes:.0f} MB"
            )
            self.doing = (
                f"installing {number} package{'' if number == 1 else 's'}, {size} to unpack"
            )
        elif line.startswith("Successfully installed "):
            self.installed += line.split()[2:]

    def fetched(self, size: str) -> None:
        """`size` as pip writes it: "812 bytes", "57 kB", "190.1 MB"."""
        number, _, unit = size.partition(" ")
        self.megabytes += float(number) * {"kB": 1e-3, "MB": 1.0, "GB": 1e3}.get(unit, 1e-6)

    def collecting(self, package: Path) -> None:
        """`package` is a requirement, or the wheel itself where the index is a folder."""
        if package.name.startswith(("nvidia-", "cuda-")) and "CUDA" not in self.title:
            self.title = "torch, CUDA build"
            if not nvidia():
                say(
                    "torch comes as its CUDA build (several GB; it also runs on a CPU): this index has no other"
                )
        elif package.name.startswith("torch-") and package.is_file():
            self.torch_size = f", {package.stat().st_size / 1e6:.0f} MB"
        if package.is_file():
            self.megabytes += package.stat().st_size / 1e6
        self.doing = f"collecting {package.name.partition('-cp')[0]}"

    def tick(self) -> None:
        """Redraws the line on a terminal; elsewhere prints one every 5 s."""
        now = time.monotonic()
        text = f"{self.title}: {self.doing}, {now - self.start:.0f} s"
        if TERMINAL and now - self.shown > 0.2:
            sys.stderr.write("\r\033[Ksetup     " + text[: shutil.get_terminal_size().columns - 11])
            sys.stderr.flush()
        elif not TERMINAL and now - self.shown > 5:
            say(f"  {text}")
        else:
            return
        self.shown = now


def pump(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    """Moves lines to a queue, so that their reader can also wait for the clock; None is the end."""
    with stream:
        for line in stream:
            lines.put(line)
    lines.put(None)


def next_line(lines: queue.Queue[str | None]) -> str | None:
    """The next line, None at the end, or nothing yet after half a second."""
    try:
        return lines.get(timeout=0.5)
    except queue.Empty:
        return ""


def fingerprint() -> str:
    """Changes when a pin, a dependency, the interpreter, the folder or this file changes."""
    parts = [f"{ROOT} {sys.version}".encode()]
    parts += [
        (ROOT / name).read_bytes()
        for name in ("pyproject.toml", "constraints.txt", "setup_venv.py")
    ]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def stamp() -> dict[str, str]:
    """What the last complete setup wrote."""
    try:
        return dict(json.loads(STAMP.read_text()))
    except (OSError, ValueError):
        return {}


def nvidia() -> str:
    """The card and its driver, or nothing where there is no NVIDIA driver."""
    if not shutil.which("nvidia-smi"):
        return ""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    first = subprocess.run(query, capture_output=True, text=True).stdout.strip().partition("\n")[0]
    return first.replace(", ", ", driver ")


def say(text: str) -> None:
    """A line of the transcript that stays, in place of one that is being redrawn."""
    sys.stderr.write(("\r\033[K" if TERMINAL else "") + f"setup     {text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        say("interrupted; run it again, and it goes on")
        sys.exit(130)
