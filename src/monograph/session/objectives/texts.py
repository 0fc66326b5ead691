"""Learn from texts, and from the answers in conversations: each token is a target."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from monograph.data.batches import Batches
from monograph.data.corpus import Corpus, corpus
from monograph.data.options import ReadingOptions
from monograph.errors import InputRefused
from monograph.evaluation import Evaluation, evaluate
from monograph.graph.trial import Trial
from monograph.model.config import LlamaConfig
from monograph.report.quantities import count, counted, megabytes
from monograph.run.progress import Progress
from monograph.session.objective import HeldOutScore, Objective, RunWindows, Task
from monograph.session.opening import Opening, opening_of
from monograph.session.plan import RunPlan


class Texts(Objective):
    """Learn from texts and conversations; where no key chooses another objective, this is it."""

    def open(self, plan: RunPlan, progress: Progress) -> "TextTask":
        """Read the run's text; see `open_corpus`."""
        return TextTask(open_corpus(plan.job.reading, progress))


def open_corpus(reading: ReadingOptions, progress: Progress) -> Corpus:
    """Read, tokenise and pack a text of at least one row, and print its size and the notes on it.

    Args:
        reading: how the text is read.
        progress: the display that prints the lines.
    """
    source = reading.source
    sources = [source] if isinstance(source, str) else source
    name = "Python's standard library" if source == "stdlib" else ", ".join(sources[:3])
    with progress.stage("data", name + (", ..." if len(sources) > 3 else "")) as stage:
        data = corpus(**vars(reading), progress=stage.report)
        stats = data.stats
        length = reading.sequence_length
        if stats.tokens < length and not stats.conversations:
            rows = f"{stats.tokens} training tokens, fewer than one row of {length}"
            raise InputRefused(f"{data.name}: {rows}; give more text or shorten sequence_length")
        held = stats.held_out_documents
        of_what = " of answers" if stats.conversations else ""
        stage.result = f"{counted(stats.files, 'file')}, {megabytes(stats.bytes)}{of_what}"
    for line in data.notes:
        progress.line("note", line)
    if stats.conversations:
        progress.line(
            "records" if data.tokenizer.config.template is None else "chats", _conversations(data)
        )
        return data
    progress.line(
        "tokens",
        f"{count(stats.tokens)} tokens, vocabulary {data.vocab_size:,}, {stats.bytes_per_token:.2f} bytes/token, "
        f"rows {stats.packed_share:.1%} full; "
        + (
            f"held out: {counted(held, 'document')}, {megabytes(stats.held_out_bytes)}"
            if held
            else "nothing held out"
        ),
    )
    return data


def _conversations(data: Corpus) -> str:
    stats, held = data.stats, data.held_out
    in_all = count(data.train.inputs)
    # If a template writes earlier turns differently once more follow, each answer has its own
    # sequence.
    sequences = data.train.documents
    rows = f" in {counted(sequences, 'sequence')}" if sequences > stats.conversations else ""
    return (
        f"{counted(stats.conversations, data.record_noun)}{rows}, {count(stats.tokens)} of {in_all} tokens trained "
        f"({stats.trained_share:.1%}), rows {stats.packed_share:.1%} full; "
        + (
            f"held out: {counted(held.conversations, data.record_noun)}"
            if held.conversations
            else "nothing held out"
        )
    )


class RowsTask(Task):
    """Records that are rows of tokens: texts, conversations, or pairs of answers."""

    data: Corpus

    def __init__(self, data: Corpus):
        """Take what was read."""
        self.data = data

    @property
    def per_epoch(self) -> int:
        """Return the rows of an epoch."""
        return self.data.train.per_epoch

    def windows(self, position: int, seed: int | None, skip: Sequence[Sequence[int]]) -> Batches:
        """Return the windows of rows; see `Task.windows`."""
        plan = self.plan()
        pin = self.engine.step.device.type == "cuda"
        seed = plan.job.seed if seed is None else seed
        return self.data.batches(
            plan.training.tokens_per_update, seed, position, plan.job.span.epochs, pin, skip
        )

    @property
    def described(self) -> str:
        """Return the source of the text, and how large it is."""
        stats = self.data.stats
        parts = [
            counted(stats.files, "file"),
            megabytes(stats.bytes),
            f"{count(stats.tokens)} tokens",
        ]
        if stats.conversations:
            parts.append(counted(stats.conversations, "conversation"))
        return f"{self.data.name}: {', '.join(parts)}"

    def amount(self, rows_per_window: int, updates: int) -> str:
        """Return the tokens and rows of an update."""
        plan = self.plan()
        return (
            f"{plan.training.tokens_per_update:,} tokens = {count(updates * plan.training.tokens_per_update)}, "
            f"{counted(rows_per_window, 'row')} of {plan.training.length}"
        )

    def tokens_in_all(self, updates: int) -> int:
        """Return the tokens of all rows."""
        return updates * self.plan().training.tokens_per_update

    def tokens_of(self, windows: RunWindows) -> float:
        """Return the mean number of tokens of an update."""
        return self.data.stats.packed_share * self.plan().training.tokens_per_update

    @property
    def held_out_rows(self) -> int:
        """Return their number."""
        return len(self.data.held_out)

    @property
    def scores_untrained(self) -> bool:
        """Return whether answers are scored, of which a model that was trained before knows
        something.
        """
        return bool(self.data.stats.conversations)

    def scored(self, rows_per_window: int, limit: int | None) -> tuple[Evaluation, int] | None:
        """Return the loss of held-out rows and how many were scored; None if there are none."""
        rows = self.data.held_out
        if len(rows) == 0:
            return None
        # The engine cuts these batches into micro-batches, for all of which a streamed model
        # crosses the link once.
        found = evaluate(self.engine, rows, batch_rows=rows_per_window, limit=limit)
        return found, min(limit or len(rows), len(rows))

    def opening(self, config: LlamaConfig | None) -> Opening:
        """Return a prompt from the held-out text, or else from the training text."""
        return opening_of(self.data, config, self.is_chat)

    @property
    def is_chat(self) -> bool:
        """Return whether records, if there are any, are chats."""
        return self.data.tokenizer.config.template is not None


class TextTask(RowsTask):
    """The task of `Texts`."""

    score = "bits/byte", "eval_bits_per_byte"
    is_plain = True

    def trial_result(self, trial: Trial) -> str:
        """Return the loss beside that of a guess, and the gradients."""
        guess = math.log(self.data.vocab_size)
        return f"loss {trial.loss:.2f} (random guess: {guess:.2f}), {trial.gradients} gradients, all finite"

    def evaluate(self, rows_per_window: int, limit: int | None) -> HeldOutScore | None:
        """Return the loss of held-out rows."""
        scored = self.scored(rows_per_window, limit)
        if scored is None:
            return None
        found, rows = scored
        figures = {
            "eval_loss": found.loss,
            "eval_bits_per_byte": found.bits_per_byte,
            "eval_rows": rows,
        }
        return HeldOutScore(int(self.engine.step.tokens), figures, found.bits_per_byte, found)

    def standing(
        self,
        rows: Sequence[Mapping[str, Any]],
        held_out: Evaluation | None,
        yardsticks: Mapping[str, float],
    ) -> str:
        """Return the held-out loss, beside that of the yardsticks or of the weights that the run
        began from.
        """
        if not held_out:
            return ""
        if self.data.stats.conversations:
            before = [
                row["eval_loss"] for row in rows if row.get("eval_loss") and not row["update"]
            ]
            compared = f" ({before[0]:.3f} before)" if before else ""
            return f"   held-out answers {held_out.loss:.3f} nats/token{compared}"
        bits = held_out.bits_per_byte
        if bits is None:
            return f"   held-out loss {held_out.loss:.4g}"
        ranked = sorted(yardsticks.items(), key=lambda item: -item[1])
        below = [f"{name} {value:.2f}" for name, value in ranked if bits < value]
        above = [f"{name} {value:.2f}" for name, value in ranked if bits >= value]
        text = f"   held-out {bits:.2f} bits/byte" + (
            " of averaged weights" if self.plan().averaged else ""
        )
        text += f"   below {', '.join(below)}" if below else ""
        return text + (f"; next: {above[0]} (train longer: --minutes)" if above else "")

    @property
    def compressible(self) -> Corpus | None:
        """Return the text; answers depend on their questions, which a compressor is not given."""
        return None if self.data.stats.conversations else self.data


OBJECTIVE = Texts()
