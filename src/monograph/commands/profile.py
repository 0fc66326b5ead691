"""`monograph profile`: trace a few updates, and show where their time goes and what to change.

With `--ladder`, it does something else: it tries the usual ways to save time or memory one after
another, and measures what each gains (`monograph.session.ladder`). Such a way is called a rung. No run
is kept in either case.
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
from monograph.run.writing import results_folder, write_atomically
from monograph.session.ladder import RUNGS, Ladder, Rung, RungMeasurement, TrainingVariant
from monograph.session.objectives.texts import Texts
from monograph.session.plan import RunPlan
from monograph.session.requirements import (
    notes_on,
    require_one_device,
    require_possible,
    require_texts,
)
from monograph.session.resolve import resolve
from monograph.session.session import Session
from monograph.session.setup import make_repeatable, open_session
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
    """Trace a few updates of the training that `train` would start, and print the result."""
    with results_folder(out, DEFAULT_ROOT) as folder:
        progress = _start_process()
        session = _open_and_prepare(_plan_run(settings, progress), folder, progress)
        measured = _profile_session(session, folder, progress)
        positions = session.plan.training.tokens_per_update  # in the rows of an update
        tokens_per_s = session.text.stats.packed_share * positions / measured.update_s
        drawing = draw_profile(measured.verdict, f"An update of {positions:,} tokens")
        write_atomically(folder / PICTURE, themed(drawing))
        config = session.plan.record.toml
        write_atomically(folder / REPORT, profile_page(folder.name, measured, tokens_per_s, config))
    _print_profile(measured, tokens_per_s, folder)
    if json:
        print(jsonlib.dumps(_json_object(measured, tokens_per_s, session, folder)))


def _start_process() -> Progress:
    """Set up this process as `train` does, print the device, and return the display."""
    # This must come before the import of torch._dynamo, which sets its own cache path in the environment.
    keep_compiled()
    compat.quiet_profiler()
    progress = Progress()
    progress.header(f"monograph {__version__}   {describe().summary}")
    make_repeatable(default_device())
    return progress


def warn_if_busy(progress: Progress) -> None:
    """Print a warning if other programs use more than one core of this machine."""
    load = os.getloadavg()[0]
    cores = describe().cores
    if load > cores + 1:  # this process itself keeps all cores busy
        progress.line(
            "warning",
            f"load {load:.0f} on {counted(cores, 'core')}: other programs slow these measurements down",
        )


def _plan_run(settings: Settings, progress: Progress) -> RunPlan:
    """Decide the settings that were left at "auto", and return the plan.

    Raises:
        UsageError: the text comes from standard input or is a run, or this machine cannot train
            with these settings.
    """
    require_texts(settings, "profile")
    require_one_device(settings, "profile")
    require_possible(settings, describe())
    source = settings.data.source
    sources = [source] if isinstance(source, str) else source
    if "-" in sources:
        raise UsageError("profile keeps no text: give a file in the place of standard input")
    for run in map(Run, map(Path, sources)):
        if run.has_begun and is_folder(run.checkpoints):
            raise UsageError(
                f"{run.folder} is a run, not text: `monograph profile {shell_words(run.config)}` takes its settings"
            )
    machine = describe()
    plan = resolve(settings, machine)
    for line in notes_on(plan, machine):
        progress.line("note", line)
    return plan


def _open_and_prepare(plan: RunPlan, folder: Path, progress: Progress) -> Session:
    """Open the session of a run in `folder`, and compile its step.

    Raises:
        UsageError: the plan streams the model, which cannot be profiled.
    """
    text = Texts().open(plan, progress)
    session = open_session(Run(folder), plan, text, default_device(), progress)
    if isinstance(session.engine, Streamed):
        raise UsageError("train.memory = stream: profile watches a model that lives on the device")
    session.engine.step.announce = partial(progress.line, "note")
    prepare(session, progress)
    return session


def _profile_session(session: Session, folder: Path, progress: Progress) -> Profile:
    """Time and trace a few updates, and write the trace into `folder`."""
    plan = session.plan
    # The share of the rows' positions that have tokens. The second number is about what this share would be
    # if documents were packed into rows together.
    used_share = session.text.stats.packed_share
    share_if_packed = used_share if plan.job.reading.is_packed else 1.0
    is_on_gpu = default_device().type == "cuda"
    windows = session.text.batches(
        plan.training.tokens_per_update, seed=plan.job.seed, pin=is_on_gpu
    )
    try:
        with progress.stage("profile", "timing a few updates (discarded)") as stage:
            measured = profile(
                session.engine, windows, folder / TRACE, used=used_share, packed=share_if_packed
            )
            profiled_ms = 1e3 * measured.profiled_s
            stage.result = (
                f"{1e3 * measured.update_s:.3g} ms each, {profiled_ms:.3g} ms with the profiler"
            )
    finally:
        windows.close()
    warn_if_busy(progress)
    return measured


def _print_profile(measured: Profile, tokens_per_s: float, folder: Path) -> None:
    """Print the times, the limits and the changes that would help."""
    verdict = measured.verdict
    machine = measured.machine
    steps = counted(measured.micro_steps, "micro-step")
    print(f"update    {1e3 * measured.update_s:.3g} ms, {count(tokens_per_s, 'tok/s')}, {steps}\n")
    print(f"{'part':<14}{'share':>7}{'ms':>10}{'best ms':>10}  mostly limited by")
    # The floor of a part is the shortest time that it could take on this device. Its bounds are the times
    # of its kernels, added up by what limits them, such as memory.
    for part in PARTS:
        share = verdict.spent.share(part)
        spent_ms = 1e3 * verdict.spent.parts[part]
        best_ms = 1e3 * verdict.floors[part]
        limit = largest_bound(verdict.bounds.get(part, {}))
        print(f"{part:<14}{share:>7.1%}{spent_ms:>10.3g}{best_ms:>10.3g}  {limit}".rstrip())
    times_as_fast = measured.update_s / max(verdict.floor_s, 1e-12)
    rates = f"{count(machine.matmul_flops)}FLOP/s of a large product, {count(machine.copy_bytes_per_s)}B/s of a copy"
    print(
        f"\nbest      {1e3 * verdict.floor_s:.3g} ms, {times_as_fast:.2g} times as fast, at {rates}"
    )
    print(f"limit     {describe_limit(measured)}")
    for index, change in enumerate(verdict.changes):
        if index == 0:
            start = f"change    {change.what}"
            reason = f", as {change.why}"
        else:
            start = f"          or {change.what}"
            reason = ""
        other = "" if change.same_training else " (changes the training)"
        print(f"{start}: predicted {verdict.gain(change):.2f} × as fast{reason}{other}")
    print(
        f"written   {folder / REPORT}, {folder / PICTURE}, and {folder / TRACE} for ui.perfetto.dev"
    )


def _json_object(
    measured: Profile, tokens_per_s: float, session: Session, folder: Path
) -> dict[str, Any]:
    """Return the measurements as the object that --json prints."""
    verdict = measured.verdict
    step = session.engine.step
    return {
        "schema": "monograph.profile/1",
        "device": describe().name,
        "dtype": step.precision.name,
        "compile": step.scope,
        "micro_steps": measured.micro_steps,
        "update_s": measured.update_s,
        "watched_update_s": measured.profiled_s,
        "updates": measured.updates,
        "tokens_per_s": tokens_per_s,
        "floor_s": verdict.floor_s,
        "matmul_flops_per_s": measured.machine.matmul_flops,
        "copy_bytes_per_s": measured.machine.copy_bytes_per_s,
        "parts": {
            part: {
                "share": verdict.spent.share(part),
                "seconds": verdict.spent.parts[part],
                "floor_s": verdict.floors[part],
                "bound_s": {
                    kind: seconds / measured.updates
                    for kind, seconds in verdict.bounds.get(part, {}).items()
                },
            }
            for part in PARTS
        },
        "gaps_s": dict(verdict.spent.gaps),
        "recoverable_s": dict(verdict.recoverable),
        "bound_by": verdict.bottleneck,
        "changes": [
            {**asdict(change), "predicted_gain": verdict.gain(change)} for change in verdict.changes
        ],
        "report": str(folder / REPORT),
        "picture": str(folder / PICTURE),
        "trace": str(folder / TRACE),
    }


_LADDER_PICTURE = "ladder.svg"
_LADDER_NUMBERS = "ladder.json"
# The columns of the page's table that are also printed.
_PRINTED_COLUMNS = ("rung", "tokens/s", "speed", "peak memory", "memory", "loss", "compiling, s")


def run_ladder(settings: Settings, *, out: Path | None, json: bool) -> None:
    """Train a little with each rung as `train` would, measure it, and print the gains."""
    began = clock()
    with results_folder(out, DEFAULT_ROOT) as folder:
        progress = _start_process()
        ladder = Ladder.of(_plan_run(settings, progress), folder, progress)
        result = _ladder_json(ladder, _climb_rungs(ladder, progress), folder)
        result["wall_s"] = clock() - began
        drawing = draw_ladder(result)
        write_atomically(folder / _LADDER_PICTURE, themed(drawing))
        write_atomically(folder / _LADDER_NUMBERS, jsonlib.dumps(result, indent=1) + "\n")
        write_atomically(folder / REPORT, ladder_page(folder.name, result, ladder.plan.record.toml))
    _print_ladder(result, folder)
    if json:
        print(jsonlib.dumps(result))


class Climb(NamedTuple):
    """The measurement of one rung.

    Attributes:
        rung: the rung.
        base: the name of the rung that it changes, and with which it is compared; "" for the first
            rung.
        outcome: the measurements, or the reason why the rung is impossible here.
    """

    rung: Rung
    base: str
    outcome: RungMeasurement | str


def _climb_rungs(ladder: Ladder, progress: Progress) -> list[Climb]:
    """Measure each rung that is possible here."""
    climbs = list[Climb]()
    # The variants that later rungs may change, by the name of the rung that made them. "" has the
    # plainest variant, from which the first rung begins.
    variants = {"": TrainingVariant()}
    began = clock()
    for number, rung in enumerate(RUNGS, start=1):
        # The rung that this one changes: the rung that it names as its base, or else the last rung that was
        # possible here.
        last_rung = [*variants][-1]
        base = rung.base if rung.base in variants else last_rung
        base_variant = variants[base]
        # Estimate the time left: each possible rung takes as long as the average of those before it.
        measured_count = sum(not isinstance(climb.outcome, str) for climb in climbs)
        rungs_left = RUNGS[number - 1 :]  # this one included
        possible_count = sum(
            not ladder.obstacle(each.applied_to(base_variant), each) for each in rungs_left
        )
        estimate = ""
        if measured_count and possible_count:
            left_s = (clock() - began) / measured_count * possible_count
            estimate = f"   about {clock_time(left_s)} left"
        progress.line("rung", f"{number} of {len(RUNGS)}   {rung.name}{estimate}")
        outcome = ladder.measure(rung, base_variant, progress)
        climbs.append(Climb(rung, base, outcome))
        if isinstance(outcome, str):
            progress.line("", f"not here: {outcome}")
        elif rung.base is None:  # a rung that names its base is not changed by later ones
            variants[rung.name] = rung.applied_to(base_variant)
    warn_if_busy(progress)
    return climbs


def _ladder_json(ladder: Ladder, climbs: list[Climb], folder: Path) -> dict[str, Any]:
    """Return the measurements of all rungs as the object that --json prints."""
    machine = ladder.machine
    plan = ladder.plan
    # On a CPU, other programs change the CPU time less than the wall time.
    compared_time = "cpu" if machine.type == "cpu" else "wall"
    return {
        "schema": "monograph.ladder/2",
        "device": machine.name,
        "ratios_of": compared_time,
        "cores": machine.cores,
        "params": ladder.params,
        "updates": ladder.updates,
        "tokens_per_update": plan.training.tokens_per_update,
        "tokens": ladder.updates * plan.training.tokens_per_update,
        "rungs": rung_objects(climbs, compared_time),
        "picture": str(folder / _LADDER_PICTURE),
        "report": str(folder / REPORT),
    }


def rung_objects(climbs: list[Climb], compared_time: str) -> list[dict[str, Any]]:
    """Return the rungs as JSON objects.

    Args:
        climbs: the rungs' measurements.
        compared_time: "wall" or "cpu": the time to which the ratios of speeds refer.
    """
    rungs = dict[str, dict[str, Any]]()  # by name
    # The name of each ratio, and the measurement that is divided by that of the base.
    compared_keys = {"times": SPEED_KEYS[compared_time], "memory_times": "peak_memory_bytes"}
    for rung, base, outcome in climbs:
        values = {
            "rung": rung.name,
            "change": rung.change,
            "over": base or None,
            **_rung_values(outcome),
        }
        rungs[rung.name] = values
        base_values = rungs.get(base)
        for ratio, key in compared_keys.items():
            values[ratio] = None
            if base_values and values[key]:
                values[ratio] = values[key] / base_values[key]
    return [*rungs.values()]


def _rung_values(outcome: RungMeasurement | str) -> dict[str, Any]:
    """Return a rung's measurements as JSON values, all None if the rung is impossible here."""
    attributes = (
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
    derived_keys = ("update_s_low", "update_s_high", "eval_loss", "eval_bits_per_byte")
    if isinstance(outcome, str):
        return {
            "obstacle": outcome,
            "notes": [],
            **dict.fromkeys((*attributes, *derived_keys), None),
        }
    sorted_seconds = sorted(outcome.seconds)
    quarter = len(sorted_seconds) // 4  # "low" and "high" are the quartiles
    held_out = outcome.held_out
    return standard_json(
        {
            "obstacle": None,
            "notes": [*outcome.notes],
            **{key: getattr(outcome, key) for key in attributes},
            "update_s_low": sorted_seconds[quarter],
            "update_s_high": sorted_seconds[-1 - quarter],
            "eval_loss": held_out.loss if held_out else None,
            "eval_bits_per_byte": held_out.bits_per_byte if held_out else None,
        }
    )


def _print_ladder(result: dict[str, Any], folder: Path) -> None:
    """Print a table of the rungs, and what they gain."""
    columns = [LADDER_HEADS.index(head) for head in _PRINTED_COLUMNS]
    lines = []
    for row in [LADDER_HEADS, *ladder_cells(result["rungs"])]:
        # A cell is a text, or a pair of a text and its number, by which the page sorts.
        texts = [cell if isinstance(cell, str) else cell[0] for cell in row]
        lines.append([texts[column] for column in columns])
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    # The rungs that save memory come last. They are all compared with the same rung.
    saving_rungs = [
        values for values, rung in zip(result["rungs"], RUNGS, strict=True) if rung.base
    ]
    values_of_lines = [None, *result["rungs"]]  # the first line has the heads
    for line, values in zip(lines, values_of_lines, strict=True):
        name, *numbers = line
        padded_name = name.ljust(widths[0])
        if values is saving_rungs[0]:
            print(f"each over {values['over']}:")
        if values and values["obstacle"]:
            print(f"{padded_name}   not here: {values['obstacle']}")
            continue
        padded_numbers = [
            number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True)
        ]
        print("   ".join([padded_name, *padded_numbers]))
    print(f"\n{describe_measurement(result)}")
    speed = f"{fastest_rung(result)['rung']}: {ladder_gain(result):.2f} × as fast as eager"
    print(f"fastest   {speed}; losses are after {result['tokens']:,} tokens")
    print(f"written   {folder / REPORT}, {folder / _LADDER_PICTURE}, {folder / _LADDER_NUMBERS}")
