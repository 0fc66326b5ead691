"""Draw the figures and write the pages of a profile and of a ladder.

A profile shows where an update's time goes, what limits it and what to change. A ladder is drawn
from the JSON object that `monograph profile --ladder --json` prints.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from monograph.profiling.bottleneck import NOTHING, Bound, Verdict
from monograph.profiling.intervals import PARTS
from monograph.profiling.profiler import Profile
from monograph.report import quantities
from monograph.report.figures import ACCENT, INK, MUTED, style, svg
from monograph.report.page import Bar, Cell, Drawings, bars, folded, number, page, section, table
from monograph.report.quantities import count


def draw_profile(verdict: Verdict, title: str) -> str:
    """Return an SVG with a bar for each part, with a mark at its best time and its share next to
    it.
    """
    from matplotlib.figure import Figure

    parts = [part for part in reversed(PARTS) if verdict.spent.parts[part] > 0]
    with style():
        figure = Figure(figsize=(7.3, 0.7 + 0.34 * len(parts)), layout="constrained")
        axes = figure.add_subplot()
        axes.set_title(title)
        axes.grid(visible=False)
        for place, part in enumerate(parts):
            taken, least = 1e3 * verdict.spent.parts[part], 1e3 * verdict.floors[part]
            axes.barh(place, taken, height=0.62, color=ACCENT if part == verdict.binds else MUTED)
            axes.plot([least, least], [place - 0.4, place + 0.4], color=INK, linewidth=1.6)
            axes.text(
                taken,
                place,
                f"  {verdict.spent.share(part):.0%}",
                va="center",
                fontsize=8,
                color=INK,
            )
        axes.set_yticks(range(len(parts)), parts)
        axes.set_xlim(0, 1.12e3 * max(verdict.spent.parts.values()))
        axes.set_xlabel("milliseconds per update   (line: the best; blue: what limits the run)")
        return svg(figure)


def profile_page(title: str, profile: Profile, tokens_per_s: float, config: str) -> str:
    """Return a profile's page as HTML.

    Args:
        title: the folder's name.
        profile: the result of profiling.
        tokens_per_s: the run's speed.
        config: the run's settings as TOML.
    """
    judged = profile.verdict
    faster = profile.update_s / max(profile.verdict.floor_s, 1e-12)
    best = judged.change
    found = said(profile)
    if best:
        found += f"; {best.what} is predicted to make it {judged.gain(best):.2f} × as fast"
    return page(
        kind="Profile",
        title=title,
        headline=f"Limited by {judged.binds}",
        standing=f"{found[0].upper()}{found[1:]}.",
        figures=[
            ("ms per update", f"{1e3 * profile.update_s:.3g}"),
            ("tokens/s", count(tokens_per_s)),
            ("micro-steps", str(profile.micro_steps)),
            ("best, ms", f"{1e3 * judged.floor_s:.3g}"),
            ("possible speedup", f"{faster:.2g} ×"),
        ],
        drawings=Drawings(),
        sections=[
            section("Where an update's time goes", _part_bars(judged), whole=True),
            section("Changes to try", _changes(profile), whole=True),
            section("Parts of an update", _parts(profile), whole=True),
            section("Configuration", folded("config.toml", config), whole=True),
        ],
    )


def said(profile: Profile) -> str:
    """Return a sentence without full stop: what limits the run, its share of the time, and the
    share not judged.
    """
    judged = profile.verdict
    unknown = judged.unknown_s / judged.spent.total_s if judged.spent.total_s else 0.0
    unjudged = (
        f"; {unknown:.0%} of it is work that cannot be counted, and is not judged"
        if unknown > NOTHING
        else ""
    )
    if judged.binds == "nothing":
        return f"nothing that could be won back: what can be judged is near its best time as it is set up{unjudged}"
    share = judged.recoverable[judged.binds] / profile.update_s
    what = "empty positions" if judged.binds == "padding" else judged.binds
    none = "" if judged.change else "; no key changes that"
    return f"{what}: {share:.0%} of the time could be won back at most{none}{unjudged}"


def mostly(bounds: Mapping[Bound, float]) -> str:
    """Return the bound with the most seconds; "" if there is none."""
    return max(bounds, key=lambda kind: bounds[kind]) if bounds else ""


def _part_bars(judged: Verdict) -> str:
    spent = {part: seconds for part, seconds in judged.spent.parts.items() if seconds > 0}
    longest = max(spent.values(), default=1.0)
    rows = []
    for part in filter(spent.get, PARTS):
        text = f"{judged.spent.share(part):.0%}"
        bar = Bar(text, spent[part] / longest, floor=min(1.0, judged.floors[part] / longest))
        rows.append((part, part == judged.binds, [bar]))
    note = '<p class="note">The line in a bar is the best time possible here; blue is what limits the run.</p>'
    return bars("Where an update's time goes", ["share of the time"], rows) + note


def _parts(profile: Profile) -> str:
    judged = profile.verdict
    rows: list[list[Cell]] = []
    for part in PARTS:
        share = judged.spent.share(part)
        taken = 1e3 * judged.spent.parts[part]
        least = 1e3 * judged.floors[part]
        numbers = [number(share, "{:.1%}"), number(taken, "{:.3g}"), number(least, "{:.3g}")]
        rows.append([part, *numbers, mostly(judged.bounds.get(part, {}))])
    return table(
        "Parts of an update", ["part", "share", "ms", "best, ms", "mostly limited by"], rows
    )


def _changes(profile: Profile) -> str:
    judged = profile.verdict
    rows: list[list[Cell]] = [
        [
            one.what,
            number(judged.gain(one), "{:.2f} ×"),
            "same" if one.same_training else "different",
            one.why,
        ]
        for one in judged.changes
    ]
    return table(
        "Changes to try", ["change", "predicted speedup", "result of training", "why"], rows
    )


Values = Mapping[str, Any]
# The speed that ratios compare, by `ratios_of`. On a CPU it is that of CPU time, as other programs
# take wall time.
SPEED = {"wall": "tokens_per_s", "cpu": "tokens_per_cpu_s"}


def draw_ladder(ladder: Values) -> str:
    """Return an SVG with two bars for each rung, tokens per second and peak memory; the fastest
    rung's are blue.
    """
    from matplotlib.figure import Figure

    rungs = ladder["rungs"]
    best = fastest(ladder)
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
                    axes.text(
                        0, place, "\u2002not available here", va="center", fontsize=8, color=MUTED
                    )
                    continue
                axes.barh(place, rung[key], height=0.62, color=ACCENT if rung is best else MUTED)
                axes.text(
                    rung[key],
                    place,
                    f"\u2002{_said(rung, key)}",
                    va="center",
                    fontsize=8,
                    color=INK,
                )
        left.set_yticks(range(len(rungs)), [rung["rung"] for rung in rungs])
        left.invert_yaxis()
        return svg(figure)


def _said(rung: Values, key: str) -> str:
    if key == "peak_memory_bytes":
        return quantities.memory(rung[key])
    times = f" ({rung['times']:.2f} ×)" if rung["times"] else ""
    return f"{rung[key]:,.0f}{times}"


def ladder_page(title: str, ladder: Values, config: str) -> str:
    """Return a ladder's page as HTML.

    Args:
        title: the folder's name.
        ladder: the JSON object that its command prints.
        config: the settings that all rungs share, as TOML.
    """
    first = ladder["rungs"][0]
    best = fastest(ladder)
    return page(
        kind="Ladder",
        title=title,
        headline=f"{gain(ladder):.1f} × as fast as eager",
        standing=f"{standing(ladder)}.",
        figures=[
            ("parameters", quantities.count(ladder["params"])),
            ("tokens/s, eager", f"{first['tokens_per_s']:,.0f}"),
            ("tokens/s, best", f"{best['tokens_per_s']:,.0f}"),
            ("tokens per rung", quantities.count(ladder["tokens"])),
            ("time", quantities.duration(ladder["wall_s"])),
        ],
        drawings=Drawings(),
        sections=[
            section("Speed and memory", _rung_bars(ladder["rungs"], best), whole=True),
            section(
                "All numbers",
                table("Rungs of the ladder", HEADS, rows(ladder["rungs"])),
                whole=True,
            ),
            section("Configuration", folded("config.toml", config), whole=True),
        ],
    )


def _rung_bars(rungs: Sequence[Values], best: Values) -> str:
    keys = ("tokens_per_s", "peak_memory_bytes")
    most = {key: max(rung[key] or 0 for rung in rungs) or 1 for key in keys}
    made = []
    for rung in rungs:
        cells = [
            Bar("not available here", None)
            if rung[key] is None
            else Bar(_said(rung, key), rung[key] / most[key])
            for key in keys
        ]
        made.append((rung["rung"], rung is best, cells))
    return bars("Speed and memory of each rung", ["tokens per second", "peak memory"], made)


def fastest(ladder: Values) -> Values:
    """Return the rung with the most tokens per second."""
    return max(ladder["rungs"], key=lambda rung: rung[SPEED[ladder["ratios_of"]]] or 0)


def gain(ladder: Values) -> float:
    """Return how many times as fast as the first rung the fastest is."""
    speed = SPEED[ladder["ratios_of"]]
    return float(fastest(ladder)[speed] / ladder["rungs"][0][speed])


def standing(ladder: Values) -> str:
    """Return how the rungs were measured, in a sentence without a full stop."""
    of = {"wall": "", "cpu": " (in CPU time)"}
    return (
        f"Each rung changes one thing; its ratios compare it with the rung it changes{of[ladder['ratios_of']]}. "
        f"All train on the same text with the same seed, {ladder['updates']:,} updates of "
        f"{ladder['tokens_per_update']:,} tokens each, on {ladder['device']}"
    )


HEADS = (
    "rung",
    "tokens/s",
    "speed",
    "compared with",
    "ms per update",
    "peak memory",
    "memory",
    "loss",
    "compiling, s",
    "micro-batch",
    "what changes, or why it is not available",
)


def rows(rungs: Sequence[Values]) -> list[list[Cell]]:
    """Return the table's cells under `HEADS`; a rung that could not run has its name and the
    reason.
    """
    made: list[list[Cell]] = []
    for rung in rungs:
        update_s, size = rung["update_s"], rung["peak_memory_bytes"]
        loss = rung["train_loss"] if rung["eval_loss"] is None else rung["eval_loss"]
        made.append(
            [
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
            ]
        )
    return made
