"""An SVG whose colours are those of the reader's theme, light or dark."""

from __future__ import annotations

from monograph.measure.look import ACCENT, GRID, INK, MUTED, WARN

# The colour that is drawn with, its name, and what stands for it on a dark page.
_COLOURS = (
    (INK, "ink", "#e9eaee"),
    (MUTED, "muted", "#9a9da8"),
    (GRID, "rule", "#30333a"),
    (ACCENT, "accent", "#84a9ff"),
    (WARN, "warn", "#ff9a6b"),
)


def themed(svg: str) -> str:
    """A figure drawn by matplotlib in the colours of `monograph.measure.look`, with a transparent background."""
    there = [each for each in _COLOURS if each[0] in svg]
    light = " ".join(f"--{name}: {colour};" for colour, name, _ in there)
    dark = " ".join(f"--{name}: {colour};" for _, name, colour in there)
    for colour, name, _ in there:
        svg = svg.replace(colour, f"var(--{name})")
    svg = svg.replace("'DejaVu Sans'", "system-ui, sans-serif")
    style = f"<style>svg {{ {light} }} @media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}</style>"
    head = svg.index(">") + 1
    return svg[:head] + style + svg[head:]
