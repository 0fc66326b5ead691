"""Small inputs for the real command line."""

from __future__ import annotations

import random
from pathlib import Path

# A run of a second: two epochs and a half of a few words.
TINY = [
    "texts", "data.tokenizer=bytes", "data.sequence_length=32", "data.held_out=0.2",
    "model.hidden_size=16", "model.num_hidden_layers=1", "model.num_attention_heads=2",
    "train.updates=8", "train.tokens_per_update=128", "train.compile=none", "train.precision=fp32",
    "train.save_every=3",
]  # fmt: skip
OWN = [argument for argument in TINY if not argument.startswith("model.")]


def with_texts(folder: Path) -> Path:
    draws = random.Random(0)
    (folder / "texts").mkdir()
    for number in range(10):
        text = " ".join(draws.choice(["alpha", "beta", "gamma", "delta"]) for _ in range(30))
        (folder / "texts" / f"{number}.txt").write_text(text)
    return folder
