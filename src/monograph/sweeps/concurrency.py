"""Decide how many members train at once, from measured times of one member and of a few widths
(members in a graph).

    T(K) = seconds of one update of K members in one graph; linear between measured widths, a + b·K
    total(K) = updates · sum over rounds of T(members of the round) + seconds of compiling that is
    still to do

Wider is not always faster: where one member fills the device, T(K) is K · T(1) or worse.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from monograph import compat, planner
from monograph.data.corpus import Corpus
from monograph.device import Device, clock, compiler_obstacle, synchronize
from monograph.engine import Engine
from monograph.ensemble import Ensemble
from monograph.errors import InputRefused, OutOfDeviceMemory, UsageError
from monograph.evaluation.text import evaluate_members
from monograph.graph.inspect import buffers_kept
from monograph.loss import Batch
from monograph.planner import defaults
from monograph.report.quantities import counted, duration
from monograph.run.folder import Run
from monograph.run.progress import Progress
from monograph.session import warmup
from monograph.session.brief import COMPILE_S, LEAST_COMPILE_S
from monograph.session.eager_start import has_spare_core
from monograph.session.resolve import resolve
from monograph.session.setup import BuiltRun
from monograph.sweeps.batch import (
    EVALUATIONS,
    MemberBatch,
    begin_batch,
    build_models,
    make_members_engine,
    reuse_engine,
    stack_windows,
    with_length,
)
from monograph.sweeps.spec import Group, Member

# The speed of a wider graph is unknown before it is compiled. So it is tried only if it could save
# twice its compile time: if it then saves nothing, the sweep takes at most half as long again as
# members one after another.
MIN_SAVING = 2.0


class WidthTime(NamedTuple):
    """The measured seconds of a width; width 1 is the ordinary engine.

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
        total_s: seconds of the whole training, with the compiling that is still to do.
        why: the reason, in one line.
    """

    members: int
    total_s: float
    why: str


def round_sizes(members: int, width: int) -> list[int]:
    """Return the number of members of each round: few rounds, of sizes as equal as possible, larger
    ones first.
    """
    count = -(-members // width)
    return [members // count + (index < members % count) for index in range(count)]


def predict_update_s(timed: Mapping[int, WidthTime], width: int) -> float:
    """Return T(width), measured or linear between the nearest measured widths, never less than a
    narrower width's.
    """
    if width in timed:
        return timed[width].update_s
    below = max((measured for measured in timed if measured < width), default=1)
    above = min((measured for measured in timed if measured > width), default=None)
    # Beyond the widest measured width, a member is taken to cost as much as there on average.
    if above is None:
        return timed[below].update_s * width / below
    share = (width - below) / (above - below)
    line = timed[below].update_s + share * (timed[above].update_s - timed[below].update_s)
    return max(line, timed[below].update_s)


def predict_total_s(
    timed: Mapping[int, WidthTime], members: int, width: int, updates: int
) -> float:
    """Return the seconds until all members are trained; a new width is taken to compile as long as
    the nearest one.
    """
    sizes = round_sizes(members, width)
    new = {size for size in sizes if size not in timed}
    compile_s = sum(
        timed[min(timed, key=lambda known: abs(known - size))].compile_s for size in new
    )
    return updates * sum(predict_update_s(timed, size) for size in sizes) + compile_s


def next_width(
    timed: Mapping[int, WidthTime],
    members: int,
    most: int,
    updates: int,
    compile_ratio: float = 1.0,
) -> int | None:
    """Return the width that is worth measuring next; None if there is none.

    Width 1 comes first. Then comes the widest that fits, if it could save MIN_SAVING times its compile
    time, given that K members take at least as long as one. After that comes the width that the
    linear T(K) predicts to be fastest, if that is faster than all measured ones.

    Args:
        timed: the measurements so far.
        members: the number of members in the group.
        most: the number of members that fit the memory at once.
        updates: the number of updates of each member.
        compile_ratio: estimated compile time of a graph of several members relative to one member's.
    """
    if 1 not in timed:
        return 1
    widths = {
        round_sizes(members, width)[0] for width in range(1, min(most, members) + 1)
    } - timed.keys()
    if not widths:
        return None
    if len(timed) == 1:
        widest = max(widths)
        saved = updates * (members - len(round_sizes(members, widest))) * timed[1].update_s
        return widest if saved > MIN_SAVING * compile_ratio * timed[1].compile_s else None
    promised = min(widths, key=lambda width: predict_total_s(timed, members, width, updates))
    known = min(predict_total_s(timed, members, width, updates) for width in timed)
    return promised if predict_total_s(timed, members, promised, updates) < known else None


def choose_width(timed: Mapping[int, WidthTime], members: int, updates: int) -> Width:
    """Return the measured width with the shortest total time; of equal ones, the smaller."""
    best = min(sorted(timed), key=lambda width: predict_total_s(timed, members, width, updates))
    alone = members * timed[1].update_s
    fused = [width for width in timed if width > 1]
    shown = (
        best
        if best > 1 or not fused
        else min(fused, key=lambda width: _together(timed, members, width))
    )
    gain = alone / _together(timed, members, shown)
    return Width(
        best,
        predict_total_s(timed, members, best, updates),
        _why(timed, members, best, shown, gain),
    )


def _together(timed: Mapping[int, WidthTime], members: int, width: int) -> float:
    """Return the seconds of one update of all members."""
    return sum(predict_update_s(timed, size) for size in round_sizes(members, width))


def _why(timed: Mapping[int, WidthTime], members: int, best: int, shown: int, gain: float) -> str:
    if members == 1:
        return "one member"
    if shown == 1:
        return f"{members} members one after another: compiling a wider graph takes too much of what it could save"
    measured = f"measured at {', '.join(map(str, sorted(timed)))}"
    several = f"{shown} at once" if shown < members else "all at once"
    if best == 1:
        return f"{members} members, {several}: {gain:.2f}x over one after another, so one after another ({measured})"
    return f"{members} members, {several}: {gain:.2f}x over one after another ({measured})"


# Compile time of a graph of several members relative to one member's (dev/log.md), and of a graph
# in the compiler's cache relative to a new one (benchmarks/start.py).
WIDE_COMPILE_RATIO, CACHED_COMPILE_RATIO = 1.3, 0.23
CURVE_ROWS = 16  # held-out rows scored for a point of a curve; the last point uses all


class Timing:
    """The timed widths of one group, and the engines captured for them, which later train the first
    round.

    Attributes:
        timed: the measurements by width.
        most: the number of members that fit at once.
        compile_ratio: estimated compile time of a graph of several members relative to one member's.
        refused: why no graph holds several members, in one line; empty if one does or it was not
            tried.
        row_s: seconds of scoring a held-out row by all members, by width.
        kept: the first members' models and their captured engine, by width.
    """

    def __init__(self, group: Group, text: Corpus, device: torch.device, machine: Device):
        """Store the group; nothing is built yet."""
        self.group = group
        self.text = text
        self.device = device
        self.machine = machine
        self.timed: dict[int, WidthTime] = {}
        self.row_s: dict[int, float] = {}
        self.most = len(group.members)
        self.refused = ""
        self.compile_ratio = WIDE_COMPILE_RATIO
        self.kept: dict[int, tuple[list[BuiltRun], Engine]] = {}

    @property
    def given_updates(self) -> int:
        """Return the number of updates that the group's settings give; 0 if they give a time
        instead.
        """
        plan = self.group.plan
        rows = self.text.train.per_epoch * (plan.job.span.epochs or 0)
        return plan.updates or -(-rows // plan.training.window_rows)

    def is_brief(self) -> bool:
        """Return whether all members train in less time without compiling than compiling takes.

        That is so if the settings leave compiling open, and give a short time, or updates of which
        one is quick.
        """
        updates = self.given_updates
        plan = self.group.plan
        if "compile" not in plan.open or plan.memory == "stream":
            return False
        if not updates:  # where nobody trains meanwhile, the whole of compiling is waited for
            return 60 * plan.job.span.minutes < (
                LEAST_COMPILE_S if has_spare_core(self.machine) else COMPILE_S
            )
        began = clock()
        built_runs = build_models(self.group.members[:1], self.text, self.machine)
        engine = make_members_engine(built_runs, False, self.device)
        window = first_window(built_runs, self.text)
        opening_s = clock() - began
        if opening_s >= LEAST_COMPILE_S:
            return False
        with buffers_kept(engine.model, engine.step.loss), engine.step.counters_kept():
            engine.rehearse(window)  # the first one takes longer
            began = clock()
            engine.rehearse(window)
            synchronize(self.device)
            seconds = clock() - began
        return len(self.group.members) * updates * seconds < LEAST_COMPILE_S

    def leave_uncompiled(self) -> None:
        """Have all members train without a graph."""
        for member in self.group.members:
            member.settings = member.settings.resolve({"train.compile": "none"}, "plan")
            member.plan = resolve(member.settings, self.machine)

    def measure(self, updates: int, progress: Progress) -> None:
        """Time every width that `next_width` returns, for runs of `updates` updates.

        Raises:
            OutOfDeviceMemory: not even one member fits.
        """
        while (
            width := next_width(
                self.timed, len(self.group.members), self.most, updates, self.compile_ratio
            )
        ) is not None:
            if width == 1:
                self.timed[1] = self._time(1, progress)
                continue
            try:
                self.timed[width] = self._time(width, progress)
            except OutOfDeviceMemory as error:
                self.most = width - 1
                progress.line("memory", f"{width} members at once: {error}")
            except (UsageError, InputRefused) as error:
                self.most = 1
                self.refused = str(error)

    def decide(self, updates: int) -> None:
        """Fix the group's rounds by the widths timed so far, and drop the engines that no round
        needs.
        """
        choice = choose_width(self.timed, len(self.group.members), updates)
        alone = f"{counted(len(self.group.members), 'member')}, one after another: {self.refused}"
        self.group.rounds = round_sizes(len(self.group.members), choice.members)
        self.group.why = alone if self.refused else choice.why
        self.group.update_s = sum(predict_update_s(self.timed, size) for size in self.group.rounds)
        self.group.compile_s = max(0.0, choice.total_s - updates * self.group.update_s)
        self.group.held_out_s = self.held_out_s(self.group.rounds)
        for width in [width for width in self.kept if width not in self.group.rounds]:
            del self.kept[width]

    def held_out_s(self, rounds: Sequence[int]) -> float:
        """Return the seconds of all evaluations of members that train in these rounds."""
        rows = EVALUATIONS * CURVE_ROWS + len(self.text.held_out)
        return rows * sum(self.row_s.get(size, self.row_s[1]) for size in rounds)

    def batch(
        self, members: Sequence[Member], runs: Sequence[Run], updates: int, progress: Progress
    ) -> MemberBatch:
        """Return the members of a round, ready to train from their beginning.

        The first round gets the engine that was timed, and a single member after it takes that
        engine over. Another round of several members is built and captured again, which is fast
        because of the compiler's cache.
        """
        size = len(members)
        first = members[0] is self.group.members[0]
        if first and size in self.kept:
            built_runs, engine = self.kept[size]
            return begin_batch(members, runs, with_length(built_runs, updates), self.text, engine)
        built_runs = with_length(build_models(members, self.text, self.machine), updates)
        engine = make_members_engine(built_runs, have_different_seeds(built_runs), self.device)
        if size == 1 and 1 in self.kept and reuse_engine(self.kept[1][1], engine):
            engine = self.kept[1][1]
        else:
            capture(
                engine,
                first_window(built_runs, self.text),
                built_runs[0].plan.training.compile,
                progress,
            )
            self.kept |= {1: (built_runs, engine)} if size == 1 else {}
        return begin_batch(members, runs, built_runs, self.text, engine)

    def _time(self, width: int, progress: Progress) -> WidthTime:
        built_runs = build_models(self.group.members[:width], self.text, self.machine)
        for line in built_runs[0].notes if width == 1 else ():
            progress.line("tokens", line)
        if width == 1 and (plan := built_runs[0].plan.expected):
            self.most = min(
                self.most, max(1, planner.budget(self.machine) // plan.peak_memory_bytes)
            )
        window = first_window(built_runs, self.text)
        engine = make_members_engine(built_runs, have_different_seeds(built_runs), self.device)
        began = clock()
        cached = compat.graphs_from_cache()
        capture(engine, window, built_runs[0].plan.training.compile, progress)
        compile_s = clock() - began
        if width == 1 and compat.graphs_from_cache() > cached:
            # Relative to a cached graph; that of several members may not be cached.
            self.compile_ratio = WIDE_COMPILE_RATIO / CACHED_COMPILE_RATIO
        with buffers_kept(engine.model, engine.step.loss):
            seconds = timed_update(engine, window)
            size = engine.micro_batch or CURVE_ROWS
            began = clock()
            evaluate_members(engine, self.text.held_out, batch_rows=size, limit=size)
            self.row_s[width] = (clock() - began) / size
        self.kept[width] = built_runs, engine
        return WidthTime(seconds, compile_s)


def capture(engine: Engine, window: Batch, scope: str, progress: Progress) -> None:
    """Compile as `monograph train` does; where that fails, report the reason and train eagerly."""
    size = engine.size if isinstance(engine, Ensemble) else 1
    if scope == "none" or (engine.step.device.type == "cpu" and compiler_obstacle()):
        return
    what = "one member" if size == 1 else f"{counted(size, 'member')} in one graph"
    by_block = scope == "blocks" and not isinstance(engine, Ensemble)
    with progress.stage("compile", what) as stage, buffers_kept(engine.model, engine.step.loss):
        stage.result = (
            warmup.capture(engine, window, "blocks" if by_block else "whole") or "0 graph breaks"
        )


def timed_update(engine: Engine, window: Batch) -> float:
    """Return the seconds of an update of all members; weights and counters are unchanged
    afterwards.
    """

    def together() -> None:
        engine.accumulate(window)
        engine.update()  # frozen members compute their update, too, and discard it

    if not isinstance(engine, Ensemble):
        return warmup.seconds_per_update(engine, lambda: engine.rehearse(window))
    frozen, index = engine.stacked.frozen, engine.index
    frozen.fill_(True)
    seconds = warmup.seconds_per_update(engine, together)
    frozen.fill_(False)
    engine.step.index = index
    return seconds


def have_different_seeds(built_runs: Sequence[BuiltRun]) -> bool:
    """Return whether the members have different seeds, and therefore different windows."""
    return len({built.plan.job.seed for built in built_runs}) > 1


def first_window(built_runs: Sequence[BuiltRun], text: Corpus) -> Batch:
    """Return the first window that the members train on: [R, ...] for one seed, else [N, R, ...]."""
    windows = []
    for built in built_runs if have_different_seeds(built_runs) else built_runs[:1]:
        batches = text.batches(built.plan.training.tokens_per_update, seed=built.plan.job.seed)
        windows.append(next(batches))
        batches.close()
    return (
        stack_windows(windows, range(len(windows)))
        if have_different_seeds(built_runs)
        else windows[0]
    )


def choose_updates(
    timings: Sequence[Timing], least_tokens: int, progress: Progress, done: int = 0
) -> list[int]:
    """Return the number of updates for each group's members, as given or as the time allows, timing
    where needed.

    Given minutes are those of the whole sweep. Every member then learns from equally many tokens,
    at least `least_tokens`.

    Args:
        timings: a timing for each group.
        least_tokens: the least number of tokens of a member.
        progress: the display.
        done: updates that each member has made already, which take nothing from the time.
    """
    for timing in timings:
        if given := timing.given_updates:
            timing.measure(given, progress)
            timing.decide(given)
    open_ended = [timing for timing in timings if not timing.given_updates]
    if not open_ended:
        return [timing.given_updates for timing in timings]
    minutes = open_ended[0].group.plan.job.span.minutes
    budget_s = defaults.UPDATES_SHARE * 60 * minutes
    for timing in open_ended:
        timing.measure(1, progress)  # one member is always timed, whatever the length
    per_token_s, evaluations_s = _costs(
        open_ended, [[1] * len(timing.group.members) for timing in open_ended]
    )
    tokens = max(least_tokens, _tokens_in(budget_s, per_token_s, evaluations_s))
    for timing in open_ended:
        updates = max(1, round(tokens / _size(timing)))
        timing.measure(updates, progress)
        timing.decide(updates)
    per_token_s, evaluations_s = _costs(open_ended, [timing.group.rounds for timing in open_ended])
    tokens = _tokens_in(budget_s, per_token_s, evaluations_s)
    if tokens < least_tokens:
        longer = duration(least_tokens * per_token_s + evaluations_s)
        progress.line(
            "time",
            f"{longer} instead of {minutes:g} min: learning rates cannot be told apart sooner",
        )
        tokens = least_tokens
    plans = [timing.group.plan for timing in timings]
    most = [
        defaults.most_updates(
            timing.text.train.per_epoch, plan.training.window_rows, plan.training.optim.weight_decay
        )
        for timing, plan in zip(timings, plans, strict=True)
    ]
    return [
        timing.given_updates
        or min(limit, done + defaults.updates_for(tokens, _size(timing), limit))
        for timing, limit in zip(timings, most, strict=True)
    ]


def _size(timing: Timing) -> int:
    return timing.group.plan.training.tokens_per_update


def _costs(timings: Sequence[Timing], rounds: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Return (seconds in which every member trains on one token, seconds of all evaluations), for
    given rounds.
    """
    pairs = list(zip(timings, rounds, strict=True))
    per_token_s = sum(
        sum(predict_update_s(timing.timed, size) for size in sizes) / _size(timing)
        for timing, sizes in pairs
    )
    return per_token_s, sum(timing.held_out_s(sizes) for timing, sizes in pairs)


def _tokens_in(seconds: float, per_token_s: float, evaluations_s: float) -> float:
    """Return how many tokens every member can train on in some seconds, of which evaluations take
    at most half.
    """
    return max(seconds / 2, seconds - evaluations_s) / per_token_s
