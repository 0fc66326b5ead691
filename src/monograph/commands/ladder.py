"""`monograph profile --ladder`: what each usual remedy is worth for this model on this machine, one after another."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import Any

from monograph.commands.profile import DEFAULT_ROOT, REPORT, sized, started, warn_if_busy
from monograph.config import Settings
from monograph.device import clock
from monograph.measure.ladder_report import HEADS, draw_ladder, fastest, ladder_page, rows, standing
from monograph.measure.quantities import clock_time
from monograph.measure.theme import themed
from monograph.run.progress import Progress
from monograph.run.results import results_folder
from monograph.session import choices
from monograph.session.ladder import Ladder
from monograph.session.rungs import RUNGS, Climbed, Rung, Way
from monograph.session.summary import standard_json

PICTURE, NUMBERS = "ladder.svg", "ladder.json"


def run(settings: Settings, *, out: Path | None, json: bool) -> int:
    """Climb rung by rung, as `train` would train, and say what each was worth; nothing of a run is written."""
    began = clock()
    with results_folder(out, DEFAULT_ROOT) as folder:
        progress = started()
        ladder = Ladder.of(sized(settings, progress), folder, progress)
        found = _object(ladder, _climbed(ladder, progress), folder)
        found["wall_s"] = clock() - began
        drawing = draw_ladder(found)
        choices.write_whole(folder / PICTURE, themed(drawing.svg))
        choices.write_whole(folder / NUMBERS, jsonlib.dumps(found, indent=1) + "\n")
        choices.write_whole(folder / REPORT, ladder_page(folder.name, found, drawing, ladder.settings.to_toml()))
    _show(found, folder)
    if json:
        print(jsonlib.dumps(found))
    return 0


def _climbed(ladder: Ladder, progress: Progress) -> list[tuple[Rung, Climbed | str]]:
    made, way, began = list[tuple[Rung, Climbed | str]](), Way(), clock()
    for number, rung in enumerate(RUNGS, start=1):
        measured = sum(not isinstance(what, str) for _, what in made)
        left = sum(not ladder.obstacle(each.after(way), each) for each in RUNGS[number - 1 :])
        about = f"   about {clock_time((clock() - began) / measured * left)} left" if measured and left else ""
        progress.line("rung", f"{number} of {len(RUNGS)}   {rung.name}{about}")
        way, climbed = ladder.climb(rung, way, progress)
        made.append((rung, climbed))
        if isinstance(climbed, str):
            progress.line("", f"not here: {climbed}")
    warn_if_busy(progress)
    return made


def _object(ladder: Ladder, climbed: list[tuple[Rung, Climbed | str]], folder: Path) -> dict[str, Any]:
    machine, train = ladder.machine, ladder.settings.train
    found: list[dict[str, Any]] = []
    last: float | None = None
    for rung, what in climbed:
        found.append({"rung": rung.name, "change": rung.change, **_measured(what, last)})
        last = found[-1]["tokens_per_s"] or last
    return {
        "schema": "monograph.ladder/1",
        "device": machine.name,
        "cores": machine.cores,
        "params": ladder.params,
        "updates": ladder.updates,
        "tokens_per_update": int(train.tokens_per_update),
        "tokens": ladder.updates * int(train.tokens_per_update),
        "rungs": found,
        "picture": str(folder / PICTURE),
        "report": str(folder / REPORT),
    }


def _measured(what: Climbed | str, last: float | None) -> dict[str, Any]:
    keys = (
        "tokens_per_s",
        "update_s",
        "cpu_s",
        "peak_memory_bytes",
        "train_loss",
        "compile_s",
        "micro_batch",
        "micro_steps",
    )
    scores = ("times_previous", "update_s_low", "update_s_high", "eval_loss", "eval_bits_per_byte")
    if isinstance(what, str):
        return {"obstacle": what, "notes": [], **dict.fromkeys((*keys, *scores))}
    seconds, held_out = sorted(what.seconds), what.held_out
    return standard_json({
        "obstacle": None, "notes": [*what.notes], **{key: getattr(what, key) for key in keys},
        "times_previous": what.tokens_per_s / last if last else None,
        "update_s_low": seconds[len(seconds) // 4], "update_s_high": seconds[-1 - len(seconds) // 4],
        "eval_loss": held_out.loss if held_out else None,
        "eval_bits_per_byte": held_out.bits_per_byte if held_out else None,
    })  # fmt: skip


def _show(found: dict[str, Any], folder: Path) -> None:
    lines = [[cell if isinstance(cell, str) else cell[0] for cell in row] for row in rows(found["rungs"])]
    heads, lines = HEADS[:-2], [line[:-2] for line in lines]
    widths = [max(len(line[column]) for line in [heads, *lines]) for column in range(len(heads))]
    for line, rung in zip([heads, *lines], [None, *found["rungs"]], strict=True):
        if rung and rung["obstacle"]:
            print(f"{line[0]:<{widths[0]}}   not here: {rung['obstacle']}")
            continue
        numbers = (cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))
        print("   ".join([line[0].ljust(widths[0]), *numbers]))
    first, best = found["rungs"][0], fastest(found)
    print(f"\n{standing(found)}")
    gain = best["tokens_per_s"] / first["tokens_per_s"]
    print(f"fastest   {best['rung']}: {gain:.2f} × as fast as eager; losses are after {found['tokens']:,} tokens")
    print(f"written   {folder / REPORT}, {folder / PICTURE}, {folder / NUMBERS}")
