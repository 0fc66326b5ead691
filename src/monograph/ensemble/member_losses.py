"""Give each member of an ensemble its own buffers of a loss.

A loss that is a module may keep numbers in buffers, such as a reference that it compares the model
with, or sums that it takes over an update. In an ensemble these are [N, ...], as the members' tensors
are, and a pass of all members reads and writes them together.

Shapes: N members.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from monograph.loss import Loss


def with_member_axis(loss: Loss, members: int, device: torch.device) -> Loss:
    """Return a copy of a loss whose buffers have a leading member axis; the loss itself if it has no
    buffers.

    Args:
        loss: the loss, which stays as it is.
        members: N.
        device: the device of the buffers.
    """

    def repeated(buffer: Tensor) -> Tensor:
        return buffer.to(device).expand(members, *buffer.shape).clone()

    if not _has_buffers(loss):
        return loss
    return _with_buffers(loss, repeated)


def loss_of_member(loss: Loss, member: int) -> Loss:
    """Return one member's loss, whose buffers are views of the loss of all members.

    Args:
        loss: what `with_member_axis` returned.
        member: the member's number.
    """
    if not _has_buffers(loss):
        return loss
    return _with_buffers(loss, lambda buffer: buffer[member])


def _has_buffers(loss: object) -> bool:
    return isinstance(loss, nn.Module) and next(loss.buffers(), None) is not None


def _with_buffers(loss: Loss, change: Callable[[Tensor], Tensor]) -> Loss:
    """Return a copy of a loss with other buffers; everything else is shared with the loss.

    Args:
        loss: the loss, a module.
        change: returns the copy's buffer for one of the loss.
    """
    assert isinstance(loss, nn.Module)
    return _copied(loss, change)


def _copied(module: nn.Module, change: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return a copy of a module and its submodules; see `_with_buffers`."""
    copied = copy.copy(module)
    # A shallow copy shares these two dictionaries with the module, so it gets new ones.
    vars(copied)["_buffers"] = {
        name: None if buffer is None else change(buffer) for name, buffer in module._buffers.items()
    }
    vars(copied)["_modules"] = {
        name: None if part is None else _copied(part, change)
        for name, part in module._modules.items()
    }
    return copied
