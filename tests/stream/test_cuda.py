"""Run: pytest tests/stream/test_cuda.py (the lanes of a GPU; on a machine without one their logic,
on a GPU the bits)

On a GPU also: TORCH_CUDA_SANITIZER=1 pytest tests/stream/test_cuda.py -m gpu, which watches every
stream's accesses.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from adapted import SMALL, adapted_llama
from batches import LENGTH, captured_to_train, packed, tiny_llama
from monograph import compat
from monograph.graph.precision import Precision
from monograph.graph.remat import Remat
from monograph.laws.comparisons import relative_error
from monograph.optim import AdamW
from monograph.resident import Resident
from monograph.stream import Placement, Streamed, lanes
from monograph.stream.lanes import (
    EVENTS,
    Home,
    HostThread,
    Immediately,
    LaneMark,
    Lanes,
    LaneWork,
    Space,
    Streams,
    executor,
)
from monograph.stream.store import adapters_on_device
from stream.fake_gpu import CARD, FakeEvent, FakeGpu
from streamed import (
    EVERY,
    FAMILIES,
    LAYERS,
    MICRO_BATCH,
    UPDATES,
    arguments,
    by_day,
    crossed,
    other_bits,
    streamed,
    trained,
    twin,
    windows,
)


def test_a_cpu_does_everything_at_once() -> None:
    assert isinstance(executor(torch.device("cpu")), Immediately)


PLACES = [
    "next forward, offloaded",
    "everywhere",
    "backward, offloaded",
    "updated on the host",
    "updated on both",
    "backward, updated on the host",
]


@pytest.mark.parametrize(
    ("place", "events"),
    crossed(
        PLACES, [1, 3, EVENTS], zip(PLACES, [3, 1, 1, EVENTS, 1, 1], strict=True), [(PLACES[0], 1)]
    ),
)
def test_streams_and_few_events_change_no_bit(
    place: str, events: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even one event a lane, waited for by works that are long over, is enough."""
    monkeypatch.setattr(lanes, "EVENTS", events)
    changes = {"clip": None, "optim": AdamW(lr=1e-2, ema=0.9)}
    usual = twin(None, windows(2), **changes)
    with FakeGpu(monkeypatch, seed=events) as gpu:
        engine = streamed(placement=EVERY[place], lanes=Lanes(executor(CARD)), **changes)
        left = trained(engine, windows(2))
        engine.evaluate(packed(5))
    assert not other_bits(left, usual)
    assert gpu.deferred > 50 and gpu.waited > 50 and FakeEvent.made == 3 * events
    assert bool(gpu.synchronized) == (EVERY[place].where == "host")


def test_what_failed_is_waited_for_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with FakeGpu(monkeypatch, seed=0) as gpu:
        streams, slot, home = Streams(CARD), Space("slot", Home.DEVICE), Space("home", Home.HOST)
        lanes = Lanes(streams)
        on_device, on_host = torch.zeros(2), torch.ones(2)
        with pytest.raises(torch.OutOfMemoryError):
            lanes.compute(fails, [slot])
        assert streams._event(LaneMark("compute", 1)).recorded == 1  # type: ignore[attr-defined]
        lanes.copy(on_device, on_host, slot, home)
        assert on_device.sum() == 0 and gpu.deferred == 1
        lanes.compute(lambda: on_device.mul_(2), [slot])
    assert on_device.sum() == 4


def test_a_copy_of_what_the_host_writes_waits_for_its_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So slow that without the wait it would be read before."""
    with FakeGpu(monkeypatch, seed=0):
        lanes, slot, home = (
            Lanes(Streams(CARD)),
            Space("slot", Home.DEVICE),
            Space("home", Home.HOST),
        )
        on_device, on_host = torch.zeros(2), torch.zeros(2)
        lanes.host(lambda: (time.sleep(0.2), on_host.fill_(1)), writes=[home])
        lanes.copy(on_device, on_host, slot, home)
        lanes.compute(lambda: None, [slot])
    assert on_device.sum() == 2


def test_the_host_s_thread_does_its_work_in_order_and_no_more_than_is_waited_for_is_awaited() -> (
    None
):
    thread, gate, done = HostThread(), threading.Event(), list[str]()
    thread.submit([], lambda: done.append("first"))
    thread.submit([gate.wait], lambda: done.append("second"))
    thread.wait_for(1)
    assert done == ["first"]
    gate.set()
    thread.wait_for()
    assert done == ["first", "second"]


def test_what_fails_on_the_host_is_raised_in_who_waits_and_ever_after() -> None:
    """Nothing that comes later is done: some weights are updated and others not."""
    thread, done = HostThread(), list[str]()

    def fails() -> None:
        raise MemoryError("no more")

    thread.submit([], fails)
    thread.submit([], lambda: done.append("later"))
    for _ in range(2):
        with pytest.raises(MemoryError, match="no more"):
            thread.wait_for()
    with pytest.raises(MemoryError):
        thread.wait_for(1)
    assert not done


class Beside(Immediately):
    """A CPU whose host lane is a thread; `behind` is how much work this has left at most while
    there is other work.
    """

    def __init__(self) -> None:
        self.thread, self.behind = HostThread(), 0

    def run(self, work: LaneWork) -> Any:
        if work.mark.lane == "host":
            return self.thread.submit([], work.call)
        self.behind = max(self.behind, len(self.thread._uncollected))
        for mark in (mark for mark in work.waits if mark.lane == "host"):
            self.thread.wait_for(mark.number)
        return super().run(work)

    def finish(self) -> None:
        self.thread.wait_for()


@pytest.mark.parametrize(
    "place",
    [
        pytest.param("updated on the host", marks=pytest.mark.slow),
        pytest.param("backward, updated on both", marks=pytest.mark.slow),
        pytest.param("updated on both", marks=pytest.mark.slow),
    ],
)
def test_a_thread_that_updates_with_its_own_graphs_changes_no_bit(place: str) -> None:
    """They are made in it, as none but it calls them, while nothing else is traced; and law 4,
    block by block.
    """
    sizes, changes = {"num_hidden_layers": 3}, {"precision": "bf16", "clip": None}
    beside = Beside()
    engine = streamed(sizes, lanes=Lanes(beside), placement=EVERY[place], **changes)
    captured_to_train(engine, windows(1)[0], scope="blocks")
    assert beside.behind == 0
    before = compat.captured_graphs()
    left = trained(engine, windows())
    assert beside.behind > 0
    assert compat.captured_graphs() == before
    assert not other_bits(left, twin(sizes, windows(), "aot_eager", **changes))


# ---- on a GPU ------------------------------------------------------------------------------------


@pytest.fixture
def _one_order():
    """Sums in one order, or two calls of the same would differ in bits."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.usefixtures("_one_order")
@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("place", by_day(EVERY))
def test_streamed_on_a_gpu_is_resident_on_it(place: str, precision: str) -> None:
    """Blocks large enough that copies and products overlap."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6}
    placement = replace(EVERY[place], device=CARD)
    changes = arguments(precision) | ({"clip": None} if placement.when == "backward" else {})
    # What the host updates has the host's roots, of which a GPU's differ in the last bit. In the
    # second update a weight may round to another bf16 for it, and AdamW magnifies that where
    # gradients are small.
    rows = windows(1) if (placement.where, precision) == ("host", "bf16") else windows()
    results = [
        trained(Resident(tiny_llama(**sizes).to(CARD), **changes), rows),
        trained(Streamed(tiny_llama(**sizes), placement=placement, **changes), rows),
    ]
    resident, ours = ({name: tensor.cpu() for name, tensor in left.items()} for left in results)
    if placement.where != "host":
        assert not other_bits(resident, ours)
    else:
        assert [name for name in ours if relative_error(ours[name], resident[name]) > 1e-5] == []


@pytest.mark.gpu
@pytest.mark.usefixtures("_one_order")
@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.parametrize(
    ("family", "base", "precision"),
    [("qwen3_moe", "nf4", "bf16"), ("llama", "auto", "bf16"), ("llama", "int8", "fp32")],
)
def test_adapters_of_a_streamed_base_on_a_gpu(family: str, base: str, precision: str) -> None:
    """Law 4 for adapters, and nothing of the base comes back."""
    lora, sizes = replace(SMALL, base=base), {"num_hidden_layers": LAYERS} | FAMILIES[family]
    if family == "qwen3_moe":
        lora = replace(lora, targets=("q_proj", "gate_proj", "down_proj"))
    made = [adapted_llama(lora, precision, **sizes) for _ in range(2)]
    changes = arguments(precision, clip=0.01)
    placement = adapters_on_device(made[1], Placement(CARD, offload=True))
    engine = Streamed(made[1], placement=placement, **changes)
    results = [
        trained(Resident(made[0].to(CARD), **changes), windows()),
        trained(engine, windows()),
    ]
    resident, ours = ({name: tensor.cpu() for name, tensor in left.items()} for left in results)
    assert not other_bits(resident, ours)
    frozen = sum(stage.frozen.memory.nbytes for stage in engine.store.stages)
    assert engine.store.bytes_at()[Home.HOST] == frozen
    # What has come back are the inputs of the stages of blocks; the last of three micro-batches is filled up.
    states = UPDATES * LAYERS * 3 * MICRO_BATCH * LENGTH * 32 * Precision(precision).dtype.itemsize
    assert engine.walk.lanes.moved_bytes[Home.DEVICE, Home.HOST] == states


@pytest.mark.gpu
def test_on_a_gpu_a_share_is_chosen_where_blocks_compute() -> None:
    """A pass without numbers has the weights on the card, although they are at home on the host."""
    sizes, changes = (
        {"head_dim": 16, "num_hidden_layers": 2},
        arguments("bf16", remat=Remat.Budget(0.5)),
    )
    results = [
        trained(Resident(tiny_llama(**sizes).to(CARD), **changes), windows(1)),
        trained(
            Streamed(
                tiny_llama(**sizes), placement=replace(EVERY[PLACES[0]], device=CARD), **changes
            ),
            windows(1),
        ),
    ]
    on_host = [{name: tensor.cpu() for name, tensor in left.items()} for left in results]
    assert not other_bits(*on_host)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_model_in_many_places_is_called_and_saved_on_the_host(precision: str) -> None:
    """As for a run's samples and checkpoints: a device that is full has no room for copies of
    weights.
    """
    placement = replace(EVERY["some stages on the device"], device=CARD)
    engine = Streamed(
        tiny_llama(num_hidden_layers=LAYERS), placement=placement, **arguments(precision)
    )
    tokens, before = torch.arange(8)[None], torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with engine.step.assembled() as model:
        logits = model(tokens)
    engine.state()
    assert torch.cuda.max_memory_allocated() == before
    # In bf16, some weights were changed by their last bit to be split.
    torch.testing.assert_close(logits, tiny_llama(num_hidden_layers=LAYERS)(tokens))
