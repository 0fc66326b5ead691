"""Write the tables and the picture of docs/ensemble.md from benchmarks/results.

Usage: python docs/make_ensemble.py (tests/ensemble/test_page.py compares)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from made_parts import with_made_parts

from monograph.report import figures
from monograph.report.figures import themed

DOCS = Path(__file__).resolve().parent
PAGE, PICTURE = DOCS / "ensemble.md", DOCS / "figures" / "crossover.svg"
RESULTS = DOCS.parent / "benchmarks" / "results"
BEGIN = "<!-- made by docs/make_ensemble.py -->"
Found = dict[str, Any]


def result(name: str) -> Found:
    """Return a result file's content."""
    found: Found = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def peers(found: Found) -> str:
    """Return how many times as fast as each other way the ensemble is, one line per case."""
    others = list(found["cases"][0]["faster_than"])
    lines = [f"| models | threads | {' | '.join(others)} |", "|---" * (2 + len(others)) + "|"]
    for case in found["cases"]:
        ratios = (
            ways["cpu" if case["threads"] == 1 else "wall"] for ways in case["faster_than"].values()
        )
        cells = (f"{r['median']:.2f} ({r['low']:.2f}-{r['high']:.2f})" for r in ratios)
        name = (
            f"{case['name']}, N = {case['members']}, {'training' if case['train'] else 'inference'}"
        )
        lines.append(f"| {name} | {case['threads']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def crossover(found: Found) -> str:
    """Return the gain of each number of members at once at each size, the recommended one in bold."""
    widths = list(found["cases"][0]["gain"])
    lines = [f"| model | parameters | {' | '.join(f'{width} at once' for width in widths)} |"]
    lines.append("|---" * (2 + len(widths)) + "|")
    for case in found["cases"]:
        cells = [
            f"**{gain:.2f} ×**" if width == str(case["chosen"]) else f"{gain:.2f} ×"
            for width, gain in case["gain"].items()
        ]
        size = case["size"]
        lines.append(f"| {size}-{2 * size}-{size} | {case['parameters']:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def drawn(found: Found) -> str:
    """Draw the gain against the size of a member: all in one graph, and as recommended."""
    from matplotlib.figure import Figure

    with figures.style():
        figure = Figure(figsize=(6.2, 3.2), layout="constrained")
        axes = figure.subplots()
        cases = found["cases"]
        sizes = [case["parameters"] for case in cases]
        axes.axhline(1, color=figures.MUTED, linewidth=0.8)
        widest = max(cases[0]["gain"], key=int)
        marks: Any = {"color": figures.WARN, "linewidth": 1.8, "marker": "o", "markersize": 3.5}
        axes.plot(
            sizes,
            [case["gain"][widest] for case in cases],
            label=f"all {widest} in one graph",
            **marks,
        )
        best = [case["gain"][str(case["chosen"])] for case in cases]
        marks |= {
            "color": figures.ACCENT,
            "linestyle": "none",
            "marker": "D",
            "markersize": 6,
            "fillstyle": "none",
        }
        axes.plot(sizes, best, label="recommended, and how many at once", **marks)
        for case, gain in zip(cases, best, strict=True):
            place = (case["parameters"], gain)
            axes.annotate(
                str(case["chosen"]),
                place,
                (0, 7),
                textcoords="offset points",
                ha="center",
                fontsize=8,
            )
        axes.set_xscale("log")
        axes.set_yscale("log")
        ticks = [0.5, 1, 2, 4, 8, 16]
        axes.set_yticks(ticks, [f"{tick:g} ×" for tick in ticks])
        axes.minorticks_off()
        axes.set_title(f"Faster than {found['settings']['members']} members one after another")
        axes.set_xlabel("parameters of a member", fontsize=8, loc="right")
        axes.legend(frameon=False, fontsize=8)
        return themed(figures.svg(figure))


def made() -> tuple[str, str]:
    """Return the page with its tables, and the picture."""
    tables = peers(result("ensemble_peers")), crossover(result("crossover"))
    page = with_made_parts(PAGE.read_text(encoding="utf-8"), BEGIN, tables)
    return page, drawn(result("crossover"))


def main() -> None:
    """Rewrite the text between the markers, and the picture."""
    page, picture = made()
    PAGE.write_text(page, encoding="utf-8")
    PICTURE.write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
