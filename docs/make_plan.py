"""Writes the tables and the picture of docs/plan.md: Llama-3-8B on four cards, as the planner has it.

Usage: python docs/make_plan.py           (needs no GPU; tests/planner/test_page.py compares)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from monograph import planner
from monograph.device import named
from monograph.measure.quantities import count, gibibytes
from monograph.measure.tally import ORIGINS
from monograph.model.config import LlamaConfig
from monograph.planner import Asked, Plan, plan
from monograph.session.planning import REMATS

DOCS = Path(__file__).resolve().parent
PAGE, PICTURE = DOCS / "plan.md", DOCS / "figures" / "plan-8b.svg"
BEGIN, END = "<!-- made by docs/make_plan.py -->", "<!-- end -->"
CARDS = ("4090", "L40S", "H100", "H200")
COLOURS = ("#2457c5", "#6d92e6", "#b3c7f4", "#c2460e", "#e79a72", "#9a9ca6")


def plans() -> list[Plan]:
    """One for each card: bf16 products, fp32 weights, AdamW, rows of 4,096 tokens, 524,288 tokens an update."""
    shape = LlamaConfig.preset("8b")
    asked = Asked(
        shape, 4096, 2**19, precisions=("bf16",), scopes=planner.scopes(shape.num_hidden_layers),
        remats=REMATS,
    )  # fmt: skip
    return [plan(asked, card, card.peak_flops) for card in map(named, CARDS)]


def table(found: list[Plan]) -> str:
    """What each card gets, or what it lacks."""
    lines = ["| card | memory | nearest or chosen | its peak | speed | verdict |", "|---|---|---|---|---|---|"]
    for each in found:
        best = each.nearest
        work = best.work
        way = f"micro-batch {work.rows}, graph: {work.compile}, recomputed: {work.remat}"
        short = best.peak_memory_bytes - each.budget_bytes
        verdict = "fits" if each.chosen else f"{gibibytes(short)} too little"
        speed = f"{count(best.tokens_per_s, 'tok/s')}, MFU {best.mfu:.0%}" if each.chosen else ""
        memory = gibibytes(each.device.memory_bytes)
        lines.append(
            f"| {each.device.name} | {memory} | {way} | {gibibytes(best.peak_memory_bytes)} | {speed} | {verdict} |"
        )
    return "\n".join(lines)


def draw(found: list[Plan]) -> None:
    """A bar a card, its peak by origin, and the card's memory as a line."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "monograph", "font.size": 9}
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.3, 2.9), layout="constrained")
    axes: Any = figure.add_subplot()
    for place, each in enumerate(found):
        left = 0.0
        for name, colour in zip(ORIGINS, COLOURS, strict=True):
            size = (each.nearest.by_origin or {}).get(name, 0) / 2**30
            axes.barh(place, size, left=left, color=colour, label=name if place == 0 else None)
            left += size
        axes.plot([each.device.memory_bytes / 2**30] * 2, [place - 0.45, place + 0.45], color="#1c1d21", linewidth=2)
    axes.set_yticks(range(len(found)), [each.device.name.removeprefix("NVIDIA ") for each in found])
    axes.invert_yaxis()
    axes.set_xlabel("GiB at the peak of a step; the line is what the card has")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(ncols=3, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    figure.savefig(PICTURE, format="svg", metadata={"Date": None})


def main() -> None:
    """Rewrite what stands between the markers, and the picture."""
    found = plans()
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table(found)}\n{END}{rest.split(END, 1)[1]}")
    draw(found)


if __name__ == "__main__":
    main()
