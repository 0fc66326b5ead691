"""Run: pytest -m slow tests/distributed/test_killed.py (twenty kills in ten kinds of runs)

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
from commands.inputs import TINY, newest, over, rows
from commands.test_lora import LORA
from commands.test_preferences import RUN as COMPARED
from commands.test_rewards import RUN as REWARDED
from distributed.launched import Torchrun, free_port
from laws.resumed import TIMES, write_inputs

KILLS = 2  # of each kind
ADAMW = over(TINY, "optim.name=adamw")
# How many ranks, on how many machines, and what they train.
CASES: dict[str, tuple[int, int, list[str], str]] = {
    "fsdp on 2": (2, 1, ADAMW, "fsdp"),
    "fsdp on 4": (4, 1, ADAMW, "fsdp"),
    "ddp on 2": (2, 1, ADAMW, "ddp"),
    "ddp on 4": (4, 1, ADAMW, "ddp"),
    "fsdp, Muon": (2, 1, TINY, "fsdp"),
    "fsdp, adapters on nf4": (2, 1, over(LORA, "lora.base=nf4"), "fsdp"),
    "hsdp on 2 x 2": (4, 2, TINY, "hsdp"),
    "ddp, streaming": (2, 1, over(TINY, "train.memory=stream", "model.num_hidden_layers=3"), "ddp"),
    "fsdp, preferences": (2, 1, COMPARED, "fsdp"),
    "ddp, rewards": (2, 1, REWARDED, "ddp"),
}


def bits(run: Path) -> dict[str, Any]:
    """Weights, moments, and the log but for times."""
    files = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in newest(run).glob("*.safetensors")
    }
    logged = [*rows(run), *rows(run, "eval_loss"), *rows(run, "eval_reward")]
    return files | {
        "log": [{key: value for key, value in row.items() if key not in TIMES} for row in logged]
    }


class Launch:
    """A run under a torchrun for each machine, which are all this one."""

    def __init__(self, size: int, machines: int, folder: Path, *arguments: str) -> None:
        """Start it; a restart goes on."""
        meeting, variables = ["--standalone"], dict[str, str]()
        if machines > 1:  # as docs/distributed.md says it
            meeting = [
                f"--nnodes={machines}",
                "--rdzv-backend=c10d",
                f"--rdzv-endpoint=127.0.0.1:{free_port()}",
            ]
            variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        self.size, self.launchers = size, list[Torchrun]()
        for number in range(machines):
            options: dict[str, Any] = {
                "restarts": 9 * KILLS,
                "meeting": meeting,
                "name": f"machine-{number}",
            }
            self.launchers.append(
                Torchrun(size // machines, folder, *arguments, **options, **variables)
            )

    def workers(self) -> list[int]:
        return [pid for each in self.launchers for pid in each.workers()]

    def runs(self) -> bool:
        return all(each.process.poll() is None for each in self.launchers)

    def end(self) -> None:
        try:
            codes = [each.wait() for each in self.launchers]
        finally:
            for left in [each for each in self.launchers if each.process.poll() is None]:
                left.stop()
        assert not any(codes), "\n".join(each.err.read_text()[-4000:] for each in self.launchers)


@pytest.mark.slow  # by day tests/laws/test_sharded_is_single.py starts ranks anew
@pytest.mark.parametrize("case", CASES)
def test_killed_ranks_end_in_the_same_bits(case: str, tmp_path: Path) -> None:
    write_inputs(tmp_path)
    size, machines, settings, parallel = CASES[case]
    arguments = over(
        settings, "train.updates=60", "train.save_every=1", f"train.parallel={parallel}"
    )
    Launch(size, machines, tmp_path, "train", *arguments, "--out", "whole").end()
    draws, moments = random.Random(case), list[float]()
    for number in itertools.count():
        if len(moments) >= KILLS:  # a machine may be so fast that a run ends before
            break
        launch = Launch(size, machines, tmp_path, "train", *arguments, "--out", f"killed-{number}")
        moments += kill(launch, KILLS - len(moments), draws)
        launch.end()
        assert bits(tmp_path / f"killed-{number}") == bits(tmp_path / "whole"), moments
    print(f"{case}: killed after {moments} s")


def kill(launch: Launch, kills: int, draws: random.Random) -> list[float]:
    """Kill a rank in every attempt, some seconds after its beginning, until the run ends; after how
    many each.
    """
    moments, seen, began = list[float](), list[int](), time.monotonic()
    delay, end = draws.uniform(0.5, 9), began + HANG_S
    while len(moments) < kills and launch.runs() and time.monotonic() < end:
        time.sleep(0.02)
        workers = launch.workers()
        if len(workers) == launch.size and workers != seen:  # a new attempt
            began, seen, delay = time.monotonic(), workers, draws.uniform(0.5, 9)
        if seen and time.monotonic() - began > delay:
            with suppress(ProcessLookupError):
                os.kill(draws.choice(seen), signal.SIGKILL)
                moments.append(round(delay, 1))
            seen = []
    return moments
