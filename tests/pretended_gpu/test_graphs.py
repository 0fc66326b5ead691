"""Run: make gpu-less ARGS=tests/pretended_gpu/test_graphs.py (a capture computes nothing, a replay
all of it)
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

CARD = torch.device("cuda", 0)


def graph_of(work) -> torch.cuda.CUDAGraph:
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin()
        try:
            work()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph


def test_a_replay_reads_and_writes_the_same_memory_again() -> None:
    total, added = torch.zeros(4, device=CARD), torch.ones(4, device=CARD)
    graph = graph_of(lambda: total.add_(added * 2))
    assert total.tolist() == [0] * 4
    graph.replay()
    added.fill_(10)
    graph.replay()
    assert total.tolist() == [22] * 4


def test_replays_draw_what_calls_would_draw() -> None:
    drawn = torch.zeros(8, device=CARD)

    def work() -> None:
        drawn.copy_(torch.rand(8, device=CARD) + torch.randn(8, device=CARD))

    graph = graph_of(work)
    torch.cuda.manual_seed(1)
    replayed = []
    for _ in range(2):
        graph.replay()
        replayed.append(drawn.cpu())
    torch.cuda.manual_seed(1)
    for expected in replayed:
        work()
        assert torch.equal(drawn.cpu(), expected)
    assert not torch.equal(*replayed)


@pytest.mark.parametrize(
    "illegal",
    [
        lambda x: x.sum().item(),
        lambda x: x.cpu(),
        lambda x: x.copy_(torch.ones(4)),
        lambda x: torch.cuda.synchronize(),
        lambda x: (x > 0).nonzero(),
    ],
    ids=[
        "a number read",
        "a copy to the host",
        "a copy from pageable memory",
        "a wait",
        "a shape of numbers",
    ],
)
def test_what_a_capture_may_not_do_ends_it(illegal) -> None:
    numbers = torch.ones(4, device=CARD)
    with pytest.raises((RuntimeError, torch.AcceleratorError)):
        graph_of(lambda: illegal(numbers))
    assert numbers.tolist() == [1] * 4  # the card goes on


def test_launches_are_not_counted_of_kernels_that_compute(monkeypatch) -> None:
    """Python does the work of a replay here, so the driver would count none."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import pretended

    with pytest.raises(SystemExit, match="run this without -p pretended_gpu.plugin"):
        pretended.watch()
