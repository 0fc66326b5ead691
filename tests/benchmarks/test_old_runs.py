# Run: pytest -m slow tests/benchmarks/test_old_runs.py
"""What the script that uses runs of an earlier version says of a run is true of it."""

from __future__ import annotations

import pytest

from scripts import smoke


@pytest.mark.slow
def test_a_run_of_this_version_can_be_used_in_every_way_and_a_damaged_one_cannot(
    script, monkeypatch, tmp_path
):
    old_runs = script("old_runs")
    results = smoke(old_runs, monkeypatch, tmp_path / "found.json")["runs"]
    assert results["text"] == dict.fromkeys([*old_runs.USES, "--resume"], "ok") | {
        "weights": "the same bits"
    }
    monkeypatch.setitem(old_runs.USES, "generate", ("generate", "{model}", "--no-such-option"))
    results = smoke(old_runs, monkeypatch, tmp_path / "again.json")["runs"]
    assert results["text"]["generate"].startswith("exit 2: ")
