"""Run: pytest tests/sweeps/test_ranks.py (a sweep whose members are shared out to several
processes).
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from commands.forked import CommandServer
from commands.inputs import TINY, newest, over, with_texts
from distributed.launched import Torchrun
from monograph.sweeps.spec import MemberGroup, spread_rounds

SETTINGS = over(
    TINY, "optim.name=adamw", "model.hidden_size=16,32", "train.seed=0,1", "train.updates=40"
)


@pytest.mark.slow
def test_ranks_train_the_members_that_one_process_trains(tmp_path: Path) -> None:
    """To the same bits, on more ranks than there are members, one of which is killed once."""
    with_texts(tmp_path)
    with CommandServer() as server:
        alone = server.run(tmp_path, "sweep", *SETTINGS, "--out", "alone", "--json")
    assert alone.code == 0, alone.err
    launch = Torchrun(5, tmp_path, "sweep", *SETTINGS, "--out", "shared", "--json", restarts=2)
    launch.until(lambda: any(tmp_path.glob("shared/members/*/metrics.jsonl")))
    os.kill(launch.workers()[1], signal.SIGKILL)
    assert launch.wait() == 0, launch.err.read_text()
    one, many = json.loads(alone.out), json.loads(launch.out.read_text())
    assert [member["eval_loss"] for member in one["members"]] == [
        member["eval_loss"] for member in many["members"]
    ]
    assert one["best"]["member"] == many["best"]["member"]
    for member in range(4):
        first, second = (
            newest(tmp_path / name / f"members/{member:03d}") for name in ("alone", "shared")
        )
        for file in ("model.safetensors", "optimizer.safetensors"):
            assert (first / file).read_bytes() == (second / file).read_bytes(), (member, file)


@pytest.mark.parametrize(
    ("rounds", "ranks", "found"),
    [
        ([[16]], 2, [[8, 8]]),
        ([[5], [2]], 3, [[3, 2], [2]]),
        ([[4, 4], [1]], 2, [[4, 4], [1]]),
        ([[2]], 8, [[1, 1]]),
    ],
)
def test_rounds_are_cut_until_every_rank_has_one(
    rounds: list[list[int]], ranks: int, found: list[list[int]]
) -> None:
    groups = [MemberGroup([], {}, round_sizes=[*each]) for each in rounds]
    spread_rounds(groups, ranks)
    assert [group.round_sizes for group in groups] == found
