"""Run: pytest -m slow tests/distributed/test_killed.py (twenty kills on two and on four ranks)

Ranks that are killed and started again by torchrun end in the bits of a run that was never killed.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from clocks import HANG_S
from commands.inputs import TINY, newest, over, rows, with_texts
from distributed.launched import Torchrun

UPDATES = 60
ARGUMENTS = over(TINY, f"train.updates={UPDATES}", "train.save_every=1", "optim.name=adamw")
KINDS = ["fsdp", "ddp"]
CASES = [(size, kind, 20) for size in (2, 4) for kind in KINDS]


def bits(run: Path) -> dict[str, Any]:
    files = {path.name: path.read_bytes() for path in newest(run).glob("*.safetensors")}
    losses = [(row["update"], row["train_loss"], row["grad_norm"]) for row in rows(run)]
    return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()} | {"losses": losses}


@pytest.mark.slow  # by day tests/laws/test_sharded_is_single.py starts ranks anew
@pytest.mark.parametrize(("size", "kind", "kills"), CASES)
def test_killed_ranks_end_in_the_same_bits(size: int, kind: str, kills: int, tmp_path: Path) -> None:
    with_texts(tmp_path)
    arguments = ["train", *ARGUMENTS, f"train.parallel={kind}", "--out"]
    assert Torchrun(size, tmp_path, *arguments, "whole").wait() == 0
    draws, moments = random.Random(f"{size} {kind}"), list[float]()
    for number in itertools.count():
        if len(moments) >= kills:  # a machine may be so fast that a run ends before
            break
        name = f"killed-{number}"
        launch = Torchrun(size, tmp_path, *arguments, name, restarts=2 * kills)
        moments += kill(launch, size, kills - len(moments), draws)
        assert launch.wait() == 0, launch.err.read_text()[-4000:]
        assert bits(tmp_path / name) == bits(tmp_path / "whole"), moments


def kill(launch: Torchrun, size: int, kills: int, draws: random.Random) -> list[float]:
    """Kill a rank in every attempt, some seconds after its beginning, until the run ends; after how many each."""
    moments, seen, began = list[float](), list[int](), time.monotonic()
    delay, end = draws.uniform(0.5, 9), began + HANG_S
    while len(moments) < kills and launch.process.poll() is None and time.monotonic() < end:
        time.sleep(0.02)
        workers = launch.workers()
        if len(workers) == size and workers != seen:  # a new attempt
            began, seen, delay = time.monotonic(), workers, draws.uniform(0.5, 9)
        if seen and time.monotonic() - began > delay:
            with suppress(ProcessLookupError):
                os.kill(draws.choice(seen), signal.SIGKILL)
                moments.append(round(delay, 1))
            seen = []
    return moments
