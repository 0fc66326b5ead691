# Run: pytest tests/stream/test_clock.py
"""The virtual clock: hand-computed schedules, waits, and the roofline of an 8B model on an H200."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
import torch

from daily import pairwise
from monograph.graph.precision import Precision
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.stream import Placement, Streamed
from monograph.stream.clock import Clock, Costs, Link, TimedPasses, time_update
from monograph.stream.lanes import LANES, Home, Lanes, Space

META = torch.device("meta")
TINY = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
EVERY_TIME = ("sweep", "next forward", "backward")
FAST = Link(1e30, 1e30)


@dataclass
class Recorded(Clock):
    """A clock that remembers all work."""

    works: list = field(default_factory=list)

    def run(self, work):
        self.works.append(work)
        return super().run(work)


def timed(config, placement, costs, link, micro_batches=2, rows=2, clock_of=Clock):
    with META:
        model = Llama(config)
    clock = clock_of(link)
    state = torch.empty(rows, 8, config.hidden_size, dtype=torch.bfloat16, device=META)
    passes = partial(TimedPasses, clock=clock, costs=costs, state=state)
    options = {
        "precision": Precision("bf16"),
        "clip": None,
        "placement": replace(placement, device=META),
    }
    engine = Streamed(model, lanes=Lanes(clock), passes=passes, **options)
    return time_update(engine, clock, micro_batches), engine


def tiny(layers=6):
    return LlamaConfig(num_hidden_layers=layers, **TINY)


def space(home=Home.DEVICE):
    return Space("", home)


# ── single pieces of work ───────────────────────────────────────────────────────────────────────


def test_copies_and_computing_go_on_at_once_but_for_what_waits():
    """4 bytes in at 2 bytes/s, 3 s of computing with them; another 4 bytes come meanwhile and wait
    for nothing.
    """
    clock = Clock(Link(2.0, 1.0))
    lanes, data = Lanes(clock), torch.zeros(4, dtype=torch.uint8)
    one, other, home = space(), space(), space(Home.HOST)
    lanes.copy(data, data, one, home)
    lanes.compute(lambda: clock.spend(3.0), reads=[one])
    lanes.copy(data, data, other, home)
    assert clock.free_at_s == {"in": 4.0, "compute": 5.0, "out": 0.0, "host": 0.0}
    lanes.copy(data, data, home, one)  # out, 4 s: its home is read by the second copy until 4.0
    lanes.compute(lambda: clock.spend(1.0), writes=[one])  # has to wait for the way out
    assert clock.free_at_s == {"in": 4.0, "compute": 9.0, "out": 8.0, "host": 0.0}
    assert clock.busy_s == {"compute": 4.0, "in": 4.0, "out": 4.0, "host": 0.0, "disk": 0.0}


def test_the_host_computes_beside_the_device_and_is_waited_for():
    """A gradient goes home in 4 s, the host updates in 2, the weights come in 4; the device
    computes 5 s meanwhile.
    """
    clock = Clock(Link(1.0, 1.0, disk=0.5))
    lanes, data = Lanes(clock), torch.zeros(4, dtype=torch.uint8)
    slot, gradient, weights, moments = space(), space(Home.HOST), space(Home.HOST), space(Home.DISK)
    lanes.copy(data, data, gradient, slot)
    lanes.host(lambda: clock.spend(2.0), [gradient], [weights])
    lanes.compute(lambda: clock.spend(5.0))
    lanes.copy(data, data, slot, weights)
    assert clock.free_at_s == {"out": 4.0, "host": 6.0, "compute": 5.0, "in": 10.0}
    # 4 s of a slow disk.
    lanes.host(lambda: clock.spend(1.0), writes=[moments], from_disk=1, to_disk=1)
    assert (
        clock.free_at_s["host"] == 10.0
        and clock.busy_s["host"] == 3.0
        and clock.busy_s["disk"] == 4.0
    )


def test_a_file_is_as_slow_as_the_slower_of_disk_and_link_and_there_is_one_disk():
    clock = Clock(Link(4.0, 4.0, disk=1.0))
    lanes, data = Lanes(clock), torch.zeros(4, dtype=torch.uint8)
    lanes.copy(data, data, space(), space(Home.DISK))
    lanes.copy(data, data, space(Home.DISK), space())
    lanes.copy(data, data, space(), space(Home.HOST))
    assert (
        clock.free_at_s == {"in": 5.0, "compute": 0.0, "out": 8.0, "host": 0.0}
        and clock.busy_s["disk"] == 8.0
    )


def test_only_computing_is_called():
    clock = Clock(FAST)
    lanes, data = Lanes(clock), torch.ones(4)
    lanes.copy(torch.zeros(4), data, space(), space(Home.HOST))
    assert lanes.compute(lambda: "result") == "result"


# ── whole updates ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("when", "blocks_per_stage", "where"),
    [
        ("sweep", 1, "host"),
        ("next forward", 2, "device"),
        ("backward", 1, "device"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in itertools.product(EVERY_TIME, (1, 2), ("device", "host"))
            if each
            not in {("sweep", 1, "host"), ("next forward", 2, "device"), ("backward", 1, "device")}
        ),
    ],
)
def test_with_an_infinite_link_an_update_lasts_as_long_as_it_computes(
    when, blocks_per_stage, where
):
    """Where a host that takes no time updates, the device has nothing but passes."""
    costs = Costs(
        first_s=1.0,
        forward_s=2.0,
        recompute_backward_s=6.0,
        loss_s=5.0,
        first_backward_s=3.0,
        weight_update_s=1e-3,
    )
    layers, micro_batches = 6, 3
    found, engine = timed(
        tiny(layers),
        Placement(when=when, where=where, blocks_per_stage=blocks_per_stage),
        costs,
        FAST,
        micro_batches,
    )
    numbers = sum(each.plane.param.numel() for each in engine.store.stored_planes)
    expected = micro_batches * (1 + layers * (2 + 6) + 5 + 3) + 1e-3 * numbers * (where == "device")
    assert found.update_s == pytest.approx(expected, rel=1e-9) == found.busy_s["compute"]
    assert found.bottleneck == "compute"


@pytest.mark.parametrize(("when", "blocks_per_stage"), pairwise(EVERY_TIME, [1, 2, 3]))
def test_without_computing_the_copies_of_a_lane_are_its_bytes_by_its_bandwidth(
    when, blocks_per_stage
):
    placement = Placement(when=when, blocks_per_stage=blocks_per_stage)
    found, _ = timed(tiny(), placement, Costs(), Link(7.0, 3.0))
    assert found.busy_s["in"] == pytest.approx(found.moved_bytes[Home.HOST, Home.DEVICE] / 7.0)
    assert found.busy_s["out"] == pytest.approx(found.moved_bytes[Home.DEVICE, Home.HOST] / 3.0)
    lanes = [found.busy_s[lane] for lane in ("in", "out")]
    assert max(lanes) <= found.update_s * (1 + 1e-9) and found.update_s <= sum(lanes) * (1 + 1e-9)


@pytest.mark.parametrize(("when", "where"), pairwise(EVERY_TIME, ["device", "host"]))
def test_nothing_begins_before_what_it_waits_for(when, where):
    costs, link = Costs(1.0, 2.0, 6.0, 5.0, 3.0, 1e-3, 1e-2), Link(900.0, 700.0)
    _, engine = timed(
        tiny(), Placement(when=when, where=where, offload=True), costs, link, clock_of=Recorded
    )
    clock = engine.walk.lanes.executor
    last = dict.fromkeys(LANES, 0.0)
    for work in clock.works:
        lane, end = work.mark.lane, clock.finished_at_s[work.mark]
        copied_s = (
            0.0
            if lane in ("compute", "host")
            else work.moved_bytes / (link.into if lane == "in" else link.out)
        )
        begin = end - copied_s
        assert all(clock.finished_at_s[mark] <= begin + 1e-6 for mark in work.waits)
        assert begin >= last[lane] - 1e-6
        last[lane] = end
    assert any(work.waits for work in clock.works)


@pytest.mark.parametrize("when", EVERY_TIME)
def test_a_faster_link_makes_no_update_longer(when):
    costs = Costs(1.0, 2.0, 6.0, 5.0, 3.0, 1e-3)
    lengths = [
        timed(tiny(), Placement(when=when), costs, Link(b, b))[0].update_s
        for b in (1e2, 1e3, 1e4, 1e5, 1e6)
    ]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] > 10 * lengths[-1]


@pytest.mark.parametrize("when", EVERY_TIME)
def test_a_slow_host_is_the_length_of_an_update(when):
    costs = Costs(forward_s=1.0, recompute_backward_s=3.0, host_weight_update_s=1.0)
    found, engine = timed(tiny(), Placement(when=when, where="host"), costs, FAST)
    numbers = sum(each.plane.param.numel() for each in engine.store.stored_planes)
    assert found.busy_s["host"] == numbers and found.bottleneck == "host"
    assert numbers <= found.update_s <= numbers + found.busy_s["compute"] + 1e-6


def test_what_stays_on_the_device_is_not_copied():
    layers = 6
    names = ("weights", "rest", "gradient", "exp_avg", "exp_avg_sq")
    every = frozenset((stage, name) for stage in range(layers + 2) for name in names)
    found, engine = timed(
        tiny(layers), Placement(on_device=every), Costs(forward_s=1.0), Link(1.0, 1.0)
    )
    homes = {
        buffer.space.home for each in engine.store.stored_planes for buffer in each.buffers.values()
    }
    assert homes == {Home.DEVICE} and not found.moved_bytes and found.update_s == 2 * layers


# ── the roofline of an 8B model ─────────────────────────────────────────────────────────────────

LLAMA_3_8B = LlamaConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8,
)  # fmt: skip
BLOCK, HEAD = 218_103_808, 128256 * 4096  # numbers in products
FLOPS, BYTES_PER_S = 600e12, 50e9


def teraflops(when, tokens, micro_batches=8):
    """Useful ones by 6 per weight and token, with 600 TFLOP/s and 50 GB/s each way; blocks are
    recomputed.
    """
    each = tokens / micro_batches / FLOPS
    costs = Costs(
        forward_s=2 * BLOCK * each, recompute_backward_s=6 * BLOCK * each, loss_s=6 * HEAD * each
    )
    found, _ = timed(
        LLAMA_3_8B, Placement(when=when), costs, Link(BYTES_PER_S, BYTES_PER_S), micro_batches
    )
    return useful(tokens) / found.update_s / 1e12


def useful(tokens):
    return 6 * (32 * BLOCK + HEAD) * tokens


@pytest.mark.parametrize(
    ("when", "tokens", "expected"),
    [
        ("backward", 65536, 454),
        pytest.param("backward", 131072, 456, marks=pytest.mark.slow),
        pytest.param("next forward", 65536, 393, marks=pytest.mark.slow),
        pytest.param("next forward", 131072, 446, marks=pytest.mark.slow),
    ],
)
def test_the_walk_reaches_the_roofline_of_its_copies(when, tokens, expected):
    """Expected: sums of the phases' longest, in an independent model of a streamed 8B with an
    update on the device.

    That model has gradients of bf16, so that 14 bytes of a number come before the next forward
    pass; ours are of fp32, as all engines accumulate them, and it is 16.
    """
    assert teraflops(when, tokens) == pytest.approx(expected, rel=0.1)


def test_no_walk_is_faster_than_its_roofline():
    """Forward: 16 bytes of every number come while 2 FLOPs a token are computed; back: 4 bytes go."""
    tokens, numbers = 16384, 32 * BLOCK + 2 * HEAD
    back_s = max(4 * numbers / BYTES_PER_S, (6 * 32 * BLOCK + 6 * HEAD) * tokens / FLOPS)
    ideal_s = 16 * numbers / BYTES_PER_S + back_s
    assert teraflops("next forward", tokens) < useful(tokens) / ideal_s / 1e12
