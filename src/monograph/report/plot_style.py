"""Style figures for a reader's light or dark theme, and turn them into files."""

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Each role has a colour of its own, so that a page can replace it by the page's colour in an SVG.
INK, MUTED, GRID, ACCENT, WARN, PAPER = "#1c1d21", "#6e7079", "#e4e5ea", "#2457c5", "#c2460e", "#fffffe"
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans", "font.size": 9, "text.color": INK,
    "axes.edgecolor": GRID, "axes.labelcolor": MUTED, "axes.facecolor": "none", "axes.axisbelow": True,
    "axes.titlecolor": INK, "axes.titlesize": 10, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.titlepad": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False,
    "axes.grid": True, "axes.grid.axis": "y", "grid.color": GRID, "grid.linewidth": 0.7,
    "xtick.color": MUTED, "xtick.labelsize": 8, "xtick.major.size": 3, "xtick.major.width": 0.7,
    "ytick.color": MUTED, "ytick.labelsize": 8, "ytick.major.size": 0,
    "lines.solid_capstyle": "round", "lines.solid_joinstyle": "round",
    "figure.facecolor": PAPER, "savefig.facecolor": PAPER,
    "svg.fonttype": "none", "svg.hashsalt": "monograph",  # equal runs give equal files
}  # fmt: skip


@contextmanager
def style() -> Iterator[None]:
    """Draw the figures of the block in this project's style."""
    import matplotlib  # imported here, as it takes a good part of a second, and most commands draw nothing

    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="constrained_layout not applied")  # labels can fill an early figure
        matplotlib.rcdefaults()  # a person's own matplotlibrc must not change these pages
        matplotlib.rcParams.update(STYLE)
        yield


def png(figure: "Figure", dpi: int) -> bytes:
    """Return a figure as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()


def svg(figure: "Figure") -> str:
    """Return a figure as an SVG element, with a transparent background and no metadata."""
    buffer = io.StringIO()
    none = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(buffer, format="svg", transparent=True, metadata=none)
    text = buffer.getvalue()
    return text[text.index("<svg") :]


# (colour in a drawing, its name, its replacement on a dark page)
COLOURS = (
    (INK, "ink", "#e9eaee"),
    (MUTED, "muted", "#9a9da8"),
    (GRID, "rule", "#30333a"),
    (ACCENT, "accent", "#84a9ff"),
    (WARN, "warn", "#ff9a6b"),
)


def themed(svg: str) -> str:
    """Return an SVG with this file's colours replaced by variables, which follow the reader's light or dark theme."""
    there = [pair for pair in COLOURS if pair[0] in svg]
    light = " ".join(f"--{name}: {colour};" for colour, name, _ in there)
    dark = " ".join(f"--{name}: {colour};" for _, name, colour in there)
    for colour, name, _ in there:
        svg = svg.replace(colour, f"var(--{name})")
    svg = svg.replace("'DejaVu Sans'", "system-ui, sans-serif")
    style = f"<style>svg {{ {light} }} @media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}</style>"
    head = svg.index(">") + 1
    return svg[:head] + style + svg[head:]
