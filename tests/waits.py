"""Make a wait of the host for a GPU an error."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_waits() -> Iterator[None]:
    """Raise RuntimeError where the host would wait for the GPU."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        # torch warns of this mode once in a process. If that were an error, the mode would stay on.
        warnings.filterwarnings("ignore", "Synchronization debug mode")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
