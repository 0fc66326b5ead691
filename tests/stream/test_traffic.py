"""Run: pytest tests/stream/test_traffic.py (what is copied and held equals the formula, in bytes)"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from adapted import SMALL, adapted_llama
from batches import LENGTH, VOCABULARY, packed, tiny_llama
from daily import nightly, pairwise
from monograph.optim import AdamW, Muon
from monograph.stream import Placement, Streamed, chunked_update
from monograph.stream.lanes import Home
from monograph.stream.placement import When
from monograph.stream.store import Buffer
from stream.traffic import Traffic, device_bytes, traffic
from streamed import EVERY, FAMILIES, LAYERS, WHOLE, arguments, crossed, streamed, unclipped

HIDDEN, INTERMEDIATE = 32, 48
DEVICE, HOST, DISK = Home.DEVICE, Home.HOST, Home.DISK
# Of one block: q and o are square, k and v have half the heads, then the MLP's three.
MATRICES = HIDDEN * (HIDDEN + HIDDEN + HIDDEN // 2 + HIDDEN // 2 + 3 * INTERMEDIATE)
EMBEDDING = VOCABULARY * HIDDEN


def moved(engine: Any, micro_batches: int) -> Traffic:
    """What the second of two updates copies."""
    counted = []
    for seed in range(2):
        before = Counter(engine.walk.lanes.moved_bytes)
        engine.accumulate(packed(3 * micro_batches, seed))
        engine.update()
        counted.append(engine.walk.lanes.moved_bytes - before)
    engine.walk.updates.flush()
    return counted[1]


def state_bytes(element_bytes: int = 4) -> int:
    """Of one micro-batch at one boundary."""
    return 3 * LENGTH * HIDDEN * element_bytes


def made(place: str, **changes: Any) -> Any:
    return streamed(placement=EVERY[place], **unclipped(EVERY[place]), **changes)


def held(engine: Any) -> tuple[int, int, int]:
    """Bytes of slots, staging buffers and, of all that was trained, at most of boundaries."""
    walk = engine.walk
    return walk.slots.device_bytes, walk.updates.device_bytes, walk.stage_inputs.peak_bytes


@pytest.mark.parametrize(
    ("place", "tied"),
    # By day homes on disk and on the device, two times of an update, and weights that are tied and
    # that are not.
    crossed(
        EVERY,
        [False, True],
        [("backward, offloaded", False), ("everywhere", True)],
    ),
)
def test_copied_and_held_bytes(place: str, tied: bool) -> None:
    for blocks_per_stage, micro_batches in ((1, 3), (2, 1), (3, 2), (4, 3)):
        engine = made(
            place,
            sizes={"tie_word_embeddings": tied},
            precision="bf16",
            blocks_per_stage=blocks_per_stage,
        )
        expected = traffic(engine.store, engine.placement, state_bytes(2), micro_batches)
        assert moved(engine, micro_batches) == expected
        apart = traffic(engine.store, EVERY[place], 0, 1)
        assert (apart == expected) != EVERY[place].offload, (
            "micro-batches count only where states are offloaded"
        )
        on_device = device_bytes(engine.store, EVERY[place], state_bytes(2), micro_batches)
        assert held(engine) == (on_device.slots, on_device.staging, on_device.boundaries)
        assert on_device.stored == engine.store.bytes_at()[DEVICE]


@pytest.mark.parametrize(
    ("when", "optim"),
    pairwise(
        ["sweep", "next forward", "backward"],
        [Muon(lr=1e-2, state="8bit"), AdamW(lr=1e-2, state="bf16", ema=0.9)],
    ),
)
def test_copied_and_held_bytes_in_many_pieces(
    optim: Any, when: When, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked_update, "MAX_CHUNK_ELEMENTS", 768)
    placement = Placement(when=when, on_disk=WHOLE | {"ema"})
    engine = streamed({"num_hidden_layers": 3}, placement=placement, optim=optim, clip=None)
    assert moved(engine, 2) == traffic(engine.store, placement, state_bytes(), 2)
    expected = device_bytes(engine.store, placement, state_bytes(), 2)
    assert held(engine) == (expected.slots, expected.staging, expected.boundaries)


@pytest.mark.parametrize("layers", nightly([3, 12], {3}))
def test_the_formula_by_hand(layers: int) -> None:
    """Split weights: 2 bytes of 4 cross for a pass, 4 for an update, 8 of moments; the gradient
    once each way.
    """
    engine = streamed(
        {"num_hidden_layers": layers}, placement=Placement(on_disk=WHOLE), precision="bf16"
    )
    gains, ends = 2 * HIDDEN, 2 * EMBEDDING + HIDDEN
    all_parameters = layers * (MATRICES + gains) + ends
    passes = (2 * MATRICES + 4 * gains) * (2 * layers - 2) + 4 * (ends + EMBEDDING)
    update = 4 * all_parameters
    assert moved(engine, 2) == {
        (HOST, DEVICE): passes + update + 4 * all_parameters,
        (DEVICE, HOST): update + 4 * all_parameters,
        (DISK, DEVICE): 8 * all_parameters,
        (DEVICE, DISK): 8 * all_parameters,
    }


@pytest.mark.parametrize(
    ("when", "decisions"), [("sweep", 1), ("next forward", 1), ("backward", LAYERS + 2)]
)
def test_updated_on_the_host_by_hand(when: When, decisions: int) -> None:
    """Weights come for a pass, gradients go home in fp32, and 32 bytes of decision: staging buffers
    hold nothing.
    """
    engine = streamed(placement=Placement(when=when, where="host"), precision="bf16", clip=None)
    gains, ends = 2 * HIDDEN, 2 * EMBEDDING + HIDDEN
    passes = (2 * MATRICES + 4 * gains) * (2 * LAYERS - 2) + 4 * (ends + EMBEDDING)
    gradients = 4 * (LAYERS * (MATRICES + gains) + ends)
    assert moved(engine, 2) == {(HOST, DEVICE): passes, (DEVICE, HOST): gradients + 32 * decisions}
    assert held(engine)[1] == 0
    if when == "backward":  # in turn, two of a block's; those of both ends are smaller
        assert engine.store.bytes_at()[HOST] == 3 * gradients + 2 * 4 * (MATRICES + gains)


def test_where_everything_is_on_the_device_nothing_is_copied() -> None:
    everything = frozenset(
        (stage, name)
        for stage in range(LAYERS + 2)
        for name in ("weights", "rest", "gradient", *WHOLE)
    )
    engine = streamed(placement=Placement(on_device=everything), precision="bf16")
    assert moved(engine, 2) == {} == traffic(engine.store, engine.placement, state_bytes(2), 2)
    found = device_bytes(engine.store, engine.placement, 0, 1)
    assert (
        found.total
        == found.stored
        == 16 * sum(p.numel() for p in tiny_llama(num_hidden_layers=LAYERS).parameters())
    )


@pytest.mark.slow
def test_held_bytes_by_hand_are_flat_in_depth_when_offloaded() -> None:
    """AdamW in fp32: slots for two blocks and the ends, 4 + 4 bytes; four staging buffers of 16
    bytes an element.
    """
    gains = 2 * HIDDEN
    slots = 2 * 8 * (MATRICES + gains) + 8 * (EMBEDDING + HIDDEN)
    for layers, offload in itertools.product((3, 12), (False, True)):
        engine = streamed({"num_hidden_layers": layers}, placement=Placement(offload=offload))
        moved(engine, 2)
        states = 4 * 2 if offload else 2 * (layers + 1) + 1
        assert held(engine) == (slots, 4 * 16 * MATRICES, states * state_bytes())


# ---- adapters: the base is frozen ----------------------------------------------------------------


def adapted(placement: Placement | None = None, **sizes: Any) -> Streamed:
    """An engine of adapters with a base of 4 bits; without a placement, they are on the device."""
    lora = replace(SMALL, base="nf4", tokens=(3, 7) if sizes.pop("rows_of_tokens", False) else ())
    model = adapted_llama(lora, "bf16", **{"num_hidden_layers": LAYERS} | sizes)
    return Streamed(model, placement=placement, **arguments("bf16"))


FROZEN_PLACES = {
    "adapters on the device": None,
    "all on the host": Placement(offload=True),
    "some frozen on the device, others in files": Placement(
        on_device=frozenset({(2, "frozen"), (0, "frozen")}), on_disk=frozenset({"frozen"})
    ),
}


@pytest.mark.parametrize(
    ("place", "sizes"),
    crossed(
        FROZEN_PLACES,
        ["untied", "tied", "rows_of_tokens", "one block", "a mixture"],
        [("adapters on the device", "untied"), ("all on the host", "tied")],
    ),
)
def test_copied_and_held_bytes_of_adapters(place: str, sizes: str) -> None:
    changes = {
        "tied": {"tie_word_embeddings": True},
        "rows_of_tokens": {"rows_of_tokens": True},
        "one block": {"num_hidden_layers": 1},
        "a mixture": FAMILIES["qwen3_moe"],
    }
    engine = adapted(FROZEN_PLACES[place], **changes.get(sizes, {}))
    found = moved(engine, 2)
    expected = traffic(engine.store, engine.placement, state_bytes(2), 2)
    assert found == expected
    on_device = device_bytes(engine.store, engine.placement, state_bytes(2), 2)
    assert held(engine) == (on_device.slots, on_device.staging, on_device.boundaries)
    assert on_device.stored == engine.store.bytes_at()[DEVICE]


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_frozen_base_by_hand(micro_batches: int) -> None:
    """Per weight half a byte of code and 1/64 of level cross, forward and back; nothing comes back, however many
    micro-batches there are.
    """

    def packed_bytes(sizes: list[int]) -> int:
        """Each tensor but the first begins at a multiple of 256 bytes."""
        return sum(-(-size // 256) * 256 for size in sizes[:-1]) + sizes[-1]

    matrices = [(HIDDEN, HIDDEN), (HIDDEN // 2, HIDDEN), (HIDDEN // 2, HIDDEN), (HIDDEN, HIDDEN)]
    matrices += [(INTERMEDIATE, HIDDEN), (INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)]
    # Codes, levels, steps and mean of each matrix are parameters, as are the two gains; the tables are buffers.
    block = packed_bytes(
        [
            *(
                size
                for rows, columns in matrices
                for size in (rows * columns // 2, rows * columns // 64, 4, 4)
            ),
            *[4 * HIDDEN] * 2,
            *[4 * 16] * len(matrices),
        ]
    )
    first, last = 2 * EMBEDDING, packed_bytes([4 * HIDDEN, 2 * EMBEDDING])
    engine = adapted()
    assert [stage.frozen.memory.nbytes for stage in engine.store.stages] == [
        first,
        *[block] * LAYERS,
        last,
    ]
    crossed_bytes = 2 * (LAYERS - 2) * block + first + last
    assert moved(engine, micro_batches) == {(HOST, DEVICE): crossed_bytes}


def test_from_shapes_alone() -> None:
    """As the planner has them, of models that no machine here holds."""
    store = streamed(placement=Placement()).store
    real = traffic(store, Placement(), 0, 1), device_bytes(store, Placement(), 0, 1)
    for each in store.stored_planes:
        each.buffers = {
            name: Buffer(tensor.to("meta"), space) for name, (tensor, space) in each.buffers.items()
        }
        each.plane.param = each.plane.param.to("meta")
    assert (traffic(store, Placement(), 0, 1), device_bytes(store, Placement(), 0, 1)) == real
