"""How a step is run many times without the host: called, or on a GPU captured once a variant and replayed."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol

import torch

WARM_UP = 2  # calls before a capture: the first compiles, both settle what the libraries allocate


class Graph(Protocol):
    """A captured sequence of device work."""

    def replay(self) -> None:
        """Do the work again."""
        ...


Capture = Callable[[Callable[[], None]], Graph]


def cuda_graph(work: Callable[[], None]) -> Graph:
    """Record what `work` launches on a CUDA device, without running it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


class Replays:
    """A function of a variant whose only effect is on device memory, run by replaying what it launches.

    The first calls of a variant are ordinary ones, so nothing is run that would not have been.
    """

    def __init__(self, function: Callable[..., None], capture: Capture | None) -> None:
        """A function and how to capture it; None: call it every time."""
        self._function, self._capture = function, capture
        self._calls: dict[Hashable, int] = {}
        self._graphs: dict[Hashable, Graph] = {}

    @property
    def variants(self) -> int:
        """How many different graphs ran."""
        return len(self._calls)

    def run(self, times: int, *variant: Hashable) -> None:
        """Run the function so many times."""
        for _ in range(times):
            if (graph := self._graphs.get(variant)) is not None:
                graph.replay()
                continue
            calls = self._calls[variant] = self._calls.get(variant, 0) + 1
            self._function(*variant)
            if self._capture is not None and calls >= WARM_UP:
                self._graphs[variant] = self._capture(lambda: self._function(*variant))
