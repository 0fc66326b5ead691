"""Train on episodes with TRL's GRPOTrainer and its environment_factory, for `episode_peers.py`, which calls
`python -P peer_trl_episodes.py ORDER.json`.

The environment is that of environments/calculator.py, as TRL has it: a method is a tool, and a reward
function reads the answer that has no call. The order and the answer are those of `peer_trl.py`, without the
first update's gradient. Nothing of this project's package is imported.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any


def _beside(name: str) -> ModuleType:
    """Return a script of this folder, which -P keeps from being imported by name."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


peer_trl = _beside("peer_trl")
MISSING = peer_trl.MISSING
# Without TRL it is `object`, which makes the script importable.
Trainer: Any = peer_trl.GRPOTrainer


class Adder:
    """The calculator. TRL reads the tool's schema from the types and the docstring."""

    def reset(self, **record: Any) -> None:
        """Begin an episode; the question is the record's prompt."""

    def add(self, a: int, b: int) -> str:
        """Add two numbers.

        Args:
            a: a number.
            b: a number.

        Returns:
            The sum.
        """
        return f"= {a + b}"


def solved(
    completions: list[list[dict[str, Any]]], numbers: list[list[int]], **_: Any
) -> list[float]:
    """Return 1 for each episode whose last answer ends with the sum, and else 0."""
    scores = []
    for messages, three in zip(completions, numbers, strict=True):
        last = messages[-1]
        said = str(last.get("content") or "").split()
        is_answer = last["role"] == "assistant" and not last.get("tool_calls")
        scores.append(float(is_answer and said[-1:] == [str(sum(three))]))
    return scores


class Watched(Trainer):
    """The trainer, with the time of drawing episodes."""

    drawing_s: list[float]

    def _generate(self, *arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        found = super()._generate(*arguments, **named)
        self.drawing_s.append(time.perf_counter() - began)
        return found


def main(path: str) -> None:
    """Train, and write the answer; see the module."""
    if MISSING:
        raise SystemExit(
            f"peer_trl_episodes.py: {MISSING} is not installed for {sys.executable}: name another --peer-python"
        )
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    order = json.loads(Path(path).read_text())
    torch.set_num_threads(order["threads"])
    folder = Path(order["model"])
    records = [json.loads(line) for line in Path(order["records"]).read_text().splitlines()]
    passed: list[list[float]] = []

    def reward(**columns: Any) -> list[float]:
        scores = solved(columns["completions"], columns["numbers"])
        passed.append(scores)
        return scores

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    adamw = torch.optim.AdamW(
        model.parameters(), order["lr"], order["betas"], weight_decay=0.0, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        adamw, lambda index: min(1.0, (index + 1) / order["warmup"])
    )
    words = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), padding_side="left",
        bos_token="<|bos|>", eos_token="<|im_end|>", pad_token="<|pad|>",
        chat_template=(folder / "chat_template.jinja").read_text(),
    )  # fmt: skip
    # The template is not one that TRL knows, so it is told how a call is read.
    words.response_template = order["response_template"]
    watch = peer_trl.Clock(order["updates"], order["seconds"])
    columns = {name: [record[name] for record in records] for name in ("prompt", "numbers")}
    with tempfile.TemporaryDirectory() as home:
        trainer = Watched(
            model=model, reward_funcs=reward, args=peer_trl.settings(order, home), processing_class=words,
            train_dataset=Dataset.from_dict(columns), callbacks=[watch], optimizers=(adamw, schedule),
            environment_factory=Adder,
        )  # fmt: skip
        trainer.drawing_s = []
        trainer.train()
    found = {
        "versions": {name: importlib.metadata.version(name) for name in peer_trl.PACKAGES},
        "ends_s": watch.ends,
        "drawing_s": trainer.drawing_s,
        "rewards": passed,
    }
    Path(order["answer"]).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
