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
from monograph.evaluation.yardsticks import accepted_line_counts, yardsticks
from monograph.graph import capture as graph
from monograph.graph.inspect import modes_kept
from monograph.graph.precision import Precision
from monograph.model.llama import Llama
from monograph.planner.defaults import updates_in_time
from monograph.predict.roofline import flops_per_token, mfu
from monograph.profiling.memory import reset_peak_memory, unused_graph_bytes
from monograph.report.in_progress import PageInProgress
from monograph.report.quantities import count, counted, duration, memory
from monograph.report.run_report import About, write_report, write_run_page
from monograph.run.folder import Run
from monograph.run.progress import Progress, TrainingBlock
from monograph.run.started import describe_start
from monograph.session.deadline import Deadline
from monograph.session.eager_start import EAGER_KEY
from monograph.session.gauges import Alarm, Gauges
from monograph.session.plan import RunPlan
from monograph.session.session import Session
from monograph.session.shown_commands import show_command
from monograph.storage.reading import contents, exists, is_folder, parse_json

SAMPLE_SHARES = (0.15, 0.5, 1.0)  # samples are shown after these shares of all updates
SAMPLE_TOKENS = 48
RECENT_READINGS = 25  # readings of the speed over which the median time of an update is taken
# After this many updates, a run that learns nothing can be told from one that began badly.
DOUBT_AFTER_UPDATES = 3
# At the end of a run on Python's standard library, the model writes this many texts, and Python's
# tokenizer checks their lines.
CHECKED_TEXTS = 4
CHECKED_TOKENS = 160  # tokens of each of these texts
MAX_YARDSTICK_BYTES = 64_000_000  # yardsticks of a larger corpus are not computed
MIN_YARDSTICK_S = 120.0  # with less time left for training, yardsticks are not computed
# A run whose length is a time may train for `budget_s` seconds. Its number of updates is planned at
# the start. From COOLING_FROM * budget_s on, the number is lowered if the updates would take more
# than TOLERANCE * END_SHARE * budget_s. They then end at END_SHARE * budget_s; the rest is for the
# last evaluation and samples.
COOLING_FROM = 0.7
TOLERANCE = 1.03
END_SHARE = 0.97


def final_summary(run: Run) -> dict[str, Any] | None:
    """Return the summary of a run that has ended; None if the run has not ended, or if its last
    checkpoint is gone.
    """
    last_row: dict[str, Any] = {}
    # If a row is damaged, the run counts as one that has not ended. Resuming it verifies the rows.
    with suppress(InputRefused):
        last_row = next(reversed(run.rows()), {})
    summary: dict[str, Any] | None = last_row.get("summary")
    if summary and not is_folder(run.checkpoints / f"step-{summary['update']:08d}"):
        return None
    return summary


class Reporter:
    """Shows one run while it trains, and its results at the end.

    Attributes:
        session: the run.
        progress: the display.
        earlier_rows: the rows of metrics.jsonl that earlier processes of the run wrote.
        first_update: the number of updates that these processes made, which is the index of the
            first update of this process.
        yardsticks: bits per byte by the yardstick's name; empty if they were not computed.
        sample_prompt: the text that samples continue, and the command that continues it.
        is_stdlib: whether the run learns from Python's standard library, the default text.
        recompiles: the number of graphs that were compiled during training.
        gauges: reads the device's clock rate, temperature and more.
        alarm: notices that updates take longer than before.
        readings: the last readings of the tokens per second and of the gauges, which are entries of
            the next row.
        rates: the last `RECENT_READINGS` readings of the tokens per second.
        update_s: the seconds of an update in the same readings.
        last_evaluation: the last scores on held-out text; None if there are none yet, or no text.
        scored_rows: the number of held-out rows in the last evaluation.
        page: the page of the run, rewritten while it trains.
        deadline: decides what there is time for, by the measured seconds of scoring and sampling.
        accepted_lines: the number of checked lines that Python's tokenizer accepts, and the number
            of all checked lines.
    """

    def __init__(self, session: Session, progress: Progress):
        """Compute or look up the yardsticks, choose the prompt and read the rows of earlier
        processes of the run.
        """
        self.session = session
        self.progress = progress
        self.earlier_rows = session.run.rows()
        self.first_update = session.engine.index
        self.yardsticks = self._yardsticks()
        reset_peak_memory(session.engine.step.device)  # memory of the yardsticks does not count
        self.sample_prompt = session.task.sample_prompt(session.model_config)
        self.is_stdlib = session.records.name == "stdlib"
        self.recompiles = 0
        self.gauges = Gauges(session.engine.step.device)
        self.alarm = Alarm(self.gauges)
        self.readings: dict[str, Any] = {"tokens_per_s": None}
        self.rates: deque[float] = deque(maxlen=RECENT_READINGS)
        self.update_s: deque[float] = deque(maxlen=RECENT_READINGS)
        self.last_evaluation: Evaluation | None = None
        self.scored_rows = 0
        self.page = PageInProgress(self._write_page)
        self.deadline = Deadline(session)
        self.accepted_lines = (0, 0)

    def sample_updates(self) -> list[int]:
        """Return the numbers of updates after which a sample is shown."""
        return [max(1, round(share * self.session.updates)) for share in SAMPLE_SHARES]

    def training_block(self) -> TrainingBlock:
        """Return the part of the screen that shows the training, with the points of the curve and
        the samples of earlier processes.
        """
        updates = self.session.updates
        max_tokens = self.session.task.max_tokens(updates)
        curve = self.session.task.score
        start = self.session.engine.index
        block = TrainingBlock(
            self.progress.screen, updates, max_tokens, self.yardsticks, start, curve.name
        )
        for row in self.earlier_rows:
            if row.get(curve.row_key) is not None:
                block.held_out(row["update"], row["tokens"], row[curve.row_key])
            if "sample" in row:
                block.sample(row["share"], row["sample"])
        return block

    def note_rate(self, updates: int, seconds: float, row: Mapping[str, Any]) -> float:
        """Note how long the last updates took, read the gauges, and warn if training has become
        slower.

        Args:
            updates: the number of updates since the last call.
            seconds: the seconds that they took.
            row: the row of metrics.jsonl of the last of these updates.

        Returns:
            Tokens per second.
        """
        self.update_s.append(seconds / updates)
        tokens = self.session.task.tokens_of_last_update(self.session.batches)
        rate = tokens / self.update_s[-1]
        self.rates.append(rate)
        self.readings = {"tokens_per_s": rate or None, **self.gauges.read()}
        # If the time of an update varies anyway, a slow one says nothing about the machine.
        slowdown = self.alarm.note(rate, seconds) if self.session.task.has_steady_updates else None
        if slowdown:
            self.session.run.log(
                {"update": row["update"], "tokens": row["tokens"], "slower": slowdown}
            )
            now = count(slowdown["tokens_per_s"], "tok/s")
            before = count(slowdown["before"], "tok/s")
            why = slowdown["why"] or "no cause found"
            self.progress.line("warning", f"slower: {now}, {before} before: {why}")
        return rate

    @property
    def recent_update_s(self) -> float:
        """Return the median seconds of an update in the last few readings; 0 before the first."""
        if not self.update_s:
            return 0.0
        return statistics.median_high(self.update_s)

    def evaluate(
        self, block: TrainingBlock, update: int, limit: int | None, **entries_of_row: object
    ) -> None:
        """Score held-out rows, or answers to held-out prompts; log the scores and show them.

        Args:
            block: shows the score as a point of the curve.
            update: the number of updates done.
            limit: the maximum number of rows to score; None means all.
            entries_of_row: further entries of the scores' row in metrics.jsonl.
        """
        began = clock()
        score = self.session.task.evaluate(self.session.batches.rows_per_window, limit)
        if score is None:
            return
        held_out_rows = self.session.task.held_out_rows
        if held_out_rows:
            self.scored_rows = min(limit or held_out_rows, held_out_rows)
            self.deadline.row_s = (clock() - began) / self.scored_rows
        self.last_evaluation = score.evaluation
        self.session.run.log(
            {"update": update, "tokens": score.tokens, **score.figures, **entries_of_row}
        )
        if score.point is not None and math.isfinite(score.point):
            block.held_out(update, score.tokens, score.point)

    def sample(self, block: TrainingBlock, update: int) -> None:
        """Log and show a sample: an answer to the first prompt with its reward, or a continuation
        of `sample_prompt`.

        The random seed is always the same, so a resumed run shows the same sample.

        Args:
            block: shows the sample.
            update: the number of updates done.
        """
        began = clock()

        def write_continuation() -> str | None:
            texts = self._write_texts(1, SAMPLE_TOKENS)
            return texts[0] if texts else None

        sample = self.session.task.sample(self.sample_prompt, write_continuation)
        if sample is None:
            return
        self.deadline.sample_s = clock() - began
        share = update / self.session.updates
        self.session.run.log({"update": update, "share": share, "sample": sample})
        block.sample(share, sample)

    def shorten_if_late(self, update: int) -> None:
        """Lower the number of updates, and begin the cool-down now, if the run would take too long.

        With `train.wall_minutes`, a cool-down that has begun is shortened again if it takes too
        long.

        Args:
            update: the number of updates done.
        """
        if self.session.deadline_s is None:
            new_length = self._length_in_budget(update)
        else:
            new_length = self.deadline.shorter_length(update, self._per_update_s(update))
        # Clocks of ranks differ, but all ranks must end at the same update. So rank 0 decides.
        new_length = self.session.world.broadcast_int(new_length)
        if not new_length:
            return
        was_cooling = self.session.early_cool_down is not None
        self.session.cool_down_until(new_length)
        if was_cooling:
            self.progress.line("time", f"slower still: ending at update {new_length:,}")
            return
        self.progress.line(
            "time",
            "updates take longer than measured at the start: "
            f"cooling down from update {update:,}, ending at {new_length:,}",
        )

    def _length_in_budget(self, update: int) -> int:
        """Return the number of updates after which the run should end so as to stay within
        `budget_s`; 0 if its length need not change.
        """
        session = self.session
        if session.budget_s is None or session.early_cool_down:
            return 0
        # A resumed run had only the rest of the budget when this process began.
        budget_of_process_s = session.budget_s - session.elapsed_s
        if clock() - session.training_since_s < COOLING_FROM * budget_of_process_s:
            return 0
        spent_s = session.spent_s
        per_update_s = self._per_update_s(update)
        updates_left = session.updates - update
        updates_end_s = END_SHARE * session.budget_s
        if spent_s + per_update_s * updates_left <= TOLERANCE * updates_end_s:
            return 0
        # A short cool-down would cost more loss than the run gains by ending in time. So it gets at
        # least half of the time after COOLING_FROM, even if the run then takes longer than
        # `budget_s`.
        min_cool_down_s = (1 - COOLING_FROM) / 2 * session.budget_s
        cool_down_s = max(updates_end_s - spent_s, min_cool_down_s)
        new_length = update + updates_in_time(cool_down_s, per_update_s, updates_left)
        return new_length if new_length < session.updates else 0

    def _per_update_s(self, update: int) -> float:
        """Return the mean seconds of an update in this process, or the recent median if larger."""
        mean_s = (clock() - self.session.training_since_s) / (update - self.first_update)
        return max(mean_s, self.recent_update_s)

    def end(self, block: TrainingBlock) -> None:
        """After the last update, score held-out rows and show a sample, if there is time for them.

        After a run on Python's standard library, also count the lines of `CHECKED_TEXTS` texts that
        Python's tokenizer accepts.
        """
        # Clocks of ranks differ, but all ranks must do the same. So rank 0 decides.
        broadcast = self.session.world.broadcast
        limit = broadcast(self.deadline.affordable_rows(self.recent_update_s))
        self.evaluate(block, self.session.updates, limit=limit)
        if broadcast(self.deadline.has_time_for_samples(1)):
            self.sample(block, self.session.updates)
        if not self.is_stdlib:
            return
        # The checked texts are written together, so they take about as long as one longer sample. The
        # time of one more sample is kept free.
        samples = 1 + CHECKED_TOKENS / SAMPLE_TOKENS
        if broadcast(self.deadline.has_time_for_samples(samples)):
            texts = self._write_texts(CHECKED_TEXTS, CHECKED_TOKENS)
            accepted_lines = 0
            checked_lines = 0
            for text in texts:
                accepted, checked = accepted_line_counts(text)
                accepted_lines += accepted
                checked_lines += checked
            self.accepted_lines = accepted_lines, checked_lines

    def _write_page(self, state: str) -> None:
        """Write the page of the run; `state` says in a word how far the run is."""
        rows = self.session.run.rows()
        write_run_page(self.session.run.folder, self._summary(), rows, self._about(rows), state)

    def _about(self, rows: Sequence[Mapping[str, Any]]) -> About:
        """Return what the page of the run shows in addition to its rows and its summary."""
        samples = [(row["share"], row["sample"]) for row in rows if "sample" in row]
        origin = [
            *describe_start(self.session.run),
            ("seed", str(self.session.plan.job.seed)),
            ("data", self.session.task.description),
        ]
        if self.session.early_cool_down:
            begin, end = self.session.early_cool_down
            why = f"training was slower than measured at the start, so the cool-down began at update {begin:,}"
            origin.append(
                ("length", f"{end:,} updates instead of {self.session.plan.updates:,}: {why}")
            )
        kinks = self._schedule_kinks(rows)
        return About(self.yardsticks, samples, kinks, origin, self.doubt(rows))

    def doubt(self, rows: Sequence[Mapping[str, Any]]) -> str:
        """Return a warning if the model has learned nothing so far; "" if it has, or if there are
        too few updates to tell.
        """
        done = self.session.engine.index
        if done < min(DOUBT_AFTER_UPDATES, self.session.updates):
            return ""
        return self.session.task.doubt(rows)

    def _schedule_kinks(self, rows: Sequence[Mapping[str, Any]]) -> list[tuple[int, str]]:
        """Return the updates at which the learning rate's curve has a kink, with the reasons."""
        kinks = []
        warmup = self.session.plan.intervals.warmup_updates
        # A run may begin with eager updates while its step is compiled (`session.eager_start`).
        # Their warm-up has a guessed length, as the run's length is decided only after them. So the
        # curve has a kink after the last of them.
        last_eager = max((row["update"] for row in rows if row.get(EAGER_KEY)), default=0)
        if last_eager >= warmup > 0:
            kinks.append((last_eager, "length set, warm-up over"))
        elif last_eager:
            kinks.append((last_eager, "length set"))
        # A warm-up of one update has no slope, and so no kink.
        if warmup > max(1, last_eager):
            kinks.append((warmup, "warm-up ends"))
        if self.session.early_cool_down:
            kinks.append((self.session.early_cool_down[0], "cool-down begins early"))
        return kinks

    def finish(self) -> dict[str, Any]:
        """Write the report, print the results, and suggest the next commands.

        Returns:
            The summary, which is the JSON object that `--json` prints.
        """
        session = self.session
        progress = self.progress
        summary = self._summary()
        trained_s = session.spent_s  # before the report, whose time does not count
        rows = session.run.rows()
        with progress.stage("report", str(session.run.report)) as stage:
            if self.deadline.has_time_for_figures:
                write_report(session.run.folder, summary, rows, self._about(rows))
            else:
                write_run_page(session.run.folder, summary, rows, self._about(rows), "")
                stage.result = "without PNG files: no time for them"
        session.run.log({"update": summary["update"], "summary": summary})
        progress.gap()
        self._print_results(summary, rows, trained_s)
        progress.gap()
        self._show_next_commands()
        return summary

    def _print_results(
        self, summary: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], trained_s: float
    ) -> None:
        """Print the results and how the training went.

        Args:
            summary: the run's summary.
            rows: the rows of metrics.jsonl.
            trained_s: the seconds of training.
        """
        session = self.session
        progress = self.progress
        result = session.task.describe_result(rows, self.last_evaluation, self.yardsticks)
        trained = f"{duration(trained_s)} of training"
        time_text = f"{trained}{self._planned_time_text()}{self._whole_time_text()}"
        progress.line("done", f"{time_text}{result}")
        peak_bytes = summary["peak_memory_bytes"]
        peak = "not measured" if peak_bytes is None else memory(peak_bytes)
        planned_peak = _planned_memory_text(session.plan, session.task.slots(session.plan))
        in_graphs = _unused_memory_text(unused_graph_bytes(session.engine.step.device), peak_bytes)
        recompiles = "" if session.eager_reason else f"   {counted(self.recompiles, 'recompile')}"
        skipped = counted(sum(bool(row.get("skipped")) for row in rows), "skipped update")
        progress.line(
            "",
            f"peak memory {peak}{in_graphs}{planned_peak}{recompiles}   {skipped}   {session.run.folder}",
        )
        held_out_rows = session.task.held_out_rows
        if 0 < self.scored_rows < held_out_rows:
            progress.line(
                "",
                f"scored on {self.scored_rows:,} of {held_out_rows:,} held-out rows: no time for more",
            )
        if session.early_cool_down:
            progress.line(
                "",
                f"{session.updates:,} of {session.plan.updates:,} planned updates: "
                "the machine was slower than measured at the start, so it cooled down early",
            )
        if doubt := self.doubt(rows):
            progress.line("warning", f"in all updates, {doubt}")
        accepted, checked = self.accepted_lines
        if checked:
            progress.line(
                "", f"{accepted} of {checked} sampled lines are accepted by Python's tokenizer"
            )

    def _planned_time_text(self) -> str:
        """Return how long a run whose length is a time was planned to train; "" for other runs."""
        session = self.session
        if not session.budget_s:
            return ""
        max_updates = session.task.max_updates(
            session.batches.rows_per_window, session.plan.training.optim.weight_decay
        )
        if max_updates is not None and session.plan.updates >= max_updates:
            # The run ends once its records were read as often as is useful, perhaps before its time
            # is over.
            return f" ({duration(session.budget_s)} at most)"
        return f" ({duration(session.budget_s)} planned)"

    def _whole_time_text(self) -> str:
        """Return how long a run with `train.wall_minutes` took, and the limit; "" for other runs."""
        deadline_s = self.session.deadline_s
        minutes = self.session.plan.job.span.wall_minutes
        if deadline_s is None or minutes is None:
            return ""
        allowed_s = 60 * minutes
        began_s = deadline_s - allowed_s
        taken_s = clock() - began_s
        return f", {duration(taken_s)} in all (of {duration(allowed_s)})"

    def _summary(self) -> dict[str, Any]:
        """Return the run's results so far, as `--json` prints them at the end."""
        session = self.session
        machine = describe(default_device())
        rows = session.run.rows()
        update_rows = [row for row in rows if "train_loss" in row]
        train_loss = update_rows[-1]["train_loss"] if update_rows else None
        rows_of_process = rows[len(self.earlier_rows) :]
        rates = [row["tokens_per_s"] for row in rows_of_process if row.get("tokens_per_s")]
        if not rates:
            # A row has the rate of the reading before it, so a short run may have logged none.
            rates = [*self.rates]
        rate = statistics.median(rates) if rates else None
        config = session.model_config
        precision = Precision(session.plan.training.precision)
        peak_flops = machine.peak_flops.get(precision.datasheet_name)
        piece_lengths = session.task.piece_lengths
        utilization = None
        if rate and config and peak_flops and piece_lengths:
            flops = flops_per_token(config, piece_lengths, session.adapter_params)
            utilization = mfu(rate, flops, peak_flops * session.world.size)
        return {
            "schema": "monograph.train/1",
            "run": str(session.run.folder),
            "update": session.engine.index,
            "tokens": int(session.engine.step.tokens),
            "train_loss": train_loss,
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
            "passed_over": session.records.skipped,
            **session.task.summary(rows),
        }

    def _show_next_commands(self) -> None:
        """Print commands that the user may want to run next."""
        name = self.session.run.handle
        # After the default text, suggest the user's own; otherwise suggest training for longer.
        train_arguments = ("my_texts/",) if self.is_stdlib else ("--from", name)
        commands: list[tuple[str, ...]] = []
        if self._can_write:
            commands.append((self.sample_prompt.command, name, *self.sample_prompt.arguments))
            commands.append(("export", name, "--to", _free_folder()))
        elif self.last_evaluation:
            commands.append(("evaluate", name))
        commands.append(("train", *train_arguments, "--minutes", "30"))
        # A sweep without arguments takes the newest run, so it is suggested for that run only.
        if self.last_evaluation and name == "last" and self.session.task.has_plain_updates:
            commands.insert(1, ("sweep",))
        for index, arguments in enumerate(commands):
            show_command(self.progress, "next" if index == 0 else "", *arguments)

    @property
    def _can_write(self) -> bool:
        """Return whether the model can continue a text: a Llama with room for more than one token."""
        config = self.session.model_config
        return config is not None and config.max_position_embeddings > 1

    def _write_texts(self, number: int, max_tokens: int) -> list[str]:
        """Return `number` continuations of `sample_prompt` of up to `max_tokens` tokens.

        The result is empty if the model cannot write, and on other ranks than 0. All ranks must
        call this.
        """
        if not self._can_write:
            return []
        engine = self.session.engine
        step = engine.step
        sampling = Sampling(temperature=0.7, top_k=50, seed=self.session.plan.job.seed)
        with (
            modes_kept(engine.model),
            step.averaged(),
            step.assembled() as model,
            graph.capture_suspended(step),
        ):
            # Other ranks return only here, since all ranks have to take part in `assembled`.
            if not isinstance(model, Llama) or not self.session.world.leads:
                return []
            completions = generate(
                model,
                self.session.records.tokenizer,
                [self.sample_prompt.input],
                sampling,
                max_tokens=max_tokens,
                stop=self.sample_prompt.stop_ids,
                n=number,
            )
            return [completion.text for completion in completions]

    def _yardsticks(self) -> dict[str, float]:
        """Compute the yardsticks of the run's text, or read them from the folder of the text.

        The result is empty if there is no such text, or if computing would take too long.
        """
        corpus = self.session.task.text_for_compressors
        if corpus is None or not len(corpus.held_out) or not self.session.world.leads:
            return {}
        if corpus.stats.bytes > MAX_YARDSTICK_BYTES:
            return {}
        cache_file = corpus.folder / "yardsticks.json"
        # If the file is missing or damaged, it is not JSON, and the yardsticks are computed.
        with suppress(ValueError, InputRefused):
            return parse_json(contents(cache_file) or b"")
        if self.session.left_s < MIN_YARDSTICK_S:
            return {}
        with self.progress.stage(
            "yardstick", "gzip, xz, trigram and order-6 models of the same files"
        ) as stage:
            values = yardsticks(
                b"".join(corpus.train.texts()), b"".join(corpus.held_out.texts()), stage.report
            )
            stage.result = ", ".join(f"{name} {value:.2f}" for name, value in values.items())
        # If the file cannot be written, the next run computes the yardsticks again.
        with suppress(OSError):
            cache_file.write_text(json.dumps(values))
        return values


def _planned_memory_text(plan: RunPlan, slots: int) -> str:
    """Return the planned peak memory, to be printed after the measured one; "" if none was planned.

    If the memory is clearly sufficient, the planner does not trace the step, but estimates its
    memory by a formula. "~" marks such an estimate, as in the table of `monograph plan`.

    Args:
        plan: the run's plan.
        slots: the maximum number of tokens of a prompt and its answer; 0 if no answers are sampled.
    """
    if plan.peak_memory_bytes is None or plan.expected is None:
        return ""
    is_by_formula = plan.expected.by_origin is None
    if is_by_formula:
        return f" (~{memory(plan.peak_memory_bytes)} planned)"
    # Sampled answers may be shorter than planned.
    at_most = "at most " if slots else ""
    return f" ({at_most}{memory(plan.peak_memory_bytes)} planned)"


def _unused_memory_text(unused_bytes: int, peak_bytes: int | None) -> str:
    """Return how much of the measured peak no tensor occupied, to be printed after it.

    Args:
        unused_bytes: see `unused_graph_bytes`.
        peak_bytes: the measured peak; None: it was not measured.

    Returns:
        "" for less than a hundredth of the peak.
    """
    if peak_bytes is None or unused_bytes < peak_bytes / 100:
        return ""
    return f", {memory(unused_bytes)} of it unused in replayed graphs"


def _free_folder() -> str:
    """Return "out", or the first of "out-2", "out-3" ... that does not exist here yet."""
    names = itertools.chain(["out"], (f"out-{number}" for number in itertools.count(2)))
    return next(name for name in names if not exists(name))
