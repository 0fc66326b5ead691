"""Small runs whose every bit can be compared: their settings, their outcome, and what is left of
one that was cut.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from pathlib import Path
from typing import Any

import torch

from monograph.commands.train import run as train
from monograph.config import load
from monograph.model.config import LlamaConfig
from monograph.model.hub import save_model
from monograph.model.llama import Llama
from monograph.run.folder import Run
from monograph.step.parts import PARTS, PASSES
from monograph.storage.code import digests
from monograph.text.tokenizer import Tokenizer

# Seven updates and a bit make an epoch: the runs below pass two borders.
SETTINGS = {
    "model.hidden_size": 16, "model.num_hidden_layers": 1, "model.num_attention_heads": 2,
    "data.source": "texts", "data.tokenizer": "bytes", "data.sequence_length": 32, "data.held_out": 0.2,
    "train.updates": 20, "train.tokens_per_update": 256, "train.micro_batch": 4, "train.compile": "none",
    "train.precision": "fp32", "train.save_every": 1, "train.eval_every": 4, "train.keep": 99,
}  # fmt: skip
OWN = SETTINGS | {
    "model.init": "own.py:build", "optim.name": "muon", "optim.ema": 0.9, "optim.schedule": "wsd",
}  # fmt: skip
for size in [key for key in SETTINGS if key.startswith("model.")]:
    del OWN[size]

# A module to whose bits everything that a run's state holds matters: every kind of random number, a
# running mean, and memory that is too small for a window that has a certain token, from which on
# the micro-batch is halved.
OWN_MODULE = """
import random
import numpy as np
import torch
from torch import nn

class Own(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, 16)
        self.norm = nn.BatchNorm1d(16)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.Tanh())])
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(16, vocab_size)

    def forward(self, tokens):
        hidden = self.norm(self.embed(tokens).flatten(0, 1))
        if self.training:
            hidden = hidden * (1 + 0.1 * random.random()) + 0.1 * float(np.random.rand())
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(self.drop(hidden))

def build(vocab_size):
    return Own(vocab_size)

def loss(model, batch):
    total = batch["tokens"].sum()  # of rows that are filled up 0
    if len(batch["tokens"]) > 2 and total > 0 and total % 33 == 0:
        raise torch.OutOfMemoryError("out of memory")
    targets = batch["targets"].flatten()
    logits = model(batch["tokens"])
    return nn.functional.cross_entropy(logits, targets, reduction="sum"), (targets != -100).sum()
"""
# Adapters beside a folder's frozen weights, with masks that the random state decides.
LORA = {key: value for key, value in SETTINGS.items() if not key.startswith("model.")} | {
    "model.init": "base", "lora.rank": 3, "lora.dropout": 0.2,
}  # fmt: skip
# Answers of adapters to prompts, with a reward that half of the bytes have.
REWARDED = {key: value for key, value in LORA.items() if key != "train.tokens_per_update"} | {
    "data.source": "prompts.jsonl", "rl.reward": "letters.py:score", "rl.prompts": 2, "rl.group": 3,
    "rl.max_new_tokens": 6, "rl.temperature": 0.9, "lora.dropout": 0.0,
}  # fmt: skip
# Episodes with an environment, which has chance of its own.
PLAYED = REWARDED | {
    "rl.reward": "environment", "rl.environment": "echo.py:Echo", "rl.turns": 3, "rl.max_new_tokens": 4,
    "rl.temperature": 1.0,
}  # fmt: skip
# Rewards that no program gives.
MATCHED = REWARDED | {"rl.reward": "regex", "rl.reward_regex": "[^#]*[a-m][^#]*"}
# Answers labelled good or bad, compared with the weights that a run begins from.
PREFERRED = {key: value for key, value in LORA.items() if key != "lora.dropout"} | {
    "data.source": "labelled.jsonl", "train.tokens_per_update": 128,
}  # fmt: skip
LETTERS = """
def score(prompt, completion, record):
    return {"odd": len(completion) % 2, "good": 0.5 * any(letter in completion for letter in record["good"])}
"""
# Done after one to three answers of at most four letters.
ECHO = """
import random

class Echo:
    def reset(self, record):
        self.total = 0
        return record["prompt"]

    def step(self, answer):
        self.total += len(answer)
        said = f"{len(answer)}{random.choice('abc')}"
        return said, {"low": sum(letter < "p" for letter in answer), "more": 0.1}, self.total % 3 == 0
"""
TIMES = {
    "tokens_per_s", "wall_s", "drawn_s", "scored_s", "gpu_utilization_percent", "gpu_memory_bytes", "gpu_power_w",
    "gpu_temperature_c", "gpu_clock_hz", *(f"{part}_s" for part in (*PARTS, PASSES)),
}  # fmt: skip


def write_inputs(folder: Path) -> None:
    words, draws = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta"], random.Random(0)
    (folder / "texts").mkdir()
    for number in range(14):
        text = " ".join(draws.choice(words) for _ in range(24))
        (folder / "texts" / f"{number}.txt").write_text(text)
    records = [
        json.dumps({"text": " ".join(draws.choice(words) for _ in range(9))}) for _ in range(40)
    ]
    (folder / "records.jsonl").write_text("\n".join([*records, '{"text": 5}']))
    prompts = [json.dumps({"prompt": word, "good": "aeiou"}) for word in words]
    (folder / "prompts.jsonl").write_text("\n".join(prompts))
    pairs = [
        json.dumps({"prompt": word[:2], "chosen": word[2:], "rejected": word[::-1]})
        for word in words * 4
    ]
    (folder / "pairs.jsonl").write_text("\n".join(pairs))
    labelled = [
        json.dumps(
            {"prompt": word[:2], "completion": word[2:][:: 1 if good else -1], "label": good}
        )
        for word in words * 4
        for good in (True, False)
    ]
    (folder / "labelled.jsonl").write_text("\n".join(labelled))
    (folder / "letters.py").write_text(LETTERS)
    (folder / "echo.py").write_text(ECHO)
    (folder / "own.py").write_text(OWN_MODULE)
    shape = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 24,
    }
    config = LlamaConfig(vocab_size=259, num_key_value_heads=1, max_position_embeddings=32, **shape)
    save_model(Llama(config), folder / "base", Tokenizer.bytes())


def fingerprint(folder: Path) -> dict[str, Any]:
    """All that a finished run holds, times aside."""
    newest = max((folder / "checkpoints").glob("step-*"))
    names = ("model.safetensors", "optimizer.safetensors")
    files = {name: hashlib.sha256((newest / name).read_bytes()).hexdigest() for name in names}
    state = json.loads((newest / "state.json").read_text())
    for key in ("elapsed_s", "metrics_offset", "metrics_sha256"):  # the times' digits are in these
        del state[key]
    rows = [{k: v for k, v in row.items() if k not in TIMES} for row in Run(folder).rows()]
    assert "summary" in rows.pop(), "the run did not come to its end"
    return {"newest": newest.name, **files, "state": state, "rows": rows}


def start(out: str, settings: dict[str, Any], **options: Any) -> None:
    given = load(None, settings, {})
    # As the command line does for the files that a user names.
    own = given.vouching(digests(given.programs))
    train(own, out=Path(out), resume=None, from_=None, json=False, **options)


def resume(run: str) -> None:
    for draw in (torch.rand, random.random):  # a new process has other random numbers
        draw(1) if draw is torch.rand else draw()
    train(load(None, {}, {}), out=None, resume=run, from_=None, json=False)


def cut_back(whole: str, to: str, update: int) -> None:
    """What is left of a run that is killed right after it saved `update`; its metrics may be
    further.
    """
    shutil.copytree(whole, to)
    metrics = Path(to) / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(line for line in lines if '"summary"' not in line))
    for path in (Path(to) / "checkpoints").glob("step-*"):
        if int(path.name[5:]) > update:
            shutil.rmtree(path)
