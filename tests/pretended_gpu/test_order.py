"""Run: make gpu-less ARGS=tests/pretended_gpu/test_order.py (nothing relies on a card that does
things at once)

Kernels and copies are done when something waits for them, in random orders, by torch's own streams,
events and allocator. A wait that is missing shows as wrong numbers; each wait that is there is left
out once, to see that it does.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from batches import packed, tiny_llama
from monograph.decode.generator import Generator
from monograph.decode.knobs import chain_of
from monograph.decode.outbox import Outbox
from monograph.decode.request import Request
from monograph.decode.sampling import Sampling
from monograph.graph.remat import Remat
from monograph.graph.replay import CudaGraphs, Replays
from monograph.resident import Resident
from monograph.stream import Streamed
from pretended_gpu import order
from pretended_gpu.card import driver
from streamed import EVERY, arguments, other_bits, trained, windows

CARD = torch.device("cuda", 0)
SEEDS = 6
LAYERS = {"num_hidden_layers": 2}


@pytest.fixture(autouse=True)
def _one_order_of_sums() -> Iterator[None]:
    # Also fills memory that nobody has written with NaN.
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


# ── the card itself ─────────────────────────────────────────────────────────────────────────────


def doubled(wait: Callable[[torch.cuda.Stream], Any], seed: int) -> list[float]:
    with order.deferred(seed):
        side, numbers = torch.cuda.Stream(), torch.ones(8, device=CARD)
        torch.cuda.synchronize()
        numbers += 1
        wait(side)
        with torch.cuda.stream(side):
            result = numbers * 2
        side.synchronize()
        return result.tolist()


def by_an_idle_stream(side: torch.cuda.Stream) -> None:
    between = torch.cuda.Stream()
    between.wait_stream(torch.cuda.current_stream())
    side.wait_stream(between)


def test_a_missing_wait_shows_for_some_seeds_and_each_kind_of_wait_is_enough() -> None:
    waits: list[Callable[[torch.cuda.Stream], Any]] = [
        lambda side: side.wait_stream(torch.cuda.current_stream()),
        lambda side: side.wait_event(torch.cuda.current_stream().record_event()),
        lambda side: torch.cuda.current_stream().record_event().synchronize(),
        lambda side: torch.cuda.synchronize(),
        by_an_idle_stream,
    ]
    assert all(doubled(wait, seed) == [4.0] * 8 for wait in waits for seed in range(SEEDS))
    assert {tuple(doubled(lambda side: None, seed)) for seed in range(3 * SEEDS)} == {
        (2.0,) * 8,
        (4.0,) * 8,
    }


def test_an_event_says_whether_it_has_happened() -> None:
    with order.deferred(0):
        torch.cuda.synchronize()
        event = torch.cuda.Event()
        for _ in range(20):
            torch.ones(4, device=CARD)
        event.record()
        early = event.query()
        event.synchronize()
        assert event.query() and not early


def test_memory_that_another_stream_still_reads_is_written_over() -> None:
    """As on a card: the allocator gives freed memory to the next tensor, unless `record_stream`
    says who reads it.
    """

    def read(seed: int, *, recorded: bool) -> float:
        with order.deferred(seed):
            side, numbers = torch.cuda.Stream(), torch.ones(1000, device=CARD)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                total = numbers.sum()
            if recorded:
                numbers.record_stream(side)
            del numbers
            torch.full((1000,), 7.0, device=CARD)
            torch.cuda.synchronize()
            return total.item()

    assert {read(seed, recorded=True) for seed in range(SEEDS)} == {1000.0}
    assert {read(seed, recorded=False) for seed in range(3 * SEEDS)} > {1000.0}


# ── Monograph ───────────────────────────────────────────────────────────────────────────────────


def left_by(
    place: str, precision: str, seed: int | None, ignored: int = 0
) -> tuple[dict[str, Tensor], int]:
    """What a run leaves, on the host, and how many waits had something to wait for; without a seed,
    a resident one.
    """
    placement = EVERY[place]
    changes = arguments(precision) | ({"clip": None} if placement.when == "backward" else {})
    if seed is None:
        left = trained(Resident(tiny_llama(**LAYERS).to(CARD), **changes), windows(2))
        return {name: tensor.cpu() for name, tensor in left.items()}, 0
    there = frozenset(which for which in placement.on_device if which[0] <= 3)
    with order.deferred(seed):
        engine = Streamed(
            tiny_llama(**LAYERS),
            placement=replace(placement, device=CARD, on_device=there),
            **changes,
        )
        driver.card_ignore_wait(order.number(ignored))
        try:
            # At once, as a checkpoint does: nobody but the engine waits for what is on its way to
            # the host.
            left = {
                name: tensor.cpu().clone() for name, tensor in trained(engine, windows(2)).items()
            }
        finally:
            waits = driver.card_waits()
            driver.card_ignore_wait(order.number(0))
        return left, waits


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("place", EVERY)
def test_streamed_is_resident_whenever_the_card_does_its_work(place: str, precision: str) -> None:
    """Law 4, in bits."""
    expected, _ = left_by(place, precision, None)
    for seed in range(2):
        left, waits = left_by(place, precision, seed)
        assert not other_bits(left, expected) and waits >= 10


@pytest.mark.parametrize(
    "place", ["next forward, offloaded", "backward, offloaded", "updated on the host"]
)
def test_no_wait_of_streaming_is_superfluous(place: str) -> None:
    """A sample of the waits of a run, each left out in turn: the run's result is wrong for one of
    the first seeds.
    """
    expected, _ = left_by(place, "fp32", None)
    _, waits = left_by(place, "fp32", 0)
    early = range(1, waits // 2 + 1)  # what a run ends with protects nothing more
    # A host thread's waits depend on its speed.
    chosen = random.Random(place).sample(early, min(8, len(early)))

    def shows(ignored: int) -> bool:
        for seed in range(3 * SEEDS):
            try:
                if other_bits(left_by(place, "fp32", seed, ignored)[0], expected):
                    return True
            except Exception:  # noqa: BLE001 - whatever the wrong numbers lead to
                return True
        return False

    # One may be over by chance in all of these orders: its work is among the first that may be
    # done.
    missed = [number for number in chosen if not shows(number)]
    assert len(missed) <= 1, missed


def resident(seed: int | None, **changes: Any) -> dict[str, Tensor]:
    def run() -> dict[str, Tensor]:
        left = trained(
            Resident(tiny_llama(num_hidden_layers=4).to(CARD), **arguments(**changes)), pinned(2)
        )
        return {name: tensor.cpu() for name, tensor in left.items()}

    if seed is None:
        return run()
    with order.deferred(seed):
        return run()


def pinned(count: int) -> Iterator[dict[str, Tensor]]:
    """Windows in page-locked memory, as in training, each dropped when the next one is asked for."""
    for seed in range(count):
        yield {name: tensor.pin_memory() for name, tensor in packed(8, seed=seed).items()}


@pytest.mark.parametrize("policy", [None, Remat.Offload()], ids=["kept", "offloaded"])
def test_a_resident_run_does_not_depend_on_when_copies_are_made(policy: Any) -> None:
    expected = resident(None, remat=policy)
    assert all(not other_bits(resident(seed, remat=policy), expected) for seed in range(SEEDS))


def replayed(seed: int, without: str | None = None) -> list[float]:
    """Numbers that are changed in turn by calls, which become replays of a graph, and by the stream
    of the caller.
    """
    with order.deferred(seed), pytest.MonkeyPatch.context() as patch:
        numbers = torch.zeros(4, device=CARD)
        replays = Replays(lambda: numbers.mul_(2), recorder := CudaGraphs(CARD))
        waits = torch.cuda.Stream.wait_stream
        if without:
            kept = (
                (lambda waiting: waiting == recorder._stream)
                if without == "after"
                else (lambda waiting: False)
            )
            patch.setattr(
                torch.cuda.Stream, "wait_stream", lambda one, other: kept(one) and waits(one, other)
            )
        for _ in range(4):
            numbers += 1
            replays.run(1)
        return numbers.tolist()


def test_a_warm_up_waits_and_is_waited_for() -> None:
    assert all(replayed(seed) == [30.0] * 4 for seed in range(3 * SEEDS))
    for which in ("before and after", "after"):
        assert any(replayed(seed, which) != [30.0] * 4 for seed in range(3 * SEEDS)), which


# ── sampling ────────────────────────────────────────────────────────────────────────────────────


def sampled(seed: int | None) -> dict[int, list[int]]:
    """The tokens of three requests in two rows, four steps a block."""
    model = tiny_llama(num_hidden_layers=1).to(CARD)
    machine = Generator(
        model, chain_of([Sampling()]), rows=2, slots=32, vocabulary=model.config.vocab_size, pace=4
    )
    found = {
        machine.submit(Request((5, 6, 7), Sampling(seed=seed), 9)): list[int]() for seed in range(3)
    }
    with nullcontext() if seed is None else order.deferred(seed):
        for event in machine.run():
            found[event.number] += event.token_ids
    return found


def test_sampled_tokens_do_not_depend_on_when_lines_are_copied() -> None:
    expected = sampled(None)
    assert len({tuple(tokens) for tokens in expected.values()}) == 3 and all(
        map(len, expected.values())
    )
    assert all(sampled(seed) == expected for seed in range(2))


def sent(seed: int, without: str | None = None) -> list[list[int]]:
    """Lines that the device writes, as the host reads each block while the next one runs."""
    found, steps = list[list[int]](), 4
    with order.deferred(seed), pytest.MonkeyPatch.context() as patch:
        ring, line = (
            torch.zeros(2 * steps, 2, dtype=torch.int32, device=CARD),
            torch.zeros(1, dtype=int, device=CARD),
        )
        value, outbox, before = (
            torch.zeros(1, 2, dtype=torch.int32, device=CARD),
            Outbox([ring]),
            None,
        )
        if without:
            owner = torch.cuda.Event if without == "synchronize" else torch.cuda.Stream
            patch.setattr(owner, without, lambda *_: None)
        for _ in range(5):
            outbox.begin_block(line)
            for _ in range(steps):
                value += 1
                ring.index_copy_(0, line, value)
                line += 1
            half = outbox.send(steps)
            if before is not None:
                found += outbox.read(before, steps)[0].tolist()
            before = half
    return found


def test_no_wait_of_the_outbox_is_missing_or_superfluous() -> None:
    expected = [[n, n] for n in range(1, 17)]
    assert all(sent(seed) == expected for seed in range(3 * SEEDS))
    for wait in ("wait_stream", "synchronize"):
        assert any(sent(seed, wait) != expected for seed in range(3 * SEEDS)), wait
