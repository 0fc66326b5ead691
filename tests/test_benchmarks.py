# Run: pytest tests/test_benchmarks.py    (with real compilation, about a minute: -m slow)
"""Every benchmark script runs, and what decides its numbers (rounds, ratios, counted waits, crossings) is right."""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from monograph.model import masks
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.resident import Resident

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
SCRIPTS = ("accumulation", "automata", "contestants", "corpus", "families", "first_run", "generate_peers", "generators")
SCRIPTS += ("harness", "loss", "peer_litgpt", "peer_llama", "peers", "plan", "rounds", "sampler", "start")
SCRIPTS += ("steps", "systems", "time_to_quality", "train", "train_peers")


@pytest.fixture
def script(monkeypatch):
    """Imports a script by its name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module
    for name in SCRIPTS:
        sys.modules.pop(name, None)


@pytest.fixture
def uncompiled(monkeypatch):
    """Scripts run whole but eagerly: compiling is what takes their time, and the slow tests below do it."""
    monkeypatch.setattr(Resident, "capture", lambda self, window: None)


def smoke(module: ModuleType, monkeypatch, out: Path, *arguments: str) -> dict:
    """What the script's main() writes."""
    monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", "--smoke", "--out", str(out), *arguments])
    module.main()
    return json.loads(out.read_text())


def test_each_script_is_tested_here():
    assert sorted(path.stem for path in BENCHMARKS.glob("*.py")) == sorted(SCRIPTS)


# ── the scripts, eagerly ──────────────────────────────────────────────────────────────────────────


def test_sampler(script, monkeypatch, tmp_path):
    sampler = script("sampler")
    monkeypatch.setattr(sampler, "compiled", lambda function: function)
    found = smoke(sampler, monkeypatch, tmp_path / "found.json")
    [case], [steps] = found["cases"], found["steps"]
    assert steps["wall_tax"]["greedy"]["median"] == 0 and set(steps["wall_ms"]) == set(sampler.WHOLE)
    assert case["same_as_eager"] == dict.fromkeys(sampler.VARIANTS, True) and case["wall_ms"]["argmax"]["median"] > 0


def test_accumulation(script, monkeypatch, tmp_path):
    [case] = smoke(script("accumulation"), monkeypatch, tmp_path / "found.json")["cases"]
    assert case["fp64"] < 1e-12 < 0.01 < case["mean_of_means"]


def test_plan(script, monkeypatch, tmp_path):
    found = smoke(script("plan"), monkeypatch, tmp_path / "found.json")
    assert found["summary"]["eager"]["worst"] < 0.05 and found["cases"][0]["measured_bytes"] > 0


def test_automata(script, monkeypatch, tmp_path):
    monkeypatch.setattr(torch, "compile", lambda **options: lambda step: step)
    automata = script("automata")
    cases = smoke(automata, monkeypatch, tmp_path / "found.json")["cases"]
    assert [case["case"] for case in cases] == list(automata.CASES)
    assert all(case["states"] > 2 and case["build_cpu_s"]["median"] > 0 for case in cases)
    assert len(set(automata.vocabulary(1000))) == 1000


def test_families(script, monkeypatch, tmp_path):
    cases = smoke(script("families"), monkeypatch, tmp_path / "found.json")["cases"]
    assert [case["family"] for case in cases] == ["llama", "mistral", "qwen2", "qwen3"]
    for case in cases:
        assert max(case["logits_fp32"], case["gradients_fp32"]) < 1e-5 and case["round_trip"]
        assert max(case["logits_fp64"], case["gradients_fp64"]) < 1e-12


def test_families_notices_a_window_that_is_off_by_one(script, monkeypatch):
    families, exact = script("families"), masks.dense_mask
    config = LlamaConfig.preset("nano", model_type="mistral", sliding_window=5, initializer_range=0.3)
    assert families.compared(config, 0)["logits_fp32"] < 1e-5
    monkeypatch.setattr(masks, "dense_mask", lambda segments, window: exact(segments, window + 1))
    off = families.compared(config, 0)
    assert min(off[error] for error in families.ERRORS) > 0.01 and off["round_trip"]


def test_loss(script, monkeypatch, tmp_path):
    found = smoke(script("loss"), monkeypatch, tmp_path / "loss.json", "--modes", "eager")
    assert found["schema"] == "monograph-benchmark-loss-1"
    assert found["machine"]["omp_wait_policy"] == os.environ["OMP_WAIT_POLICY"]
    assert [case["dtype"] for case in found["cases"]] == ["fp32", "bf16"]
    for case, bound in zip(found["cases"], (1e-6, 2e-2), strict=True):
        assert case["gradient_difference"] < bound
        assert min(case["peak_bytes"].values()) > 16 * 512 * 4  # the weight's gradient alone
        assert len(case["time_ratio"]["wall"]["values"]) == 2


def test_steps(script, uncompiled, monkeypatch, tmp_path):
    found = smoke(script("steps"), monkeypatch, tmp_path / "steps.json")
    assert found["schema"] == "monograph-benchmark-steps-1"
    [case] = found["cases"]
    assert case["first_losses"]["eager"] == case["first_losses"]["captured"]
    assert case["recompiles"] == 0 and case["host_syncs"]["eager"] is None
    assert case["tokens_per_s"]["eager"]["median"] > 0


def test_steps_default_shapes_fit_their_windows(script):
    steps = script("steps")
    for shape in steps.SHAPES.values():
        window = steps.packed_window(shape, torch.device("cpu"))
        assert window["tokens"].shape == (shape.rows, shape.length)
        assert int(window["tokens"].max()) < shape.config.vocab_size
        assert window["segments"].unique().tolist() == [1, 2]
        borders = window["segments"].diff() == 1
        assert bool((window["positions"][:, 1:][borders] == 0).all()) and bool((borders.sum(1) == 1).all())


def test_start_in_this_process(script, uncompiled):
    start = script("start")
    found = start.start("smoke", "fp32", spawned_s=start.BORN_S - 0.25)
    assert found["interpreter_s"] == pytest.approx(0.25)
    assert sum(found[part] for part in start.PARTS) == pytest.approx(found["total_s"])


def test_train_in_this_process(script, uncompiled):
    train = script("train")
    args = Namespace(rounds=2, round_s=0.0)
    case = script("systems").monograph(train.SMOKE["nano"], args)
    assert len(case["seconds_per_update"]["values"]) == 2 and case["host_syncs"] is None
    assert case["mean_loss"] < 6.3  # ln 512 = 6.24: it trains


def test_a_model_drawn_on_the_device_is_the_model(script):
    config = LlamaConfig.preset("nano")
    model = script("systems").drawn_on(torch.device("cpu"), config)
    assert sum(p.numel() for p in model.parameters()) == config.parameter_count()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert float(model.lm_head.weight.detach().std()) == pytest.approx(config.initializer_range, rel=0.05)


def test_corpus(script, monkeypatch, tmp_path):
    module = script("corpus")
    monkeypatch.setattr(module, "measured", lambda folder: module.prepare(folder))  # a process takes seconds to begin
    found = smoke(module, monkeypatch, tmp_path / "corpus.json")
    assert found["schema"] == "monograph-benchmark-corpus-1"
    assert [case["files"] for case in found["cases"]] == [4, 4]
    small, large = found["cases"]
    assert 1.5 < large["text_bytes"] / small["text_bytes"] < 2.5 and large["peak_bytes"] >= small["peak_heap_bytes"] > 0


def test_train_shapes_are_the_promised_ones(script):
    shapes = script("train").SHAPES
    assert {name: (s.length, s.tokens_per_update) for name, s in shapes.items()} == {
        "124m": (1024, 131_072),
        "1.2b": (2048, 131_072),
    }
    assert shapes["1.2b"].config.parameter_count() == 1_235_814_400


def test_a_case_that_fails_says_why_and_loses_nothing_else(script, monkeypatch):
    train = script("train")
    monkeypatch.setattr(sys, "argv", ["train.py"])
    shape = train.SMOKE["nano"]
    late = train.run_case("nano", shape, "monograph", Namespace(), seconds=1.0)
    assert late["error"] == "not measured: out of time"
    failed = train.run_case("no such model", shape, "monograph", Namespace(), seconds=60.0)
    assert failed["error"] == "KeyError: 'no such model'"
    assert train.row(failed, [failed])[1] == failed["error"]


def test_train_peers(script, monkeypatch, tmp_path, capsys):
    pytest.importorskip("transformers")
    monkeypatch.setitem(
        script("contestants").SYSTEMS, "lightning", script("contestants").System(None, ("no_such_peer",))
    )
    systems = ["--systems", "monograph", "plain loop", "trainer", "lightning", "--modes", "eager"]
    found = smoke(script("train_peers"), monkeypatch, tmp_path / "found.json", *systems)
    cases = {case["system"]: case for case in found["cases"]}
    assert cases.pop("lightning")["error"] == "not measured: no_such_peer missing"
    assert "missing: no_such_peer. pip install" in capsys.readouterr().out
    assert len({case["parameters"] for case in cases.values()}) == 1
    assert all(len(case["rounds"]) == 2 and case["step_peak_bytes"] > 0 for case in cases.values()), cases
    # Trainer scales its own models' losses right; a mean of means over padded micro-batches is another gradient.
    assert max(cases[name]["gradient_error"] for name in ("monograph", "trainer")) < 1e-6
    assert cases["plain loop"]["gradient_error"] > 0.01


def test_peer_shapes_are_the_promised_ones(script):
    peers = script("train_peers")
    for name, tokens in (("overhead", 512), ("overhead x4", 512), ("compute", 1024)):
        case = peers.CASES[name]
        assert case.shape.tokens_per_update == tokens
        assert all(len(text) == case.shape.length + 1 for text in peers.documents(case))
    ragged = peers.CASES["ragged"]
    lengths = sorted(len(text) - 1 for text in peers.documents(ragged))
    assert lengths[len(lengths) // 2] == pytest.approx(ragged.shape.length / 4, rel=0.1)
    per_update = sum(lengths) / len(lengths) * ragged.shape.micro_batch * ragged.shape.micro_batches
    assert per_update == pytest.approx(ragged.rows * ragged.shape.length, rel=0.1)


def test_generate_peers(script, monkeypatch, tmp_path, capsys):
    pytest.importorskip("transformers")
    missing = script("contestants").System(None, ("no_such_peer",))
    monkeypatch.setitem(script("generators").SYSTEMS, "llama.cpp", missing)
    systems = ["--systems", "monograph", "transformers, dynamic", "llama.cpp"]
    found = smoke(script("generate_peers"), monkeypatch, tmp_path / "found.json", *systems)
    cases = {case["system"]: case for case in found["cases"]}
    assert cases.pop("llama.cpp")["error"] == "not measured: no_such_peer missing"
    assert "missing: no_such_peer. pip install" in capsys.readouterr().out
    for case in cases.values():
        assert len(case["tokens_per_s"]["values"]) == 2 and min(case["tokens_per_s"]["values"]) > 0, case
        assert case["same_text"] == 1.0 and case["repeats"] and len(case["texts"]) == 2 and all(case["texts"])


def test_generated_text_is_printable_ascii_and_comes_back(script):
    generators, case = script("generators"), script("generate_peers").SMOKE["smoke"]
    task = generators.task(case.config, 2, 8, 1, torch.float32)
    assert task.tokenizer.vocab_size == case.config.vocab_size
    silent = (task.model.lm_head.weight == 0).all(1)
    for index, piece in enumerate(task.tokenizer.pieces):
        drawable = piece != b"" and piece.isascii() and piece.decode().isprintable()
        assert bool(silent[index]) is not drawable, piece
    assert task.tokenizer.decode(task.prompt_ids) == generators.PROMPT


def test_the_host_sampler_draws_what_transformers_chain_leaves(script):
    from transformers import generation

    draw, chain = script("generators").drawn, script("generators").CHAIN
    warpers = (generation.TemperatureLogitsWarper, generation.TopKLogitsWarper, generation.TopPLogitsWarper)
    logits_BV = 3 * torch.randn(20, 500, generator=torch.Generator().manual_seed(0))
    left_BV = logits_BV
    for warper, value in zip((*warpers, generation.MinPLogitsWarper), chain.values(), strict=True):
        left_BV = warper(value)(None, left_BV)
    random = np.random.default_rng(0)
    for logits_V, left_V in zip(logits_BV, left_BV, strict=True):
        counts = np.bincount([draw(logits_V.numpy(), random) for _ in range(400)], minlength=500) / 400
        odds = left_V.softmax(-1).numpy()
        assert not counts[odds == 0].any()
        assert np.abs(counts - odds).max() < 5 * 0.5 / 400**0.5  # five standard deviations of a share


def test_first_run(script, monkeypatch, tmp_path):
    source = tmp_path / "text"
    source.mkdir()
    for index in range(4):
        (source / f"{index}.txt").write_text(" ".join(str(n * n + index) for n in range(600)))
    found = smoke(script("first_run"), monkeypatch, tmp_path / "run.json", f"data.source={source}", "--lr", "0.02")
    assert found["schema"] == "monograph-benchmark-first-run-1"
    assert [case["updates"] for case in found["cases"]] == [2, 4]
    assert all(case["lr"] == 0.02 and case["final"] == case["curve"][-1] for case in found["cases"])
    assert list(found["levels"].values()) == sorted(found["levels"].values(), reverse=True)
    assert found["levels"]["order 6 - 0.1"] == pytest.approx(found["levels"]["order 6"] - 0.1)


def test_first_run_takes_a_presets_defaults_from_the_plan(script):
    first_run = script("first_run")
    default = first_run.planner.DEFAULT
    settings = first_run.settings_for({"model.preset": default.preset}, 3, 7)
    assert settings.data.tokenizer == f"bpe:{default.vocabulary}"
    assert settings.train.tokens_per_update == default.tokens_per_update
    assert (settings.train.updates, settings.train.seed) == (3, 7)


# ── what decides the numbers ──────────────────────────────────────────────────────────────────────


def test_rounds_are_interleaved_and_turn_round(script):
    harness = script("harness")
    order = []
    cases = {name: lambda name=name: order.append(name) for name in "abc"}
    times = harness.interleaved(cases, 3, torch.device("cpu"))
    assert "".join(order) == "abccbaabc"
    assert {name: len(each) for name, each in times.items()} == {"a": 3, "b": 3, "c": 3}


def test_a_ratio_is_the_median_of_the_rounds_own_ratios(script):
    harness = script("harness")
    above, below = [[harness.Timing(t, 2 * t) for t in times] for times in ([2.0, 8.0, 3.0], [1.0, 2.0, 3.0])]
    found = harness.ratios(above, below)
    assert found["wall"] == {"median": 2.0, "low": 1.0, "high": 4.0, "values": [2.0, 4.0, 1.0]} == found["cpu"]
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
    assert harness.count_waits(events) == {"cudaStreamSynchronize": 1, "Memcpy DtoH (Device -> Pageable)": 1}


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
    seconds = [100.0, 7.0, 7.0, 2.0] + 6 * [1.5] + [9.0]  # compile, two to warm up, one to size rounds of two, a last
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
    assert len(theirs) == len(weights) - 2 * config.num_hidden_layers  # query, key and value are one
    back = names.from_litgpt(theirs, config)
    assert back.keys() == weights.keys() and all(torch.equal(back[name], weights[name]) for name in weights)


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
    assert factors[99] == pytest.approx(quality.FINAL, abs=0.01)


def test_a_peer_repeats_its_best_rate_and_noise_is_no_difference(script, tmp_path):
    quality = script("time_to_quality")
    journal, args = quality.Journal(tmp_path / "lines", 5.0), Namespace(seeds=[0, 1], lrs=[1e-3, 2e-3])
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


def test_a_crossing_is_where_the_curve_stays_below(script):
    crossing = script("first_run").crossing
    curve = [{"tokens": t, "bits_per_byte": b} for t, b in ((100, 4.0), (200, 3.0), (300, 3.5), (400, 2.5))]
    assert crossing(curve, 3.25) == 325
    assert crossing(curve, 4.5) == 100
    assert crossing(curve, 2.0) is None


# ── as they are called ────────────────────────────────────────────────────────────────────────────


def call(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=280, env=os.environ | environment)


def test_gpu_sh_says_what_it_has(tmp_path):
    gpu = str(BENCHMARKS / "gpu.sh")
    for part in ("memory", "stream", "ensemble"):
        assert call(gpu, part, OUT=str(tmp_path)).stdout == f"{part}: not built yet, nothing measured\n"
    assert call(gpu, "laundry", OUT=str(tmp_path)).returncode == call(gpu, OUT=str(tmp_path)).returncode == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["loss", "steps"])
def test_compiled(name, tmp_path):
    out = tmp_path / "found.json"
    done = call(sys.executable, str(BENCHMARKS / f"{name}.py"), "--smoke", "--out", str(out))
    assert done.returncode == 0, done.stderr
    case = json.loads(out.read_text())["cases"][-1]
    if name == "steps":
        eager, captured = case["first_losses"]["eager"], case["first_losses"]["captured"]
        assert captured == pytest.approx(eager, rel=1e-5) and case["recompiles"] == 0


@pytest.mark.slow
def test_start_as_it_is_called(tmp_path):
    out = tmp_path / "found.json"
    done = call(sys.executable, str(BENCHMARKS / "start.py"), "--smoke", "--out", str(out))
    assert done.returncode == 0, done.stderr
    [case] = json.loads(out.read_text())["cases"]
    cold, warm = (case["starts"][name][0] for name in ("cold", "warm"))
    assert cold["caches"]["hit"] == 0 and warm["caches"]["miss"] == 0 and warm["caches"]["hit"] > 0
    assert warm["compile_s"] < cold["compile_s"]


@pytest.mark.slow
def test_train_as_gpu_sh_calls_it(tmp_path):
    has_peer = all(importlib.util.find_spec(name) for name in ("transformers", "accelerate"))
    systems = ["monograph", "trainer"] if has_peer else ["monograph"]
    command = [str(BENCHMARKS / "gpu.sh"), "train", "--smoke", "--systems", *systems]
    done = call(*command, OUT=str(tmp_path), PYTHON=sys.executable)
    assert done.returncode == 0, done.stdout + done.stderr
    cases = json.loads((tmp_path / "train.json").read_text())["cases"]
    assert [case["system"] for case in cases] == systems
    assert all(case["tokens_per_s"]["median"] > 0 and case["mean_loss"] < 6.3 for case in cases)
