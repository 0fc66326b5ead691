#!/usr/bin/env bash
# Measures one part on the GPU of this machine and writes its numbers as JSON: benchmarks/gpu.sh PART [ARGUMENTS...]
#   PART: all, or laws, train, kernels, memory, generate, stream, streamspeed, ensemble or speedrun; each takes at most 9
#         minutes.
#         all: as many of the others, in this order, as fit in 9 minutes; the same command goes on with those that are
#         left, then prints what was predicted without a GPU next to what was measured. What fails is written, too.
#         laws: the tests that need a GPU, then all laws. train: benchmarks/train.py, which needs neither pydantic nor a
#         test tool; beside it, where installed, transformers' Trainer (which needs accelerate); first, on small models,
#         called against replayed micro-steps in one process (only that: gpu.sh train --systems replay).
#         kernels: benchmarks/kernels.py, where the time of a step goes.
#         memory: benchmarks/plan.py, predicted beside measured peak memory.
#         stream: benchmarks/stream.py, streamed, killed and resumed beside resident.
#         streamspeed (not in all): benchmarks/stream_speed.py, how fast streaming is beside resident.
#         generate: benchmarks/generate_peers.py, beside transformers where that is installed.
#         ensemble: benchmarks/ensemble_peers.py, beside loops and torch.func, also as CUDA graphs.
#         speedrun (not in all): the first minutes of benchmarks/speedrun/run.py, and the time of its whole schedule at
#         that speed. It needs FineWeb's tokens: gpu.sh speedrun --data FOLDER, with two of its files for training.
#   ARGUMENTS: for the part's script, for example: benchmarks/gpu.sh train --models 124m --micro-batch 64
#   OUT:  the folder for the JSON (default benchmarks/results; of `all` benchmarks/results/gpu).
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
[ "$part" = all ] && out=${OUT:-benchmarks/results/gpu}
if [ -z "${PYTHON:-}" ]; then
  PYTHON=python3
  [ -x .venv/bin/python ] && PYTHON=.venv/bin/python
fi
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
mkdir -p "$out"
limit=${LIMIT:-540}  # seconds

# pytest's own report of one run, and how it ended (124: out of time).
pytest_part() {  # NAME SECONDS ARGUMENTS...
  local name=$1 seconds=$2 code=0
  shift 2
  # A plugin that measures speed warns about other workers, which these tests take for an error.
  timeout "$seconds" "$PYTHON" -m pytest -q -p no:cacheprovider -p no:benchmark --continue-on-collection-errors \
    "${workers[@]}" --junitxml="$reports/$name.xml" "$@" || code=$?
  echo "$code" >"$reports/$name.exit"
}

laws() {
  reports=$(mktemp -d)
  trap 'rm -rf "$reports"' EXIT
  workers=()
  "$PYTHON" -c "import xdist" 2>/dev/null && workers=(-n $((($(nproc) + 1) / 2)) --dist=worksteal)
  pytest_part gpu $((limit * 56 / 100)) -m "gpu and not slow" tests
  pytest_part laws $((limit * 40 / 100)) -m "not gpu and not slow" tests/laws
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

# The parts in their order of worth; each is begun if a minute is left. One that failed is done if it had the whole time.
every() {
  local ends=$((SECONDS + limit)) each left code
  for each in laws train kernels memory generate stream ensemble; do
    left=$((ends - SECONDS))
    [ -e "$out/$each.done" ] && continue
    [ "$left" -ge 60 ] || { echo "left for the next time: $each"; continue; }
    code=0
    rm -f "$out/$each.json"
    LIMIT=$left OUT=$out "$0" "$each" || code=$?
    [ -s "$out/$each.json" ] ||
      printf '{"schema": "monograph-failed-1", "part": "%s", "exit": %d}\n' "$each" "$code" >"$out/$each.json"
    if [ "$code" -eq 0 ] || [ "$left" -ge $((limit - 60)) ]; then touch "$out/$each.done"; fi
  done
  "$PYTHON" benchmarks/first_contact.py "$out"
}

case $part in
  all) every ;;
  laws) laws ;;
  train | kernels | memory | stream | streamspeed | generate | ensemble | speedrun)
    script="benchmarks/$part.py"
    [ "$part" = generate ] && script=benchmarks/generate_peers.py
    [ "$part" = memory ] && script=benchmarks/plan.py
    [ "$part" = streamspeed ] && script=benchmarks/stream_speed.py
    [ "$part" = ensemble ] && script=benchmarks/ensemble_peers.py
    [ "$part" = train ] && set -- --seconds $((limit - 40)) "$@"
    if [ "$part" = speedrun ]; then
      script=benchmarks/speedrun/run.py
      rm -f "$out/speedrun.txt"
      # A minute and a half is left for the score that may be due at the end.
      set -- --minutes $(((limit - 90) / 60)) --checkpoints none "$@"
    fi
    timeout "$limit" "$PYTHON" "$script" --out "$out/$part.json" "$@"
    ;;
  *)
    echo "usage: benchmarks/gpu.sh all|laws|train|kernels|memory|generate|stream|streamspeed|ensemble|speedrun" >&2
    exit 2
    ;;
esac
