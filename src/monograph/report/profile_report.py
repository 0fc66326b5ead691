"""Draw the figures and write the pages of a profile and of a ladder.

A profile shows where an update's time goes, what limits it and what to change. The parts of an
update are those of `monograph.profiling.intervals.PARTS`, such as "matmul".

A ladder trains the same small run several times and changes one thing each time: each such training
is a rung. It is drawn from the JSON object that `monograph profile --ladder --json` prints. Of a
rung's keys, these are not obvious:

- `rung`: the rung's name.
- `over`: the name of the rung that it is compared with.
- `times`, `memory_times`: its speed and its memory as a multiple of that rung's.
- `obstacle`: why it could not run; its numbers are then None.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from monograph.profiling.bottleneck import MIN_SAVED_SHARE, Bound, Verdict
from monograph.profiling.intervals import PARTS
from monograph.profiling.profiler import Profile
from monograph.report import quantities
from monograph.report.figures import ACCENT, INK, MUTED, style, svg
from monograph.report.page import (
    Bar,
    BarRow,
    Drawings,
    TableCell,
    bars,
    folded,
    number,
    page,
    section,
    table,
)
from monograph.report.quantities import count


def draw_profile(verdict: Verdict, title: str) -> str:
    """Return an SVG with a bar for each part of an update.

    A bar has a mark at the part's best possible time. Next to the bar stands the part's share of the update.
    """
    from matplotlib.figure import Figure

    # Reversed, since a vertical axis begins below.
    parts = [part for part in reversed(PARTS) if verdict.spent.parts[part] > 0]
    with style():
        figure = Figure(figsize=(7.3, 0.7 + 0.34 * len(parts)), layout="constrained")
        axes = figure.add_subplot()
        axes.set_title(title)
        axes.grid(visible=False)
        for y, part in enumerate(parts):
            spent_ms = 1e3 * verdict.spent.parts[part]
            floor_ms = 1e3 * verdict.floors[part]
            colour = ACCENT if part == verdict.bottleneck else MUTED
            axes.barh(y, spent_ms, height=0.62, color=colour)
            axes.plot([floor_ms, floor_ms], [y - 0.4, y + 0.4], color=INK, linewidth=1.6)
            axes.text(
                spent_ms,
                y,
                f"  {verdict.spent.share(part):.0%}",
                va="center",
                fontsize=8,
                color=INK,
            )
        axes.set_yticks(range(len(parts)), parts)
        # In milliseconds, with 12 % of room for the words at the longest bar.
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
    verdict = profile.verdict
    possible_speedup = profile.update_s / max(verdict.floor_s, 1e-12)  # the best time may be 0
    assessment = describe_limit(profile)
    best = verdict.change
    if best:
        assessment += f"; {best.what} is predicted to make it {verdict.gain(best):.2f} × as fast"
    return page(
        kind="Profile",
        title=title,
        headline=f"Limited by {verdict.bottleneck}",
        assessment=f"{assessment[0].upper()}{assessment[1:]}.",
        key_figures=[
            ("ms per update", f"{1e3 * profile.update_s:.3g}"),
            ("tokens/s", count(tokens_per_s)),
            ("micro-steps", str(profile.micro_steps)),
            ("best, ms", f"{1e3 * verdict.floor_s:.3g}"),
            ("possible speedup", f"{possible_speedup:.2g} ×"),
        ],
        drawings=Drawings(),
        sections=[
            section("Where an update's time goes", _part_bars(verdict), full_width=True),
            section("Changes to try", _changes_table(verdict), full_width=True),
            section("Parts of an update", _parts_table(verdict), full_width=True),
            section("Configuration", folded("config.toml", config), full_width=True),
        ],
    )


def describe_limit(profile: Profile) -> str:
    """Return what limits the run, in a sentence without a full stop.

    The sentence says what share of the time could be saved, and what share is spent in kernels whose work
    is unknown.
    """
    verdict = profile.verdict
    unknown_share = 0.0
    if verdict.spent.total_s:
        unknown_share = verdict.unknown_s / verdict.spent.total_s
    unjudged = ""
    if unknown_share > MIN_SAVED_SHARE:
        unjudged = f"; {unknown_share:.0%} of it is work that cannot be counted, and is not judged"
    if verdict.bottleneck == "nothing":
        return f"nothing that could be won back: what can be judged is near its best time as it is set up{unjudged}"
    share = verdict.recoverable[verdict.bottleneck] / profile.update_s
    limit = "empty positions" if verdict.bottleneck == "padding" else verdict.bottleneck
    no_key = "" if verdict.change else "; no key changes that"
    return f"{limit}: {share:.0%} of the time could be won back at most{no_key}{unjudged}"


def largest_bound(bounds: Mapping[Bound, float]) -> str:
    """Return the bound with the most seconds, such as "memory"; "" if there is no bound."""
    return max(bounds, key=lambda bound: bounds[bound]) if bounds else ""


def _part_bars(verdict: Verdict) -> str:
    """Return a table with a bar for each part of an update."""
    spent_s = {part: seconds for part, seconds in verdict.spent.parts.items() if seconds > 0}
    longest_s = max(spent_s.values(), default=1.0)
    rows = []
    for part in PARTS:
        if part not in spent_s:
            continue
        bar = Bar(
            text=f"{verdict.spent.share(part):.0%}",
            share=spent_s[part] / longest_s,
            floor=min(1.0, verdict.floors[part] / longest_s),
        )
        rows.append(BarRow(part, is_highlighted=part == verdict.bottleneck, bars=[bar]))
    note = '<p class="note">The line in a bar is the best time possible here; blue is what limits the run.</p>'
    return bars("Where an update's time goes", ["share of the time"], rows) + note


def _parts_table(verdict: Verdict) -> str:
    """Return a table of the parts: share, time, best time, and what limits most of the part."""
    rows: list[list[TableCell]] = []
    for part in PARTS:
        rows.append(
            [
                part,
                number(verdict.spent.share(part), "{:.1%}"),
                number(1e3 * verdict.spent.parts[part], "{:.3g}"),
                number(1e3 * verdict.floors[part], "{:.3g}"),
                largest_bound(verdict.bounds.get(part, {})),
            ]
        )
    heads = ["part", "share", "ms", "best, ms", "mostly limited by"]
    return table("Parts of an update", heads, rows)


def _changes_table(verdict: Verdict) -> str:
    """Return a table of the changes to try, with their predicted speedups."""
    rows: list[list[TableCell]] = []
    for change in verdict.changes:
        rows.append(
            [
                change.what,
                number(verdict.gain(change), "{:.2f} ×"),
                "same" if change.same_training else "different",
                change.why,
            ]
        )
    heads = ["change", "predicted speedup", "result of training", "why"]
    return table("Changes to try", heads, rows)


# The object of a ladder, or of one of its rungs, as this file's docstring describes them.
Values = Mapping[str, Any]
# An en space, which stands between a bar and its text.
_EN_SPACE = "\u2002"
# A rung's key with the speed that is compared, by the ladder's `ratios_of`. A ladder on a CPU
# compares CPU time, since other programs change the wall time.
SPEED_KEYS = {"wall": "tokens_per_s", "cpu": "tokens_per_cpu_s"}


def draw_ladder(ladder: Values) -> str:
    """Return an SVG with two bars for each rung: tokens per second, and peak memory.

    The bars of the fastest rung are blue.
    """
    from matplotlib.figure import Figure

    rungs = ladder["rungs"]
    best = fastest_rung(ladder)
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
            for y, rung in enumerate(rungs):
                if rung[key] is None:
                    axes.text(
                        0, y, f"{_EN_SPACE}not available here", va="center", fontsize=8, color=MUTED
                    )
                    continue
                axes.barh(y, rung[key], height=0.62, color=ACCENT if rung is best else MUTED)
                axes.text(
                    rung[key],
                    y,
                    f"{_EN_SPACE}{_bar_text(rung, key)}",
                    va="center",
                    fontsize=8,
                    color=INK,
                )
        left.set_yticks(range(len(rungs)), [rung["rung"] for rung in rungs])
        left.invert_yaxis()
        return svg(figure)


def _bar_text(rung: Values, key: str) -> str:
    """Return the text at a rung's bar: its memory; or its speed, and how many times as fast it is as the
    rung that it is compared with.
    """
    if key == "peak_memory_bytes":
        return quantities.memory(rung[key])
    speedup = f" ({rung['times']:.2f} ×)" if rung["times"] else ""
    return f"{rung[key]:,.0f}{speedup}"


def ladder_page(title: str, ladder: Values, config: str) -> str:
    """Return a ladder's page as HTML.

    Args:
        title: the folder's name.
        ladder: the JSON object that its command prints.
        config: the settings that all rungs share, as TOML.
    """
    first = ladder["rungs"][0]
    best = fastest_rung(ladder)
    return page(
        kind="Ladder",
        title=title,
        headline=f"{ladder_gain(ladder):.1f} × as fast as eager",
        assessment=f"{describe_measurement(ladder)}.",
        key_figures=[
            ("parameters", quantities.count(ladder["params"])),
            ("tokens/s, eager", f"{first['tokens_per_s']:,.0f}"),
            ("tokens/s, best", f"{best['tokens_per_s']:,.0f}"),
            ("tokens per rung", quantities.count(ladder["tokens"])),
            ("time", quantities.duration(ladder["wall_s"])),
        ],
        drawings=Drawings(),
        sections=[
            section("Speed and memory", _rung_bars(ladder["rungs"], best), full_width=True),
            section(
                "All numbers",
                table("Rungs of the ladder", LADDER_HEADS, ladder_cells(ladder["rungs"])),
                full_width=True,
            ),
            section("Configuration", folded("config.toml", config), full_width=True),
        ],
    )


def _rung_bars(rungs: Sequence[Values], best: Values) -> str:
    """Return a table with two bars for each rung: speed and memory."""
    keys = ("tokens_per_s", "peak_memory_bytes")
    maxima = {key: max(rung[key] or 0 for rung in rungs) or 1 for key in keys}
    rows = []
    for rung in rungs:
        row_bars = []
        for key in keys:
            if rung[key] is None:
                row_bars.append(Bar("not available here", share=None))
            else:
                row_bars.append(Bar(_bar_text(rung, key), share=rung[key] / maxima[key]))
        rows.append(BarRow(rung["rung"], is_highlighted=rung is best, bars=row_bars))
    return bars("Speed and memory of each rung", ["tokens per second", "peak memory"], rows)


def fastest_rung(ladder: Values) -> Values:
    """Return the rung with the most tokens per second."""
    speed_key = SPEED_KEYS[ladder["ratios_of"]]
    return max(ladder["rungs"], key=lambda rung: rung[speed_key] or 0)


def ladder_gain(ladder: Values) -> float:
    """Return the speed of the fastest rung over the speed of the first rung."""
    speed_key = SPEED_KEYS[ladder["ratios_of"]]
    return float(fastest_rung(ladder)[speed_key] / ladder["rungs"][0][speed_key])


def describe_measurement(ladder: Values) -> str:
    """Return how the rungs were measured, in a sentence without a full stop."""
    clock_note = {"wall": "", "cpu": " (in CPU time)"}[ladder["ratios_of"]]
    return (
        f"Each rung changes one thing; its ratios compare it with the rung it changes{clock_note}. "
        f"All train on the same text with the same seed, {ladder['updates']:,} updates of "
        f"{ladder['tokens_per_update']:,} tokens each, on {ladder['device']}"
    )


LADDER_HEADS = (
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


def ladder_cells(rungs: Sequence[Values]) -> list[list[TableCell]]:
    """Return a row of cells for each rung, under `LADDER_HEADS`.

    The row of a rung that could not run has its name and the reason alone.
    """
    rows: list[list[TableCell]] = []
    for rung in rungs:
        update_s = rung["update_s"]
        size = rung["peak_memory_bytes"]
        loss = rung["train_loss"] if rung["eval_loss"] is None else rung["eval_loss"]
        rows.append(
            [
                rung["rung"],
                number(rung["tokens_per_s"], "{:,.0f}"),
                number(rung["times"], "{:.2f} ×"),
                rung["over"] or "",
                number(None if update_s is None else 1e3 * update_s, "{:,.0f}"),
                ("", None) if size is None else (quantities.memory(size), size),
                number(rung["memory_times"], "{:.2f} ×"),
                number(loss, "{:.3f}"),
                number(rung["compile_s"] or None, "{:.0f}"),  # 0: an eager rung, an empty cell
                number(rung["micro_batch"], "{}"),
                "; ".join([rung["obstacle"] or rung["change"], *rung["notes"]]),
            ]
        )
    return rows
