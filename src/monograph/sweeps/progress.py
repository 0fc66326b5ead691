"""Track and show a sweep while it runs.

This file knows which rounds remain, how far they are, and each member's results so far.

A group is the members that one graph could hold. They train in rounds: the members of a round train at
once. A cohort is a round while it trains, with its engine. A knob is a key whose value varies between
members.
"""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from monograph.device import Device, clock, default_device, describe
from monograph.distributed.world import World
from monograph.evaluation.significance import Table
from monograph.planner import defaults
from monograph.report.in_progress import PageInProgress
from monograph.report.knobs import short_key
from monograph.report.quantities import count, counted, duration
from monograph.report.sweep_charts import MemberCurve
from monograph.report.sweep_report import write_page_so_far, write_sweep_report
from monograph.run.progress import Progress, SweepDisplay, silent
from monograph.run.started import describe_start
from monograph.session.brief import CACHED_S, COMPILE_S
from monograph.session.objective import SweptTask
from monograph.session.plan import Length
from monograph.session.requirements import require_possible
from monograph.session.resolve import resolve
from monograph.session.setup import make_repeatable
from monograph.session.shown_commands import show_command
from monograph.storage.cache_dir import keep_compiled
from monograph.storage.reading import is_folder
from monograph.sweeps import eager_start, results
from monograph.sweeps.advice import advise
from monograph.sweeps.best_adapter import has_adapters, write_best_adapter
from monograph.sweeps.cohort import Cohort, open_swept
from monograph.sweeps.concurrency import CURVE_ROWS, TimedGroup, choose_updates
from monograph.sweeps.folder import Sweep
from monograph.sweeps.looks import Looks, looks_of
from monograph.sweeps.pruning import hopeless, prune_plan, stop_sentence
from monograph.sweeps.results import NO_EAGER_UPDATES, EagerUpdates, Outcome
from monograph.sweeps.spec import (
    Member,
    groups_of,
    members_of,
    plan_of_member,
    spread_rounds,
)


class Round(NamedTuple):
    """Members that train at once.

    Attributes:
        timed_group: the measured times and the captured engines of their group.
        updates: the number of updates of each member.
        members: the members.
    """

    timed_group: TimedGroup
    updates: int
    members: list[Member]


class SweepProgress:
    """The state of a running sweep.

    Attributes:
        sweep: the sweep's folder.
        progress: the display.
        world: the ranks, each of which trains its share of the rounds.
        members: all members.
        groups: the members, grouped by what one graph can hold.
        outcomes: each member's results so far.
        timed_groups: for each group, its measured times and captured engines; empty until `open` or
            `prepare`.
        updates: for each group, the number of updates of its members; empty until `prepare`.
        rate: target tokens per second in the last updates, of all members that train at once; 0
            before the first updates.
        done: the number of updates so far, summed over this rank's members.
        page: the web page that shows the sweep while it runs.
    """

    def __init__(self, sweep: Sweep, progress: Progress, world: World | None = None):
        """Read the results of earlier processes.

        Args:
            sweep: the sweep's folder.
            progress: the display.
            world: the ranks; None: this process alone.
        """
        self.sweep = sweep
        self.progress = progress
        self.world = world or World()
        self.members = members_of(sweep.settings, sweep.points)
        self.groups = groups_of(self.members)
        self.outcomes = self.read_outcomes()
        self.timed_groups: list[TimedGroup] = []
        self.updates: list[int] = []
        self.rate = 0.0
        self.done = 0
        self._began_s = clock()
        self._training_s = 0.0
        self._tasks: list[SweptTask] = []
        self.page = PageInProgress(self._write_page)

    def close(self) -> None:
        """Close the members' records, and end the programs that score answers."""
        for task in self._tasks:
            task.close()

    def read_outcomes(self) -> list[Outcome]:
        """Return the present results of every member, whichever process trained it."""
        return [results.read_outcome(self.sweep, member) for member in self.members]

    @property
    def rounds(self) -> list[Round]:
        """Return this rank's rounds: the ranks take turns in the list of all rounds."""
        rounds = []
        for timed_group, updates in zip(self.timed_groups, self.updates, strict=True):
            for members in timed_group.group.rounds():
                rounds.append(Round(timed_group, updates, members))
        return rounds[self.world.rank :: self.world.size]

    @property
    def spent_s(self) -> float:
        """Return the seconds spent so far, over all processes."""
        earlier: float = self.sweep.record.get("elapsed_s", 0.0)
        return earlier + clock() - self._began_s

    @property
    def speed_text(self) -> str:
        """Return the speed, as it is shown next to the bar."""
        return count(self.rate, "tok/s") if self.rate else ""

    def prepare(self, device: torch.device, machine: Device) -> None:
        """Read the text, decide how many members train at once and for how long, and print that.

        Raises:
            OutOfDeviceMemory: not even one member fits.
            UsageError: settings exclude one another or are impossible on this machine.
        """
        self.open(device, machine)
        was_decided = bool(self.sweep.record.get("groups"))
        if was_decided:
            self._restore_rounds()
        else:
            self._decide_rounds()
        self._print_plan()

    def _restore_rounds(self) -> None:
        """Take over the rounds and the numbers of updates that an earlier process has decided."""
        for timed_group, saved in zip(self.timed_groups, self._saved_groups, strict=True):
            timed_group.group.round_sizes = saved["rounds"]
            timed_group.group.why = saved["why"]
            if saved.get("compile") == "none":
                timed_group.leave_uncompiled()
        self.updates = [saved["updates"] for saved in self._saved_groups]

    def _decide_rounds(self) -> None:
        """Decide how many members train at once and for how long, and write that into the record.

        While the graphs compile, the members may make their first updates eagerly.
        """
        for timed_group in self.timed_groups:
            if timed_group.is_brief():
                timed_group.leave_uncompiled()
                self.progress.line(
                    "eager", "not compiled: the members train in less time than compiling takes"
                )
        self.sweep.forget_members()
        self._print_time()
        with eager_start.start_eagerly(
            self.sweep, self.timed_groups, self.progress, alone=self.world.alone
        ) as eager:
            self.updates = choose_updates(
                self.timed_groups, self.least_tokens, self.progress, eager.updates
            )
            eager.save(self.updates)
        spread_rounds(self.groups, self.world.size)  # so that no rank is idle
        eager_entries = {}
        if eager.updates:
            eager_entries = {"eager_updates": eager.updates, "eager_length": eager.expected_length}
        self.sweep.record["groups"] = [
            {
                "rounds": group.round_sizes,
                "updates": updates,
                "why": group.why,
                "compile": group.plan.training.compile,
                **eager_entries,
            }
            for group, updates in zip(self.groups, self.updates, strict=True)
        ]
        if self.sweep.record.get("prune") is not None:
            for saved, timed_group in zip(self._saved_groups, self.timed_groups, strict=True):
                saved["deciding_looks"] = timed_group.looks_worth_it(saved["updates"])
        self.sweep.write()

    def open(self, device: torch.device, machine: Device) -> None:
        """Read the text, and resolve the members' settings as far as the text allows.

        Raises:
            UsageError: settings exclude one another or are impossible on this machine.
        """
        for member in self.members:
            require_possible(member.settings, machine)
            member.plan = plan_of_member(member.settings, machine)
        pairs = zip(self.groups, self._open_tasks(), strict=True)
        self.timed_groups = [TimedGroup(group, task, device, machine) for group, task in pairs]

    @property
    def least_tokens(self) -> int:
        """Return the minimum number of tokens of a member."""
        return self.sweep.record.get("least_tokens", 0)  # type: ignore[no-any-return]

    def eager_updates_of(self, member: Member) -> EagerUpdates:
        """Return the updates that a member made before its graph was compiled."""
        groups = zip(self._saved_groups, self.groups, strict=True)
        # The record's entry of the member's group.
        saved = next(saved for saved, group in groups if member in group.members)
        if not saved.get("eager_updates"):
            return NO_EAGER_UPDATES
        # They were made with the warm-up of a run of the length that was expected then.
        machine = describe()
        plan = resolve(member.settings, machine)
        expected_plan = resolve(plan, machine, Length(saved["eager_length"]))
        return EagerUpdates(saved["eager_updates"], expected_plan.intervals.warmup_updates)

    @property
    def _saved_groups(self) -> list[dict[str, Any]]:
        return self.sweep.record["groups"]  # type: ignore[no-any-return]

    def _open_tasks(self) -> list[SweptTask]:
        """Return what each group learns from; groups that share their records open them once.

        Raises:
            InputRefused: no record is held out, so members cannot be compared.
        """
        opened: dict[str, SweptTask] = {}
        tasks = []
        for group in self.groups:
            job = group.plan.job
            key = repr((job.reading, job.objective))
            if key not in opened:
                opened[key] = open_swept(group.plan, self.progress)
                self._tasks.append(opened[key])
            tasks.append(opened[key])
        return tasks

    def _print_time(self) -> None:
        """Print how long a sweep with a given time trains, and how long it will take in all."""
        if any(timed_group.given_updates for timed_group in self.timed_groups):
            return
        training_s = 60 * self.groups[0].plan.job.span.minutes
        compiled = [group for group in self.groups if group.plan.training.compile != "none"]
        compile_s = len(compiled) * (COMPILE_S + CACHED_S)
        total_s = self.spent_s + compile_s + training_s + defaults.END_S
        other_work = "preparation, compiling and report" if compiled else "preparation and report"
        self.progress.line(
            "time",
            f"{duration(training_s)} of training, about {duration(total_s)} in all with {other_work}",
        )

    def _print_plan(self) -> None:
        """Print for each group the number of updates, the reason for its rounds, and the time."""
        for timed_group, updates, saved in zip(
            self.timed_groups, self.updates, self._saved_groups, strict=True
        ):
            group = timed_group.group
            remaining = updates - saved.get("eager_updates", 0)
            # These times are 0 if an earlier process has measured them: the record does not have them.
            predicted_s = group.compile_s + remaining * group.update_s + group.held_out_s
            name = f"{group.name}: " if group.name else ""
            time = f", about {duration(predicted_s)}" if predicted_s else ""
            one_by_one_s = remaining * group.one_by_one_update_s + group.one_by_one_held_out_s
            # After eager updates, it may no longer be faster to train the members at once, or the
            # difference may be too small for the printed times.
            alone = duration(one_by_one_s)
            is_faster = predicted_s < one_by_one_s and alone != duration(predicted_s)
            if is_faster and max(group.round_sizes) > 1:
                time += f" instead of {alone} one after another"
            self.progress.line(
                "plan",
                f"{name}{counted(updates, 'update')} of "
                f"{timed_group.task.describe_updates(group.plan, updates)}; {group.why}{time}",
            )
            if self.sweep.record.get("prune") is not None:
                looks = saved.get("deciding_looks", [])
                self.progress.line("prune", f"{name}{prune_plan(group, looks)}")

    def live_display(self) -> SweepDisplay:
        """Return the live bar and table.

        The bar begins at the updates of the rounds that are over and of the members that were stopped
        early, which are also counted in `done`.
        """
        self.done = 0
        total = 0
        for _, updates, members in self.rounds:
            learning = self.learning(members)
            updates_of_stopped = sum(
                self.outcomes[member.index].stopped or 0
                for member in members
                if member not in learning
            )
            total += updates * len(learning) + updates_of_stopped
            self.done += updates_of_stopped
            if self.are_over(members):
                self.done += updates * len(learning)
        return SweepDisplay(self.progress.screen, total, self.table, self.done)

    def table(self) -> list[str]:
        """Return the table of results so far."""
        table = results.compare_settings(self.outcomes)
        return results.table_lines(table, self.outcomes)

    def _divergences_by_index(self) -> dict[int, int]:
        """Return for each diverged member, by its index, the update after which it diverged."""
        return {
            outcome.member.index: outcome.diverged
            for outcome in self.outcomes
            if outcome.diverged is not None
        }

    def are_over(self, members: Sequence[Member]) -> bool:
        """Return whether each of these members has finished, has diverged or was stopped."""
        return all(self.outcomes[member.index].is_over for member in members)

    def divergences_in_round(self, members: Sequence[Member]) -> dict[int, int]:
        """Return the update after which each diverged member of a round diverged.

        The keys are the members' places in the round.
        """
        divergences = self._divergences_by_index()
        return {
            place: divergences[member.index]
            for place, member in enumerate(members)
            if member.index in divergences
        }

    def count_resumed(self, cohort: Cohort) -> int:
        """Count the updates of a round that earlier processes made.

        Returns:
            Their number, summed over the round's members.
        """
        resumed = len(cohort.members) * cohort.engine.index
        self.done += resumed
        return resumed

    def count_trained(self, cohort: Cohort, updates: int, seconds: float) -> None:
        """Record that a round's members were trained for `updates` updates in `seconds`."""
        tokens = sum(
            session.task.tokens_of_last_update(session.batches) for session in cohort.sessions
        )
        self.rate = updates * tokens / max(seconds, 1e-9)
        self.done += len(cohort.members) * updates
        self._training_s += seconds

    def evaluate(self, cohort: Cohort, update: int, *, scores_all: bool) -> list[int]:
        """Score some held-out records with every member that still learns, and record the scores.

        Args:
            cohort: the members of a round, and what trains them.
            update: the number of updates so far.
            scores_all: whether all held-out rows are scored, too.

        Returns:
            The places of the members that have no score, since their logits are not finite.
        """
        unscored = cohort.score(update, CURVE_ROWS)
        # Without held-out rows, sampled answers were scored, and all of them already.
        if scores_all and cohort.tasks[0].held_out_rows:
            unscored = cohort.score(update, None)
        self._refresh_outcomes(cohort)
        return unscored

    def evaluate_initial(self, cohort: Cohort) -> list[int]:
        """Score all held-out records with every member before its first update; see `evaluate`."""
        unscored = cohort.score(0, None)
        self._refresh_outcomes(cohort)
        return unscored

    def looks_of(self, round_: Round) -> Looks:
        """Return when the members of a round are looked at, to stop some of them early."""
        if self.sweep.record.get("prune") is None:
            return Looks()
        group = self.groups.index(round_.timed_group.group)
        return looks_of(round_.updates, self._saved_groups[group].get("deciding_looks", []))

    def learning(self, members: Sequence[Member]) -> list[Member]:
        """Return the members that were not stopped early."""
        return [member for member in members if self.outcomes[member.index].stopped is None]

    def stop_hopeless(self, round_: Round, update: int) -> bool:
        """Stop members of a round that cannot win any more, and return whether there are any.

        A row in the metrics of each such member says so. After a crash, the same members are
        stopped, since the decision depends only on metrics.

        Args:
            round_: the round.
            update: the number of updates of its members, after which they were scored.
        """
        outcomes = [results.read_outcome(self.sweep, member) for member in round_.members]
        probability = self.sweep.record["prune"]
        hopeless_members = hopeless(outcomes, round_.updates, update, probability)
        # An earlier process may have stopped some of them at this look, before it ended.
        newly_stopped = [
            outcome
            for outcome in outcomes
            if outcome.member.index in hopeless_members and outcome.stopped is None
        ]
        for outcome in newly_stopped:
            index = outcome.member.index
            bound = hopeless_members[index]
            outcome.run.log({"update": update, "stopped": update, "win_probability": bound})
            self.outcomes[index] = results.read_outcome(self.sweep, outcome.member)
        if not newly_stopped:
            return False
        left = len(self.learning(round_.members))
        self.progress.line(
            "stopped",
            f"{counted(len(newly_stopped), 'member')} after update {update}, which can hardly win any more; "
            f"{left} go on",
        )
        return True

    def _refresh_outcomes(self, cohort: Cohort) -> None:
        for member in cohort.members:
            self.outcomes[member.index] = results.read_outcome(self.sweep, member)

    def write_summaries(self, cohort: Cohort) -> None:
        """Write the summary row into the metrics of each member that finished, as any run does."""
        self._refresh_outcomes(cohort)
        doubtful = defaultdict[str, list[str]](list)  # {warning: the members that it is about}
        for place, session in enumerate(cohort.sessions):
            if place in cohort.divergences:
                continue
            further_entries = {
                "dtype": session.plan.training.precision,
                "params": session.params,
                "eval_weights": "averaged" if session.plan.averaged else "last",
            }
            member = cohort.members[place]
            rows = self.outcomes[member.index].rows
            further_entries |= session.task.summary(rows)
            if doubt := session.task.doubt(rows):
                doubtful[doubt].append(str(member.index))
            summary = results.make_summary(rows, session.run, further_entries)
            session.run.log({"update": summary["update"], "summary": summary})
        for doubt, members in doubtful.items():
            self._warn(f"member {', '.join(members)}: {doubt}")
        self._refresh_outcomes(cohort)

    def record_time(self) -> None:
        """Store how long this process worked, for the next process or the final report."""
        record = self.sweep.record
        record["elapsed_s"] = self.spent_s
        record["training_s"] = record.get("training_s", 0.0) + self._training_s
        self._began_s = clock()
        self._training_s = 0.0
        if self.world.leads:
            self.sweep.write()

    def _write_page(self, state: str) -> None:
        """Write the sweep's page with what every member has so far, whichever process trains it."""
        outcomes = self.read_outcomes()
        table = results.compare_settings(outcomes)
        result = results.result_so_far(outcomes, table, self.spent_s, self.rate)
        folder = self.sweep.run.folder
        settings = results.chart_settings(table)
        curves = _curves(outcomes)
        write_page_so_far(folder, result, settings, curves, describe_start(self.sweep.run), state)

    def finish(self) -> dict[str, Any]:
        """End a sweep whose members are all trained: compare them, and write and print the results.

        Returns:
            The object of `--json`.
        """
        table = results.compare_settings(self.outcomes)
        self.sweep.record["tokens"] = sum(
            results.last_trained_row(outcome.rows).get("tokens", 0) for outcome in self.outcomes
        )
        result = results.result_object(self.sweep, self.outcomes, table)
        transfer_lines = []
        if table.best:
            self.sweep.link_best(table.best.member)
            self._write_adapter(result, table.best.member)
            transfer_lines = self.sweep.write_wide(dict(table.best.setting.knobs))
        self.sweep.record["result"] = result
        self.sweep.write()
        csv_path = self.sweep.write_table(result["members"])
        with self.progress.stage("report", f"{self.sweep.run.report}, {csv_path}"):
            write_sweep_report(
                self.sweep.run.folder,
                result,
                results.chart_settings(table),
                _curves(self.outcomes),
                describe_start(self.sweep.run),
            )
        self._print_results(table, transfer_lines)
        return result

    def _write_adapter(self, result: dict[str, Any], best: int) -> None:
        """Write the best member's adapters for PEFT, and note their folder in the result.

        A finished sweep that is continued does not write them again.

        Args:
            result: the object of `--json`.
            best: the best member's index.
        """
        if not has_adapters(self.outcomes[best].run):
            return
        earlier_result = self.sweep.record.get("result") or {}
        earlier_best = earlier_result.get("best") or {}
        folder = earlier_best.get("adapter")
        is_written = earlier_best.get("member") == best and folder is not None and is_folder(folder)
        if not is_written:
            with self.progress.stage("adapter", "the best member's adapters, for PEFT") as stage:
                written = write_best_adapter(
                    self.sweep.run.folder, self.outcomes[best].run, self._warn
                )
                stage.result = str(written) if written else "none that PEFT could load"
            folder = str(written) if written else None
        result["best"]["adapter"] = folder

    def _warn(self, line: str) -> None:
        self.progress.line("warning", line)

    def _print_results(self, table: Table, transfer_lines: Sequence[str]) -> None:
        """Print the table, the best setting, advice, and how long it took.

        Args:
            table: the compared settings.
            transfer_lines: see `Sweep.write_wide`.
        """
        self.progress.gap()
        table_lines = results.table_lines(table, self.outcomes)
        for number, line in enumerate(table_lines):
            self.progress.line("members" if number == 0 else "", line)
        if any(setting.stopped for setting in table.settings):
            self.progress.line("stopped", stop_sentence(self.sweep.record["prune"]))
        self.progress.line("best", results.verdict(table))
        for advice in advise(self.sweep, table):
            self.progress.line("advice", advice.text)
            if advice.arguments:
                show_command(self.progress, "", *advice.arguments)
        for line in transfer_lines:
            self.progress.line("width", line)
        spent = duration(self.sweep.record.get("elapsed_s", 0.0))
        self.progress.line(
            "done", f"{counted(len(self.members), 'member')} in {spent}   {self.sweep.run.folder}"
        )


def compile_sweep(folder: str) -> None:
    """Compile the graphs of a sweep that has not begun yet, in a process of its own.

    The process that trains the sweep finds them in the cache. Both processes choose the graphs by the
    same measurements.
    """
    keep_compiled()
    make_repeatable(default_device())
    state = SweepProgress(Sweep.open(Path(folder)), silent())
    state.open(default_device(), describe())
    choose_updates(state.timed_groups, state.least_tokens, state.progress)


def _curves(outcomes: Sequence[Outcome]) -> list[MemberCurve]:
    """Return the curve of each member, with the knobs by their short names."""
    curves = []
    for outcome in outcomes:
        knobs = {short_key(key): value for key, value in outcome.member.knobs.items()}
        curves.append(MemberCurve(knobs, outcome.rows))
    return curves
