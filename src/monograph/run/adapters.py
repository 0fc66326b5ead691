"""A run's adapters: the base that they stand beside, found again and compared, and the merged model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from monograph.errors import InputRefused
from monograph.graph.inspect import unique_state
from monograph.graph.lora import Lora
from monograph.model.adapter import BASE, Adapter


def lora_of(saved: Mapping[str, Any]) -> Lora:
    """The adapters that a recipe records."""
    targets = saved["targets"]
    changed = {
        "targets": targets if isinstance(targets, str) else tuple(targets),
        "tokens": tuple(saved.get("tokens", ())),
    }
    return Lora(**{**saved, **changed})


def recorded(lora: Lora) -> dict[str, Any]:
    """The same as JSON gives it back."""
    values = {**vars(lora), "targets": lora.targets if isinstance(lora.targets, str) else list(lora.targets)}
    tokens = {"tokens": list(values.pop("tokens"))}
    return values | (tokens if lora.tokens else {})  # which no run had before rows of tokens were trained


def digest(module: nn.Module) -> str:
    """SHA-256 of a base's weights, in hex: of names, shapes and numbers, which are the same in bf16 and fp32."""
    found = hashlib.sha256()
    for name, tensor in sorted(unique_state(module).items()):
        found.update(f"{name} {list(tensor.shape)} ".encode())
        found.update(_bytes(tensor))
    return found.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    wide = tensor.detach().float() if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor.detach()
    return wide.contiguous().reshape(-1).view(torch.uint8).numpy().data


def require_base_of(adapter: Adapter, base_sha256: str) -> None:
    """The base of a stored adapter must have the weights that it was trained beside, where its folder says which.

    Raises:
        InputRefused: it has others.
    """
    if adapter.weights_sha256 not in (None, base_sha256):
        raise InputRefused(
            f"{adapter.folder}: this adapter was trained beside other weights than those of {adapter.base}: write the "
            f"folder of its own base into adapter_config.json, or, to put it beside these all the same, remove {BASE}"
        )


def require_base(found: str | None, wanted: str | None, init: str | None, folder: Path) -> None:
    """The base must still be what a run's adapters were trained beside.

    Raises:
        InputRefused: it is not.
    """
    if found != wanted:
        raise InputRefused(
            f"{init}: its weights are not those that the adapters of {folder} were trained beside: put them back, or "
            "start a new run"
        )
