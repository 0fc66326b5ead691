"""Keep weights in a memory-mapped file until they are copied, one by one, to where they are used.

The operating system can drop pages of a mapped file when memory is short. So a model of mapped weights takes no memory
of its own, and converting it tensor by tensor takes the memory of the result and of one tensor.
"""

from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import Tensor, nn

from monograph.errors import InputRefused

M = TypeVar("M", bound=nn.Module)


class MappedWeight(nn.Parameter):
    """A parameter in a mapped file, not read yet, in the dtype in which it is stored.

    Attributes:
        becomes: the dtype in which it will be kept, which can hold every number of the stored dtype.
    """

    becomes: torch.dtype


def mapped(stored: Tensor, becomes: torch.dtype) -> Tensor:
    """Return a parameter over a tensor in a mapped file; if `becomes` cannot hold its numbers it is rounded now."""
    # Rounding cannot wait, because readers must see the numbers that will be kept.
    if torch.promote_types(stored.dtype, becomes) != becomes:
        return stored.to(becomes)
    parameter = MappedWeight(stored)
    parameter.becomes = becomes
    return parameter


def require_finite(tensor: Tensor, name: str) -> Tensor:
    """Return the tensor if all its numbers are finite.

    Raises:
        InputRefused: it holds NaN or an infinity.
    """
    # The extremes of a tensor with a NaN are NaN. Unlike a mask of all elements they take no memory.
    if tensor.numel() and not all(bool(extreme.isfinite()) for extreme in tensor.detach().aminmax()):
        raise InputRefused(f"{name} holds NaN or infinity, with which a model computes nothing: take sound weights")
    return tensor


def kept_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which a tensor is or will be kept."""
    return tensor.becomes if isinstance(tensor, MappedWeight) else tensor.dtype


def keep(parameter: Tensor, data: Tensor) -> None:
    """Replace a parameter's data; a mapped parameter becomes an ordinary one."""
    parameter.data = data
    if isinstance(parameter, MappedWeight):
        del parameter.becomes
        # The object stays the same, so that tied layers and other holders see the new numbers.
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]


def in_file_order(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Sort mapped parameters by their place in the file, so that it is read from beginning to end."""
    return sorted(parameters, key=lambda parameter: parameter.data_ptr() if isinstance(parameter, MappedWeight) else 0)


def materialize_(module: M, device: torch.device | None = None, trained: bool = True) -> M:
    """Copy a module's mapped weights into memory, one after another in the order of the file; return the module.

    Args:
        module: any; without mapped weights it stays as it is.
        device: where to; None: the host.
        trained: whether to include trained weights, which a step on the host can copy straight into its planes.
    """
    still_mapped = [p for p in module.parameters() if isinstance(p, MappedWeight) and (trained or not p.requires_grad)]
    for weight in in_file_order(still_mapped):
        # Move first and convert then: the stored dtype is the smaller one.
        keep(weight, weight.data.to(device or "cpu", copy=True).to(kept_dtype(weight)))
    return module
