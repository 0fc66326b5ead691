"""The picture and the page of a profile: where an update's time goes, what binds it and what to change."""

from __future__ import annotations

from collections.abc import Mapping

from monograph.profiling.bottleneck import NOTHING, Bound, Verdict
from monograph.profiling.intervals import PARTS
from monograph.profiling.profiler import Profile
from monograph.report.figures import Drawing
from monograph.report.page import Cell, folded, page, section, table
from monograph.report.plot_style import ACCENT, INK, MUTED, style, svg
from monograph.report.quantities import count


def draw_profile(found: Verdict, title: str) -> Drawing:
    """A bar for each part, a mark at its floor, its share beside it."""
    from matplotlib.figure import Figure

    parts = [part for part in reversed(PARTS) if found.spent.parts[part] > 0]
    with style():
        figure = Figure(figsize=(7.3, 0.7 + 0.34 * len(parts)), layout="constrained")
        axes = figure.add_subplot()
        axes.set_title(title)
        axes.grid(visible=False)
        for place, part in enumerate(parts):
            taken, least = 1e3 * found.spent.parts[part], 1e3 * found.floors[part]
            axes.barh(place, taken, height=0.62, color=ACCENT if part == found.binds else MUTED)
            axes.plot([least, least], [place - 0.4, place + 0.4], color=INK, linewidth=1.6)
            axes.text(taken, place, f"  {found.spent.share(part):.0%}", va="center", fontsize=8, color=INK)
        axes.set_yticks(range(len(parts)), parts)
        axes.set_xlim(0, 1.12e3 * max(found.spent.parts.values()))
        axes.set_xlabel("ms of an update; line: the floor; blue: what binds it")
        return Drawing("profile", svg(figure))


def profile_page(title: str, found: Profile, tokens_per_s: float, drawing: Drawing, config: str) -> str:
    """The page as HTML.

    Args:
        title: the folder's name.
        found: what was seen.
        tokens_per_s: of the run.
        drawing: of it.
        config: the run's settings as TOML.
    """
    judged, faster = found.verdict, found.update_s / max(found.verdict.floor_s, 1e-12)
    best = judged.change
    figures = [
        ("ms an update", f"{1e3 * found.update_s:.3g}"),
        ("tokens/s", count(tokens_per_s)),
        ("micro-steps", str(found.micro_steps)),
        ("floor, ms", f"{1e3 * judged.floor_s:.3g}"),
        ("floor over it", f"{faster:.2g} ×"),
    ]
    return page(
        title=title,
        headline=f"Bound by {judged.binds}",
        standing=f"{said(found)}"
        + (f"; {best.what} is predicted to make it {judged.gain(best):.2f} × as fast" if best else ""),
        figures=figures,
        drawings=[drawing],
        sections=[
            section("Parts of an update", _parts(found)),
            section("What may be changed", _changes(found)),
            section("The run", folded("config.toml", config)),
        ],
    )


def said(found: Profile) -> str:
    """What binds the run and how much of its time that is, and how much of it nobody can judge; without a full stop."""
    judged = found.verdict
    unknown = judged.unknown_s / judged.spent.total_s if judged.spent.total_s else 0.0
    unjudged = f"; {unknown:.0%} of it is work that cannot be counted, and is not judged" if unknown > NOTHING else ""
    if judged.binds == "nothing":
        return f"nothing that could be won back: what can be judged is near its floor as it is set up{unjudged}"
    share = judged.recoverable[judged.binds] / found.update_s
    what = "empty positions" if judged.binds == "padding" else judged.binds
    none = "" if judged.change else "; no key changes that"
    return f"{what}: {share:.0%} of the time could be won back at most{none}{unjudged}"


def mostly(bounds: Mapping[Bound, float]) -> str:
    """What most of the seconds are bound by; "" of none."""
    return max(bounds, key=lambda kind: bounds[kind]) if bounds else ""


def _parts(found: Profile) -> str:
    judged = found.verdict
    rows: list[list[Cell]] = []
    for part in PARTS:
        share, taken, least = judged.spent.share(part), 1e3 * judged.spent.parts[part], 1e3 * judged.floors[part]
        numbers: list[Cell] = [(f"{share:.1%}", share), (f"{taken:.3g}", taken), (f"{least:.3g}", least)]
        rows.append([part, *numbers, mostly(judged.bounds.get(part, {}))])
    return table("Parts of an update", ["part", "share", "ms", "floor, ms", "mostly bound by"], rows)


def _changes(found: Profile) -> str:
    judged = found.verdict
    rows: list[list[Cell]] = [
        [change.what, (f"{judged.gain(change):.2f} ×", judged.gain(change)),
         "the same" if change.same_training else "another", change.why]
        for change in judged.changes
    ]  # fmt: skip
    return table("What may be changed", ["change", "predicted", "training", "as"], rows)
