"""The report of a sweep: its figures as PNG files and one HTML page that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from monograph.measure import quantities
from monograph.measure.page import Cell, config_of, number, page, section, table
from monograph.measure.report import write_whole
from monograph.measure.sweep_figures import Curve, Setting, draw_sweep


def write_sweep_report(
    folder: Path, found: Mapping[str, Any], settings: Sequence[Setting], curves: Sequence[Curve], how: str
) -> None:
    """Write `folder`/figures/*.png and `folder`/report.html, each whole or not at all.

    Args:
        folder: the sweep's.
        found: what `monograph sweep --json` prints.
        settings: as `monograph.measure.sweep_figures` describes them.
        curves: of the members.
        how: a sentence that says what "tied" means.

    Raises:
        DiskFull: no space for them.
    """
    best = found["best"]
    unit = best["unit"] if best else "nats"
    drawings = draw_sweep(settings, curves, "eval_bits_per_byte" if unit == "bits/byte" else "eval_loss", unit)
    (folder / "figures").mkdir(exist_ok=True)
    for drawing in drawings:
        write_whole(folder / "figures" / f"{drawing.name}.png", drawing.png)
    text = page(
        title=folder.name,
        headline=_headline(best),
        standing=how,
        figures=_key_figures(found),
        drawings=drawings,
        sections=[
            section("Settings", _settings(settings, unit)),
            section("Members", _members(found["members"]), config_of(folder)),
        ],
    )
    write_whole(folder / "report.html", text.encode())


def _headline(best: Mapping[str, Any] | None) -> str:
    if best is None:
        return "Every member diverged"
    knobs = ", ".join(f"{key.rpartition('.')[2]} {_text(value)}" for key, value in best["knobs"].items())
    return f"{best['mean']:.3f} {best['unit']}{' at ' + knobs if knobs else ''}"


def _key_figures(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    rate, spent = found["tokens_per_s"], found["wall_s"]
    known = [
        ("members", str(len(found["members"]))),
        ("diverged", str(sum(member["diverged"] is not None for member in found["members"]))),
        ("time", quantities.duration(spent) if spent else ""),
        ("tokens/s, all", quantities.count(rate) if rate else ""),
    ]
    return [(name, value) for name, value in known if value]


def _settings(settings: Sequence[Setting], unit: str) -> str:
    """Means over seeds, and how each stands to the best."""
    rows: list[list[Cell]] = []
    for each in settings:
        lost, of = each["values"].count(None), len(each["values"])
        score, error = (number(each[key], "{:.4f}") for key in ("mean", "standard_error"))
        rows.append([score, error, (f"{lost} of {of}", lost), each["standing"]])
    heads = [unit, "standard error", "diverged", "standing"]
    return _with_knobs("Settings of the sweep", [each["knobs"] for each in settings], heads, rows)


def _members(members: Sequence[Mapping[str, Any]]) -> str:
    rows: list[list[Cell]] = []
    for each in members:
        at = each["diverged"]
        scores = [number(each.get(key), "{:.4f}") for key in ("eval_bits_per_byte", "eval_loss", "train_loss")]
        rows.append([*scores, ("", None) if at is None else (f"at update {at:,}", at), each.get("run", "")])
    heads = ["bits per byte", "held-out, nats", "training, nats", "diverged", "run"]
    return _with_knobs("Members of the sweep", [each["knobs"] for each in members], heads, rows)


def _with_knobs(
    name: str, knobs: Sequence[Mapping[str, Any]], heads: Sequence[str], rows: Sequence[Sequence[Cell]]
) -> str:
    """A table whose first columns are the knobs."""
    keys = list(dict.fromkeys(key for each in knobs for key in each))
    cells = ([_knob(each.get(key)) for key in keys] for each in knobs)
    whole = [[*of_knobs, *rest] for of_knobs, rest in zip(cells, rows, strict=True)]
    return table(name, [*(key.rpartition(".")[2] for key in keys), *heads], whole)


def _knob(value: Any) -> Cell:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return (_text(value), value) if is_number else "" if value is None else str(value)


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
