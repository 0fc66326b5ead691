"""Estimate the speedrun's time on cards that are not here.

    python benchmarks/speedrun/on_paper.py

An update's time is that of `monograph plan`: the FLOPs of the matrices (6 N_matmul a token) and of
attention (12 L d_attn a pair of a query and a key), the bytes of elementwise code, of activations
and of the optimizer, each over the share of the datasheet's rate that such code reaches
(monograph/predict/roofline.py), and Muon's products, which the plan leaves out. Each query is
counted with a full window, as in a text without documents, since how long FineWeb's are is not known
here: a run counts its real pairs. The second time is the first, multiplied by how much longer than
its plan the nearest case took that was measured: 124M on an H200, rows of two documents,
micro-batches of as many tokens (results/gpu/kernels.json). Nothing else is measured. No run has
reached the target with this recipe, so its number of updates is an assumption, too. With `--trace`
the memory of a micro-batch is traced from the step's own code, which takes minutes.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: E402
from speedrun_recipe import (  # noqa: E402
    MICRO_BATCH,
    RECIPE,
    Recipe,
    optimizer_of,
    training_flops,
)

import monograph as mono  # noqa: E402
from monograph import planner  # noqa: E402
from monograph.device import Device, card_device  # noqa: E402
from monograph.optim.muon import ITERATIONS  # noqa: E402
from monograph.planner.traces import traced_bytes  # noqa: E402
from monograph.predict.estimate import estimate_bytes  # noqa: E402
from monograph.predict.footprint import Work  # noqa: E402
from monograph.predict.roofline import efficiency, update_time  # noqa: E402

CARDS = ("H100", "H200", "4090")
MEASURED = harness.ROOT / "benchmarks" / "results" / "gpu" / "kernels.json"
# Updates of 524,288 tokens: the recipe's, which are assumed, and those of the public record 12, whose
# model has parts that are missing here (docs/speedrun.md has the sources).
UPDATES = (RECIPE.updates, 1875)


def work_of(recipe: Recipe) -> Work:
    """Return an update of the recipe as the planner describes it."""
    return Work(
        recipe.config,
        rows=min(MICRO_BATCH, recipe.rows),
        length=recipe.length,
        optim=optimizer_of(recipe),
        window_rows=recipe.rows,
        precision="bf16",
        clip=None,
        device_type="cuda",
    )


def pairs_per_token(recipe: Recipe) -> float:
    """Return the positions that a query sees, the mean over a row that is one document."""
    w, length = recipe.window, recipe.length
    return w - w * (w - 1) / (2 * length)


def muon_flops(config: mono.LlamaConfig) -> int:
    """Return the FLOPs of an update's Newton-Schulz iterations.

    An iteration on a matrix [m, n], m <= n, has the products X X^T, A A and B X:
    2 m m n + 2 m m m + 2 m m n.
    """
    hidden, wide = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    flops = 0
    for other in (queries, queries, keys, keys, wide, wide, wide):
        m, n = min(hidden, other), max(hidden, other)
        flops += ITERATIONS * (4 * m * m * n + 2 * m**3)
    return flops * config.num_hidden_layers


def measured_slowness() -> float:
    """Return how many times as long as planned the measured case took."""
    [case] = [case for case in json.loads(MEASURED.read_text())["cases"] if case["case"] == "124m"]
    work = Work(
        mono.LlamaConfig.preset("124m"),
        rows=case["rows"],
        length=case["length"],
        optim=mono.AdamW(),
        window_rows=case["rows"],
        precision="bf16",
        device_type="cuda",
    )
    device = card_device("H200")
    planned_s = update_time(work, device, device.peak_flops["bf16"]).total_s
    return case["seconds_per_update"]["median"] / planned_s


def estimate(recipe: Recipe, name: str, slowness: float) -> dict[str, Any]:
    """Return a card's case."""
    device: Device = card_device(name)
    work, peak = work_of(recipe), device.peak_flops["bf16"]
    muon_s = muon_flops(recipe.config) / (peak * efficiency(device)[0].products)
    passes = update_time(work, device, peak)
    # The plan's attention sees whole rows; half of a row on average.
    seen = pairs_per_token(recipe) / (recipe.length / 2)
    planned_s = passes._replace(attention_s=passes.attention_s * seen).total_s + muon_s
    both = {"planned": planned_s, "as_measured": planned_s * slowness}
    tokens = recipe.tokens_per_update
    flops = training_flops(recipe, tokens, tokens * pairs_per_token(recipe))
    return {
        "card": name,
        "device": device.name,
        "memory_budget_bytes": planner.budget(device),
        "micro_batch": work.rows,
        "muon_s": muon_s,
        "update_s": both,
        "mfu": {way: flops / s / peak for way, s in both.items()},
        "train_s": {updates: {way: updates * s for way, s in both.items()} for updates in UPDATES},
    }


def table(found: dict[str, Any]) -> str:
    """Return the table of docs/speedrun.md."""
    counts = " | ".join(f"{updates:,} updates" for updates in UPDATES)
    lines = [
        f"| card | an update | tok/s | MFU | {counts} | measured |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for case in found["cases"]:
        tokens = {way: RECIPE.tokens_per_update / s / 1e3 for way, s in case["update_s"].items()}
        cells = [
            f"one {case['card']}",
            _range(case["update_s"], ".2f", " s"),
            _range(tokens, ".0f", " k"),
            _range({way: 100 * share for way, share in case["mfu"].items()}, ".0f", " %"),
            *(
                _range({way: s / 60 for way, s in both.items()}, ".0f", " min")
                for both in case["train_s"].values()
            ),
            "not measured yet",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _range(both: dict[str, float], digits: str, unit: str) -> str:
    return f"{both['planned']:{digits}} to {both['as_measured']:{digits}}{unit}"


def main() -> None:
    """Estimate and print; see `--help`."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--cards", nargs="+", default=list(CARDS), help="names of `monograph plan`")
    parser.add_argument("--trace", action="store_true", help="trace the memory of a micro-batch")
    args = parser.parse_args()
    slowness = measured_slowness()
    per_token = training_flops(RECIPE, 1, pairs_per_token(RECIPE))
    work = work_of(RECIPE)
    settings = {
        "recipe": RECIPE.record(),
        "flops_per_token": per_token,
        "muon_flops": muon_flops(RECIPE.config),
        "measured_slowness": slowness,
        "estimated_peak_bytes": estimate_bytes(work),
        "traced_peak_bytes": sum(traced_bytes(work).values()) if args.trace else None,
    }
    found = harness.result("speedrun-on-paper", settings)
    found["cases"] = [estimate(RECIPE, name, slowness) for name in args.cards]
    harness.write(args.out, found)
    millions = RECIPE.config.parameter_count() / 1e6
    tokens = RECIPE.tokens_per_update
    print(
        f"{millions:.0f}M parameters, {per_token / 1e6:.0f} MFLOP a token, {tokens:,} tokens an update"
    )
    for updates in UPDATES:
        total = updates * tokens
        files = math.ceil(updates / (100_000_000 // tokens))
        print(
            f"{updates:,} updates: {total / 1e9:.2f} billion tokens, {files} files of 100 million"
        )
    peak = settings["traced_peak_bytes"] or settings["estimated_peak_bytes"]
    how = "traced" if args.trace else "by a closed form"
    print(f"micro-batch of {work.rows} rows: {peak / 2**30:.1f} GiB at the peak, {how}")
    print(f"an estimate, nothing of it measured; the second time is the first x {slowness:.2f}\n")
    print(table(found))


if __name__ == "__main__":
    main()
