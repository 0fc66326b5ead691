# Run: pytest tests/graph/test_remat.py
"""Which products are kept, and which blocks recompute: knapsacks against trying everything,
recordings against closed forms.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batches import LENGTH, packed, ragged, tiny_llama
from monograph import compat
from monograph.errors import UsageError
from monograph.graph.inspect import blocks
from monograph.graph.recompute import apply_policy, choose_kept_results, record_blocks
from monograph.graph.remat import Choice, Remat, cheapest_within, pareto_front, policy_named
from monograph.loss import token_loss
from scripts import ROOT, script

items = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=6)


def as_groups(items):
    return [
        (Choice(0, flops, ()), Choice(size, 0, (index,)))
        for index, (size, flops) in enumerate(items)
    ]


@given(items, st.integers(0, 120))
def test_no_other_subset_is_better(items, limit):
    fewest = min(
        sum(flops for taken, (_, flops) in zip(taking, items, strict=True) if not taken)
        for taking in itertools.product((False, True), repeat=len(items))
        if sum(size for taken, (size, _) in zip(taking, items, strict=True) if taken) <= limit
    )
    best = cheapest_within(pareto_front(as_groups(items)), limit)
    assert best.flops == fewest
    assert best.stored_bytes == sum(items[index][0] for index in best.selection) <= limit
    assert best.flops == sum(
        flops for index, (_, flops) in enumerate(items) if index not in best.selection
    )


def test_a_long_front_is_thinned_and_still_adds_up():
    items = [(2**index, 2**index) for index in range(14)]
    choices = pareto_front(as_groups(items))
    assert len(choices) < 600
    for limit in range(0, 2**14, 500):
        best = cheapest_within(choices, limit)
        assert best.stored_bytes == sum(items[index][0] for index in best.selection) <= limit
        assert best.stored_bytes >= limit - 14 * 2**14 / 512


@pytest.fixture
def spread(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return script("benchmarks/remat.py").spread


CURVE = (Choice(0, 70, ()), Choice(3, 40, ()), Choice(5, 12, ()), Choice(8, 2, ()))


@pytest.mark.parametrize("limit", range(0, 45, 3))
def test_no_other_policies_of_equal_blocks_are_better(limit, spread):
    off, layers = 11, 4
    options = [(c.stored_bytes, c.flops) for c in CURVE] + [(off, 0)]
    fewest = min(
        sum(flops for _, flops in chosen)
        for chosen in itertools.product(options, repeat=layers)
        if sum(size for size, _ in chosen) <= limit
    )
    policies = spread(CURVE, off, layers, limit).policies
    sizes = [off if p == Remat.Off() else round(p.fraction * off) for p in policies]
    assert len(sizes) == layers and sum(sizes) <= limit and sizes == sorted(sizes)
    assert sum(dict(options)[size] for size in sizes) == fewest


def test_bytes_that_save_no_flops_are_not_kept(spread):
    free = tuple(choice._replace(flops=choice.flops - 2) for choice in CURVE)
    assert spread(free, 11, 4, 43).policies == (Remat.Budget(8 / 11),) * 4
    assert spread(free, 11, 4, 44).policies == (Remat.Off(),) * 4


def test_nothing_fits_below_zero(spread):
    assert spread(CURVE, 11, 4, -1) is None


@pytest.mark.parametrize("fraction", [-0.1, 1.5, float("nan")])
def test_what_is_no_share_is_refused(fraction):
    with pytest.raises(UsageError, match="from 0 .recompute all. to 1"):
        Remat.Budget(fraction)


def test_what_the_configuration_calls_them():
    assert [policy_named(value) for value in ("auto", "none", "pointwise", "full", "offload", 0.5)] == [
        Remat.Off(), Remat.Off(), Remat.Pointwise(), Remat.Full(), Remat.Offload(), Remat.Budget(0.5),
    ]  # fmt: skip


def test_a_llama_s_products_are_the_closed_form():
    """q, k, v, attention, o, gate and up: (3 + 2 n_kv / n_h + 2 d_ff / d) B T D numbers; down is
    not computed again.
    """
    rows, model = 4, tiny_llama()
    recordings = record_blocks(model, lambda twin: token_loss(twin, ragged(rows)), captured=False)
    assert list(recordings) == ["model.layers.0", "model.layers.1"]
    tokens, (recording, other) = rows * LENGTH, recordings.values()
    assert recording == other
    unit, log_sums = 4 * tokens * 32, 4 * tokens * 4
    assert (
        sum(p.stored_bytes for p in recording.products) == (3 + 2 * 0.5 + 2 * 1.5) * unit + log_sums
    )
    assert sum(p.flops for p in recording.products if ".mm." in p.name[0]) == 2 * tokens * 32 * (
        3 * 32 + 2 * 48
    )
    assert recording.stored_bytes > sum(p.stored_bytes for p in recording.products)
    # The hidden states; cosine and sine are shared.
    assert unit < recording.input_bytes < 1.1 * unit
    [compiled, _] = record_blocks(
        model, lambda twin: token_loss(twin, ragged(rows)), captured=True
    ).values()
    assert (
        compiled.rest_flops == 0 < recording.rest_flops and compiled.products == recording.products
    )
    assert [c.stored_bytes for c in recording.choices()][:: len(recording.choices()) - 1] == [
        0,
        7 * unit + log_sums,
    ]


@pytest.mark.slow
def test_flex_attention_is_recorded_as_one_product(monkeypatch):
    """Packed rows take it in a graph on a GPU; called outside of a graph it would compile itself."""
    # It refuses a CPU.
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    usual, flex = tiny_llama(hidden_size=64), tiny_llama(hidden_size=64)
    flex.use_attention("flex")
    recordings = [
        record_blocks(model, lambda twin: token_loss(twin, packed(4)), captured=True)[
            "model.layers.0"
        ]
        for model in (usual, flex)
    ]
    names, others = (
        [product.name[0] for product in recording.products] for recording in recordings
    )
    assert [name for name in others if name not in names] == ["flex_attention"] and len(
        names
    ) == len(others)
    flops, others = ([product.flops for product in recording.products] for recording in recordings)
    assert flops == others
    # The mask belongs to all blocks: it is an input, and no block keeps it.
    assert recordings[1].stored_bytes <= recordings[0].stored_bytes


@pytest.mark.parametrize(
    ("policy", "asked"), [(Remat.Pointwise(), 0), (Remat.Budget(0.5), 1), (Remat.Full(), 0)]
)
def test_a_graph_of_a_block_is_traced_for_budgets_alone(policy, asked, monkeypatch):
    """What `Pointwise` keeps does not depend on what a graph would keep; blocks that are alike are
    asked of once.
    """
    graphs, bytes_saved = [], compat.bytes_saved_for_backward

    def spy(*arguments):
        graphs.append(bytes_saved(*arguments))
        return graphs[-1]

    monkeypatch.setattr(compat, "bytes_saved_for_backward", spy)
    model = tiny_llama()
    apply_policy(model, policy)
    choose_kept_results(model, lambda twin: token_loss(twin, ragged(4)), captured=True)
    assert len(graphs) == asked
    kept = [block.remat.kept_names for block in blocks(model).values()]
    assert kept[0] == kept[1] and bool(kept[0]) == (policy != Remat.Full())
