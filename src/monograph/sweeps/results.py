"""Collect the results of a sweep: read each member's numbers, compare the settings, and make their
tables.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from monograph.checkpointing import candidates
from monograph.config.axes import SEED
from monograph.data.corpus import Corpus
from monograph.device import compiler_obstacle, default_device, describe
from monograph.errors import InputRefused, UsageError
from monograph.evaluation.significance import Setting, Table, tabulate, written
from monograph.loop import train
from monograph.run import recorded_state
from monograph.run.folder import MIXTURE, Run, names_mixture, standard_json
from monograph.run.progress import Progress
from monograph.run.recipe import names_run
from monograph.schedule import Schedule, constant
from monograph.session.objectives.teachers import write_teachers
from monograph.session.objectives.texts import TextTask, open_corpus
from monograph.session.plan import Plan
from monograph.session.record import write_config
from monograph.session.recorded import run_settings
from monograph.session.reporting import finished
from monograph.session.resolve import resolve
from monograph.session.session import seed_all
from monograph.session.setup import build_run, make_engine
from monograph.session.warmup import capture
from monograph.storage.code import code_named
from monograph.storage.reading import is_folder
from monograph.sweeps import advice
from monograph.sweeps.concurrency import first_window
from monograph.sweeps.folder import SCHEMA, Sweep
from monograph.sweeps.spec import ORIGIN, Member, describe_knobs, short_key, value_text
from monograph.terminal import shell_words

DISTILLED = "distilled"  # the run's folder, in the sweep's
BITS, NATS = "eval_bits_per_byte", "eval_loss"


@dataclass(frozen=True)
class Outcome:
    """The current or final results of one member.

    Attributes:
        member: the member.
        run: the member's run.
        rows: the rows of its metrics.
        diverged: the update after which it learned nothing more; None if it did not diverge.
        evaluation: the row of its last held-out scores; empty before the first.
        summary: the summary of a finished run; else None.
    """

    member: Member
    run: Run
    rows: list[dict[str, Any]]
    diverged: int | None
    evaluation: dict[str, Any]
    summary: dict[str, Any] | None

    @property
    def over(self) -> bool:
        """Return whether the member needs no more training."""
        return self.summary is not None or self.diverged is not None

    def score(self, key: str) -> float | None:
        """Return the member's last score under `key`; None if it diverged or has no score yet."""
        value: float | None = self.evaluation.get(key)
        return None if self.diverged is not None else value


def read_outcome(sweep: Sweep, member: Member) -> Outcome:
    """Return a member's results, read from its run; raises InputRefused if its metrics are damaged."""
    run = sweep.member(member.index)
    rows = run.rows()
    final = finished(run)
    if final:  # for the others `Session.restore` requires the metrics
        recorded_state.require_metrics(run)
    diverged: int | None = next((row["diverged"] for row in rows if "diverged" in row), None)
    evaluation: dict[str, Any] = next((row for row in reversed(rows) if NATS in row), {})
    return Outcome(member, run, rows, diverged, evaluation, final)


def mixture_members(name: str) -> list[Run]:
    """Return the finished, finite members of the sweep if a name is SWEEP/mixture; none for any
    other name.

    Raises:
        InputRefused: no member has finished, or the sweep's record is damaged.
    """
    path = Path(name)
    if path.name != MIXTURE or not names_run(path.parent):
        return []
    folder = Run.located(path.parent)
    if not names_mixture(folder / MIXTURE):
        return []
    sweep = Sweep.open(folder)
    members = [run for run in map(sweep.member, range(len(sweep.points))) if finished(run)]
    if not members:
        raise InputRefused(
            f"{name}: no member has finished: `monograph sweep --out {shell_words(folder)}` goes on"
        )
    return members


def require_teachers(sweep: Sweep, ranks: int) -> None:
    """Refuse --distill for a sweep whose members cannot teach one model, before they are trained.

    Raises:
        UsageError: they differ in what a token is, or in the length of rows; or the settings or
            `ranks` exclude it.
    """
    settings = sweep.settings
    keys = {key for point in sweep.points for key in point}
    of_tokens = (
        "data.tokenizer",
        "data.vocab_size",
        "data.sequence_length",
        "model.vocab_size",
        "model.init",
    )
    obstacles = {
        **{f"{key} as an axis": key in keys for key in of_tokens},
        "a model.init that is a Python file": code_named(settings.model.init) is not None,
        "lora.rank": settings.lora.rank is not None or "lora.rank" in keys,
        "train.memory = stream": settings.train.memory == "stream",
        f"{ranks} processes": ranks > 1,
    }
    if odd := [what for what, is_so in obstacles.items() if is_so]:
        raise UsageError(
            f"--distill trains one language model, on one device, on all members: leave out {odd[0]}"
        )


def open_student(sweep: Sweep, outcomes: Sequence[Outcome], best: int) -> Run:
    """Return the run that learns from a sweep's finished members, begun if it was not.

    It has the settings of the best member, another seed than any, and a graph for each block where
    the settings leave that open, since a graph of the whole step would hold every teacher.

    Raises:
        InputRefused: the members cannot teach one model.
    """
    run = Run(sweep.run.folder / DISTILLED)
    if run.begun:
        return run
    run = Run.create(run.folder)
    member = outcomes[best]
    with run.lock(new=True):
        write_teachers(run, [each.run for each in outcomes if each.summary])
        settings = run_settings(member.run)
        seeds = {each.member.settings.train.seed for each in outcomes}
        changed: dict[str, Any] = {
            SEED: next(seed for seed in range(len(seeds) + 1) if seed not in seeds)
        }
        if member.member.settings.train.compile == "auto" and settings.train.compile == "whole":
            changed["train.compile"] = "blocks"
        write_config(run, settings.resolve(changed, ORIGIN))
    return run


def compare_settings(outcomes: Sequence[Outcome]) -> Table:
    """Return the settings compared by bits per byte, or by the loss in nats if some score has no
    bits per byte.
    """
    scored = [outcome.evaluation for outcome in outcomes if outcome.evaluation]
    in_bits = all(evaluation.get(BITS) is not None for evaluation in scored)
    key, unit = (BITS, "bits/byte") if in_bits else (NATS, "nats")
    values = [outcome.score(key) for outcome in outcomes]
    return tabulate(values, [outcome.member.knobs for outcome in outcomes], SEED, unit)


def table_lines(table: Table, diverged: Mapping[int, int]) -> list[str]:
    """Return the table as aligned lines: knobs, mean ± standard error over seeds, and standing
    against the best.

    Args:
        table: the compared settings.
        diverged: the update after which a member learned nothing more, by the member's number.
    """
    keys = list(dict.fromkeys(key for setting in table.settings for key in setting.knobs))
    rows = [[*map(short_key, keys), table.unit, ""]]
    for setting in table.settings:
        unscored = setting.mean is None and not any(
            member in diverged for member in setting.members.values()
        )
        value = "" if unscored else written(setting.mean)
        knobs = [value_text(setting.knobs[key]) if key in setting.knobs else "" for key in keys]
        rows.append([*knobs, value, _standing(table, setting, diverged)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _standing(table: Table, setting: Setting, diverged: Mapping[int, int]) -> str:
    lost = [diverged[member] for member in setting.members.values() if member in diverged]
    who = (
        f"{len(lost)} of {len(setting.members)} diverged"
        if len(lost) < len(setting.members)
        else "diverged"
    )
    return table.standing(setting, f"{who} at update {', '.join(map(str, lost))}" if lost else "")


def verdict(table: Table) -> str:
    """Return which setting is best, in a few words."""
    if table.best is None:
        return "every member diverged"
    best = table.best.setting
    return describe_knobs(dict(best.knobs)) if best.knobs else f"member {table.best.member}"


def as_json(
    outcomes: Sequence[Outcome], table: Table
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """Return (members, best) as `--json` prints them."""
    members = []
    for outcome in outcomes:
        folders = [folder for _, folder in candidates(outcome.run.checkpoints) if is_folder(folder)]
        scores = {key: outcome.evaluation.get(key) for key in (NATS, BITS)}
        last: dict[str, Any] = next(
            (row for row in reversed(outcome.rows) if "train_loss" in row), {}
        )
        members.append(
            {
                "knobs": dict(outcome.member.knobs),
                **standard_json(scores),
                "train_loss": last.get("train_loss"),
                "diverged": outcome.diverged,
                "run": str(outcome.run.folder),
                "checkpoint": str(folders[0]) if folders else None,
            }
        )
    if table.best is None:
        return members, None
    best = table.best.setting
    ties = [dict(setting.knobs) for setting in table.settings if setting.tied]
    mean = best.mean
    return members, {
        "knobs": dict(best.knobs),
        "member": table.best.member,
        "mean": mean.value if mean else None,
        "standard_error": mean.standard_error if mean else None,
        "unit": table.unit,
        "tied": ties,
        "noise": table.noise,
        **{key: members[table.best.member][key] for key in ("run", "checkpoint")},
    }


def summary(
    session_rows: Sequence[Mapping[str, Any]], run: Run, known: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the summary that marks a member's run as finished, as the summary of any run does."""
    trained = [row for row in session_rows if "train_loss" in row]
    scored: Mapping[str, Any] = next((row for row in reversed(session_rows) if NATS in row), {})
    rates = [row["tokens_per_s"] for row in trained if row.get("tokens_per_s")]
    return {
        "schema": "monograph.train/1",
        "run": str(run.folder),
        "update": trained[-1]["update"],
        "tokens": trained[-1]["tokens"],
        "train_loss": trained[-1]["train_loss"],
        **{key: scored.get(key) for key in (NATS, BITS)},
        "tokens_per_s": statistics.median(rates) if rates else None,
        **known,
    }


def result_object(sweep: Sweep, outcomes: Sequence[Outcome], table: Table) -> dict[str, Any]:
    """Return the object of `--json`, which is also the result in sweep.json."""
    members, best = as_json(outcomes, table)
    spent = sweep.record.get("training_s", 0.0)
    tokens = sweep.record.get("tokens", 0)
    return {
        "schema": SCHEMA,
        "run": str(sweep.run.folder),
        "members": members,
        "best": best,
        "advice": advice.as_json(advice.advise(sweep, table)),
        "wall_s": sweep.record.get("elapsed_s"),
        "tokens_per_s": tokens / spent if spent else None,
    }


def result_so_far(
    outcomes: Sequence[Outcome], table: Table, spent_s: float, rate: float
) -> dict[str, Any]:
    """Return what is known of a sweep that has not ended, in the form of `result_object`, and how many
    members have finished.

    Args:
        outcomes: the members' present outcomes.
        table: these compared.
        spent_s: the seconds spent so far.
        rate: targets per second of the last updates; 0 before the first.
    """
    members, best = as_json(outcomes, table)
    return {
        "members": members,
        "best": best,
        "advice": [],
        "wall_s": spent_s,
        "tokens_per_s": rate or None,
        "finished": sum(outcome.summary is not None for outcome in outcomes),
    }


def chart_settings(table: Table) -> list[dict[str, Any]]:
    """Return the settings in the form that `monograph.report.sweep_report` draws."""
    best = table.best.setting if table.best else None
    return [
        {
            "knobs": {short_key(key): value for key, value in setting.knobs.items()},
            "mean": setting.mean.value if setting.mean else None,
            "standard_error": setting.mean.standard_error if setting.mean else None,
            "values": [table.values[member] for member in setting.members.values()],
            "standing": "best" if setting is best else "tied" if setting.tied else "",
        }
        for setting in table.settings
    ]


# `verify` allows this many times the difference between two ways to compute the same run alone.
FACTOR = 4.0


def verify(outcome: Outcome, progress: Progress, eager: tuple[int, int] = (0, 0)) -> dict[str, Any]:
    """Compare a member's training losses with those of the same run trained alone.

        difference = max over updates of |member - alone|      equal = difference <= 4 · max |alone - alone, otherwise|

    "Otherwise" means uncompiled or, if nothing is compiled, in micro-batches of half the size,
    which shows the effect of rounding on this run. Every way rounds differently and training
    amplifies the differences, so no fixed bound would do.

    Args:
        outcome: the member's.
        progress: the display.
        eager: see `SweepProgress.eager_updates_of`.

    Raises:
        InputRefused: the member has no metrics, or its run is damaged.
    """
    member = [row["train_loss"] for row in outcome.rows if row.get("train_loss") is not None]
    if not member:
        raise InputRefused(f"{outcome.run.folder} has no updates to compare: train the sweep first")
    plan = resolve(run_settings(outcome.run), describe())
    text = open_corpus(plan.job.reading, progress)
    compiled = plan.training.compile != "none" and (
        default_device().type == "cuda" or not compiler_obstacle()
    )
    alone = train_alone(plan, text, len(member), progress, compiled=compiled, eager=eager)
    if not compiled:
        half = {"train.micro_batch": max(1, plan.training.rows // 2)}
        plan = resolve(plan.record.settings.resolve(half, "verify"), describe())
    other = train_alone(plan, text, len(member), progress, compiled=False, eager=eager)
    difference = largest_difference(member, alone)
    bound = FACTOR * largest_difference(alone, other)
    equal = difference <= bound
    progress.line(
        "verify",
        f"member {outcome.member.index} against the same run alone, {len(member)} updates: largest difference of the "
        f"training loss {difference:.2g}, {'within' if equal else 'beyond'} {bound:.2g} (4 x what two ways to compute "
        "it alone differ by)",
    )
    return {
        "member": outcome.member.index,
        "updates": len(member),
        "difference": difference,
        "bound": bound,
        "equal": equal,
    }


def largest_difference(one: list[float], other: list[float]) -> float:
    """Return the largest difference at any update; nan and infinity are equal to themselves."""
    return max(
        0.0 if a == b or (a != a and b != b) else abs(a - b)
        for a, b in zip(one, other, strict=True)
    )


def first_schedule(course: Schedule, updates: int, warmup: int) -> Schedule:
    """Return the schedule of a member that made some updates before its length was known.

    Args:
        course: the schedule from then on.
        updates: the number of those updates.
        warmup: the updates of their warm-up.
    """
    first = constant(warmup)
    return lambda index: first(index) if index < updates else course(index)


def train_alone(
    plan: Plan,
    text: Corpus,
    updates: int,
    progress: Progress,
    *,
    compiled: bool,
    eager: tuple[int, int] = (0, 0),
) -> list[float]:
    """Train a run alone from its beginning, by the schedule that the member had, and return its
    training losses.
    """
    built = build_run(plan, TextTask(text), describe())
    engine = make_engine(built, default_device())
    engine.step.schedule = first_schedule(plan.schedule(plan.updates or updates), *eager)
    batches = text.batches(plan.training.tokens_per_update, seed=plan.job.seed)
    seed_all(plan.job.seed)
    with progress.stage(
        "alone", "compiled" if compiled else f"eager, micro-batches of {engine.micro_batch}"
    ) as stage:
        if compiled:
            capture(
                engine,
                first_window([built], text),
                "blocks" if built.plan.training.compile == "blocks" else "whole",
            )
        on_device = []
        for update in train(engine, batches, updates):
            on_device.append(update.loss)
            stage.report("update", update.index + 1, updates)
        values: list[float] = torch.stack(on_device).tolist()
    batches.close()
    return values
