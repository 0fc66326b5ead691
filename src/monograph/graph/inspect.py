"""What a module holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def buffers_kept(module: nn.Module) -> Iterator[None]:
    """Whatever runs in the block, the module's buffers (running means and the like) are afterwards what they were."""
    kept = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        for buffer, value in kept:
            buffer.copy_(value)
