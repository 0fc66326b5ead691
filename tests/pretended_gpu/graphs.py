"""Capture and replay of CUDA graphs with numbers: a replay does the work that was captured, in the
order of its calls.

A capture computes nothing, as on a real card. Its rules are those of the driver.
"""

from __future__ import annotations

from typing import Any

import torch

from pretended_gpu import order
from pretended_gpu.operators import Draws, drawn


def install() -> None:
    """Make torch's CUDA graphs keep the work of their captures."""
    graph = torch.cuda.CUDAGraph
    begin, end = graph.capture_begin, graph.capture_end

    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> None:
        self._work, self._draws = [], 0
        Draws.in_graph = 0
        begin(self, *args, **kwargs)
        order.captured.append(self._work)

    def capture_end(self: Any) -> None:
        order.captured.pop()
        self._draws = Draws.in_graph
        end(self)

    def replay(self: Any) -> None:
        began = drawn(self._draws)

        def work() -> None:
            Draws.replay = began
            for piece in self._work:
                piece()

        order.launch(work)

    graph.capture_begin, graph.capture_end, graph.replay = capture_begin, capture_end, replay  # type: ignore[method-assign]
