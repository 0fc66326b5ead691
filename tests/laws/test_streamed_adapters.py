# Run: pytest tests/laws/test_streamed_adapters.py [-m slow]
"""Law 4 for adapters: those of a base that is streamed are those of a base on the device. Losses,
norms, adapters, moments and counters, in every bit.

The model, its windows and the placements are those of tests/laws/test_streamed_is_resident.py.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from adapted import SMALL, adapted_llama
from batches import packed, ragged
from monograph.graph.remat import Remat
from monograph.laws.comparisons import error_within
from monograph.loop import load_checkpoint, save_checkpoint
from monograph.optim import AdamW, Group, Muon
from monograph.resident import Resident
from monograph.stream import Placement, Streamed
from monograph.stream.lanes import Lanes
from monograph.stream.slots import StageOnDevice
from monograph.stream.store import adapters_on_device
from stream.adversary import AnyOrder, Late
from stream.races import Recorder, races, waits
from streamed import EVERY, FAMILIES, LAYERS, arguments, files, other_bits, trained, windows

ADAPTERS = {
    "lora": SMALL,
    "magnitudes": replace(SMALL, dora=True, rslora=True),
    "of experts": replace(SMALL, targets=("q_proj", "gate_proj", "down_proj")),
    "rows of tokens": replace(SMALL, tokens=(3, 7)),
}
CLIP = 0.01  # smaller than the norms of all gradients here
# (family, adapters, base, precision)
DAY = [
    ("qwen3_moe", "of experts", "nf4", "bf16"),
    ("llama", "magnitudes", "int8", "fp32"),
    ("llama", "rows of tokens", "auto", "bf16"),
]
EVERY_CASE = [
    *DAY,
    ("qwen3_moe", "of experts", "int8", "fp32"),
    ("qwen3_moe", "magnitudes", "nf4", "fp32"),
    ("qwen3_moe", "rows of tokens", "nf4", "bf16"),
    ("gpt_oss", "of experts", "nf4", "bf16"),
    ("qwen3_5", "lora", "nf4", "bf16"),
    ("llama", "lora", "auto", "fp32"),
    ("llama", "lora", "nf4", "bf16"),
    ("llama", "magnitudes", "auto", "bf16"),
    ("gemma3", "lora", "int8", "bf16"),
]
CASES = [pytest.param(*case, marks=() if case in DAY else pytest.mark.slow) for case in EVERY_CASE]


def model_of(family="qwen3_moe", adapters="of experts", base="nf4", precision="bf16", **sizes):
    sizes = {"num_hidden_layers": LAYERS} | FAMILIES[family] | sizes
    return adapted_llama(replace(ADAPTERS[adapters], base=base), precision, **sizes)


def pair(placement=None, *, lanes=None, blocks_per_stage=1, made=None, **changes):
    """A resident engine and a streamed one. Without a placement the adapters are on the device."""
    made = made or {}
    options = arguments(made.get("precision", "bf16"), **{"clip": CLIP} | changes)
    model = model_of(**made)
    if placement is None:
        placement = adapters_on_device(model, Placement(blocks_per_stage=blocks_per_stage))
    else:
        placement = replace(placement, blocks_per_stage=blocks_per_stage)
    streamed = Streamed(model, placement=placement, lanes=lanes, **options)
    return Resident(model_of(**made), **options), streamed


def assert_same(*given, batches=None, **changes):
    batches = batches or windows()
    resident, streamed = pair(*given, **changes)
    its, mine = trained(resident, batches), trained(streamed, batches)
    assert not other_bits(mine, its)
    return its


@pytest.mark.parametrize(("family", "adapters", "base", "precision"), CASES)
def test_adapters_of_a_streamed_base(family, adapters, base, precision):
    made = {"family": family, "adapters": adapters, "base": base, "precision": precision}
    left = assert_same(made=made)
    norms = [value for name, value in left.items() if "grad_norm" in name]
    assert min(norms) > 2 * CLIP, "clipping must bite"


def test_by_default_only_frozen_tensors_are_on_the_host():
    engine = Streamed(model_of())
    homes = engine.store.bytes_at()
    frozen = sum(stage.frozen.memory.nbytes for stage in engine.store.stages)
    assert (homes["host"], homes["disk"]) == (frozen, 0)
    assert homes["device"] == sum(16 * plane.param.numel() for plane in engine.step.planes)


FROZEN_ON_DISK = Placement(on_disk=frozenset({"frozen"}))
SOME_ON_THE_DEVICE = Placement(
    offload=True, on_device=frozenset({(0, "frozen"), (3, "frozen"), (2, "weights")})
)
PLACES = EVERY | {"frozen in files": FROZEN_ON_DISK, "some frozen": SOME_ON_THE_DEVICE}


@pytest.mark.parametrize(
    ("place", "blocks_per_stage"),
    [
        ("some frozen", 1),
        *(
            pytest.param(place, 1 + number % 3, marks=pytest.mark.slow)
            for number, place in enumerate(PLACES)
            if place not in ("some stages on the device", "backward, some stages on the device")
        ),
    ],
)
def test_wherever_its_tensors_live(place, blocks_per_stage):
    placement = PLACES[place]
    last = -(-LAYERS // blocks_per_stage) + 1
    there = frozenset(each for each in placement.on_device if each[0] <= last)
    clip = {"clip": None} if placement.when == "backward" else {}
    assert_same(replace(placement, on_device=there), blocks_per_stage=blocks_per_stage, **clip)


@pytest.mark.parametrize(
    "changes",
    [
        {"remat": Remat.Full(), "blocks_per_stage": 2},
        pytest.param({"remat": Remat.Budget(0.3)}, marks=pytest.mark.slow),
        pytest.param({"batches": windows(rows=ragged)}, marks=pytest.mark.slow),
        pytest.param({"optim": Muon(lr=1e-2, state="8bit", ema=0.9)}, marks=pytest.mark.slow),
        pytest.param(
            {"optim": AdamW(lr=1e-2, groups=(Group("*.lora_[Bm]*", lr=16.0),))},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["recomputed", "a share recomputed", "padded", "muon", "ratio of rates"],
)
def test_however_they_are_trained(changes):
    assert_same(**changes)


@pytest.mark.slow
@pytest.mark.parametrize("adapters", ["lora", pytest.param("of experts", marks=pytest.mark.slow)])
def test_of_a_tied_base(adapters):
    assert_same(made={"adapters": adapters, "tie_word_embeddings": True})


@pytest.mark.slow
def test_rows_of_tied_tables_are_as_exact_as_any_order():
    """Streamed, the head's gradient of all micro-batches is summed before the embedding's."""
    tied = {"family": "llama", "adapters": "rows of tokens", "base": "auto", "precision": "fp32"}
    tied["tie_word_embeddings"] = True
    exact = Resident(model_of(**tied).double(), **arguments("fp32"))
    engines = [exact, *pair(made=tied)]
    for engine in engines:
        engine.accumulate(windows(1)[0])
    truth, its, mine = (
        {name: view.clone() for plane in each.step.planes for name, view in plane.views(plane.grad)}
        for each in engines
    )
    assert other_bits(mine, its) in ([], ["model.embed_tokens.token_rows"])
    for name, gradient in mine.items():
        assert error_within(gradient, its[name], truth[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_captured_block_by_block(backend):
    resident, streamed = pair()
    for engine in (resident, streamed):
        assert engine.capture(windows(1)[0], backend, "blocks") is None
    assert not other_bits(trained(streamed, windows()), trained(resident, windows()))


def followed(engine):
    """Three updates, with all that happens between them."""
    left = trained(engine, windows(1))
    left["score"] = engine.evaluate(packed(5, seed=9))[0]
    seen = engine.trial(windows(1)[0])
    left["trial"] = torch.tensor([seen.loss, seen.count, seen.gradient_count])
    engine.accumulate(windows(1, first=5)[0])  # a second window of the next update
    left |= trained(engine, windows(1, first=1))
    with engine.step.assembled() as model:
        left["assembled"] = model(packed(2)["tokens"]).detach().clone()
    left["another score"] = engine.evaluate(packed(5, seed=8))[0]
    return left | trained(engine, windows(1, first=2))


@functools.cache
def its_way():
    return followed(pair()[0])


def test_evaluated_tried_called_and_trained_on():
    assert not other_bits(followed(pair(SOME_ON_THE_DEVICE)[1]), its_way())


class Nowhere:
    """An iterator of windows whose position is nothing."""

    def state(self):
        return {}


@pytest.mark.parametrize("to_resident", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_one_resumes_what_the_other_saved(to_resident, tmp_path):
    """Nor do their checkpoints differ in a byte, and neither holds the base."""
    for name, engine in zip(("resident", "streamed"), pair(), strict=True):
        trained(engine, windows(2))
        save_checkpoint(engine, Nowhere(), tmp_path / name)
    assert files(tmp_path / "resident") == files(tmp_path / "streamed")
    resident, streamed = pair()
    engine, twin = (resident, streamed) if to_resident else (streamed, resident)
    trained(engine, windows(1, first=7))
    load_checkpoint(engine, tmp_path / ("streamed" if to_resident else "resident"))
    trained(twin, windows(2))
    assert not other_bits(trained(engine, windows(1, 30)), trained(twin, windows(1, 30)))


# ---- copies that overlap with computing ----------------------------------------------------------


@pytest.mark.parametrize("executor", [Late, pytest.param(AnyOrder, marks=pytest.mark.slow)])
def test_copies_as_late_as_they_may_or_in_any_order_change_no_bit(executor):
    executors = [executor(seed) for seed in (1, 2)] if executor is AnyOrder else [executor()]
    for each in executors:
        assert not other_bits(followed(pair(lanes=Lanes(each))[1]), its_way())


def test_no_copy_races_with_a_pass_and_every_wait_is_needed():
    recorder = Recorder()
    engine = pair(lanes=Lanes(recorder))[1]
    trained(engine, windows(1))
    begin = len(recorder.works)
    trained(engine, windows(1))
    every = waits(recorder, begin)
    assert every and not list(races(recorder))
    assert [dropped for dropped in every if not any(races(recorder, dropped))] == []


# ---- faults that these tests see -----------------------------------------------------------------


def test_a_slot_that_is_overwritten_too_early_is_seen():
    """Each wait left out: a late copy then meets a pass that reads the slot."""
    recorder = Recorder()
    trained(pair(lanes=Lanes(recorder))[1], windows(1))
    of_slots = [(mark, of) for mark, of in waits(recorder, 0) if mark.lane == "compute"]
    assert of_slots
    its = trained(pair()[0], windows(1))
    mine = trained(pair(lanes=Lanes(Late(of_slots[-1])))[1], windows(1))
    assert other_bits(mine, its)


def test_a_stale_stage_in_a_slot_is_seen(monkeypatch):
    """The slot keeps another stage's frozen tensors, as if the copy had been left out."""
    fetch = StageOnDevice.fetch_frozen

    def fetch_once(self, lanes):
        if self.slot.loaded_frozen is None:
            fetch(self, lanes)

    its = trained(pair()[0], windows(1))
    assert not other_bits(trained(pair()[1], windows(1)), its)
    monkeypatch.setattr(StageOnDevice, "fetch_frozen", fetch_once)
    assert other_bits(trained(pair()[1], windows(1)), its)


@pytest.mark.parametrize("copies", [4, 6])
def test_after_an_interrupted_copy_a_slot_is_filled_again(monkeypatch, copies):
    """Else it would pass for that of the stage before, with the numbers of another one."""
    its = trained(pair()[0], windows(1))
    copy = Lanes.copy
    finished = []

    def interrupted(self, *arguments):
        copy(self, *arguments)
        finished.append(arguments)
        if len(finished) == copies:
            raise KeyboardInterrupt

    engine = pair()[1]
    monkeypatch.setattr(Lanes, "copy", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trained(engine, windows(1))
    monkeypatch.undo()
    assert not other_bits(trained(engine, windows(1)), its)


def test_adapters_of_another_layer_are_seen(monkeypatch):
    """Two stages' parameters lie in each other's places."""
    entered = StageOnDevice.use_as_parameters

    def swapped(self):
        if self.stage.index == 2:
            other = self.stage_of_another_layer
            self.planes = [
                replace(plane, param=wrong.plane.param)
                for plane, wrong in zip(self.planes, other.stored_planes, strict=True)
            ]
        return entered(self)

    made = {"family": "llama", "adapters": "lora"}
    its = trained(pair(made=made)[0], windows(1))
    engine = pair(made=made)[1]
    monkeypatch.setattr(
        StageOnDevice, "stage_of_another_layer", engine.store.stages[3], raising=False
    )
    monkeypatch.setattr(StageOnDevice, "use_as_parameters", swapped)
    assert other_bits(trained(engine, windows(1)), its)
