"""Small inputs for the real command line."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from monograph import checkpointing
from monograph.run.folder import Run


def over(settings: list[str], *others: str) -> list[str]:
    """The settings with others in the place of theirs: a key that is given twice is refused."""
    keys = {other.partition("=")[0] for other in others}
    return [setting for setting in settings if setting.partition("=")[0] not in keys] + list(others)


# A run of a second: two epochs and a half of a few words.
TINY = [
    "texts", "data.tokenizer=bytes", "data.sequence_length=32", "data.held_out=0.2",
    "model.hidden_size=16", "model.num_hidden_layers=1", "model.num_attention_heads=2",
    "train.updates=8", "train.tokens_per_update=128", "train.compile=none", "train.precision=fp32",
    "train.save_every=3",
]  # fmt: skip
ONCE = over(TINY, "train.updates=1")
OWN = [argument for argument in TINY if not argument.startswith("model.")]

# So slow that there is time to stop it, and long enough.
SLOW = """
import time
import torch
from torch import nn

def build(vocab_size):
    return nn.Sequential(nn.Embedding(vocab_size, 8), nn.Linear(8, vocab_size))

def loss(model, batch):
    time.sleep(0.05)
    targets = batch["targets"].flatten()
    logits = model(batch["tokens"]).flatten(0, 1)
    return nn.functional.cross_entropy(logits, targets, reduction="sum"), (targets != -100).sum()
"""
LONG = [
    *over(OWN, "train.updates=400", "train.save_every=200", "model.init=slow.py:build"),
    "--out",
    "run",
]
# The same, but fast, and from its 14th call on its loss is no number.
POISON = SLOW.replace("time.sleep(0.05)", "calls.append(1)").replace(
    "def build", "calls = []\n\ndef build"
)
POISON = POISON.replace(
    'reduction="sum"), (', 'reduction="sum") * (1 if len(calls) < 14 else float("nan")), ('
)


def with_texts(folder: Path) -> Path:
    draws = random.Random(0)
    (folder / "texts").mkdir()
    for number in range(10):
        text = " ".join(draws.choice(["alpha", "beta", "gamma", "delta"]) for _ in range(30))
        (folder / "texts" / f"{number}.txt").write_text(text)
    return folder


def newest(run: Path) -> Path:
    return max((run / "checkpoints").glob("step-*"))


def rows(run: Path, key: str = "train_loss") -> list[dict[str, Any]]:
    return [row for row in Run(run).rows() if key in row]


def sound(run: Path) -> int:
    """The update of the newest checkpoint; each that is there is whole."""
    for path in (run / "checkpoints").glob("step-*"):
        checkpointing.verify(path)
    return int(newest(run).name[5:])
