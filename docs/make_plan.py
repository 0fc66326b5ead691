"""Write the tables and the picture of docs/plan.md: plans of Llama-3-8B on four GPUs, and of
streamed models.

Usage: python docs/make_plan.py (needs no GPU; tests/planner/test_page.py compares)
"""

from __future__ import annotations

import io
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

from made_parts import with_made_parts

from monograph import planner
from monograph.device import card_device
from monograph.errors import OutOfDeviceMemory
from monograph.model.config import LlamaConfig
from monograph.optim import AdamW
from monograph.planner import Limits, Plan, PlanRequest, defaults, plan
from monograph.planner.streaming import DISK_BYTES_PER_S, HOST_SHARE, stream_candidates
from monograph.predict.fake_memory import ORIGINS
from monograph.predict.footprint import Work
from monograph.predict.roofline import LINK_BYTES_PER_S, LINK_SHARE
from monograph.report.quantities import count, duration, gibibytes
from monograph.session.resolve import REMATS
from monograph.stream.clock import Link

DOCS = Path(__file__).resolve().parent
PAGE, PICTURE = DOCS / "plan.md", DOCS / "figures" / "plan-8b.svg"
BEGIN = "<!-- made by docs/make_plan.py -->"
CARDS = ("4090", "L40S", "H100", "H200")
STREAM_BEGIN = "<!-- streamed, made by docs/make_plan.py -->"
STREAMED_ON, HOSTS = ("4090", "H100", "H200"), (128, 512)  # of the hosts: GiB
# Sizes of Llama 3 with 8 and 70 billion parameters, and of one in between.
SHAPES = {
    "8B": LlamaConfig.preset("8b"),
    "20B": replace(LlamaConfig.preset("8b"), hidden_size=6144, intermediate_size=16384, num_hidden_layers=48,
                   num_attention_heads=48),
    "70B": replace(LlamaConfig.preset("8b"), hidden_size=8192, intermediate_size=28672, num_hidden_layers=80,
                   num_attention_heads=64),
}  # fmt: skip
COLOURS = ("#2457c5", "#6d92e6", "#b3c7f4", "#c2460e", "#e79a72", "#9a9ca6")


def plans() -> list[Plan]:
    """Return a plan for each GPU: bf16 products, fp32 weights, AdamW, rows of 4,096 tokens, 524,288
    an update.
    """
    shape = LlamaConfig.preset("8b")
    training = Work(shape, rows=128, length=4096, optim=AdamW(), window_rows=128)
    request = PlanRequest(
        training,
        precisions=("bf16",),
        scopes=defaults.scopes(shape.num_hidden_layers),
        remats=REMATS,
    )
    return [plan(request, card, card.peak_flops) for card in map(card_device, CARDS)]


def table(found: list[Plan]) -> str:
    """Return the plan for each GPU, or the memory that it lacks."""
    lines = [
        "| GPU | memory | chosen, or nearest | its peak | speed | verdict |",
        "|---|---|---|---|---|---|",
    ]
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


def streamed_table() -> str:
    """Return each shape's plan on each GPU with each host, for 131,072 tokens per update, and the
    time of an update.
    """
    lines = [
        "| model | GPU | host | device | host's memory | files | rows, blocks | update | speed | limited by |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (name, shape), card, host in itertools.product(SHAPES.items(), STREAMED_ON, HOSTS):
        device = card_device(card)
        training = Work(shape, rows=32, length=4096, optim=AdamW(), window_rows=32)
        request = PlanRequest(training, precisions=("bf16",), scopes=("blocks",), remats=("none",))
        rate = LINK_SHARE * (device.link_bytes_per_s or LINK_BYTES_PER_S)
        link = Link(rate, rate, DISK_BYTES_PER_S)
        limits = Limits(planner.budget(device), int(HOST_SHARE * host * 2**30), 2 * 2**40, link)
        begun = f"| {name} | {device.name.removeprefix('NVIDIA ')} | {host} GiB"
        try:
            best = stream_candidates(request, device, limits, device.peak_flops)[0]
        except OutOfDeviceMemory as refused:
            lines.append(
                f"{begun} | {str(refused).split(' (')[0].split(': ')[-1]} |  |  |  |  |  |  |"
            )
            continue
        sizes = " | ".join(gibibytes(best.total(tier)) for tier in ("device", "host", "disk"))
        way = f"{best.work.rows}, {best.placement.blocks_per_stage}"
        speed = f"{count(best.tokens_per_s, 'tok/s')}, MFU {best.mfu:.0%}"
        lines.append(
            f"{begun} | {sizes} | {way} | {duration(best.update_s)} | {speed} | {best.bottleneck} |"
        )
    return "\n".join(lines)


def drawn(found: list[Plan]) -> str:
    """Draw a bar for each GPU's peak by origin, and a line for its memory."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "monograph", "font.size": 9}):
        return _drawn(found, Figure(figsize=(7.3, 2.9), layout="constrained"))


def _drawn(found: list[Plan], figure: Any) -> str:
    axes = figure.add_subplot()
    for place, each in enumerate(found):
        left = 0.0
        for name, colour in zip(ORIGINS, COLOURS, strict=True):
            size = (each.nearest.by_origin or {}).get(name, 0) / 2**30
            axes.barh(place, size, left=left, color=colour, label=name if place == 0 else None)
            left += size
        axes.plot(
            [each.device.memory_bytes / 2**30] * 2,
            [place - 0.45, place + 0.45],
            color="#1c1d21",
            linewidth=2,
        )
    axes.set_yticks(range(len(found)), [each.device.name.removeprefix("NVIDIA ") for each in found])
    axes.invert_yaxis()
    axes.set_xlabel("GiB at the peak of a step; the line is what the card has")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(ncols=3, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def main() -> None:
    """Rewrite the text between the markers, and the picture."""
    found = plans()
    page = with_made_parts(PAGE.read_text(), BEGIN, [table(found)])
    PAGE.write_text(with_made_parts(page, STREAM_BEGIN, [streamed_table()]))
    PICTURE.write_text(drawn(found), encoding="utf-8")


if __name__ == "__main__":
    main()
