"""Style figures, and turn them into PNG or SVG files.

A figure follows the reader's light or dark theme if it is an SVG that went through `themed`.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# A function that draws one chart into matplotlib axes.
Panel = Callable[["Axes"], None]

# `themed` recognises by its colour alone what an element of an SVG is: text, a grid line, or an accent. So
# each of these colours has one purpose. For the same reason PAPER, the background, is not exactly white.
INK = "#1c1d21"
MUTED = "#6e7079"
GRID = "#e4e5ea"
ACCENT = "#2457c5"
WARN = "#c2460e"
PAPER = "#fffffe"
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.facecolor": "none",
    "axes.axisbelow": True,
    "axes.titlecolor": INK,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": MUTED,
    "xtick.labelsize": 8,
    "xtick.major.size": 3,
    "xtick.major.width": 0.7,
    "ytick.color": MUTED,
    "ytick.labelsize": 8,
    "ytick.major.size": 0,
    "lines.solid_capstyle": "round",
    "lines.solid_joinstyle": "round",
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "svg.fonttype": "none",  # text stays text, which `themed` can give the page's font
    "svg.hashsalt": "monograph",  # makes the element ids of an SVG reproducible
}


@contextmanager
def style() -> Iterator[None]:
    """Apply this project's style to all figures that are drawn inside the `with` block."""
    # The import takes a good part of a second, and most commands draw nothing.
    import matplotlib

    with matplotlib.rc_context(), warnings.catch_warnings():
        # Early in a run, the labels of a figure may take so much room that matplotlib cannot arrange it. The
        # figure is still readable.
        warnings.filterwarnings("ignore", message="constrained_layout not applied")
        # A person's own matplotlibrc must not change these figures.
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


def png(figure: Figure, dpi: int) -> bytes:
    """Return a figure as the bytes of a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()


def svg(figure: Figure) -> str:
    """Return a figure as an SVG element, with a transparent background and no metadata."""
    buffer = io.StringIO()
    no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(buffer, format="svg", transparent=True, metadata=no_metadata)
    text = buffer.getvalue()
    # An element inside a page has no XML declaration and no document type.
    return text[text.index("<svg") :]


class ThemeColour(NamedTuple):
    """A colour of figures.

    Attributes:
        light: the colour on a light page, and in a figure that is not themed.
        variable: the name of its CSS variable.
        dark: the colour on a dark page.
    """

    light: str
    variable: str
    dark: str


COLOURS = (
    ThemeColour(light=INK, variable="ink", dark="#e9eaee"),
    ThemeColour(light=MUTED, variable="muted", dark="#9a9da8"),
    ThemeColour(light=GRID, variable="rule", dark="#30333a"),
    ThemeColour(light=ACCENT, variable="accent", dark="#84a9ff"),
    ThemeColour(light=WARN, variable="warn", dark="#ff9a6b"),
)


def themed(svg_text: str) -> str:
    """Return an SVG that follows the reader's light or dark theme.

    CSS variables replace the colours of `COLOURS`, and the system's font replaces DejaVu Sans.
    """
    used_colours = [colour for colour in COLOURS if colour.light in svg_text]
    light = " ".join(f"--{colour.variable}: {colour.light};" for colour in used_colours)
    dark = " ".join(f"--{colour.variable}: {colour.dark};" for colour in used_colours)
    for colour in used_colours:
        svg_text = svg_text.replace(colour.light, f"var(--{colour.variable})")
    svg_text = svg_text.replace("'DejaVu Sans'", "system-ui, sans-serif")
    style_tag = f"<style>svg {{ {light} }} @media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}</style>"
    after_svg_tag = svg_text.index(">") + 1
    return svg_text[:after_svg_tag] + style_tag + svg_text[after_svg_tag:]


class Picture(NamedTuple):
    """A finished figure.

    Attributes:
        name: the file's name without ".png".
        png: the file's bytes.
    """

    name: str
    png: bytes


def single_picture(name: str, panel: Panel, size: tuple[float, float]) -> Picture:
    """Return a figure of one panel; `size` is its width and height in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    panel(figure.add_subplot())
    return Picture(name, png(figure, dpi=200))
