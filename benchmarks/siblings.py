"""Compare fused siblings with separate ones: query, key and value, gate and up as one product each,
or layer by layer.

The same two-layer Llama at several widths, eager and captured, its forward pass and its whole
update; both ways take turns in one process. A ratio below 1 means that fused is faster. There is no
goal: it is kept if it pays. `kept` says whether fused won so many of these rounds that a fair coin
would do so less than once in twenty times (sign test).
"""

from __future__ import annotations

import itertools
import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import harness
import torch

from monograph.device import default_device
from monograph.graph.precision import Precision
from monograph.graph.siblings import families, fuse_siblings
from monograph.loss import Batch
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.optim import AdamW
from monograph.resident import Resident

VOCABULARY, LAYERS, ROWS, LENGTH = 1024, 2, 4, 128
ROUND_S = 0.3  # a round repeats quick calls for this long
MODES, WAYS = ("eager", "captured"), ("separate", "fused")
HEAD = 64


def is_faster(ratios: Sequence[float]) -> bool:
    """Return whether a fair coin would give so many ratios below 1 with a probability of at most 5
    %.
    """
    wins, rounds = sum(ratio < 1 for ratio in ratios), len(ratios)
    return sum(math.comb(rounds, k) for k in range(wins, rounds + 1)) <= 0.05 * 2**rounds


def window() -> Batch:
    """Return full rows of one document each."""
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    return {"tokens": tokens, "targets": tokens.roll(-1, 1)}


def engine(width: int, precision: str, mode: str, way: str) -> Resident:
    """Return one of the ways to train, warmed up; with half as many heads for keys and values as
    for queries.
    """
    heads = max(2, width // HEAD)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=64 * round(width * 8 / 3 / 64),
        num_hidden_layers=LAYERS,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=LENGTH,
    )
    model, batch = Llama(config).to(default_device()), window()
    if way == "fused":
        fuse_siblings(model, batch["tokens"].to(default_device()))
    found = Resident(
        model, optim=AdamW(), clip=1.0, precision=Precision(precision), micro_batch=ROWS
    )
    expected = 2 * LAYERS if way == "fused" else 0
    if len(families(model)) != expected:
        raise SystemExit(f"siblings.py: {len(families(model))} families instead of {expected}")
    obstacle = found.capture(batch) if mode == "captured" else None
    if obstacle:
        raise SystemExit(f"siblings.py: {way} at width {width} cannot be captured: {obstacle}")
    return found


def update(engine: Resident, batch: Batch) -> None:
    """Make one update."""
    engine.accumulate(batch)
    engine.update()


WORK: dict[str, Callable[[Resident, Batch], object]] = {
    "forward": Resident.evaluate,
    "update": update,
}


def measure(args: Namespace, width: int, precision: str, mode: str) -> dict[str, Any]:
    """Time both ways in turns, forward pass and update, and measure the peak memory of an update."""
    device, batch = default_device(), window()
    engines = {way: engine(width, precision, mode, way) for way in WAYS}
    case: dict[str, Any] = {"width": width, "precision": precision, "mode": mode}
    for name, work in WORK.items():
        for each in engines.values():
            work(each, batch)
        once = harness.timed(lambda work=work: work(engines["separate"], batch), device).wall_s
        repeats = 1 if args.smoke else max(1, round(ROUND_S / once))

        def run(
            way: str, work: Callable[[Resident, Batch], object] = work, repeats: int = repeats
        ) -> None:
            for _ in range(repeats):
                work(engines[way], batch)

        times = harness.interleaved(
            {way: lambda way=way, run=run: run(way) for way in WAYS}, args.rounds, device
        )
        ratios = harness.ratios(times["fused"], times["separate"])
        case[name] = {
            "ms": {
                way: harness.spread([1e3 * t.wall_s / repeats for t in each])
                for way, each in times.items()
            },
            "fused_over_separate": ratios,
            "kept": is_faster(ratios["wall"]["values"]),
        }
    for each in engines.values():
        update(each, batch)
    case["update_peak_bytes"] = {
        way: harness.live_peak_bytes(lambda each=each: update(each, batch), device)
        for way, each in engines.items()
    }
    return case


def main() -> None:
    """Measure and print; see `--help`."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 512, 1024])
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=11)
    args = parser.parse_args()
    if args.smoke:
        args.widths, args.precisions, args.rounds = [32], ["fp32"], 2
    settings = {
        "layers": LAYERS,
        "rows": ROWS,
        "length": LENGTH,
        "vocabulary": VOCABULARY,
        "rounds": args.rounds,
    }
    found = harness.result("siblings", settings | {"smoke": args.smoke})
    harness.print_machine(found)
    rows = []
    for width, precision, mode in itertools.product(args.widths, args.precisions, MODES):
        case = measure(args, width, precision, mode)
        found["cases"].append(case)
        harness.write(args.out, found)
        cells = [
            cell
            for name in WORK
            for cell in (
                f"{case[name]['ms']['separate']['median']:.1f}",
                *(
                    harness.shown(case[name]["fused_over_separate"][kind])
                    for kind in ("wall", "cpu")
                ),
            )
        ]
        kept = "yes" if case["update"]["kept"] else "no"
        memory = case["update_peak_bytes"]["fused"] / case["update_peak_bytes"]["separate"]
        rows.append([f"{width}, {precision}, {mode}", *cells, f"{memory:.2f}", kept])
    headers = [
        "",
        "forward ms",
        "fused /",
        "in CPU time",
        "update ms",
        "fused /",
        "in CPU time",
        "peak",
        "kept",
    ]
    harness.print_table(headers, rows)


if __name__ == "__main__":
    main()
