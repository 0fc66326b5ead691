"""Compare the compile scopes, one graph of the whole step and one for all blocks: compile and step
times by depth.

Each compilation runs in its own process with an empty cache and one compiler process; its slope is
the seconds of each further layer. Then steps of both scopes take turns in one process. Goal: at 16
layers the blocks' scope compiles in at most half of the time of the whole step.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
import torch

from monograph.device import default_device, synchronize
from monograph.graph.precision import Precision
from monograph.loss import Batch
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.optim import AdamW
from monograph.resident import Resident

SCOPES = ("whole", "blocks")
GOAL, GOAL_LAYERS = 0.5, 16
SHAPE = LlamaConfig(
    vocab_size=2048,
    hidden_size=192,
    intermediate_size=512,
    num_hidden_layers=1,
    num_attention_heads=6,
    max_position_embeddings=128,
)
ROWS, LENGTH = 8, 128


def engine(layers: int, scope: str, window: Batch) -> tuple[Resident, float, float]:
    """Return a captured engine, and the wall and CPU seconds (with its compiler processes) of
    capturing.
    """
    model = Llama(replace(SHAPE, num_hidden_layers=layers, layer_types=())).to(default_device())
    found = Resident(model, optim=AdamW(), clip=1.0, precision=Precision("bf16"), micro_batch=ROWS)
    began, times = time.perf_counter(), os.times()
    if obstacle := found.capture(window, scope=scope):  # type: ignore[arg-type]
        raise SystemExit(f"scopes.py: {scope} at {layers} layers cannot be captured: {obstacle}")
    synchronize(default_device())
    spent = sum(b - a for a, b in zip(times[:4], os.times()[:4], strict=True))
    return found, time.perf_counter() - began, spent


def some_window() -> Batch:
    """Return full rows of one document each."""
    tokens = torch.randint(
        SHAPE.vocab_size, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0)
    )
    return {"tokens": tokens, "targets": tokens.roll(-1, 1)}


def compiled_in_a_process(layers: int, scope: str) -> dict[str, float]:
    """Return the seconds of capturing with an empty cache."""
    with tempfile.TemporaryDirectory(prefix="monograph-scopes-") as cache:
        environment = os.environ | {
            "TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": str(Path(cache, "triton")),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }  # fmt: skip
        command = [sys.executable, __file__, "--child", str(layers), scope]
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(args: Namespace, layers: int) -> dict[str, Any]:
    """Measure both scopes at one depth."""
    compiled = {scope: compiled_in_a_process(layers, scope) for scope in SCOPES}
    window, device = some_window(), default_device()
    engines = {scope: engine(layers, scope, window)[0] for scope in SCOPES}

    def update(each: Resident) -> None:
        each.accumulate(window)
        each.update()

    times = harness.interleaved(
        {s: lambda e=e: update(e) for s, e in engines.items()}, args.rounds, device
    )
    step_ms = {
        scope: harness.spread([1e3 * t.wall_s for t in each]) for scope, each in times.items()
    }
    ratios = [b.wall_s / a.wall_s for a, b in zip(times["whole"], times["blocks"], strict=True)]
    return {
        "layers": layers,
        "compile": compiled,
        "step_ms": step_ms,
        "step_blocks_over_whole": harness.spread(ratios),
    }


def main() -> None:
    """Measure and print; see `--help`."""
    if sys.argv[1:2] == ["--child"]:
        _, wall_s, cpu_s = engine(int(sys.argv[2]), sys.argv[3], some_window())
        print(json.dumps({"wall_s": wall_s, "cpu_s": cpu_s}))
        return
    parser = harness.arguments(__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--rounds", type=int, default=11)
    args = parser.parse_args()
    if args.smoke:
        args.layers, args.rounds = [1, 2], 1
    settings = {
        "rounds": args.rounds,
        "goal": GOAL,
        "goal_layers": GOAL_LAYERS,
        "smoke": args.smoke,
    }
    found = harness.result("scopes", settings)
    harness.print_machine(found)
    rows = []
    for layers in args.layers:
        case = measure(args, layers)
        found["cases"].append(case)
        harness.write(args.out, found)
        for scope in SCOPES:
            seconds = case["compile"][scope]
            step = harness.shown(case["step_ms"][scope])
            rows.append(
                [
                    f"{layers} layers, {scope}",
                    f"{seconds['wall_s']:.1f}",
                    f"{seconds['cpu_s']:.1f}",
                    step,
                ]
            )
    harness.print_table(["", "compile s", "CPU s", "update ms"], rows)
    first, last = found["cases"][0], found["cases"][-1]
    for scope in SCOPES:
        more = last["compile"][scope]["cpu_s"] - first["compile"][scope]["cpu_s"]
        print(
            f"{scope}: {more / max(1, last['layers'] - first['layers']):.2f} CPU s of compiling a further layer"
        )
    ratio = last["compile"]["blocks"]["cpu_s"] / last["compile"]["whole"]["cpu_s"]
    verdict = "met" if ratio <= GOAL else "missed"
    print(
        f"at {last['layers']} layers blocks / whole {ratio:.2f}, goal {GOAL} at {GOAL_LAYERS} layers {verdict}"
    )


if __name__ == "__main__":
    main()
