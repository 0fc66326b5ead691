"""`monograph profile --ladder`: measure what each usual way to save time or memory is worth, one after another."""

import json as jsonlib
from pathlib import Path
from typing import Any, NamedTuple

from monograph.commands.profile import DEFAULT_ROOT, REPORT, planned, started, warn_if_busy
from monograph.config import Settings
from monograph.device import clock
from monograph.report.plot_style import themed
from monograph.report.profile_report import HEADS, SPEED, draw_ladder, fastest, gain, ladder_page, rows, standing
from monograph.report.quantities import clock_time
from monograph.run.folder import standard_json
from monograph.run.progress import Progress
from monograph.run.writing import results_folder, write_whole
from monograph.session.ladder import RUNGS, Climbed, Ladder, Rung, Way

PICTURE, NUMBERS = "ladder.svg", "ladder.json"
SHOWN = ("rung", "tokens/s", "speed", "peak memory", "memory", "loss", "compiling, s")  # the columns on a terminal


def run(settings: Settings, *, out: Path | None, json: bool) -> None:
    """Train and measure one rung after another, as `train` would, and print the gains; no run is written."""
    began = clock()
    with results_folder(out, DEFAULT_ROOT) as folder:
        progress = started()
        ladder = Ladder.of(planned(settings, progress), folder, progress)
        result = _object(ladder, _climbed(ladder, progress), folder)
        result["wall_s"] = clock() - began
        drawing = draw_ladder(result)
        write_whole(folder / PICTURE, themed(drawing.svg))
        write_whole(folder / NUMBERS, jsonlib.dumps(result, indent=1) + "\n")
        write_whole(folder / REPORT, ladder_page(folder.name, result, drawing, ladder.plan.settings.to_toml()))
    _show(result, folder)
    if json:
        print(jsonlib.dumps(result))


class Climb(NamedTuple):
    """A rung, the name of the rung it is compared with ("" for the first), and its measurements or its obstacle."""

    rung: Rung
    over: str
    outcome: Climbed | str


def _climbed(ladder: Ladder, progress: Progress) -> list[Climb]:
    made, stack, began = list[Climb](), {"": Way()}, clock()
    for number, rung in enumerate(RUNGS, start=1):
        over = rung.over if rung.over in stack else [*stack][-1]
        measured = sum(not isinstance(climb.outcome, str) for climb in made)
        left = sum(not ladder.obstacle(later.after(stack[over]), later) for later in RUNGS[number - 1 :])
        about = f"   about {clock_time((clock() - began) / measured * left)} left" if measured and left else ""
        progress.line("rung", f"{number} of {len(RUNGS)}   {rung.name}{about}")
        way, outcome = ladder.climb(rung, stack[over], progress)
        made.append(Climb(rung, over, outcome))
        if isinstance(outcome, str):
            progress.line("", f"not here: {outcome}")
        elif rung.over is None:
            stack[rung.name] = way
    warn_if_busy(progress)
    return made


def _object(ladder: Ladder, climbed: list[Climb], folder: Path) -> dict[str, Any]:
    machine, plan = ladder.machine, ladder.plan
    timed = "cpu" if machine.type == "cpu" else "wall"
    return {
        "schema": "monograph.ladder/2",
        "device": machine.name,
        "ratios_of": timed,
        "cores": machine.cores,
        "params": ladder.params,
        "updates": ladder.updates,
        "tokens_per_update": plan.tokens_per_update,
        "tokens": ladder.updates * plan.tokens_per_update,
        "rungs": measured(climbed, timed),
        "picture": str(folder / PICTURE),
        "report": str(folder / REPORT),
    }


def measured(climbed: list[Climb], timed: str) -> list[dict[str, Any]]:
    """Return the rungs as JSON objects; ratios of speed are of tokens per second of "wall" or of "cpu" time."""
    rungs = dict[str, dict[str, Any]]()
    for rung, over, outcome in climbed:
        rungs[rung.name] = {"rung": rung.name, "change": rung.change, "over": over or None, **_measured(outcome)}
        one, other = rungs[rung.name], rungs.get(over)
        for name, key in (("times", SPEED[timed]), ("memory_times", "peak_memory_bytes")):
            one[name] = one[key] / other[key] if other and one[key] else None
    return [*rungs.values()]


def _measured(outcome: Climbed | str) -> dict[str, Any]:
    keys = (
        "tokens_per_s", "tokens_per_cpu_s", "update_s", "cpu_s", "peak_memory_bytes", "train_loss", "compile_s",
        "micro_batch", "micro_steps",
    )  # fmt: skip
    scores = ("update_s_low", "update_s_high", "eval_loss", "eval_bits_per_byte")
    if isinstance(outcome, str):
        return {"obstacle": outcome, "notes": [], **dict.fromkeys((*keys, *scores))}
    seconds, held_out = sorted(outcome.seconds), outcome.held_out
    return standard_json({
        "obstacle": None, "notes": [*outcome.notes], **{key: getattr(outcome, key) for key in keys},
        "update_s_low": seconds[len(seconds) // 4], "update_s_high": seconds[-1 - len(seconds) // 4],
        "eval_loss": held_out.loss if held_out else None,
        "eval_bits_per_byte": held_out.bits_per_byte if held_out else None,
    })  # fmt: skip


def _show(result: dict[str, Any], folder: Path) -> None:
    table = [[cell if isinstance(cell, str) else cell[0] for cell in row] for row in [HEADS, *rows(result["rungs"])]]
    lines = [[line[HEADS.index(head)] for head in SHOWN] for line in table]
    widths = [max(len(line[column]) for line in lines) for column in range(len(SHOWN))]
    saving = [values for values, rung in zip(result["rungs"], RUNGS, strict=True) if rung.over]
    for line, rung in zip(lines, [None, *result["rungs"]], strict=True):
        if rung is saving[0]:
            print(f"each over {rung['over']}:")
        if rung and rung["obstacle"]:
            print(f"{line[0]:<{widths[0]}}   not here: {rung['obstacle']}")
            continue
        numbers = (cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))
        print("   ".join([line[0].ljust(widths[0]), *numbers]))
    print(f"\n{standing(result)}")
    speed = f"{fastest(result)['rung']}: {gain(result):.2f} × as fast as eager"
    print(f"fastest   {speed}; losses are after {result['tokens']:,} tokens")
    print(f"written   {folder / REPORT}, {folder / PICTURE}, {folder / NUMBERS}")
