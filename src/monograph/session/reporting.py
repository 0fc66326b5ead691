"""Show a run while it trains and write its results: the held-out curve, samples, figures, summary
and last lines.
"""

import itertools
import json
import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from monograph import compat
from monograph.decode import Sampling, generate
from monograph.device import clock, default_device, describe
from monograph.errors import InputRefused
from monograph.evaluation import Evaluation
from monograph.evaluation.yardsticks import accepted_share, yardsticks
from monograph.graph import capture as graph
from monograph.graph.inspect import modes_kept
from monograph.model.llama import Llama
from monograph.planner.defaults import updates_for
from monograph.predict.roofline import flops_per_token, mfu
from monograph.profiling.memory import reset_peak_memory
from monograph.report.in_progress import PageInProgress
from monograph.report.quantities import count, counted, duration, memory
from monograph.report.run_report import About, write_report, write_run_page
from monograph.run.folder import Run
from monograph.run.progress import Progress, TrainingBlock
from monograph.run.started import told
from monograph.session.deadline import Deadline
from monograph.session.eager_start import MARK
from monograph.session.gauges import Alarm, Gauges
from monograph.session.plan import Plan
from monograph.session.ranks import show
from monograph.session.session import Session
from monograph.storage.reading import contents, exists, is_folder, parse_json


def finished(run: Run) -> dict[str, Any] | None:
    """Return the summary of a run that has ended; None if it has not, or if its last checkpoint is
    gone.
    """
    last: dict[str, Any] = {}
    # A row is damaged; resuming from a checkpoint verifies the rows that stay.
    with suppress(InputRefused):
        last = next(reversed(run.rows()), {})
    summary: dict[str, Any] | None = last.get("summary")
    if summary and not is_folder(run.checkpoints / f"step-{summary['update']:08d}"):
        return None
    return summary


SAMPLE_SHARES = (0.15, 0.5, 1.0)
SAMPLE_TOKENS = 48
RECENT = 25  # updates whose rate is averaged
# Updates, after which a run that learns nothing can be told from one that began badly.
DOUBTED_AT = 3
JUDGED_TOKENS = 160  # of each text whose lines Python's tokenizer judges at the end
LARGEST_YARDSTICK_BYTES = 64_000_000
YARDSTICKS_LEAVE_S = 120.0  # where less time is left for training, they are not computed
# After COOLING_FROM of the time, a run that would take more than LATE times its time is shortened.
# Its updates then end at END_SHARE of the time, which leaves the rest for the last evaluation and
# samples.
COOLING_FROM = 0.7
LATE = 1.03
END_SHARE = 0.97


class Reporter:
    """The reporter of one run, which shows it while it trains and its results at the end."""

    def __init__(self, session: Session, progress: Progress):
        """Compute or look up the yardsticks, choose the prompt and read the rows of earlier
        processes of the run.
        """
        self.session, self.progress = session, progress
        self.rows = session.run.rows()
        self.first = session.engine.index
        self.yardsticks = self._yardsticks()
        reset_peak_memory(session.engine.step.device)  # memory of the yardsticks does not count
        self.opening = session.task.opening(session.model_config)
        self.python = session.corpus.name == "stdlib"
        self.recompiles = 0
        self.gauges = Gauges(session.engine.step.device)
        # for the rows to come
        self.alarm = Alarm(self.gauges)
        self.read = dict[str, Any](tokens_per_s=None)
        self.rates: deque[float] = deque(maxlen=RECENT)
        self.update_s: deque[float] = deque(maxlen=RECENT)
        self.held_out: Evaluation | None = None
        self.scored_rows = 0  # by the last evaluation
        self.page = PageInProgress(self._write_page)
        self.deadline = Deadline(session)
        self.lines = (0, 0)

    def sample_updates(self) -> list[int]:
        """Return the updates after which a sample is drawn."""
        return [max(1, round(share * self.session.updates)) for share in SAMPLE_SHARES]

    def block(self) -> TrainingBlock:
        """Return the live block with the points and samples of earlier processes of the run."""
        updates = self.session.updates
        tokens = self.session.task.tokens_in_all(updates)
        name, key = self.session.task.score
        start = self.session.engine.index
        block = TrainingBlock(self.progress.screen, updates, tokens, self.yardsticks, start, name)
        for row in self.rows:
            if row.get(key) is not None:
                block.held_out(row["update"], row["tokens"], row[key])
            if "sample" in row:
                block.sample(row["share"], row["sample"])
        return block

    def rate(self, updates: int, seconds: float, row: Mapping[str, Any]) -> float:
        """Return the tokens per second of the last updates, the last of which has this row; notice
        if they are few.
        """
        self.update_s.append(seconds / updates)
        tokens = self.session.task.tokens_of(self.session.batches)
        self.rates.append(tokens / self.update_s[-1])
        self.read = {"tokens_per_s": self.rates[-1] or None, **self.gauges.read()}
        if self.session.task.is_steady and (slower := self.alarm.note(self.rates[-1], seconds)):
            self.session.run.log(
                {"update": row["update"], "tokens": row["tokens"], "slower": slower}
            )
            now, before = (count(slower[name], "tok/s") for name in ("tokens_per_s", "before"))
            why = slower["why"] or "no cause found"
            self.progress.line("warning", f"slower: {now}, {before} before: {why}")
        return self.rates[-1]

    @property
    def recent_s(self) -> float:
        """Return the median seconds of the last few updates; 0 before the first."""
        return statistics.median_high(self.update_s) if self.update_s else 0.0

    def evaluate(
        self, block: TrainingBlock, update: int, limit: int | None, **mark: object
    ) -> None:
        """Score held-out rows, or answers to held-out prompts, log the scores and show them.

        The row of the metrics has the entries of `mark`, too.
        """
        began = clock()
        score = self.session.task.evaluate(self.session.batches.rows_per_window, limit)
        if score is None:
            return
        held_out = self.session.task.held_out_rows
        if held_out:
            self.scored_rows = min(limit or held_out, held_out)
            self.deadline.row_s = (clock() - began) / self.scored_rows
        self.held_out = score.evaluation
        self.session.run.log({"update": update, "tokens": score.tokens, **score.figures, **mark})
        if score.point is not None and math.isfinite(score.point):
            block.held_out(update, score.tokens, score.point)

    def sample(self, block: TrainingBlock, update: int) -> None:
        """Log and show an answer to the first prompt with its reward, or a Llama's continuation of
        the run's prompt.

        Both always have the same random draws, so that a resumed run shows the same.
        """
        began = clock()
        written = self.session.task.sample(
            self.opening, lambda: next(iter(self._write(1, SAMPLE_TOKENS)), None)
        )
        if written is None:
            return
        self.deadline.sample_s = clock() - began
        share = update / self.session.updates
        self.session.run.log({"update": update, "share": share, "sample": written})
        block.sample(share, written)

    def keep_time(self, update: int) -> None:
        """Begin the cool-down early if the time will not suffice, once the machine's speed is known
        well.

        Where the whole run's time is limited, a cool-down that takes too long is ended early, too.
        """
        late = self._too_late if self.session.ends_s is None else self._past_deadline
        if ends := self.session.world.number(late(update)):
            again = self.session.cooled is not None
            self.session.shorten(ends)
            if again:
                self.progress.line("time", f"slower still: ending at update {ends:,}")
                return
            slower = "updates take longer than measured at the start"
            self.progress.line(
                "time", f"{slower}: cooling down from update {update:,}, ending at {ends:,}"
            )

    def _too_late(self, update: int) -> int:
        """Return the number of updates after which a run that is too slow should end; 0 if it is
        fast enough.
        """
        session = self.session
        here_s = clock() - session.training_since_s
        if (
            session.budget_s is None
            or session.cooled
            or here_s < COOLING_FROM * (session.budget_s - session.elapsed_s)
        ):
            return 0
        spent = session.spent_s
        # The last evaluation and the last samples come after the updates.
        per_update = self._per_update_s(update)
        until = END_SHARE * session.budget_s
        if spent + per_update * (session.updates - update) <= LATE * until:
            return 0
        # A cool-down is worth more than time.
        left = max(until - spent, (1 - COOLING_FROM) / 2 * session.budget_s)
        ends = update + updates_for(left, per_update, session.updates - update)
        return ends if ends < session.updates else 0

    def _past_deadline(self, update: int) -> int:
        return self.deadline.last(update, self._per_update_s(update))

    def _per_update_s(self, update: int) -> float:
        return max((clock() - self.session.training_since_s) / (update - self.first), self.recent_s)

    def end(self, block: TrainingBlock) -> None:
        """Run the last evaluation, over all held-out rows, and draw the last sample, as far as
        there is time.
        """
        agreed = self.session.world.agreed
        self.evaluate(block, self.session.updates, limit=agreed(self.deadline.rows(self.recent_s)))
        if agreed(self.deadline.allows(1)):
            self.sample(block, self.session.updates)
        if self.python and agreed(self.deadline.allows(1 + JUDGED_TOKENS / SAMPLE_TOKENS)):
            shares = [accepted_share(text) for text in self._write(4, JUDGED_TOKENS) if text]
            self.lines = sum(f[0] for f in shares), sum(f[1] for f in shares)

    def _write_page(self, state: str) -> None:
        rows = self.session.run.rows()
        write_run_page(self.session.run.folder, self._summary(), rows, self._about(rows), state)

    def _about(self, rows: Sequence[Mapping[str, Any]]) -> About:
        samples = [(row["share"], row["sample"]) for row in rows if "sample" in row]
        origin = [
            *told(self.session.run),
            ("seed", str(self.session.plan.job.seed)),
            ("data", self.session.task.described),
        ]
        if self.session.cooled:
            begun, end = self.session.cooled
            why = f"training was slower than measured at the start, so the cool-down began at update {begun:,}"
            origin.append(
                ("length", f"{end:,} updates instead of {self.session.plan.updates:,}: {why}")
            )
        return About(self.yardsticks, samples, self._moments(rows), origin, self.doubt(rows))

    def doubt(self, rows: Sequence[Mapping[str, Any]]) -> str:
        """Return why the updates so far are worth nothing, once there are enough of them to tell;
        else "".
        """
        done = self.session.engine.index
        return (
            self.session.task.doubt(rows) if done >= min(DOUBTED_AT, self.session.updates) else ""
        )

    def _moments(self, rows: Sequence[Mapping[str, Any]]) -> list[tuple[int, str]]:
        """Return the updates at which the learning rate's curve has a kink, with the reasons."""
        moments = []
        warmup = self.session.plan.intervals.warmup_updates
        # Before the step is compiled the run's length, and so that of its warm-up, is a guess.
        guessed = max((row["update"] for row in rows if row.get(MARK)), default=0)
        if guessed >= warmup > 0:
            moments.append((guessed, "length set, warm-up over"))
        elif guessed:
            moments.append((guessed, "length set"))
        if warmup > max(1, guessed):
            moments.append((warmup, "warm-up ends"))
        if self.session.cooled:
            moments.append((self.session.cooled[0], "cool-down begins early"))
        return moments

    def finish(self) -> dict[str, Any]:
        """Write the report, print the results and the next commands; return the summary, the object
        of `--json`.
        """
        session, progress = self.session, self.progress
        summary = self._summary()
        trained = duration(session.spent_s)
        rows = session.run.rows()
        with progress.stage("report", str(session.run.report)) as stage:
            if self.deadline.figures:
                write_report(session.run.folder, summary, rows, self._about(rows))
            else:
                write_run_page(session.run.folder, summary, rows, self._about(rows), "")
                stage.result = "without PNG files: no time for them"
        session.run.log({"update": summary["update"], "summary": summary})
        progress.gap()
        standing = session.task.standing(rows, self.held_out, self.yardsticks)
        progress.line("done", f"{trained} of training{self._planned()}{self._in_all()}{standing}")
        peak = summary["peak_memory_bytes"]
        needed = "not measured" if peak is None else memory(peak)
        needed += _planned_memory(session.plan, session.task.slots(session.plan))
        compiled = "" if session.eager_reason else f"   {counted(self.recompiles, 'recompile')}"
        skipped = counted(sum(bool(row.get("skipped")) for row in rows), "skipped update")
        progress.line("", f"peak memory {needed}{compiled}   {skipped}   {session.run.folder}")
        held_out = session.task.held_out_rows
        if 0 < self.scored_rows < held_out:
            progress.line(
                "",
                f"scored on {self.scored_rows:,} of {held_out:,} held-out rows: no time for more",
            )
        if session.cooled:
            early = f"{session.updates:,} of {session.plan.updates:,} planned updates"
            progress.line(
                "",
                f"{early}: the machine was slower than measured at the start, so it cooled down early",
            )
        if why := self.doubt(rows):
            progress.line("warning", f"in all updates, {why}")
        if self.lines[1]:
            progress.line(
                "",
                f"{self.lines[0]} of {self.lines[1]} sampled lines are accepted by Python's tokenizer",
            )
        progress.gap()
        self._next()
        return summary

    def _planned(self) -> str:
        """Return how long a run by the clock was planned to train; empty for other runs."""
        session = self.session
        if not session.budget_s:
            return ""
        planned = f" ({duration(session.budget_s)} planned)"
        most = session.task.most_updates(
            session.batches.rows_per_window, session.plan.training.optim.weight_decay
        )
        # The epochs ended the run, the time was only allowed.
        if most is not None and session.plan.updates >= most:
            planned = f" ({duration(session.budget_s)} at most)"
        return planned

    def _in_all(self) -> str:
        """Return how long a run whose whole time is limited took, and the limit; empty for other
        runs.
        """
        ends_s, minutes = self.session.ends_s, self.session.plan.job.span.wall_minutes
        if ends_s is None or minutes is None:
            return ""
        allowed_s = 60 * minutes
        return f", {duration(clock() - ends_s + allowed_s)} in all (of {duration(allowed_s)})"

    def _summary(self) -> dict[str, Any]:
        session = self.session
        machine = describe(default_device())
        rows = session.run.rows()
        last: dict[str, Any] = next((row for row in reversed(rows) if "train_loss" in row), {})
        rates = [
            row["tokens_per_s"] for row in rows[len(self.rows) :] if row.get("tokens_per_s")
        ] or self.rates
        rate = statistics.median(rates) if rates else None
        config = session.model_config
        peak = machine.peak_flops.get(session.plan.training.precision)
        peak = peak * session.world.size if peak else None
        length, adapters = session.plan.training.length, session.adapter_params
        use = (
            mfu(rate, flops_per_token(config, length, adapters), peak)
            if rate and config and peak
            else None
        )
        return {
            "schema": "monograph.train/1",
            "run": str(session.run.folder),
            "update": session.engine.index,
            "tokens": int(session.engine.step.tokens),
            "train_loss": last.get("train_loss"),
            "eval_loss": self.held_out.loss if self.held_out else None,
            "eval_bits_per_byte": self.held_out.bits_per_byte if self.held_out else None,
            "eval_weights": "averaged" if session.plan.averaged else "last",
            "tokens_per_s": rate,
            "mfu": use,
            "peak_memory_bytes": session.peak_memory_bytes,
            "wall_s": session.elapsed_s + clock() - session.started_s,
            "training_s": session.spent_s,
            "promised_s": session.budget_s,
            "compile_s": session.compile_s,
            "graph_breaks": None if session.eager_reason else compat.graph_breaks(),
            "recompiles": None if session.eager_reason else self.recompiles,
            "device": machine.name,
            "dtype": session.plan.training.precision,
            "params": session.params,
            "passed_over": session.corpus.skipped,
            **session.task.summary(rows),
        }

    def _next(self) -> None:
        name = self.session.run.handle
        # Train on the user's own text, or go on.
        longer = ("my_texts/",) if self.python else ("--from", name)
        more: list[tuple[str, ...]] = [("train", *longer, "--minutes", "30")]
        if self._writes:
            more = [
                (self.opening.command, name, *self.opening.arguments),
                ("export", name, "--to", _free()),
                *more,
            ]
        elif self.held_out:
            more = [("evaluate", name), *more]
        if (
            self.held_out and name == "last" and self.session.task.is_plain
        ):  # a sweep without arguments takes the newest run
            more = [more[0], ("sweep",), *more[1:]]
        for index, arguments in enumerate(more):
            show(self.progress, "next" if index == 0 else "", *arguments)

    @property
    def _writes(self) -> bool:
        """Return whether the model can continue a text; a Llama with one position has no room for a
        second token.
        """
        config = self.session.model_config
        return config is not None and config.max_position_embeddings > 1

    def _write(self, n: int, tokens: int) -> list[str]:
        if not self._writes:
            return []
        engine, step = self.session.engine, self.session.engine.step
        sampling = Sampling(temperature=0.7, top_k=50, seed=self.session.plan.job.seed)
        with (
            modes_kept(engine.model),
            step.averaged(),
            step.assembled() as model,
            graph.set_aside(step),
        ):
            if not isinstance(model, Llama) or not self.session.world.leads:
                return []
            tokenizer, opening = self.session.corpus.tokenizer, self.opening
            written = generate(
                model,
                tokenizer,
                [opening.begun],
                sampling,
                max_tokens=tokens,
                stop=opening.stop,
                n=n,
            )
            return [completion.text for completion in written]

    def _yardsticks(self) -> dict[str, float]:
        corpus = self.session.task.compressible
        if corpus is None or not len(corpus.held_out) or not self.session.world.leads:
            return {}
        if corpus.stats.bytes > LARGEST_YARDSTICK_BYTES:
            return {}
        kept = corpus.folder / "yardsticks.json"
        with suppress(ValueError, InputRefused):
            return parse_json(contents(kept) or b"")
        if self.session.left_s < YARDSTICKS_LEAVE_S:
            return {}
        with self.progress.stage(
            "yardstick", "gzip, xz, trigram and order-6 models of the same files"
        ) as stage:
            values = yardsticks(
                b"".join(corpus.train.texts()), b"".join(corpus.held_out.texts()), stage.report
            )
            stage.result = ", ".join(f"{name} {value:.2f}" for name, value in values.items())
        # This file is only a cache: without it, the next run computes the yardsticks again.
        with suppress(OSError):
            kept.write_text(json.dumps(values))
        return values


def _planned_memory(plan: Plan, slots: int) -> str:
    """Return the memory that was planned, as the end of the measured one; "" if none was.

    As in the table of `monograph plan`, ~ marks what a formula estimates, where the memory suffices
    anyway.

    Args:
        plan: the run's plan.
        slots: the most tokens of a prompt and its answer; 0 if none are drawn.
    """
    if plan.peak_memory_bytes is None or plan.expected is None:
        return ""
    if plan.expected.by_origin is None:
        return f" (~{memory(plan.peak_memory_bytes)} planned)"
    at_most = "at most " if slots else ""
    return f" ({at_most}{memory(plan.peak_memory_bytes)} planned)"


def _free() -> str:
    """Return a folder name that does not exist here yet."""
    names = itertools.chain(["out"], (f"out-{number}" for number in itertools.count(2)))
    return next(name for name in names if not exists(name))
