"""Monograph: train, sweep and sample language models on one GPU, the whole step in one computation graph.

The names below are the library. Each is imported on first use, so that `import monograph` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# Where each public name lives, as module or module:attribute.
_HOME = {
    "Llama": "model.llama",
    "LlamaConfig": "model.config",
    "load": "run.models",
    "save": "run.models",
    "corpus": "data.corpus",
    "token_loss": "loss",
    "AdamW": "optim",
    "Muon": "optim",
    "Group": "optim",
    "WidthTransfer": "transfer",
    "narrowed": "transfer",
    "warmup_cosine": "schedule",
    "warmup_stable_decay": "schedule",
    "constant": "schedule",
    "Step": "step",
    "accumulate": "step",
    "update": "step",
    "capture": "graph.capture",
    "trial": "graph.trial",
    "Precision": "graph.precision",
    "fuse_siblings": "graph.siblings",
    "Remat": "graph.remat",
    "Lora": "graph.lora",
    "adapt": "graph.lora",
    "train": "loop",
    "Resident": "resident",
    "Ensemble": "ensemble",
    "Streamed": "stream",
    "Placement": "stream",
    "grid": "ensemble.knobs",
    "log_range": "ensemble.knobs",
    "evaluate": "evaluation",
    "compare": "evaluation",
    "rollouts": "rl.public",
    "Reward": "rl.rewards",
    "policy_loss": "rl.public",
    "distill": "rl.public",
    "pairs": "rl.public",
    "preference_loss": "rl.public",
    "generate": "decode",
    "Sampling": "decode",
    "plan": "planner",
    "flops": "predict.roofline:flops_per_token",
    "profile": "profiling.profiler",
    "save_checkpoint": "loop",
    "load_checkpoint": "loop",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'monograph' has no attribute {name!r}")
    module, _, attribute = _HOME[name].partition(":")
    value = getattr(importlib.import_module(f"monograph.{module}"), attribute or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
