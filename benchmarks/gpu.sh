#!/usr/bin/env bash
# Measures one part on the GPU of this machine and writes its numbers as JSON: benchmarks/gpu.sh PART [ARGUMENTS...]
#   PART: laws, train, memory, stream, generate or ensemble; each takes at most 9 minutes.
#         laws: the tests that need a GPU, then all laws. train: benchmarks/train.py, which needs neither pydantic nor a
#         test tool; beside it, where installed, transformers' Trainer (which needs accelerate); first, on small models,
#         called against replayed micro-steps in one process (only that: gpu.sh train --systems replay).
#         memory: benchmarks/plan.py, predicted beside measured peak memory.
#         stream: benchmarks/stream.py, streamed, killed and resumed beside resident.
#         generate: benchmarks/generate_peers.py, beside transformers where that is installed.
#         ensemble: benchmarks/ensemble_peers.py, beside a loop of CUDA graphs.
#   ARGUMENTS: for the part's script, for example: benchmarks/gpu.sh train --models 124m --micro-batch 64
#   OUT:  the folder for the JSON (default benchmarks/results).
#   PYTHON: the interpreter (default .venv's, else python3).
# It installs nothing. On a machine that has PyTorch and no network, carry the wheels of what is missing (pydantic,
# pydantic_core, annotated_types, typing_inspection for its Python), and put them on the path:
#   python3 -m pip install --no-index --no-deps --target /tmp/site wheels/*.whl
#   PYTHONPATH=/tmp/site benchmarks/gpu.sh laws
set -euo pipefail
cd "$(dirname "$0")/.."

part=${1:-}
shift || true
out=${OUT:-benchmarks/results}
if [ -z "${PYTHON:-}" ]; then
  PYTHON=python3
  [ -x .venv/bin/python ] && PYTHON=.venv/bin/python
fi
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
mkdir -p "$out"

# pytest's own report of one run, and how it ended (124: out of time).
pytest_part() {  # NAME SECONDS ARGUMENTS...
  local name=$1 seconds=$2 code=0
  shift 2
  timeout "$seconds" "$PYTHON" -m pytest -q -p no:cacheprovider --junitxml="$reports/$name.xml" "$@" || code=$?
  echo "$code" >"$reports/$name.exit"
}

laws() {
  reports=$(mktemp -d)
  trap 'rm -rf "$reports"' EXIT
  pytest_part gpu 300 -m "gpu and not slow" tests
  pytest_part laws 220 -m "not gpu and not slow" tests/laws
  "$PYTHON" - "$reports" "$out/laws.json" <<'PYTHON_END'
import json, pathlib, platform, sys
import xml.etree.ElementTree as xml
import torch

reports, out = map(pathlib.Path, sys.argv[1:])
result = {"schema": "monograph-laws-1", "torch": torch.__version__, "python": platform.python_version()}
result["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
for exit_file in sorted(reports.glob("*.exit")):
    run = result[exit_file.stem] = {"exit": int(exit_file.read_text())}
    report = exit_file.with_suffix(".xml")
    if not report.exists():  # stopped by the clock: pytest writes its report at the end
        continue
    suite = xml.parse(report).getroot()[0]
    run.update({key: int(suite.get(key)) for key in ("tests", "failures", "errors", "skipped")})
    run["wall_s"] = float(suite.get("time"))
    wrong = [case for case in suite if case.find("failure") is not None or case.find("error") is not None]
    run["failed"] = [f"{case.get('classname')}.{case.get('name')}" for case in wrong]
out.write_text(json.dumps(result, indent=2) + "\n")
print(json.dumps(result))
# 5 is pytest's word for "no such test", which holds for the gpu run until there is one.
sys.exit(any(result[name]["exit"] not in (0, 5) for name in ("gpu", "laws")))
PYTHON_END
}

case $part in
  laws) laws ;;
  train | memory | stream | generate | ensemble)
    script="benchmarks/$part.py"
    [ "$part" = generate ] && script=benchmarks/generate_peers.py
    [ "$part" = memory ] && script=benchmarks/plan.py
    [ "$part" = ensemble ] && script=benchmarks/ensemble_peers.py
    timeout 540 "$PYTHON" "$script" --out "$out/$part.json" "$@"
    ;;
  *)
    echo "usage: benchmarks/gpu.sh laws|train|memory|stream|generate|ensemble" >&2
    exit 2
    ;;
esac
