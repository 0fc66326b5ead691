"""Measure where the time of a training step goes on a GPU, kernel by kernel, next to the roofline
of `launches.py`.

Each case trains with half of the rows that `launches.py` counts, so that it fits 80 GB. Updates of
one micro-batch are timed without the profiler, five at a time; then five are profiled: milliseconds
an update of matrix products, of attention, of other kernels, of copies, and what is left of the
update's time, in which the card had nothing to do. One update alone would not show it: under load a
card has a lower clock than at the start.
"""

from __future__ import annotations

import gc
import json
from argparse import Namespace
from pathlib import Path
from typing import Any, NamedTuple

import harness
import torch
from steps import Shape, packed_window, piece_lengths
from systems import drawn_on
from torch.profiler import ProfilerActivity, profile

from monograph.device import default_device, describe
from monograph.graph.precision import Precision
from monograph.model.config import LlamaConfig
from monograph.optim import AdamW
from monograph.predict.roofline import flops_per_token, mfu
from monograph.resident import Resident

LAUNCHES = Path(__file__).parent / "results" / "launches.json"
# Parts of kernels' names, in the order in which they are asked.
KINDS = {
    "attention": ("flex_attention", "flash", "fmha", "sdpa", "attention"),
    "products": ("nvjet", "gemm", "cutlass", "cublas", "splitk", "_mm_", "matmul"),
    "copies": ("Memcpy", "Memset"),
}


class Case(NamedTuple):
    """A preset, the rows and tokens of a micro-batch, and what differs from the default way to
    train.
    """

    preset: str
    rows: int
    packed: bool = True
    precision: str = "bf16"
    scope: str = "whole"


CASES = {
    "124m": Case("124m", 16),
    "1b": Case("1b", 8),
    "124m, one document a row": Case("124m", 16, packed=False),
    "1b, one document a row": Case("1b", 8, packed=False),
    "1b, block by block": Case("1b", 8, scope="blocks"),
    "1b, fp8": Case("1b", 8, precision="fp8"),
}
LENGTH, SMOKE = 2048, {"nano": Case("nano", 2)}
# Updates between two waits for the card. In training, too, the host prepares an update while the card
# computes the one before.
UPDATES_AT_ONCE = 5


def measured(name: str, case: Case, args: Namespace) -> dict[str, Any]:
    """Time updates of one case, and profile one."""
    device, length = default_device(), 64 if args.smoke else LENGTH
    shape = Shape(LlamaConfig.preset(case.preset), length, case.rows)
    window = packed_window(shape, device)
    if not case.packed:
        window = {key: window[key] for key in ("tokens", "targets")}
    engine = Resident(
        drawn_on(device, shape.config),
        optim=AdamW(lr=1e-3),
        clip=1.0,
        precision=Precision(case.precision),
        micro_batch=case.rows,
    )
    if obstacle := engine.capture(window, scope=case.scope):  # type: ignore[arg-type]
        raise SystemExit(f"kernels.py: {name} cannot be captured: {obstacle}")

    def update() -> None:
        engine.accumulate(window)
        engine.update()

    def several_updates() -> None:
        for _ in range(UPDATES_AT_ONCE):
            update()

    several_updates()
    times = harness.interleaved({"updates": several_updates}, args.rounds, device)["updates"]
    seconds = harness.spread([each.wall_s / UPDATES_AT_ONCE for each in times])
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities, acc_events=True) as seen:
        harness.timed(several_updates, device)
    kernels = by_name(seen)
    tokens_per_s = shape.rows * shape.length / seconds["median"]
    per_token, peak = (
        flops_per_token(shape.config, piece_lengths(window)),
        describe(device).peak_flops.get("bf16"),
    )
    milliseconds = {
        kind: sum(k["ms"] for k in kernels if k["kind"] == kind) for kind in (*KINDS, "others")
    }
    return {
        "case": name,
        "rows": case.rows,
        "length": length,
        "seconds_per_update": seconds,
        "tokens_per_s": tokens_per_s,
        "mfu": mfu(tokens_per_s, per_token, peak) if peak else None,
        "milliseconds": milliseconds
        | {"nothing": 1e3 * seconds["median"] - sum(milliseconds.values())},
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
        "kernels": kernels,
    }


def by_name(seen: profile) -> list[dict[str, Any]]:
    """Return the kernels that ran, each with its launches and its milliseconds of an update, the
    longest first.
    """
    found: dict[str, dict[str, Any]] = {}
    for event in seen.events() or ():
        if event.device_type != torch.autograd.DeviceType.CUDA or event.is_user_annotation:
            continue
        kernel = found.setdefault(
            event.name, {"name": event.name[:120], "kind": kind_of(event.name), "n": 0, "ms": 0}
        )
        kernel["n"] += 1 / UPDATES_AT_ONCE
        kernel["ms"] += event.time_range.elapsed_us() / 1e3 / UPDATES_AT_ONCE
    return sorted(found.values(), key=lambda kernel: -kernel["ms"])


def kind_of(name: str) -> str:
    """Return what a kernel does, by its name."""
    return next(
        (kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "others"
    )


def expected(case: dict[str, Any]) -> dict[str, float]:
    """Return the roofline's milliseconds for as many tokens on this card, or nothing."""
    card = next((card for card in ("H200", "H100") if card in describe().name), None)
    counted = json.loads(LAUNCHES.read_text())["cases"] if card and LAUNCHES.exists() else ()
    for other in counted:
        if other["case"] == case["case"]:
            roof, share = (
                other["roofline"]["H200"],
                case["rows"] * case["length"] / (other["rows"] * other["length"]),
            )
            others = share * roof["triton"] + roof["update"]
            return {kind: share * roof[kind] for kind in ("products", "attention")} | {
                "others": others
            }
    return {}


def rows_of(case: dict[str, Any]) -> list[list[str]]:
    """Return a case's lines of the table: what was measured, and what was expected."""
    if "error" in case:
        return [[case["case"], case["error"][:80]]]
    kinds = (*KINDS, "others", "nothing")
    lines = [
        [
            case["case"],
            f"{case['tokens_per_s']:,.0f}",
            *(f"{case['milliseconds'][kind]:.1f}" for kind in kinds),
        ]
    ]
    lines[0].append(f"{case['mfu']:.1%}" if case["mfu"] else "-")
    if roof := expected(case):
        lines.append(
            ["  expected", "", *(f"{roof[kind]:.1f}" if kind in roof else "" for kind in kinds), ""]
        )
    return lines


def main() -> None:
    """Measure, print, and write the results."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    cases = SMOKE if args.smoke else {name: CASES[name] for name in args.cases}
    found = harness.result("kernels", {"rounds": args.rounds, "smoke": args.smoke})
    harness.print_machine(found)
    for name, case in cases.items():
        torch.compiler.reset()
        try:
            found["cases"].append(measured(name, case, args))
        except (RuntimeError, SystemExit) as error:  # out of memory, say: the other cases go on
            found["cases"].append({"case": name, "error": str(error)})
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        harness.write(args.out, found)
        for line in rows_of(found["cases"][-1]):
            print("  ".join(line), flush=True)
    headers = ["", "tokens/s", *(f"{kind}, ms" for kind in (*KINDS, "others", "nothing")), "MFU"]
    harness.print_table(
        headers, [line for case in found["cases"] if "error" not in case for line in rows_of(case)]
    )


if __name__ == "__main__":
    main()
