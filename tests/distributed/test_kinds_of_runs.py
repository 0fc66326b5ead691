"""Run: pytest tests/distributed/test_kinds_of_runs.py (law 13 for runs on answers, of adapters, streamed)."""

from __future__ import annotations

from pathlib import Path

import pytest

from commands.forked import CommandServer
from commands.inputs import TINY, over, rows, with_texts
from commands.test_lora import LORA
from commands.test_preferences import RUN as COMPARED
from commands.test_rewards import RUN as REWARDED
from distributed.launched import ranks
from laws.resumed import write_inputs

TIMES = {"tokens_per_s", "wall_s", "drawn_s", "scored_s", "forward_s", "backward_s", "optimizer_s"}
COUNTED = """
def score(prompt, answer, record):
    print(end=".", file=open("calls", "a"))
    return answer.count("e")
"""
CASES = {
    "rewards": (over(REWARDED, "rl.kl=k3:0.1", "rl.updates=2"), "ddp", "reward"),
    "an odd number of answers": (
        over(REWARDED, "rl.prompts=1", "train.updates=2", "rl.reward=counted.py:score"),
        "ddp",
        "reward",
    ),
    "pairs, ddp": (over(COMPARED, "train.micro_batch=1"), "ddp", "accuracy"),
    "pairs, fsdp": (over(COMPARED, "optim.name=adamw"), "fsdp", "accuracy"),
    "adapters on nf4": (over(LORA, "lora.base=nf4", "train.updates=3"), "fsdp", "loss"),
    "streaming": (over(TINY, "train.memory=stream", "model.num_hidden_layers=3"), "ddp", "loss"),
    "judged answers": (over(COMPARED[1:], "data.source=labelled.jsonl", "train.updates=3"), "ddp", "accuracy"),
}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_make_the_run_that_one_makes(case: str, server: CommandServer, tmp_path: Path) -> None:
    """Draws, rewards, references, figures: each number of the log but times, to the rounding of sums."""
    write_inputs(tmp_path)
    (tmp_path / "counted.py").write_text(COUNTED)
    if not (tmp_path / "texts").exists():
        with_texts(tmp_path)
    settings, parallel, figure = CASES[case]
    assert server.run(tmp_path, "train", *settings, "--out", "alone", figures=0).code == 0
    calls = tmp_path / "calls"
    called = len(calls.read_text()) if calls.exists() else 0
    done = ranks(server, tmp_path, 2, "train", *settings, f"train.parallel={parallel}", "--out", "shared")
    assert not any(each.code for each in done), done
    assert not called or len(calls.read_text()) == 2 * called, "an answer is rewarded once"
    for key in ("train_loss", f"eval_{figure}"):
        alone, shared = (rows(tmp_path / name, key) for name in ("alone", "shared"))
        assert len(alone) == len(shared) > 1
        for one, other in zip(alone, shared, strict=True):
            assert one.keys() == other.keys()
            for name in one.keys() - TIMES:
                assert one[name] is other[name] is None or one[name] == pytest.approx(other[name], 1e-5, 1e-6), name
