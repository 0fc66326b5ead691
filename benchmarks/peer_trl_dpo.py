"""Learn from pairs with TRL's DPOTrainer, for `preference_peers.py`:
`python -P peer_trl_dpo.py ORDER.json`.

The order says which folder and pairs to use, and which settings to change. Then this process trains
whenever a line of its standard input asks for updates, as `rounds.Orders` does, and answers with a
line for each round. Nothing of this project is imported, so the Python may be that of another
environment; see `peer_trl.py` for -P.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, TextIO

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from safetensors.torch import save_file

try:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import DPOConfig, DPOTrainer
except ModuleNotFoundError as error:
    # Tests import every script, and most environments have no TRL.
    MISSING, TrainerCallback, DPOTrainer = error.name, object, object
else:
    MISSING = None

PACKAGES = ("trl", "transformers", "accelerate", "datasets", "torch")


def settings(order: dict[str, Any], folder: str) -> DPOConfig:
    """Return what makes TRL compute the same update; `order["more"]` overrides any of it."""
    return DPOConfig(
        **{
            "output_dir": folder,
            "seed": order["seed"],
            "data_seed": order["seed"],
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,  # on unless it is said; it saves memory and costs time
            "loss_type": ["sigmoid"],
            "beta": order["beta"],
            # An update is one micro-batch.
            "per_device_train_batch_size": order["pairs"],
            "gradient_accumulation_steps": 1,
            "max_steps": order["updates"],
            "learning_rate": order["lr"],
            "lr_scheduler_type": "constant",
            "adam_beta1": order["betas"][0],
            "adam_beta2": order["betas"][1],
            "weight_decay": 0.0,
            "max_grad_norm": order["clip"],
            "save_strategy": "no",
            "logging_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
        }
        | order["more"]
    )


class Orders(TrainerCallback):
    """Counts updates, answers when a round is done, and waits for the next order."""

    def __init__(self, reply: TextIO, order: dict[str, Any]) -> None:
        self.reply, self.left, self.done, self.ready = reply, order["warm_up"], 0, dict[str, Any]()
        self.began, self.cpu = time.perf_counter(), time.process_time()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin to count."""
        self.began, self.cpu = time.perf_counter(), time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count an update."""
        self.left, self.done = self.left - 1, self.done + 1
        if self.left:
            return
        answer = {
            "wall_s": time.perf_counter() - self.began,
            "cpu_s": time.process_time() - self.cpu,
            "done": self.done,
        }
        self.reply.write(json.dumps(answer | self.ready) + "\n")
        self.reply.flush()
        self.ready = {}
        line = sys.stdin.readline()
        if not line:
            os._exit(0)
        self.left, self.done = json.loads(line)["updates"], 0
        self.began, self.cpu = time.perf_counter(), time.process_time()


class Watched(DPOTrainer):
    """The trainer, with what the first update computed, and the time that the reference took before
    it.
    """

    first: dict[str, torch.Tensor]
    told: dict[str, Any]

    def _precompute_ref_logps(self, *arguments: Any, **named: Any) -> Any:
        began, cpu = time.perf_counter(), time.process_time()
        found = super()._precompute_ref_logps(*arguments, **named)
        Watched.reference = {
            "wall_s": time.perf_counter() - began,
            "cpu_s": time.process_time() - cpu,
        }
        return found

    def training_step(self, model: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
        """Make a step, and keep what the first one had."""
        found = super().training_step(model, inputs, *arguments, **named)
        if not self.first:
            self.first = {name: p.grad.clone() for name, p in model.named_parameters()}
            self.told |= {"first_loss": float(found), "first_pairs": pairs_of(inputs)}
        return found


Watched.reference = None


def pairs_of(inputs: dict[str, torch.Tensor]) -> list[list[list[int]]]:
    """Return the tokens of each pair's prompt, chosen answer and rejected answer."""
    parts = []
    tensors = (inputs[name] for name in ("input_ids", "attention_mask", "completion_mask"))
    for ids, there, answer in zip(*tensors, strict=True):
        parts.append((ids[there.bool() & ~answer.bool()].tolist(), ids[answer.bool()].tolist()))
    half = len(parts) // 2
    return [[parts[i][0], parts[i][1], parts[half + i][1]] for i in range(half)]


def main(path: str) -> None:
    """Train when asked; see the module."""
    if MISSING:
        raise SystemExit(
            f"peer_trl_dpo.py: {MISSING} is not installed for {sys.executable}: name another --peer-python"
        )
    reply = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # TRL may print; stdout is for answers
    order = json.loads(Path(path).read_text())
    torch.set_num_threads(order["threads"])
    records = [json.loads(line) for line in Path(order["records"]).read_text().splitlines()]
    model = AutoModelForCausalLM.from_pretrained(order["model"], dtype=torch.float32)
    words = PreTrainedTokenizerFast(
        tokenizer_file=str(Path(order["model"]) / "tokenizer.json"), padding_side="left",
        bos_token="<|bos|>", eos_token="<|eos|>", pad_token="<|pad|>",
    )  # fmt: skip
    watch = Orders(reply, order)
    columns = {
        name: [record[name] for record in records] for name in ("prompt", "chosen", "rejected")
    }
    with tempfile.TemporaryDirectory() as folder:
        trainer = Watched(
            model=model, args=settings(order, folder), processing_class=words,
            train_dataset=Dataset.from_dict(columns), callbacks=[watch],
        )  # fmt: skip
        trainer.first, trainer.told = {}, watch.ready
        watch.ready["versions"] = {name: importlib.metadata.version(name) for name in PACKAGES}
        watch.ready["reference"] = Watched.reference
        trainer.train()
    save_file({name: tensor.contiguous() for name, tensor in trainer.first.items()}, order["first"])
    model.save_pretrained(order["out"])


if __name__ == "__main__":
    main(sys.argv[1])
