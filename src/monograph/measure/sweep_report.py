"""The report of a sweep: its figures as PNG files and one HTML page that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from monograph.measure import quantities
from monograph.measure.page import PAGE
from monograph.measure.report import config_of, escaped, inline, write_whole
from monograph.measure.sweep_figures import Curve, Setting, draw_sweep


def write_sweep_report(
    folder: Path, found: Mapping[str, Any], settings: Sequence[Setting], curves: Sequence[Curve], told: Sequence[str]
) -> None:
    """Write `folder`/figures/*.png and `folder`/report.html, each whole or not at all.

    Args:
        folder: the sweep's.
        found: what `monograph sweep --json` prints.
        settings: as `monograph.measure.sweep_figures` describes them.
        curves: of the members.
        told: the table as a person reads it, and a sentence that says what it means.

    Raises:
        DiskFull: no space for them.
    """
    best = found["best"]
    unit = best["unit"] if best else "nats"
    drawings = draw_sweep(settings, curves, "eval_bits_per_byte" if unit == "bits/byte" else "eval_loss", unit)
    (folder / "figures").mkdir(exist_ok=True)
    for drawing in drawings:
        write_whole(folder / "figures" / f"{drawing.name}.png", drawing.png)
    page = PAGE.substitute(
        title=escaped(folder.name),
        headline=escaped(_headline(best)),
        standing=escaped(told[-1]),
        figures=_key_figures(found),
        drawings="\n".join(inline(drawing) for drawing in drawings),
        samples="",
        table=f"<pre>{escaped(chr(10).join(told[:-1]))}</pre>",
        config=config_of(folder),
    )
    write_whole(folder / "report.html", page.encode())


def _headline(best: Mapping[str, Any] | None) -> str:
    if best is None:
        return "Every member diverged"
    knobs = ", ".join(f"{key.rpartition('.')[2]} {_text(value)}" for key, value in best["knobs"].items())
    return f"{best['mean']:.3f} {best['unit']}{' at ' + knobs if knobs else ''}"


def _key_figures(found: Mapping[str, Any]) -> str:
    rate, spent = found["tokens_per_s"], found["wall_s"]
    known = [
        ("members", str(len(found["members"]))),
        ("diverged", str(sum(member["diverged"] is not None for member in found["members"]))),
        ("time", quantities.duration(spent) if spent else ""),
        ("tokens/s, all", quantities.count(rate) if rate else ""),
    ]
    return "\n".join(f"<div><dt>{name}</dt><dd>{escaped(value)}</dd></div>" for name, value in known if value)


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
