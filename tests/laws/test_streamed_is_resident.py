# Run: pytest tests/laws/test_streamed_is_resident.py [-m slow]
"""Law 4: streamed = resident. Losses, norms, weights, moments and counters, in every bit.

Six layers, four updates of three micro-batches of which the last is not full, packed rows, clipping that bites. Where
two stages share weights (tied embeddings) a sum is taken in another order, and the bound is that of its rounding.
"""

from __future__ import annotations

import pytest
import torch

from batches import packed, ragged, tiny_llama
from monograph.graph.capture import compiled
from monograph.graph.precision import Precision
from monograph.graph.remat import Remat
from monograph.loss import TokenLoss
from monograph.optim import AdamW, Group, Muon
from monograph.resident import Resident
from monograph.stream import Placement, chunked_update, host_update
from numerics import error_within
from streamed import (
    AT_ONCE,
    EVERY,
    FAMILIES,
    LAYERS,
    MICRO_BATCH,
    PLACEMENTS,
    PRECISIONS,
    arguments,
    by_day,
    flat,
    other_bits,
    resident,
    same_bits,
    streamed,
    trained,
    twin,
    unclipped,
    windows,
)


def assert_same(sizes=None, batches=None, *, placement=None, blocks_per_stage=1, capture=None, **changes):
    """Train both; returns what the resident one left."""
    batches = batches or windows()
    engine = streamed(sizes, placement=placement, blocks_per_stage=blocks_per_stage, **changes)
    assert not capture or engine.capture(batches[0], capture, "blocks") is None
    its = twin(sizes, batches, capture, **changes)
    assert not other_bits(trained(engine, batches), its)
    return its


# ---- families, placements, stages ------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family, precision):
    left = assert_same(FAMILIES[family], precision=precision)
    norms = [value for name, value in left.items() if "grad_norm" in name]
    assert len(norms) == 4 and min(norms) > 2 * arguments()["clip"], "clipping must bite"


@pytest.mark.parametrize("place", EVERY)
def test_placements(place):
    assert_same(placement=EVERY[place], precision="bf16", **unclipped(EVERY[place]))


@pytest.mark.parametrize("place", by_day(EVERY))
def test_placements_of_whole_weights(place):
    assert_same(placement=EVERY[place], precision="fp32", **unclipped(EVERY[place]))


@pytest.mark.parametrize("when", ["sweep", "next forward", "backward"])
@pytest.mark.parametrize("blocks_per_stage", [2, 4, 6])
def test_stages_of_several_blocks(blocks_per_stage, when):
    """Four do not divide six; six are all."""
    placement = Placement(when=when, offload=blocks_per_stage == 2)
    assert_same(FAMILIES["qwen2"], placement=placement, blocks_per_stage=blocks_per_stage, precision="bf16",
                **unclipped(placement))  # fmt: skip


@pytest.mark.parametrize("place", ["on the host", "next forward, offloaded", "backward"])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_few_blocks(layers, place):
    assert_same({"num_hidden_layers": layers}, placement=EVERY[place], **unclipped(EVERY[place]))


@pytest.mark.parametrize(
    "place",
    [
        *by_day(["on the host", "next forward", "everywhere"]),
        "backward, offloaded",
        "updated on both",
    ],
)
@pytest.mark.parametrize(
    "optim", [AdamW(lr=1e-2, state="8bit"), AdamW(lr=1e-2, state="bf16", ema=0.9), Muon(lr=1e-2, state="8bit")]
)
def test_updated_in_many_pieces(optim, place, monkeypatch):
    """Of 768 elements, three blocks of codes: planes and matrices are no multiples of that."""
    monkeypatch.setattr(chunked_update, "MOST", 768)
    monkeypatch.setattr(host_update, "MOST", 768)
    assert_same(optim=optim, placement=EVERY[place], precision="bf16", **unclipped(EVERY[place]))


# ---- optimizers, precisions, recomputation ---------------------------------------------------------------------------

OPTIMIZERS = {
    "muon": Muon(lr=1e-2),
    "moments in bf16": AdamW(lr=1e-2, state="bf16", seed=3),
    "moments in 8 bits": AdamW(lr=1e-2, state="8bit"),
    "muon in 8 bits, averaged": Muon(lr=1e-2, state="8bit", ema=0.9),
    "averaged, groups": AdamW(lr=1e-2, ema=0.9, groups=(Group("*norm*", lr=0.5), Group("lm_head.*", weight_decay=0.0))),
}


@pytest.mark.parametrize(
    "place",
    [
        "on the host",
        "everywhere",
        "updated on both",
        *by_day(["next forward", "backward", "backward, updated on the host"]),
    ],
)
@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_optimizers(optim, place):
    precision = "bf16" if place in ("on the host", "backward", "updated on both") else "fp32"
    assert_same(optim=OPTIMIZERS[optim], placement=EVERY[place], precision=precision, **unclipped(EVERY[place]))


@pytest.mark.parametrize("place", ["on the host", "next forward", "updated on the host"])
def test_scaled_losses(place):
    """The first scale overflows fp16, so that updates are skipped and the scale falls, and later rises again."""
    changes = {"precision": Precision("fp16", loss_scale=2.0**24, grow_after=2)}
    batches = windows(12)
    left = assert_same(batches=batches, placement=EVERY[place], **changes)
    assert 0 < left["scalar skipped"] < 10 and left["scalar loss_scale"] < 2.0**24


@pytest.mark.parametrize("policy", [Remat.Pointwise(), Remat.Budget(0.3), Remat.Full()])
def test_recomputed_inside_of_stages(policy):
    assert_same(remat=policy, blocks_per_stage=2, precision="bf16")


class Uncounted:
    """A loss without a `count`."""

    def __call__(self, model, batch):
        return TokenLoss()(model, batch)


def test_padded_rows_and_a_loss_that_cannot_count():
    batches = windows(rows=ragged)
    assert_same(batches=batches, loss=Uncounted())
    assert_same(batches=batches, placement=AT_ONCE["backward"], loss=Uncounted(), clip=None)


# ---- what is refused -------------------------------------------------------------------------------------------------


class Kinked(TokenLoss):
    """Adds sqrt(max over `level`): infinite where that is, and where it is 0 a finite loss with no finite gradient."""

    def __call__(self, model, batch):
        hidden_BTD = model(batch["tokens"], segments=batch["segments"], positions=batch["positions"])
        loss_sum, count = self.head(hidden_BTD.flatten(0, -2), model.lm_head.weight, batch["targets"].flatten())
        level = batch["level"].max() + 0 * hidden_BTD.float().sum()
        return loss_sum + level.sqrt(), count


def kinked_windows(odd, level):
    found = windows()
    for number, window in enumerate(found):
        window["level"] = torch.ones(len(window["tokens"]))
        if number == odd:
            window["level"][MICRO_BATCH : 2 * MICRO_BATCH] = level  # the second of three micro-batches
    return found


@pytest.mark.parametrize("level", [0.0, float("inf")])
@pytest.mark.parametrize("place", by_day(PLACEMENTS))
def test_what_is_not_finite_changes_nothing(place, level):
    batches, changes = kinked_windows(2, level), {"loss": Kinked(), "placement": PLACEMENTS[place]}
    left = assert_same(batches=batches, precision="bf16", **changes)
    assert left["scalar skipped"] == 1
    assert left["update 2 loss"].isinf() if level else left["update 2 grad_norm"].isnan()
    engine = streamed(**changes)
    trained(engine, batches[:2])
    before = flat(engine.state())
    trained(engine, batches[2:3])
    changed = other_bits(flat(engine.state()), before)
    assert sorted(changed) == ["scalar index", "scalar skipped"]


def test_a_loss_that_is_not_finite_changes_nothing_in_the_backward_pass():
    batches = kinked_windows(2, float("inf"))
    left = assert_same(batches=batches, loss=Kinked(), placement=AT_ONCE["backward"], clip=None)
    assert left["scalar skipped"] == 1


# ---- tied ------------------------------------------------------------------------------------------------------------


def gradients(engine):
    """Of each parameter, by name, where they are at home."""
    return {name: view.clone() for plane in engine.step.planes for name, view in plane.views(plane.grad)}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("place", ["on the host", "gradients on the device", "everywhere"])
def test_tied(place, precision):
    """Streamed, the head's gradient of all micro-batches is summed before the embedding's: as exact as any other order.

    Everything but that sum is the same in every bit.
    """
    tied, (window,) = {"tie_word_embeddings": True}, windows(1)
    exact = Resident(tiny_llama(torch.float64, num_hidden_layers=LAYERS, **tied), micro_batch=MICRO_BATCH)
    engines = [
        exact,
        resident(tied, precision=precision),
        streamed(tied, precision=precision, placement=PLACEMENTS[place]),
    ]
    for engine in engines:
        engine.accumulate(window)
    truth, its, mine = (gradients(engine) for engine in engines)
    assert other_bits(mine, its) in ([], ["model.embed_tokens.weight"])
    for name, gradient in mine.items():
        assert error_within(gradient, its[name], truth[name]), name
    assert same_bits(*(engine.step.loss_sum for engine in engines[1:]))


TIED_AT_HOME = dict[str, torch.Tensor]()  # what the first of the next tests finds


@pytest.mark.parametrize("place", by_day(EVERY))
def test_tied_wherever_it_lives(place):
    """All placements of one kind sum in the same order: bits."""
    tied, changes = {"tie_word_embeddings": True}, {"clip": None, "precision": "bf16"}
    if not TIED_AT_HOME:
        TIED_AT_HOME.update(trained(streamed(tied, **changes), windows()))
    assert not other_bits(trained(streamed(tied, placement=EVERY[place], **changes), windows()), TIED_AT_HOME)


# ---- captured --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "place", "precision"),
    [
        ("llama", "updated on both", "bf16"),
        pytest.param("llama", "on the host", "bf16", marks=pytest.mark.slow),
        pytest.param("llama", "next forward, offloaded", "fp32", marks=pytest.mark.slow),
        pytest.param("mistral", "everywhere", "bf16", marks=pytest.mark.slow),
        pytest.param("qwen2", "backward", "fp32", marks=pytest.mark.slow),
        pytest.param("qwen3", "some stages on the device", "bf16", marks=pytest.mark.slow),
    ],
)
def test_captured_block_by_block(family, place, precision):
    assert_same(
        FAMILIES[family], placement=EVERY[place], precision=precision, capture="aot_eager", **unclipped(EVERY[place])
    )


@pytest.mark.slow
@pytest.mark.parametrize("place", ["on the host", "updated on the host"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_captured_with_generated_code(precision, place):
    assert_same(
        precision=precision, placement=EVERY[place], capture="inductor", blocks_per_stage=2,
        batches=windows(4, rows=packed),
    )  # fmt: skip


def test_the_norm_of_many_parts_is_the_same_bits_whoever_sums():
    """A graph of the whole update, or the host's calls: seen to differ in the last bit beyond 32 parts."""
    step = resident().step
    squares = list(torch.rand(101, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    step.count.fill_(7)
    eager, graph = (decide(squares)[0] for decide in (step.decide, compiled(step.decide)))
    assert torch.equal(eager, graph)
