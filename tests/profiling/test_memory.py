"""Run: pytest tests/profiling/test_memory.py."""

from __future__ import annotations

import mmap

import pytest
import torch

from batches import tiny_llama
from monograph.profiling.memory import LiveBytes, ledger, peak_memory_bytes, reset_peak_memory
from monograph.step import Step

CPU = torch.device("cpu")
MB = 1_000_000


def test_peak_counts_what_lives_at_the_same_moment() -> None:
    with LiveBytes() as live:
        a = torch.empty(MB, dtype=torch.uint8)
        b = torch.empty(2 * MB, dtype=torch.uint8)
        del a
        c = torch.empty(4 * MB, dtype=torch.uint8)  # 2 + 4 live here, 1 + 2 before
        del b, c
        d = torch.empty(3 * MB, dtype=torch.uint8)
    assert live.peak_bytes == 6 * MB
    assert live.kept_bytes == 3 * MB
    del d


def test_views_and_in_place_operations_are_free() -> None:
    with LiveBytes() as live:
        a = torch.empty(MB, dtype=torch.uint8)
        b = a.view(1000, 1000)[:500].t()
        b.zero_()
        del b
    assert live.peak_bytes == MB
    del a


def test_torch_parses_no_events_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """It did after each run on a CPU, for a quarter of a tiny run's time."""
    monkeypatch.delattr("torch.autograd.profiler.profile._parse_kineto_results")
    with LiveBytes() as live:
        torch.zeros(MB, dtype=torch.uint8)
    assert live.peak_bytes == MB


def test_memory_from_before_does_not_count_even_when_freed_inside() -> None:
    before = torch.empty(8 * MB, dtype=torch.uint8)
    with LiveBytes() as live:
        del before
        torch.empty(MB, dtype=torch.uint8)
    assert live.peak_bytes == MB
    assert live.kept_bytes == 0


def test_a_block_from_before_does_not_count_at_an_address_that_torch_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An earlier profile saw another block there, whose size torch then says of the one that is
    freed.
    """
    monkeypatch.setattr(LiveBytes, "_allocations", lambda live: [(7, -8 * MB), (9, MB), (9, -MB)])
    with LiveBytes() as live:
        pass
    assert (live.peak_bytes, live.kept_bytes) == (MB, 0)


def test_what_an_operator_allocates_inside_itself_counts() -> None:
    """A median returns one number, but selects it in a copy of its input that no tensor outside
    refers to.
    """
    x = torch.randn(512, 512)
    with LiveBytes() as live:
        x.median()
    assert live.peak_bytes >= 4 * 512 * 512
    assert live.kept_bytes == 0


def test_what_autograd_saves_counts() -> None:
    x = torch.randn(256, 256, requires_grad=True)
    with LiveBytes() as live:
        (x @ x).softmax(-1).square().sum().backward()
    assert live.peak_bytes >= 3 * 4 * 256 * 256


def test_a_chunked_sum_is_seen_to_need_less() -> None:
    x = torch.randn(1024, 1024)
    with LiveBytes() as whole:
        x.exp().sum()
    with LiveBytes() as chunked:
        sum(part.exp().sum() for part in x.chunk(8))
    assert whole.peak_bytes >= 4 * 1024 * 1024
    assert chunked.peak_bytes < whole.peak_bytes / 6


@pytest.mark.slow  # compiles
def test_buffers_of_compiled_code_count() -> None:
    @torch.compile
    def two_products(x: torch.Tensor) -> torch.Tensor:
        return (x @ x) @ x

    x = torch.randn(512, 512)
    two_products(x)
    with LiveBytes() as live:
        two_products(x)
    assert live.peak_bytes >= 2 * 4 * 512 * 512


def test_an_error_inside_is_not_covered_up() -> None:
    with pytest.raises(ZeroDivisionError), LiveBytes():
        _ = 1 / 0


def test_peak_of_the_process_rises_and_can_start_again() -> None:
    if not reset_peak_memory(CPU):
        pytest.skip("this system does not let a process reset its peak")
    low = peak_memory_bytes(CPU)
    with mmap.mmap(-1, 64 * MB) as block:  # a tensor may get pages that the process has kept
        for _ in range(64):
            block.write(bytes(MB))
    high = peak_memory_bytes(CPU)
    assert high >= low + 60 * MB
    reset_peak_memory(CPU)
    # The process itself may have grown by a few pages meanwhile.
    assert peak_memory_bytes(CPU) <= high - 60 * MB


@pytest.mark.gpu
def test_peak_of_a_card_is_that_of_its_tensors() -> None:
    card = torch.device("cuda", 0)
    reset_peak_memory(card)
    before = peak_memory_bytes(card)
    block = torch.empty(64 * 2**20, dtype=torch.uint8, device=card)
    del block
    assert peak_memory_bytes(card) - before == 64 * 2**20


def test_what_captured_graphs_hold_is_part_of_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = list[int]()
    segments = [
        {"device": 0, "segment_pool_id": (0, 0), "total_size": 900, "allocated_size": 100},
        {"device": 0, "segment_pool_id": (0, 1), "total_size": 70, "allocated_size": 20},
        {"device": 1, "segment_pool_id": (0, 1), "total_size": 5000, "allocated_size": 0},
    ]
    stats = {"segment.all.allocated": 3, "segment.all.freed": 0}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1000)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: looked.append(1) or segments)
    card = torch.device("cuda", 0)
    assert [peak_memory_bytes(card) for _ in range(3)] == [1050] * 3 and len(looked) == 1
    stats["segment.all.freed"], segments[1:2] = 1, []
    assert peak_memory_bytes(card) == 1000


def test_the_ledger_knows_what_the_planes_hold_to_the_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(tiny_llama())
    held = 4 * sum(plane.param.numel() for plane in step.planes)
    static = {"weights": held, "gradients": held, "moments": 2 * held}
    assert ledger(step.planes, None, CPU) == {"planned": static}
    monkeypatch.setattr("monograph.profiling.memory.peak_memory_bytes", lambda device: 5 * held)
    found = ledger(step.planes, {"weights": 1}, torch.device("cuda"))
    assert found["planned"] == {"weights": 1} and sum(found["measured"].values()) == 5 * held
    assert list(found["measured"].values())[:3] == list(static.values())
