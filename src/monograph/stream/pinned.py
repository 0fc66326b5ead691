"""Page-locked memory of the host, at the size that was asked for.

A copy between a GPU and other memory of the host is staged through a small buffer, and the host waits for it. torch's
own allocator of page-locked memory rounds up to a power of two (pytorch/pytorch#95823), which for most planes wastes a
third of the host's memory; so pages are mapped at their size, and locked once.
"""

from __future__ import annotations

import math
import mmap
import resource
from typing import Any

import torch
from torch import Tensor

from monograph.errors import InputRefused


class _Locked(mmap.mmap):
    """Anonymous pages that are locked as long as anybody holds them."""

    address = 0

    def __del__(self) -> None:
        if self.address:  # before they are unmapped, or the driver would take the next ones there for them
            _runtime().cudaHostUnregister(self.address)


def on_host(like: Tensor, label: str, device: torch.device) -> Tensor:
    """Memory of the host for a tensor's elements, from which a device copies without staging.

    The arguments and errors are those of `pinned`; where `device` is no GPU it is ordinary memory, and of a device
    without data it has none.
    """
    if device.type == "cuda":
        return pinned(like, label)
    return torch.empty(like.shape, dtype=like.dtype, device="meta" if device.type == "meta" else None)


def pinned(like: Tensor, label: str) -> Tensor:
    """Page-locked memory for a tensor's elements, rounded up to pages; zeros.

    Args:
        like: its shape and dtype count.
        label: what the memory is for.

    Raises:
        InputRefused: the system has no more memory, or does not let so much be locked.
    """
    size = like.numel() * like.element_size()
    length = max(1, math.ceil(size / mmap.PAGESIZE)) * mmap.PAGESIZE
    try:
        pages = _Locked(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise InputRefused(
            f"{label} needs {length:,} bytes of the host's memory, and there are no more: keep fewer buffers there "
            "(on the device, or on disk), or in fewer bits"
        ) from error
    whole = torch.frombuffer(pages, dtype=torch.uint8)
    error_code = int(_runtime().cudaHostRegister(whole.data_ptr(), length, 0))
    if error_code:
        raise InputRefused(_refused(label, length, error_code))
    pages.address = whole.data_ptr()
    return whole[:size].view(like.dtype).view(like.shape)


def _refused(label: str, length: int, error_code: int) -> str:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    allowed = "no limit" if limit == resource.RLIM_INFINITY else f"{limit:,} bytes"
    return (
        f"{label}: {length:,} bytes of the host's memory cannot be locked (CUDA error {error_code}); ulimit -l allows "
        f"{allowed}: raise it, give the container more memory, or keep fewer buffers on the host"
    )


def _runtime() -> Any:
    return torch.cuda.cudart()
