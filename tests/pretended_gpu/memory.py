"""See device memory from the host: it is the host's own memory."""

from __future__ import annotations

from typing import Any

import torch


def on_host(value: Any) -> Any:
    """Return the CPU tensor at a CUDA tensor's memory; anything else as it is."""
    if not isinstance(value, torch.Tensor) or value.device.type != "cuda":
        return value
    storage = value.untyped_storage()
    if storage.nbytes() == 0 or storage.data_ptr() == 0:
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype)
    memory = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), torch.device("cpu"), storage.nbytes()
    )
    return torch.empty(0, dtype=value.dtype).set_(
        memory, value.storage_offset(), value.size(), value.stride()
    )
