"""Show a run while it trains and write its results: the held-out curve, samples, figures, summary
and last lines.

A *sample* is a text that the model writes, shown at a few updates. A *yardstick* is the bits per
byte that a compressor or a small statistical model reaches on the same held-out text
(`evaluation.yardsticks`). A *row* is a row of metrics.jsonl.
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
from monograph.session.plan import RunPlan
from monograph.session.ranks import show
from monograph.session.session import Session
from monograph.storage.reading import contents, exists, is_folder, parse_json


def finished(run: Run) -> dict[str, Any] | None:
    """Return the summary of a run that has ended; None if the run has not ended, or if its last
    checkpoint is gone.
    """
    last: dict[str, Any] = {}
    # A damaged row counts as no summary: the run is then resumed, which verifies the rows.
    with suppress(InputRefused):
        last = next(reversed(run.rows()), {})
    summary: dict[str, Any] | None = last.get("summary")
    if summary and not is_folder(run.checkpoints / f"step-{summary['update']:08d}"):
        return None
    return summary


SAMPLE_SHARES = (0.15, 0.5, 1.0)  # samples are shown after these shares of all updates
SAMPLE_TOKENS = 48
RECENT_UPDATES = 25  # the median time of an update is taken over as many
# After this many updates, a run that learns nothing can be told from one that began badly.
DOUBTED_AT = 3
CHECKED_TEXTS = 4  # texts that are written at the end, and whose lines Python's tokenizer checks
CHECKED_TOKENS = 160  # tokens of each of these texts
LARGEST_YARDSTICK_BYTES = 64_000_000  # yardsticks of a larger corpus are not computed
LEAST_YARDSTICK_S = 120.0  # with less time left for training, yardsticks are not computed
# A run by the clock may train for `budget_s` seconds. From COOLING_FROM of them on, the run is
# shortened if it would take more than TOLERANCE times END_SHARE of them. Its updates then end at
# END_SHARE; the rest is for the last evaluation and samples.
COOLING_FROM = 0.7
TOLERANCE = 1.03
END_SHARE = 0.97


class Reporter:
    """Shows one run while it trains, and its results at the end.

    Attributes:
        session: the run.
        progress: the display.
        earlier_rows: the rows of metrics.jsonl that earlier processes of the run wrote.
        first_update: the number of updates that these processes made.
        yardsticks: bits per byte by the yardstick's name; empty if they were not computed.
        opening: the text that samples continue, and the command that continues it.
        is_stdlib: whether the run learns from Python's standard library, the default text.
        recompiles: the number of graphs that were compiled during training.
        gauges: the device's clock rate, temperature and the like.
        alarm: notices that updates take longer than before.
        readings: tokens per second and the gauges, as last read; entries of the next row.
        rates: tokens per second, of the last few times that it was read.
        update_s: seconds of an update, of the same times.
        last_evaluation: the last scores on held-out text; None without.
        scored_rows: the number of held-out rows in the last evaluation.
        page: the page of the run, rewritten while it trains.
        deadline: the costs of the run's end, and what there is time for.
        accepted_lines: the number of sampled lines that Python's tokenizer accepts, and of all.
    """

    def __init__(self, session: Session, progress: Progress):
        """Compute or look up the yardsticks, choose the prompt and read the rows of earlier
        processes of the run.
        """
        self.session, self.progress = session, progress
        self.earlier_rows = session.run.rows()
        self.first_update = session.engine.index
        self.yardsticks = self._yardsticks()
        reset_peak_memory(session.engine.step.device)  # memory of the yardsticks does not count
        self.opening = session.task.opening(session.model_config)
        self.is_stdlib = session.corpus.name == "stdlib"
        self.recompiles = 0
        self.gauges = Gauges(session.engine.step.device)
        self.alarm = Alarm(self.gauges)
        self.readings = dict[str, Any](tokens_per_s=None)
        self.rates: deque[float] = deque(maxlen=RECENT_UPDATES)
        self.update_s: deque[float] = deque(maxlen=RECENT_UPDATES)
        self.last_evaluation: Evaluation | None = None
        self.scored_rows = 0
        self.page = PageInProgress(self._write_page)
        self.deadline = Deadline(session)
        self.accepted_lines = (0, 0)

    def sample_updates(self) -> list[int]:
        """Return the numbers of updates after which a sample is shown."""
        return [max(1, round(share * self.session.updates)) for share in SAMPLE_SHARES]

    def block(self) -> TrainingBlock:
        """Return the live block of the screen, with the points and samples of earlier processes."""
        updates = self.session.updates
        tokens = self.session.task.tokens_in_all(updates)
        name, key = self.session.task.score
        start = self.session.engine.index
        block = TrainingBlock(self.progress.screen, updates, tokens, self.yardsticks, start, name)
        for row in self.earlier_rows:
            if row.get(key) is not None:
                block.held_out(row["update"], row["tokens"], row[key])
            if "sample" in row:
                block.sample(row["share"], row["sample"])
        return block

    def note_rate(self, updates: int, seconds: float, row: Mapping[str, Any]) -> float:
        """Note how long the last updates took, and read the gauges; warn if training became slower.

        Args:
            updates: the number of updates since the last call.
            seconds: the seconds that they took.
            row: the row of metrics.jsonl of the last of them.

        Returns:
            Tokens per second.
        """
        self.update_s.append(seconds / updates)
        tokens = self.session.task.tokens_of(self.session.batches)
        rate = tokens / self.update_s[-1]
        self.rates.append(rate)
        self.readings = {"tokens_per_s": rate or None, **self.gauges.read()}
        # Where the time of an update varies by itself, a slow one says nothing of the machine.
        slower = self.alarm.note(rate, seconds) if self.session.task.is_steady else None
        if slower:
            self.session.run.log(
                {"update": row["update"], "tokens": row["tokens"], "slower": slower}
            )
            now = count(slower["tokens_per_s"], "tok/s")
            before = count(slower["before"], "tok/s")
            why = slower["why"] or "no cause found"
            self.progress.line("warning", f"slower: {now}, {before} before: {why}")
        return rate

    @property
    def recent_s(self) -> float:
        """Return the median seconds of an update over the last few; 0 before the first."""
        return statistics.median_high(self.update_s) if self.update_s else 0.0

    def evaluate(
        self, block: TrainingBlock, update: int, limit: int | None, **mark: object
    ) -> None:
        """Score held-out rows, or answers to held-out prompts; log the scores and show them.

        Args:
            block: shows the score as a point of the curve.
            update: the number of updates done.
            limit: the number of rows or prompts that are scored; None for all.
            mark: further entries of the scores' row in metrics.jsonl.
        """
        began = clock()
        score = self.session.task.evaluate(self.session.batches.rows_per_window, limit)
        if score is None:
            return
        held_out = self.session.task.held_out_rows
        if held_out:
            self.scored_rows = min(limit or held_out, held_out)
            self.deadline.row_s = (clock() - began) / self.scored_rows
        self.last_evaluation = score.evaluation
        self.session.run.log({"update": update, "tokens": score.tokens, **score.figures, **mark})
        if score.point is not None and math.isfinite(score.point):
            block.held_out(update, score.tokens, score.point)

    def sample(self, block: TrainingBlock, update: int) -> None:
        """Log and show a sample: an answer to the first prompt with its reward, or a continuation
        of `opening`.

        The random seed is always the same, so a resumed run shows the same sample.
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
        """Begin the cool-down early if the time will not suffice.

        With `train.wall_minutes`, a cool-down that has begun is shortened again if it takes too
        long.

        Args:
            update: the number of updates done.
        """
        if self.session.ends_s is None:
            ends = self._shorter_by_budget(update)
        else:
            ends = self._shorter_by_deadline(update)
        # Clocks of ranks differ, but all ranks must end at the same update.
        ends = self.session.world.number(ends)
        if not ends:
            return
        is_cooling = self.session.cooled is not None
        self.session.shorten(ends)
        if is_cooling:
            self.progress.line("time", f"slower still: ending at update {ends:,}")
            return
        slower = "updates take longer than measured at the start"
        self.progress.line(
            "time", f"{slower}: cooling down from update {update:,}, ending at {ends:,}"
        )

    def _shorter_by_budget(self, update: int) -> int:
        """Return the number of updates after which a run should end whose updates take too long for
        `budget_s`; 0 if its length need not change.
        """
        session = self.session
        if session.budget_s is None or session.cooled:
            return 0
        this_process_s = clock() - session.training_since_s
        if this_process_s < COOLING_FROM * (session.budget_s - session.elapsed_s):
            return 0
        spent_s = session.spent_s
        per_update_s = self._per_update_s(update)
        until_s = END_SHARE * session.budget_s
        if spent_s + per_update_s * (session.updates - update) <= TOLERANCE * until_s:
            return 0
        # A short cool-down would cost more loss than the run gains by ending in time, so the run
        # may take longer than `budget_s` for it.
        left_s = max(until_s - spent_s, (1 - COOLING_FROM) / 2 * session.budget_s)
        ends = update + updates_for(left_s, per_update_s, session.updates - update)
        return ends if ends < session.updates else 0

    def _shorter_by_deadline(self, update: int) -> int:
        """Return the number of updates after which a run with `train.wall_minutes` should end; 0 if
        its length need not change.
        """
        return self.deadline.shorter_length(update, self._per_update_s(update))

    def _per_update_s(self, update: int) -> float:
        """Return the seconds of an update: this process's mean, or the recent median if larger."""
        mean_s = (clock() - self.session.training_since_s) / (update - self.first_update)
        return max(mean_s, self.recent_s)

    def end(self, block: TrainingBlock) -> None:
        """Score held-out rows and show a sample a last time, as far as there is time.

        A model of Python's standard library also writes a few texts whose lines Python's tokenizer
        checks.
        """
        # Clocks of ranks differ, and all ranks must do the same: rank 0 decides.
        agreed = self.session.world.agreed
        limit = agreed(self.deadline.affordable_rows(self.recent_s))
        self.evaluate(block, self.session.updates, limit=limit)
        if agreed(self.deadline.has_time_for_samples(1)):
            self.sample(block, self.session.updates)
        if not self.is_stdlib:
            return
        samples = 1 + CHECKED_TOKENS / SAMPLE_TOKENS  # the time of these texts, in samples
        if agreed(self.deadline.has_time_for_samples(samples)):
            texts = self._write(CHECKED_TEXTS, CHECKED_TOKENS)
            counts = [accepted_share(text) for text in texts if text]
            self.accepted_lines = sum(c[0] for c in counts), sum(c[1] for c in counts)

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
        """Return why the updates so far taught the model nothing; "" if they did, or if there are
        too few of them to tell.
        """
        done = self.session.engine.index
        if done < min(DOUBTED_AT, self.session.updates):
            return ""
        return self.session.task.doubt(rows)

    def _moments(self, rows: Sequence[Mapping[str, Any]]) -> list[tuple[int, str]]:
        """Return the updates at which the learning rate's curve has a kink, with the reasons."""
        moments = []
        warmup = self.session.plan.intervals.warmup_updates
        # In the eager updates before the step is compiled (`session.eager_start`), the warm-up has
        # a guessed length, since the run's length is not decided yet. The last of them has a kink.
        last_eager = max((row["update"] for row in rows if row.get(MARK)), default=0)
        if last_eager >= warmup > 0:
            moments.append((last_eager, "length set, warm-up over"))
        elif last_eager:
            moments.append((last_eager, "length set"))
        # A warm-up of one update has no slope, and so no kink.
        if warmup > max(1, last_eager):
            moments.append((warmup, "warm-up ends"))
        if self.session.cooled:
            moments.append((self.session.cooled[0], "cool-down begins early"))
        return moments

    def finish(self) -> dict[str, Any]:
        """Write the report, print the results and the next commands.

        Returns:
            The summary, the JSON object of `--json`.
        """
        session, progress = self.session, self.progress
        summary = self._summary()
        trained = duration(session.spent_s)
        rows = session.run.rows()
        with progress.stage("report", str(session.run.report)) as stage:
            if self.deadline.has_time_for_figures:
                write_report(session.run.folder, summary, rows, self._about(rows))
            else:
                write_run_page(session.run.folder, summary, rows, self._about(rows), "")
                stage.result = "without PNG files: no time for them"
        session.run.log({"update": summary["update"], "summary": summary})
        progress.gap()
        standing = session.task.standing(rows, self.last_evaluation, self.yardsticks)
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
        accepted, sampled = self.accepted_lines
        if sampled:
            progress.line(
                "", f"{accepted} of {sampled} sampled lines are accepted by Python's tokenizer"
            )
        progress.gap()
        self._show_next_commands()
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
        # Such a run ended because its text was read as often as is useful, not because of the time.
        if most is not None and session.plan.updates >= most:
            planned = f" ({duration(session.budget_s)} at most)"
        return planned

    def _in_all(self) -> str:
        """Return how long a run with `train.wall_minutes` took, and the limit; empty for other
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
        new_rows = rows[len(self.earlier_rows) :]
        logged_rates = [row["tokens_per_s"] for row in new_rows if row.get("tokens_per_s")]
        # A short run may not have logged a rate yet.
        rates = logged_rates or self.rates
        rate = statistics.median(rates) if rates else None
        config = session.model_config
        peak_flops = machine.peak_flops.get(session.plan.training.precision)
        utilization = None
        if rate and config and peak_flops:
            flops = flops_per_token(config, session.plan.training.length, session.adapter_params)
            utilization = mfu(rate, flops, peak_flops * session.world.size)
        return {
            "schema": "monograph.train/1",
            "run": str(session.run.folder),
            "update": session.engine.index,
            "tokens": int(session.engine.step.tokens),
            "train_loss": last.get("train_loss"),
            "eval_loss": self.last_evaluation.loss if self.last_evaluation else None,
            "eval_bits_per_byte": (
                self.last_evaluation.bits_per_byte if self.last_evaluation else None
            ),
            "eval_weights": "averaged" if session.plan.averaged else "last",
            "tokens_per_s": rate,
            "mfu": utilization,
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

    def _show_next_commands(self) -> None:
        name = self.session.run.handle
        # After the default text, suggest the user's own; otherwise suggest training for longer.
        train_arguments = ("my_texts/",) if self.is_stdlib else ("--from", name)
        commands: list[tuple[str, ...]] = []
        if self._can_write:
            commands.append((self.opening.command, name, *self.opening.arguments))
            commands.append(("export", name, "--to", _free_folder()))
        elif self.last_evaluation:
            commands.append(("evaluate", name))
        commands.append(("train", *train_arguments, "--minutes", "30"))
        # A sweep without arguments takes the newest run, so it is suggested for that run only.
        if self.last_evaluation and name == "last" and self.session.task.is_plain:
            commands.insert(1, ("sweep",))
        for index, arguments in enumerate(commands):
            show(self.progress, "next" if index == 0 else "", *arguments)

    @property
    def _can_write(self) -> bool:
        """Return whether the model can continue a text: a Llama with room for more than one token."""
        config = self.session.model_config
        return config is not None and config.max_position_embeddings > 1

    def _write(self, n: int, tokens: int) -> list[str]:
        """Return `n` continuations of `opening`, of `tokens` tokens at most; none if the model
        cannot write, or on another rank than 0.
        """
        if not self._can_write:
            return []
        engine, step = self.session.engine, self.session.engine.step
        sampling = Sampling(temperature=0.7, top_k=50, seed=self.session.plan.job.seed)
        with (
            modes_kept(engine.model),
            step.averaged(),
            step.assembled() as model,
            graph.set_aside(step),
        ):
            # Asked only here, since all ranks have to join in `assembled`.
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
        """Return the yardsticks of the corpus, from its folder if they are there; {} if computing
        them would take too long.
        """
        corpus = self.session.task.compressible
        if corpus is None or not len(corpus.held_out) or not self.session.world.leads:
            return {}
        if corpus.stats.bytes > LARGEST_YARDSTICK_BYTES:
            return {}
        cache_file = corpus.folder / "yardsticks.json"
        # A missing or damaged file is no JSON; the yardsticks are then computed.
        with suppress(ValueError, InputRefused):
            return parse_json(contents(cache_file) or b"")
        if self.session.left_s < LEAST_YARDSTICK_S:
            return {}
        with self.progress.stage(
            "yardstick", "gzip, xz, trigram and order-6 models of the same files"
        ) as stage:
            values = yardsticks(
                b"".join(corpus.train.texts()), b"".join(corpus.held_out.texts()), stage.report
            )
            stage.result = ", ".join(f"{name} {value:.2f}" for name, value in values.items())
        # A failure to write is no harm: the next run computes the yardsticks again.
        with suppress(OSError):
            cache_file.write_text(json.dumps(values))
        return values


def _planned_memory(plan: RunPlan, slots: int) -> str:
    """Return the planned memory, to be printed after the measured one; "" if none was planned.

    As in the table of `monograph plan`, ~ marks an estimate by a formula. The planner makes one
    instead of a trace if the memory suffices by far.

    Args:
        plan: the run's plan.
        slots: the maximum number of tokens of a prompt and its answer; 0 if no answers are sampled.
    """
    if plan.peak_memory_bytes is None or plan.expected is None:
        return ""
    if plan.expected.by_origin is None:
        return f" (~{memory(plan.peak_memory_bytes)} planned)"
    # Answers may be shorter than planned.
    at_most = "at most " if slots else ""
    return f" ({at_most}{memory(plan.peak_memory_bytes)} planned)"


def _free_folder() -> str:
    """Return a folder name that does not exist here yet."""
    names = itertools.chain(["out"], (f"out-{number}" for number in itertools.count(2)))
    return next(name for name in names if not exists(name))
