"""Weights that still lie in their file, mapped: each is brought to where it is kept when its turn comes.

A page of a mapped file is the system's to drop again where memory is short. So a model of mapped weights takes no
memory of its own, and what is made of it tensor by tensor takes no more than what is made, and one tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import Tensor, nn

from monograph.errors import InputRefused

M = TypeVar("M", bound=nn.Module)


class MappedWeight(nn.Parameter):
    """A parameter that is mapped and not read: whoever looks sees its numbers in the dtype that they are stored in.

    Attributes:
        becomes: the dtype in which it will be kept, which has every number that the stored one has.
    """

    becomes: torch.dtype


def mapped(stored: Tensor, becomes: torch.dtype) -> Tensor:
    """Return a parameter over a tensor in a mapped file; one that must be rounded to fit `becomes` is read now."""
    if torch.promote_types(stored.dtype, becomes) != becomes:
        return stored.to(becomes)
    parameter = MappedWeight(stored)
    parameter.becomes = becomes
    return parameter


def require_finite(tensor: Tensor, name: str) -> Tensor:
    """The tensor itself, of a model that somebody else may have trained.

    Raises:
        InputRefused: it holds NaN or an infinity.
    """
    # The extremes of what holds NaN are NaN, and finding them takes no memory, as a mask of all elements would.
    if tensor.numel() and not all(bool(extreme.isfinite()) for extreme in tensor.detach().aminmax()):
        raise InputRefused(f"{name} holds NaN or infinity, with which a model computes nothing: take sound weights")
    return tensor


def kept_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which a tensor is or will be kept."""
    return tensor.becomes if isinstance(tensor, MappedWeight) else tensor.dtype


def keep(parameter: Tensor, data: Tensor) -> None:
    """Give a parameter other numbers, in memory of their own; a mapped one becomes an ordinary one."""
    parameter.data = data
    if isinstance(parameter, MappedWeight):
        del parameter.becomes
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]


def in_file_order(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Sort mapped parameters by where they lie in their file, so that it is read from its beginning to its end."""
    return sorted(parameters, key=lambda each: each.data_ptr() if isinstance(each, MappedWeight) else 0)


def materialize_(module: M, device: torch.device | None = None, trained: bool = True) -> M:
    """Bring a module's mapped weights to memory of their own, one after another in the order of the file; return it.

    Args:
        module: any; without mapped weights it stays as it is.
        device: where to; None: the host.
        trained: whether also those that are trained, of which a step on the host makes planes without a copy between.
    """
    still_mapped = [p for p in module.parameters() if isinstance(p, MappedWeight) and (trained or not p.requires_grad)]
    for weight in in_file_order(still_mapped):
        keep(weight, weight.data.to(device or "cpu", copy=True).to(kept_dtype(weight)))
    return module
