"""Recomputation whose one stored tensor, a block's input, waits in the host's memory.

It leaves the device while the block computes and is on its way back while the block after it is recomputed, on a stream
of its own in both directions. The numbers that come back are the numbers that left.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


class Lane:
    """What crosses between a device and its host: a stream of its own, and the tensor that left last.

    On a CPU, which has one memory and no streams, everything is copied all the same, in order.
    """

    def __init__(self, device: torch.device):
        """A lane of a device."""
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.last: weakref.ref[Parcel] | None = None

    def out(self, tensor: Tensor) -> Tensor:
        """Start the way to page-locked memory of the host; the copy is whole for whoever comes back by this lane."""
        on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self.stream is not None)
        if self.stream is None:
            return on_host.copy_(tensor)
        self.stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self.stream):
            on_host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self.stream)  # whoever frees it: its memory is not used again before the copy is made
        return on_host

    def back(self, on_host: Tensor, device: torch.device) -> tuple[Tensor, torch.cuda.Event | None]:
        """Start the way back; the event is when it has come to its end."""
        if self.stream is None:
            return on_host.clone(), None
        with torch.cuda.stream(self.stream):
            tensor = on_host.to(device, non_blocking=True)
            return tensor, self.stream.record_event()


class Parcel:
    """A block's input on its way: the tensor itself the first time that it is opened, then what comes from the host."""

    def __init__(self, tensor: Tensor, lane: Lane):
        """Send a copy to the host; the tensor is kept until the parcel is opened."""
        self.lane, self.device, self.differentiable = lane, tensor.device, tensor.requires_grad
        self.tensor: Tensor | None = tensor
        self.on_host = lane.out(tensor.detach())
        self.coming: tuple[Tensor, torch.cuda.Event | None] | None = None
        self.before = lane.last
        lane.last = weakref.ref(self)

    def call(self) -> None:
        """Let it come back, if it is away and not on its way yet."""
        if self.tensor is None and self.coming is None:
            self.coming = self.lane.back(self.on_host, self.device)

    def open(self) -> Tensor:
        """The tensor; when it comes from the host the one that left before it, which is needed next, is called."""
        if self.tensor is not None:
            tensor, self.tensor = self.tensor, None
            return tensor
        self.call()
        assert self.coming is not None
        (tensor, arrived), self.coming = self.coming, None
        if before := self.before and self.before():
            before.call()
        if arrived is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(arrived)
            tensor.record_stream(stream)
        return tensor.requires_grad_(self.differentiable)


@functools.cache
def _lane(device: torch.device) -> Lane:
    return Lane(device)


def offloaded(forward: Callable[..., Any], contexts: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
    """`forward(*args, **kwargs)`, to be recomputed from an input that waits on the host: the first that is a tensor.

    Args:
        forward: of the block.
        contexts: of the forward pass and its repetition, see `torch.utils.checkpoint`.
        args: positional ones of the block.
        kwargs: the others; all but the first input stay where they are.
    """
    if not args or not isinstance(args[0], Tensor):
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)
    parcel = Parcel(args[0], _lane(args[0].device))

    def opened(*rest: Any, **kwargs: Any) -> Any:
        return forward(parcel.open(), *rest, **kwargs)

    return checkpoint(opened, *args[1:], use_reentrant=False, context_fn=contexts, **kwargs)
