# Run: pytest tests/benchmarks/test_scripts.py
"""Every benchmark script runs, eagerly and small, and writes what is read from it."""

from __future__ import annotations

import gc
import json
import os
import sys
import weakref
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch._functorch.config

from monograph.model import llama
from monograph.model.config import LlamaConfig
from monograph.model.families import FAMILIES
from monograph.session.ladder import RUNGS
from scripts import smoke
from tape import Tape

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_each_script_is_tested_here_and_can_be_imported(script):
    """Whatever else is asked of the dear ones is asked by night."""
    tested = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    for path in BENCHMARKS.glob("*.py"):
        assert not hasattr(script(path.stem), "main") or f'"{path.stem}"' in tested


@pytest.mark.parametrize("name", ["launches", "machine_code", "members_launches"])
def test_launches_are_counted_on_a_pretended_card_alone(name, script, monkeypatch):
    """What is counted is tested there: test_counts.py and test_machine_code.py of
    tests/pretended_gpu.
    """
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr("sys.argv", [f"{name}.py", "--smoke"])
    with pytest.raises(SystemExit, match=rf"{name}.py counts on a pretended card \(docs/gpu.md\)"):
        script(name).main()


@pytest.mark.slow
def test_kernels(script, monkeypatch, tmp_path):
    """That a CPU runs none of a card's kernels is left as time in which the card had nothing to do."""
    kernels = script("kernels")
    monkeypatch.setattr(kernels.Resident, "capture", lambda engine, window, scope: None)
    [case] = smoke(kernels, monkeypatch, tmp_path / "found.json")["cases"]
    assert case["kernels"] == [] and case["milliseconds"]["nothing"] > 0
    assert (
        kernels.kind_of("nvjet_sm90_tst_256x128") == "products"
        and kernels.kind_of("triton_poi_x") == "others"
    )


@pytest.mark.slow
def test_sampler(script, monkeypatch, tmp_path):
    sampler = script("sampler")
    monkeypatch.setattr(sampler, "compiled", lambda function: function)
    found = smoke(sampler, monkeypatch, tmp_path / "found.json")
    [case], [steps] = found["cases"], found["steps"]
    assert steps["wall_tax"]["greedy"]["median"] == 0 and set(steps["wall_ms"]) == set(
        sampler.WHOLE
    )
    assert (
        case["same_as_eager"] == dict.fromkeys(sampler.VARIANTS, True)
        and case["wall_ms"]["argmax"]["median"] > 0
    )


@pytest.mark.slow
def test_bottleneck(script, monkeypatch, tmp_path):
    cases = smoke(script("bottleneck"), monkeypatch, tmp_path / "found.json")["cases"]
    assert [case["case"] for case in cases] == ["padded to packed", "micro-batch 1 to 2 rows"]
    for case in cases:
        assert case["predicted"] >= 1 and case["measured"]["low"] > 0
        assert sum(case["shares"].values()) == pytest.approx(1.0)
    assert cases[0]["predicted"] == pytest.approx(2.0)  # half of the positions are empty


@pytest.mark.slow
def test_ladder(script, monkeypatch, tmp_path):
    cases = smoke(script("ladder"), monkeypatch, tmp_path / "found.json")["cases"]
    assert [case["rung"] for case in cases] == [rung.name for rung in RUNGS]
    there = [case for case in cases if not case["obstacle"]]
    assert {"compiled", "CUDA graphs", "fp8"}.isdisjoint(case["rung"] for case in there) and len(
        there
    ) >= 5
    assert "times" not in there[0] and all(case["times"]["cpu"]["median"] > 0 for case in there[1:])
    by_name = {case["rung"]: case for case in there}
    for case in there[1:]:
        speeds = (each["tokens_per_s"]["values"] for each in (by_name[case["over"]], case))
        ratios = [after / before for before, after in zip(*speeds, strict=True)]
        assert case["times"]["wall"]["values"] == pytest.approx(ratios)


@pytest.mark.slow
def test_ranks(script, monkeypatch, tmp_path):
    ranks = script("ranks")
    started, shape = ranks.started, replace(ranks.TINY, captured=False)
    monkeypatch.setattr(
        ranks, "started", lambda parallel, size, names, _: ranks.rank(parallel, names[1:], shape, 2)
    )
    [case] = smoke(ranks, monkeypatch, tmp_path / "found.json", "--ranks", "1")["cases"]
    assert (
        set(case["monograph"]) == set(case["torch"]) == {"held", "peak", "sent"}
        and case["slower"]["cpu"]["low"] > 0
    )
    assert len(started("fsdp", 2, ["muon", *ranks.LOOPS], True)["wall"]["values"]) == 2


def test_accumulation(script, monkeypatch, tmp_path):
    [case] = smoke(script("accumulation"), monkeypatch, tmp_path / "found.json")["cases"]
    assert case["fp64"] < 1e-12 < 0.01 < case["mean_of_means"]


@pytest.mark.slow
def test_same_bits(script, monkeypatch, tmp_path):
    same_bits, out, names = (
        script("same_bits"),
        tmp_path / "found.json",
        ["streamed host", "ensemble own rows"],
    )
    found = smoke(same_bits, monkeypatch, out, "--only", *names)
    assert [*found["cases"][0]] == names
    assert smoke(same_bits, monkeypatch, out, "--only", names[0], "--against", str(out))["cases"]
    monkeypatch.setattr(same_bits, "SCHEDULE", lambda index: 0.5)
    with pytest.raises(SystemExit, match="other bits than before in streamed host losses"):
        smoke(
            same_bits,
            monkeypatch,
            tmp_path / "other.json",
            "--only",
            names[0],
            "--against",
            str(out),
        )


@pytest.mark.slow
def test_same_speed(script, monkeypatch, tmp_path):
    found = smoke(
        script("same_speed"), monkeypatch, tmp_path / "found.json", str(BENCHMARKS.parent)
    )
    assert len(found["cases"]) == 2 * 2 + 2 and all(
        case["ratio"]["low"] > 0 for case in found["cases"]
    )


def test_mixture_peers(script, uncompiled, monkeypatch, tmp_path):
    [case] = smoke(script("mixture_peers"), monkeypatch, tmp_path / "found.json")["cases"]
    assert case["times_as_fast"].keys() == {"loop", "grouped_mm"}
    ours, theirs = (case["first_losses"][way] for way in ("monograph", "loop"))
    assert ours == pytest.approx(theirs, rel=1e-4) and ours[1] < ours[0], (
        "the second loss is that of an updated model"
    )


def test_recipe_compares_a_variant_with_the_default_run_of_the_same_seed(script):
    recipe, scores = script("recipe"), {"default": (2.0, 3.0), "variant": (1.5, 2.9)}
    cases = [
        {"text": "a", "variant": variant, "seed": seed, "bits_per_byte": score, "training_s": 1.0}
        for variant, both in scores.items() for seed, score in enumerate(both)
    ]  # fmt: skip
    assert recipe.effect([-1.0, -3.0]) == (-2.0, 1.0)
    assert recipe.table(cases).splitlines()[2:] == [
        "| default | 2.500 | 1.00 x |",
        "| variant | -0.3000 ± 0.2000 | 1.00 x |",
    ]


@pytest.mark.slow
def test_recipe(script, monkeypatch, tmp_path):
    cases = smoke(script("recipe"), monkeypatch, tmp_path / "found.json")["cases"]
    assert [(case["variant"], case["seed"]) for case in cases] == [
        (v, s) for s in (0, 1) for v in ("default", "no floor")
    ]


def test_few_texts_trains_each_arm_by_a_command_and_scores_what_it_left(
    script, monkeypatch, tmp_path
):
    few, calls = script("few_texts"), []

    def called(arguments, home):
        calls.append(arguments)
        if arguments[0] == "evaluate":
            return {"bits_per_byte": 2.0}
        if "--out" in arguments:
            for name in (".", "distilled") if arguments[0] == "sweep" else (".",):
                (Path(arguments[-1]) / name).mkdir(parents=True)
                (Path(arguments[-1]) / name / "metrics.jsonl").write_text('{"update": 7}\n')
        return {}

    monkeypatch.setattr(few, "called", called)
    found = smoke(few, monkeypatch, tmp_path / "found.json")
    assert [list(case["bits_per_byte"]) for case in found["cases"]] == [
        ["."],
        ["."],
        ["best", "mixture", "distilled"],
    ]
    assert {case["updates"] for case in found["cases"]} == {7}
    trained = [call for call in calls if "--out" in call]
    assert [call[0] for call in trained].count("train") == 2 and all(
        "train.compile=none" in call for call in trained
    )
    assert (
        few.table(found["cases"])
        .splitlines()[-1]
        .endswith("| 4 seeds, distilled | 0.0 | 7 | 2.000 |")
    )


def test_quantize_scores_the_numbers_of_a_file_for_each_way(script, monkeypatch, tmp_path):
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    quantize = script("quantize")
    cases = smoke(quantize, monkeypatch, tmp_path / "found.json")["cases"]
    assert [(case["quantize"], case["way"]) for case in cases] == [
        (bits, way) for bits in ("int4", "int8") for way in quantize.WAYS
    ]
    assert all(6 < case["file"] < 9 and case["before"] != case["file"] for case in cases)
    # The same training, whatever it is rounded to at its end.
    assert cases[0]["before"] == cases[3]["before"] != cases[1]["before"]
    four, eight = (abs(case["file"] - case["before"]) for case in (cases[0], cases[3]))
    assert eight < four


@pytest.mark.slow
def test_balance(script, monkeypatch, tmp_path):
    cases = smoke(script("balance"), monkeypatch, tmp_path / "found.json")["cases"]
    assert [case["factor"] for case in cases] == [0, 0.001, 0.01]
    assert all(
        len(case["entropy"]) == 2 and 0 < min(case["entropy"]) <= max(case["entropy"]) <= 1
        for case in cases
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5_text", "granitemoehybrid"])
def test_hybrid_peers(script, uncompiled, monkeypatch, tmp_path, family):
    found = smoke(script("hybrid_peers"), monkeypatch, tmp_path / "found.json", "--family", family)
    [case] = found["cases"]
    assert case["times_as_fast"].keys() == {"transformers"}
    ours, theirs = (case["first_losses"][way] for way in ("monograph", "transformers"))
    # Its documents are apart, and theirs are not.
    assert ours == pytest.approx(theirs, rel=1e-2) and ours[1] < ours[0]


@pytest.mark.slow
def test_siblings(script, uncompiled, monkeypatch, tmp_path):
    cases = smoke(script("siblings"), monkeypatch, tmp_path / "found.json")["cases"]
    assert [(case["width"], case["mode"]) for case in cases] == [(32, "eager"), (32, "captured")]
    for case in cases:
        assert all(
            case[name]["fused_over_separate"]["cpu"]["median"] > 0 for name in ("forward", "update")
        )
        assert not case["update"]["kept"], "two rounds decide nothing"
        assert min(case["update_peak_bytes"].values()) > 0


@pytest.mark.slow
def test_adapter_rows(script, monkeypatch, tmp_path):
    [case] = smoke(script("adapter_rows"), monkeypatch, tmp_path / "found.json")["cases"]
    assert case["bank_bytes"] > 0 and len(case["tokens_per_s"]) == 3
    assert all(each["cpu"]["median"] > 0 for each in case["of_the_base"].values())


def test_drafts(script, monkeypatch, tmp_path):
    drafts = script("drafts")
    found = smoke(drafts, monkeypatch, tmp_path / "drafts.json")
    per_pass = [case["tokens_in_a_pass"] for case in found["cases"]]
    # A model without its last layers agrees with one whose last layers add nothing.
    assert per_pass[0] == 5 > per_pass[-1] >= 1
    assert "| 1 | " in drafts.table(found["cases"])


@pytest.mark.slow
def test_trained_drafts(script, monkeypatch, tmp_path):
    """The draft is measured after its whole training, after a tenth of it, and before it."""
    trained_drafts = script("trained_drafts")
    cases = smoke(trained_drafts, monkeypatch, tmp_path / "found.json")["cases"]
    assert [case["draft_updates"] for case in cases] == [2, 0, 0]
    assert all(1 <= case["tokens_in_a_pass"] <= 5 for case in cases)
    assert cases[0]["draft_loss"] > 0 and cases[-1]["draft_loss"] is None
    assert trained_drafts.table(cases).count("\n") == len(cases) + 1


@pytest.mark.slow
def test_constrained_steps(script, monkeypatch, tmp_path):
    """Each constraint is measured beside steps without one."""
    steps = script("constrained_steps")
    cases = smoke(steps, monkeypatch, tmp_path / "found.json")["cases"]
    assert [case["constraint"] for case in cases] == list(steps.constraints([b"", b"a"]))
    assert all(case["cpu_ratio"]["median"] > 0 and case["pairs"] == 5 for case in cases)
    assert steps.table(cases).count("\n") == len(cases) + 1


def test_automata(script, monkeypatch, tmp_path):
    monkeypatch.setattr(torch, "compile", lambda **options: lambda step: step)
    automata = script("automata")
    cases = smoke(automata, monkeypatch, tmp_path / "found.json")["cases"]
    assert [case["case"] for case in cases] == list(automata.CASES)
    assert all(case["states"] > 2 and case["build_cpu_s"]["median"] > 0 for case in cases)
    assert len(set(automata.vocabulary(1000))) == 1000


@pytest.mark.slow
def test_families(script, monkeypatch, tmp_path):
    cases = smoke(script("families"), monkeypatch, tmp_path / "found.json")["cases"]
    assert [case["family"] for case in cases] == list(FAMILIES)
    for case in cases:
        assert max(case["logits_fp32"], case["gradients_fp32"]) < 1e-5 and case["round_trip"]
        assert max(case["logits_fp64"], case["gradients_fp64"]) < 1e-12


def test_families_notices_a_window_that_is_off_by_one(script, monkeypatch):
    families, exact = script("families"), llama.dense_mask
    config = LlamaConfig.preset(
        "nano", model_type="mistral", sliding_window=5, initializer_range=0.3
    )
    assert families.compared(config, 0)["logits_fp32"] < 1e-5
    monkeypatch.setattr(llama, "dense_mask", lambda segments, window: exact(segments, window + 1))
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
        assert bool((window["positions"][:, 1:][borders] == 0).all()) and bool(
            (borders.sum(1) == 1).all()
        )


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


class Unwilling(Tape):
    """Finds the device busy, as the engine's own recorder may."""

    def warm_up(self, work):
        return super().warm_up(work) or "the device is busy longer than it takes to launch"


@pytest.mark.parametrize("own", [Tape, Unwilling])
def test_train_called_and_replayed(script, uncompiled, monkeypatch, own):
    replays, shape = script("replays"), script("train").SMOKE["nano"]
    monkeypatch.setattr(replays, "CudaGraphs", lambda device: Tape())
    build = replays.engine_of

    def built(shape):
        engine = build(shape)
        engine.step.recorder = own()
        return engine

    monkeypatch.setattr(replays, "engine_of", built)
    case = replays.replay(shape, Namespace(rounds=3, round_s=0.0))
    assert case["by_itself"] == (own is Tape) and case["mean_loss"] < 6.3
    for way in ("seconds_per_update", "called_seconds_per_update", "speedup"):
        assert len(case[way]["values"]) == 3 and min(case[way]["values"]) > 0


def test_a_model_drawn_on_the_device_is_the_model(script):
    config = LlamaConfig.preset("nano")
    model = script("systems").drawn_on(torch.device("cpu"), config)
    assert sum(p.numel() for p in model.parameters()) == config.parameter_count()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert float(model.lm_head.weight.detach().std()) == pytest.approx(
        config.initializer_range, rel=0.05
    )


@pytest.mark.slow
def test_corpus(script, monkeypatch, tmp_path):
    module = script("corpus")
    # A process takes seconds to begin.
    monkeypatch.setattr(module, "measured", lambda folder: module.prepare(folder))
    found = smoke(module, monkeypatch, tmp_path / "corpus.json")
    assert found["schema"] == "monograph-benchmark-corpus-1"
    assert [case["files"] for case in found["cases"]] == [4, 4]
    small, large = found["cases"]
    assert (
        1.5 < large["text_bytes"] / small["text_bytes"] < 2.5
        and large["peak_bytes"] >= small["peak_heap_bytes"] > 0
    )


def test_train_shapes_are_the_promised_ones(script):
    shapes = script("train").SHAPES
    assert {name: (s.length, s.tokens_per_update) for name, s in shapes.items()} == {
        "124m": (1024, 131_072),
        "1.2b": (2048, 131_072),
    }
    assert shapes["1.2b"].config.parameter_count() == 1_235_814_400


@pytest.mark.slow
def test_a_case_that_fails_says_why_and_loses_nothing_else(script, monkeypatch):
    train = script("train")
    monkeypatch.setattr(sys, "argv", ["train.py"])
    shape = train.SMOKE["nano"]
    late = train.run_case("nano", shape, "monograph", Namespace(), seconds=1.0)
    assert late["error"] == "not measured: out of time"
    failed = train.run_case("no such model", shape, "monograph", Namespace(), seconds=60.0)
    assert failed["error"] == "KeyError: 'no such model'"
    assert train.row(failed, [failed])[1] == failed["error"]


@pytest.mark.slow
def test_train_peers(script, monkeypatch, tmp_path, capsys):
    pytest.importorskip("transformers")
    monkeypatch.setitem(
        script("contestants").SYSTEMS,
        "lightning",
        script("contestants").System(None, ("no_such_peer",)),
    )
    systems = ["--systems", "monograph", "plain loop", "trainer", "lightning", "--modes", "eager"]
    found = smoke(script("train_peers"), monkeypatch, tmp_path / "found.json", *systems)
    cases = {case["system"]: case for case in found["cases"]}
    assert cases.pop("lightning")["error"] == "not measured: no_such_peer missing"
    assert "missing: no_such_peer. pip install" in capsys.readouterr().out
    assert len({case["parameters"] for case in cases.values()}) == 1
    assert all(
        len(case["rounds"]) == 2 and case["step_peak_bytes"] > 0 for case in cases.values()
    ), cases
    # Trainer scales its own models' losses right; a mean of means over padded micro-batches is
    # another gradient.
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


@pytest.mark.slow
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
        assert (
            len(case["tokens_per_s"]["values"]) == 2 and min(case["tokens_per_s"]["values"]) > 0
        ), case
        assert (
            case["same_text"] == 1.0
            and case["repeats"]
            and len(case["texts"]) == 2
            and all(case["texts"])
        )


def test_a_system_that_is_a_clone_needs_its_folder(script, monkeypatch, tmp_path):
    generators = script("generators")
    for folder in (None, "", str(tmp_path / "none")):
        if folder is None:
            monkeypatch.delenv("GPT_FAST", raising=False)
        else:
            monkeypatch.setenv("GPT_FAST", folder)
        assert generators.SYSTEMS["gpt-fast"].missing == ["GPT_FAST"], folder
    assert "git clone" in generators.HOW_TO_INSTALL and "set GPT_FAST" in generators.HOW_TO_INSTALL
    monkeypatch.setenv("GPT_FAST", str(tmp_path))
    assert generators.SYSTEMS["gpt-fast"].missing == []


def test_gpt_fast_gets_pairs_side_by_side_and_refuses_what_it_has_not(script):
    gpt_fast, peers = script("peer_gpt_fast"), script("generate_peers")
    rows = torch.arange(16.0)[:, None].expand(16, 3)
    pairs = [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]
    assert gpt_fast.interleaved(rows, head_dim=8)[:, 0].tolist() == pairs
    assert gpt_fast.sizes(peers.ONE_B)["rope_scaling"]["factor"] == 32.0
    assert gpt_fast.sizes(peers.SMALL)["rope_scaling"] is None
    with pytest.raises(ValueError, match="no such model"):
        gpt_fast.sizes(peers.HYBRID)


def test_at_once_starts_every_system_before_it_waits_for_one(script, monkeypatch, tmp_path):
    peers, events = script("generate_peers"), []

    class Ended:
        """A system whose process starts and fails."""

        def __init__(self, command, *_):
            self.name = command[command.index("--serve") + 2]
            events.append(("start", self.name))

        def answer(self):
            events.append(("wait", self.name))
            raise peers.ChildFailed("ended", [])

    monkeypatch.setattr(peers, "Child", Ended)
    one, other = systems = ["monograph", "compiled, host sampler"]
    for option, expected in (
        ([], [("start", one), ("wait", one), ("start", other), ("wait", other)]),
        (["--at-once"], [("start", one), ("start", other), ("wait", one), ("wait", other)]),
    ):
        events.clear()
        found = smoke(peers, monkeypatch, tmp_path / "found.json", "--systems", *systems, *option)
        assert events == expected
        assert [case["error"] for case in found["cases"]] == ["ended", "ended"]
        assert found["settings"]["first_s"].startswith("all" if option else "one")


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
    warpers = (
        generation.TemperatureLogitsWarper,
        generation.TopKLogitsWarper,
        generation.TopPLogitsWarper,
    )
    logits_BV = 3 * torch.randn(20, 500, generator=torch.Generator().manual_seed(0))
    left_BV = logits_BV
    for warper, value in zip((*warpers, generation.MinPLogitsWarper), chain.values(), strict=True):
        left_BV = warper(value)(None, left_BV)
    random = np.random.default_rng(0)
    for logits_V, left_V in zip(logits_BV, left_BV, strict=True):
        counts = (
            np.bincount([draw(logits_V.numpy(), random) for _ in range(400)], minlength=500) / 400
        )
        odds = left_V.softmax(-1).numpy()
        assert not counts[odds == 0].any()
        # Five standard deviations of a share.
        assert np.abs(counts - odds).max() < 5 * 0.5 / 400**0.5


def test_first_run(script, monkeypatch, tmp_path):
    source = tmp_path / "text"
    source.mkdir()
    for index in range(4):
        (source / f"{index}.txt").write_text(" ".join(str(n * n + index) for n in range(600)))
    found = smoke(
        script("first_run"),
        monkeypatch,
        tmp_path / "run.json",
        f"data.source={source}",
        "--lr",
        "0.02",
    )
    assert found["schema"] == "monograph-benchmark-first-run-1"
    assert [case["updates"] for case in found["cases"]] == [2, 4]
    assert all(case["lr"] == 0.02 and case["final"] == case["curve"][-1] for case in found["cases"])
    assert list(found["levels"].values()) == sorted(found["levels"].values(), reverse=True)
    assert found["levels"]["order 6 - 0.1"] == pytest.approx(found["levels"]["order 6"] - 0.1)


def test_first_run_takes_a_presets_defaults_from_the_plan(script):
    first_run = script("first_run")
    default = first_run.defaults.DEFAULT
    plan = first_run.plan_for({"model.preset": default.preset}, 3, 7)
    assert (plan.job.reading.tokenizer, plan.job.reading.vocab_size) == ("bpe", default.vocabulary)
    assert plan.training.tokens_per_update == default.tokens_per_update
    assert (plan.updates, plan.job.seed) == (3, 7)


@pytest.mark.slow
def test_ensemble_peers(script, monkeypatch, tmp_path):
    """Eagerly, one case, each way in its own process."""
    peers = script("ensemble_peers")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    all_cases = peers.cases
    monkeypatch.setattr(peers, "cases", lambda smoke: dict(list(all_cases(smoke).items())[:1]))
    found = smoke(peers, monkeypatch, tmp_path / "found.json")
    assert [case["members"] for case in found["cases"]] == [2] * 2
    for case in found["cases"]:
        others = {"loop", "compiled loop", "torch.func", "compiled torch.func"}
        assert set(case["faster_than"]) == others and case["failed"] == {}
        assert all(ratios["cpu"]["median"] > 0 for ratios in case["faster_than"].values())


def test_a_way_that_dies_is_named(script, monkeypatch, tmp_path):
    """As by a segmentation fault in the middle of the rounds."""
    peers = script("ensemble_peers")

    class Way:
        def __init__(self, command, threads, environment):
            self.way = command[command.index("--way") + 1]
            self.orders = 0

        def ask(self, **order):
            self.orders += 1
            if self.way == "loop" and self.orders == 3:
                raise peers.ChildFailed("exit code -11", [])
            return {"ready_s": 1.0, "one_s": 1.0, "wall_s": 1.0, "cpu_s": 1.0}

        def end(self):
            pass

    monkeypatch.setattr(peers, "Child", Way)
    found = smoke(peers, monkeypatch, tmp_path / "found.json")
    for case in found["cases"]:
        assert case["failed"] == {"loop": "exit code -11"} and "loop" not in case["faster_than"]
        assert "torch.func" in case["faster_than"]


@pytest.mark.gpu
def test_a_graph_keeps_the_weights_that_it_reads(script):
    """A graph has addresses only: freed weights are others' memory when it is replayed."""
    peers = script("ensemble_peers")
    case = peers.Case(lambda: peers.MLP(4), 2, peers.regression(3, 4), peers.squares)
    case = case._replace(batch={name: rows.cuda() for name, rows in case.batch.items()})
    models = [case.build().cuda() for _ in range(2)]
    weights = [weakref.ref(p) for model in models for p in model.parameters()]
    replay = peers.cuda_graphed(peers.one_after_another(case, models, train=False))
    del models
    gc.collect()
    assert all(weight() is not None for weight in weights)
    replay()


def test_crossover(script, uncompiled, monkeypatch, tmp_path):
    crossover = script("crossover")
    monkeypatch.setattr(crossover.Ensemble, "capture", lambda self, window: None)
    [case] = smoke(crossover, monkeypatch, tmp_path / "found.json")["cases"]
    assert set(case["gain"]) == {"1", "16"} and case["gain"]["1"] == 1 and case["chosen"] in (1, 16)


@pytest.mark.slow
def test_ensemble_compile(script, monkeypatch, tmp_path):
    compile_ = script("ensemble_compile")
    monkeypatch.setattr(compile_.Ensemble, "capture", lambda self, window: None)
    found = smoke(compile_, monkeypatch, tmp_path / "found.json")
    assert [case["members"] for case in found["cases"]] == [2, 3]


@pytest.mark.slow
def test_stream(script, uncompiled, monkeypatch, tmp_path, capsys):
    """Its three processes in this one, where the first ends by an exception instead of a signal."""
    stream = script("stream")

    class Killed(Exception):
        pass

    def killed(*_):
        raise Killed

    def child(task):
        try:
            return stream.train(task)
        except Killed:
            said = capsys.readouterr().out.splitlines()
            return json.loads(next(line for line in reversed(said) if line.startswith("{")))

    small = {"vocab_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 32}
    monkeypatch.setattr(stream, "SMOKE", stream.SMOKE | small)
    monkeypatch.setattr(stream, "child", child)
    monkeypatch.setattr(stream.os, "kill", killed)
    options = {"smoke": True, "updates": 4, "rows": 2, "budget_gib": 2.0, "scratch": tmp_path}
    stream.main(Namespace(**options, out=tmp_path / "found.json"))
    found = json.loads((tmp_path / "found.json").read_text())
    [case] = found["cases"]
    assert found["equal_bits"] and [
        len(case[name]["seen"]) for name in ("killed", "resumed", "resident")
    ] == [2, 2, 4]


def test_stream_speed(script, uncompiled, monkeypatch, tmp_path, capsys):
    """Its processes in this one. An update copies the same bytes however many micro-batches it has."""
    stream_speed = script("stream_speed")

    def run_case(name, way, given, seconds):
        stream_speed.measure(given.models_by_name[name], way, given.timed)
        last = capsys.readouterr().out.splitlines()[-1]
        return {"model": name, "way": way, **json.loads(last)}

    monkeypatch.setattr(stream_speed, "run_case", run_case)
    cases = smoke(stream_speed, monkeypatch, tmp_path / "found.json")["cases"]
    assert [(case["model"], case["way"]) for case in cases] == list(stream_speed.CASES)
    streamed = [case for case in cases if case["way"] != stream_speed.RESIDENT]
    assert all(case["as_promised"] for case in streamed)
    assert [case["promised_updates"] for case in streamed] == [0, 2, 0, 0, 0]
    on_device, offloaded = (case["updates"] for case in streamed[:2])
    assert on_device["large"]["moved_bytes"] == on_device["small"]["moved_bytes"]
    assert offloaded["large"]["moved_bytes"]["in"] > offloaded["small"]["moved_bytes"]["in"] > 0
    resident = next(case for case in cases if case["way"] == stream_speed.RESIDENT)
    assert resident["updates"]["large"]["moved_bytes"] == {"in": 0, "out": 0}
    other = streamed[1]
    other["seen"][1][1] = (0.0).hex()
    stream_speed.compare(other, cases, stream_speed.SMOKE["4b"])
    assert other["first_loss_equal"] and not other["as_promised"]


def test_stream_speed_keeps_what_a_stopped_process_has_measured(script, monkeypatch, tmp_path):
    stream_speed = script("stream_speed")
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\necho \'{"seen": []}\'\n[ "$SLOW" ] || { echo bad >&2; exit 3; }\nexec sleep 60\n'
    )
    python.chmod(0o755)
    monkeypatch.setattr(stream_speed.sys, "executable", str(python))
    monkeypatch.setattr(stream_speed, "SHORTEST_CASE_S", 0.1)

    def run_case(seconds):
        return stream_speed.run_case("1b", "sweep", Namespace(), seconds)

    failed = run_case(60.0)
    assert failed["error"] == "bad" and failed["seen"] == []
    monkeypatch.setenv("SLOW", "1")
    stopped = run_case(1.0)
    assert stopped["error"] == "still running after 1 s" and stopped["seen"] == []
    assert run_case(0.0)["error"] == "not measured: out of time"


def test_stream_and_sweep_runs(script):
    stream, sweep_runs = script("stream"), script("sweep_runs")
    assert stream.window(0, 2, stream.SMOKE)["targets"].shape == (2, 256)
    [axis] = sweep_runs.axes_of({"optim.lr": sweep_runs.RATES})[1]
    assert len(axis.values) == 8
