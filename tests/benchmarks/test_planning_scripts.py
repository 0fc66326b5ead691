# Run: pytest tests/benchmarks/test_planning_scripts.py
"""The scripts about memory and the plan run, eagerly and small, and write what is read from them."""

from __future__ import annotations

import json

import pytest
import torch
import torch._functorch.config

from scripts import ROOT, smoke


@pytest.mark.slow
def test_stream_clock(script, monkeypatch, tmp_path):
    found = smoke(script("stream_clock"), monkeypatch, tmp_path / "found.json")
    assert [case["card"] for case in found["cases"]] == ["4090", "H100"]
    for case in found["cases"]:
        times = [way["closed_form_s"] for way in case["ways"]]
        assert len(times) > 10 and times == sorted(times)
        assert all(way["clock_s"] >= 0.999 * way["closed_form_s"] for way in case["ways"])


def test_the_reasons_say_of_the_clock_what_the_script_found(script):
    found = json.loads((ROOT / "benchmarks" / "results" / "stream_clock.json").read_text())
    page = " ".join((ROOT / "docs" / "reasons.md").read_text().split())
    assert script("stream_clock").sentence(found["cases"]) in page


@pytest.mark.slow
def test_plan(script, monkeypatch, tmp_path):
    found = smoke(script("plan"), monkeypatch, tmp_path / "found.json")
    assert found["summary"]["eager"]["worst"] < 0.05 and found["cases"][0]["measured_bytes"] > 0


@pytest.mark.slow
def test_plan_rewards(script, monkeypatch, tmp_path):
    [case] = smoke(script("plan_rewards"), monkeypatch, tmp_path / "found.json")["cases"]
    assert case["planned_bytes"] == pytest.approx(case["measured_bytes"], rel=0.05)
    assert case["planned_s"] > 0 and case["measured_s"] > 0 and case["calibrated"]


@pytest.mark.slow
def test_regret(script, uncompiled, monkeypatch, tmp_path):
    [case] = smoke(script("regret"), monkeypatch, tmp_path / "found.json")["cases"]
    assert case["ways"] == 7 and 0 < case["reached"] <= 1 and case["chosen"] in case["seconds"]


@pytest.mark.slow
def test_scopes(script, uncompiled, monkeypatch, tmp_path):
    module = script("scopes")
    monkeypatch.setattr(
        module, "compiled_in_a_process", lambda layers, scope: {"wall_s": 2.0, "cpu_s": 2.0}
    )
    found = smoke(module, monkeypatch, tmp_path / "found.json")
    assert [case["layers"] for case in found["cases"]] == [1, 2]
    for case in found["cases"]:
        assert (
            set(case["step_ms"]) == {"whole", "blocks"}
            and case["step_blocks_over_whole"]["median"] > 0
        )


@pytest.mark.slow
def test_transfer(script, uncompiled, monkeypatch, tmp_path):
    found = smoke(script("transfer"), monkeypatch, tmp_path / "found.json")
    by_rule, plain = found["drifts"]
    assert (by_rule["way"], plain["way"]) == ("adamw, untied, width", "adamw, untied, none")
    assert len(found["cases"]) == 4 and found["cases"][0]["losses"] == found["cases"][1]["losses"]
    assert found["cases"][2]["losses"] != found["cases"][3]["losses"]
    assert found["cases"][0]["parameters"] < found["cases"][2]["parameters"]


# Which monkeypatch would take away in the end.
@torch._functorch.config.patch(activation_memory_budget=1.0)
@pytest.mark.slow
def test_remat(script, monkeypatch, tmp_path):
    """Eagerly, and every way in this process: torch's budget then does nothing, ours keep what they
    should.
    """
    remat = script("remat")
    monkeypatch.setattr(remat, "capture", lambda step, scope: step)

    class Here:
        def __init__(self, command, threads, environment):
            self.trained = remat.Trained(remat.Way(*json.loads(command[2])), json.loads(command[3]))

        def answer(self):
            return self.trained.measured()

        def ask(self, updates):
            return self.trained.timed(updates)

        def end(self):
            pass

    monkeypatch.setattr(remat, "Child", Here)
    names = ("none", "torch", "even", "spread", "full")
    monkeypatch.setattr(
        remat, "ways", lambda shares: [[remat.Way(name, "whole", *shares) for name in names]]
    )
    found = smoke(remat, monkeypatch, tmp_path / "found.json")
    cases = {case["name"]: case for case in found["cases"]}
    assert [*cases] == [*names] and all(
        case["grad_norm_difference"] < 1e-12 for case in found["cases"]
    )
    assert cases["none"]["peak_bytes"] == cases["torch"]["peak_bytes"] > cases["even"]["peak_bytes"]
    assert cases["none"]["recomputed_flops"] == cases["torch"]["recomputed_flops"] == 0
    assert 0 < cases["even"]["recomputed_flops"] < cases["full"]["recomputed_flops"]
    assert found["verdict"]["bytes_over_torch"].keys() == {f"{name}, whole" for name in names} - {
        "torch, whole"
    }
    again = smoke(remat, monkeypatch, tmp_path / "found.json")
    assert again == found  # nothing is measured twice


def test_remat_counts_the_products_that_run(script):
    remat = script("remat")
    rows, columns, bias = torch.randn(2, 3, 4), torch.randn(4, 5), torch.randn(5)
    assert remat.product_flops(lambda: rows @ columns) == 2 * 2 * 3 * 4 * 5
    assert remat.product_flops(lambda: torch.addmm(bias, rows[0], columns)) == 2 * 3 * 4 * 5
    assert (
        remat.product_flops(lambda: torch.bmm(rows, columns.expand(2, 4, 5))) == 2 * 2 * 3 * 4 * 5
    )
    heads = torch.randn(2, 3, 8, 16)
    attention = torch.nn.functional.scaled_dot_product_attention
    assert remat.product_flops(lambda: attention(heads, heads, heads)) == 4 * 2 * 3 * 8 * 8 * 16
