"""Train from rewards with TRL's GRPOTrainer, for `reward_peers.py`, which calls
`python -P peer_trl.py ORDER.json`.

The order says which folder, prompts and program to use, and which settings to change; the answer is
a file, too. It has for each update its seconds since training began, the seconds of drawing, and
the rewards; and the first update's answers, advantages and gradient, before it is clipped. Nothing
of this project is imported, so the Python may be that of another environment; without -P pandas
would take a script next to this one for the package `bottleneck`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from safetensors.torch import save_file

try:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
except ModuleNotFoundError as error:
    # Tests import every script, and most environments have no TRL.
    MISSING, TrainerCallback, GRPOTrainer = error.name, object, object
else:
    MISSING = None

PACKAGES = ("trl", "transformers", "accelerate", "datasets", "torch")


def settings(order: dict[str, Any], folder: str) -> GRPOConfig:
    """Return what makes TRL compute the same update; `order["more"]` overrides any of it."""
    return GRPOConfig(
        **{
            "output_dir": folder,
            "seed": order["seed"],
            "data_seed": order["seed"],
            "use_cpu": not torch.cuda.is_available(),
            "bf16": False,
            "gradient_checkpointing": False,  # on unless it is said; it saves memory and costs time
            # The loss: advantages that are not divided, a constant length in the denominator, no KL
            # term, and one update of each draw.
            "loss_type": "dr_grpo",
            "scale_rewards": "none",
            "beta": 0.0,
            "num_iterations": 1,
            # An update: all its answers are drawn at once and in one micro-batch.
            "num_generations": order["group"],
            "per_device_train_batch_size": order["prompts"] * order["group"],
            "gradient_accumulation_steps": 1,
            "max_completion_length": order["max_new_tokens"],
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "max_grad_norm": order["clip"],
            # `Clock` ends it.
            "max_steps": 10**6,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
        }
        | order["more"]
    )


class Clock(TrainerCallback):
    """Notes when each update ends, and ends training after the given updates, or else seconds."""

    def __init__(self, updates: int | None, seconds: float) -> None:
        self.updates, self.seconds, self.began = updates, seconds, 0.0
        self.ends: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin to count."""
        self.began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count an update."""
        self.ends.append(time.perf_counter() - self.began)
        if self.updates is None:
            control.should_training_stop = self.ends[-1] >= self.seconds
        else:
            control.should_training_stop = len(self.ends) == self.updates


class Watched(GRPOTrainer):
    """The trainer, with the time of drawing, and what the first update computed."""

    drawing_s: list[float]
    first: dict[str, torch.Tensor]

    def _generate_single_turn(self, *arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        found = super()._generate_single_turn(*arguments, **named)
        self.drawing_s.append(time.perf_counter() - began)
        return found

    def compute_loss(self, model: Any, inputs: Any, **named: Any) -> Any:
        """Compute the loss, and keep the first answers."""
        if not self.first:
            names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")
            self.first = {name: inputs[name].clone() for name in names}
        return super().compute_loss(model, inputs, **named)

    def training_step(self, model: Any, *arguments: Any, **named: Any) -> Any:
        """Make a step, and keep the first gradient."""
        found = super().training_step(model, *arguments, **named)
        if self._step == 1:
            gradient = {f"gradient.{name}": p.grad.clone() for name, p in model.named_parameters()}
            self.first |= gradient
        return found


def main(path: str) -> None:
    """Train, and write the answer; see the module."""
    if MISSING:
        raise SystemExit(
            f"peer_trl.py: {MISSING} is not installed for {sys.executable}: name another --peer-python"
        )
    order = json.loads(Path(path).read_text())
    torch.set_num_threads(order["threads"])
    spec = importlib.util.spec_from_file_location("rewarding", order["reward"])
    assert spec is not None and spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    records = [json.loads(line) for line in Path(order["records"]).read_text().splitlines()]
    passed: list[list[float]] = []

    def reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        rows = [{order["reads"]: value} for value in columns[order["reads"]]]
        scored = [program.score(*each) for each in zip(prompts, completions, rows, strict=True)]
        passed.append(scored)
        return scored

    model = AutoModelForCausalLM.from_pretrained(order["model"], dtype=torch.float32)
    adamw = torch.optim.AdamW(
        model.parameters(), order["lr"], order["betas"], weight_decay=0.0, fused=True
    )
    # TRL's own warm-up begins at a rate of 0.
    schedule = torch.optim.lr_scheduler.LambdaLR(
        adamw, lambda index: min(1.0, (index + 1) / order["warmup"])
    )
    words = PreTrainedTokenizerFast(
        tokenizer_file=str(Path(order["model"]) / "tokenizer.json"), padding_side="left",
        bos_token="<|bos|>", eos_token="<|eos|>", pad_token="<|pad|>",
    )  # fmt: skip
    watch = Clock(order["updates"], order["seconds"])
    columns = {name: [record[name] for record in records] for name in ("prompt", order["reads"])}
    with tempfile.TemporaryDirectory() as folder:
        trainer = Watched(
            model=model, reward_funcs=reward, args=settings(order, folder), processing_class=words,
            train_dataset=Dataset.from_dict(columns), callbacks=[watch], optimizers=(adamw, schedule),
        )  # fmt: skip
        trainer.drawing_s, trainer.first = [], {}
        trainer.train()
    save_file({name: tensor.contiguous() for name, tensor in trainer.first.items()}, order["first"])
    found = {
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "ends_s": watch.ends,
        "drawing_s": trainer.drawing_s,
        "rewards": passed,
    }
    Path(order["answer"]).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
