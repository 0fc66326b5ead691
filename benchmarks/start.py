"""Measure the time to the first update, cold (empty compile cache) and warm (same cache, new
process), part by part.

Each start is a separate process. Goal: a warm start takes at most 25 % of a cold one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BORN_S = time.monotonic()  # by the system's clock, which the parent process reads, too
PARTS = ("interpreter_s", "import_s", "build_s", "trial_s", "compile_s", "first_update_s")
GOAL = 0.25
STARTS = ("cold", "warm")


def start(shape_name: str, dtype: str, spawned_s: float) -> dict[str, Any]:
    """Make one start in this process: import, build, eager trial, compile, first update; return the
    seconds of each.
    """
    import steps
    import torch._dynamo.utils as dynamo

    from monograph.device import default_device, synchronize

    imported = time.monotonic()
    device = default_device()
    shape = (steps.SHAPES | {"smoke": steps.SMOKE["nano"]})[shape_name]
    window = steps.packed_window(shape, device)
    engine = steps.engine(shape, dtype, device)
    marks = [spawned_s, BORN_S, imported, time.monotonic()]
    engine.trial(window)
    marks.append(time.monotonic())
    if obstacle := engine.capture(window):
        raise SystemExit(f"start.py: {shape_name} cannot be captured: {obstacle}")
    synchronize(device)
    marks.append(time.monotonic())
    engine.accumulate(window)
    engine.update()
    synchronize(device)
    marks.append(time.monotonic())
    seconds = dict(zip(PARTS, (b - a for a, b in zip(marks, marks[1:], strict=False)), strict=True))
    hits = {
        key: dynamo.counters["inductor"][f"fxgraph_cache_{key}"]
        for key in ("hit", "miss", "bypass")
    }
    hits |= {
        f"autograd_{key}": dynamo.counters["aot_autograd"][f"autograd_cache_{key}"]
        for key in ("hit", "miss")
    }
    return seconds | {
        "total_s": marks[-1] - spawned_s,
        "cpu_s": time.process_time(),
        "caches": hits,
    }


def spawn(shape: str, dtype: str, cache: Path) -> dict[str, Any]:
    """Run `start` in a new process with this compile cache."""
    environment = os.environ | {
        "OMP_WAIT_POLICY": "passive",
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "TRITON_CACHE_DIR": str(cache / "triton"),
    }
    command = [sys.executable, __file__, "--child", shape, dtype]
    done = subprocess.run(
        [*command, repr(time.monotonic())],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(shape: str, dtype: str, rounds: int) -> dict[str, Any]:
    """Measure rounds of one cold start with an empty cache, then one warm start."""
    import harness

    starts: dict[str, list[dict[str, Any]]] = {name: [] for name in STARTS}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="monograph-start-") as cache:
            for name in STARTS:
                starts[name].append(spawn(shape, dtype, Path(cache)))
    pairs = list(zip(starts["warm"], starts["cold"], strict=True))
    return {
        "shape": shape,
        "dtype": dtype,
        "starts": starts,
        "median": {
            name: {
                part: statistics.median(each[part] for each in found)
                for part in (*PARTS, "total_s", "cpu_s")
            }
            for name, found in starts.items()
        },
        "warm_over_cold": harness.spread(
            [warm["total_s"] / cold["total_s"] for warm, cold in pairs]
        ),
        "compile_warm_over_cold": harness.spread(
            [warm["compile_s"] / cold["compile_s"] for warm, cold in pairs]
        ),
    }


def rows(case: dict[str, Any]) -> list[list[str]]:
    """Return a case's two lines of the table."""
    lines = []
    for name in STARTS:
        median = case["median"][name]
        lines.append(
            [
                f"{case['shape']} {name}",
                *(f"{median[part]:.2f}" for part in (*PARTS, "total_s", "cpu_s")),
            ]
        )
    return lines


def main() -> None:
    """Measure and print; see `--help`."""
    if sys.argv[1:2] == ["--child"]:
        shape, dtype, spawned_s = sys.argv[2:]
        print(json.dumps(start(shape, dtype, float(spawned_s))))
        return
    import harness
    import steps

    parser = harness.arguments(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=steps.SHAPES, default=["micro", "wide"])
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--rounds", type=int, default=3)
    args: argparse.Namespace = parser.parse_args()
    if args.smoke:
        args.shapes, args.rounds = ["smoke"], 1
    found = harness.result(
        "start", {"rounds": args.rounds, "dtype": args.dtype, "goal": GOAL, "smoke": args.smoke}
    )
    harness.print_machine(found)
    print(
        f"seconds, median of {args.rounds} starts each, {args.dtype}; interpreter: until its first line ran"
    )
    for shape in args.shapes:
        found["cases"].append(measure(shape, args.dtype, args.rounds))
        harness.write(args.out, found)
    harness.print_table(
        ["", *(part.removesuffix("_s") for part in (*PARTS, "total_s", "cpu_s"))],
        [line for case in found["cases"] for line in rows(case)],
    )
    for case in found["cases"]:
        total, compiling = case["warm_over_cold"], case["compile_warm_over_cold"]
        verdict = "met" if total["median"] <= GOAL else "missed"
        print(
            f"{case['shape']}: warm / cold {harness.shown(total)}, goal {GOAL:.2f} {verdict}; "
            f"compiling alone {harness.shown(compiling)}"
        )


if __name__ == "__main__":
    main()
