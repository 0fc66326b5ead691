"""The report of a run: figures as PNG files and one HTML page that needs nothing but itself."""

from __future__ import annotations

import errno
import html
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from monograph.errors import DiskFull
from monograph.measure import quantities
from monograph.measure.figures import Drawing, Row, draw
from monograph.measure.look import ACCENT, GRID, INK, MUTED, WARN
from monograph.measure.page import PAGE

Summary = Mapping[str, Any]

# Keys of a summary that a person reads first, with their name and how their value is written
_FIGURES: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("params", "parameters", quantities.count),
    ("tokens", "tokens", quantities.count),
    ("wall_s", "time", quantities.duration),
    ("tokens_per_s", "tokens/s", quantities.count),
    ("mfu", "of peak FLOP/s", lambda value: f"{100 * value:.0f} %"),
    ("peak_memory_bytes", "peak memory", quantities.gibibytes),
    ("train_loss", "loss, nats", lambda value: f"{value:.3f}"),
    ("eval_loss", "held-out, nats", lambda value: f"{value:.3f}"),
)
_NAMES = {
    "update": "updates",
    "eval_bits_per_byte": "held-out, bits per byte",
    "compile_s": "tracing and compiling",
    "graph_breaks": "graph breaks",
    "dtype": "precision",
}
_COLOURS = {INK: "--ink", MUTED: "--muted", GRID: "--rule", ACCENT: "--accent", WARN: "--warn"}


def write_report(
    run_folder: Path,
    summary: Summary,
    metrics: Sequence[Row],
    yardsticks: Mapping[str, float],
    samples: Sequence[tuple[float, str]],
) -> None:
    """Write `run_folder`/figures/*.png (sheet.png has them all) and `run_folder`/report.html, each whole or not at all.

    summary: what `monograph train --json` prints; keys it lacks are left out, keys unknown here go into the table.
    metrics: rows as `monograph.measure.figures` describes them.   yardsticks: bits per byte by name.
    samples: (share of the run, 0 to 1; text the model wrote then), shown side by side.

    Raises DiskFull.
    """
    headline, standing = _headline(summary), _standing(summary, yardsticks)
    sheet, drawings = draw(metrics, yardsticks, headline, _subtitle(run_folder, summary))
    figures = run_folder / "figures"
    figures.mkdir(exist_ok=True)
    write_whole(figures / "sheet.png", sheet)
    for drawing in drawings:
        write_whole(figures / f"{drawing.name}.png", drawing.png)
    page = PAGE.substitute(
        title=escaped(run_folder.name),
        headline=escaped(headline),
        standing=escaped(standing),
        figures=_key_figures(summary),
        drawings="\n".join(inline(drawing) for drawing in drawings),
        samples=_samples(samples),
        table=_table(summary),
        config=config_of(run_folder),
    )
    write_whole(run_folder / "report.html", page.encode())


def _headline(summary: Summary) -> str:
    bits = summary.get("eval_bits_per_byte")
    if bits is not None:
        return f"{bits:.2f} bits per byte on text it has not seen"
    loss = summary.get("train_loss")
    return "A training run" if loss is None else f"{loss:.2f} nats per token in training"


def _standing(summary: Summary, yardsticks: Mapping[str, float]) -> str:
    """One sentence: which yardsticks the run is below, and which it is not."""
    bits = summary.get("eval_bits_per_byte")
    if bits is None or not yardsticks:
        return ""
    ordered = sorted(yardsticks.items(), key=lambda item: -item[1])
    beaten = [f"{name} ({value:.2f})" for name, value in ordered if bits < value]
    ahead = [f"{name} ({value:.2f})" for name, value in ordered if bits >= value]
    words = [f"below {_listed(beaten)}" if beaten else "", f"not yet below {_listed(ahead)}" if ahead else ""]
    sentence = "; ".join(filter(None, words))
    return f"{sentence[0].upper()}{sentence[1:]}, all on the same text."


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _subtitle(run_folder: Path, summary: Summary) -> str:
    parts = [
        f"{written(summary[key])} {name}".removesuffix(" time")
        for key, name, written in _FIGURES[:4]
        if summary.get(key) is not None
    ]
    return "  ·  ".join(
        [run_folder.name, *map(str, filter(None, [summary.get("device"), summary.get("dtype")])), *parts]
    )


def _key_figures(summary: Summary) -> str:
    known = [(name, written(summary[key])) for key, name, written in _FIGURES if summary.get(key) is not None]
    return "\n".join(f"<div><dt>{name}</dt><dd>{escaped(value)}</dd></div>" for name, value in known)


def _table(summary: Summary) -> str:
    known = {key for key, _, _ in _FIGURES} | {"schema", "run"}  # a program's concern, and the title
    if not summary.get("compile_s"):
        known.add("compile_s")
    rest = [(key, value) for key, value in summary.items() if key not in known and value is not None]
    cells = [_cell(key, value) for key, value in rest]
    rows = "\n".join(f"<tr><th>{escaped(name)}</th><td>{escaped(text)}</td></tr>" for name, text in cells)
    return f"<table>{rows}</table>" if rows else ""


def _cell(key: str, value: Any) -> tuple[str, str]:
    """A key and its value in words; the key's ending says the unit."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        name, text = key, str(value)
    elif key.endswith("_s"):
        name, text = key.removesuffix("_s"), quantities.duration(value)
    elif key.endswith("_bytes"):
        name, text = key.removesuffix("_bytes"), quantities.gibibytes(value)
    else:
        name, text = key, f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
    return _NAMES.get(key, name.replace("_", " ")), text


def _samples(samples: Sequence[tuple[float, str]]) -> str:
    if not samples:
        return ""
    blocks = "\n".join(
        f"<figure><figcaption>after {100 * share:.0f} %</figcaption><pre>{escaped(text)}</pre></figure>"
        for share, text in samples
    )
    return f'<section><h2>What it writes, from the same prompt</h2><div class="samples">{blocks}</div></section>'


def config_of(folder: Path) -> str:
    """A run's config.toml, folded up; nothing where it has none."""
    config = folder / "config.toml"
    if not config.exists():
        return ""
    text = escaped(config.read_text(encoding="utf-8"))
    return f"<details><summary>config.toml</summary><pre>{text}</pre></details>"


def inline(drawing: Drawing) -> str:
    """The figure as SVG inside the page, its colours replaced by the page's, which know light and dark."""
    svg = drawing.svg.replace("DejaVu Sans", "system-ui")
    for colour, variable in _COLOURS.items():
        svg = svg.replace(colour, f"var({variable})")
    # Files share the names of their clip paths; on one page each needs its own
    for old in ('id="', "url(#", 'href="#'):
        svg = svg.replace(old, f"{old}{drawing.name}-")
    return f'<figure class="{drawing.name}">{svg}</figure>'


def escaped(text: str) -> str:
    """Safe inside HTML; control characters, which HTML forbids, become a dot."""
    return html.escape("".join(c if c.isprintable() or c in "\n\t" else "·" for c in text))


def write_whole(path: Path, content: bytes) -> None:
    """Write a file whole or not at all; raises DiskFull."""
    temporary = path.with_name(f".{path.name}.partial")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            raise DiskFull(f"cannot write {path}: {error.strerror}; the run itself is complete and saved") from error
        raise
