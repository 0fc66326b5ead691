"""Seed, save and restore the global random generators, which are part of a run's state.

A user's module may sample from them, e.g. for dropout. The order of rows, a Llama's weights and
samples come from other generators, which are seeded for each use.
"""

import random
from typing import Any

import numpy as np
import torch

from monograph.errors import InputRefused
from monograph.run import recorded_state


def seed_all(seed: int) -> None:
    """Seed Python's, NumPy's and torch's global generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - other people's code uses the legacy generator
    torch.manual_seed(seed)


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the states of the global generators of Python, NumPy and torch, as JSON values.

    Args:
        device: the device whose torch generator is saved, in addition to that of the host.

    Raises:
        InputRefused: the model's code has replaced NumPy's bit generator.
    """
    # Python makes samples of the normal distribution in pairs. `gauss` is the second of a pair if
    # it is kept for the next call, else None.
    version, words, gauss = random.getstate()
    numpy = np.random.get_state(legacy=False)  # noqa: NPY002
    algorithm = numpy["bit_generator"]
    state = numpy["state"]
    if algorithm != "MT19937":
        raise InputRefused(
            f"numpy.random uses {algorithm}, whose state cannot be saved: remove set_bit_generator from the model's "
            "file"
        )
    return {
        "python": [version, list(words), gauss],
        "numpy": [
            algorithm,
            state["key"].tolist(),
            state["pos"],
            numpy["has_gauss"],
            numpy["gauss"],
        ],
        "torch": _hex(torch.get_rng_state()),
        "cuda": _hex(torch.cuda.get_rng_state(device)) if device.type == "cuda" else None,
    }


def restore_random(saved: dict[str, Any], device: torch.device) -> None:
    """Set the generators back to a saved state."""
    recorded_state.set_generators(saved, random, np.random, torch.default_generator)
    if saved["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(recorded_state.tensor_from_hex(saved["cuda"]), device)


def _hex(tensor: torch.Tensor) -> str:
    """Return the bytes of a state of torch in hex."""
    return bytes(tensor.tolist()).hex()
