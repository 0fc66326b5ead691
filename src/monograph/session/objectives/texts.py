"""Learn from texts or from conversations. In a text each token is a target; in a conversation only
the tokens of the answers are.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Self

from torch import nn

from monograph.data.batches import Batches
from monograph.data.corpus import Corpus, corpus
from monograph.data.options import ReadingOptions
from monograph.data.piece_lengths import PieceLengths
from monograph.engine import Engine
from monograph.errors import InputRefused
from monograph.evaluation import Evaluation, evaluate
from monograph.evaluation.text import evaluate_members
from monograph.graph.trial import Trial
from monograph.loss import Batch, Loss, MtpLoss
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.report.quantities import count, counted, megabytes
from monograph.run.progress import Progress
from monograph.session.objective import (
    CurveOfScores,
    HeldOutScore,
    Objective,
    RunWindows,
    SweptTask,
)
from monograph.session.plan import RunPlan
from monograph.session.sample_prompt import SamplePrompt, sample_prompt_from_corpus


class Texts(Objective):
    """Learn from texts and conversations. This is the way if no key chooses another one."""

    sweeps = True

    def open(self, plan: RunPlan, progress: Progress) -> "TextTask":
        """Read the run's text; see `open_corpus`."""
        return TextTask(open_corpus(plan.job.reading, progress))


def open_corpus(reading: ReadingOptions, progress: Progress) -> Corpus:
    """Read, tokenise and pack the run's text, and print its size and the notes on it.

    Args:
        reading: how the text is read.
        progress: the display that prints the lines.

    Raises:
        InputRefused: the text has fewer tokens than one row, or cannot be used.
    """
    source = reading.source
    sources = [source] if isinstance(source, str) else source
    name = "Python's standard library" if source == "stdlib" else ", ".join(sources[:3])
    if len(sources) > 3:
        name += ", ..."
    with progress.stage("data", name) as stage:
        # The fields of `ReadingOptions` are the arguments of `corpus`.
        data = corpus(**vars(reading), progress=stage.report)
        stats = data.stats
        length = reading.sequence_length
        if stats.tokens < length and not stats.conversations:
            raise InputRefused(
                f"{data.name}: {stats.tokens} training tokens, fewer than one row of {length}; "
                "give more text or shorten sequence_length"
            )
        of_what = " of answers" if stats.conversations else ""
        stage.result = f"{counted(stats.files, 'file')}, {megabytes(stats.bytes)}{of_what}"
    for line in data.notes:
        progress.line("note", line)
    if stats.conversations:
        is_chat = data.tokenizer.config.template is not None
        progress.line("chats" if is_chat else "records", _size_of_conversations(data))
    else:
        progress.line("tokens", _size_of_text(data))
    return data


def _size_of_text(data: Corpus) -> str:
    """Return the line on the tokens of a text."""
    stats = data.stats
    held_out = "nothing held out"
    if stats.held_out_documents:
        documents = counted(stats.held_out_documents, "document")
        held_out = f"held out: {documents}, {megabytes(stats.held_out_bytes)}"
    return (
        f"{count(stats.tokens)} tokens, vocabulary {data.vocab_size:,}, {stats.bytes_per_token:.2f} bytes/token, "
        f"rows {stats.packed_share:.1%} full; {held_out}"
    )


def _size_of_conversations(data: Corpus) -> str:
    """Return the line on the number of conversations and of their tokens."""
    stats = data.stats
    # A template may write the earlier turns of a conversation differently once another turn
    # follows. Each answer then has its own sequence.
    in_sequences = ""
    if data.train.documents > stats.conversations:
        in_sequences = f" in {counted(data.train.documents, 'sequence')}"
    held_out = "nothing held out"
    if data.held_out.conversations:
        held_out = f"held out: {counted(data.held_out.conversations, data.record_noun)}"
    return (
        f"{counted(stats.conversations, data.record_noun)}{in_sequences}, {count(stats.tokens)} of "
        f"{count(data.train.inputs)} tokens trained ({stats.trained_share:.1%}), "
        f"rows {stats.packed_share:.1%} full; {held_out}"
    )


class RowsTask(SweptTask):
    """The task of records that become rows of tokens: texts, conversations, or pairs of answers."""

    data: Corpus

    def __init__(self, data: Corpus):
        """Take the records."""
        self.data = data

    @property
    def records_per_epoch(self) -> int:
        """Return the number of rows of an epoch."""
        return self.data.train.per_epoch

    @property
    def piece_lengths(self) -> PieceLengths:
        """Return the lengths of the pieces of texts, conversations or answers in the rows."""
        return self.data.train.piece_lengths

    def windows(self, position: int, seed: int | None, skip: Sequence[Sequence[int]]) -> Batches:
        """Return the windows of rows; see `Task.windows`."""
        plan = self.current_plan()
        seed = plan.job.seed if seed is None else seed
        pins_memory = self.engine.step.device.type == "cuda"
        tokens_per_update = plan.training.tokens_per_update
        return self.data.batches(
            tokens_per_update, seed, position, plan.job.span.epochs, pins_memory, skip
        )

    def first_window(self, plan: RunPlan) -> Batch:
        """Return the first window of a run; see `SweptTask.first_window`."""
        batches = self.data.batches(plan.training.tokens_per_update, seed=plan.job.seed)
        window = next(batches)
        batches.close()
        return window

    @property
    def description(self) -> str:
        """Return the source of the text, and its size."""
        stats = self.data.stats
        sizes = [
            counted(stats.files, "file"),
            megabytes(stats.bytes),
            f"{count(stats.tokens)} tokens",
        ]
        if stats.conversations:
            sizes.append(counted(stats.conversations, "conversation"))
        return f"{self.data.name}: {', '.join(sizes)}"

    def describe_amount(self, rows_per_window: int, updates: int) -> str:
        """Return the tokens of an update and of all updates, and the rows of an update."""
        training = self.current_plan().training
        all_tokens = count(updates * training.tokens_per_update)
        return (
            f"{training.tokens_per_update:,} tokens = {all_tokens}, "
            f"{counted(rows_per_window, 'row')} of {training.length}"
        )

    def max_tokens(self, updates: int) -> int:
        """Return the number of tokens of the updates if all rows are full."""
        return updates * self.current_plan().training.tokens_per_update

    def tokens_of_last_update(self, windows: RunWindows) -> float:
        """Return the mean number of tokens of all updates, without padding.

        Updates differ little, as the rows of a window are taken at random.
        """
        return self.data.stats.packed_share * self.current_plan().training.tokens_per_update

    @property
    def held_out_rows(self) -> int:
        """Return the number of rows of the held-out text."""
        return len(self.data.held_out)

    @property
    def scores_initial_weights(self) -> bool:
        """Return True for conversations: the model that a run on them begins from is usually trained
        already, so its first score says something.
        """
        return bool(self.data.stats.conversations)

    def score_held_out(
        self, rows_per_window: int, limit: int | None
    ) -> tuple[Evaluation, int] | None:
        """Score held-out rows.

        Args:
            rows_per_window: rows of a batch.
            limit: the maximum number of rows to score; None means all.

        Returns:
            The evaluation, and the number of rows that were scored; None if no rows are held out.
        """
        rows = self.data.held_out
        if len(rows) == 0:
            return None
        # The engine cuts each batch into micro-batches. A streamed model's weights are copied to
        # the device once for a batch, so batches are as large as windows.
        evaluation = evaluate(self.engine, rows, batch_rows=rows_per_window, limit=limit)
        return evaluation, min(limit or len(rows), len(rows))

    def evaluate(self, rows_per_window: int, limit: int | None) -> HeldOutScore | None:
        """Return the scores of held-out rows; see `held_out_score`."""
        scored = self.score_held_out(rows_per_window, limit)
        return None if scored is None else self.held_out_score(*scored)

    @property
    def has_held_out(self) -> bool:
        """Return whether there are held-out rows."""
        return self.held_out_rows > 0

    @abstractmethod
    def held_out_score(self, evaluation: Evaluation, rows: int) -> HeldOutScore:
        """Return the score of the held-out rows that the engine has just scored.

        Args:
            evaluation: the losses of the run.
            rows: the number of rows.
        """

    def evaluate_members(
        self, members: Sequence[Self], engine: Engine, batch_rows: int, limit: int | None
    ) -> list[HeldOutScore | None]:
        """Score held-out rows by each member of an engine; see `SweptTask.evaluate_members`."""
        held_out = self.data.held_out
        evaluations = evaluate_members(engine, held_out, batch_rows=batch_rows, limit=limit)
        rows = min(limit or len(held_out), len(held_out))
        return [
            member.held_out_score(evaluation, rows)
            for member, evaluation in zip(members, evaluations, strict=True)
        ]

    def describe_updates(self, plan: RunPlan, updates: int) -> str:
        """Return the tokens of an update, and of all updates."""
        tokens_per_update = plan.training.tokens_per_update
        return f"{tokens_per_update:,} tokens = {count(updates * tokens_per_update)} each"

    def sample_prompt(self, config: LlamaConfig | None) -> SamplePrompt:
        """Return a prompt from the held-out text, or from the training text if none is held out."""
        return sample_prompt_from_corpus(self.data, config, self.is_chat)

    @property
    def is_chat(self) -> bool:
        """Return whether records of conversations are chats, for which there is a template."""
        return self.data.tokenizer.config.template is not None


class TextTask(RowsTask):
    """The task of `Texts`."""

    score = CurveOfScores("bits/byte", "eval_bits_per_byte")
    has_plain_updates = True

    def loss(self, plan: RunPlan, model: nn.Module) -> Loss | None:
        """Return the loss of a model with a head for multi-token prediction; None for any other."""
        if not isinstance(model, Llama) or model.mtp is None:
            return None
        return MtpLoss() if plan.job.mtp_weight is None else MtpLoss(plan.job.mtp_weight)

    def figures(self, windows: RunWindows) -> dict[str, Any]:
        """Return the loss of a head for multi-token prediction in the last update; see `Task.figures`."""
        loss = self.engine.loss
        if not isinstance(loss, MtpLoss):
            return {}
        return {"mtp_loss": loss.take_mean(self.world.sum)}

    def describe_trial(self, trial: Trial) -> str:
        """Return the loss, the loss of a random guess, and the number of gradients."""
        guess_loss = math.log(self.data.vocab_size)
        return f"loss {trial.loss:.2f} (random guess: {guess_loss:.2f}), {trial.gradient_count} gradients, all finite"

    def held_out_score(self, evaluation: Evaluation, rows: int) -> HeldOutScore:
        """Return the loss and the bits per byte of held-out rows."""
        entries = {
            "eval_loss": evaluation.loss,
            "eval_bits_per_byte": evaluation.bits_per_byte,
            "eval_rows": rows,
        }
        return HeldOutScore(self.engine.tokens, entries, evaluation.bits_per_byte, evaluation)

    def describe_result(
        self,
        rows: Sequence[Mapping[str, Any]],
        held_out: Evaluation | None,
        yardsticks: Mapping[str, float],
    ) -> str:
        """Return the bits per byte of the held-out text next to those of the yardsticks; for
        conversations, the held-out loss next to the loss of the initial weights.
        """
        if not held_out:
            return ""
        if self.data.stats.conversations:
            text = f"   held-out answers {held_out.loss:.3f} nats/token"
            initial_losses = [
                row["eval_loss"] for row in rows if row.get("eval_loss") and row["update"] == 0
            ]
            if initial_losses:
                text += f" ({initial_losses[0]:.3f} before)"
            return text
        bits = held_out.bits_per_byte
        if bits is None:
            return f"   held-out loss {held_out.loss:.4g}"
        text = f"   held-out {bits:.2f} bits/byte"
        if self.current_plan().averaged:
            text += " of averaged weights"
        from_worst = sorted(yardsticks.items(), key=lambda item: -item[1])
        beaten = [f"{name} {value:.2f}" for name, value in from_worst if bits < value]
        not_beaten = [f"{name} {value:.2f}" for name, value in from_worst if bits >= value]
        if beaten:
            text += f"   below {', '.join(beaten)}"
        if not_beaten:
            text += f"; next: {not_beaten[0]} (train longer: --minutes)"
        return text

    @property
    def text_for_compressors(self) -> Corpus | None:
        """Return the text; None for conversations, since a compressor is not given the questions on
        which answers depend.
        """
        return None if self.data.stats.conversations else self.data


OBJECTIVE = Texts()
