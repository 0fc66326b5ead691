"""Run: pytest tests/distributed/test_kinds_of_runs.py (law 13: runs on answers, of adapters,
streamed; slow: hsdp)
"""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file

from commands.forked import CommandServer
from commands.inputs import TINY, newest, over, rows, with_texts
from commands.test_lora import LORA
from commands.test_preferences import RUN as COMPARED
from commands.test_rewards import RUN as REWARDED
from distributed.launched import ranks
from laws.resumed import write_inputs
from monograph.laws.comparisons import relative_error
from monograph.session.objectives.rewards import RewardTask
from monograph.step.parts import PARTS
from rewarded import OPTIONS, prompts

TIMES = {"tokens_per_s", "wall_s", "drawn_s", "scored_s", *(f"{part}_s" for part in PARTS)}
COUNTED = """
def score(prompt, answer, record):
    print(end=".", file=open("calls", "a"))
    return answer.count("e")
"""
CASES = {
    "rewards": (over(REWARDED, "rl.kl=k3", "rl.kl_coef=0.1", "rl.updates=2"), "ddp", "reward"),
    "rewards, fsdp": (
        over(REWARDED, "rl.kl=k2", "rl.kl_coef=0.1", "lora.rank=4", "lora.base=nf4"),
        "fsdp",
        "reward",
    ),
    "rewards, hsdp": (
        over(REWARDED, "rl.kl=k3", "rl.kl_coef=0.1", "rl.updates=2"),
        "hsdp",
        "reward",
    ),
    "an odd number of answers": (
        over(REWARDED, "rl.prompts=1", "train.updates=2", "rl.reward=counted.py:score"),
        "ddp",
        "reward",
    ),
    "pairs, ddp": (over(COMPARED, "train.micro_batch=1", "train.updates=3"), "ddp", "accuracy"),
    "pairs, fsdp": (over(COMPARED, "optim.name=adamw"), "fsdp", "accuracy"),
    "adapters on nf4": (over(LORA, "lora.base=nf4", "train.updates=3"), "fsdp", "loss"),
    "a head, ddp": (over(TINY, "model.mtp_num_hidden_layers=1"), "ddp", "loss"),
    "a head, fsdp": (over(TINY, "model.mtp_num_hidden_layers=1"), "fsdp", "loss"),
    "streaming": (over(TINY, "train.memory=stream", "model.num_hidden_layers=3"), "ddp", "loss"),
    "judged answers": (
        over(COMPARED[1:], "data.source=labelled.jsonl", "train.updates=3"),
        "ddp",
        "accuracy",
    ),
}


# Ranks that draw, ranks that hold rows, and ranks with parts of an update stay by day.
SLOW = {
    "rewards, hsdp",
    "rewards, fsdp",
    "rewards",
    "pairs, fsdp",
    "adapters on nf4",
    "a head, fsdp",
    "streaming",
    "judged answers",
}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.slow if c in SLOW else ()) for c in CASES]
)
def test_ranks_make_the_run_that_one_makes(
    case: str, server: CommandServer, tmp_path: Path
) -> None:
    """Draws, rewards, references, figures: each number of the log but times, to the rounding of
    sums.

    Under hsdp four ranks are two machines.
    """
    write_inputs(tmp_path)
    (tmp_path / "counted.py").write_text(COUNTED)
    if not (tmp_path / "texts").exists():
        with_texts(tmp_path)
    settings, parallel, figure = CASES[case]
    assert server.run(tmp_path, "train", *settings, "--out", "alone", figures=0).code == 0
    calls = tmp_path / "calls"
    called = len(calls.read_text()) if calls.exists() else 0
    typed = ("train", *settings, f"train.parallel={parallel}", "--out", "shared")
    done = ranks(server, tmp_path, 4 if parallel == "hsdp" else 2, *typed, LOCAL_WORLD_SIZE="2")
    assert not any(each.code for each in done), done
    assert not called or len(calls.read_text()) == 2 * called, "an answer is rewarded once"
    for key in ("train_loss", f"eval_{figure}"):
        alone, shared = (rows(tmp_path / name, key) for name in ("alone", "shared"))
        assert len(alone) == len(shared) > 1
        for one, other in zip(alone, shared, strict=True):
            assert one.keys() == other.keys()
            for name in one.keys() - TIMES:
                assert one[name] is other[name] is None or one[name] == pytest.approx(
                    other[name], 1e-5, 1e-6
                ), name
    stored = [tmp_path / name / "reference.safetensors" for name in ("alone", "shared")]
    alone, shared = (
        load_file(newest(tmp_path / name) / "model.safetensors") for name in ("alone", "shared")
    )
    for name in alone:
        assert relative_error(shared[name].double(), alone[name].double()) < 1e-5, name
    assert (
        not stored[0].exists()
        or case.startswith("pairs")
        or stored[0].read_bytes() == stored[1].read_bytes()
    )


@pytest.mark.slow
def test_ranks_that_hold_rows_take_up_the_reference_of_one_process(
    server: CommandServer, tmp_path: Path
) -> None:
    """A run that one process began goes on under fsdp, and ends where the whole run of one process
    does.
    """
    write_inputs(tmp_path)
    for name in ("alone", "begun"):
        done = server.run(
            tmp_path,
            "train",
            *over(REWARDED, "rl.kl=k3", "rl.kl_coef=0.5"),
            "--out",
            name,
            figures=0,
        )
        assert done.code == 0, done.err
    shutil.rmtree(newest(tmp_path / "begun"))
    resumed = ranks(server, tmp_path, 2, "train", "--resume", "begun", "train.parallel=fsdp")
    assert not any(each.code for each in resumed), resumed
    for key in ("train_loss", "eval_reward"):
        for one, other in zip(
            *(rows(tmp_path / name, key) for name in ("alone", "begun")), strict=True
        ):
            for name in one.keys() - TIMES:
                assert one[name] == pytest.approx(other[name], 1e-5, 1e-6), name


def test_ranks_that_share_drawing_leave_the_calibration_of_one_process_alone() -> None:
    """Each draws a part of the answers, so the seconds say nothing about one that draws all."""
    task: Any = SimpleNamespace(data=prompts("a"), drawer=SimpleNamespace(options=OPTIONS))
    task.world = SimpleNamespace(alone=False)
    RewardTask.store_measurements(task)  # which would ask for the run's rows, and there is no run
