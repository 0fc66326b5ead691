"""Show a run while it trains and write its results: the held-out curve, samples, figures, summary and last lines."""

import itertools
import json
import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from monograph import compat
from monograph.data.corpus import Corpus
from monograph.decode import Sampling, generate
from monograph.device import clock, default_device, describe
from monograph.errors import InputRefused
from monograph.evaluation import Evaluation, evaluate
from monograph.evaluation.yardsticks import accepted_share, yardsticks
from monograph.graph import capture as graph
from monograph.graph.inspect import modes_kept
from monograph.model.llama import Llama
from monograph.planner.defaults import most_updates, updates_for
from monograph.predict.roofline import flops_per_token, mfu
from monograph.profiling.memory import reset_peak_memory
from monograph.report.in_progress import PageInProgress
from monograph.report.quantities import count, counted, duration, megabytes, memory
from monograph.report.run_report import About, write_report, write_run_page
from monograph.rl.preferences import PreferenceLoss
from monograph.rl.prompts import Prompts
from monograph.rl.rollouts import Rollouts
from monograph.run.folder import Run
from monograph.run.progress import Progress, TrainingBlock
from monograph.run.started import told
from monograph.session.deadline import Deadline
from monograph.session.eager_start import MARK
from monograph.session.gauges import Alarm, Gauges
from monograph.session.opening import opening_of
from monograph.session.preferring import preferred_in
from monograph.session.ranks import show
from monograph.session.reinforcing import rewards_in
from monograph.session.session import Session
from monograph.storage.reading import contents, exists, is_folder, parse_json


def finished(run: Run) -> dict[str, Any] | None:
    """Return the summary of a run that has ended; None if it has not, or if its last checkpoint is gone."""
    last: dict[str, Any] = {}
    with suppress(InputRefused):  # a row is damaged; resuming from a checkpoint verifies the rows that stay
        last = next(reversed(run.rows()), {})
    summary: dict[str, Any] | None = last.get("summary")
    if summary and not is_folder(run.checkpoints / f"step-{summary['update']:08d}"):
        return None
    return summary


SAMPLE_SHARES = (0.15, 0.5, 1.0)
SAMPLE_TOKENS = 48
RECENT = 25  # updates whose rate is averaged
JUDGED_TOKENS = 160  # of each text whose lines Python's tokenizer judges at the end
LARGEST_YARDSTICK_BYTES = 64_000_000
YARDSTICKS_LEAVE_S = 120.0  # where less time is left for training, they are not computed
# After COOLING_FROM of the time, a run that would take more than LATE times its time is shortened. Its updates then end
# at END_SHARE of the time, which leaves the rest for the last evaluation and samples.
COOLING_FROM, LATE, END_SHARE = 0.7, 1.03, 0.97


class Reporter:
    """The reporter of one run, which shows it while it trains and its results at the end."""

    def __init__(self, session: Session, progress: Progress):
        """Compute or look up the yardsticks, choose the prompt and read the rows of earlier processes of the run."""
        self.session, self.progress = session, progress
        self.rows, self.first = session.run.rows(), session.engine.index
        self.yardsticks = self._yardsticks()
        reset_peak_memory(session.engine.step.device)  # memory of the yardsticks does not count
        self.opening = opening_of(
            session.corpus, session.model_config, session.plan.answer_regex, session.plan.answer_schema
        )
        self.python = session.corpus.name == "stdlib"
        self.recompiles = 0
        self.gauges = Gauges(session.engine.step.device)
        self.alarm, self.read = Alarm(self.gauges), dict[str, Any](tokens_per_s=None)  # for the rows to come
        self.rates: deque[float] = deque(maxlen=RECENT)
        self.update_s: deque[float] = deque(maxlen=RECENT)
        self.held_out: Evaluation | None = None
        self.scored_rows = 0  # by the last evaluation
        self.page, self.deadline = PageInProgress(self._write_page), Deadline(session)
        self.lines = (0, 0)

    @property
    def scores_untrained(self) -> bool:
        """Return whether the run shows what the model was worth before its first update."""
        return self.session.reward is not None or bool(self.session.text.stats.conversations)

    def sample_updates(self) -> list[int]:
        """Return the updates after which a sample is drawn."""
        return [max(1, round(share * self.session.updates)) for share in SAMPLE_SHARES]

    def block(self) -> TrainingBlock:
        """Return the live block with the points and samples of earlier processes of the run."""
        updates = self.session.updates
        tokens = updates * self.session.plan.tokens_per_update
        name, key = "bits/byte", "eval_bits_per_byte"
        if self.session.reward:
            name, key, drawing = "reward", "eval_reward", self.session.drawer.options
            tokens = updates * drawing.prompts * drawing.group * drawing.max_new_tokens
        if self.session.plan.preference:
            name, key = "accuracy", "eval_accuracy"
        start = self.session.engine.index
        block = TrainingBlock(self.progress.screen, updates, tokens, self.yardsticks, start, name)
        for row in self.rows:
            if row.get(key) is not None:
                block.held_out(row["tokens"], row[key])
            if "sample" in row:
                block.sample(row["share"], row["sample"])
        return block

    def rate(self, updates: int, seconds: float, row: Mapping[str, Any]) -> float:
        """Return the tokens per second of the last updates, the last of which has this row; notice if they are few."""
        self.update_s.append(seconds / updates)
        self.rates.append(self._tokens / self.update_s[-1])
        self.read = {"tokens_per_s": self.rates[-1] or None, **self.gauges.read()}
        # How fast answers are drawn depends on their lengths.
        if not self.session.reward and (slower := self.alarm.note(self.rates[-1], seconds)):
            self.session.run.log({"update": row["update"], "tokens": row["tokens"], "slower": slower})
            now, before = (count(slower[name], "tok/s") for name in ("tokens_per_s", "before"))
            why = slower["why"] or "no cause found"
            self.progress.line("warning", f"slower: {now}, {before} before: {why}")
        return self.rates[-1]

    @property
    def recent_s(self) -> float:
        """Return the median seconds of the last few updates; 0 before the first."""
        return statistics.median_high(self.update_s) if self.update_s else 0.0

    @property
    def _tokens(self) -> float:
        """Return the mean number of tokens of an update, without padding; of the last update, if answers are drawn."""
        if isinstance(self.session.batches, Rollouts):
            return self.session.batches.numbers["drawn_tokens"]
        return self.session.text.stats.packed_share * self.session.plan.tokens_per_update

    def evaluate(self, block: TrainingBlock, update: int, limit: int | None, **mark: Any) -> None:
        """Score held-out rows, or answers to held-out prompts, log the scores and show them.

        The row of the metrics has the entries of `mark`, too.
        """
        if isinstance(self.session.corpus, Prompts):
            self._measure(block, update)
            return
        rows = self.session.corpus.held_out
        if len(rows) == 0:
            return
        # The engine cuts these batches into micro-batches, for all of which a streamed model crosses the link once.
        size = self.session.batches.rows_per_window
        used, began = min(limit or len(rows), len(rows)), clock()
        self.held_out = evaluate(self.session.engine, rows, batch_rows=size, limit=limit)
        self.deadline.row_s, self.scored_rows = (clock() - began) / used, used
        tokens = int(self.session.engine.step.tokens)
        bits = self.held_out.bits_per_byte
        scores = {"eval_loss": self.held_out.loss, "eval_bits_per_byte": bits}
        if isinstance(loss := self.session.engine.step.loss, PreferenceLoss):
            figures, tokens, bits = loss.taken(self.session.world.gathered), self.session.answer_tokens, None
            scores |= {f"eval_{name}": figures[name] for name in ("accuracy", "margin")}
            block.held_out(tokens, figures["accuracy"])
        self.session.run.log({"update": update, "tokens": tokens, **scores, "eval_rows": used, **mark})
        if bits is not None and math.isfinite(bits):
            block.held_out(tokens, bits)

    def _measure(self, block: TrainingBlock, update: int) -> None:
        session = self.session
        if not session.corpus.held_out:
            return
        numbers = session.drawer.measure()
        session.run.log({"update": update, "tokens": session.answer_tokens, **numbers})
        block.held_out(session.answer_tokens, numbers["eval_reward"])

    def sample(self, block: TrainingBlock, update: int) -> None:
        """Log and show an answer to the first prompt with its reward, or a Llama's continuation of the run's prompt.

        Both always have the same random draws, so that a resumed run shows the same.
        """
        began = clock()
        if isinstance(self.session.batches, Rollouts):
            prompt, answer, reward = self.session.drawer.sample()
            sample = f"{prompt}{answer} (reward {reward:g})"
        else:
            text = next(iter(self._write(1, SAMPLE_TOKENS)), None)
            if text is None:
                return
            sample = self.opening.text + text
        self.deadline.sample_s = clock() - began
        share = update / self.session.updates
        self.session.run.log({"update": update, "share": share, "sample": sample})
        block.sample(share, sample)

    def keep_time(self, update: int) -> None:
        """Begin the cool-down early if the time will not suffice, once the machine's speed is known well.

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
            self.progress.line("time", f"{slower}: cooling down from update {update:,}, ending at {ends:,}")

    def _too_late(self, update: int) -> int:
        """Return the number of updates after which a run that is too slow should end; 0 if it is fast enough."""
        session = self.session
        here_s = clock() - session.training_since_s
        if session.budget_s is None or session.cooled or here_s < COOLING_FROM * (session.budget_s - session.elapsed_s):
            return 0
        spent = session.spent_s
        # The last evaluation and the last samples come after the updates.
        per_update = self._per_update_s(update)
        until = END_SHARE * session.budget_s
        if spent + per_update * (session.updates - update) <= LATE * until:
            return 0
        left = max(until - spent, (1 - COOLING_FROM) / 2 * session.budget_s)  # a cool-down is worth more than time
        most = session.updates - update
        return update + min(most, updates_for(left, per_update, most))

    def _past_deadline(self, update: int) -> int:
        return self.deadline.last(update, self._per_update_s(update))

    def _per_update_s(self, update: int) -> float:
        return max((clock() - self.session.training_since_s) / (update - self.first), self.recent_s)

    def end(self, block: TrainingBlock) -> None:
        """Run the last evaluation, over all held-out rows, and draw the last sample, as far as there is time."""
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
        origin = [*told(self.session.run), ("seed", str(self.session.plan.seed)), ("data", self._data)]
        if self.session.cooled:
            begun, end = self.session.cooled
            why = f"training was slower than measured at the start, so the cool-down began at update {begun:,}"
            origin.append(("length", f"{end:,} updates instead of {self.session.plan.updates:,}: {why}"))
        return About(self.yardsticks, samples, self._moments(rows), origin)

    def _moments(self, rows: Sequence[Mapping[str, Any]]) -> list[tuple[int, str]]:
        """Return the updates at which the learning rate's curve has a kink, with the reasons."""
        moments, warmup = [], self.session.plan.warmup_updates
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

    @property
    def _data(self) -> str:
        """Return the source of the run's text or prompts, and how large it is."""
        data = self.session.corpus
        if isinstance(data, Prompts):
            return f"{data.name}: {counted(len(data.train), 'prompt')}, {len(data.held_out):,} held out"
        stats = data.stats
        parts = [counted(stats.files, "file"), megabytes(stats.bytes), f"{count(stats.tokens)} tokens"]
        if stats.conversations:
            parts.append(counted(stats.conversations, "conversation"))
        return f"{data.name}: {', '.join(parts)}"

    def finish(self) -> dict[str, Any]:
        """Write the report, print the results and the next commands; return the summary, the object of `--json`."""
        session, progress = self.session, self.progress
        summary, trained = self._summary(), duration(session.spent_s)
        rows = session.run.rows()
        with progress.stage("report", str(session.run.report)) as stage:
            if self.deadline.figures:
                write_report(session.run.folder, summary, rows, self._about(rows))
            else:
                write_run_page(session.run.folder, summary, rows, self._about(rows), "")
                stage.result = "without PNG files: no time for them"
        session.run.log({"update": summary["update"], "summary": summary})
        progress.gap()
        progress.line("done", f"{trained} of training{self._planned()}{self._in_all()}{self._standing()}")
        peak = summary["peak_memory_bytes"]
        needed = "not measured" if peak is None else memory(peak)
        if (planned := session.plan.peak_memory_bytes) is not None:
            at_most = "at most " if session.reward else ""  # for the longest prompts and answers
            needed += f" ({at_most}{memory(planned)} planned)"
        compiled = "" if session.eager_reason else f"   {counted(self.recompiles, 'recompile')}"
        skipped = counted(sum(bool(row.get("skipped")) for row in rows), "skipped update")
        progress.line("", f"peak memory {needed}{compiled}   {skipped}   {session.run.folder}")
        if isinstance(session.corpus, Corpus) and 0 < self.scored_rows < (held_out := len(session.corpus.held_out)):
            progress.line("", f"scored on {self.scored_rows:,} of {held_out:,} held-out rows: no time for more")
        if session.cooled:
            early = f"{session.updates:,} of {session.plan.updates:,} planned updates"
            progress.line("", f"{early}: the machine was slower than measured at the start, so it cooled down early")
        if self.lines[1]:
            progress.line("", f"{self.lines[0]} of {self.lines[1]} sampled lines are accepted by Python's tokenizer")
        progress.gap()
        self._next()
        return summary

    def _planned(self) -> str:
        """Return how long a run by the clock was planned to train; empty for other runs."""
        session = self.session
        if not session.budget_s:
            return ""
        planned = f" ({duration(session.budget_s)} planned)"
        if isinstance(session.corpus, Corpus):  # where the text's epochs ended the run, the time was only allowed
            decay, per_update = session.plan.update_rule.weight_decay, session.batches.rows_per_window
            if session.plan.updates >= most_updates(session.corpus.train.per_epoch, per_update, decay):
                planned = f" ({duration(session.budget_s)} at most)"
        return planned

    def _in_all(self) -> str:
        """Return how long a run whose whole time is limited took, and the limit; empty for other runs."""
        ends_s, minutes = self.session.ends_s, self.session.plan.wall_minutes
        if ends_s is None or minutes is None:
            return ""
        allowed_s = 60 * minutes
        return f", {duration(clock() - ends_s + allowed_s)} in all (of {duration(allowed_s)})"

    def _summary(self) -> dict[str, Any]:
        session = self.session
        machine = describe(default_device())
        rows = session.run.rows()
        last: dict[str, Any] = next((row for row in reversed(rows) if "train_loss" in row), {})
        rates = [row["tokens_per_s"] for row in rows[len(self.rows) :] if row.get("tokens_per_s")] or self.rates
        rate = statistics.median(rates) if rates else None
        config, peak = session.model_config, machine.peak_flops.get(session.plan.precision)
        peak = peak * session.world.size if peak else None
        length, adapters = session.plan.sequence_length, session.adapter_params
        use = mfu(rate, flops_per_token(config, length, adapters), peak) if rate and config and peak else None
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
            "dtype": session.plan.precision,
            "params": session.params,
            "passed_over": session.corpus.skipped,
            **rewards_in(rows),
            **preferred_in(rows),
            **({"labelled": True} if self._labelled else {}),
        }

    @property
    def _labelled(self) -> bool:
        return self.session.plan.preference is not None and self.session.plan.preference.labelled

    def _standing(self) -> str:
        if self.session.reward:
            end = rewards_in(self.session.run.rows())
            held = f", held-out {end['eval_reward']:.3f}" if end["eval_reward"] is not None else ""
            apart = end["drawn_minus_scored_max"]
            scored = f"; log-probabilities drawn and scored differ by up to {apart:.1g} nats" if apart else ""
            return f"   reward {end['reward']:.3f} ({end['reward_first']:.3f} at the start){held}{scored}"
        if not self.held_out:
            return ""
        if self.session.plan.preference:
            end = preferred_in(self.session.run.rows())
            if self._labelled:
                return f"   agrees with the labels of {end['eval_accuracy']:.1%} of the held-out answers"
            return f"   prefers the chosen answer in {end['eval_accuracy']:.1%} of the held-out pairs"
        if self.session.text.stats.conversations:
            before = [row["eval_loss"] for row in self.session.run.rows() if row.get("eval_loss") and not row["update"]]
            compared = f" ({before[0]:.3f} before)" if before else ""
            return f"   held-out answers {self.held_out.loss:.3f} nats/token{compared}"
        bits = self.held_out.bits_per_byte
        if bits is None:
            return f"   held-out loss {self.held_out.loss:.4g}"
        ranked = sorted(self.yardsticks.items(), key=lambda item: -item[1])
        below = [f"{name} {value:.2f}" for name, value in ranked if bits < value]
        above = [f"{name} {value:.2f}" for name, value in ranked if bits >= value]
        text = f"   held-out {bits:.2f} bits/byte" + (" of averaged weights" if self.session.plan.averaged else "")
        text += f"   below {', '.join(below)}" if below else ""
        return text + (f"; next: {above[0]} (train longer: --minutes)" if above else "")

    def _next(self) -> None:
        name = self.session.run.handle
        longer = ("my_texts/",) if self.python else ("--from", name)  # train on the user's own text, or go on
        more: list[tuple[str, ...]] = [("train", *longer, "--minutes", "30")]
        if self._writes:
            more = [(self.opening.command, name, *self.opening.arguments), ("export", name, "--to", _free()), *more]
        elif self.held_out:
            more = [("evaluate", name), *more]
        judged = self.session.plan.settings.prefer.loss is not None
        if self.held_out and name == "last" and not judged:  # a sweep without arguments takes the newest run
            more = [more[0], ("sweep",), *more[1:]]
        for index, arguments in enumerate(more):
            show(self.progress, "next" if index == 0 else "", *arguments)

    @property
    def _writes(self) -> bool:
        """Return whether the model can continue a text; a Llama with one position has no room for a second token."""
        config = self.session.model_config
        return config is not None and config.max_position_embeddings > 1

    def _write(self, n: int, tokens: int) -> list[str]:
        if not self._writes:
            return []
        engine, step = self.session.engine, self.session.engine.step
        sampling = Sampling(temperature=0.7, top_k=50, seed=self.session.plan.seed)
        with modes_kept(engine.model), step.averaged(), step.assembled() as model, graph.set_aside(step):
            if not isinstance(model, Llama) or not self.session.world.leads:
                return []
            tokenizer, opening = self.session.corpus.tokenizer, self.opening
            written = generate(model, tokenizer, [opening.begun], sampling, max_tokens=tokens, stop=opening.stop, n=n)
            return [completion.text for completion in written]

    def _yardsticks(self) -> dict[str, float]:
        corpus = self.session.corpus
        if isinstance(corpus, Prompts):
            return {}
        # Answers depend on their questions, which a compressor is not given.
        comparable = len(corpus.held_out) and not corpus.stats.conversations
        if not (comparable and self.session.world.leads) or corpus.stats.bytes > LARGEST_YARDSTICK_BYTES:
            return {}
        kept = corpus.folder / "yardsticks.json"
        with suppress(ValueError, InputRefused):
            return parse_json(contents(kept) or b"")
        if self.session.left_s < YARDSTICKS_LEAVE_S:
            return {}
        with self.progress.stage("yardstick", "gzip, xz, trigram and order-6 models of the same files") as stage:
            values = yardsticks(b"".join(corpus.train.texts()), b"".join(corpus.held_out.texts()), stage.report)
            stage.result = ", ".join(f"{name} {value:.2f}" for name, value in values.items())
        # This file is only a cache: without it, the next run computes the yardsticks again.
        with suppress(OSError):
            kept.write_text(json.dumps(values))
        return values


def _free() -> str:
    """Return a folder name that does not exist here yet."""
    names = itertools.chain(["out"], (f"out-{number}" for number in itertools.count(2)))
    return next(name for name in names if not exists(name))
