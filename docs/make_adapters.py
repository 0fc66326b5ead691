"""Write the tables of docs/lora.md from benchmarks/results/adapters.json and adapter_peers.json.

Usage: python docs/make_adapters.py (tests/graph/test_page.py compares)
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from made_parts import with_made_parts

DOCS = Path(__file__).resolve().parent
PAGE = DOCS / "lora.md"
RESULTS = DOCS.parent / "benchmarks" / "results"
GIB = 2**30


def memory(found: dict[str, Any]) -> str:
    """Return the planned memory of each way on a GPU, and the measured memory of those that fit."""
    machine, settings = found["machine"], found["settings"]
    lines = [
        f"Planned for a GPU: rows of {settings['length']:,} tokens, micro-batches of one row, bf16, a graph for each "
        f"block. The last column has the same step on shorter rows, planned and run on {machine['device']}, with the "
        "peak that the allocator counts. Printed by [benchmarks/adapters.py](../benchmarks/adapters.py).",
        "",
        "| model | trained | weights, gradients, moments | peak | peak, blocks recomputed | planned and run |",
        "|---|---|---|---|---|---|",
    ]
    for case in found["cases"]:
        ways = case["way"].split(", ", 1)
        way = (
            ways[0] + (f", `{ways[1]}`" if ways[1:] else "")
            if ways[0] == "all weights"
            else f"`{case['way']}`"
        )
        held, none, full = (
            f"{size / GIB:.1f} GiB"
            for size in (case["held_bytes"], case["peak_bytes"]["none"], case["peak_bytes"]["full"])
        )
        seen = case["measured"]
        run = (
            f"{seen['predicted_bytes'] / GIB:.3f} and {seen['measured_bytes'] / GIB:.3f} GiB"
            if seen
            else ""
        )
        lines.append(f"| {case['model']} | {way} | {held} | {none} | {full} | {run} |")
    return "\n".join(lines)


def peers(found: dict[str, Any]) -> str:
    """Return how many times as fast as each of PEFT's ways Monograph is."""
    machine, settings, versions = found["machine"], found["settings"], found["settings"]["versions"]
    lines = [
        f"{settings['conversations']} conversations of {settings['tokens']:,} tokens in all, {settings['targets']:,} "
        f"of them answers, {settings['precision']}, on {machine['device']}, {machine['threads']} thread; transformers "
        f"{versions['transformers']}, peft {versions['peft']}, SDPA. The first losses are equal to "
        f"{spread_of_losses(found):.0e}. Printed by [benchmarks/adapter_peers.py](../benchmarks/adapter_peers.py).",
        "",
        "| trainer | tokens/s | Monograph is faster | in CPU time |",
        "|---|---|---|---|",
    ]
    for case in found["cases"]:
        ratios = case["monograph_is_faster"]
        shown = [f"{ratios[clock]['median']:.2f} ×" for clock in ("wall", "cpu")]
        if case["way"] == "monograph":
            shown = ["", ""]
        lines.append(
            f"| {case['way']} | {case['tokens_per_s']['median']:,.0f} | {shown[0]} | {shown[1]} |"
        )
    return "\n".join(lines)


def spread_of_losses(found: dict[str, Any]) -> float:
    """Return the largest relative difference of a way's first loss from ours."""
    own, *others = (case["loss"] for case in found["cases"])
    return max(abs(other / own - 1) for other in others)


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {"adapters": memory, "adapter_peers": peers}


def page(text: str) -> str:
    """Return the page with new tables."""
    for name, table in TABLES.items():
        begin = f"<!-- {name}, made by docs/make_adapters.py -->"
        made = table(json.loads((RESULTS / f"{name}.json").read_text()))
        text = with_made_parts(text, begin, [made])
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
