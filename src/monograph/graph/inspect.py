"""What a module holds, seen without running it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def unique_state(module: nn.Module) -> dict[str, Tensor]:
    """The state dict with tied tensors once, under their first name (as Hugging Face stores them)."""
    seen: dict[tuple[int, int, Any], str] = {}
    return {
        name: tensor
        for name, tensor in module.state_dict().items()
        if seen.setdefault((tensor.data_ptr(), tensor.numel(), tensor.stride()), name) == name
    }
