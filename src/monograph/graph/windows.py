"""Weights that still lie in their file: windows into its mapping, each brought to where it is kept when its turn comes.

A page of a mapped file is the system's to drop again where memory is short. So a model of windows takes no memory of
its own, and what is made of it tensor by tensor takes no more than what is made, and one tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import Tensor, nn

from monograph.errors import InputRefused

M = TypeVar("M", bound=nn.Module)


class Window(nn.Parameter):
    """A parameter that is mapped and not read: whoever looks sees its numbers in the dtype that they are stored in.

    Attributes:
        becomes: the dtype in which it will be kept, which has every number that the stored one has.
    """

    becomes: torch.dtype


def windowed(stored: Tensor, becomes: torch.dtype) -> Tensor:
    """A window onto a tensor in a mapped file; of one that must be rounded to fit `becomes` its numbers, read now."""
    if torch.promote_types(stored.dtype, becomes) != becomes:
        return stored.to(becomes)
    window = Window(stored)
    window.becomes = becomes
    return window


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
    return tensor.becomes if isinstance(tensor, Window) else tensor.dtype


def keep(parameter: Tensor, data: Tensor) -> None:
    """Give a parameter other numbers, in memory of their own; if it was a window it is none any more."""
    parameter.data = data
    if isinstance(parameter, Window):
        del parameter.becomes
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]


def in_file_order(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """The same, windows by where they lie in their file: it is then read from its beginning to its end."""
    return sorted(parameters, key=lambda each: each.data_ptr() if isinstance(each, Window) else 0)


def settle(module: M, device: torch.device | None = None, trained: bool = True) -> M:
    """The module, its windows brought to memory of their own, one after another in the order of the file.

    Args:
        module: any; without windows it stays as it is.
        device: where to; None: the host.
        trained: whether also those that are trained, of which a step on the host makes planes without a copy between.
    """
    windows = [p for p in module.parameters() if isinstance(p, Window) and (trained or not p.requires_grad)]
    for window in in_file_order(windows):
        keep(window, window.data.to(device or "cpu", copy=True).to(kept_dtype(window)))
    return module
