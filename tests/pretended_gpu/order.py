"""When a pretended card does its work: at once, or only when something waits for it, in a random
order.

A piece of work is a function. Kernels and copies are given to the current stream by `launch`. In a
capture they become nodes of the graph, and run when the graph is replayed. driver/order.c counts
what streams were given and have done, and knows the events: it says which stream's next piece may
be done.
"""

from __future__ import annotations

import ctypes
import os
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from pretended_gpu import card
from pretended_gpu.card import driver

Work = Callable[[], object]

COMPUTES = os.environ.get("PRETENDED_NUMBERS", "1") == "1"  # else only memory is real
captured: list[list[Work]] = []  # the graphs that are being captured, the innermost last
_lock = threading.RLock()
_queues: dict[int, deque[Work]] = {}
_random: random.Random | None = None  # None: everything is done at once
_DEFAULT_STREAM = 1  # one of its names; 0 would be all streams
_favourite = (
    # The stream whose work is mostly done first, for some time: what lies far behind is reached
    # before others.
    0
)


def launch(work: Work) -> None:
    """Give a piece of work to the current stream."""
    if captured and torch.cuda.is_current_stream_capturing():
        captured[-1].append(work)
        # A node of the graph.
        card.launch("pretended", "work", torch.cuda.current_stream().cuda_stream)
        return
    if not COMPUTES:
        return
    if _random is None:
        work()
        return
    stream = torch.cuda.current_stream().cuda_stream or _DEFAULT_STREAM
    with _lock:
        _queues.setdefault(stream, deque()).append(work)
        driver.card_given(ctypes.c_void_p(stream))
        while _random.random() < 0.3 and _some():  # a card is not always idle until somebody waits
            pass


def _ready() -> list[int]:
    return [
        stream
        for stream, left in _queues.items()
        if left and driver.card_ready(ctypes.c_void_p(stream))
    ]


def _some() -> bool:
    """Do the next piece of work of one stream; return whether there was any."""
    global _favourite
    assert _random
    ready = _ready()
    if not ready:
        return False
    if _random.random() < 1 / 300:
        _favourite = _random.choice(ready)
    stream = (
        _favourite if _favourite in ready and _random.random() < 0.95 else _random.choice(ready)
    )
    work = _queues[stream].popleft()
    work()
    driver.card_did(ctypes.c_void_p(stream))
    return True


def until(stream: int | None, number: int) -> None:
    """Do work of random streams until `number` pieces of a stream are done, or all of all streams
    if it is None.
    """
    with _lock:
        while (
            any(_queues.values())
            if stream is None
            else driver.card_done_by(ctypes.c_void_p(stream)) < number
        ):
            assert _some(), "every stream waits for another one"


def is_deferred() -> bool:
    """Return whether work waits until something waits for it."""
    return _random is not None


def wait() -> None:
    """Do all that the current stream was given, as the host is about to read what it computes."""
    torch.cuda.current_stream().synchronize()


@contextmanager
def deferred(seed: int) -> Iterator[None]:
    """In the block nothing is done before something waits for it, or by chance.

    A seed gives one order of all that may be done in any order. What a missing wait lets happen too
    early or too late shows as wrong numbers for some seeds.
    """
    global _random, _favourite
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint64)(until)
    torch.cuda.synchronize()
    _random, _favourite = random.Random(seed), _DEFAULT_STREAM if seed % 2 else 0
    driver.card_defer(function)
    try:
        yield
    finally:
        torch.cuda.synchronize()
        driver.card_defer(None)
        _random = None
        _queues.clear()


def number(value: int) -> ctypes.c_uint64:
    """Return a number as the driver takes it."""
    return ctypes.c_uint64(value)
