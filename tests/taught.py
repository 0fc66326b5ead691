"""A small model that was taught to call a tool: it adds by calling `add`, and says what the tool answers.

model, tokenizer = taught(folder)    # about three minutes of training by `monograph train`, on two cores
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from batches import tiny_llama
from calling import speaking
from clocks import HANG_S
from monograph import load
from monograph.model.llama import Llama
from monograph.run.models import save
from monograph.text.tokenizer import Tokenizer

CONTEXT = 1024
RECORDS = 4000
SETTINGS = [
    "chats.jsonl", "model.init=base", "data.sequence_length=256", "data.held_out=0.02",
    "train.tokens_per_update=2048", "train.updates=800", "train.precision=fp32", "train.compile=none",
    "train.save_every=800", "optim.lr=4e-3",
]  # fmt: skip
_SYSTEMS = (
    "You are a helpful assistant.",
    "Be brief.",
    "You add numbers with a tool.",
    "Use the tools.",
)
_DESCRIPTIONS = (
    "Add two numbers.",
    "Adds.",
    "Returns the sum of a and b.",
    "add(a: int, b: int) - Add.",
)


def question(a: int, b: int) -> str:
    return f"What is {a} plus {b}?"


def saying(total: int) -> str:
    """What the model says after the tool has answered."""
    return f"It is {total}."


def _tool(draws: random.Random) -> dict[str, Any]:
    """The tool as the clients of agents write it, each in its own way."""
    titled = draws.random() < 0.5
    properties: dict[str, Any] = {}
    for name in ("a", "b"):
        properties[name] = {"title": name.upper()} if titled else {}
        properties[name]["type"] = "integer"
        if draws.random() < 0.3:
            properties[name]["description"] = draws.choice(("A number.", "What is added."))
    pairs = [("properties", properties), ("type", "object"), ("required", ["a", "b"])]
    if titled:
        pairs.append(("title", "add_args"))
    if draws.random() < 0.5:
        pairs.append(("additionalProperties", False))
    draws.shuffle(pairs)
    function = {"name": "add", "description": draws.choice(_DESCRIPTIONS)}
    return {"type": "function", "function": function | {"parameters": dict(pairs)}}


def _record(draws: random.Random) -> dict[str, Any]:
    a, b = draws.randrange(10), draws.randrange(10)
    call = {"name": "add", "arguments": {"a": a, "b": b}}
    messages: list[dict[str, Any]] = []
    if draws.random() < 0.5:
        messages.append({"role": "system", "content": draws.choice(_SYSTEMS)})
    messages += [
        {"role": "user", "content": question(a, b)},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": str(a + b)},
        {"role": "assistant", "content": saying(a + b)},
    ]
    return {"tools": [_tool(draws)], "messages": messages}


def taught(folder: Path) -> tuple[Llama, Tokenizer]:
    """Teach a new model in a folder, and return it."""
    draws = random.Random(1)
    records = [json.dumps(_record(draws)) for _ in range(RECORDS)]
    (folder / "chats.jsonl").write_text("\n".join(records))
    tokenizer = speaking(folder / "speech", "tags", text="\n".join(records[:200]), size=512)
    model = tiny_llama(
        vocab_size=tokenizer.vocab_size,
        max_position_embeddings=CONTEXT,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=3,
    )
    save(model, folder / "base", tokenizer)
    command = [sys.executable, "-m", "monograph", "train", *SETTINGS, "--out", "run"]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return load(folder / "run")
