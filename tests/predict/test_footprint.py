# Run: pytest tests/predict/test_footprint.py
"""A trace of two and of three blocks says what a model of any depth needs; so does a made-up step,
block by block.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batches import tiny_config
from monograph.graph.lora import Lora
from monograph.model.config import LlamaConfig
from monograph.optim import AdamW, Muon
from monograph.predict import footprint as footprint_module
from monograph.predict.estimate import estimate_bytes
from monograph.predict.footprint import (
    Curve,
    Work,
    corners,
    extend_samples,
    footprint,
    footprint_of,
)

SIZES = st.lists(st.integers(0, 50), min_size=1, max_size=6)


def forward(before, block, after, layers, kept, weights):
    """A step's curve: transient bytes of each operation on top of what is kept, which grows by
    `kept` a block.
    """
    static, curve = weights * layers, []
    curve += [(static + size, 0) for size in before]
    for layer in range(layers):
        curve += [(static + size, kept * layer) for size in block]
    return curve + [(static + size, kept * layers) for size in after]


@given(SIZES, SIZES, SIZES, st.integers(4, 40), st.integers(0, 9), st.integers(0, 9))
def test_any_depth_follows_from_two(before, block, after, layers, kept, weights):
    low, high, deep = (forward(before, block, after, n, kept, weights) for n in (2, 3, layers))
    found = extend_samples(low, high, layers - 2)
    assert found is not None and max(map(sum, found)) == max(map(sum, deep))
    # The backward pass is the same, seen from its end
    found = extend_samples(low[::-1], high[::-1], layers - 2)
    assert found is not None and max(map(sum, found)) == max(map(sum, deep))


def test_a_long_head_is_not_taken_for_a_block():
    """Large tensors that come and go after the last block: shifted by a block they would count once
    for each layer.
    """
    head = [0, 1000, 0, 1000, 0, 0, 1000]
    low, high = (forward([1], [2, 5], head, n, 3, 0) for n in (2, 3))
    assert max(map(sum, extend_samples(low, high, 30))) == 1000 + 3 * 32


def test_curves_that_have_no_block_in_common_are_not_guessed():
    assert extend_samples([(0,), (5,), (1,), (9,)], [(0,), (6,), (2,), (3,), (9,)], 4) is None


def test_an_update_is_as_long_at_any_depth():
    assert extend_samples([(1,), (10,)], [(2,), (15,)], 3) == [(4,), (25,)]


@given(st.lists(st.tuples(st.integers(-2, 2), st.integers(-2, 2)), max_size=12))
def test_what_lies_between_corners_is_on_the_line(steps):
    """So that no sample that is left out is the largest, at any depth."""
    samples = [
        *itertools.accumulate(
            steps, lambda sample, step: (sample[0] + step[0], sample[1] + step[1]), initial=(0, 0)
        )
    ]
    found = corners(samples)
    assert (
        found[0] == samples[0]
        and found[-1] == samples[-1]
        and max(map(sum, found)) == max(map(sum, samples))
    )
    assert (
        corners(found) == found
        or len(found) < 3
        or any(a == b for a, b in itertools.pairwise(steps))
    )


def test_runs_as_long_as_the_model_is_deep_are_two_corners():
    low, high, deep = (
        [(0, 0), *((i, i) for i in range(1, n)), (0, 9), *((0, 9 + i) for i in range(1, n))]
        for n in (3, 4, 9)
    )
    assert len(corners(low)) == len(corners(high)) == len(corners(deep))


def test_the_peak_is_named_by_its_stage():
    found = footprint_of(
        [Curve("forward", [(1, 2, 3, 4, 5, 6)]), Curve("backward", [(1, 2, 3, 4, 5, 7)])]
    )
    assert found.stage == "backward" and found.peak_bytes == 22
    assert found.by_origin["workspace"] == pytest.approx(7)


@pytest.mark.slow
def test_inputs_that_wait_on_the_host_are_not_counted():
    full = Work(
        tiny_config(num_hidden_layers=9),
        rows=32,
        length=48,
        optim=AdamW(),
        compile="none",
        remat="full",
    )
    there, away = footprint(full), footprint(replace(full, remat="offload"))
    an_input = 32 * 48 * full.config.hidden_size * 4
    assert there.by_origin["activations"] - away.by_origin["activations"] == (9 - 3) * an_input
    assert there.peak_bytes - away.peak_bytes == (9 - 3) * an_input


@pytest.mark.parametrize(
    ("scope", "remat", "precision"),
    [
        ("none", 0.5, "bf16"),
        pytest.param("blocks", 0.5, "bf16", marks=pytest.mark.slow),
        pytest.param("whole", "none", "fp32", marks=pytest.mark.slow),
        pytest.param("whole", "none", "bf16", marks=pytest.mark.slow),
        pytest.param("blocks", 0.5, "fp32", marks=pytest.mark.slow),
    ],
)
def test_a_step_of_any_depth_is_the_one_that_is_traced_whole(scope, remat, precision):
    config = tiny_config(num_hidden_layers=4)
    work = Work(
        config, rows=4, length=16, optim=AdamW(), compile=scope, remat=remat, precision=precision
    )
    assert footprint(work) == footprint_of(footprint_module._curves(work))


@pytest.mark.slow  # by day a step of any depth is the one that is traced whole
@pytest.mark.parametrize(
    ("optim", "scope"),
    [
        (Muon(), "none"),
        pytest.param(AdamW(state="bf16"), "none", marks=pytest.mark.slow),
        pytest.param(Muon(), "blocks", marks=pytest.mark.slow),
    ],
)
def test_no_update_is_traced_at_its_full_depth(optim, scope, monkeypatch):
    traced, curves = [], footprint_module._curves

    def spy(work, *graphs, **options):
        traced.append(work.config.num_hidden_layers)
        return curves(work, *graphs, **options)

    # Few tokens, so that the update is the peak.
    work = Work(
        tiny_config(num_hidden_layers=4, hidden_size=64, intermediate_size=192),
        rows=1,
        length=4,
        optim=optim,
        precision="fp32",
        compile=scope,
    )
    whole = footprint_of(curves(work))
    monkeypatch.setattr(footprint_module, "_curves", spy)
    first = [2, 3] if scope == "blocks" else []  # without their updates
    assert footprint(work) == whole and whole.stage == "update" and traced == [*first, 2, 3]


@pytest.mark.parametrize(
    "optim",
    [
        pytest.param(AdamW(state="8bit"), marks=pytest.mark.slow),
        pytest.param(Muon(), marks=pytest.mark.slow),
    ],
)
def test_an_update_that_is_not_traced_could_not_have_been_the_peak(optim):
    """Its temporary values are fewer than the bound says, however few tokens there are."""
    config = tiny_config(num_hidden_layers=3, hidden_size=64, intermediate_size=192)
    curves = footprint_module._curves(
        Work(config, rows=1, length=8, optim=optim, precision="bf16", compile="blocks")
    )
    update = max(sum(sample) for sample in curves[-1].samples)
    kept = sum(curves[-1].samples[-1][:3])
    assert curves[-1].stage == "update"
    assert update - kept < footprint_module.MAX_UPDATE_BYTES * config.parameter_count()


@pytest.mark.slow
def test_the_update_is_traced_only_where_it_may_be_the_peak(monkeypatch):
    traced, curves = [], footprint_module._curves

    def spy(work, *graphs, **options):
        traced.append(options.get("with_update", True))
        return curves(work, *graphs, **options)

    monkeypatch.setattr(footprint_module, "_curves", spy)
    work = Work(
        tiny_config(num_hidden_layers=4),
        rows=32,
        length=64,
        optim=AdamW(),
        precision="fp32",
        compile="blocks",
    )
    found = footprint(work)
    assert traced == [False, False] and found == footprint_of(curves(work))


@pytest.mark.parametrize(
    ("scope", "like"),
    [
        pytest.param("none", "hidden_size", marks=pytest.mark.slow),
        pytest.param("blocks", "tokens", marks=pytest.mark.slow),
        pytest.param("whole", "intermediate_size", marks=pytest.mark.slow),
    ],
)
def test_what_is_as_long_as_the_vocabulary_by_chance_is_not_the_loss_head(scope, like):
    """As in a model of width 4,096, or in rows of 4,096 tokens, with a vocabulary of 4,096."""
    config = tiny_config(num_hidden_layers=3, hidden_size=64, intermediate_size=160)
    same = {"hidden_size": 64, "intermediate_size": 160, "tokens": 4 * 48}[like]
    chance, plain = (
        footprint(
            Work(replace(config, vocab_size=size), rows=4, length=48, optim=AdamW(), compile=scope)
        )
        for size in (same, same + 3)
    )
    assert chance.by_origin["activations"] == pytest.approx(
        plain.by_origin["activations"], rel=1e-3
    )
    assert chance.by_origin["loss head"] == pytest.approx(plain.by_origin["loss head"], rel=0.05)
    weights = 4 * replace(config, vocab_size=same).parameter_count()
    assert chance.by_origin["weights"] == pytest.approx(weights, abs=4096)


@pytest.mark.parametrize(
    ("make", "scope", "state", "layers"),
    [
        pytest.param(AdamW, "none", "bf16", 30, marks=pytest.mark.slow),
        pytest.param(AdamW, "none", "8bit", 30, marks=pytest.mark.slow),
        pytest.param(Muon, "none", "fp32", 30, marks=pytest.mark.slow),
        # Which is traced once, and whose planes are as many at any depth.
        pytest.param(Muon, "blocks", "fp32", 2, marks=pytest.mark.slow),
    ],
)
def test_the_search_knows_what_an_update_has_alive(make, scope, state, layers):
    """Where the update is the peak: many parameters and few tokens."""
    config = tiny_config(num_hidden_layers=layers, hidden_size=64, intermediate_size=256)
    work = Work(
        config,
        rows=1,
        length=8,
        optim=make(state=state),
        precision="bf16",
        compile=scope,
        remat="full",
    )
    found = estimate_bytes(work)
    assert footprint(work).peak_bytes == pytest.approx(found, rel=0.1)


@pytest.mark.slow
def test_on_a_gpu_query_key_and_value_are_one_product_and_attention_s_result_is_not_copied():
    """Per token of a block, in bf16: 4 d around the residual sums, q, k, what attention returns,
    the product of query, key and value, gate, up and what they give; in fp32 two norms' roots, and
    a sum for each head.
    """
    config = tiny_config(
        hidden_size=96, num_attention_heads=6, num_key_value_heads=3, intermediate_size=256
    )
    found = []
    for layers in (1, 2):
        work = Work(
            replace(config, num_hidden_layers=layers),
            rows=8,
            length=64,
            optim=AdamW(),
            precision="bf16",
            packed=False,
            device_type="cuda",
        )
        found.append(footprint(work).by_origin["activations"])
    width, query, key_value = 96, 96, 48
    numbers = (
        4 * width
        + (query + key_value + query)
        + (query + 2 * key_value)
        + 3 * config.intermediate_size
    )
    assert found[1] - found[0] == 8 * 64 * (2 * numbers + 4 * (2 + 6))


@pytest.mark.slow
@pytest.mark.parametrize("layers", [2, 4])
def test_the_search_counts_what_a_shallow_model_with_adapters_keeps_once(layers: int) -> None:
    """Nothing is recomputed, so what the last block gives is stored, and only its gradients come
    beside it.
    """
    config = LlamaConfig.preset("nano", vocab_size=1009)
    work = Work(
        replace(config, num_hidden_layers=layers), rows=8, length=128, optim=AdamW(), lora=Lora(16)
    )
    assert estimate_bytes(work) == pytest.approx(footprint(work).peak_bytes, rel=0.15)
