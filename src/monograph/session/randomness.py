"""The random generators that a module may draw from (dropout and the like), as part of a run's state.

The rows' order, a Llama's weights and samples come from generators of their own and need none of this.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def seed(number: int) -> None:
    """Start all of them from one seed."""
    random.seed(number)
    np.random.seed(number % 2**32)  # noqa: NPY002 - the legacy generator is the one that other people's code uses
    torch.manual_seed(number)


def state(device: torch.device) -> dict[str, Any]:
    """Where they stand, as JSON gives it back: Python's, NumPy's and torch's (on the host and on `device`)."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002
    return {
        "python": [version, list(words), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, cached],
        "torch": _hex(torch.get_rng_state()),
        "cuda": _hex(torch.cuda.get_rng_state(device)) if device.type == "cuda" else None,
    }


def restore(saved: dict[str, Any], device: torch.device) -> None:
    """Put them back where they stood."""
    version, words, gauss = saved["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = saved["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))  # noqa: NPY002
    torch.set_rng_state(_bytes(saved["torch"]))
    if saved["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(_bytes(saved["cuda"]), device)


def _hex(tensor: torch.Tensor) -> str:
    return bytes(tensor.tolist()).hex()


def _bytes(text: str) -> torch.Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)
