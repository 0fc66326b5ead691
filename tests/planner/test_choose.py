# Run: pytest tests/planner/test_choose.py
"""The fastest combination that fits is chosen, the update stays what it is, and every loser says
why.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from batches import tiny_config
from daily import nightly, pairwise
from monograph.device import card_device
from monograph.errors import UsageError
from monograph.graph.lora import Lora
from monograph.model.config import LlamaConfig
from monograph.optim import AdamW
from monograph.planner import PlanRequest, budget, candidates, defaults, plan
from monograph.predict.estimate import estimate_bytes
from monograph.predict.footprint import Footprint, Work
from monograph.predict.roofline import update_time

H200 = card_device("H200")
BOTH = ("whole", "blocks")
LLAMA_3_8B = PlanRequest(
    Work(LlamaConfig.preset("8b"), rows=128, length=4096, optim=AdamW(), window_rows=128),
    precisions=("bf16",),
)


def test_a_way_keeps_every_fact_of_the_training_that_it_does_not_choose():
    facts = {
        "packed": False,
        "clip": 0.5,
        "lora": Lora(4),
        "answer_scoring": "rows",
        "optim": AdamW(lr=2.0),
    }
    asked = LLAMA_3_8B.with_training(replace(LLAMA_3_8B.training, **facts))
    work = asked.work(candidates.Way("fp16", "blocks", 0.5), 2, H200)
    chosen = {
        "rows": 2,
        "precision": "fp16",
        "compile": "blocks",
        "remat": 0.5,
        "device_type": "cuda",
    }
    assert vars(work) == vars(asked.training) | chosen
    shorter = asked.with_tokens(asked.tokens_per_update, 1024)
    assert (shorter.training.length, shorter.rows, shorter.tokens_per_update) == (1024, 512, 2**19)
    assert shorter.with_tokens(100, 1024).rows == 1, "one row at least"


def tiny(**more):
    return PlanRequest(
        Work(tiny_config(), rows=12, length=32, optim=AdamW(), window_rows=12),
        precisions=("bf16",),
        **more,
    )


@pytest.fixture(autouse=True)
def _of_the_same_work_the_closed_form_is_computed_once(monkeypatch):
    """All tests search through the same few thousand works, and each search several times."""
    monkeypatch.setattr(candidates, "estimate_bytes", computed_once)


computed_once = cache(estimate_bytes)


@pytest.fixture
def traced(monkeypatch):
    """The trace is replaced by the closed form times a factor: what is tested here is the choice."""
    calls = []

    def stand_in(factor):
        def footprint(work):
            calls.append(work)
            return Footprint("forward", {"weights": int(factor * computed_once(work))})

        monkeypatch.setattr(defaults, "traced_bytes", lambda work: footprint(work).by_origin)
        return calls

    return stand_in


def with_memory(device, size_bytes):
    return replace(device, memory_bytes=size_bytes, free_memory_bytes=size_bytes)


def test_what_fits_twice_over_is_not_traced_and_takes_the_update_whole(traced):
    calls = traced(1.0)
    found = plan(tiny(), H200, H200.peak_flops)
    assert not calls and found.chosen is found.candidates[0]
    assert (
        found.chosen.work.rows == 12 and found.chosen.work.remat == "none" and not found.chosen.why
    )
    assert all(each.why for each in found.candidates[1:])


def test_micro_batches_divide_the_update(traced):
    traced(1.0)
    sizes = {
        plan(LLAMA_3_8B, with_memory(H200, gib * 2**30), H200.peak_flops).nearest.work.rows
        for gib in (150, 400)
    }
    assert all(128 % size == 0 for size in sizes) and len(sizes) == 2


def test_the_trace_has_the_last_word(traced):
    """Where it finds more than the closed form did, the plan takes something smaller, and traces
    that too.
    """
    roomy = with_memory(H200, 200 * 2**30)
    calls = traced(1.0)
    first = plan(LLAMA_3_8B, roomy, H200.peak_flops).chosen
    assert [first.work] == calls and first.by_origin
    calls = traced(1.3)
    second = plan(LLAMA_3_8B, roomy, H200.peak_flops)
    assert second.chosen is None or second.chosen.peak_memory_bytes <= second.budget_bytes
    assert second.nearest.work != first.work and calls[-1] == second.nearest.work


@pytest.mark.parametrize("factor", nightly([1.15, 1.3, 1.6, 2.5], {1.3}))
def test_what_a_trace_found_too_large_is_never_chosen(traced, factor):
    """However often the closed form was wrong: what is chosen beside a full card has been traced,
    and fits.
    """
    asked = replace(
        LLAMA_3_8B,
        scopes=("whole", "blocks", "none"),
        remats=("none", "pointwise", 0.5, 0.25, "full"),
    )
    for gib in (150, 180, 220):
        calls = traced(factor)
        found = plan(asked, with_memory(H200, gib * 2**30), H200.peak_flops)
        assert found.nearest.by_origin and found.nearest.work == calls[-1]
        assert found.chosen is None or found.chosen.peak_memory_bytes <= found.budget_bytes


def test_what_does_not_fit_says_what_is_nearest_and_by_how_much(traced):
    traced(1.0)
    card = card_device("4090")
    found = plan(LLAMA_3_8B, card, card.peak_flops)
    assert found.chosen is None
    assert found.nearest.work.rows == 1 and found.nearest.work.remat == "full"
    short = found.nearest.peak_memory_bytes - found.budget_bytes
    assert f"{short / 2**30:.1f} GiB more" in found.refusal and "\n" not in found.refusal


EVERY = ("none", "pointwise", 0.5, 0.25, "full", "offload")


def off_by(monkeypatch, factors, most=None):
    """A trace that finds so many times what the closed form does, by recomputation."""
    calls = []

    def footprint(work):
        calls.append(work)
        assert most is None or len(calls) <= most
        return Footprint(
            "forward", {"weights": int(factors.get(work.remat, 1.0) * computed_once(work))}
        )

    monkeypatch.setattr(defaults, "traced_bytes", lambda work: footprint(work).by_origin)
    return calls


def test_if_nothing_fits_what_is_nearest_by_the_trace_is_found_among_all(monkeypatch):
    """The closed form's nearest needs 4 % more than it said, and so something else is nearer."""
    card, asked = card_device("H100"), replace(LLAMA_3_8B, remats=EVERY)
    calls = off_by(monkeypatch, {"offload": 1.04})
    found = plan(asked, card, card.peak_flops)
    assert (
        calls[0].remat == "offload" and found.chosen is None and found.nearest.work.remat == "full"
    )
    assert found.nearest.by_origin and found.nearest.peak_memory_bytes == estimate_bytes(
        found.nearest.work
    )
    offload = next(each for each in found.candidates if each.work.remat == "offload")
    assert offload.by_origin and offload.peak_memory_bytes > found.nearest.peak_memory_bytes


def test_a_candidate_that_is_nearer_by_less_than_a_hundredth_is_not_traced_for_it(monkeypatch):
    card, asked = card_device("H100"), replace(LLAMA_3_8B, remats=EVERY)
    # Full needs 0.7 % more than offload in closed form.
    calls = off_by(monkeypatch, {"offload": 1.008})
    assert plan(asked, card, card.peak_flops).nearest.work.remat == "offload" and len(calls) == 1


@pytest.mark.parametrize(("factor", "gib"), pairwise([1.05, 1.2, 1.6, 3.0], [200, 150, 135, 120]))
def test_nothing_is_chosen_that_a_trace_has_not_found_to_fit(monkeypatch, factor, gib):
    """However often the trace disagrees; the last that is traced is the one that needs least."""
    card, asked = with_memory(H200, gib * 2**30), replace(LLAMA_3_8B, remats=EVERY)
    calls = off_by(monkeypatch, dict.fromkeys(EVERY, factor), defaults.MAX_TRACES)
    found = plan(asked, card, card.peak_flops)
    assert found.nearest.work in calls and found.nearest.by_origin
    assert found.nearest.peak_memory_bytes == int(factor * estimate_bytes(found.nearest.work))
    assert (found.chosen is not None) == (found.nearest.peak_memory_bytes <= found.budget_bytes)
    smallest = factor * min(estimate_bytes(each.work) for each in found.candidates)
    assert found.chosen or found.nearest.peak_memory_bytes <= defaults.NEARLY_EQUAL * smallest
    assert not any("-" in each.why for each in found.candidates)


def test_what_the_closed_form_takes_for_too_large_may_fit(monkeypatch):
    card, asked = with_memory(H200, 125 * 2**30), replace(LLAMA_3_8B, remats=EVERY)
    off_by(monkeypatch, dict.fromkeys(EVERY, 0.9))
    found = plan(asked, card, card.peak_flops)
    assert (
        found.chosen
        and found.chosen.by_origin
        and found.chosen.peak_memory_bytes <= found.budget_bytes
    )


def test_a_pinned_micro_batch_stays(traced):
    traced(1.0)
    found = plan(tiny(micro_batch=5), H200, H200.peak_flops)
    assert {each.work.rows for each in found.candidates} == {5}


def test_no_memory_is_refused():
    with pytest.raises(UsageError, match="leaves nothing for tensors"):
        budget(with_memory(H200, 0))


def test_recomputing_costs_a_forward_pass_and_larger_micro_batches_cost_nothing():
    work = Work(
        LlamaConfig.preset("8b"),
        rows=1,
        length=4096,
        optim=LLAMA_3_8B.training.optim,
        precision="bf16",
        compile="blocks",
        window_rows=128,
    )
    plain, again, wide = (
        update_time(each, H200, 989e12)
        for each in (work, replace(work, remat="full"), replace(work, rows=4))
    )
    assert plain.total_s < again.total_s < 1.4 * plain.total_s
    assert again.products_s / plain.products_s == pytest.approx(8 / 6, rel=0.03)
    assert wide.products_s < plain.products_s and wide.update_s == plain.update_s


def test_a_base_in_fewer_bits_costs_the_traffic_of_making_it_dense():
    config = LlamaConfig.preset("8b", num_hidden_layers=3)
    work = Work(
        config,
        rows=2,
        length=2048,
        optim=AdamW(),
        precision="bf16",
        window_rows=4,
        device_type="cuda",
    )
    auto, int8, nf4 = (
        update_time(replace(work, lora=Lora(16, base=base)), H200, 989e12)
        for base in ("auto", "int8", "nf4")
    )
    numbers = 3 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 14336)
    # Two micro-batches, there and back: so many bytes read and 2 written a number, at 89.6 % of 4.8
    # TB/s.
    for each, held in ((int8, 1.0), (nf4, 0.516)):
        assert each.traffic_s - auto.traffic_s == pytest.approx(
            4 * numbers * (held + 2) / (0.896 * 4.8e12), rel=1e-3
        )
        assert each._replace(traffic_s=auto.traffic_s) == auto


def test_no_model_is_predicted_to_be_faster_than_the_card(traced):
    traced(1.0)
    found = plan(LLAMA_3_8B, with_memory(H200, 2**40), H200.peak_flops)
    assert all(0 < each.mfu < 0.8 for each in found.candidates)


def test_inputs_on_the_host_make_room_and_cost_nothing_beside_longer_computation():
    work = Work(
        LlamaConfig.preset("8b"),
        rows=8,
        length=4096,
        optim=LLAMA_3_8B.training.optim,
        precision="bf16",
        compile="blocks",
        remat="offload",
        window_rows=128,
    )
    full, an_input = replace(work, remat="full"), 8 * 4096 * 4096 * 2
    assert estimate_bytes(full) - estimate_bytes(work) == 29 * an_input
    assert update_time(work, H200, 989e12).total_s == update_time(full, H200, 989e12).total_s
    slow = replace(H200, link_bytes_per_s=1e9)
    assert update_time(work, slow, 989e12).total_s > 2 * update_time(full, slow, 989e12).total_s


def test_what_crosses_between_graphs_is_no_candidate_inside_one(traced):
    traced(1.0)
    found = plan(replace(LLAMA_3_8B, remats=("none", "full", "offload")), H200, H200.peak_flops)
    ways = {(each.work.compile, each.work.remat) for each in found.candidates}
    assert ("blocks", "offload") in ways and ("whole", "offload") not in ways


def test_the_whole_step_recomputes_only_where_a_graph_per_block_is_no_choice():
    every = ("none", "pointwise", 0.5, "full", "offload")
    free, pinned = (
        plan(tiny(scopes=scopes, remats=every), H200, H200.peak_flops)
        for scopes in (BOTH, ("whole",))
    )
    assert {each.work.remat for each in free.candidates if each.work.compile == "whole"} == {"none"}
    assert {each.work.remat for each in pinned.candidates} == {"none", "pointwise", 0.5, "full"}
