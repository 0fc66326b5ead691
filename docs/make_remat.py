"""Write the tables and the picture of docs/memory.md from benchmarks/results/remat.json.

Usage: python docs/make_remat.py (tests/graph/test_remat_page.py compares)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from made_parts import with_made_parts

from monograph.report import figures
from monograph.report.figures import themed

DOCS = Path(__file__).resolve().parent
PAGE, PICTURE = DOCS / "memory.md", DOCS / "figures" / "remat.svg"
RESULT = DOCS.parent / "benchmarks" / "results" / "remat.json"
BEGIN = "<!-- made by docs/make_remat.py -->"
Found = dict[str, Any]  # a case of the result file
# The lines of the picture: the way, its name, and its style.
LINES = (
    ("torch, whole", "torch's budget, one graph", figures.WARN, "-"),
    ("spread, whole", "over the blocks, one graph", figures.ACCENT, "-"),
    ("spread, blocks", "over the blocks, a graph for each", figures.ACCENT, (0, (2, 1.5))),
)
# At share 0 every policy is `Remat.Full`, at share 1 `Remat.Off`.
ENDS = {0.0: "full", 1.0: "none"}


def result() -> Found:
    """Return the benchmark's result; all ways have the step without recomputation as their point at
    share 1.
    """
    found: Found = json.loads(RESULT.read_text())
    even = {"median": 1.0, "low": 1.0, "high": 1.0}
    none = {
        "name": "none",
        "scope": "whole",
        "label": "none, whole",
        "share": 1.0,
        "recomputed_flops": 0.0,
    }
    found["cases"].append(
        {**none, **found["none"], "time_over_none": {"cpu_s": even, "wall_s": even}}
    )
    return found


def at(found: Found, label: str, share: float) -> Found:
    """Return the case of a way at a share."""
    name, scope = label.split(", ")
    names = ("none",) if share == 1 else (name, ENDS.get(share) if name != "torch" else None)
    return next(
        case
        for case in found["cases"]
        if case["share"] == share and case["name"] in names and case["scope"] == scope
    )


def budgets(found: Found) -> str:
    """Return peak MiB, FLOPs of recomputed products and CPU time of each way at each share."""
    labels = ("torch, whole", "spread, whole", "even, blocks", "spread, blocks")
    heads = [label.replace("whole", "one graph") for label in labels]
    lines = [f"| share | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    for share in sorted({case["share"] for case in found["cases"]}, reverse=True):
        cells = (cell(at(found, label, share)) for label in labels)
        lines.append(f"| {share:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(case: Found) -> str:
    """Return `253.5 MiB, +12 %, 1.05 ×`."""
    return (
        f"{case['peak_bytes'] / 2**20:.1f} MiB, +{100 * case['recomputed_flops']:.1f} %, "
        f"{case['time_over_none']['cpu_s']['median']:.2f} ×"
    )


def policies(found: Found) -> str:
    """Return peak and CPU time of the named policies, over those of a step without recomputation."""
    lines = ["| `train.remat` | one graph | a graph for each block |", "|---|---|---|"]
    for name, share in (("none", 1.0), ("pointwise", 1.0), ("full", 0.0)):
        those = [case for case in found["cases"] if case["name"] == name and case["share"] == share]
        those.sort(key=lambda case: ("whole", "blocks").index(case["scope"]))
        lines.append(f"| `{name}` | {' | '.join(cell(case) for case in those)} |")
    return "\n".join(lines)


def drawn(found: Found) -> str:
    """Draw bytes against the share, and against the recomputed FLOPs."""
    from matplotlib.figure import Figure

    with figures.style():
        figure = Figure(figsize=(7.3, 3.1), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        shares = sorted({case["share"] for case in found["cases"]})
        for label, words, colour, style in LINES:
            points = [at(found, label, share) for share in shares]
            mebibytes = [case["peak_bytes"] / 2**20 for case in points]
            marks: Any = {
                "color": colour,
                "linestyle": style,
                "linewidth": 1.8,
                "marker": "o",
                "markersize": 3.5,
            }
            left.plot(shares, mebibytes, label=words, **marks)
            right.plot(
                [100 * case["recomputed_flops"] for case in points],
                mebibytes,
                **marks | {"linewidth": 0.9},
            )
        left.set_title("Peak of a micro-step, MiB")
        left.set_xlabel("share of the bytes that may be kept", fontsize=8, loc="right")
        right.set_xlabel("FLOPs of products computed again, %", fontsize=8, loc="right")
        left.set_ylim(0, None)
        left.legend(frameon=False, fontsize=8, loc="lower right")
        return themed(figures.svg(figure))


def main() -> None:
    """Rewrite the text between the markers, and the picture."""
    found = result()
    tables = (budgets(found), policies(found))
    page = with_made_parts(PAGE.read_text(encoding="utf-8"), BEGIN, tables)
    PAGE.write_text(page, encoding="utf-8")
    PICTURE.write_text(drawn(found), encoding="utf-8")


if __name__ == "__main__":
    main()
