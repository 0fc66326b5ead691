"""What the ranks of test_ranks.py run: forks of one process, each with a card of its own."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import monograph.cli
from batches import ragged, tiny_config, tiny_llama
from laws import sharded
from monograph.device import default_device
from monograph.distributed.world import World, read_place
from monograph.optim import AdamW
from monograph.predict.footprint import Work, footprint
from monograph.step import on_device
from pretended_gpu import card, collectives, numbers, order

assert numbers  # kernels compute


def law() -> None:
    """Run a program of law 13's test."""
    # Hooks ask ranks for gradients, so products add none; those of the process beside them must
    # not, either.
    on_device.can_fuse_gradients = lambda step, on_cuda: False
    with on_its_own_card():
        sharded.main()


def command() -> int | None:
    """Run Monograph's command line."""
    with on_its_own_card():
        return monograph.cli.main()


def collective() -> None:
    """Check each collective's numbers, that none makes the host wait or takes memory, and that it
    waits itself.
    """
    world, device = World(read_place()), default_device()
    before = torch.full((2,), 1.0 + world.rank, device=device)
    whole, own = torch.empty(4, device=device), torch.empty(1, device=device)
    torch.cuda.reset_peak_memory_stats()
    with card.logged() as log:
        torch.distributed.all_gather_into_tensor(whole, before)
        torch.distributed.reduce_scatter_tensor(own, before)
        torch.distributed.all_reduce(before)
        torch.distributed.broadcast(before[:1], 0)
    side = collectives.stream(device.index).cuda_stream
    assert not log.of(card.Wait) and {each.stream for each in log.of(card.Launch)} == {side}
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated()
    assert [*whole.tolist(), *own.tolist(), *before.tolist()] == [1, 1, 2, 2, 3, 3, 3]
    assert world.all_to_all(before + world.rank, [1, 1], [1, 1]).tolist() == [3, 4]
    for seed in range(6):
        with order.deferred(seed * world.size + world.rank):
            total = world.sum(torch.ones(2, device=device) * (world.rank + seed))
        assert total.tolist() == [2 * seed + 1] * 2
    world.leave()


def in_any_order() -> None:
    """Check that two updates have the same bits whenever each card does its work."""
    world = World(read_place())
    for kind in sharded.ENGINES:
        expected = _two_updates(kind, world)
        for seed in range(3):
            with order.deferred(seed * world.size + world.rank):
                found = _two_updates(kind, world)
            assert all(torch.equal(found[name], expected[name]) for name in expected), (kind, seed)
    world.leave()


def _two_updates(kind: str, world: World) -> dict[str, Tensor]:
    model, optim = sharded.model(torch.float32, False), AdamW(lr=1e-2)
    engine = sharded.ENGINES[kind](
        model, world=world, micro_batch=sharded.ROWS, clip=0.5, optim=optim
    )
    for seed in range(2):
        sharded.one_update(engine, ragged(7, seed=seed))
    return sharded.snapshot(engine).model


def memory() -> None:
    """Check what two ranks take of their cards against docs/distributed.md and the plan."""
    world, device = World(read_place()), default_device()
    sizes: dict[str, Any] = {"vocab_size": 3000, "hidden_size": 64, "intermediate_size": 160}
    work = Work(
        tiny_config(**sizes),
        rows=2,
        length=16,
        optim=AdamW(),
        compile="none",
        packed=False,
        device_type="cuda",
    )
    parameters, window = work.config.parameter_count(), ragged(4, length=work.length)
    held, peak = {}, {}
    for kind in sharded.ENGINES:
        gc.collect()
        before = torch.cuda.memory_allocated()
        engine = sharded.ENGINES[kind](
            tiny_llama(**sizes).to(device), world=world, micro_batch=2, clip=1.0
        )
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            sharded.one_update(engine, window)
        held[kind] = torch.cuda.memory_allocated() - before
        peak[kind] = torch.cuda.max_memory_allocated() - before
        del engine
    assert held == {
        "ddp": pytest.approx(20 * parameters, rel=0.05),
        "fsdp": pytest.approx(8 * parameters, rel=0.05),
    }
    assert peak["ddp"] == pytest.approx(footprint(work).peak_bytes + 4 * parameters, rel=0.05), peak
    world.leave()


@contextmanager
def on_its_own_card() -> Iterator[None]:
    """Check at the end of the block that all of its tensors were on this process's card."""
    before = allocations()
    yield
    new = [after - count for after, count in zip(allocations(), before, strict=True)]
    assert [number for number, count in enumerate(new) if count] == [torch.cuda.current_device()], (
        new
    )


def allocations() -> list[int]:
    """Return how often memory has been asked for on each card."""
    counts = [torch.cuda.memory_stats(number) for number in range(torch.cuda.device_count())]
    return [count.get("allocation.all.allocated", 0) for count in counts]
