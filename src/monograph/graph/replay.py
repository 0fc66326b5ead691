"""How a step is run many times without the host: called, or on a GPU captured once a variant and replayed."""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch

from monograph.device import clock

WARM_UP = 2  # calls before a capture: the first compiles, both settle what the libraries allocate
Work = Callable[[], None]


class Graph(Protocol):
    """A captured sequence of device work."""

    def replay(self) -> None:
        """Do the work again."""
        ...


class Recorder(Protocol):
    """A device that can capture work."""

    def warm_up(self, work: Work) -> str | None:
        """Do the work, under the conditions of a capture; why it cannot be captured, None if nothing is known."""
        ...

    def record(self, work: Work) -> Graph:
        """Capture what `work` launches, without running it.

        Raises:
            RuntimeError: it cannot be captured.
        """
        ...


class NotReplayable(Exception):
    """Work can only be called; what was asked for before this was raised has been done."""


class CudaGraphs:
    """Captures on a CUDA device.

    All graphs share one pool of memory, as nobody reads after a replay what it leaves there, and one stream, on which
    they are warmed up too: autograd adds a gradient on the stream on which the parameter was used first.

    Attributes:
        least: of the time of a call, the share that the host must spend on launching it, from 0 to 1; below, the device
            is the slower of the two, and a replay would take a pool of memory for nothing. 0: always captured.
    """

    def __init__(self, device: torch.device, least: float = 0.0):
        """On a device of this process."""
        self.device, self.least = device, least
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, work: Work) -> str | None:
        """Call the work on the captures' stream, and watch what the host does meanwhile."""
        current, drawn = torch.cuda.current_stream(self.device), torch.get_rng_state()
        self._stream.wait_stream(current)
        torch.cuda.synchronize(self.device)
        began = clock()
        try:
            with torch.cuda.stream(self._stream), _host_waits() as waits:
                work()
        finally:  # what comes next, if only a retreat, comes after what was launched
            current.wait_stream(self._stream)
        launched_s = clock() - began
        torch.cuda.synchronize(self.device)
        share = launched_s / (clock() - began)
        if waits:
            return f"the host waits for the device at {waits[0]}"
        if not torch.equal(drawn, torch.get_rng_state()):
            return "it draws random numbers on the host (torch)"
        return f"the device is busy longer than it takes to launch ({share:.0%})" if share < self.least else None

    def record(self, work: Work) -> Graph:
        """Capture; other threads, such as one that reads ahead into page-locked memory, may go on meanwhile."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            work()
        return graph


@contextmanager
def _host_waits() -> Iterator[list[str]]:
    """Where, by file and line, the host waited for the device inside of the block."""
    before, found = torch.cuda.get_sync_debug_mode(), list[str]()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for each in seen:
        if "called a synchronizing CUDA operation" in str(each.message):
            found.append(f"{each.filename}:{each.lineno}")
        elif "Synchronization debug mode" not in str(each.message):
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)


class Replays:
    """A function of a variant whose only effect is on device memory, run by replaying what it launches.

    The first calls of a variant are ordinary ones, so nothing is run that would not have been.
    """

    def __init__(self, function: Callable[..., None], recorder: Recorder | None) -> None:
        """A function and what captures it; None: call it every time."""
        self._function, self._recorder = function, recorder
        self._calls: dict[Hashable, int] = {}
        self._graphs: dict[Hashable, Graph] = {}

    @property
    def variants(self) -> int:
        """How many different graphs ran."""
        return len(self._calls)

    @property
    def captured(self) -> int:
        """How many of them are captured."""
        return len(self._graphs)

    def forget(self) -> None:
        """Give the graphs back; what comes next is warmed up again."""
        self._calls.clear()
        self._graphs.clear()

    def run(self, times: int, *variant: Hashable) -> None:
        """Run the function so many times.

        Raises:
            NotReplayable: it ran once, and cannot be captured; the message says why.
        """
        for _ in range(times):
            if (graph := self._graphs.get(variant)) is not None:
                graph.replay()
                continue
            calls = self._calls[variant] = self._calls.get(variant, 0) + 1
            work = functools.partial(self._function, *variant)
            if self._recorder is None:
                work()
            elif calls < WARM_UP:
                self._recorder.warm_up(work)
            else:
                self._graphs[variant] = _captured(work, self._recorder)


def _captured(work: Work, recorder: Recorder) -> Graph:
    """Called a last time, then captured."""
    drawn = _host_random_numbers()
    obstacle = recorder.warm_up(work)
    if obstacle is None and drawn != _host_random_numbers():
        obstacle = "it draws random numbers on the host (Python's or NumPy's)"
    if obstacle is not None:
        raise NotReplayable(obstacle)
    try:
        return recorder.record(work)
    except RuntimeError as error:  # out of memory is one
        message = str(error).splitlines()[0]
    # Outside the except block: the traceback would keep the failed capture's tensors alive.
    raise NotReplayable(f"the capture failed: {message}")


def _host_random_numbers() -> tuple[object, ...]:
    """Where Python's and NumPy's generators stand."""
    _, keys, position, *_ = np.random.get_state()  # the legacy generator is what others use
    return random.getstate(), bytes(np.asarray(keys)), position
