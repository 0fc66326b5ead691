"""Collect the results of a sweep.

Each member's numbers are read from its run. Settings are compared over their seeds, which gives the
tables of the terminal, of `--json` and of the page. A member can be compared with the same run alone.

A knob is a key whose value varies between members. A setting is a combination of the knobs' values,
except for the seed; it has one member for each seed.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from monograph.checkpointing import list_checkpoints
from monograph.config.axes import SEED
from monograph.device import compiler_obstacle, default_device, describe
from monograph.distributed.world import World
from monograph.errors import InputRefused, UsageError
from monograph.evaluation.significance import Setting, Table, mean_text, tabulate
from monograph.graph.inspect import buffers_kept
from monograph.loop import train
from monograph.report.knobs import short_key, value_text
from monograph.run import recorded_state
from monograph.run.folder import MIXTURE, Run, names_mixture, standard_json
from monograph.run.listing import Measure
from monograph.run.progress import Progress, silent
from monograph.run.recipe import names_run
from monograph.schedule import Schedule, constant
from monograph.session.objective import SweptTask
from monograph.session.objectives import objective_of
from monograph.session.objectives.teachers import write_teachers
from monograph.session.plan import RunPlan
from monograph.session.random_state import seed_all
from monograph.session.record import write_config
from monograph.session.recorded import run_settings
from monograph.session.reporting import final_summary
from monograph.session.resolve import resolve
from monograph.session.setup import build_run, make_engine
from monograph.session.warmup import capture_engine
from monograph.storage.code import code_named
from monograph.storage.reading import is_folder
from monograph.sweeps import advice
from monograph.sweeps.cohort import open_swept
from monograph.sweeps.folder import SCHEMA, Sweep
from monograph.sweeps.rehearsal import Rehearsal
from monograph.sweeps.spec import ORIGIN, Member, describe_knobs
from monograph.terminal import shell_words

DISTILLED = "distilled"  # the folder, inside the sweep's, of the run that learns from the members
# The scores of a run on texts, in rows of its metrics and in its summary.
BITS = "eval_bits_per_byte"
NATS = "eval_loss"
LEAST_SHOWN = 1e-6  # smaller probabilities are shown as this one


@dataclass(frozen=True)
class Outcome:
    """The current or final results of one member.

    Attributes:
        member: the member.
        run: the member's run.
        rows: the rows of its metrics.
        diverged: the update after which the member learned nothing more; None if it did not diverge.
        stopped: the update after which the member was stopped, since it could not win any more
            (`monograph.sweeps.pruning`); None if it was not stopped.
        win_probability: a bound of the probability with which the member's setting could have become
            the best; None if the member was not stopped.
        evaluation: the last row with held-out scores; empty if there is none yet.
        summary: the run's summary; None if it has not finished.
    """

    member: Member
    run: Run
    rows: list[dict[str, Any]]
    diverged: int | None
    stopped: int | None
    win_probability: float | None
    evaluation: dict[str, Any]
    summary: dict[str, Any] | None

    @property
    def is_over(self) -> bool:
        """Return whether the member needs no more training."""
        return any(each is not None for each in (self.summary, self.diverged, self.stopped))

    def score(self, key: str) -> float | None:
        """Return the member's last score under `key`; None if it diverged or has no score yet."""
        if self.diverged is not None:
            return None
        value: float | None = self.evaluation.get(key)
        return value


def read_outcome(sweep: Sweep, member: Member) -> Outcome:
    """Return a member's results, read from its run.

    Raises:
        InputRefused: the run's metrics are damaged.
    """
    run = sweep.member(member.index)
    rows = run.rows()
    run_summary = final_summary(run)
    # `Session.restore` checks the metrics of a run that goes on. Nothing else checks a finished
    # run's.
    if run_summary:
        recorded_state.require_metrics(run)
    diverged: int | None = next((row["diverged"] for row in rows if "diverged" in row), None)
    stop: dict[str, Any] = next((row for row in rows if "stopped" in row), {})
    score_keys = [measure.key for measure in measures_of(member)]
    scored_rows = [row for row in rows if not row.keys().isdisjoint(score_keys)]
    evaluation: dict[str, Any] = scored_rows[-1] if scored_rows else {}
    return Outcome(
        member,
        run,
        rows,
        diverged,
        stop.get("stopped"),
        stop.get("win_probability"),
        evaluation,
        run_summary,
    )


def measures_of(member: Member) -> tuple[Measure, ...]:
    """Return what measures a member on held-out records, the most informative first."""
    return objective_of(member.settings).compared_by


def last_trained_row(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of the last update; an empty one if there is none."""
    return next((row for row in reversed(rows) if "train_loss" in row), {})


def mixture_members(name: str) -> list[Run]:
    """Return the runs of a sweep's finished members, if the name is SWEEP/mixture.

    For any other name the list is empty. A member that diverged has not finished.

    Raises:
        InputRefused: no member has finished, or the sweep's record is damaged.
    """
    path = Path(name)
    if path.name != MIXTURE or not names_run(path.parent):
        return []
    folder = Run.locate(path.parent)
    if not names_mixture(folder / MIXTURE):
        return []
    sweep = Sweep.open(folder)
    runs = [sweep.member(index) for index in range(len(sweep.points))]
    finished_runs = [run for run in runs if final_summary(run)]
    if not finished_runs:
        raise InputRefused(
            f"{name}: no member has finished: `monograph sweep --out {shell_words(folder)}` continues the sweep"
        )
    return finished_runs


def require_teachers(sweep: Sweep, ranks: int) -> None:
    """Refuse --distill for a sweep whose members cannot teach one model, before they are trained.

    Args:
        sweep: the sweep.
        ranks: the number of processes that train it.

    Raises:
        UsageError: members differ in what a token is, in the length of rows or in the base of adapters,
            or the settings or `ranks` exclude --distill.
    """
    settings = sweep.settings
    axes = {key for point in sweep.points for key in point}
    shared_keys = (
        "data.tokenizer",
        "data.vocab_size",
        "data.sequence_length",
        "model.vocab_size",
        "model.init",
        # Teachers that are adapters share one base and one forward pass.
        "lora.base",
        "lora.targets",
        "lora.dora",
        "lora.tokens",
    )
    # What a user would have to leave out, and whether this sweep has it.
    obstacles = {
        **{f"{key} as an axis": key in axes for key in shared_keys},
        "a model.init that is a Python file": code_named(settings.model.init) is not None,
        objective_of(settings).key: objective_of(settings).has_key,
        "train.memory = stream": settings.train.memory == "stream",
        f"{ranks} processes": ranks > 1,
    }
    for obstacle, is_present in obstacles.items():
        if is_present:
            raise UsageError(
                f"--distill trains one language model, on one device, on all members: leave out {obstacle}"
            )


def open_student(sweep: Sweep, outcomes: Sequence[Outcome], best: int) -> Run:
    """Return the student: the run that learns from a sweep's finished members, its teachers.

    It is begun if it does not exist, with the settings of the best member and a seed that no member
    has. If the settings leave open how to compile, it is compiled block by block, because a graph of the
    whole step would hold every teacher.

    Args:
        sweep: the sweep.
        outcomes: the members' results.
        best: the best member's index.

    Raises:
        InputRefused: the members cannot teach one model.
    """
    run = Run(sweep.run.folder / DISTILLED)
    if run.has_begun:
        return run
    run = Run.create(run.folder)
    with run.lock(new=True):
        write_teachers(run, [each.run for each in outcomes if each.summary])
        seeds = {each.member.settings.train.seed for each in outcomes}
        unused_seed = next(seed for seed in range(len(seeds) + 1) if seed not in seeds)
        changed: dict[str, Any] = {SEED: unused_seed}
        settings_given = outcomes[best].member.settings
        settings_used = run_settings(outcomes[best].run)
        if settings_given.train.compile == "auto" and settings_used.train.compile == "whole":
            changed["train.compile"] = "blocks"
        write_config(run, settings_used.resolve(changed, ORIGIN))
    return run


def measure_of(outcomes: Sequence[Outcome]) -> Measure:
    """Return what members are compared by: the first measure that all members with scores have."""
    evaluations = [outcome.evaluation for outcome in outcomes if outcome.evaluation]
    measures = measures_of(outcomes[0].member)
    for measure in measures:
        if all(evaluation.get(measure.key) is not None for evaluation in evaluations):
            return measure
    return measures[-1]


def _measure_json(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return what members are compared by, as `--json` prints it."""
    measure = measure_of(outcomes)
    names = ("key", "unit", "higher_is_better")
    return {name: getattr(measure, name) for name in names}


def compare_settings(outcomes: Sequence[Outcome]) -> Table:
    """Return the settings compared on held-out records."""
    measure = measure_of(outcomes)
    values = [outcome.score(measure.key) for outcome in outcomes]
    knobs = [outcome.member.knobs for outcome in outcomes]
    stopped = [index for index, outcome in enumerate(outcomes) if outcome.stopped is not None]
    return tabulate(
        values,
        knobs,
        SEED,
        measure.unit,
        stopped,
        higher_is_better=measure.higher_is_better,
    )


def table_lines(table: Table, outcomes: Sequence[Outcome]) -> list[str]:
    """Return the table as aligned lines.

    Its columns are the knobs, mean ± standard error over seeds, and standing against the best setting.

    Args:
        table: the compared settings.
        outcomes: the outcomes of all members.
    """
    keys = list(dict.fromkeys(key for setting in table.settings for key in setting.knobs))
    rows = [[*map(short_key, keys), table.unit, ""]]
    for setting in table.settings:
        any_diverged = any(
            outcomes[member].diverged is not None for member in setting.members.values()
        )
        # Without a mean, `mean_text` says that all members diverged.
        is_unscored = setting.mean is None and not any_diverged
        value = "" if is_unscored else mean_text(setting.mean)
        knobs = [value_text(setting.knobs[key]) if key in setting.knobs else "" for key in keys]
        rows.append([*knobs, value, _standing(table, setting, outcomes)])
    column_widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, column_widths, strict=True)]
        lines.append("   ".join(cells).rstrip())
    return lines


def _standing(table: Table, setting: Setting, outcomes: Sequence[Outcome]) -> str:
    """Return a setting's standing against the best one, or what ended its members early."""
    members = [outcomes[member] for member in setting.members.values()]
    fates = []
    updates = [member.diverged for member in members if member.diverged is not None]
    if updates:
        count = ""
        if len(updates) < len(members):
            count = f"{len(updates)} of {len(members)} "
        fates.append(f"{count}diverged at update {', '.join(map(str, updates))}")
    stop = next((member for member in members if member.stopped is not None), None)
    if stop is not None and stop.win_probability is not None:
        probability = max(stop.win_probability, LEAST_SHOWN)
        fates.append(f"stopped at update {stop.stopped}: best with P < {probability:.1g}")
    return table.standing(setting, ", ".join(fates))


def verdict(table: Table) -> str:
    """Return which setting is best, in a few words."""
    if table.best is None:
        return "every member diverged"
    if table.none_is_better:
        return f"none: all have the same score; what is called best is member {table.best.member}'s"
    knobs = table.best.setting.knobs
    if not knobs:  # only the seed varies
        return f"member {table.best.member}"
    return describe_knobs(dict(knobs))


def results_json(
    outcomes: Sequence[Outcome], table: Table
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """Return the members and the best setting as `--json` prints them; None if there is no best."""
    members = []
    for outcome in outcomes:
        # The newest checkpoint comes first.
        checkpoints = [
            folder for _, folder in list_checkpoints(outcome.run.checkpoints) if is_folder(folder)
        ]
        measures = measures_of(outcome.member)
        scores = {
            measure.key: outcome.evaluation.get(measure.key) for measure in reversed(measures)
        }
        members.append(
            {
                "knobs": dict(outcome.member.knobs),
                **standard_json(scores),
                "train_loss": last_trained_row(outcome.rows).get("train_loss"),
                "diverged": outcome.diverged,
                "stopped": outcome.stopped,
                "win_probability": outcome.win_probability,
                "run": str(outcome.run.folder),
                "checkpoint": str(checkpoints[0]) if checkpoints else None,
            }
        )
    if table.best is None:
        return members, None
    best = table.best.setting
    best_member = members[table.best.member]
    mean = best.mean
    return members, {
        "knobs": dict(best.knobs),
        "member": table.best.member,
        "mean": mean.value if mean else None,
        "standard_error": mean.standard_error if mean else None,
        "unit": table.unit,
        "tied": [dict(setting.knobs) for setting in table.settings if setting.tied],
        "noise": table.noise,
        "run": best_member["run"],
        "checkpoint": best_member["checkpoint"],
    }


def make_summary(
    rows: Sequence[Mapping[str, Any]], run: Run, further_entries: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the summary that marks a member's run as finished, as the summary of any run does.

    Args:
        rows: the rows of its metrics.
        run: the run.
        further_entries: entries that the metrics do not have.
    """
    trained = [row for row in rows if "train_loss" in row]
    evaluation: Mapping[str, Any] = next((row for row in reversed(rows) if NATS in row), {})
    rates = [row["tokens_per_s"] for row in trained if row.get("tokens_per_s")]
    return {
        "schema": "monograph.train/1",
        "run": str(run.folder),
        "update": trained[-1]["update"],
        "tokens": trained[-1]["tokens"],
        "train_loss": trained[-1]["train_loss"],
        **{key: evaluation.get(key) for key in (NATS, BITS)},
        "tokens_per_s": statistics.median(rates) if rates else None,
        **further_entries,
    }


def result_object(sweep: Sweep, outcomes: Sequence[Outcome], table: Table) -> dict[str, Any]:
    """Return the object that `--json` prints, which is also the result in sweep.json."""
    members, best = results_json(outcomes, table)
    training_s = sweep.record.get("training_s", 0.0)
    tokens = sweep.record.get("tokens", 0)
    return {
        "schema": SCHEMA,
        "run": str(sweep.run.folder),
        "measure": _measure_json(outcomes),
        "members": members,
        "best": best,
        "advice": advice.advice_json(advice.advise(sweep, table)),
        "wall_s": sweep.record.get("elapsed_s"),
        "tokens_per_s": tokens / training_s if training_s else None,
    }


def result_so_far(
    outcomes: Sequence[Outcome], table: Table, spent_s: float, rate: float
) -> dict[str, Any]:
    """Return the results of a sweep that has not ended, in the form of `result_object`.

    They also say how many members have finished.

    Args:
        outcomes: the members' present outcomes.
        table: their comparison.
        spent_s: the seconds spent so far.
        rate: target tokens per second in the last updates; 0 before the first update.
    """
    members, best = results_json(outcomes, table)
    return {
        "measure": _measure_json(outcomes),
        "members": members,
        "best": best,
        "advice": [],
        "wall_s": spent_s,
        "tokens_per_s": rate or None,
        "finished": sum(outcome.summary is not None for outcome in outcomes),
    }


def chart_settings(table: Table) -> list[dict[str, Any]]:
    """Return the settings in the form that `monograph.report.sweep_report` draws."""
    best = table.best.setting if table.best and not table.none_is_better else None
    chart_entries = []
    for setting in table.settings:
        standing = "tied" if setting.tied and best else ""
        if setting is best:
            standing = "best"
        elif setting.stopped:
            standing = "stopped"
        chart_entries.append(
            {
                "knobs": {short_key(key): value for key, value in setting.knobs.items()},
                "mean": setting.mean.value if setting.mean else None,
                "standard_error": setting.mean.standard_error if setting.mean else None,
                "values": [table.values[member] for member in setting.members.values()],
                "standing": standing,
            }
        )
    return chart_entries


# A member may differ from the same run alone by this many times the difference between two ways to
# train that run alone (`verify_member`).
MAX_DIFFERENCE_RATIO = 4.0
# Once rounding alone changes a loss by more than this share of it, the loss says little of whether two
# runs are the same.
TELLING_SHARE = 0.01


class EagerUpdates(NamedTuple):
    """The first updates of a member, which it made eagerly while its graph was compiled.

    Attributes:
        number: the number of these updates; 0 if the graph was compiled before the first update.
        warmup_updates: the warm-up of the schedule by which they were made.
    """

    number: int
    warmup_updates: int


NO_EAGER_UPDATES = EagerUpdates(0, 0)


def verify_member(
    outcome: Outcome, progress: Progress, eager: EagerUpdates = NO_EAGER_UPDATES
) -> dict[str, Any]:
    """Compare a member's training losses with those of the same run trained alone.

    The result is printed and returned.

        difference = max over updates of |member - alone|
        equal      = difference <= 4 · max over updates of |alone - alone in another way|

    The other way is to train without compiling or, if the member is not compiled, in micro-batches of
    half the size. Each way rounds differently, and training amplifies the differences. How much depends
    on the run, so the bound is not fixed: the two ways to train alone show what rounding changes.

    Args:
        outcome: the member's results.
        progress: the display.
        eager: the member's eager updates.

    Raises:
        InputRefused: the member has no metrics, or its run is damaged.
    """
    member_losses = [row["train_loss"] for row in outcome.rows if row.get("train_loss") is not None]
    if not member_losses:
        raise InputRefused(f"{outcome.run.folder} has no updates to compare: train the sweep first")
    plan = resolve(run_settings(outcome.run), describe())
    with closing(open_swept(plan, progress)) as task:
        return _verify_alone(outcome, plan, task, member_losses, progress, eager)


def _verify_alone(
    outcome: Outcome,
    plan: RunPlan,
    task: SweptTask,
    member_losses: list[float],
    progress: Progress,
    eager: EagerUpdates,
) -> dict[str, Any]:
    """Do what `verify_member` does, for the plan and the records of the run alone."""
    has_compiler = default_device().type == "cuda" or compiler_obstacle() is None
    compiled = plan.training.compile != "none" and has_compiler
    updates = len(member_losses)
    losses = train_alone(outcome.run, plan, task, updates, progress, compiled=compiled, eager=eager)
    if not compiled:
        half_size = {"train.micro_batch": max(1, plan.training.rows // 2)}
        plan = resolve(plan.record.settings.resolve(half_size, "verify"), describe())
    other_losses = train_alone(
        outcome.run, plan, task, updates, progress, compiled=False, eager=eager
    )
    found = compare_losses(member_losses, losses, other_losses)
    progress.line(
        "verify",
        f"member {outcome.member.index} against the same run alone, the training losses of {updates} updates in "
        f"{plan.training.precision}: largest difference {found.difference:.2g}, "
        f"{'within' if found.equal else 'beyond'} {found.bound:.2g} (4 x what two ways to compute it alone differ by)",
    )
    if found.telling_updates < updates:
        progress.line(
            "",
            f"rounding grows from update to update, here by the rate: from update {found.telling_updates + 1} on two "
            f"ways to compute it alone differ by over {TELLING_SHARE:.0%}, so a later loss says little. Before that "
            f"the member differs by {found.telling_difference:.2g}, the two ways by {found.telling_rounding:.2g}",
        )
    return {"member": outcome.member.index, "updates": updates, **found._asdict()}


class ComparedLosses(NamedTuple):
    """How the training losses of a member compare with those of the same run alone.

    Attributes:
        difference: the largest difference of the member from the run alone.
        bound: MAX_DIFFERENCE_RATIO times the largest difference of two ways to train the run alone.
        equal: whether the difference is within the bound.
        telling_updates: after how many updates the two ways first differ by more than TELLING_SHARE of
            the loss. Rounding has grown so much by then that later losses say little.
        telling_difference: the largest difference of the member in these updates.
        telling_rounding: the largest difference of the two ways in these updates.
    """

    difference: float
    bound: float
    equal: bool
    telling_updates: int
    telling_difference: float
    telling_rounding: float


def compare_losses(
    member: list[float], alone: list[float], otherwise: list[float]
) -> ComparedLosses:
    """Compare a member's losses with those of its run alone; see `ComparedLosses`.

    Args:
        member: the member's losses.
        alone: the losses of its run alone.
        otherwise: the losses of its run alone, trained in another way.
    """
    difference = largest_difference(member, alone)
    bound = MAX_DIFFERENCE_RATIO * largest_difference(alone, otherwise)
    telling = len(alone)
    for update, (one, other) in enumerate(zip(alone, otherwise, strict=True)):
        if largest_difference([one], [other]) > TELLING_SHARE * abs(one):
            telling = update
            break
    return ComparedLosses(
        difference,
        bound,
        difference <= bound,
        telling,
        largest_difference(member[:telling], alone[:telling]),
        largest_difference(alone[:telling], otherwise[:telling]),
    )


def largest_difference(one: list[float], other: list[float]) -> float:
    """Return the largest difference at any update, 0 without updates; nan and infinity are equal to themselves."""

    def difference(a: float, b: float) -> float:
        both_nan = math.isnan(a) and math.isnan(b)
        return 0.0 if a == b or both_nan else abs(a - b)

    return max((difference(a, b) for a, b in zip(one, other, strict=True)), default=0.0)


def schedule_after_eager(schedule: Schedule, eager: EagerUpdates) -> Schedule:
    """Return the schedule of a member that made its eager updates before its length was known.

    In these updates the rate is constant after a warm-up; after them it follows `schedule`.
    """
    eager_schedule = constant(eager.warmup_updates)

    def schedule_of_both(index: int) -> float:
        return eager_schedule(index) if index < eager.number else schedule(index)

    return schedule_of_both


def train_alone(
    run: Run,
    plan: RunPlan,
    task: SweptTask,
    updates: int,
    progress: Progress,
    *,
    compiled: bool,
    eager: EagerUpdates = NO_EAGER_UPDATES,
) -> list[float]:
    """Train a run alone from its beginning, and return its training losses.

    It has the schedule of the member with which it is compared.

    Args:
        run: the run; nothing is written there.
        plan: its plan.
        task: what it learns from.
        updates: how many updates to make.
        progress: the display.
        compiled: whether to compile it.
        eager: the member's eager updates.
    """
    built = build_run(plan, task, describe())
    engine = make_engine(built, default_device())
    engine.step.schedule = schedule_after_eager(plan.schedule(plan.updates or updates), eager)
    alone = task.for_member()
    alone.begin(run, engine, World(), lambda: plan)
    batches = alone.windows(0, None, ())
    seed_all(plan.job.seed)
    way = "compiled" if compiled else f"eager, micro-batches of {engine.micro_batch}"
    with progress.stage("alone", way) as stage:
        if compiled:
            by_block = built.plan.training.compile == "blocks"
            window = Rehearsal([built], task, engine).window
            with buffers_kept(engine.model, engine.step.loss):
                capture_engine(engine, window, "blocks" if by_block else "whole")
        alone.copy_reference_weights([alone], engine)
        alone.score_reference(batches.rows_per_window, silent())
        losses = []
        for update in train(engine, batches, updates):
            losses.append(update.loss)  # a tensor on the device, which is read after all updates
            stage.report("update", update.index + 1, updates)
        values: list[float] = torch.stack(losses).tolist()
    batches.close()
    return values
