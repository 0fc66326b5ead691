# Run: pytest tests/commands/test_optimizers.py
"""Optimizers through the command line: what is refused, a module with BatchNorm and a loss that is
not over tokens.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from commands.forked import CommandServer
from commands.inputs import OWN, TINY
from monograph import checkpointing

# Predicts a row's mean token id: one target a row, and batch statistics.
NORMED = """
import torch
from torch import nn

class Normed(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())])
        self.head = nn.Linear(8, 1)

    def forward(self, tokens):
        return self.head(self.blocks[0](self.embed(tokens).mean(1))).squeeze(-1)

def build(vocab_size):
    return Normed(vocab_size)

def loss(model, batch):
    wanted, real = batch["tokens"].float().mean(1) / 100, (batch["targets"] != -100).any(-1)
    return ((model(batch["tokens"]) - wanted).square() * real).sum(), real.sum()
"""
FLAT = """
from torch import nn

def build(vocab_size):
    return nn.Sequential(nn.Embedding(vocab_size, 8), nn.Linear(8, vocab_size))

def loss(model, batch):
    real = batch["targets"] != -100
    return (model(batch["tokens"]).logsumexp(-1) * real).sum(), real.sum()
"""


def test_a_module_with_batch_statistics_and_a_loss_of_its_own(
    server: CommandServer, here: Path
) -> None:
    (here / "own.py").write_text(NORMED)
    options = [
        "model.init=own.py:build",
        "optim.name=muon",
        "optim.ema=0.9",
        "train.micro_batch=2",
        "--json",
    ]
    done = server.run(here, "train", *OWN, *options, "--out", "run", figures=0)
    assert done.code == 0, done.err
    assert "blocks.0.1 normalises over micro-batches of 2 rows, not over the update's 4" in done.err
    trained = json.loads(done.out)
    assert trained["eval_weights"] == "averaged" and trained["eval_bits_per_byte"] is None
    kept = checkpointing.load_newest(here / "run/checkpoints", print)
    assert int(kept.model["blocks.0.1.num_batches_tracked"]) == 8 * 2, (
        "once per micro-batch, the trial's not counted"
    )
    assert "momentum_buffer.blocks.0.0.weight" in kept.optimizer
    again = server.run(here, "evaluate", "run", "--json")
    scored = json.loads(again.out.splitlines()[-1])
    assert (
        scored["loss"] == pytest.approx(trained["eval_loss"], rel=1e-6)
        and "averaged weights" in again.out
    )
    assert not torch.equal(kept.optimizer["ema.head.weight"], kept.model["head.weight"])
    whole = server.run(
        here, "train", *OWN, *options[:3], "train.micro_batch=4", "--out", "whole", figures=0
    )
    assert whole.code == 0 and "normalises" not in whole.err


def test_muon_without_a_block_is_refused_in_one_line(server: CommandServer, here: Path) -> None:
    (here / "own.py").write_text(FLAT)
    done = server.run(
        here, "train", *OWN, "model.init=own.py:build", "optim.name=muon", "--out", "run", figures=0
    )
    assert done.code == 2 and "muon finds no matrix inside a block" in done.err.splitlines()[-1], (
        done.err
    )
    assert not (here / "run").exists()


def test_another_optimizer_cannot_take_up_a_run_s_state(server: CommandServer, here: Path) -> None:
    assert server.run(here, "train", *TINY, "optim.name=adamw", "--out", "a", figures=0).code == 0
    for change, name in (("optim.name=muon", "exp_avg"), ("optim.ema=0.9", "ema")):
        done = server.run(here, "train", "--from", "a", change, "--out", "b", figures=0)
        assert done.code == 3 and f"does not fit: '{name}." in done.err.splitlines()[-1], done.err
    wrong = ("optim.name=sgd", "optim.ema=1", "optim.schedule=linear", "optim.schedule=constant:0",
             "optim.min_lr_ratio=1.5", "optim.state=4bit", "optim.master_weights=maybe")  # fmt: skip
    for line in wrong:
        done = server.run(here, "train", *TINY, line, "--out", "c")
        assert done.code == 2 and line.split("=")[0] in done.err and done.err.count("\n") == 1, (
            done.err
        )
