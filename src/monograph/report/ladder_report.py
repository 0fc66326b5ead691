"""The picture and the page of a ladder, from the object that `monograph profile --ladder --json` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from monograph.report import quantities
from monograph.report.figures import Drawing
from monograph.report.page import Cell, folded, number, page, section, table
from monograph.report.plot_style import ACCENT, INK, MUTED, style, svg

Found = Mapping[str, Any]
# What ratios are of: on a CPU of its own time, as other programs take a share of the clock's.
SPEED = {"wall": "tokens_per_s", "cpu": "tokens_per_cpu_s"}


def draw_ladder(found: Found) -> Drawing:
    """Two bars for each rung: tokens per second and peak memory, each with its number; the fastest is blue."""
    from matplotlib.figure import Figure

    rungs, best = found["rungs"], fastest(found)
    with style():
        figure = Figure(figsize=(7.3, 0.9 + 0.36 * len(rungs)), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=[1.5, 1])
        for axes, key, title in (
            (left, "tokens_per_s", "Tokens per second"),
            (right, "peak_memory_bytes", "Peak memory of tensors"),
        ):
            axes.set_title(title)
            axes.grid(visible=False)
            axes.set_xticks([])
            axes.spines["bottom"].set_visible(False)
            axes.set_xlim(0, 1.6 * max(rung[key] or 0 for rung in rungs))
            for place, rung in enumerate(rungs):
                if rung[key] is None:
                    axes.text(0, place, "\u2002not here", va="center", fontsize=8, color=MUTED)
                    continue
                axes.barh(place, rung[key], height=0.62, color=ACCENT if rung is best else MUTED)
                axes.text(rung[key], place, f"\u2002{_said(rung, key)}", va="center", fontsize=8, color=INK)
        left.set_yticks(range(len(rungs)), [rung["rung"] for rung in rungs])
        left.invert_yaxis()
        return Drawing("ladder", svg(figure))


def _said(rung: Found, key: str) -> str:
    if key == "peak_memory_bytes":
        return quantities.memory(rung[key])
    times = f"   {rung['times']:.2f} ×" if rung["times"] else ""
    return f"{rung[key]:,.0f}{times}"


def ladder_page(title: str, found: Found, drawing: Drawing, config: str) -> str:
    """The page as HTML.

    Args:
        title: the folder's name.
        found: the ladder.
        drawing: of it.
        config: the settings that all rungs share, as TOML.
    """
    first, best = found["rungs"][0], fastest(found)
    figures = [
        ("parameters", quantities.count(found["params"])),
        ("tokens/s, eager", f"{first['tokens_per_s']:,.0f}"),
        ("tokens/s, at best", f"{best['tokens_per_s']:,.0f}"),
        ("tokens of a rung", quantities.count(found["tokens"])),
        ("time", quantities.duration(found["wall_s"])),
    ]
    return page(
        title=title,
        headline=f"{gain(found):.1f} × as fast as eager",
        standing=f"{standing(found)}.",
        figures=figures,
        drawings=[drawing],
        sections=[
            section("Rungs", table("Rungs of the ladder", HEADS, rows(found["rungs"]))),
            section("What the rungs share", folded("config.toml", config)),
        ],
    )


def fastest(found: Found) -> Found:
    """The rung with the most tokens per second."""
    best: Found = max(found["rungs"], key=lambda rung: rung[SPEED[found["ratios_of"]]] or 0)
    return best


def gain(found: Found) -> float:
    """How many times as fast as the first rung the fastest is."""
    speed = SPEED[found["ratios_of"]]
    times: float = fastest(found)[speed] / found["rungs"][0][speed]
    return times


def standing(found: Found) -> str:
    """What was done, in a sentence without a full stop."""
    of = {"wall": "", "cpu": " (in CPU time)"}
    return (
        f"Each rung changes one thing of another one, over which its ratios are{of[found['ratios_of']]}: the same text "
        f"and seed, {found['updates']:,} updates of {found['tokens_per_update']:,} tokens each, on {found['device']}"
    )


HEADS = ("rung", "tokens/s", "speed", "over", "ms an update", "peak memory", "memory", "loss", "compiling, s",
         "micro-batch", "what is changed, or why not here")  # fmt: skip


def rows(rungs: Sequence[Found]) -> list[list[Cell]]:
    """The table's cells under `HEADS`; of a rung that could not be climbed its name and the reason."""
    made: list[list[Cell]] = []
    for rung in rungs:
        update_s, size = rung["update_s"], rung["peak_memory_bytes"]
        loss = rung["train_loss"] if rung["eval_loss"] is None else rung["eval_loss"]
        made.append([
            rung["rung"],
            number(rung["tokens_per_s"], "{:,.0f}"),
            number(rung["times"], "{:.2f} ×"),
            rung["over"] or "",
            number(None if update_s is None else 1e3 * update_s, "{:,.0f}"),
            ("", None) if size is None else (quantities.memory(size), size),
            number(rung["memory_times"], "{:.2f} ×"),
            number(loss, "{:.3f}"),
            number(rung["compile_s"] or None, "{:.0f}"),
            number(rung["micro_batch"], "{}"),
            "; ".join([rung["obstacle"] or rung["change"], *rung["notes"]]),
        ])  # fmt: skip
    return made
