# Run: pytest tests/benchmarks/test_numbers.py
"""What decides the benchmarks' numbers is right: rounds, ratios, counted waits, crossings,
verdicts.
"""

from __future__ import annotations

import io
import json
import sys
from argparse import Namespace

import pytest
import torch

from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama


def test_rounds_are_interleaved_and_turn_round(script):
    harness = script("harness")
    order = []
    cases = {name: lambda name=name: order.append(name) for name in "abc"}
    times = harness.interleaved(cases, 3, torch.device("cpu"))
    assert "".join(order) == "abccbaabc"
    assert {name: len(each) for name, each in times.items()} == {"a": 3, "b": 3, "c": 3}


def test_a_ratio_is_the_median_of_the_rounds_own_ratios(script):
    harness = script("harness")
    above, below = [
        [harness.Timing(t, 2 * t) for t in times] for times in ([2.0, 8.0, 3.0], [1.0, 2.0, 3.0])
    ]
    found = harness.ratios(above, below)
    assert (
        found["wall"]
        == {"median": 2.0, "low": 1.0, "high": 4.0, "values": [2.0, 4.0, 1.0]}
        == found["cpu"]
    )
    assert harness.shown(found["wall"]) == "2.00 (1.00-4.00)"


def test_waits_are_counted_inside_the_region_and_copies_everywhere(script):
    harness = script("harness")

    def event(category, name, ts, **more):
        return {"cat": category, "name": name, "ts": ts, **more}

    events = [
        {"ph": "M", "name": "process_name"},
        event("cuda_runtime", "cudaStreamSynchronize", 5),  # before the region
        event("gpu_user_annotation", harness._MARK, 30, dur=50),
        event("user_annotation", harness._MARK, 10, dur=10),
        event("cuda_runtime", "cudaLaunchKernel", 11),
        event("cuda_runtime", "cudaStreamSynchronize", 12),
        event("cuda_runtime", "cudaMemcpyAsync", 13),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 14),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 25),
        event("cuda_runtime", "cudaDeviceSynchronize", 21),  # after it
    ]
    assert harness.count_waits(events) == {
        "cudaStreamSynchronize": 1,
        "Memcpy DtoH (Device -> Pageable)": 1,
    }


@pytest.mark.gpu
def test_a_read_value_is_a_wait_and_a_kernel_is_none(script):
    harness, device = script("harness"), torch.device("cuda", 0)
    vector = torch.ones(1000, device=device)
    with harness.HostSyncs(device) as quiet:
        vector * 2
    with harness.HostSyncs(device) as reading:
        (vector * 2).sum().item()
    assert quiet.counts == {} and sum(reading.counts.values()) >= 1


def test_pace_times_its_rounds_and_nothing_before_them(script, monkeypatch):
    systems = script("systems")
    now = 0.0
    monkeypatch.setattr(systems, "clock", lambda: now)
    pace = systems.Pace(torch.device("cpu"), rounds=3, round_s=4.0)
    pace.begin()
    # Compile, two to warm up, one to size rounds of two, a last.
    seconds = [100.0, 7.0, 7.0, 2.0] + 6 * [1.5] + [9.0]
    ended = []
    for each in seconds:
        now += each
        ended.append(pace.updated())
    assert pace.first_s == 100.0 and pace.seconds == [1.5, 1.5, 1.5]
    assert ended == [False] * 10 + [True]


def test_a_process_answers_after_each_round_and_waits_for_the_next(script, monkeypatch):
    rounds = script("rounds")
    now, reply = 0.0, io.StringIO()
    monkeypatch.setattr(rounds, "clock", lambda: now)
    monkeypatch.setattr(sys, "stdin", io.StringIO('{"updates": 3}\n{"updates": 1}\n'))
    orders = rounds.Orders(reply, 2, targets=lambda: int(10 * now), ready=lambda: {"parameters": 7})
    for _ in range(2 + 3):
        now += 2.0
        orders.updated()
    warm, round_ = map(json.loads, reply.getvalue().splitlines())
    assert (warm["wall_s"], warm["targets"], warm["parameters"]) == (4.0, 40, 7)
    assert (round_["wall_s"], round_["targets"], "parameters" in round_) == (6.0, 60, False)


def test_litgpts_names_there_and_back(script):
    names = script("peer_litgpt")
    config = LlamaConfig.preset("nano", tie_word_embeddings=False)
    weights = Llama(config).state_dict()
    theirs = names.to_litgpt(weights)
    # Query, key and value are one.
    assert len(theirs) == len(weights) - 2 * config.num_hidden_layers
    back = names.from_litgpt(theirs, config)
    assert back.keys() == weights.keys() and all(
        torch.equal(back[name], weights[name]) for name in weights
    )


def test_a_peers_time_ends_its_schedule(script, monkeypatch):
    quality = script("time_to_quality")
    now = 0.0
    monkeypatch.setattr(quality, "clock", lambda: now)
    timer = quality.Timer(100.0)
    for _ in range(quality.WARM_UP):
        now += 50.0
        timer.updated()
    factors = []
    with pytest.raises(script("peers").Finished):
        for index in range(200):
            factors.append(timer.factor(index))
            now += 1.0
            timer.updated()
    assert len(factors) == 100 and factors[0] < factors[5] > factors[50] > factors[99]
    assert factors[99] == pytest.approx(quality.DEFAULT_MIN_LR_RATIO, abs=0.01)


def test_a_peer_repeats_its_best_rate_and_noise_is_no_difference(script, tmp_path):
    quality = script("time_to_quality")
    journal, args = (
        quality.Journal(tmp_path / "lines", 5.0),
        Namespace(seeds=[0, 1], lrs=[1e-3, 2e-3]),
    )
    trainings = list(quality.first_round(args, ["monograph", "trainer"]))
    assert [each[1:] for each in trainings] == [(None, 0), (1e-3, 0), (None, 1), (2e-3, 0)]
    for training, bits in zip(trainings, (1.80, 1.95, 1.82, 1.90), strict=True):
        journal.add(training._asdict() | {"minutes": 5.0, "bits_per_byte": bits, "tokens": 1})
    [repeated] = quality.second_round(args, ["monograph", "trainer"], journal)
    assert repeated == quality.Training("trainer", 2e-3, 1) and journal.find(repeated) is None
    journal.add(repeated._asdict() | {"minutes": 5.0, "bits_per_byte": 1.92, "tokens": 1})
    again = quality.Journal(tmp_path / "lines", 5.0)
    assert again.find(repeated) and not quality.Journal(tmp_path / "lines", 3.0).entries
    cases = [quality.summary(args, name, again) for name in ("monograph", "trainer")]
    assert quality.verdict(cases).startswith("Monograph is ahead: +0.1000")
    assert quality.verdict([cases[0], cases[1] | {"mean": 1.83}]).startswith("no difference")
    for seed, bits in ((1, 1.93), (0, 1.90)):  # they end in any order
        again.add(
            quality.Training("before", None, seed)._asdict()
            | {"minutes": 5.0, "bits_per_byte": bits, "tokens": 1}
        )
    assert not quality.since_before(cases)
    cases.append(quality.summary(args, "before", again))
    assert (
        quality.since_before(cases) == "since before: -0.1050 bits per byte, standard error 0.0050"
    )


def test_a_crossing_is_where_the_curve_stays_below(script):
    crossing = script("first_run").crossing
    curve = [
        {"tokens": t, "bits_per_byte": b}
        for t, b in ((100, 4.0), (200, 3.0), (300, 3.5), (400, 2.5))
    ]
    assert crossing(curve, 3.25) == 325
    assert crossing(curve, 4.5) == 100
    assert crossing(curve, 2.0) is None
