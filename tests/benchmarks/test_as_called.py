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
from scripts import script

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def call(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=HANG_S, env=os.environ | environment
    )


def test_gpu_sh_knows_its_parts(tmp_path):
    gpu = str(BENCHMARKS / "gpu.sh")
    assert (
        call(gpu, "laundry", OUT=str(tmp_path)).returncode
        == call(gpu, OUT=str(tmp_path)).returncode
        == 2
    )


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


STUB = """#!/bin/sh
# Stands for Python: notes which scripts are called; one fails, one is cut short by the clock.
case "$1" in
  benchmarks/first_contact.py) exec "$REAL" "$@" ;;
  -) exec "$REAL" "$@" ;;
  -m) exit 0 ;;
  -c) exit 1 ;;
esac
echo "$1" >>"$CALLED"
case "$1" in
  *plan.py) exit 3 ;;
  *stream.py) exit "${STREAM:-124}" ;;
esac
for argument; do [ "$before" = --out ] && echo '{"cases": []}' >"$argument"; before=$argument; done
"""


@pytest.mark.slow
def test_gpu_sh_all_goes_on_and_writes_what_failed(tmp_path):
    stub, out, called = tmp_path / "python", tmp_path / "out", tmp_path / "called"
    stub.write_text(STUB)
    stub.chmod(0o755)
    places = {"PYTHON": str(stub), "REAL": sys.executable, "OUT": str(out), "CALLED": str(called)}

    def run(**more):
        done = call(str(BENCHMARKS / "gpu.sh"), "all", **places | more)
        assert done.returncode == 0, done.stderr
        return done.stdout

    said = run(LIMIT="100")
    assert "memory: failed, exit code 3" in said and "laws, gpu" in said
    assert json.loads((out / "memory.json").read_text()) == {
        "schema": "monograph-failed-1",
        "part": "memory",
        "exit": 3,
    }
    every = [
        f"benchmarks/{name}.py"
        for name in ("train", "kernels", "plan", "generate_peers", "stream", "ensemble_peers")
    ]
    assert called.read_text().split() == every
    (out / "stream.done").unlink()  # as if a part had been cut short
    table = {"REAL": "true"}  # which was printed once, and imports torch
    said = run(LIMIT="30", **table)
    assert "left for the next time: stream" in said and called.read_text().split() == every
    run(STREAM="0", LIMIT="100", **table)
    assert called.read_text().split() == [*every, "benchmarks/stream.py"]


def test_what_was_predicted_is_printed_next_to_what_was_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    case = {"model": "124m", "system": "monograph", "mfu": 0.45}
    train = {
        "machine": {"device": "NVIDIA H200"},
        "cases": [case, {"model": "1.2b", "system": "monograph", "error": "x"}],
    }
    (tmp_path / "train.json").write_text(json.dumps(train))
    (tmp_path / "memory.json").write_text(
        json.dumps({"summary": {"eager": {"worst": 0.02}, "slowest_cpu_s": 3}})
    )
    monkeypatch.setattr("sys.argv", ["first_contact", str(tmp_path)])
    script("benchmarks/first_contact.py").main()
    said = capsys.readouterr().out
    counted = json.loads((BENCHMARKS / "results" / "launches.json").read_text())
    [small] = [each for each in counted["cases"] if each["case"] == "124m"]
    assert (
        f"{small['roofline']['H200']['mfu']:.1%} at most" in said
        and "45.0%" in said
        and "on a pretended card" in said
        and "2.0%" in said
    )
    assert "laws: not measured yet" in said


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
