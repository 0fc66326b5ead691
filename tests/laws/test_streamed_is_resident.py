# Run: pytest tests/laws/test_streamed_is_resident.py [-m slow]
"""Law 4: streamed = resident. Losses, norms, weights, moments and counters, in every bit.

Four layers, three updates of three micro-batches of which the last is not full, packed rows,
clipping that bites. Where two stages share weights (tied embeddings) a sum is taken in another
order, and the bound is that of its rounding.
"""

from __future__ import annotations

import functools

import pytest
import torch

from batches import packed, ragged, tiny_llama
from daily import nightly
from monograph.graph.capture import compiled
from monograph.graph.precision import Precision
from monograph.graph.remat import Remat
from monograph.laws.comparisons import error_within, outcome
from monograph.loss import TokenLoss
from monograph.optim import AdamW, Group, Muon
from monograph.resident import Resident
from monograph.stream import Placement, chunked_update, updates
from streamed import (
    AT_ONCE,
    EVERY,
    FAMILIES,
    LAYERS,
    MICRO_BATCH,
    PLACEMENTS,
    PRECISIONS,
    UPDATES,
    arguments,
    crossed,
    other_bits,
    resident,
    streamed,
    trained,
    twin,
    unclipped,
    windows,
)


def assert_same(
    sizes=None, batches=None, *, placement=None, blocks_per_stage=1, capture=None, **changes
):
    """Train both; returns what the resident one left."""
    batches = batches or windows()
    engine = streamed(sizes, placement=placement, blocks_per_stage=blocks_per_stage, **changes)
    assert not capture or engine.capture(batches[0], capture, "blocks") is None
    its = twin(sizes, batches, capture, **changes)
    assert not other_bits(trained(engine, batches), its)
    return its


# ---- families, placements, stages ----------------------------------------------------------------


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
@pytest.mark.parametrize("family", nightly(FAMILIES, ["qwen3_moe"]))
def test_families(family, precision):
    left = assert_same(FAMILIES[family], precision=precision)
    norms = [value for name, value in left.items() if "grad_norm" in name]
    assert len(norms) == UPDATES and min(norms) > 2 * arguments()["clip"], "clipping must bite"


# By day test_optimizers has one of these, and tests/stream/test_lanes.py every placement in fp32.
@pytest.mark.slow
@pytest.mark.parametrize("place", EVERY)
def test_placements(place):
    assert_same(placement=EVERY[place], precision="bf16", **unclipped(EVERY[place]))


# By day tests/stream/test_lanes.py compares every placement with a resident engine in fp32.
@pytest.mark.slow
@pytest.mark.parametrize("place", EVERY)
def test_placements_of_whole_weights(place):
    assert_same(placement=EVERY[place], precision="fp32", **unclipped(EVERY[place]))


@pytest.mark.parametrize(
    ("blocks_per_stage", "when"),
    crossed([2, 3, 4], ["sweep", "next forward", "backward"], [(3, "next forward")]),
)
def test_stages_of_several_blocks(blocks_per_stage, when):
    """Three do not divide four; four are all."""
    placement = Placement(when=when, offload=blocks_per_stage == 2)
    assert_same(FAMILIES["qwen2"], placement=placement, blocks_per_stage=blocks_per_stage, precision="bf16",
                **unclipped(placement))  # fmt: skip


@pytest.mark.parametrize(
    "place",
    nightly(["on the host", "next forward, offloaded", "backward"], ["next forward, offloaded"]),
)
@pytest.mark.parametrize("layers", nightly([1, 2, 3], [1]))
def test_few_blocks(layers, place):
    assert_same({"num_hidden_layers": layers}, placement=EVERY[place], **unclipped(EVERY[place]))


PIECES = (
    AdamW(lr=1e-2, state="8bit"),
    AdamW(lr=1e-2, state="bf16", ema=0.9),
    Muon(lr=1e-2, state="8bit"),
)


@pytest.mark.parametrize(
    ("optim", "place"),
    crossed(
        PIECES,
        ["on the host", "next forward", "everywhere", "backward, offloaded", "updated on both"],
        [(PIECES[2], "updated on both")],
    ),
)
def test_updated_in_many_pieces(optim, place, monkeypatch):
    """Of 768 elements, three blocks of codes: planes and matrices are no multiples of that."""
    monkeypatch.setattr(chunked_update, "MAX_CHUNK_ELEMENTS", 768)
    monkeypatch.setattr(updates, "MAX_HOST_CHUNK_ELEMENTS", 768)
    assert_same(optim=optim, placement=EVERY[place], precision="bf16", **unclipped(EVERY[place]))


# ---- optimizers, precisions, recomputation -------------------------------------------------------

OPTIMIZERS = {
    "muon": Muon(lr=1e-2),
    "moments in bf16": AdamW(lr=1e-2, state="bf16", seed=3),
    "moments in 8 bits": AdamW(lr=1e-2, state="8bit"),
    "muon in 8 bits, averaged": Muon(lr=1e-2, state="8bit", ema=0.9),
    "averaged, groups": AdamW(
        lr=1e-2, ema=0.9, groups=(Group("*norm*", lr=0.5), Group("lm_head.*", weight_decay=0.0))
    ),
}


@pytest.mark.parametrize(
    ("optim", "place"),
    crossed(
        OPTIMIZERS,
        [
            "on the host",
            "everywhere",
            "updated on both",
            "next forward",
            "backward",
            "backward, updated on the host",
        ],
        # By day test_updated_in_many_pieces has Muon and moments in 8 bits and in bf16.
        [("averaged, groups", "updated on both")],
    ),
)
def test_optimizers(optim, place):
    precision = "bf16" if place in ("on the host", "backward", "updated on both") else "fp32"
    assert_same(
        optim=OPTIMIZERS[optim],
        placement=EVERY[place],
        precision=precision,
        **unclipped(EVERY[place]),
    )


@pytest.mark.parametrize(
    "place", nightly(["on the host", "next forward", "updated on the host"], ["next forward"])
)
def test_scaled_losses(place):
    """The first scales overflow fp16, so that updates are skipped and the scale falls, and later
    rises again.
    """
    changes = {"precision": Precision("fp16", loss_scale=2.0**20, grow_after=2)}
    batches = windows(7)
    left = assert_same(batches=batches, placement=EVERY[place], **changes)
    assert 0 < left["update 2 skipped"] == left["update 5 skipped"] < left["update 6 skipped"] < 7
    assert left["scalar loss_scale"] < 2.0**20


@pytest.mark.parametrize(
    "policy", nightly([Remat.Pointwise(), Remat.Budget(0.3), Remat.Full()], [Remat.Budget(0.3)])
)
def test_recomputed_inside_of_stages(policy):
    changes = {"sizes": {"num_hidden_layers": 2}, "remat": policy, "precision": "bf16"}
    batches = windows(2)
    its = assert_same(batches=batches, blocks_per_stage=2, **changes)
    # A trial before it changes nothing, and what it sees is what is seen without recomputation.
    engine = streamed(blocks_per_stage=2, **changes)
    assert engine.trial(windows(1)[0]) == resident(changes["sizes"], precision="bf16").trial(
        windows(1)[0]
    )
    assert not other_bits(trained(engine, batches), its)


class Uncounted:
    """A loss without a `count`."""

    def __call__(self, model, batch):
        return TokenLoss()(model, batch)


def test_padded_rows_and_a_loss_that_cannot_count():
    batches = windows(rows=ragged)
    assert_same(batches=batches, loss=Uncounted())
    assert_same(batches=batches, placement=AT_ONCE["backward"], loss=Uncounted(), clip=None)


# ---- what is refused -----------------------------------------------------------------------------


class Kinked(TokenLoss):
    """Adds sqrt(max over `level`): infinite where that is, and where it is 0 a finite loss with no
    finite gradient.
    """

    def __call__(self, model, batch):
        hidden_BTD = model(
            batch["tokens"], segments=batch["segments"], positions=batch["positions"]
        )
        loss_sum, count = self.head(
            hidden_BTD.flatten(0, -2), model.lm_head.weight, batch["targets"].flatten()
        )
        level = batch["level"].max() + 0 * hidden_BTD.float().sum()
        return loss_sum + level.sqrt(), count


def kinked_windows(odd, level):
    found = windows()
    for number, window in enumerate(found):
        window["level"] = torch.ones(len(window["tokens"]))
        if number == odd:
            # The second of three micro-batches.
            window["level"][MICRO_BATCH : 2 * MICRO_BATCH] = level
    return found


@pytest.mark.parametrize(
    ("place", "level"),
    crossed(
        PLACEMENTS,
        [0.0, float("inf")],
        [("updated on both", 0.0)],
    ),
)
def test_what_is_not_finite_changes_nothing(place, level):
    batches, changes = kinked_windows(1, level), {"loss": Kinked(), "placement": PLACEMENTS[place]}
    left = assert_same(batches=batches, precision="bf16", **changes)
    assert left["scalar skipped"] == 1
    assert left["update 1 loss"].isinf() if level else left["update 1 grad_norm"].isnan()
    engine = streamed(**changes)
    trained(engine, batches[:1])
    before = outcome(engine.state())
    trained(engine, batches[1:2])
    changed = other_bits(outcome(engine.state()), before)
    assert sorted(changed) == ["scalar index", "scalar skipped"]


def test_a_loss_that_is_not_finite_changes_nothing_in_the_backward_pass():
    batches = kinked_windows(1, float("inf"))
    left = assert_same(batches=batches, loss=Kinked(), placement=AT_ONCE["backward"], clip=None)
    assert left["scalar skipped"] == 1


def test_a_gradient_that_is_not_finite_reaches_no_weight_in_the_backward_pass():
    """Its norm is not known before weights are updated, so that a stage with such a gradient is
    refused alone.
    """
    engine = streamed(placement=AT_ONCE["backward"], loss=Kinked(), clip=None)
    left = trained(engine, kinked_windows(1, 0.0))
    assert left["update 1 grad_norm"].isnan()
    assert all(
        left[name].isfinite().all() for name in left if name.startswith(("model", "optimizer"))
    )


# ---- tied ----------------------------------------------------------------------------------------


def gradients(engine):
    """Of each parameter, by name, where they are at home."""
    return {
        name: view.clone() for plane in engine.step.planes for name, view in plane.views(plane.grad)
    }


@pytest.mark.parametrize(
    ("place", "precision"),
    crossed(
        ["on the host", "gradients on the device", "everywhere"],
        PRECISIONS,
        [("everywhere", "bf16")],
    ),
)
def test_tied(place, precision):
    """Streamed, the head's gradient of all micro-batches is summed before the embedding's: as exact
    as any other order.

    Everything but that sum is the same in every bit.
    """
    tied, (window,) = {"tie_word_embeddings": True}, windows(1)
    exact = Resident(
        tiny_llama(torch.float64, num_hidden_layers=LAYERS, **tied), micro_batch=MICRO_BATCH
    )
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
    assert torch.equal(*(engine.step.loss_sum for engine in engines[1:]))


@functools.cache
def tied_on_the_host():
    return trained(streamed({"tie_word_embeddings": True}, clip=None, precision="bf16"), windows())


@pytest.mark.slow  # by day test_tied compares one place with the resident engine
@pytest.mark.parametrize("place", EVERY)
def test_tied_wherever_it_lives(place):
    """All placements of one kind sum in the same order: bits."""
    engine = streamed(
        {"tie_word_embeddings": True}, placement=EVERY[place], clip=None, precision="bf16"
    )
    assert not other_bits(trained(engine, windows()), tied_on_the_host())


# ---- captured ------------------------------------------------------------------------------------


# By day tests/stream/test_cuda.py compares a captured engine with the resident one.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "place", "precision"),
    [
        ("llama", "updated on both", "bf16"),
        ("llama", "on the host", "bf16"),
        ("llama", "next forward, offloaded", "fp32"),
        ("mistral", "everywhere", "bf16"),
        ("qwen2", "backward", "fp32"),
        ("qwen3", "some stages on the device", "bf16"),
    ],
)
def test_captured_block_by_block(family, place, precision):
    assert_same(
        FAMILIES[family],
        placement=EVERY[place],
        precision=precision,
        capture="aot_eager",
        **unclipped(EVERY[place]),
    )


@pytest.mark.slow
@pytest.mark.parametrize("place", ["on the host", "updated on the host"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_captured_with_generated_code(precision, place):
    assert_same(
        precision=precision, placement=EVERY[place], capture="inductor", blocks_per_stage=2,
        batches=windows(4, rows=packed),
    )  # fmt: skip


@pytest.mark.slow(
    reason="generates code for seconds; by day tests/stream/test_cuda.py compares captured norms of fewer parts"
)
def test_the_norm_of_many_parts_is_the_same_bits_whoever_sums():
    """A graph of the whole update, or the host's calls: seen to differ in the last bit beyond 32
    parts.
    """
    step = resident().step
    squares = list(torch.rand(40, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    step.count.fill_(7)
    eager, graph = (decide(squares)[0] for decide in (step.decide, compiled(step.decide)))
    assert torch.equal(eager, graph)
