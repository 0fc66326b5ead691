"""Engines whose micro-steps are called or replayed, and how their results are compared: to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from batches import tiny_llama
from monograph.graph.capture import replayed as as_replayed
from monograph.graph.precision import Precision
from monograph.laws.comparisons import differing, outcome
from monograph.loss import TokenLoss
from monograph.optim import AdamW
from monograph.resident import Resident
from tape import Tape

ROWS = 6


def engine(model=None, *, micro_batch=2, precision="fp32", policy=None, loss=None, **states):
    # Products in fp8 need a vocabulary that is a multiple of 16.
    vocabulary = {"vocab_size": 64} if precision == "fp8_head" else {}
    model = model or tiny_llama(num_hidden_layers=1, **vocabulary)
    return Resident(
        model, loss=loss or TokenLoss(), optim=AdamW(lr=1e-2, **states), clip=0.5,
        precision=Precision(precision), remat=policy, micro_batch=micro_batch,
    )  # fmt: skip


def replaying(made, lines=None):
    """The engine, its micro-step replayed without being compiled before."""
    step = made.step
    step.announce = lines.append if lines is not None else pytest.fail
    step.recorder = Tape()
    step.micro_step = as_replayed(step)
    return made


def trained(made, windows, between=lambda engine, index: None):
    """All that the windows' updates leave."""
    torch.manual_seed(0)
    updates = []
    for index, window in enumerate(windows):
        made.accumulate(window)
        updates.append(made.update())
        between(made, index)
    return outcome(made.state(), updates)


def assert_same_bits(found, expected):
    """Of an update without targets the loss is NaN; nothing else may be."""
    assert not differing(found, expected, equal_nan=True)
    assert not [
        name for name, tensor in found.items() if tensor.isnan().any() and "update" not in name
    ]


def check(make, windows, **options):
    """Called and replayed give the same, and most micro-steps were replayed."""
    expected = trained(make(), windows, **options)
    made = replaying(make())
    assert_same_bits(trained(made, windows, **options), expected)
    assert made.step.recorder.replays > made.step.recorder.called
    return made


def windows_of(batch, count=3, rows=ROWS):
    return [batch(rows, seed=seed) for seed in range(count)]


class Moving(nn.Module):
    """Random numbers of the device, and buffers that move."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(61, 16), nn.BatchNorm1d(16)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(16, 61)

    def forward(self, tokens):
        return self.head(self.drop(self.norm(self.embed(tokens).flatten(0, 1))))


def cross_entropy(model, batch):
    targets = batch["targets"].flatten()
    logits = model(batch["tokens"])
    return nn.functional.cross_entropy(logits, targets, reduction="sum"), (targets != -100).sum()


class Reads(TokenLoss):
    """A loss by whose value the host decides."""

    def __call__(self, model, batch):
        total, count = super().__call__(model, batch)
        return total * (2.0 if total.item() > 0 else 1.0), count
