"""`monograph profile`: trace a few updates of a run that is not kept; show where time goes and what
to change.

With `--ladder` it measures what each usual way to save time or memory is worth, one after another.
"""

import json as jsonlib
import os
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from monograph import __version__, compat
from monograph.config import Settings
from monograph.device import clock, default_device, describe
from monograph.errors import UsageError
from monograph.profiling.intervals import PARTS
from monograph.profiling.profiler import Profile, profile
from monograph.report.figures import themed
from monograph.report.profile_report import (
    LADDER_HEADS,
    SPEED_KEYS,
    describe_limit,
    describe_measurement,
    draw_ladder,
    draw_profile,
    fastest_rung,
    ladder_cells,
    ladder_gain,
    ladder_page,
    largest_bound,
    profile_page,
)
from monograph.report.quantities import clock_time, count, counted
from monograph.run.folder import Run, standard_json
from monograph.run.progress import Progress
from monograph.run.writing import results_folder, write_whole
from monograph.session.ladder import RUNGS, Climbed, Ladder, Rung, RungWay
from monograph.session.objectives.texts import Texts
from monograph.session.plan import Plan
from monograph.session.requirements import (
    notes_on,
    require_one_device,
    require_possible,
    require_texts,
)
from monograph.session.resolve import resolve
from monograph.session.session import Session
from monograph.session.setup import open_session, repeatable
from monograph.session.warmup import prepare
from monograph.storage.cache_dir import keep_compiled
from monograph.storage.reading import is_folder
from monograph.stream import Streamed
from monograph.terminal import shell_words

DEFAULT_ROOT = Path("profiles")
TRACE = "trace.json"
PICTURE = "profile.svg"
REPORT = "report.html"


def run(settings: Settings, *, out: Path | None, json: bool) -> None:
    """Open the session as `train` does, trace a few updates and print the result; no run is
    written.
    """
    with results_folder(out, DEFAULT_ROOT) as folder:
        progress = _started()
        session = _open(_planned(settings, progress), folder, progress)
        measured = _watched(session, folder, progress)
        size = session.plan.training.tokens_per_update
        tokens_per_s = session.text.stats.packed_share * size / measured.update_s
        drawing = draw_profile(measured.verdict, f"An update of {size:,} tokens")
        write_whole(folder / PICTURE, themed(drawing))
        config = session.plan.record.toml
        write_whole(folder / REPORT, profile_page(folder.name, measured, tokens_per_s, config))
    _show(measured, tokens_per_s, folder)
    if json:
        print(jsonlib.dumps(_object(measured, tokens_per_s, session, folder)))


def _started() -> Progress:
    """Set up this process to compute as `train` does, print the device and return the display."""
    # Before torch._dynamo is imported, which sets its own cache path in the environment.
    keep_compiled()
    compat.quiet_profiler()
    progress = Progress()
    progress.header(f"monograph {__version__}   {describe().summary}")
    repeatable(default_device())
    return progress


def warn_if_busy(progress: Progress) -> None:
    """Warn if other programs use more than one core of this machine."""
    load = os.getloadavg()[0]
    cores = describe().cores
    if load > cores + 1:
        progress.line(
            "warning",
            f"load {load:.0f} on {counted(cores, 'core')}: other programs slow these measurements down",
        )


def _planned(settings: Settings, progress: Progress) -> Plan:
    """Return the plan of a run whose text can be read again.

    Raises:
        UsageError: the text comes from standard input or is a run, or this machine cannot train as
            asked.
    """
    require_texts(settings, "profile")
    require_one_device(settings, "profile")
    require_possible(settings, describe())
    source = settings.data.source
    sources = [source] if isinstance(source, str) else source
    if "-" in sources:
        raise UsageError("profile keeps no text: give a file in the place of standard input")
    for run in map(Run, map(Path, sources)):
        if run.begun and is_folder(run.checkpoints):
            raise UsageError(
                f"{run.folder} is a run, not text: `monograph profile {shell_words(run.config)}` takes its settings"
            )
    plan = resolve(settings, machine := describe())
    for line in notes_on(plan, machine):
        progress.line("note", line)
    return plan


def _open(plan: Plan, folder: Path, progress: Progress) -> Session:
    session = open_session(
        Run(folder), plan, Texts().open(plan, progress), default_device(), progress
    )
    if isinstance(session.engine, Streamed):
        raise UsageError("train.memory = stream: profile watches a model that lives on the device")
    session.engine.step.announce = partial(progress.line, "note")
    prepare(session, progress)
    return session


def _watched(session: Session, folder: Path, progress: Progress) -> Profile:
    plan, share = session.plan, session.text.stats.packed_share
    whole = share if plan.job.reading.is_packed else 1.0
    rows = session.text.batches(
        plan.training.tokens_per_update, seed=plan.job.seed, pin=default_device().type == "cuda"
    )
    try:
        with progress.stage("profile", "timing a few updates (discarded)") as stage:
            measured = profile(session.engine, rows, folder / TRACE, used=share, packed=whole)
            stage.result = f"{1e3 * measured.update_s:.3g} ms each, {1e3 * measured.watched_s:.3g} ms with the profiler"
    finally:
        rows.close()
    warn_if_busy(progress)
    return measured


def _show(measured: Profile, tokens_per_s: float, folder: Path) -> None:
    judged = measured.verdict
    machine = measured.machine
    steps = counted(measured.micro_steps, "micro-step")
    print(f"update    {1e3 * measured.update_s:.3g} ms, {count(tokens_per_s, 'tok/s')}, {steps}\n")
    print(f"{'part':<14}{'share':>7}{'ms':>10}{'best ms':>10}  mostly limited by")
    for part in PARTS:
        share = judged.spent.share(part)
        taken = 1e3 * judged.spent.parts[part]
        least = 1e3 * judged.floors[part]
        bound = largest_bound(judged.bounds.get(part, {}))
        print(f"{part:<14}{share:>7.1%}{taken:>10.3g}{least:>10.3g}  {bound}".rstrip())
    faster = measured.update_s / max(judged.floor_s, 1e-12)
    rates = f"{count(machine.matmul_flops)}FLOP/s of a large product, {count(machine.copy_bytes_per_s)}B/s of a copy"
    print(f"\nbest      {1e3 * judged.floor_s:.3g} ms, {faster:.2g} times as fast, at {rates}")
    print(f"limit     {describe_limit(measured)}")
    for index, change in enumerate(judged.changes):
        begun = f"change    {change.what}" if index == 0 else f"          or {change.what}"
        why = f", as {change.why}" if index == 0 else ""
        other = "" if change.same_training else " (changes the training)"
        print(f"{begun}: predicted {judged.gain(change):.2f} × as fast{why}{other}")
    print(
        f"written   {folder / REPORT}, {folder / PICTURE}, and {folder / TRACE} for ui.perfetto.dev"
    )


def _object(
    measured: Profile, tokens_per_s: float, session: Session, folder: Path
) -> dict[str, Any]:
    judged, step = measured.verdict, session.engine.step
    return {
        "schema": "monograph.profile/1",
        "device": describe().name,
        "dtype": step.precision.name,
        "compile": step.scope,
        "micro_steps": measured.micro_steps,
        "update_s": measured.update_s,
        "watched_update_s": measured.watched_s,
        "updates": measured.updates,
        "tokens_per_s": tokens_per_s,
        "floor_s": judged.floor_s,
        "matmul_flops_per_s": measured.machine.matmul_flops,
        "copy_bytes_per_s": measured.machine.copy_bytes_per_s,
        "parts": {
            part: {
                "share": judged.spent.share(part),
                "seconds": judged.spent.parts[part],
                "floor_s": judged.floors[part],
                "bound_s": {
                    kind: seconds / measured.updates
                    for kind, seconds in judged.bounds.get(part, {}).items()
                },
            }
            for part in PARTS
        },
        "gaps_s": dict(judged.spent.gaps),
        "recoverable_s": dict(judged.recoverable),
        "bound_by": judged.binds,
        "changes": [
            {**asdict(change), "predicted_gain": judged.gain(change)} for change in judged.changes
        ],
        "report": str(folder / REPORT),
        "picture": str(folder / PICTURE),
        "trace": str(folder / TRACE),
    }


_LADDER, _NUMBERS = "ladder.svg", "ladder.json"
# The columns on a terminal.
_SHOWN = ("rung", "tokens/s", "speed", "peak memory", "memory", "loss", "compiling, s")


def run_ladder(settings: Settings, *, out: Path | None, json: bool) -> None:
    """Train and measure one rung after another, as `train` would, and print the gains; no run is
    written.
    """
    began = clock()
    with results_folder(out, DEFAULT_ROOT) as folder:
        progress = _started()
        ladder = Ladder.of(_planned(settings, progress), folder, progress)
        result = _ladder_object(ladder, _climbed(ladder, progress), folder)
        result["wall_s"] = clock() - began
        drawing = draw_ladder(result)
        write_whole(folder / _LADDER, themed(drawing))
        write_whole(folder / _NUMBERS, jsonlib.dumps(result, indent=1) + "\n")
        write_whole(folder / REPORT, ladder_page(folder.name, result, ladder.plan.record.toml))
    _show_ladder(result, folder)
    if json:
        print(jsonlib.dumps(result))


class Climb(NamedTuple):
    """A rung, the name of the rung it is compared with ("" for the first), and its measurements or
    its obstacle.
    """

    rung: Rung
    over: str
    outcome: Climbed | str


def _climbed(ladder: Ladder, progress: Progress) -> list[Climb]:
    made = list[Climb]()
    stack = {"": RungWay()}
    began = clock()
    for number, rung in enumerate(RUNGS, start=1):
        over = rung.over if rung.over in stack else [*stack][-1]
        measured = sum(not isinstance(climb.outcome, str) for climb in made)
        left = sum(
            not ladder.obstacle(later.after(stack[over]), later) for later in RUNGS[number - 1 :]
        )
        about = (
            f"   about {clock_time((clock() - began) / measured * left)} left"
            if measured and left
            else ""
        )
        progress.line("rung", f"{number} of {len(RUNGS)}   {rung.name}{about}")
        way, outcome = ladder.climb(rung, stack[over], progress)
        made.append(Climb(rung, over, outcome))
        if isinstance(outcome, str):
            progress.line("", f"not here: {outcome}")
        elif rung.over is None:
            stack[rung.name] = way
    warn_if_busy(progress)
    return made


def _ladder_object(ladder: Ladder, climbed: list[Climb], folder: Path) -> dict[str, Any]:
    machine, plan = ladder.machine, ladder.plan
    timed = "cpu" if machine.type == "cpu" else "wall"
    return {
        "schema": "monograph.ladder/2",
        "device": machine.name,
        "ratios_of": timed,
        "cores": machine.cores,
        "params": ladder.params,
        "updates": ladder.updates,
        "tokens_per_update": plan.training.tokens_per_update,
        "tokens": ladder.updates * plan.training.tokens_per_update,
        "rungs": measured_rungs(climbed, timed),
        "picture": str(folder / _LADDER),
        "report": str(folder / REPORT),
    }


def measured_rungs(climbed: list[Climb], timed: str) -> list[dict[str, Any]]:
    """Return the rungs as JSON objects; ratios of speed are of tokens per second of "wall" or of
    "cpu" time.
    """
    rungs = dict[str, dict[str, Any]]()
    for rung, over, outcome in climbed:
        rungs[rung.name] = {
            "rung": rung.name,
            "change": rung.change,
            "over": over or None,
            **_measured(outcome),
        }
        one = rungs[rung.name]
        other = rungs.get(over)
        for name, key in (("times", SPEED_KEYS[timed]), ("memory_times", "peak_memory_bytes")):
            one[name] = one[key] / other[key] if other and one[key] else None
    return [*rungs.values()]


def _measured(outcome: Climbed | str) -> dict[str, Any]:
    keys = (
        "tokens_per_s",
        "tokens_per_cpu_s",
        "update_s",
        "cpu_s",
        "peak_memory_bytes",
        "train_loss",
        "compile_s",
        "micro_batch",
        "micro_steps",
    )
    scores = ("update_s_low", "update_s_high", "eval_loss", "eval_bits_per_byte")
    if isinstance(outcome, str):
        return {"obstacle": outcome, "notes": [], **dict.fromkeys((*keys, *scores))}
    seconds = sorted(outcome.seconds)
    held_out = outcome.held_out
    return standard_json(
        {
            "obstacle": None,
            "notes": [*outcome.notes],
            **{key: getattr(outcome, key) for key in keys},
            "update_s_low": seconds[len(seconds) // 4],
            "update_s_high": seconds[-1 - len(seconds) // 4],
            "eval_loss": held_out.loss if held_out else None,
            "eval_bits_per_byte": held_out.bits_per_byte if held_out else None,
        }
    )


def _show_ladder(result: dict[str, Any], folder: Path) -> None:
    table = [
        [cell if isinstance(cell, str) else cell[0] for cell in row]
        for row in [LADDER_HEADS, *ladder_cells(result["rungs"])]
    ]
    lines = [[line[LADDER_HEADS.index(head)] for head in _SHOWN] for line in table]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_SHOWN))]
    saving = [values for values, rung in zip(result["rungs"], RUNGS, strict=True) if rung.over]
    for line, rung in zip(lines, [None, *result["rungs"]], strict=True):
        if rung is saving[0]:
            print(f"each over {rung['over']}:")
        if rung and rung["obstacle"]:
            print(f"{line[0]:<{widths[0]}}   not here: {rung['obstacle']}")
            continue
        numbers = (cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))
        print("   ".join([line[0].ljust(widths[0]), *numbers]))
    print(f"\n{describe_measurement(result)}")
    speed = f"{fastest_rung(result)['rung']}: {ladder_gain(result):.2f} × as fast as eager"
    print(f"fastest   {speed}; losses are after {result['tokens']:,} tokens")
    print(f"written   {folder / REPORT}, {folder / _LADDER}, {folder / _NUMBERS}")
