"""Frozen weights kept in the 16 bits that they are computed with."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from monograph.graph.lora import Factor
from monograph.graph.windows import Window, in_file_order, keep, kept_dtype


def narrow(
    module: nn.Module, dtype: torch.dtype, more: Iterable[nn.Module] = (), device: torch.device | None = None
) -> None:
    """Keep what is frozen and fp32 of linear layers, the head among them, in the dtype that autocast gives them.

    They are then rounded once and not at each call: the same bits.

    Args:
        module: has adapters.
        dtype: autocast's.
        more: other modules whose weights are read in no other way.
        device: where these weights go, one after another; None: they stay.
    """
    those = {m for m in module.modules() if isinstance(m, nn.Linear) and not isinstance(m, Factor)} | set(more)
    elsewhere = {id(p) for m in module.modules() if m not in those for p in m.parameters(recurse=False)}
    found = {id(p): p for m in those for p in map(m._parameters.get, ("weight", "bias")) if p is not None}
    wide = [p for key, p in found.items() if key not in elsewhere and kept_dtype(p) == torch.float32]
    for parameter in in_file_order(wide):
        there = parameter.data.to(device or parameter.device, copy=isinstance(parameter, Window))
        keep(parameter, there.to(dtype))
