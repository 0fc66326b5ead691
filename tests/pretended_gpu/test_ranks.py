"""Run: make gpu-less ARGS=tests/pretended_gpu/test_ranks.py (DDP and FSDP2 on two cards are one
process on one card)

Each rank is a process with a card of its own. Collectives take NCCL's place and streams
(collectives.py).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clocks import HANG_S
from commands.forked import CommandServer
from commands.inputs import TINY, newest, over, rows, with_texts
from distributed.launched import ranks
from laws.test_sharded_is_single import BOUND, run

LAW, COMMAND = "pretended_gpu.ranks:law", "pretended_gpu.ranks:command"
SETTINGS = over(
    TINY, "optim.name=adamw", "train.updates=4", "train.save_every=2", "train.micro_batch=1"
)


@pytest.fixture(scope="module")
def server() -> Iterator[CommandServer]:
    """Its forks have four cards: each process counts them when it first uses one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PRETENDED_CARDS", "4")
        with CommandServer() as forks:
            yield forks


@pytest.mark.parametrize("program", ["collective", "in_any_order"])
def test_collectives_obey_streams(program: str, server: CommandServer, tmp_path: Path) -> None:
    done = ranks(server, tmp_path, 2, call=f"pretended_gpu.ranks:{program}")
    assert not any(each.code for each in done), done


def test_a_rank_takes_the_memory_that_is_planned(server: CommandServer, tmp_path: Path) -> None:
    """Law 12: `ddp` one more copy of the gradients; `fsdp` holds a share of weights, gradients and
    moments.
    """
    done = ranks(server, tmp_path, 2, call="pretended_gpu.ranks:memory")
    assert not any(each.code for each in done), done


def test_two_updates_are_those_of_one_process(server: CommandServer, tmp_path: Path) -> None:
    """In fp32, bf16 and fp16, and with all that may stand beside `ddp` and `fsdp`; each rank only
    on its own card.
    """
    made = run(server, "combinations", 2, tmp_path, call=LAW)
    found = made["combinations"] | made["streamed"]
    assert {"ddp fp32 torch.float32", "fsdp bf16 torch.float32"} < found.keys()
    for case, errors in found.items():
        assert max(errors.values()) <= BOUND[case.split()[-1]], (case, errors)


def test_ranks_halve_the_micro_batch_together(server: CommandServer, tmp_path: Path) -> None:
    for where, found in run(server, "halved", 2, tmp_path, call=LAW)["halved"].items():
        assert found["rows"] == 1 and (
            found["ended"] if where == "one row" else found["error"] <= 1e-12
        ), where


def test_rows_that_each_machine_shares_out(server: CommandServer, tmp_path: Path) -> None:
    found = run(server, "by_machine", 4, tmp_path, tmp_path, call=LAW, LOCAL_WORLD_SIZE="2")
    assert (
        max(found["errors"]["hsdp Muon"].values()) <= 1e-12
        and found["same"]
        and found["share"] == 0.5
    )


def test_a_checkpoint_of_two_ranks_is_taken_up_by_one_and_by_two(
    server: CommandServer, tmp_path: Path
) -> None:
    two, one, again = (
        run(server, "saved", size, tmp_path, tmp_path, call=LAW) for size in (2, 1, 2)
    )
    assert two == one == again and len(two) == 6


def test_ranks_that_begin_anew_go_on_in_the_same_bits(
    server: CommandServer, tmp_path: Path
) -> None:
    assert run(server, "restarted", 2, tmp_path, call=LAW)["restarted"] == {
        "ddp": [True] * 2,
        "fsdp": [True] * 2,
    }


@pytest.fixture(scope="module")
def alone(server: CommandServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process on one card, in a folder with its texts."""
    folder = with_texts(tmp_path_factory.mktemp("runs"))
    [done] = ranks(server, folder, 1, "train", *SETTINGS, "--out", "alone", call=COMMAND)
    assert done.code == 0, done.err
    return folder / "alone"


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_the_command_line_under_torchrun(parallel: str, alone: Path, server: CommandServer) -> None:
    """It ends with 0 and one card's losses; what it saved is taken up by two ranks, in bits, and by
    one.
    """
    folder, launcher = (
        alone.parent,
        ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    )
    settings = [*SETTINGS, f"train.parallel={parallel}", "--out", parallel]
    done = subprocess.run(
        [sys.executable, "-m", *launcher, "-m", "pretended_gpu", "-m", "monograph", "train", *settings],
        cwd=folder, env=os.environ | {"PRETENDED_CARDS": "2"}, capture_output=True, text=True, timeout=HANG_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert losses(folder / parallel) == pytest.approx(losses(alone), rel=1e-6)
    for size, way in ((2, parallel), (1, "none")):
        resumed = shutil.copytree(folder / parallel, folder / f"{parallel}, {size}")
        shutil.rmtree(newest(resumed))
        every = ranks(
            server,
            folder,
            size,
            "train",
            "--resume",
            resumed,
            f"train.parallel={way}",
            call=COMMAND,
        )
        assert not any(each.code for each in every), every
        assert losses(resumed) == pytest.approx(
            losses(folder / parallel), rel=0 if size == 2 else 1e-6
        )
        assert newest(resumed).name == newest(alone).name
    assert same(folder / parallel, folder / f"{parallel}, 2")


def losses(run: Path) -> list[float]:
    return [row["train_loss"] for row in rows(run)]


def same(*runs: Path) -> bool:
    """Whether their newest weights are the same bits."""
    one, other = ((newest(run) / "model.safetensors").read_bytes() for run in runs)
    return one == other
