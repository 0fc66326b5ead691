"""Decide how many members train at once, from measured times of a few widths.

A group is the members that could share one graph. They train in rounds, one after another; the members
of a round train at once, in one graph. The width of a graph is the number of its members.

    T(K) = seconds of one update of a graph of width K; linear between measured widths, a + b·K
    total(K) = updates · sum over rounds of T(members of the round) + seconds of compiling that is
               still to do, for rounds of at most K members

A wider graph is not always faster: if one member fills the device, T(K) is K · T(1) or worse.

To capture an engine is to compile its step, and on a GPU to record it for replaying.
"""

import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from monograph import compat, planner
from monograph.device import Device, clock, compiler_obstacle, synchronize
from monograph.engine import Engine
from monograph.ensemble import Ensemble
from monograph.errors import InputRefused, OutOfDeviceMemory, UsageError
from monograph.graph.inspect import buffers_kept
from monograph.loss import Batch
from monograph.model.llama import Llama
from monograph.planner import defaults
from monograph.predict.roofline import Calibration
from monograph.report.quantities import counted, duration, memory
from monograph.run.folder import Run
from monograph.run.progress import Progress
from monograph.run.recorded_state import MAX_COUNT
from monograph.session import warmup
from monograph.session.brief import COMPILE_S, MIN_COMPILE_S
from monograph.session.eager_start import has_spare_core
from monograph.session.objective import SweptTask
from monograph.session.plan import RunPlan
from monograph.session.setup import BuiltRun
from monograph.storage.cache_dir import calibration_file
from monograph.sweeps.cohort import (
    EVALUATIONS,
    Cohort,
    base_bytes,
    begin_cohort,
    build_base,
    build_models,
    make_members_engine,
    reuse_engine,
    with_length,
)
from monograph.sweeps.looks import looks_of
from monograph.sweeps.members_memory import MembersMemory
from monograph.sweeps.rehearsal import Rehearsal
from monograph.sweeps.spec import Member, MemberGroup, have_own_rows, plan_of_member

# The speed of a wider graph is unknown before it is compiled. So a graph is tried only if it could
# save at least this many times its compile time. It cannot save more than the time of all members
# one after another, so its compile time is at most half of that. If it then saves nothing, the
# sweep takes at most 1.5 times as long as the members one after another.
MIN_SAVING = 2.0


class WidthTime(NamedTuple):
    """The measured seconds of a graph of some width. Width 1 is an ordinary engine.

    Attributes:
        update_s: seconds of one update of all its members.
        compile_s: seconds of tracing and compiling its graph.
    """

    update_s: float
    compile_s: float


class Width(NamedTuple):
    """The chosen number of members that train at once.

    Attributes:
        members: the number; 1 means one after another.
        total_s: seconds of the whole training, with the evaluations, and the compiling that is still to
            do.
        why: the reason, in one line.
    """

    members: int
    total_s: float
    why: str


def sizes_of_rounds(members: int, width: int) -> list[int]:
    """Return the number of members of each round, if a round has at most `width` members.

    There are as few rounds as possible, their sizes differ by at most one, and the larger ones come
    first.
    """
    rounds = math.ceil(members / width)
    smaller_size = members // rounds
    larger_rounds = members % rounds
    return [smaller_size + 1] * larger_rounds + [smaller_size] * (rounds - larger_rounds)


def predict_update_s(timed: Mapping[int, WidthTime], width: int) -> float:
    """Return T(width), the seconds of one update of all members of a graph of this width.

    A time that was not measured is interpolated between the times of the nearest measured widths.
    It is never less than the time of the narrower width, even if the wider one took less.

    Args:
        timed: the measurements by width, which include width 1.
        width: the width.
    """
    if width in timed:
        return timed[width].update_s
    below = max((measured for measured in timed if measured < width), default=1)
    above = min((measured for measured in timed if measured > width), default=None)
    # Beyond the widest measured width, a member is assumed to cost as much as a member there.
    if above is None:
        return timed[below].update_s * width / below
    fraction = (width - below) / (above - below)
    rise_s = timed[above].update_s - timed[below].update_s
    interpolated_s = timed[below].update_s + fraction * rise_s
    return max(interpolated_s, timed[below].update_s)


def predict_total_s(
    timed: Mapping[int, WidthTime], members: int, width: int, updates: int
) -> float:
    """Return total(width), the seconds until all members are trained.

    A width that was not measured is assumed to compile as long as the nearest measured one.

    Args:
        timed: the measurements by width.
        members: the number of members.
        width: the width.
        updates: the number of updates of each member.
    """
    sizes = sizes_of_rounds(members, width)
    compile_s = 0.0
    # A width that was measured is compiled already.
    unmeasured_sizes = set(sizes) - timed.keys()
    for size in unmeasured_sizes:
        nearest = min(timed, key=lambda measured: abs(measured - size))
        compile_s += timed[nearest].compile_s
    return updates * sum(predict_update_s(timed, size) for size in sizes) + compile_s


def next_width(
    timed: Mapping[int, WidthTime],
    members: int,
    max_at_once: int,
    updates: int,
    compile_ratio: float = 1.0,
) -> int | None:
    """Return the width that is worth measuring next; None if there is none.

    Width 1 comes first. Then comes the widest that fits, if it could save more than MIN_SAVING
    times its compile time, supposing that its members take as long together as one alone. After
    that comes the width with the shortest predicted total time, if that is shorter than for every
    measured width.

    Args:
        timed: the measurements so far.
        members: the number of members in the group.
        max_at_once: the number of members that fit the memory at once.
        updates: the number of updates of each member.
        compile_ratio: estimated compile time of a graph of several members, divided by that of a
            graph of one member.
    """
    if 1 not in timed:
        return 1
    # 8 members in rounds of at most 5 are two rounds of 4, so a width of 5 is not worth measuring.
    used_widths = {
        sizes_of_rounds(members, width)[0] for width in range(1, min(max_at_once, members) + 1)
    }
    widths = used_widths - timed.keys()
    if not widths:
        return None
    only_one_is_timed = len(timed) == 1
    if only_one_is_timed:
        widest = max(widths)
        rounds = len(sizes_of_rounds(members, widest))
        # At best, a round takes as long as one member.
        saved_s = updates * (members - rounds) * timed[1].update_s
        compile_s = compile_ratio * timed[1].compile_s
        return widest if saved_s > MIN_SAVING * compile_s else None
    predicted_s = {width: predict_total_s(timed, members, width, updates) for width in widths}
    fastest = min(widths, key=lambda width: predicted_s[width])
    best_measured_s = min(predict_total_s(timed, members, width, updates) for width in timed)
    return fastest if predicted_s[fastest] < best_measured_s else None


def choose_width(
    timed: Mapping[int, WidthTime],
    members: int,
    updates: int,
    peak_bytes: Mapping[int, int] = types.MappingProxyType({}),
    held_out_s: Mapping[int, float] = types.MappingProxyType({}),
) -> Width:
    """Return the measured width with the shortest total time; of equal widths, the smaller one.

    Args:
        timed: the measurements by width.
        members: the number of members.
        updates: the number of updates of each member.
        peak_bytes: the planned memory by width, which the reason names; empty: there is no plan.
        held_out_s: by width, the seconds of all evaluations, which are added; 0 where there are none.
    """
    totals = {
        width: predict_total_s(timed, members, width, updates) + held_out_s.get(width, 0.0)
        for width in sorted(timed)
    }
    best = min(totals, key=totals.__getitem__)
    # The reason compares a width with members one after another. If that is what is chosen, it is
    # compared with the fastest graph of several members.
    compared = best
    wider = [width for width in totals if width > 1]
    if best == 1 and wider:
        compared = min(wider, key=totals.__getitem__)
    speedup = totals[1] / totals[compared]
    return Width(
        best,
        totals[best],
        _why(timed, members, best, compared, speedup, peak_bytes),
    )


def _why(
    timed: Mapping[int, WidthTime],
    members: int,
    best: int,
    compared: int,
    speedup: float,
    peak_bytes: Mapping[int, int],
) -> str:
    """Return the reason for choosing a width, in one line.

    Args:
        timed: the measurements by width.
        members: the number of members.
        best: the chosen width.
        compared: the width that is compared with members one after another.
        speedup: how many times as fast `compared` is.
        peak_bytes: the planned memory by width, or nothing.
    """
    if members == 1:
        return "one member"
    if compared == 1:
        return f"{members} members one after another: compiling a wider graph takes too much of what it could save"
    measured = f"measured at {', '.join(map(str, sorted(timed)))}"
    at_once = f"{compared} at once" if compared < members else "all at once"
    if peak_bytes:
        at_once += f" ({memory(peak_bytes[compared])}; one alone {memory(peak_bytes[1])})"
    if best == 1:
        at_once += f": {speedup:.2f}x over one after another, so one after another"
    # This does not say how much faster it is: the plan that `SweepProgress` prints has both times.
    return f"{members} members, {at_once} ({measured})"


# Compile time of a graph of several members, divided by that of one member (dev/log.md).
WIDE_COMPILE_RATIO = 1.3
# Compile time of a graph in the compiler's cache, divided by that of a new one
# (benchmarks/start.py).
CACHED_COMPILE_RATIO = 0.23
CURVE_ROWS = 16  # held-out rows scored for a point of a curve; the last point uses all


class CapturedEngine(NamedTuple):
    """An engine that was captured in order to time a width.

    Attributes:
        built_runs: the models of its members, which are the first ones of the group.
        engine: the engine.
    """

    built_runs: list[BuiltRun]
    engine: Engine


class TimedGroup:
    """A group of members with its timed widths, and the engines captured for them.

    It decides the group's rounds and makes their cohorts: a cohort is the members of a round with the
    engine that trains them. One of the captured engines trains the first round.

    Attributes:
        group: the group.
        task: what its members learn from.
        device: the device that trains them.
        machine: the description of that device.
        timed: the measurements by width.
        max_at_once: the number of members that fit the memory at once.
        compile_ratio: see `next_width`.
        refusal: why no graph can hold several members, in one line; "" if one can, or if that was
            not tried.
        held_out_row_s: by width, the seconds in which all members of a graph score one held-out row.
        engines: the captured engine of each timed width.
    """

    def __init__(self, group: MemberGroup, task: SweptTask, device: torch.device, machine: Device):
        """Store the arguments, which are attributes of the class; nothing is built yet."""
        self.group = group
        self.task = task
        self.device = device
        self.machine = machine
        self.timed: dict[int, WidthTime] = {}
        self.held_out_row_s: dict[int, float] = {}
        self.max_at_once = len(group.members)
        self.refusal = ""
        self.compile_ratio = WIDE_COMPILE_RATIO
        self.engines: dict[int, CapturedEngine] = {}
        self._base: BuiltRun | None = None  # see `build`
        # The planned memory; None until one member was built, or if there is no plan.
        self._memory: MembersMemory | None = None

    def build(self, members: Sequence[Member]) -> list[BuiltRun]:
        """Build the models of some of the group's members.

        Members with adapters share one base, which is built by the first call.

        Raises:
            OutOfDeviceMemory: not even one member fits.
        """
        if self._base is None:
            self._base = build_base(members[0], self.task, self.machine)
        return build_models(members, self.task, self.machine, self._base)

    @property
    def given_updates(self) -> int:
        """The number of updates that the group's settings give; 0 if they give a time instead."""
        plan = self.group.plan
        epochs = plan.job.span.epochs
        if plan.updates or not epochs:
            return plan.updates
        return self.task.updates_in_epochs(plan, epochs)

    def is_brief(self) -> bool:
        """Return whether all members train in less time without compiling than compiling takes.

        This is false if the settings say whether to compile. If they give a time, it is compared with a
        usual compile time. If they give updates, one update is timed.
        """
        updates = self.given_updates
        plan = self.group.plan
        if "compile" not in plan.open_choices or plan.memory == "stream":
            return False
        if not updates:
            # On a spare core, the graphs compile while the members train. Without one, the sweep waits
            # until they are compiled.
            compile_s = MIN_COMPILE_S if has_spare_core(self.machine) else COMPILE_S
            return 60 * plan.job.span.minutes < compile_s
        began = clock()
        built_runs = self.build(self.group.members[:1])
        engine = make_members_engine(built_runs, own_rows=False, device=self.device)
        rehearsal = Rehearsal(built_runs, self.task, engine)
        window = rehearsal.window
        building_s = clock() - began
        # A model that takes so long to build also takes long to update, so no update is timed.
        if building_s >= MIN_COMPILE_S:
            return False
        with buffers_kept(engine.model, engine.step.loss), engine.step.counters_kept():
            engine.rehearse(window)  # the first update takes longer, so it is not timed
            began = clock()
            engine.rehearse(window)
            synchronize(self.device)
            update_s = clock() - began + rehearsal.window_s(updates)
        return len(self.group.members) * updates * update_s < MIN_COMPILE_S

    def leave_uncompiled(self) -> None:
        """Change the settings of all members so that they train without a graph."""
        for member in self.group.members:
            member.settings = member.settings.resolve({"train.compile": "none"}, "plan")
            member.plan = plan_of_member(member.settings, self.machine)

    def measure(self, updates: int, progress: Progress) -> None:
        """Time every width that `next_width` asks for, for runs of `updates` updates.

        Raises:
            OutOfDeviceMemory: not even one member fits.
        """
        members = len(self.group.members)
        while True:
            width = next_width(self.timed, members, self.max_at_once, updates, self.compile_ratio)
            if width is None:
                return
            # If one member alone cannot be trained, the sweep ends, so these errors are not caught.
            if width == 1:
                self.timed[1] = self._time(1, progress)
                continue
            try:
                self.timed[width] = self._time(width, progress)
            except OutOfDeviceMemory as error:
                self.max_at_once = width - 1
                progress.line("memory", f"{width} members at once: {error}")
            except (UsageError, InputRefused) as error:
                self.max_at_once = 1
                self.refusal = str(error)

    def decide(self, updates: int) -> None:
        """Set the group's rounds and their predicted times, by the widths timed so far.

        It also drops the captured engines that no round needs.
        """
        peak_bytes = (
            {width: self._memory.planned_bytes(width) for width in self.timed}
            if self._memory
            else {}
        )
        members = len(self.group.members)
        held_out_s = {
            width: self.held_out_s(sizes_of_rounds(members, width)) for width in self.timed
        }
        choice = choose_width(self.timed, members, updates, peak_bytes, held_out_s)
        self.group.round_sizes = sizes_of_rounds(members, choice.members)
        self.group.why = choice.why
        if self.refusal:
            self.group.why = f"{counted(members, 'member')}, one after another: {self.refusal}"
        self.group.update_s = sum(
            predict_update_s(self.timed, size) for size in self.group.round_sizes
        )
        self.group.held_out_s = held_out_s[choice.members]
        training_s = updates * self.group.update_s
        self.group.compile_s = max(0.0, choice.total_s - training_s - self.group.held_out_s)
        self.group.one_by_one_update_s = members * self.timed[1].update_s
        self.group.one_by_one_held_out_s = held_out_s[1]
        unused_widths = self.engines.keys() - set(self.group.round_sizes)
        for width in unused_widths:
            del self.engines[width]

    def looks_worth_it(self, updates: int) -> list[int]:
        """Return the deciding looks (`monograph.sweeps.pruning`) after which stopping members pays.

        The members that go on need a smaller graph, which has to be compiled. At best, it makes the
        remaining updates of a round in no time. So a look is left out if the remaining updates take
        less than MIN_SAVING times as long as compiling.

        Args:
            updates: the number of updates of each member.
        """
        largest = max(self.group.round_sizes)
        nearest = min(self.timed, key=lambda width: abs(width - largest))
        update_s = predict_update_s(self.timed, largest)
        return [
            look
            for look in looks_of(updates).deciding
            if (updates - look) * update_s > MIN_SAVING * self.timed[nearest].compile_s
        ]

    def held_out_s(self, rounds: Sequence[int]) -> float:
        """Return the seconds of all evaluations of all members.

        Args:
            rounds: the number of members of each round.
        """
        initial = int(self.task.scores_initial_weights)
        if self.task.held_out_rows:
            rows = EVALUATIONS * CURVE_ROWS + (initial + 1) * self.task.held_out_rows
        else:
            # Sampled answers are scored, the same number each time. An evaluation counts as one
            # row, as in `_time`.
            rows = initial + EVALUATIONS
        return rows * sum(map(self._held_out_row_s_of, rounds))

    def _held_out_row_s_of(self, width: int) -> float:
        """Return the seconds in which all members of a graph of this width score one held-out row.

        If it was not timed, a member takes as long as a member of the nearest width that was.
        """
        nearest = min(self.held_out_row_s, key=lambda timed: abs(timed - width))
        return self.held_out_row_s[nearest] * width / nearest

    def cohort_of_round(
        self, members: Sequence[Member], runs: Sequence[Run], updates: int, progress: Progress
    ) -> Cohort:
        """Return the cohort of a round, ready to train from its beginning.

        The first round gets the engine that was timed. A later round of one member takes over the
        captured engine of one member. A later round of several members is built and captured again,
        which is fast because of the compiler's cache.
        """
        size = len(members)
        first_members = self.group.members[:size]
        are_first = all(one is other for one, other in zip(members, first_members, strict=True))
        if are_first and size in self.engines:
            # This engine is captured already, so the round need not compile. The engine of one
            # member is kept, since later rounds take it over.
            built_runs, engine = self.engines[1] if size == 1 else self.engines.pop(size)
            return begin_cohort(members, runs, with_length(built_runs, updates), self.task, engine)
        built_runs = with_length(self.build(members), updates)
        engine = make_members_engine(built_runs, have_own_rows(plans_of(built_runs)), self.device)
        captured = self.engines.get(1) if size == 1 else None
        if captured and reuse_engine(captured.engine, engine):
            engine = captured.engine
        else:
            capture_or_train_eagerly(
                Rehearsal(built_runs, self.task, engine),
                built_runs[0].plan.training.compile,
                progress,
            )
            if size == 1:
                self.engines[1] = CapturedEngine(built_runs, engine)
        return begin_cohort(members, runs, built_runs, self.task, engine)

    def _time(self, width: int, progress: Progress) -> WidthTime:
        """Build and capture the engine of the first members, keep it, and return its times."""
        if width > 1:
            self.group.plan.job.objective.require_at_once(self.group.plan)
        built_runs = self.build(self.group.members[:width])
        if width == 1:
            for line in built_runs[0].notes:
                progress.line("tokens", line)
            expected = built_runs[0].plan.expected
            if expected:
                self._memory = MembersMemory(
                    expected,
                    [member.plan for member in self.group.members if member.plan],
                    base_bytes(built_runs[0]),
                    planner.budget(self.machine),
                    extra_bytes=partial(self._extra_bytes, built_runs[0]),
                )
                self.max_at_once = min(self.max_at_once, self._memory.most())
        engine = make_members_engine(built_runs, have_own_rows(plans_of(built_runs)), self.device)
        updates = self._likely_updates(built_runs[0])
        expected_runs = with_length(built_runs, updates)
        rehearsal = Rehearsal(expected_runs, self.task, engine)
        window = rehearsal.window
        began = clock()
        cached_before = compat.graphs_from_cache()
        capture_or_train_eagerly(rehearsal, built_runs[0].plan.training.compile, progress)
        compile_s = clock() - began
        if width == 1 and compat.graphs_from_cache() > cached_before:
            # The measured compile time is that of a cached graph, but the graph of several members
            # may not be in the cache.
            self.compile_ratio = WIDE_COMPILE_RATIO / CACHED_COMPILE_RATIO
        with buffers_kept(engine.model, engine.step.loss):
            update_s = timed_update(engine, window) + rehearsal.window_s(updates)
            rows = engine.micro_batch or CURVE_ROWS
            evaluation_s = rehearsal.evaluation_s(rows)
            # Without held-out rows, answers are sampled and scored, which counts as one row.
            scored_rows = rows if self.task.held_out_rows else 1
            self.held_out_row_s[width] = evaluation_s / scored_rows
        self.engines[width] = CapturedEngine(built_runs, engine)
        return WidthTime(update_s, compile_s)

    def _likely_updates(self, built: BuiltRun) -> int:
        """Return the number of updates that each member will probably make, if all take turns.

        Args:
            built: the model of the first member, whose plan predicts the time of an update.
        """
        plan = built.plan
        if self.given_updates or plan.expected is None:
            return max(1, self.given_updates)
        update_s = plan.expected.update_s
        if isinstance(built.model, Llama):
            calibration = Calibration(calibration_file())
            extra = plan.job.objective.extra_time(
                plan, built.model.config, self.machine, calibration
            )
            update_s += extra.seconds if extra else 0.0
        training_s = defaults.UPDATES_SHARE * 60 * plan.job.span.minutes
        return defaults.updates_in_time(training_s, len(self.group.members) * update_s, MAX_COUNT)

    def _extra_bytes(self, built: BuiltRun, members: int) -> int:
        """Return the bytes that members who train at once need in addition to their step.

        Args:
            built: the model of the first member.
            members: the number of members.
        """
        if not isinstance(built.model, Llama):
            return 0
        plan = built.plan
        adapters = [member.plan.job.adapters() for member in self.group.members if member.plan]
        ranks = [each.rank for each in adapters if each]
        if plan.training.lora and ranks:
            # All adapters are counted with the largest rank.
            lora = replace(plan.training.lora, rank=max(ranks))
            plan = plan.with_training(replace(plan.training, lora=lora))
        by_origin = plan.job.objective.extra_bytes(
            plan, built.model.config, self.machine, self.task.slots(plan), members=members
        )
        return sum(by_origin.values())


def capture_or_train_eagerly(rehearsal: Rehearsal, scope: str, progress: Progress) -> None:
    """Compile an engine as `monograph train` does.

    If that fails, the reason is reported and the engine trains eagerly.

    Args:
        rehearsal: the engine, with its members.
        scope: the compile scope of the members' plans: "none", "blocks" or "whole". An ensemble, which
            holds several members, is always one graph.
        progress: the display.
    """
    engine = rehearsal.engine
    size = engine.size if isinstance(engine, Ensemble) else 1
    has_no_compiler = engine.step.device.type == "cpu" and compiler_obstacle() is not None
    if scope == "none" or has_no_compiler:
        return
    compiled = "one member" if size == 1 else f"{counted(size, 'member')} in one graph"
    by_block = scope == "blocks" and not isinstance(engine, Ensemble)
    with progress.stage("compile", compiled) as stage, buffers_kept(engine.model, engine.step.loss):
        failure = warmup.capture_engine(engine, rehearsal.window, "blocks" if by_block else "whole")
        stage.result = failure or "0 graph breaks"


def timed_update(engine: Engine, window: Batch) -> float:
    """Return the seconds of an update of all members, which leaves weights and counters as they are."""
    if not isinstance(engine, Ensemble):
        return warmup.seconds_per_call(engine, lambda: engine.rehearse(window))

    def update_all() -> None:
        engine.accumulate(window)
        engine.update()

    frozen = engine.stacked_parameters.frozen
    index = engine.index
    # While members are frozen, they compute their updates and discard them.
    frozen.fill_(True)
    seconds = warmup.seconds_per_call(engine, update_all)
    frozen.fill_(False)
    engine.step.index = index
    return seconds


def plans_of(built_runs: Sequence[BuiltRun]) -> list[RunPlan]:
    """Return the plan of each run."""
    return [built.plan for built in built_runs]


def choose_updates(
    timed_groups: Sequence[TimedGroup],
    least_tokens: int,
    progress: Progress,
    updates_done: int = 0,
) -> list[int]:
    """Decide each group's rounds and updates, after timing the widths that are worth it.

    The rounds are set in the groups. The number of updates of each group's members is returned.

    The settings give the number of updates, or else the minutes of the whole sweep. Minutes are
    shared out so that every member learns from the same number of tokens.

    Args:
        timed_groups: for each group, its measured times and engines.
        least_tokens: the minimum number of tokens of a member, even if they take longer.
        progress: the display.
        updates_done: updates that each member has already made. The minutes are for further ones.
    """
    for timed_group in timed_groups:
        if timed_group.given_updates:
            timed_group.measure(timed_group.given_updates, progress)
            timed_group.decide(timed_group.given_updates)
    # The groups whose settings give minutes.
    open_ended = [timed_group for timed_group in timed_groups if not timed_group.given_updates]
    if not open_ended:
        return [timed_group.given_updates for timed_group in timed_groups]
    minutes = open_ended[0].group.plan.job.span.minutes
    budget_s = defaults.UPDATES_SHARE * 60 * minutes
    # Which widths are worth compiling depends on the number of updates, and this number depends on the
    # widths. So the number is first estimated for members one after another.
    for timed_group in open_ended:
        timed_group.measure(1, progress)  # for one update, only width 1 is timed
    one_after_another = [[1] * len(timed_group.group.members) for timed_group in open_ended]
    estimated_cost = _cost_of(open_ended, one_after_another)
    estimated_tokens = max(least_tokens, estimated_cost.affordable_tokens(budget_s))
    for timed_group in open_ended:
        updates = max(1, round(estimated_tokens / _tokens_per_update(timed_group)))
        timed_group.measure(updates, progress)
        timed_group.decide(updates)
    # Then the number is computed for the rounds that were decided.
    cost = _cost_of(open_ended, [timed_group.group.round_sizes for timed_group in open_ended])
    tokens = cost.affordable_tokens(budget_s)
    if tokens < least_tokens:
        longer = duration(least_tokens * cost.per_token_s + cost.evaluations_s)
        progress.line(
            "time",
            f"{longer} instead of {minutes:g} min: learning rates cannot be told apart sooner",
        )
        tokens = least_tokens
    updates_of_groups = []
    for timed_group in timed_groups:
        if timed_group.given_updates:
            updates_of_groups.append(timed_group.given_updates)
            continue
        training = timed_group.group.plan.training
        # A run that is given a time does not read a short text too often.
        max_updates = (
            timed_group.task.max_updates(training.window_rows, training.optim.weight_decay)
            or MAX_COUNT
        )
        # `updates_in_time` divides, here tokens by the tokens of an update.
        further_updates = defaults.updates_in_time(
            tokens, _tokens_per_update(timed_group), max_updates
        )
        updates_of_groups.append(min(max_updates, updates_done + further_updates))
    return updates_of_groups


def _tokens_per_update(timed_group: TimedGroup) -> int:
    return timed_group.group.plan.training.tokens_per_update


class _Cost(NamedTuple):
    """The seconds that a sweep takes in its rounds.

    Attributes:
        per_token_s: the seconds in which every member trains on one token.
        evaluations_s: the seconds of all evaluations.
    """

    per_token_s: float
    evaluations_s: float

    def affordable_tokens(self, budget_s: float) -> float:
        """Return on how many tokens every member can train in some seconds.

        Evaluations are assumed to take at most half of these seconds.
        """
        training_s = max(budget_s / 2, budget_s - self.evaluations_s)
        return training_s / self.per_token_s


def _cost_of(timed_groups: Sequence[TimedGroup], rounds: Sequence[Sequence[int]]) -> _Cost:
    """Return the cost of these groups, if their members train in these rounds.

    Args:
        timed_groups: for each group, its measured times and engines.
        rounds: for each group, the number of members of each round.
    """
    per_token_s = 0.0
    evaluations_s = 0.0
    for timed_group, sizes in zip(timed_groups, rounds, strict=True):
        update_s = sum(predict_update_s(timed_group.timed, size) for size in sizes)
        per_token_s += update_s / _tokens_per_update(timed_group)
        evaluations_s += timed_group.held_out_s(sizes)
    return _Cost(per_token_s, evaluations_s)
