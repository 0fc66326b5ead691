"""Write and read logs in the format of the public speedrun.

A log begins with the code of the run, then has a line of 100 equals signs, the versions and what
`nvidia-smi` says, another such line, and the steps. Source: any log below records/track_1_short of
github.com/KellerJordan/modded-nanogpt.

    step:0/4578 val_loss:10.8258 train_time:0ms step_avg:nanms
    step:1/4578 train_loss:10.8258 train_time:334ms step_avg:334.00ms
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from monograph import __version__
from monograph.errors import DiskFull, InputRefused
from monograph.storage.writing import DISK_ERRORS

RULER = "=" * 100
_STEP = re.compile(
    r"step:(?P<step>\d+)/(?P<steps>\d+)(?: val_loss:(?P<val_loss>\S+))?(?: train_loss:(?P<train_loss>\S+))?"
    r" train_time:(?P<ms>\d+)ms step_avg:(?P<average>\S+)ms"
)


class Step(NamedTuple):
    """A line of a log.

    Attributes:
        step: updates that were made.
        steps: updates of the whole schedule.
        train_ms: milliseconds of training so far.
        val_loss: nats per token of the validation tokens; None: they were not scored.
        train_loss: nats per token of the update's own tokens; None: not said.
    """

    step: int
    steps: int
    train_ms: float
    val_loss: float | None = None
    train_loss: float | None = None

    @property
    def line(self) -> str:
        """Return the line, without its end."""
        average = f"{self.train_ms / self.step:.2f}" if self.step else "nan"
        losses = {"val_loss": self.val_loss, "train_loss": self.train_loss}
        said = [f"{name}:{loss:.4f} " for name, loss in losses.items() if loss is not None]
        return f"step:{self.step}/{self.steps} {''.join(said)}train_time:{self.train_ms:.0f}ms step_avg:{average}ms"


def steps_of(text: str) -> Iterator[Step]:
    """Yield the steps of a log's last part."""
    for line in text.rpartition(RULER)[2].splitlines():
        if found := _STEP.fullmatch(line):
            losses = {name: found[name] and float(found[name]) for name in Step._fields[3:]}
            yield Step(int(found["step"]), int(found["steps"]), float(found["ms"]), **losses)


def head(files: Iterable[Path]) -> str:
    """Return what stands above the steps: the code of the run, versions and the card."""
    code = "".join(f"# {path.name}\n{path.read_text()}\n" for path in files)
    versions = f"Running Monograph {__version__}, pytorch {torch.__version__} compiled for CUDA {torch.version.cuda}"
    return f"{RULER}\n{code}{RULER}\n{versions}\nnvidia-smi:\n{_card()}\n{RULER}\n"


def _card() -> str:
    if shutil.which("nvidia-smi") is None:
        return "there is none"
    done = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=60, check=False)
    return done.stdout


class Log:
    """A log's file, to which lines are added.

    Raises:
        DiskFull: there is no room for a line.
        InputRefused: the file cannot be written, or is shorter than a checkpoint says.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def size_bytes(self) -> int:
        """Return the file's size."""
        return self.path.stat().st_size

    def begin(self, files: Iterable[Path]) -> None:
        """Write the head of a new log."""
        self._write("xb", head(files))

    def add(self, step: Step) -> None:
        """Add a line, and print it."""
        print(step.line, flush=True)
        self._write("ab", step.line + "\n")

    def cut(self, size_bytes: int) -> None:
        """Remove what was written after a checkpoint, as the updates after it are made again."""
        if not self.path.exists() or self.size_bytes < size_bytes:
            raise InputRefused(
                f"{self.path}: is missing or cut off, so the run cannot go on with it"
            )
        os.truncate(self.path, size_bytes)

    def _write(self, mode: str, text: str) -> None:
        try:
            with open(self.path, mode) as file:
                file.write(text.encode())
        except OSError as error:
            if error.errno in DISK_ERRORS:
                raise DiskFull(f"{self.path}: cannot be written: {error.strerror}") from None
            raise InputRefused(f"{self.path}: cannot be written: {error.strerror}") from None
