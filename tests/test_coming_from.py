"""Run: pytest -m slow tests/test_coming_from.py (docs/coming_from.md: what it says is the same run
is the same run)
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

import monograph as mono
from commands.forked import CommandServer
from commands.inputs import over
from monograph.text.tokenizer import Tokenizer
from pages import files
from scripts import ROOT

PAGE = (ROOT / "docs/coming_from.md").read_text()
UPDATES, ROWS, MICRO, LENGTH = 12, 8, 2, 64
RATE = 1e-3  # so large that a wrong decay, beta or schedule shows in a few updates


def command(section: str) -> list[str]:
    """The first command of a section, made small; what the page says of rates and schedules stays."""
    [text] = re.findall(rf"^## {section}$(.*?)(?=^## |\Z)", PAGE, re.S | re.M)
    words = shlex.split(re.findall(r"^monograph (.*)$", text.replace("\\\n", ""), re.M)[0])
    return over(
        [word for word in words if not word.startswith("train.epochs")], f"train.updates={UPDATES}",
        f"train.tokens_per_update={ROWS * LENGTH}", f"train.micro_batch={MICRO}", f"data.sequence_length={LENGTH}",
        "data.held_out=0", f"optim.lr={RATE}", "train.compile=none", "train.precision=fp32", "train.seed=0",
    )  # fmt: skip


def examples(here: Path) -> list[dict[str, Any]]:
    """The rows of the run's updates in their order, as Trainer takes them: targets are shifted by
    the model.
    """
    data = mono.corpus(
        here / "my_texts",
        tokenizer=here / "FOLDER",
        sequence_length=LENGTH,
        held_out=0,
        packing="padded",
    )
    windows = data.batches(tokens_per_update=ROWS * LENGTH, seed=0)
    found = []
    for _ in range(UPDATES):
        window = next(windows)
        for tokens, targets in zip(window["tokens"], window["targets"], strict=True):
            there = int((targets != -100).sum())
            row = torch.zeros(LENGTH + 1, dtype=torch.long)
            row[: there + 1] = torch.cat([tokens[:there], targets[there - 1 : there]])
            mask = torch.arange(LENGTH + 1) <= there
            found.append(
                {
                    "input_ids": row,
                    "attention_mask": mask.long(),
                    "labels": row.masked_fill(~mask, -100),
                }
            )
    return found


@pytest.mark.slow(reason="a run of transformers' Trainer")
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)
@pytest.mark.parametrize(
    "changed", [{}, {"weight_decay": 0.1}, {"lr_scheduler_type": "constant"}], ids=str
)
def test_a_run_of_trainers_is_that_run(
    server: CommandServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any]
) -> None:
    """Losses and gradient norms of every update: 1e-5 relative in fp32, though rows have different
    lengths.
    """
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    files(tmp_path)
    for number in range(8):
        text = f"{number}: the quick brown fox jumps.\n" * (1 + number)
        (tmp_path / "my_texts" / f"{number}.txt").write_text(text)
    tokenizer = Tokenizer.bytes()
    config = mono.LlamaConfig.preset(
        "nano", vocab_size=tokenizer.vocab_size, max_position_embeddings=LENGTH + 1
    )
    mono.save(mono.Llama(config, seed=0), tmp_path / "FOLDER", tokenizer)

    ours = {
        "weight_decay": "optim.weight_decay=0.1",
        "lr_scheduler_type": "optim.schedule=constant",
    }
    words = over(command("Trainer"), *(ours[key] for key in changed))
    if "optim.schedule=constant" in words:  # a rate that never falls has no lowest one
        words.remove("optim.min_lr_ratio=0")
    done = server.run(tmp_path, *words, "--out", "run", figures=0)
    assert done.code == 0, done.err
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "train_loss" in row]

    settings: dict[str, Any] = {
        "output_dir": str(tmp_path / "theirs"), "max_steps": UPDATES, "per_device_train_batch_size": MICRO,
        "gradient_accumulation_steps": ROWS // MICRO, "learning_rate": RATE, "lr_scheduler_type": "cosine",
        "use_cpu": True, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
    }  # fmt: skip
    trainer = transformers.Trainer(
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "FOLDER", dtype=torch.float32),
        transformers.TrainingArguments(**settings | changed),
        train_dataset=examples(tmp_path),
    )
    # The rows come in the order of the run.
    monkeypatch.setattr(trainer, "_get_train_sampler", lambda *_: None)
    trainer.train()
    theirs = [row for row in trainer.state.log_history if "grad_norm" in row]
    assert len(rows) == len(theirs) == UPDATES
    for mine, other in zip(rows, theirs, strict=True):
        assert mine["train_loss"] == pytest.approx(other["loss"], rel=1e-5), (mine, other)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4), (mine, other)
        assert mine["lr"] == pytest.approx(other["learning_rate"], rel=1e-6, abs=1e-12), (
            mine,
            other,
        )
