# Run: pytest tests/planner/test_streaming.py
"""Plans of streamed training: bytes are those of the engine's own buffers, refusals say what is
short and what fits.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from daily import pairwise
from monograph.device import card_device
from monograph.errors import OutOfDeviceMemory
from monograph.graph.lora import Lora
from monograph.graph.precision import Precision
from monograph.model.adapter import install_adapters
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.optim import AdamW, Muon
from monograph.planner import Limits, PlanRequest, defaults, remedies, streamed_or_resident
from monograph.planner.placement_bytes import META, StreamWay, stages_of
from monograph.planner.stream_time import clock_timing, closed_form_seconds, frozen_bytes
from monograph.planner.streaming import stream_candidates, stream_ways
from monograph.predict.footprint import Work
from monograph.predict.roofline import pass_times, update_time
from monograph.stream import Streamed
from monograph.stream.chunked_update import MAX_CHUNK_ELEMENTS
from monograph.stream.clock import Link
from monograph.stream.lanes import Home
from monograph.stream.store import GRADIENT
from stream.traffic import device_bytes

H200 = card_device("H200")
SHAPE = LlamaConfig(
    vocab_size=20_000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=8,
    num_key_value_heads=2,
)  # fmt: skip
TRAINING = Work(SHAPE, rows=16, length=512, optim=AdamW(), window_rows=16)
ASKED = PlanRequest(TRAINING, precisions=("bf16",), scopes=("blocks",), remats=("none",))
MIXTURE = replace(
    SHAPE, model_type="qwen3_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=512
)
# Two kinds of blocks with other parameters, in an order that does not repeat with the stages.
HYBRID = replace(
    SHAPE,
    model_type="granitemoehybrid",
    layer_types=("mamba", "mamba", "full_attention", "mamba") * 2,
    mamba_d_state=64,
)
TWO_WIDTHS = replace(
    SHAPE,
    model_type="gemma4_text",
    layer_types=("sliding_attention", "sliding_attention", "sliding_attention", "full_attention")
    * 2,
    sliding_window=128,
    global_head_dim=256,
    num_global_key_value_heads=1,
    attention_k_eq_v=True,
    tie_word_embeddings=True,
)
GIB = 2**30
SMALL = 11 * GIB // 8  # what slots, staging buffers and passes need, and some more
LINK = Link(25e9, 25e9, 1e9)


def way_of(
    optim=None,
    precision="bf16",
    when="next forward",
    offload=False,
    per_stage=1,
    config=SHAPE,
    where="device",
    lora=None,
):
    optim = optim or AdamW()
    work = Work(
        config,
        rows=2,
        length=512,
        optim=optim,
        precision=precision,
        compile="blocks",
        remat="none",
        window_rows=16,
        device_type="cuda",
        lora=lora,
    )
    stages = stages_of(config, optim, precision, per_stage, lora)
    return StreamWay(work, stages, per_stage, when, offload, where)


def engine(way, resident):
    """The engine itself, with the whole depth, on tensors without data."""
    with META:
        model = Llama(way.work.config)
        if way.work.lora:
            install_adapters(model, way.work.lora, precision=Precision(way.work.precision))
    placement = replace(way.placement(resident), device=META)
    return Streamed(
        model, optim=way.work.optim, precision=Precision(way.work.precision), placement=placement
    )


def asked_refused(asked=ASKED, **limits):
    with pytest.raises(OutOfDeviceMemory) as error:
        stream_candidates(asked, H200, Limits(link=LINK, **limits), H200.peak_flops)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way_of(), marks=pytest.mark.slow),
        pytest.param(way_of(precision="fp32", when="sweep", offload=True), marks=pytest.mark.slow),
        pytest.param(way_of(Muon(), per_stage=2), marks=pytest.mark.slow),
        way_of(AdamW(state="8bit"), when="backward", per_stage=4, offload=True),
        way_of(Muon(state="bf16"), when="sweep"),
        pytest.param(way_of(where="host"), marks=pytest.mark.slow),
        way_of(AdamW(ema=0.9), where="host", when="backward", per_stage=2),
        way_of(config=replace(SHAPE, tie_word_embeddings=True, attention_bias=True), offload=True),
        way_of(lora=Lora(base="nf4"), when="sweep", config=MIXTURE),
        way_of(config=HYBRID, when="sweep"),
        pytest.param(way_of(config=HYBRID, per_stage=2, where="host"), marks=pytest.mark.slow),
        way_of(config=TWO_WIDTHS, per_stage=2),
        pytest.param(
            way_of(lora=Lora(base="nf4"), when="sweep", config=TWO_WIDTHS), marks=pytest.mark.slow
        ),
        pytest.param(way_of(lora=Lora(), when="sweep", per_stage=2), marks=pytest.mark.slow),
        pytest.param(
            way_of(lora=Lora(dora=True, tokens=(3, 7), base="int8"), when="sweep", offload=True),
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda way: "-".join(
        [
            *(["adapters"] if way.work.lora else []),
            way.work.optim.state,
            way.work.precision,
            way.when,
            way.where,
            str(way.blocks_per_stage),
        ]
    ),
)
def test_bytes_are_those_of_the_engine_s_own_buffers(way):
    for count in (0, 7, 19, 10**6):
        resident = way.first_resident(count)
        held = engine(way, resident)
        found, exact = way.bytes_by_tier(resident), dict.fromkeys(Home, 0)
        for stored in held.store.stored_planes:
            for name, (tensor, space) in stored.buffers.items():
                if not (name == GRADIENT and way.gradients_stay_in_slots):
                    exact[space.home] += tensor.numel() * tensor.element_size()
        for stage in held.store.stages:
            exact[stage.frozen.space.home] += stage.frozen.memory.nbytes
        if way.gradients_stay_in_slots and way.where == "host":
            exact[Home.HOST] += in_turn(held)
        device = found["device"]
        assert (
            sum(device[name] for name in ("weights", "gradients", "moments")) == exact[Home.DEVICE]
        )
        assert (
            sum(size for name, size in found["host"].items() if name != "boundaries")
            == exact[Home.HOST]
        )
        assert device["slots"] == held.walk.slots.device_bytes
        assert device["slots"] + device["staging buffers"] == held.walk.device_bytes
        boundaries = device_bytes(
            held.store, held.placement, way.work.input_bytes, way.work.micro_batches
        ).boundaries
        assert device["boundaries"] == boundaries


def test_a_frozen_base_takes_the_bytes_of_the_link_that_the_engine_copies():
    """And an update takes no less time than these copies."""
    way = way_of(lora=Lora(base="nf4"), when="sweep", config=MIXTURE)
    for count in (0, 4):
        resident = way.first_resident(count)
        placement = replace(way.placement(resident), device=META)
        costs = pass_times(way.work, H200, H200.peak_flops["bf16"])
        timing = clock_timing(way.work, placement, costs, LINK)
        in_forward, in_backward = frozen_bytes(way, resident)
        assert timing.moved_bytes == {(Home.HOST, Home.DEVICE): in_forward + in_backward}
        seconds = closed_form_seconds(way, resident, costs, LINK)
        assert (in_forward + in_backward) / LINK.into <= seconds <= timing.update_s * 1.001


@pytest.mark.slow(
    reason="traces passes of experts; by day tests/predict/test_stage_footprint.py does"
)
def test_adapters_of_thirty_billion_parameters_fit_eight_gigabytes():
    """Qwen3-30B-A3B: 128 experts of 4 bits in each of 48 blocks, on a host of 64 GB."""
    config = LlamaConfig(
        model_type="qwen3_moe", vocab_size=151_936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=48,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
        moe_intermediate_size=768, tie_word_embeddings=False, max_position_embeddings=40_960,
    )  # fmt: skip
    work = Work(config, rows=4, length=1024, optim=AdamW(), window_rows=16, lora=Lora(base="nf4"))
    asked = PlanRequest(work, precisions=("bf16",), scopes=("blocks",), remats=("pointwise",))
    limits = Limits(device_bytes=8 * 10**9, host_bytes=64 * 10**9, link=LINK)
    best = stream_candidates(asked, H200, limits, H200.peak_flops)[0]
    assert best.total("device") < 8e9 and best.total("host") < 20e9 and best.total("disk") == 0


def in_turn(held):
    """Of gradients, whose memory stages take turns with: the largest of a kind and turn."""
    largest = {}
    for stage in held.store.stages:
        for stored in (each for each in stage.stored_planes if each.on_host):
            key = stage.index % 2, stored.plane.number
            largest[key] = max(largest.get(key, 0), 4 * stored.plane.grad.numel())
    return sum(largest.values())


def test_as_much_as_fits_stays_on_the_device_and_leaves_the_host():
    way, before = way_of(), -1
    for limit in (2 * GIB, 9 * GIB // 4, 64 * GIB):
        resident = way.resident_within(limit)
        tiers, kept = way.bytes_by_tier(resident), sum(map(len, resident))
        assert sum(tiers["device"].values()) <= limit and kept > before
        before = kept
    assert (
        not tiers["host"]
        and not tiers["device"]["slots"]
        and not tiers["device"]["staging buffers"]
    )


def test_a_piece_of_an_update_is_no_larger_than_the_plane_that_it_is_cut_from():
    tiny = LlamaConfig(
        vocab_size=259,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
    )
    for scope in ("blocks", "none"):
        work = replace(way_of(config=tiny).work, compile=scope)
        assert (
            sum(replace(way_of(config=tiny), work=work).pass_bytes.values())
            < 4 * MAX_CHUNK_ELEMENTS
        ), "the gradient of a whole piece"


def test_weights_stay_first_and_evenly_through_the_depth():
    resident = way_of().first_resident(5)
    assert {name for names in resident for name in names} == {"weights"}
    where = [-1, *(index for index, names in enumerate(resident) if names), len(resident)]
    assert max(b - a for a, b in zip(where, where[1:], strict=False)) <= 3


def test_only_without_clipping_weights_are_updated_in_the_backward_pass():
    assert {way.when for way in stream_ways(ASKED, H200)} == {"sweep", "next forward"}
    assert "backward" in {
        way.when
        for way in stream_ways(ASKED.with_training(replace(ASKED.training, clip=None)), H200)
    }


@pytest.mark.slow
def test_the_best_fits_and_the_others_say_why_they_are_not():
    limits = Limits(2 * GIB, 8 * GIB, link=LINK)
    best, *others = stream_candidates(ASKED, H200, limits, H200.peak_flops)
    assert best.total("device") == best.peak_memory_bytes <= limits.device_bytes
    assert best.total("host") <= limits.host_bytes and not best.total("disk")
    assert best.bottleneck and not best.why and all(each.why for each in others)
    assert 16 % best.work.rows == 0 and best.tokens_per_s == pytest.approx(16 * 512 / best.update_s)


@pytest.mark.slow
def test_moments_lie_in_files_only_if_nothing_fits_otherwise():
    small = Limits(SMALL, GIB, 4 * GIB, LINK)
    best = stream_candidates(ASKED, H200, small, H200.peak_flops)[0]
    assert (
        best.placement.on_disk == {"exp_avg", "exp_avg_sq"}
        and 0 < best.total("disk") <= small.disk_bytes
    )
    assert best.disk_moved_bytes == 2 * best.total("disk")
    assert best.update_s >= best.disk_moved_bytes / LINK.disk and best.bottleneck == "disk"


def test_a_stage_that_does_not_fit_is_refused_with_its_parts():
    words = asked_refused(device_bytes=GIB // 8, host_bytes=64 * GIB)
    assert "nothing fits 0.12 GiB of NVIDIA H200" in words and "slots" in words
    assert (
        "use a smaller model, or a device with more memory: its stages alone are too large" in words
    )
    long = asked_refused(
        ASKED.with_tokens(32 * 16 * 512, 16 * 512), device_bytes=GIB, host_bytes=64 * GIB
    )
    assert "use a smaller train.tokens_per_update, data.sequence_length or model" in long


def test_a_host_that_is_too_small_is_refused_with_what_would_fit():
    words = asked_refused(device_bytes=SMALL, host_bytes=GIB)
    assert "the host needs" in words and "1.00 GiB of it may be taken" in words
    assert "optim.state = 8bit would fit" in words or "optim.state = bf16 would fit" in words
    assert "0.00 GiB may be taken in" in words


@pytest.mark.slow
def test_what_was_said_to_fit_fits():
    limits = Limits(SMALL, GIB, link=LINK)
    state = (
        "8bit" if "8bit would fit" in asked_refused(device_bytes=SMALL, host_bytes=GIB) else "bf16"
    )
    other = ASKED.with_training(replace(ASKED.training, optim=AdamW(state=state)))
    assert stream_candidates(other, H200, limits, H200.peak_flops)


def test_a_disk_that_is_too_small_is_refused_with_its_bytes():
    words = asked_refused(device_bytes=SMALL, host_bytes=GIB // 4, disk_bytes=GIB // 8)
    assert "of disk, and 0.12 GiB may be taken" in words


@pytest.mark.slow
def test_device_and_host_of_one_memory_are_counted_together():
    apart = Limits(4 * GIB, 4 * GIB, link=LINK)
    best = stream_candidates(ASKED, H200, apart, H200.peak_flops)[0]
    assert best.total("device") + best.total("host") > apart.host_bytes // 2
    with pytest.raises(OutOfDeviceMemory, match="the host needs"):
        stream_candidates(
            ASKED, H200, replace(apart, host_bytes=2 * GIB, shared=True), H200.peak_flops
        )


TIMES = [
    ("sweep", "device"),
    ("next forward", "device"),
    ("backward", "device"),
    ("next forward", "host"),
    ("backward", "host"),
]


@pytest.mark.parametrize(
    ("time", "host"),
    pairwise(TIMES, [(rate, stages) for rate in (1e11, 1e9, 1e14) for stages in (0, 3)]),
)
def test_with_an_infinite_link_closed_form_and_clock_agree(time, host):
    (when, where), (host_bytes_per_s, whole_stages) = time, host
    way, link = way_of(when=when, where=where), Link(1e30, 1e30)
    way = replace(way, work=replace(way.work, clip=None))
    times = pass_times(way.work, H200, H200.peak_flops["bf16"], host_bytes_per_s)
    resident = way.first_resident(sum(map(len, way.residency_order[:whole_stages])))
    found = clock_timing(way.work, way.placement(resident), times, link)
    assert found.update_s == pytest.approx(
        closed_form_seconds(way, resident, times, link), rel=1e-9
    )


@pytest.mark.parametrize(
    ("when", "rate"), pairwise(["next forward", "backward"], [1e10, 1e11, 1e12])
)
def test_the_clock_is_never_faster_than_the_closed_form(when, rate):
    for each in (LINK, Link(rate, rate / 2)):
        way = replace(way_of(when=when, where="host", offload=True), files_first=False)
        way = replace(way, work=replace(way.work, clip=None))
        times = pass_times(way.work, H200, H200.peak_flops["bf16"], rate)
        resident = way.first_resident(0)
        found = clock_timing(way.work, way.placement(resident), times, each)
        assert found.update_s >= closed_form_seconds(way, resident, times, each) * (1 - 1e-9)


@pytest.mark.slow
def test_the_host_updates_where_its_memory_is_fast_beside_the_link():
    """And not with an optimizer whose update is more than reading and writing, nor where it is the
    device itself.
    """
    chosen = {}
    for rate in (1e9, 1e13):
        limits = Limits(SMALL, 8 * GIB, link=Link(5e9, 5e9), host_bytes_per_s=rate)
        best = stream_candidates(ASKED, H200, limits, H200.peak_flops)[0]
        chosen[rate] = best.placement.where
        assert (
            best.total("device") <= limits.device_bytes and best.total("host") <= limits.host_bytes
        )
    assert chosen == {1e9: "device", 1e13: "host"}
    assert {way.where for way in stream_ways(ASKED, H200)} == {"device", "host"}
    for optim in (AdamW(state="8bit"), Muon()):
        assert {
            way.where
            for way in stream_ways(ASKED.with_training(replace(ASKED.training, optim=optim)), H200)
        } == {"device"}


def test_a_stage_that_is_updated_at_home_stays_there_as_a_whole_or_on_the_device():
    way = way_of(where="host")
    for limit in (SMALL, 2 * GIB, 5 * GIB // 2):
        resident = way.resident_within(limit)
        assert all(
            not names or len(way.planes_updated_on_host(index, resident)) == 0
            for index, names in enumerate(resident)
        )
        assert not way.device_bytes(resident)["staging buffers"]
        assert {len(names) for names in resident} <= {
            0,
            len(way.stages.buffer_names),
            len(way.stages.buffer_names) - 1,
        }


def test_the_passes_sum_to_the_update_with_its_blocks_recomputed():
    work = Work(
        LlamaConfig.preset("8b"),
        rows=4,
        length=4096,
        optim=AdamW(),
        precision="bf16",
        compile="blocks",
        remat="full",
        window_rows=16,
        device_type="cuda",
    )
    peak = H200.peak_flops["bf16"]
    whole, each = update_time(work, H200, peak), pass_times(replace(work, remat="none"), H200, peak)
    passes = 4 * (32 * (each.forward_s + each.recompute_backward_s) + each.loss_s)
    assert passes == pytest.approx(whole.products_s + whole.attention_s + whole.traffic_s, rel=1e-6)
    assert each.weight_update_s * LlamaConfig.preset("8b").parameter_count() == pytest.approx(
        whole.update_s
    )


def test_it_is_streamed_only_where_nothing_fits_or_it_is_asked_for():
    limits = Limits(2 * GIB, 8 * GIB, link=LINK)
    peaks = H200.peak_flops
    assert (
        streamed_or_resident(ASKED, H200, peaks, limits=limits).chosen.by_origin is None
    )  # fits twice over: not traced
    none = streamed_or_resident(
        ASKED,
        H200,
        peaks,
        memory="stream",
        limits=replace(limits, host_bytes=1, device_bytes=SMALL),
    )
    assert none.chosen is None and "the host needs" in none.refusal


UNSTREAMABLE = {
    "a head for multi-token prediction": replace(
        TRAINING, config=replace(SHAPE, mtp_num_hidden_layers=1)
    ),
    "rounded weights": replace(TRAINING, quantize="int8"),
    "dropped inputs": replace(TRAINING, lora=Lora(dropout=0.1)),
}


@pytest.mark.parametrize("training", [TRAINING, *UNSTREAMABLE.values()], ids=["", *UNSTREAMABLE])
def test_what_streaming_cannot_train_is_neither_planned_so_nor_advised(training, monkeypatch):
    planned = []

    def candidates(request, *_):
        planned.append(request)
        raise OutOfDeviceMemory("")

    limits = Limits(GIB, GIB, link=LINK)
    asked = ASKED.with_training(training)
    too_large = defaults.Plan(H200, GIB, chosen=None, candidates=[])
    monkeypatch.setattr(defaults, "plan", lambda *_: too_large)
    monkeypatch.setattr(defaults, "stream_candidates", candidates)
    streamed_or_resident(asked, H200, H200.peak_flops, limits=limits)
    assert len(planned) == (training is TRAINING)
    planned.clear()
    monkeypatch.setattr(remedies, "_remedies_that_fit", lambda *_: iter(()))
    monkeypatch.setattr(remedies, "stream_candidates", candidates)
    choices = remedies.RemedyChoices(may_add_adapters=False, may_stream=True)
    assert not list(remedies.fitting_remedies(asked, H200, H200.peak_flops, choices, limits))
    assert bool(planned) == (training is TRAINING)


@pytest.mark.slow  # by day the command `plan` is asked for it (tests/commands/test_plan.py)
def test_what_is_asked_for_is_the_first_of_its_candidates():
    limits = Limits(2 * GIB, 8 * GIB, link=LINK)
    pinned = streamed_or_resident(ASKED, H200, H200.peak_flops, memory="stream", limits=limits)
    assert pinned.chosen.placement and pinned.chosen is pinned.candidates[0]
