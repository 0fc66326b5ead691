"""A state such as a run records in its checkpoints, for tests that need a run's folder and no
training.
"""

from __future__ import annotations

from typing import Any

import torch

from monograph.session.random_state import random_state


def recorded(
    recipe: dict[str, Any], model_config: dict[str, Any] | None, update: int
) -> dict[str, Any]:
    return {
        "engine": {"index": update, "applied": update, "tokens": 8 * update, "skipped": 0},
        "data": {"seed": recipe["seed"], "rows": 2 * update},
        "random": random_state(torch.device("cpu")),
        "micro_batch": 2,
        "length": update,
        "cooled": None,
        "budget_s": None,
        "elapsed_s": 1.5,
        "metrics_offset": 0,
        "fingerprint": "texts",
        "tokenizer": "0" * 64,
        "settings": "0" * 64,
        "recipe": recipe,
        "model_config": model_config,
        "versions": {"monograph": "0", "torch": "0", "python": "0"},
    }
