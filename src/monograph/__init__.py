"""Monograph: train, sweep and sample language models on one GPU, with the whole training step in one
computation graph.

The names in `__all__` are the library's public names. Each is imported on first use, so that `import
monograph` takes no time.
"""

import importlib
from typing import Any

from monograph import optim_table

__version__ = "0.2.0"

# The public names by the modules that have them.
_PUBLIC_NAMES = {
    "model.llama": "Llama",
    "model.config": "LlamaConfig",
    "run.models": "load save",
    "data.corpus": "corpus",
    "loss": "token_loss MtpLoss",
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
    "rl.public": "rollouts member_rollouts policy_loss environment distill pairs preference_loss",
    "rl.rewards": "Reward",
    "decode": "generate Sampling",
    "automata": "constraint",
    "planner": "plan",
    "profiling.profiler": "profile",
}
# The module of each public name, "module" or "module:name" if it has another name there.
_HOME = {name: module for module, names in _PUBLIC_NAMES.items() for name in names.split()}
# The classes of all optimizers in the table are public.
_HOME |= {
    row.home.partition(":")[2]: row.home.removeprefix("monograph.")
    for row in optim_table.OPTIMIZERS.values()
}
_HOME["flops"] = "predict.roofline:flops_per_token"

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
