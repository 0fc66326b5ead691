"""The picture of a profile: how long each part of an update takes, and the least it could."""

from __future__ import annotations

from monograph.measure.bottleneck import Verdict
from monograph.measure.figures import Drawing
from monograph.measure.intervals import PARTS
from monograph.measure.look import ACCENT, INK, MUTED, style, svg


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
