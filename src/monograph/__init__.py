"""Monograph: train, sweep and sample language models on one GPU, the whole step in one computation
graph.

The names below are the library. Each is imported on first use, so that `import monograph` costs
nothing.
"""

import importlib
from typing import Any

from monograph import optim_table

__version__ = "0.2.0"

# Where each public name lives: module, and its names.
_ROOMS = {
    "model.llama": "Llama",
    "model.config": "LlamaConfig",
    "run.models": "load save",
    "data.corpus": "corpus",
    "loss": "token_loss",
    "optim": "Group",
    "transfer": "WidthTransfer narrowed",
    "schedule": "warmup_cosine warmup_stable_decay constant",
    "step": "Step accumulate update",
    "graph.capture": "capture",
    "graph.trial": "trial",
    "graph.precision": "Precision",
    "graph.siblings": "fuse_siblings",
    "graph.remat": "Remat",
    "graph.lora": "Lora adapt",
    "loop": "train save_checkpoint load_checkpoint",
    "resident": "Resident",
    "ensemble": "Ensemble",
    "stream": "Streamed Placement",
    "ensemble.knobs": "grid log_range",
    "evaluation": "evaluate compare",
    "rl.public": "rollouts policy_loss distill pairs preference_loss",
    "rl.rewards": "Reward",
    "decode": "generate Sampling",
    "automata": "constraint",
    "planner": "plan",
    "profiling.profiler": "profile",
}
_HOME = {name: room for room, names in _ROOMS.items() for name in names.split()}
# Each optimizer in the table is public by its class's name.
_HOME |= {
    row.home.partition(":")[2]: row.home.removeprefix("monograph.")
    for row in optim_table.OPTIMIZERS.values()
}
_HOME["flops"] = "predict.roofline:flops_per_token"  # of another name there

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
