"""Track and show a sweep while it runs: the rounds that remain, the progress, and each member's
results so far.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from monograph.data.corpus import Corpus
from monograph.device import Device, clock, default_device, describe
from monograph.distributed.world import World
from monograph.evaluation.text import evaluate_members
from monograph.planner import defaults
from monograph.report.in_progress import PageInProgress
from monograph.report.quantities import count, counted, duration
from monograph.report.sweep_charts import Curve
from monograph.report.sweep_report import write_page_so_far, write_sweep_report
from monograph.run.progress import Progress, SweepDisplay, silent
from monograph.run.started import told
from monograph.session.brief import CACHED_S, COMPILE_S
from monograph.session.objectives.texts import open_corpus
from monograph.session.plan import Length
from monograph.session.ranks import show
from monograph.session.requirements import require_possible
from monograph.session.resolve import resolve
from monograph.session.setup import repeatable
from monograph.storage.cache_dir import keep_compiled
from monograph.sweeps import eager_start, results
from monograph.sweeps.advice import advise
from monograph.sweeps.batch import MemberBatch
from monograph.sweeps.concurrency import CURVE_ROWS, Timing, choose_updates
from monograph.sweeps.folder import Sweep
from monograph.sweeps.results import Outcome
from monograph.sweeps.spec import Member, groups_of, members_of, short_key, spread_rounds


class SweepProgress:
    """The state of a running sweep.

    Attributes:
        sweep: the sweep's folder.
        members: all members; groups: the same members, grouped by what one graph can hold.
        timings: a timing for each group, once prepared; updates: the number of updates of each
            group's members.
        rate: targets per second of the last updates, over all members that train at once.
        done: number of updates so far, summed over this rank's members.
        page: the page of the sweep so far.
    """

    def __init__(self, sweep: Sweep, progress: Progress, world: World | None = None):
        """Read the results of earlier processes; each of several ranks trains its share of the
        rounds.
        """
        self.sweep = sweep
        self.progress = progress
        self.world = world or World()
        self.members = members_of(sweep.settings, sweep.points)
        self.groups = groups_of(self.members)
        self.outcomes = self.read()
        self.timings: list[Timing] = []
        self.updates: list[int] = []
        self.rate, self.done = 0.0, 0
        self._began_s = clock()
        self._training_s = 0.0
        self.page = PageInProgress(self._write_page)

    def read(self) -> list[Outcome]:
        """Return the present outcome of every member, whichever process trained it."""
        return [results.read_outcome(self.sweep, member) for member in self.members]

    @property
    def batches(self) -> list[tuple[Timing, int, list[Member]]]:
        """Return this rank's rounds as (the group's timing, number of updates, members)."""
        pairs = zip(self.timings, self.updates, strict=True)
        batches = [
            (timing, updates, members)
            for timing, updates in pairs
            for members in timing.group.batches()
        ]
        return batches[self.world.rank :: self.world.size]

    @property
    def spent_s(self) -> float:
        """Return the seconds spent so far, over all processes."""
        earlier: float = self.sweep.record.get("elapsed_s", 0.0)
        return earlier + clock() - self._began_s

    @property
    def figures(self) -> str:
        """Return the figures shown next to the bar."""
        return count(self.rate, "tok/s") if self.rate else ""

    def prepare(self, device: torch.device, machine: Device) -> None:
        """Read the text, decide how many members train at once and for how long, and print that.

        Raises:
            OutOfDeviceMemory: not even one member fits.
            UsageError: settings exclude one another or are impossible on this machine.
        """
        self.open(device, machine)
        saved_groups = self.sweep.record.get("groups")
        if saved_groups:
            for timing, saved in zip(self.timings, saved_groups, strict=True):
                timing.group.rounds, timing.group.why = saved["rounds"], saved["why"]
                if saved.get("compile") == "none":
                    timing.leave_uncompiled()
            self.updates = [saved["updates"] for saved in saved_groups]
        else:
            for timing in self.timings:
                if timing.is_brief():
                    timing.leave_uncompiled()
                    self.progress.line(
                        "eager", "not compiled: the members train in less time than compiling takes"
                    )
            self.sweep.forget_members()
            self._tell_time()
            with eager_start.start_eagerly(
                self.sweep, self.timings, self.progress, alone=self.world.alone
            ) as early:
                self.updates = choose_updates(
                    self.timings, self.least_tokens, self.progress, early.updates
                )
                early.settle(self.updates)
            spread_rounds(self.groups, self.world.size)
            begun = (
                {"eager_updates": early.updates, "eager_length": early.length}
                if early.updates
                else {}
            )
            self.sweep.record["groups"] = [
                {
                    "rounds": group.rounds,
                    "updates": updates,
                    "why": group.why,
                    "compile": group.plan.training.compile,
                    **begun,
                }
                for group, updates in zip(self.groups, self.updates, strict=True)
            ]
            self.sweep.write()
        self._tell_plan()

    def open(self, device: torch.device, machine: Device) -> None:
        """Read the text, and resolve the members' settings as far as that alone allows.

        Raises:
            UsageError: settings exclude one another or are impossible on this machine.
        """
        for member in self.members:
            require_possible(member.settings, machine)
            member.plan = resolve(member.settings, machine)
        pairs = zip(self.groups, self._texts(), strict=True)
        self.timings = [Timing(group, text, device, machine) for group, text in pairs]

    @property
    def least_tokens(self) -> int:
        """Return the least number of tokens of a member."""
        return self.sweep.record.get("least_tokens", 0)  # type: ignore[no-any-return]

    def eager_updates_of(self, member: Member) -> tuple[int, int]:
        """Return how many updates the member made before its graph was compiled, and those of their
        warm-up.
        """
        saved = next(
            one
            for one, group in zip(self._saved, self.groups, strict=True)
            if member in group.members
        )
        if not saved.get("eager_updates"):
            return 0, 0
        machine = describe()
        plan = resolve(member.settings, machine)
        return saved["eager_updates"], resolve(
            plan, machine, Length(saved["eager_length"])
        ).intervals.warmup_updates

    @property
    def _saved(self) -> list[dict[str, Any]]:
        return self.sweep.record["groups"]  # type: ignore[no-any-return]

    def _texts(self) -> list[Corpus]:
        """Return each group's corpus; groups that share a text open it once."""
        texts: dict[str, Corpus] = {}
        for group in self.groups:
            if (key := repr(group.plan.job.reading)) not in texts:
                texts[key] = open_corpus(group.plan.job.reading, self.progress)
        return [texts[repr(group.plan.job.reading)] for group in self.groups]

    def _tell_time(self) -> None:
        """Print how long a sweep by the clock trains, and how long it will take in all."""
        plan = self.groups[0].plan
        if any(timing.given_updates for timing in self.timings):
            return
        compiled = [group for group in self.groups if group.plan.training.compile != "none"]
        training_s = 60 * plan.job.span.minutes
        whole_s = (
            self.spent_s + len(compiled) * (COMPILE_S + CACHED_S) + training_s + defaults.END_S
        )
        parts = "preparation, compiling and report" if compiled else "preparation and report"
        self.progress.line(
            "time",
            f"{duration(training_s)} of training, about {duration(whole_s)} in all with {parts}",
        )

    def _tell_plan(self) -> None:
        for group, updates, saved in zip(self.groups, self.updates, self._saved, strict=True):
            size = group.plan.training.tokens_per_update
            left = updates - saved.get("eager_updates", 0)
            seconds = group.compile_s + left * group.update_s + group.held_out_s
            self.progress.line(
                "plan",
                f"{group.name + ': ' if group.name else ''}{counted(updates, 'update')} of {size:,} tokens = "
                f"{count(updates * size)} each; {group.why}{', about ' + duration(seconds) if seconds else ''}",
            )

    def block(self) -> SweepDisplay:
        """Return the live bar and table."""
        self.done = sum(
            updates * len(members) for _, updates, members in self.batches if self.all_over(members)
        )
        work = sum(updates * len(members) for _, updates, members in self.batches)
        return SweepDisplay(self.progress.screen, work, self.table, self.done)

    def table(self) -> list[str]:
        """Return the table of results so far."""
        return results.table_lines(results.compare_settings(self.outcomes), self._lost())

    def _lost(self) -> dict[int, int]:
        return {
            outcome.member.index: outcome.diverged
            for outcome in self.outcomes
            if outcome.diverged is not None
        }

    def all_over(self, members: Sequence[Member]) -> bool:
        """Return whether each of these members has finished or diverged."""
        return all(self.outcomes[member.index].over for member in members)

    def ended(self, members: Sequence[Member]) -> dict[int, int]:
        """Return the update after which each diverged member did so, by its place among `members`."""
        places = enumerate(self.outcomes[member.index].diverged for member in members)
        return {place: at for place, at in places if at is not None}

    def resumed(self, batch: MemberBatch) -> int:
        """Count the updates that earlier processes have done of a round; return them, summed over
        its members.
        """
        before = len(batch.members) * batch.engine.index
        self.done += before
        return before

    def trained(self, batch: MemberBatch, updates: int, seconds: float) -> None:
        """Record that a round's members were trained for `updates` updates in `seconds`."""
        first = batch.sessions[0]
        targets = first.text.stats.packed_share * first.plan.training.tokens_per_update
        self.rate = len(batch.members) * updates * targets / max(seconds, 1e-9)
        self.done += len(batch.members) * updates
        self._training_s += seconds

    def evaluate(self, batch: MemberBatch, update: int, *, last: bool) -> None:
        """Score held-out rows by every member that still learns and record the scores; at the end,
        also score all.
        """
        self._score(batch, update, CURVE_ROWS)
        if last:
            self._score(batch, update, None)
        self._read(batch)

    def _score(self, batch: MemberBatch, update: int, limit: int | None) -> None:
        rows = batch.sessions[0].text.held_out
        measured = evaluate_members(
            batch.engine, rows, batch_rows=batch.engine.micro_batch or 16, limit=limit
        )
        used = min(limit or len(rows), len(rows))
        tokens = torch.atleast_1d(batch.engine.step.tokens).tolist()
        for place, (session, score) in enumerate(zip(batch.sessions, measured, strict=True)):
            if place not in batch.ended:
                scores = {"eval_loss": score.loss, "eval_bits_per_byte": score.bits_per_byte}
                session.run.log(
                    {"update": update, "tokens": tokens[place], **scores, "eval_rows": used}
                )

    def _read(self, batch: MemberBatch) -> None:
        for member in batch.members:
            self.outcomes[member.index] = results.read_outcome(self.sweep, member)

    def ends(self, batch: MemberBatch) -> None:
        """Write the summary row into the metrics of each member that finished, as any run does."""
        self._read(batch)
        for place, session in enumerate(batch.sessions):
            if place not in batch.ended:
                known = {
                    "dtype": session.plan.training.precision,
                    "params": session.params,
                    "eval_weights": "averaged" if session.plan.averaged else "last",
                }
                summary = results.summary(
                    self.outcomes[batch.members[place].index].rows, session.run, known
                )
                session.run.log({"update": summary["update"], "summary": summary})
        self._read(batch)

    def keep_time(self) -> None:
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
        outcomes = self.read()
        table = results.compare_settings(outcomes)
        found = results.result_so_far(outcomes, table, self.spent_s, self.rate)
        folder = self.sweep.run.folder
        settings = results.chart_settings(table)
        curves = _curves(outcomes)
        write_page_so_far(folder, found, settings, curves, told(self.sweep.run), state)

    def finish(self) -> dict[str, Any]:
        """Compare the settings, write tables and figures and print the results; return the object
        of `--json`.
        """
        table = results.compare_settings(self.outcomes)
        self.sweep.record["tokens"] = sum(
            next((row["tokens"] for row in reversed(outcome.rows) if "train_loss" in row), 0)
            for outcome in self.outcomes
        )
        result = results.result_object(self.sweep, self.outcomes, table)
        wide_lines = []
        if table.best:
            self.sweep.link_best(table.best.member)
            wide_lines = self.sweep.write_wide(dict(table.best.setting.knobs))
        self.sweep.record["result"] = result
        self.sweep.write()
        path = self.sweep.write_table(result["members"])
        report = self.sweep.run.report
        with self.progress.stage("report", f"{report}, {path}"):
            table_lines = results.table_lines(table, self._lost())
            origin = told(self.sweep.run)
            write_sweep_report(
                self.sweep.run.folder,
                result,
                results.chart_settings(table),
                _curves(self.outcomes),
                origin,
            )
        self.progress.gap()
        for number, line in enumerate(table_lines):
            self.progress.line("members" if number == 0 else "", line)
        self.progress.line("best", results.verdict(table))
        for each in advise(self.sweep, table):
            self.progress.line("advice", each.text)
            if each.arguments:
                show(self.progress, "", *each.arguments)
        for line in wide_lines:
            self.progress.line("width", line)
        spent = duration(self.sweep.record.get("elapsed_s", 0.0))
        self.progress.line(
            "done", f"{counted(len(self.members), 'member')} in {spent}   {self.sweep.run.folder}"
        )
        return result


def compile_sweep(folder: str) -> None:
    """Compile the graphs of a sweep that is not begun yet, so that the process that trains it finds
    them in the cache.

    Which graphs these are is measured here, as it will be there.
    """
    keep_compiled()
    repeatable(default_device())
    state = SweepProgress(Sweep.open(Path(folder)), silent())
    state.open(default_device(), describe())
    choose_updates(state.timings, state.least_tokens, state.progress)


def _curves(outcomes: Sequence[Outcome]) -> list[Curve]:
    """Return each member's knobs, by their short names, and the rows of its metrics."""
    return [
        ({short_key(key): value for key, value in one.member.knobs.items()}, one.rows)
        for one in outcomes
    ]
