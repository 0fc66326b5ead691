# Run: pytest tests/benchmarks/test_as_called.py    (with real compilation, about a minute: -m slow)
"""The benchmarks as a person calls them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from clocks import HANG_S

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def call(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, env=os.environ | environment)


def test_gpu_sh_knows_its_parts(tmp_path):
    gpu = str(BENCHMARKS / "gpu.sh")
    assert call(gpu, "laundry", OUT=str(tmp_path)).returncode == call(gpu, OUT=str(tmp_path)).returncode == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["loss", "remat", "steps"])
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
