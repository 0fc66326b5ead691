"""Compare training throughput with transformers' Trainer and torch_compile: same shapes, batch,
precision, optimizer.

124M on rows of 1,024 tokens and 1.2B on rows of 2,048, in bf16 with fp32 masters and AdamW. Each
system runs in its own process, one after the other, on the same random tokens. MFU is (6 N_matmul +
12 L d P) x tokens/s over the GPU's datasheet rate, where P = (T + 1) / 2 is the mean number of
positions that a token attends to, as each row is one document; raw TFLOP/s and the share of a
measured matrix product are printed next to it. System `replay` is this project with and without its
micro-steps replayed as CUDA graphs, interleaved in one process, on 2.4M, 43M and 124M parameters
with a micro-batch of few rows, where launching takes the time.
"""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from typing import Any

import harness
import torch
from replays import replay
from systems import SYSTEMS as SINGLE
from systems import Shape, sizes

from monograph.device import clock, default_device, describe, measured_matmul_flops
from monograph.model.config import LlamaConfig
from monograph.predict.roofline import flops_per_token, mfu

SHORTEST_CASE_S = 15.0  # with less time left, a case is not begun
SHAPES = {
    "124m": Shape(LlamaConfig.preset("124m"), length=1024, micro_batch=32, micro_batches=4),
    "1.2b": Shape(LlamaConfig.preset("1b"), length=2048, micro_batch=8, micro_batches=8),
}
# For `replay` alone: 8 micro-batches of 4,096 tokens at most.
LAUNCHED = {
    "2m": Shape(LlamaConfig.preset("micro"), length=256, micro_batch=8, micro_batches=8),
    "43m": Shape(sizes(12, 512, 8192, 1024), length=1024, micro_batch=4, micro_batches=8),
    "124m-small": Shape(LlamaConfig.preset("124m"), length=1024, micro_batch=4, micro_batches=8),
}
SYSTEMS = {**SINGLE, "replay": replay}
SMOKE = {"nano": Shape(LlamaConfig.preset("nano"), length=16, micro_batch=2, micro_batches=2)}


# ── the cases, one process each ───────────────────────────────────────────────────────────────────


def run_case(
    name: str, shape: Shape, system: str, args: Namespace, seconds: float
) -> dict[str, Any]:
    """Run one system on one shape in a new process; a failure or timeout is recorded, and the
    others go on.
    """
    case: dict[str, Any] = {
        "model": name,
        "system": system,
        "parameters": shape.config.parameter_count(),
    }
    case |= {
        "sequence_length": shape.length,
        "micro_batch": shape.micro_batch,
        "micro_batches": shape.micro_batches,
    }
    if seconds < SHORTEST_CASE_S:
        return case | {"error": "not measured: out of time"}
    command = [sys.executable, __file__, *sys.argv[1:], "--case", name, system]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return case | {"error": f"not measured: still running after {seconds:.0f} s"}
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return case | {
            "error": lines[-1] if lines else f"exit code {done.returncode}",
            "stderr": lines[-40:],
        }
    case |= json.loads(done.stdout.splitlines()[-1])
    tokens_per_s = [shape.tokens_per_update / s for s in case["seconds_per_update"]["values"]]
    return case | {"tokens_per_s": harness.spread(tokens_per_s)}


def rates(
    case: dict[str, Any], shape: Shape, peak: float | None, matmul: float
) -> dict[str, float | None]:
    """Return raw FLOP/s of the median and its shares of the datasheet's rate and of a measured
    matrix product's.
    """
    rate, per_token = case["tokens_per_s"]["median"], flops_per_token(shape.config, shape.length)
    return {
        "flops_per_s": rate * per_token,
        "mfu": mfu(rate, per_token, peak) if peak else None,
        "of_measured_matmul": mfu(rate, per_token, matmul),
    }


def row(case: dict[str, Any], cases: list[dict[str, Any]]) -> list[str]:
    """Return a case's line of the table; the last cell is its speed over Trainer's on the same
    model.
    """
    label = f"{case['model']} {case['system']}"
    if "error" in case:
        return [label, case["error"][:60], *[""] * 7]
    if "speedup" in case:
        label += f", {harness.shown(case['speedup'])} x called"
    peer = next((c for c in cases if c["model"] == case["model"] and c["system"] == "trainer"), {})
    syncs = case["host_syncs"]
    return [
        label,
        harness.shown(case["tokens_per_s"], 0),
        f"{case['flops_per_s'] / 1e12:.3g}",
        f"{case['mfu']:.1%}" if case["mfu"] else "-",
        f"{case['of_measured_matmul']:.1%}",
        f"{case['peak_memory_bytes'] / 2**30:.1f}",
        f"{case['compile_s']:.0f}",
        "-" if syncs is None else str(sum(syncs.values())),
        f"{case['tokens_per_s']['median'] / peer['tokens_per_s']['median']:.2f}"
        if "tokens_per_s" in peer
        else "-",
    ]


HEADERS = [
    "",
    "tokens/s",
    "TFLOP/s",
    "MFU",
    "of matmul",
    "peak GiB",
    "compile s",
    "syncs/update",
    "x Trainer",
]


def parse() -> Namespace:
    """Return the arguments, with the chosen shapes as `args.shapes`."""
    parser = harness.arguments(__doc__)
    shapes = LAUNCHED | SHAPES
    parser.add_argument("--models", nargs="+", choices=shapes, default=list(shapes))
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument(
        "--micro-batch", type=int, help="rows of a micro-batch; an update keeps its tokens"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--round-s", type=float, default=2.0, help="about how long a round is")
    parser.add_argument(
        "--seconds",
        type=float,
        default=500.0,
        help="begin no case after so long, and stop what runs",
    )
    parser.add_argument(
        "--case", nargs=2, metavar=("MODEL", "SYSTEM"), help="measure one, in this process"
    )
    args = parser.parse_args()
    args.shapes = {name: shapes[name] for name in args.models}
    if args.smoke:
        args.shapes, args.rounds, args.round_s = SMOKE, 2, 0.0
    if args.micro_batch:
        for name, shape in args.shapes.items():
            count = max(1, shape.micro_batch * shape.micro_batches // args.micro_batch)
            args.shapes[name] = shape._replace(micro_batch=args.micro_batch, micro_batches=count)
    return args


def main() -> None:
    """Measure and print; see `--help`."""
    began, args = clock(), parse()
    if args.case:
        model, system = args.case
        print(json.dumps(SYSTEMS[system](args.shapes[model], args)))
        return
    device = default_device()
    peak = describe(device).peak_flops.get("bf16")
    matmul = measured_matmul_flops(device, torch.bfloat16)
    settings = {
        "rounds": args.rounds,
        "round_s": args.round_s,
        "smoke": args.smoke,
        "precision": "bf16",
    }
    formula = {
        "flops_per_token": "6 N_matmul + 12 L d (T + 1) / 2",
        "peak_flops_per_s": peak,
        "measured_matmul_flops": matmul,
    }
    found = harness.result("train", settings | formula)
    harness.print_machine(found)
    datasheet = f"{peak / 1e12:.0f} TFLOP/s by the datasheet" if peak else "no datasheet rate"
    print(f"bf16: {datasheet}, {matmul / 1e12:.3g} TFLOP/s measured on a large matrix product")
    for name, shape in args.shapes.items():
        for system in args.systems:
            if (system == "replay") != (name in LAUNCHED):
                continue
            case = run_case(name, shape, system, args, args.seconds - (clock() - began))
            if "tokens_per_s" in case:
                case |= rates(case, shape, peak, matmul)
            found["cases"].append(case)
            harness.write(args.out, found)
            print(f"{clock() - began:4.0f} s  {'  '.join(row(case, found['cases']))}", flush=True)
    harness.print_table(HEADERS, [row(case, found["cases"]) for case in found["cases"]])
    sys.exit(any("error" in case for case in found["cases"]))


if __name__ == "__main__":
    main()
